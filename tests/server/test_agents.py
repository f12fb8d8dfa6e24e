"""Requests as coding agents and frameworks send them, by their sources or as recorded, against a model whose template
knows no tools; where they are installed, LangChain, litellm and llama-index themselves.
"""

import json
from typing import Any

import pytest

from penstock.server.service import Options
from tests.server.common import CHAT, scripted, serving
from tests.server.test_api import CALLS

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city"],
}
WEATHER: dict[str, Any] = {"name": "weather", "description": "Look the weather up.", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": WEATHER}
CALLED = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Oslo"}'}}
MARK = {"cache_control": {"type": "ephemeral"}}

AGENTS: dict[str, dict[str, Any]] = {
    "cline": {
        "model": "demo",
        "messages": [
            {"role": "system", "content": "You write code."},
            {
                "role": "user",
                "content": [{"type": "text", "text": "<task>\nHi\n</task>"}, {"type": "text", "text": "x"}],
            },
            {"role": "assistant", "content": "I look.", "tool_calls": [CALLED]},
            {"role": "tool", "tool_call_id": "call_1", "content": "Rain."},
            {"role": "user", "content": [{"type": "text", "text": "Go on."}]},
        ],
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "tools": [TOOL],
    },
    "roo": {
        "model": "demo",
        "temperature": 0,
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "You write code.", **MARK}]},
            {"role": "user", "content": [{"type": "text", "text": "Hi", **MARK}]},
            {"role": "assistant", "content": None, "tool_calls": [CALLED]},
            {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "Rain."}]},
            {"role": "user", "content": [{"type": "text", "text": "Go on.", **MARK}]},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
        "tools": [{"type": "function", "function": WEATHER | {"strict": True}}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "max_completion_tokens": 200,
    },
    "opencode": {
        "model": "demo",
        "max_tokens": 200,
        "temperature": 0,
        "top_p": 1,
        "messages": [
            {"role": "system", "content": "You write code."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "", "reasoning_content": "They greet.", "tool_calls": [CALLED]},
            {"role": "tool", "tool_call_id": "call_1", "content": "Rain."},
            {"role": "user", "content": [{"type": "text", "text": "Go on."}]},
        ],
        "tools": [TOOL],
        "tool_choice": "auto",
        "stream": True,
        "stream_options": {"include_usage": True},
        "verbosity": "low",
        "reasoning_effort": "medium",
    },
}


@pytest.mark.parametrize("name", AGENTS)
def test_agents_get_calls_and_numbers(place, monkeypatch, name):
    """As the model's format is unknown, calls and results stand in the prompt as text."""
    asked = {"max_tokens": 200, **AGENTS[name]} if "max_completion_tokens" not in AGENTS[name] else AGENTS[name]
    seen: list[Any] = []
    real = place.service.llm.tokenizer.chat_text
    kind = type(place.service.llm.tokenizer)
    monkeypatch.setattr(kind, "chat_text", lambda self, *given: (seen.append(given), real(*given))[1])
    with scripted(monkeypatch, place, CALLS, "plain"), place.client.stream("POST", CHAT, json=asked) as response:
        assert response.status_code == 200, response.read()
        lines = response.read().decode().split("\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    named = [call["function"]["name"] for call in calls if "name" in call["function"]]
    assert named == ["weather", "weather"] and [call["index"] for call in calls if "id" in call] == [0, 1]
    first = "".join(call["function"]["arguments"] for call in calls if call["index"] == 0)
    assert json.loads(first) == {"city": "Oslo", "days": 2}
    assert "".join(delta.get("content") or "" for delta in deltas).strip() == "I look."
    assert events[-1]["usage"]["prompt_tokens"] > 20 and events[-1]["choices"] == []
    messages = seen[0][0]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert "Look the weather up." in messages[0]["content"] and "<tool_call>" in messages[2]["content"]
    assert "Rain." in messages[3]["content"] and messages[3]["content"].endswith("Go on.")


CODEX: dict[str, Any] = {
    "model": "demo",
    "instructions": "You write code.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandbox: read-only."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files."}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": None},
        {"type": "function_call", "name": "weather", "arguments": '{"city":"Oslo"}', "call_id": "call_1"},
        {"type": "function_call_output", "call_id": "call_1", "output": "Rain."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go on."}]},
    ],
    "tools": [{"type": "function", "strict": False, **WEATHER}],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199",
    "client_metadata": {"originator": "codex"},
    "text": {"verbosity": "low"},
}


def test_codex_gets_a_call(place, monkeypatch):
    with scripted(monkeypatch, place, CALLS, "plain"):
        events = place.events("/v1/responses", **CODEX, max_output_tokens=200)
    done = events[-1]["response"]
    assert events[-1]["type"] == "response.completed"
    [call] = [item for item in done["output"] if item["type"] == "function_call"]
    assert (call["name"], json.loads(call["arguments"])) == ("weather", {"city": "Oslo", "days": 2})


def test_a_tool_that_openai_runs_itself_is_refused_by_name(place):
    body = CODEX | {"tools": [*CODEX["tools"], {"type": "web_search"}], "stream": False}
    error = place.client.post("/v1/responses", json=body).json()["error"]
    assert error["param"].startswith("tools[1]")


