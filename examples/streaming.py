"""Text as it is written: in a loop, in an event loop beside other work, and until the reader has enough.

python examples/streaming.py [MODEL]
"""

import asyncio
import sys

import penstock


async def two_at_once(llm: penstock.LLM) -> list[str]:
    """Two streams share the model's steps, and the event loop goes on between their tokens."""

    async def read(prompt: str) -> str:
        return "".join([chunk.text async for chunk in llm.astream(prompt, max_tokens=12)])

    return await asyncio.gather(read("The king"), read("The queen"))


def main() -> None:
    llm = penstock.load(sys.argv[1] if len(sys.argv) > 1 else None)

    for chunk in llm.stream("Once upon a time", max_tokens=20, temperature=0.8, seed=1, logprobs=1):
        print(chunk.text, end="", flush=True)  # chunk.token, chunk.logprob; finish_reason on the last one
    print(f"\nended: {chunk.finish_reason}")

    print(asyncio.run(two_at_once(llm)))

    text = ""
    stream = llm.stream("There was a girl who", max_tokens=500, temperature=0.8, seed=2)
    for chunk in stream:
        text += chunk.text
        if "." in text:  # a reader who leaves ends the request
            stream.close()
            break
    print(text)


if __name__ == "__main__":
    main()
