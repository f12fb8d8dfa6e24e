"""Functions that a model calls, through a running server and OpenAI's client.

pip install 'penstock[server,grammar]' openai
penstock serve                                        # in another terminal
python examples/tools.py [http://127.0.0.1:8080/v1]

The built-in demo model knows nothing of tools: tool_choice "required" holds it to the form of a call. A model that was
trained for them is asked with "auto", and decides itself.
"""

import json
import sys

from openai import OpenAI

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a town.",
            "parameters": {
                "type": "object",
                "properties": {"town": {"enum": ["Bremen", "Hameln"]}, "days": {"type": "integer", "maximum": 9}},
                "required": ["town", "days"],
                "additionalProperties": False,
            },
        },
    }
]


def weather(town: str, days: int) -> str:
    return f"{'sunny' if town == 'Bremen' else 'rain'} in {town} for {days} days"


def main() -> None:
    client = OpenAI(base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080/v1", api_key="none")
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "What will the weather be?"}]

    options = {"model": model, "tools": TOOLS, "max_tokens": 200, "seed": 1}
    first = client.chat.completions.create(
        messages=messages, tool_choice="required", parallel_tool_calls=False, **options
    )
    message = first.choices[0].message
    messages.append(message.model_dump(include={"role", "content", "tool_calls"}))
    for call in message.tool_calls or []:
        arguments = json.loads(call.function.arguments)
        result = {"weather": weather}[call.function.name](**arguments)
        print(f"{call.function.name}({arguments}) → {result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

    second = client.chat.completions.create(messages=messages, tool_choice="none", **options)
    print(second.choices[0].message.content)


if __name__ == "__main__":
    main()
