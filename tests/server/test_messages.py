"""/v1/messages: what the official client of Anthropic and coding agents make of the server."""

import json
from typing import Any

import anthropic
import pytest

from penstock.server.guard import Access
from penstock.server.service import Options
from tests.server.common import PROMPT, scripted, serving
from tests.server.test_api import CALLS

PATH = "/v1/messages"
ASKED: dict[str, Any] = {"model": "demo", "max_tokens": 8, "messages": PROMPT}  # the server's default is greedy
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "Look the weather up.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture(scope="module")
def client(place):
    with anthropic.Anthropic(base_url=place.url, api_key="unused", max_retries=0) as made:
        yield made


def refused(response, status: int, kind: str = "invalid_request_error") -> str:
    """The message of an error, in Anthropic's shape."""
    body = response.json()
    assert response.status_code == status and body["type"] == "error" and body["error"]["type"] == kind, body
    return body["error"]["message"]


def test_a_message_whole_and_streamed(client, llm):
    want = llm.chat(PROMPT, max_tokens=8).text
    answer = client.messages.create(**ASKED)
    assert [block.text for block in answer.content] == [want] and answer.role == "assistant"
    assert answer.stop_reason == "max_tokens" and answer.stop_sequence is None and answer.model == "demo"
    assert answer.usage.output_tokens == 8
    with client.messages.stream(**ASKED) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert final.content[0].text == want and final.stop_reason == "max_tokens"
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop" and "content_block_stop" in kinds
    read = final.usage.input_tokens + final.usage.cache_read_input_tokens
    assert read == client.messages.count_tokens(model="demo", messages=PROMPT).input_tokens


def test_tools_that_may_not_be_called_are_not_counted(client):
    asked: dict[str, Any] = {"tools": [WEATHER], "tool_choice": {"type": "none"}}
    used = client.messages.create(**ASKED, **asked).usage
    counted = client.messages.count_tokens(model="demo", messages=PROMPT, **asked)
    assert counted.input_tokens == used.input_tokens + used.cache_read_input_tokens
    assert counted.input_tokens == client.messages.count_tokens(model="demo", messages=PROMPT).input_tokens


def test_events_are_named_and_in_order(place):
    with place.client.stream("POST", f"{PATH}?beta=true", json=ASKED | {"stream": True}) as response:
        text = response.read().decode()
    events = [dict(line.split(": ", 1) for line in part.split("\n")) for part in text.strip().split("\n\n")]
    names = [event["event"] for event in events]
    assert all(json.loads(event["data"])["type"] == event["event"] for event in events)
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    first, last = json.loads(events[0]["data"])["message"], json.loads(events[-2]["data"])
    assert first["content"] == [] and first["stop_reason"] is None and first["usage"]["input_tokens"] > 0
    assert last["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None} and last["usage"]["output_tokens"] == 8


def test_a_stop_sequence_is_named(client, llm):
    text = llm.chat(PROMPT, max_tokens=40).text
    stop = text[10:14]
    answer = client.messages.create(**ASKED | {"max_tokens": 40, "stop_sequences": ["never there", stop]})
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert answer.content[0].text == text[: text.index(stop)]


def test_calls_and_their_results(client, place, monkeypatch):
    tools = [WEATHER | {"cache_control": {"type": "ephemeral"}}]
    with scripted(monkeypatch, place, CALLS):
        asked = ASKED | {"max_tokens": 200, "tools": tools}
        answer = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
    for found in (answer, streamed):
        assert found.stop_reason == "tool_use"
        calls = [block for block in found.content if block.type == "tool_use"]
        assert [(call.name, call.input) for call in calls] == [
            ("weather", {"city": "Oslo", "days": 2}),
            ("weather", {"city": "Rome"}),
        ]
    with scripted(monkeypatch, place, CALLS):
        one = {"type": "auto", "disable_parallel_tool_use": True}
        found = client.messages.create(**ASKED | {"max_tokens": 200, "tools": tools, "tool_choice": one})
    assert len([block for block in found.content if block.type == "tool_use"]) == 1


def test_thoughts_are_blocks_of_their_own(client, place, monkeypatch):
    with scripted(monkeypatch, place, "<think>\nHm, a fox.\n</think>\n\nOnce."):
        asked = ASKED | {"max_tokens": 2048, "thinking": {"type": "enabled", "budget_tokens": 1024}}
        answer = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
    for found in (answer, streamed):
        assert [block.type for block in found.content] == ["thinking", "text"]
        assert found.content[0].thinking.strip() == "Hm, a fox." and found.content[1].text == "Once."


AGENT: dict[str, Any] = {  # the form of a coding agent's request
    "model": "demo",
    "max_tokens": 32000,
    "temperature": 1,
    "stream": True,
    "metadata": {"user_id": "user_0_account__session_0"},
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "medium"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=00000;"},
        {"type": "text", "text": "You write code.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ],
    "tools": [WEATHER | {"name": "Bash"}, WEATHER | {"type": "custom", "name": "Read", "eager_input_streaming": True}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "<system-reminder>x</system-reminder>"}]},
        {"role": "user", "content": "List the files."},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "They want a list.", "signature": "c2ln"},
                {"type": "redacted_thinking", "data": "AAAA"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}},
                {"type": "tool_use", "id": "toolu_2", "name": "Read", "input": {"path": "é"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "a.py"}]},
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no such file", "is_error": True},
                {"type": "text", "text": "Go on.", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ],
}