def test_continue_and_aider_get_text(place, llm):
    """Their requests have no tools; autocompletion continues a text up to one of many stops."""
    turns = [{"role": "system", "content": "You write code."}, {"role": "user", "content": "Once upon a time"}]
    chat = {"messages": turns, "model": "demo", "max_tokens": 6, "temperature": 0, "stream": True, "stop": None}
    events = place.events(**chat)
    want = llm.chat(turns, max_tokens=6).text
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1]) == want
    stops = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>", "<|endoftext|>", "</fim_middle>", "\n\n"]
    asked = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0.01, "stop": stops}
    events = place.events("/v1/completions", **asked)
    assert "".join(event["choices"][0]["text"] for event in events[:-1])
    refused = place.client.post("/v1/completions", json=asked | {"suffix": "the end"}).json()["error"]
    assert refused["param"] == "suffix"


PERSON = {
    "type": "object",
    "title": "Person",
    "description": "A person.",
    "properties": {
        "name": {"maxLength": 8, "title": "Name", "type": "string"},
        "age": {"maximum": 120, "minimum": 0, "title": "Age", "type": "integer"},
    },
    "required": ["name", "age"],
}


def test_requests_of_langchain(place):
    """Tools by `bind_tools`, structured output by `function_calling` and `json_schema`: no call is left to chance."""
    pytest.importorskip("llguidance")
    base = {"messages": [{"content": "A person?", "role": "user"}], "model": "demo", "temperature": 0.0}
    base |= {"max_completion_tokens": 200, "stream": False}
    message = place.client.post(CHAT, json=base | {"tool_choice": "required", "tools": [TOOL]}).json()["choices"][0]
    for call in message["message"]["tool_calls"]:
        assert call["function"]["name"] == "weather" and "city" in json.loads(call["function"]["arguments"])
    function = {"name": "Person", "description": "A person.", "parameters": PERSON}
    asked = {"parallel_tool_calls": False, "tools": [{"type": "function", "function": function}]}
    asked["tool_choice"] = {"type": "function", "function": {"name": "Person"}}
    [call] = place.client.post(CHAT, json=base | asked).json()["choices"][0]["message"]["tool_calls"]
    wanted = {"schema": PERSON | {"additionalProperties": False}, "name": "Person", "strict": True}
    text = place.client.post(
        CHAT, json=base | {"response_format": {"type": "json_schema", "json_schema": wanted}}
    ).json()["choices"][0]["message"]["content"]
    for found in (json.loads(call["function"]["arguments"]), json.loads(text)):
        assert set(found) == {"name", "age"} and 0 <= found["age"] <= 120 and len(found["name"]) <= 8


# the clients themselves


@pytest.fixture(scope="module")
def any_name(llm):
    with serving(llm, Options(names=("demo", "*"))) as made:
        yield made


@pytest.mark.slow
def test_langchain(any_name):
    openai = pytest.importorskip("langchain_openai")
    from langchain_core.tools import tool
    from pydantic import BaseModel, Field

    @tool
    def weather(city: str = Field(max_length=8), days: int = Field(1, le=9)) -> str:
        """Look the weather up."""
        return "rain"

    class Person(BaseModel):
        name: str = Field(max_length=8)
        age: int = Field(ge=0, le=120)

    def check(llm: Any, methods: tuple[str, ...]) -> None:
        assert llm.invoke("hello").content and "".join(str(chunk.content) for chunk in llm.stream("hello"))
        called = llm.bind_tools([weather], tool_choice="any").invoke("The weather in Oslo?")
        assert {call["name"] for call in called.tool_calls} == {"weather"}
        for method in methods:
            assert isinstance(llm.with_structured_output(Person, method=method).invoke("A person?"), Person)

    url = any_name.url
    made = openai.ChatOpenAI(base_url=f"{url}/v1", api_key="x", model="demo", max_tokens=200, temperature=0)
    check(made, ("function_calling", "json_schema"))
    vectors = openai.OpenAIEmbeddings(base_url=f"{url}/v1", api_key="x", model="demo", check_embedding_ctx_length=False)
    assert len(vectors.embed_documents(["a fox", "a bear"])) == 2
    anthropic = pytest.importorskip("langchain_anthropic")
    check(anthropic.ChatAnthropic(base_url=url, api_key="x", model="demo", max_tokens=200), ("function_calling",))


@pytest.mark.slow
def test_litellm_and_llama_index(any_name):
    litellm = pytest.importorskip("litellm")
    like = pytest.importorskip("llama_index.llms.openai_like")
    url, turns = any_name.url, [{"role": "user", "content": "Weather?"}]
    for model, base in (("openai/demo", f"{url}/v1"), ("anthropic/demo", url)):
        asked: dict[str, Any] = {"model": model, "api_base": base, "api_key": "x", "messages": turns, "max_tokens": 120}
        assert litellm.completion(**asked).choices[0].message.content
        streamed = litellm.completion(**asked, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
        found = litellm.completion(**asked, tools=[TOOL], tool_choice="required").choices[0].message.tool_calls
        assert {call.function.name for call in found} == {"weather"}
    made = like.OpenAILike(model="demo", api_base=f"{url}/v1", api_key="x", is_chat_model=True, max_tokens=20)
    assert made.complete("Once").text and "".join(chunk.delta or "" for chunk in made.stream_complete("Once"))
