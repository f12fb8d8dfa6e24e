"""A conversation in the terminal: answers appear as they are written, and what was said before is not computed again.

python examples/chat_loop.py [MODEL]
"""

import sys
from typing import Any

import penstock


def main() -> None:
    llm = penstock.load(sys.argv[1] if len(sys.argv) > 1 else None)
    messages: list[dict[str, str]] = []
    states: list[Any] = []
    with llm.session() as session:
        while True:
            try:
                messages.append({"role": "user", "content": input("> ")})
            except EOFError:
                break
            session.advance(llm.chat_tokens(messages), states)  # reads what neither session nor states hold yet
            states = [session.snapshot()]  # to go back to, should the answer's text give other tokens than it had
            answer = ""
            for chunk in session.stream(max_tokens=200, temperature=0.8):
                answer += chunk.text
                print(chunk.text, end="", flush=True)
            print()
            messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main()
