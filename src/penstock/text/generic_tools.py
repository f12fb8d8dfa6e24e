"""Tools for chat templates that have no place for them: listed in the system message, called in Qwen's form of JSON."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.text.tokenizer import Tokenizer

FORMAT = "qwen"  # of the calls, for parser and grammar

_LISTED = """You may call these functions, each described by a JSON schema:
<tools>
{tools}
</tools>
To call one, write its name and arguments that fit its schema as JSON between two tags, and nothing behind them:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>
What it returns comes in the next message, between <tool_response> and </tool_response>."""


def lacks_tools(tokenizer: Tokenizer) -> bool:
    """Whether a chat template writes no tools, whatever it is given."""
    return tokenizer.chat_template is not None and "tools" not in tokenizer.chat_template


def with_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], template: str
) -> list[dict[str, Any]]:
    """Messages in which tools, earlier calls (arguments as objects) and their results are text, with the roles that
    every template has.

    Results are what the user says next. The tools stand behind the system message, in one of their own, or before the
    first message where the template takes none.
    """
    made: list[dict[str, Any]] = []
    results = False  # the last message is made of them
    for message in messages:
        one = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
        if message["role"] == "assistant" and message.get("tool_calls"):
            one["content"] = "\n".join([*filter(None, [one["content"]]), *map(_call, message["tool_calls"])])
        if message["role"] == "tool":
            one = {"role": "user", "content": f"<tool_response>\n{one['content']}\n</tool_response>"}
        if results and one["role"] == "user":
            made[-1]["content"] += f"\n{one['content']}"
        else:
            made.append(one)
        results = message["role"] == "tool"
    if not tools:
        return made
    listed = _LISTED.format(tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools))
    if made[0]["role"] == "system":
        made[0]["content"] = f"{made[0]['content']}\n\n{listed}".lstrip()
    elif _takes_system(template):
        made.insert(0, {"role": "system", "content": listed})
    else:
        made[0]["content"] = f"{listed}\n\n{made[0]['content']}"
    return made


def _takes_system(template: str) -> bool:
    """Whether it has a place for a system message: it names that role, or no role at all and writes each as it is."""
    return ("system" in template or "user" not in template) and "ystem role not supported" not in template


def _call(call: Mapping[str, Any]) -> str:
    function = call["function"]
    written = json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
    return f"<tool_call>\n{written}\n</tool_call>"
