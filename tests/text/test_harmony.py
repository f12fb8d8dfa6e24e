"""gpt-oss's chat format with a template and tokens like its own: what goes in, what comes out, what ends an answer."""

import json

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from penstock.errors import InvalidArgument
from penstock.text.formats import FORMATS, format_of, headers_shown, in_reasoning, parse_whole, with_arguments
from penstock.text.template import ChatTemplates
from penstock.text.tokenizer import Tokenizer

# what templates of gpt-oss do: a level of effort in the first message, instructions in the second, the first call of a
# message alone, results under the name of the last call, thoughts only before calls that no answer follows
TEMPLATE = """
{{- "<|start|>system<|message|>Date " ~ strftime_now("%Y") }}
{{- ". Effort: " ~ (reasoning_effort or "medium") ~ "<|end|>" }}
{%- set rest = messages %}
{%- if messages[0].role in ("system", "developer") or tools %}
    {%- set told = messages[0].role in ("system", "developer") %}
    {{- "<|start|>developer<|message|>" ~ (messages[0].content if told else "") }}
    {%- for tool in tools or [] %}{{- " [" ~ tool.function.name ~ "]" }}{%- endfor %}
    {{- "<|end|>" }}
    {%- if told %}{%- set rest = messages[1:] %}{%- endif %}
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in rest %}
    {%- if message.role == "assistant" and message.tool_calls %}
        {%- if message.content and message.thinking %}{{- raise_exception("content and thinking") }}{%- endif %}
        {%- set answered = rest[loop.index:] | selectattr("role", "equalto", "assistant")
            | rejectattr("tool_calls", "defined") | list %}
        {%- set said = message.content or message.thinking %}
        {%- if said and not answered %}
            {{- "<|start|>assistant<|channel|>analysis<|message|>" ~ said ~ "<|end|>" }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {%- set last.name = call.name %}
        {{- "<|start|>assistant to=functions." ~ call.name ~ "<|channel|>commentary json<|message|>" }}
        {{- (call.arguments | tojson) ~ "<|call|>" }}
    {%- elif message.role == "assistant" %}
        {%- if "<|channel|>final<|message|>" in message.content %}{{- raise_exception("markers") }}{%- endif %}
        {%- if message.thinking and loop.last and not add_generation_prompt %}
            {{- "<|start|>assistant<|channel|>analysis<|message|>" ~ message.thinking ~ "<|end|>" }}
        {%- endif %}
        {{- "<|start|>assistant<|channel|>final<|message|>" ~ message.content ~ "<|end|>" }}
    {%- elif message.role == "tool" %}
        {%- if last.name is none %}{{- raise_exception("a result without a call") }}{%- endif %}
        {{- "<|start|>functions." ~ last.name ~ " to=assistant<|channel|>commentary<|message|>" }}
        {{- message.content ~ "<|end|>" }}
    {%- else %}
        {{- "<|start|>user<|message|>" ~ message.content ~ "<|end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start|>assistant" }}{%- endif %}
"""
MARKS = (
    "<|return|>",
    "<|constrain|>",
    "<|channel|>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|call|>",
    "<|endoftext|>",
)


