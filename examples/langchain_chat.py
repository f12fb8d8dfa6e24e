"""A chain, a stream and structured output of LangChain, with a running server in place of OpenAI's.

pip install 'penstock[server,grammar]' langchain-openai
penstock serve                                        # in another terminal
python examples/langchain_chat.py [http://127.0.0.1:8080/v1]
"""

import sys

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

ANIMAL = {
    "title": "animal",
    "description": "An animal of the forest.",
    "type": "object",
    "properties": {"name": {"enum": ["fox", "crow", "wolf"]}, "age": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080/v1"
    model = ChatOpenAI(base_url=url, api_key="none", model="demo", temperature=0.8, seed=1, max_tokens=200)
    prompt = ChatPromptTemplate.from_messages([("system", "You tell short stories."), ("user", "A story of a {who}.")])
    chain = prompt | model | StrOutputParser()

    print(chain.invoke({"who": "fox"}))
    for piece in chain.stream({"who": "crow"}):
        print(piece, end="", flush=True)
    print()
    print(chain.batch([{"who": "king"}, {"who": "queen"}]))  # decoded together

    for method in ("json_schema", "function_calling"):
        print(method, model.with_structured_output(ANIMAL, method=method).invoke("Which animal is it?"))


if __name__ == "__main__":
    main()
