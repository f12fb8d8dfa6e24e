"""Tools, calls and results as text, for chat templates that have no place for them."""

import json
from typing import Any

import pytest

from penstock.text.formats import parse_whole
from penstock.text.generic_tools import FORMAT, with_tools

CHATML = """{% for message in messages %}
{% if loop.first and messages[0]['role'] != 'system' %}{{ 'helpful' }}{% endif %}
{{ message['role'] + message['content'] }}{% endfor %}"""
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}user"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Ærø"}}}
USER = {"role": "user", "content": "Is it dry?"}


@pytest.mark.parametrize("template, role", [(CHATML, "system"), ("{{ messages }}", "system"), (NO_SYSTEM, "user")])
def test_tools_stand_where_the_template_has_a_place(template, role):
    made = with_tools([USER], [TOOL], template)
    assert made[0]["role"] == role and json.dumps(TOOL["function"]) in made[0]["content"]
    assert made[-1]["role"] == "user" and made[-1]["content"].endswith(USER["content"])
    assert len(made) == 1 + (role == "system")
    [listed, _] = with_tools([{"role": "system", "content": "Be brief."}, USER], [TOOL], template)
    assert listed["content"].startswith("Be brief.\n\n") and "<tool_call>" in listed["content"]
    assert with_tools([USER], [], template) == [USER]


def test_calls_and_results_become_text_that_the_parser_reads_back():
    asks = {"role": "assistant", "content": "I look.", "tool_calls": [CALL, CALL]}
    results = [{"role": "tool", "tool_call_id": "1", "content": text} for text in ("rain", "sun")]
    given = [USER, asks, *results, {"role": "user", "content": "And now?"}, {"role": "assistant", "content": "Dry."}]
    made = with_tools(given, [], CHATML)
    assert [message["role"] for message in made] == ["user", "assistant", "user", "assistant"]
    assert all(message.keys() == {"role", "content"} for message in made)
    first, second, more = made[2]["content"].split("</tool_response>\n")
    assert ("rain" in first, "sun" in second, more) == (True, True, "And now?")
    read = parse_whole(made[1]["content"], FORMAT, [TOOL])
    assert (
        read.content == "I look." and [json.loads(call.arguments) for call in read.tool_calls] == [{"city": "Ærø"}] * 2
    )
    assert given[1] is asks and asks["content"] == "I look."
