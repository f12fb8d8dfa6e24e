"""What the official client of OpenAI makes of the server."""

import json
import sys
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from penstock.server.guard import Access
from penstock.server.service import Options
from tests.server.common import PROMPT, scripted, serving
from tests.server.test_api import CALLS, TOOLS
from tests.text.test_grammar import fits


@pytest.fixture(scope="module")
def client(place):
    with OpenAI(base_url=f"{place.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


ASKED: dict[str, Any] = {"model": "demo", "messages": PROMPT, "max_tokens": 8, "temperature": 0}


def test_chat(client, llm):
    answer = client.chat.completions.create(**ASKED)
    assert answer.choices[0].message.content == llm.chat(PROMPT, max_tokens=8).text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 8 and answer.usage.prompt_tokens_details.cached_tokens >= 0
    assert answer._request_id.startswith("req_")


def test_chat_stream(client, llm):
    with client.chat.completions.create(**ASKED, stream=True, stream_options={"include_usage": True}) as chunks:
        found = list(chunks)
    assert found[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in found if chunk.choices)
    assert text == llm.chat(PROMPT, max_tokens=8).text
    assert found[-2].choices[0].finish_reason == "length"
    assert found[-1].choices == [] and found[-1].usage.completion_tokens == 8


def test_chat_stream_helper_gathers_the_same(client):
    asked = ASKED | {"max_tokens": 100, "stop": ["."]}
    with client.chat.completions.stream(**asked, n=2) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    whole = client.chat.completions.create(**asked)
    assert [choice.message.content for choice in final.choices] == [whole.choices[0].message.content] * 2


def test_completions_with_logprobs(client):
    answer = client.completions.create(model="demo", prompt="Once upon a time", max_tokens=4, temperature=0, logprobs=2)
    choice = answer.choices[0]
    assert "".join(choice.logprobs.tokens) == choice.text and len(choice.logprobs.top_logprobs[0]) == 2
    streamed = client.completions.create(
        model="demo", prompt="Once upon a time", max_tokens=4, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in streamed) == choice.text


def test_tools_streamed_and_whole(client, place, monkeypatch):
    asked = ASKED | {"max_tokens": 200, "tools": TOOLS}
    with scripted(monkeypatch, place, CALLS):
        message = client.chat.completions.create(**asked).choices[0].message
        with client.chat.completions.stream(**asked) as stream:
            for _ in stream:
                pass
            streamed = stream.get_final_completion().choices[0]
    for found in (message, streamed.message):
        assert [json.loads(call.function.arguments) for call in found.tool_calls] == [
            {"city": "Oslo", "days": 2},
            {"city": "Rome"},
        ]
    assert streamed.finish_reason == "tool_calls"
    # the answer goes back as it came, with a result, and the conversation goes on
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
    again = client.chat.completions.create(**ASKED | {"messages": [*PROMPT, message.to_dict(), result], "tools": TOOLS})
    assert again.choices[0].message.content is not None


def test_reasoning(client, place, monkeypatch):
    with scripted(monkeypatch, place, "<think>\nHm.\n</think>\n\nYes."):
        message = client.chat.completions.create(**ASKED | {"max_tokens": 60}).choices[0].message
    assert (message.reasoning_content, message.content) == ("Hm.", "Yes.")


def test_responses(client, place, monkeypatch):
    with scripted(monkeypatch, place, "<think>\nHm.\n</think>\n\nYes."):
        whole = client.responses.create(model="demo", input="Well?", max_output_tokens=60)
        with client.responses.stream(model="demo", input="Well?", max_output_tokens=60) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_response()
    assert whole.output_text == final.output_text == "Yes."
    assert whole.usage.output_tokens == final.usage.output_tokens > 0
    type(whole).model_validate(whole.to_dict())  # has every field that the client knows to be there
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    assert [item.type for item in final.output] == ["reasoning", "message"]
    assert "response.reasoning_text.delta" in kinds and "response.output_text.delta" in kinds


def test_models(client):
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"


def test_errors_are_the_clients_own_kinds(client, place, llm):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**ASKED | {"temperature": -1})
    assert refused.value.param == "temperature" and refused.value.code == "invalid_value"
    assert "temperature is -1, expected" in refused.value.message
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(**ASKED | {"model": "gpt-9"})
    assert missing.value.code == "model_not_found"
    with serving(llm, access=Access(keys=("right",))) as locked:
        with (
            OpenAI(base_url=f"{locked.url}/v1", api_key="wrong") as stranger,
            pytest.raises(openai.AuthenticationError),
        ):
            stranger.models.list()
        with OpenAI(base_url=f"{locked.url}/v1", api_key="right") as friend:
            assert friend.models.list().data