def test_the_requests_of_coding_agents_become_conversations(place, monkeypatch):
    seen: list[Any] = []
    real = place.service.llm.tokenizer.chat_text
    monkeypatch.setattr(place.service, "_format", "qwen")
    monkeypatch.setattr(
        type(place.service.llm.tokenizer), "chat_text", lambda self, *given: (seen.append(given), real(*given))[1]
    )
    headers = {"anthropic-beta": "interleaved-thinking-2025-05-14", "anthropic-version": "2023-06-01"}
    with place.client.stream("POST", f"{PATH}?beta=true", json=AGENT | {"max_tokens": 3}, headers=headers) as response:
        assert response.status_code == 200, response.read()
        assert b"message_stop" in response.read()
    messages, tools = seen[0][0], seen[0][1]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "tool", "user"]
    assert messages[0]["content"] == "You write code.\n\nBe brief."
    assert messages[1]["content"] == "<system-reminder>x</system-reminder>\n\nList the files."
    assert messages[2]["content"] == "I look." and messages[2]["reasoning_content"] == "They want a list."
    assert [call["function"]["arguments"] for call in messages[2]["tool_calls"]] == [{"command": "ls"}, {"path": "é"}]
    assert [(m["tool_call_id"], m["content"]) for m in messages[3:5]] == [
        ("toolu_1", "a.py"),
        ("toolu_2", "Error: no such file"),
    ]
    assert [tool["function"]["name"] for tool in tools] == ["Bash", "Read"]
    asked = {name: AGENT[name] for name in ("model", "system", "messages", "tools")}
    counted = place.client.post(f"{PATH}/count_tokens", json=asked)
    assert counted.json()["input_tokens"] > 50


def test_a_runner_of_tools_goes_on_without_a_thread(client, place, monkeypatch):
    """The code of the refusal has the client's tool runner send whole conversations."""
    refusal = place.client.post(PATH, json=ASKED | {"thread": {"type": "create"}})
    assert "expected the whole of it in messages" in refused(refusal, 400)
    assert refusal.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}
    assert place.client.post(PATH, json=ASKED | {"thread": None, "fallbacks": "default"}).status_code == 200
    assert "details" not in place.client.post(PATH, json=ASKED | {"stream": 3}).json()["error"]
    called = []

    def weather(city: str, days: int = 1) -> str:
        """Look the weather up."""
        called.append((city, days))
        return "Rain."

    with scripted(monkeypatch, place, CALLS):
        tools, turns = [anthropic.beta_tool(weather)], [{"role": "user", "content": "The weather?"}]
        runner = client.beta.messages.tool_runner(
            model="demo", max_tokens=200, messages=turns, tools=tools, max_iterations=1
        )
        answers = list(runner)
    assert [block.name for block in answers[0].content if block.type == "tool_use"] == ["weather", "weather"]
    assert called == [("Oslo", 2), ("Rome", 1)]


def test_more_tokens_than_the_context_has_are_clamped_and_said(place):
    context = place.service.llm.max_context
    asked = ASKED | {"max_tokens": 10**6, "stop_sequences": ["a"]}
    response = place.client.post(PATH, json=asked)
    assert response.status_code == 200
    assert "max_tokens is 1000000" in response.headers["x-penstock-warning"]
    assert str(context) in response.headers["x-penstock-warning"]
    assert "x-penstock-warning" not in place.client.post(PATH, json=ASKED).headers


def test_an_answer_goes_on_with_the_last_message(place, llm):
    turns = [*PROMPT, {"role": "assistant", "content": "Once upon"}]
    answer = place.client.post(PATH, json=ASKED | {"messages": turns}).json()
    chat = place.client.post(
        "/v1/chat/completions", json={"messages": turns, "max_tokens": 8, "continue_final_message": True}
    )
    assert answer["content"][0]["text"] == chat.json()["choices"][0]["message"]["content"]


def test_what_is_refused_has_the_shape_of_this_api(place):
    def post(**fields: Any) -> Any:
        return place.client.post(PATH, json={k: v for k, v in (ASKED | fields).items() if v is not None})

    assert "max_tokens is missing" in refused(post(max_tokens=None), 400)
    image = [{"role": "user", "content": [{"type": "image", "source": {"type": "base64", "data": ""}}]}]
    assert "images and files are not supported" in refused(post(messages=image), 400)
    result = {"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image", "source": {}}]}
    assert "not supported" in refused(post(messages=[{"role": "user", "content": [result]}]), 400)
    assert "tools[0].type" in refused(post(tools=[{"type": "web_search_20250305", "name": "web_search"}]), 400)
    assert "tool_choice" in refused(post(tool_choice={"type": "tool", "name": "none"}), 400)
    assert "no field" in refused(post(max_token=3), 400)
    assert "expected demo" in refused(post(model="claude"), 404, "not_found_error")
    assert "POST" not in refused(place.client.get(PATH), 405)
    assert refused(place.client.post(f"{PATH}/batches", json={}), 404, "not_found_error")
    assert (
        "error" in place.client.post("/v1/chat/completions", json={}).json()
        and "type" not in place.client.post("/v1/chat/completions", json={}).json()
    )


def test_keys_come_in_either_header_and_the_model_has_any_name(llm):
    with serving(llm, Options(names=("*", "fox")), Access(keys=("sesame",))) as place:
        refused(place.client.post(PATH, json=ASKED), 401, "authentication_error")
        for headers in ({"x-api-key": "sesame"}, {"authorization": "Bearer sesame"}):
            answer = place.client.post(PATH, json=ASKED | {"max_tokens": 1, "model": "claude-x"}, headers=headers)
            assert answer.status_code == 200 and answer.json()["model"] == "fox"
        listed = place.client.get("/v1/models", headers=headers).json()["data"]
    assert [model["id"] for model in listed] == ["fox"]