def backend():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE({c: n for n, c in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    return made


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(backend(), templates=ChatTemplates({"default": (TEMPLATE, "t")}))


def rendered(tokenizer, messages, tools=None, **variables):
    return tokenizer.chat_text(with_arguments(messages, "harmony"), tools, variables=variables)


def call(number, name="weather"):
    return {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": f'{{"n": {number}}}'}}


def test_format_is_known_by_its_template_and_its_markers_are_shown(tokenizer):
    assert format_of(tokenizer) == "harmony"
    assert set(headers_shown(tokenizer)["shown"]) == set(MARKS) - {"<|endoftext|>"}
    assert not in_reasoning("harmony", rendered(tokenizer, [{"role": "user", "content": "Hi"}]).text)


def test_markers_that_users_write_stay_text(tokenizer):
    """In messages of users, systems and tools: as many control tokens as without them."""
    spelled = "".join(MARKS)
    counts = []
    for text in ("x", spelled):
        messages = [
            {"role": "system", "content": text},
            {"role": "user", "content": text},
            {"role": "assistant", "content": "", "tool_calls": [call(0)]},
            {"role": "tool", "tool_call_id": "c0", "content": text},
        ]
        chat = rendered(tokenizer, messages)
        ids = tokenizer.encode_chat(chat)
        assert tokenizer.decode(ids, skip_special_tokens=False) == chat.text
        counts.append([ids.count(tokenizer.backend.token_to_id(mark)) for mark in MARKS])
    assert counts[0] == counts[1] and sum(counts[0]) > 10


@pytest.mark.parametrize(
    "effort, want", [("low", "low"), ("high", "high"), ("none", "low"), ("minimal", "low"), ("xhigh", "high")]
)
def test_effort_reaches_the_template_as_a_level_it_knows(tokenizer, effort, want):
    chat = rendered(tokenizer, [{"role": "user", "content": "Hi"}], **FORMATS["harmony"].effort(effort))
    assert f"Effort: {want}<|end|>" in chat.text


def test_calls_and_thoughts_travel_back(tokenizer):
    """An answer with two calls, its thoughts and a preamble; with results, and again when it is history."""
    text = (
        "<|channel|>analysis<|message|>Two cities.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"n": 0}<|end|>'
        '<|start|>assistant to=functions.time<|channel|>commentary json<|message|>{"n": 1}<|call|>'
    )
    tools = [{"type": "function", "function": {"name": name}} for name in ("weather", "time")]
    message = parse_whole(text, "harmony", tools, ids=iter(("c0", "c1")).__next__)
    calls = [
        {"id": made.id, "type": "function", "function": {"name": made.name, "arguments": made.arguments}}
        for made in message.tool_calls
    ]
    answer = {"role": "assistant", "content": message.content, "reasoning_content": message.reasoning_content}
    asked = [{"role": "user", "content": "Go"}, answer | {"tool_calls": calls}]
    results = [{"role": "tool", "tool_call_id": f"c{n}", "content": f"r{n}"} for n in (1, 0)]
    written = rendered(tokenizer, [*asked, *results], tools).text
    first = '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"n": 0}<|call|>'
    second = first.replace("weather", "time").replace("0", "1")
    result = "<|start|>functions.{} to=assistant<|channel|>commentary<|message|>{}<|end|>".format
    thought = "<|start|>assistant<|channel|>analysis<|message|>Two cities.\n\nI look.<|end|>"
    chain = f"{thought}{first}{result('weather', 'r0')}{second}{result('time', 'r1')}<|start|>assistant"
    assert written.endswith(f"<|start|>user<|message|>Go<|end|>{chain}")
    done = {"role": "assistant", "content": "Rain.", "reasoning_content": "It rains."}
    later = rendered(tokenizer, [*asked, *results, done, {"role": "user", "content": "Thanks"}], tools).text
    assert "Two cities" not in later and "It rains" not in later
    assert "<|channel|>final<|message|>Rain.<|end|><|start|>user<|message|>Thanks<|end|>" in later


def test_text_of_tokens_is_taken_apart_however_it_comes(tokenizer):
    ids = tokenizer.encode(
        "<|channel|>analysis<|message|>Hm, ä.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
    )
    detokenizer = tokenizer.detokenizer(**headers_shown(tokenizer))
    text = "".join(map(detokenizer.add, ids)) + detokenizer.finish()
    message = parse_whole(text, "harmony")
    assert (message.content, message.reasoning_content) == ("Yes.", "Hm, ä.")


@pytest.mark.parametrize("generation", [{}, {"eos_token_id": [256, 263]}])
def test_a_call_ends_an_answer_and_the_end_of_a_message_does_not(tmp_path, generation):
    backend().save(str(tmp_path / "tokenizer.json"))
    files = {"generation_config": generation, "tokenizer_config": {"eos_token": "<|return|>"}, "config": {}}
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    tokenizer = Tokenizer.from_folder(tmp_path)
    ends = {tokenizer.backend.token_to_id(mark) for mark in ("<|return|>", "<|call|>")}
    assert tokenizer.eos_ids == ends | set(generation.get("eos_token_id", ()))


def test_a_message_with_markers_is_refused_by_the_template(tokenizer):
    answer = {"role": "assistant", "content": "<|channel|>final<|message|>Yes."}
    with pytest.raises(InvalidArgument, match="markers"):
        rendered(tokenizer, [{"role": "user", "content": "Hi"}, answer, {"role": "user", "content": "Hi"}])