def test_a_failure_in_the_middle_of_a_stream_is_raised(client, place, monkeypatch):
    from penstock.engine.state import RequestState

    real = RequestState.take

    def fails(self: RequestState, drawn: Any, position: int) -> Any:
        if len(self.tokens) == 3:
            raise RuntimeError("broken")
        return real(self, drawn, position)

    monkeypatch.setattr(RequestState, "take", fails)
    found = []
    with pytest.raises(openai.APIError, match="its log says why"):
        for chunk in client.chat.completions.create(**ASKED, stream=True):
            found.append(chunk)
    assert 1 < len(found) < 6
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(**ASKED)


def test_the_example_of_the_manual_runs(place, capsys):
    manual = (Path(__file__).parents[2] / "docs" / "server.md").read_text()
    example = manual.partition("```python\n")[2].partition("```")[0]
    exec(example.replace("http://127.0.0.1:8080", place.url), {})
    assert len(capsys.readouterr().out) > 20


class Fox(BaseModel):
    red: bool
    legs: Literal[2, 4]


def test_json_schema(client):
    pytest.importorskip("llguidance")
    asked = ASKED | {"max_tokens": 200, "temperature": 1.0}
    for seed in range(3):
        parsed = client.chat.completions.parse(**asked, seed=seed, response_format=Fox).choices[0]
        assert parsed.finish_reason == "stop" and isinstance(parsed.message.parsed, Fox)
    whole = client.responses.parse(model="demo", input="A fox?", max_output_tokens=200, text_format=Fox)
    assert isinstance(whole.output_parsed, Fox)


def test_forced_tool(client, place, monkeypatch):
    pytest.importorskip("llguidance")
    parameters = {"type": "object", "properties": {"far": {"type": "boolean"}}, "required": ["far"]}
    parameters["additionalProperties"] = False
    tools = [{"type": "function", "function": {"name": "look", "parameters": parameters}}]
    asked = ASKED | {"max_tokens": 100, "tools": tools, "parallel_tool_calls": False}
    for format in ("qwen", "plain"):  # the latter is the demo model's own, whose template has no place for tools
        monkeypatch.setattr(place.service, "_format", format)
        for choice in ("required", {"type": "function", "function": {"name": "look"}}):
            found = client.chat.completions.create(**asked, tool_choice=choice).choices[0]
            assert found.finish_reason == "tool_calls" and len(found.message.tool_calls) == 1
            assert json.loads(found.message.tool_calls[0].function.arguments)["far"] in (True, False)
    monkeypatch.setattr("penstock.server.service.lacks_tools", lambda tokenizer: False)
    with pytest.raises(openai.BadRequestError) as refused:  # tools in a form of the template's that is not known
        client.chat.completions.create(**asked, tool_choice="required")
    assert refused.value.param == "tool_choice"


def test_a_template_without_tools_has_calls_and_results(client, place, monkeypatch):
    with scripted(monkeypatch, place, CALLS, "plain"):
        asked = ASKED | {"max_tokens": 200, "tools": TOOLS}
        found = client.chat.completions.create(**asked).choices[0]
    assert found.finish_reason == "tool_calls" and found.message.tool_calls[0].function.name == "weather"
    calls = [call.model_dump() for call in found.message.tool_calls]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "It rains."} for call in calls]
    turns = [*PROMPT, {"role": "assistant", "content": None, "tool_calls": calls}, *results]
    prompt = place.client.post("/apply-template", json={"messages": turns, "tools": TOOLS}).json()["prompt"]
    assert prompt.count("<tool_response>\nIt rains.") == len(calls) and '"name": "weather"' in prompt
    assert client.chat.completions.create(**ASKED | {"messages": turns, "tools": TOOLS}).choices[0].message.content


def test_a_format_leaves_calls_of_tools_open(client, place, monkeypatch):
    pytest.importorskip("llguidance")
    made = []
    real = place.service._requests
    monkeypatch.setattr(
        place.service,
        "_requests",
        lambda *args: (made.append(args[-1].copy()), real(*args))[1],  # as it was made
    )
    monkeypatch.setattr(place.service, "_format", "gemma")
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    asked = ASKED | {"tools": tools, "response_format": {"type": "json_object"}}
    for choice in ("auto", "none"):
        client.chat.completions.create(**asked, tool_choice=choice)
    for grammar, calls in zip(made, (True, False), strict=True):
        assert fits(grammar, place.service.llm.tokenizer, "{}")
        assert fits(grammar, place.service.llm.tokenizer, "<|tool_call>call:look{}<tool_call|>") == calls


def test_without_llguidance_a_format_is_refused_with_the_way_to_get_it(client, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(openai.BadRequestError, match=r"penstock\[grammar\]") as refused:
        client.chat.completions.create(**ASKED, response_format={"type": "json_object"})
    assert refused.value.param == "response_format"


def test_reasoning_stays_in_the_text_where_nobody_wants_it_split(llm, monkeypatch):
    with (
        serving(llm, Options(split_reasoning=False)) as place,
        scripted(monkeypatch, place, "<think>\nHm.\n</think>\nYes."),
    ):
        message = place.chat(max_tokens=60).json()["choices"][0]["message"]
    assert message["content"] == "<think>\nHm.\n</think>\nYes." and "reasoning" not in message
