"""Answers taken apart: every format by hand, and what holds for any text however it is cut."""

import itertools
import json

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from penstock.errors import InvalidArgument
from penstock.text.formats import (
    FORMATS,
    format_of,
    in_reasoning,
    parse_whole,
    parser_for,
    shown_tokens,
    with_arguments,
)
from penstock.text.formats import arguments as _arguments
from penstock.text.formats.base import Parser
from penstock.text.formats.deltas import (
    CallArguments,
    CallBegin,
    Content,
    Message,
    Reasoning,
    ToolCall,
    call_id,
    gather,
)
from penstock.text.template import ChatTemplates
from penstock.text.tokenizer import Tokenizer

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "share": {"type": "number"},
        "fine": {"type": "boolean"},
        "unit": {"anyOf": [{"$ref": "#/$defs/Unit"}, {"type": "null"}]},
        "tags": {"type": "array"},
        "where": {"$ref": "#/$defs/Where"},
        "any": {},
    },
    "$defs": {"Unit": {"type": "string", "enum": ["C", "F"]}, "Where": {"type": "object"}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "ping"}},
]
DEEPSEEK = [f"<｜tool▁{name}｜>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")]


def numbered():
    numbers = itertools.count()
    return lambda: f"call_{next(numbers)}"


def parsed(text, format, tools=TOOLS, **options):
    return parse_whole(text, format, tools, ids=numbered(), **options)


def calls(*pairs):
    return [ToolCall(f"call_{n}", name, arguments) for n, (name, arguments) in enumerate(pairs)]


def written(format, content, reasoning, pairs):
    """An answer as a model of that format writes it."""
    opening, closing = FORMATS[format].reasoning or ("", "")
    if format == "harmony":
        return harmony(content, reasoning, pairs)
    text = f"{opening}{FORMATS[format].label or chr(10)}{reasoning}\n{closing}" if reasoning else ""
    text += ("\n\n" if reasoning and opening == "<think>" else "") + content
    begin, call, separator, end, finish = DEEPSEEK
    if format == "qwen":
        for name, arguments in pairs:
            text += f"\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
    elif format == "qwen-xml":
        for name, arguments in pairs:
            values = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in shown(arguments).items())
            text += f"\n<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"
    elif format == "glm":
        for name, arguments in pairs:
            values = [f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in shown(arguments).items()]
            text += f"\n<tool_call>{name}\n{''.join(values)}</tool_call>"
    elif format == "minimax":
        each = [
            f'<invoke name="{name}">\n'
            + "".join(f'<parameter name="{k}">{v}</parameter>\n' for k, v in shown(arguments).items())
            + "</invoke>\n"
            for name, arguments in pairs
        ]
        text += f"\n<minimax:tool_call>\n{''.join(each)}</minimax:tool_call>" if pairs else ""
    elif format == "gemma":
        for name, arguments in pairs:
            text += f"<|tool_call>call:{name}{gemma(arguments)}<tool_call|>"
    elif format == "kimi" and pairs:
        open, argue = "<|tool_call_begin|>functions.", "<|tool_call_argument_begin|>"
        each = [f"{open}{name}:{n}{argue}{json.dumps(a)}<|tool_call_end|>" for n, (name, a) in enumerate(pairs)]
        text += f"<|tool_calls_section_begin|>{''.join(each)}<|tool_calls_section_end|>"
    elif format == "mistral":
        text += "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in pairs)
    elif format == "lfm2" and pairs:
        each = [f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})" for name, arguments in pairs]
        text += f"<|tool_call_start|>[{', '.join(each)}]<|tool_call_end|>"
    elif format == "deepseek-v3" and pairs:
        each = [f"{call}function{separator}{n}\n```json\n{json.dumps(a)}\n```{end}" for n, a in pairs]
        text += begin + "\n".join(each) + finish
    elif pairs:
        text += begin + "".join(f"{call}{n}{separator}{json.dumps(a)}{end}" for n, a in pairs) + finish
    return text


def harmony(content, reasoning, pairs):
    """Messages one behind the other; where there are calls, the content is a preamble, and the recipient of every other
    call stands before its channel."""
    texts = [f"<|channel|>analysis<|message|>{reasoning}"] if reasoning else []
    texts += [f"<|channel|>{'commentary' if pairs else 'final'}<|message|>{content}"] if content else []
    for n, (name, arguments) in enumerate(pairs):
        to, channel = f" to=functions.{name}", "<|channel|>commentary"
        header = f"{to}{channel} json" if n % 2 else f"{channel}{to} <|constrain|>json"
        texts.append(f"{header}<|message|>{json.dumps(arguments)}")
    return "<|end|><|start|>assistant".join(texts) + ("<|call|>" if pairs else "")


def shown(arguments):
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}


def gemma(value):
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return f"[{','.join(map(gemma, value))}]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


CALLING = [name for name in FORMATS if name != "plain"]
MARKED = [name for name in CALLING if name != "harmony"]  # whose markers are text where they mark nothing


# Each format


@pytest.mark.parametrize("format", CALLING)
def test_parse_whole_reads_what_the_format_writes(format):
    first = {"city": 'Köln "}{', "days": 3, "share": -0.5, "fine": True, "tags": ["a", {"b": None}], "where": {}}
    text = written(format, "Let me see.", "So\n\nwhat?", [("weather", first), ("ping", {})])
    message = parsed(text, format)
    assert (message.content, message.reasoning_content) == ("Let me see.", "So\n\nwhat?")
    assert [(call.id, call.name) for call in message.tool_calls] == [("call_0", "weather"), ("call_1", "ping")]
    assert [json.loads(call.arguments) for call in message.tool_calls] == [first, {}]


def test_parse_whole_leaves_a_plain_model_alone():
    text = "<think>a</think> <tool_call>{}</tool_call>  \n"
    assert parsed(text, "plain", in_reasoning=True) == Message(text, None, [])


@pytest.mark.parametrize("format", MARKED)
def test_parse_whole_leaves_calls_in_the_text_if_there_are_no_tools(format):
    text = written(format, "Hm.", "why", [("ping", {})])
    message = parsed(text, format, tools=None)
    assert not message.tool_calls and message.reasoning_content == "why"
    assert message.content == text[text.index("Hm.") :]


@pytest.mark.parametrize("format", CALLING)
def test_parse_whole_begins_inside_the_reasoning_if_told(format):
    closing = FORMATS[format].reasoning[1]
    assert parsed(f"\nso\n{closing}\n\n  yes\n", format, in_reasoning=True) == Message("  yes\n", "so", [])
    assert parsed("so", format, in_reasoning=True) == Message("", "so", [])
    assert parsed(f"{closing}yes", format, in_reasoning=True) == Message("yes", None, [])


@pytest.mark.parametrize("format", [name for name in MARKED if FORMATS[name].reasoning[0] == "<think>"])
def test_parse_whole_takes_a_think_tag_inside_an_answer_for_text(format):
    assert parsed("The tag <think> is odd.", format) == Message("The tag <think> is odd.", None, [])
    assert parsed("a </think> b", format) == Message("a </think> b", None, [])


@pytest.mark.parametrize("format", CALLING)
def test_parse_whole_drops_the_end_of_a_reasoning_that_never_began(format):
    closing = FORMATS[format].reasoning[1]
    assert parsed(f"{closing}\n\nThree.", format) == Message("Three.", None, [])
    assert parsed(f"{closing}{closing}", format) == Message(closing if format in MARKED else "", None, [])


@pytest.mark.parametrize(
    "text, arguments",
    [
        ('<tool_call>{"name": "ping"}</tool_call>', "{}"),
        ('<tool_call>{"arguments": {"a": 1}, "name": "ping", "id": 7}</tool_call>', '{"a": 1}'),
        ('<tool_call>{"name": "ping", "parameters": null}</tool_call>', "{}"),
        ('<tool_call>{"name": "ping", "arguments": "{\\"a\\": 1}"}</tool_call>', '{"a": 1}'),
        ('<tool_call>{"name": "ping", "arguments": {"a": 1}\n</tool_call>', '{"a": 1}'),
        ('<tool_call>{"name": "ping", "arguments": {"a": 1}}}\n</tool_call>', '{"a": 1}'),
        ('<tool_call>{"name": "ping", "arguments": {"a": "</tool_call>"}}</tool_call>', '{"a": "</tool_call>"}'),
        ('<tool_call>{"name": "ping", "arguments": {"a": "x\ny\t"}}</tool_call>', '{"a": "x\\ny\\t"}'),
        ('<tool_call>{"name": "ping", "arguments": {"a": "\\u00e9\\\\"}}</tool_call>', '{"a": "\\u00e9\\\\"}'),
    ],
    ids="none backwards null text brace-missing brace-doubled marker-in-string line-break escapes".split(),
)
def test_parse_whole_reads_qwen_calls_that_deviate(text, arguments):
    assert parsed(text, "qwen") == Message(None, None, calls(("ping", arguments)))


def test_parse_whole_ends_a_qwen_call_with_a_string_left_open():
    text = '<tool_call>\n{"name": "ping", "arguments": {"a": "b}}\n</tool_call>\nDone.'
    message = parsed(text, "qwen")
    assert message.content == "Done."
    assert message.tool_calls[0].arguments == '{"a": "b}}\\n'


@pytest.mark.parametrize("format", ["qwen", "qwen-xml", "glm"])
def test_parse_whole_ends_the_reasoning_at_a_call_on_a_new_line(format):
    text = written(format, "", "", [("ping", {})])
    assert parsed(f"so{text}", format, in_reasoning=True) == Message(None, "so", calls(("ping", "{}")))
    unknown = text.replace("ping", "pong")
    assert parsed(f"so{unknown}", format, in_reasoning=True).tool_calls == []
    inline = f"write {text.strip()} here\n</think>ok"
    assert parsed(inline, format, in_reasoning=True) == Message("ok", f"write {text.strip()} here", [])


XML = "<tool_call>\n<function=weather>\n{}</function>\n</tool_call>"


@pytest.mark.parametrize(
    "name, value, want",
    [
        ("city", "12", "12"),
        ("city", "null", "null"),
        ("city", '"q"\\\n\nend', '"q"\\\n\nend'),
        ("city", "\nline\n", "\nline\n"),
        ("city", "a </parameter>\nb <b> </function>", "a </parameter>\nb <b> </function>"),
        ("city", "", ""),
        ("days", " 12 ", 12),
        ("days", "many", "many"),
        ("days", "0x1F", "0x1F"),
        ("share", "-1.5e3", -1500.0),
        ("share", "NaN", "NaN"),
        ("fine", "True", True),
        ("fine", "yes", "yes"),
        ("unit", "null", None),
        ("unit", "C", "C"),
        ("tags", '[1, "a",\n {"b": []}]', [1, "a", {"b": []}]),
        ("tags", "[NaN]", "[NaN]"),
        ("tags", "[" * 100_000, "[" * 100_000),
        ("where", "{'a': 1}", "{'a': 1}"),
        ("any", "5", "5"),
        ("other", "true", "true"),
    ],
)
def test_parse_whole_types_xml_parameters_by_the_schema(name, value, want):
    message = parsed(XML.format(f"<parameter={name}>\n{value}\n</parameter>\n"), "qwen-xml")
    assert message.content is None
    assert json.loads(message.tool_calls[0].arguments) == {name: want}


@pytest.mark.parametrize(
    "schema, value, want",
    [
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"const": True}, "true", True),
        ({"enum": ["a", None]}, "null", None),
        ({"enum": "1"}, "1", "1"),
    ],
)
def test_parse_whole_types_parameters_without_a_type_by_their_choices(schema, value, want):
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"properties": {"x": schema}}}}
    text = XML.format(f"<parameter=x>\n{value}\n</parameter>\n")
    (call,) = parsed(text, "qwen-xml", tools=[tool]).tool_calls
    assert json.loads(call.arguments) == {"x": want}


@pytest.mark.parametrize(
    "inner, want",
    [
        ("<parameter=city>\nBonn\n<parameter=days>\n2\n</parameter>\n", {"city": "Bonn", "days": 2}),
        ("<parameter=days>\n2\n</parameter>\n<parameter=city>\nBonn\n", {"days": 2, "city": "Bonn"}),
        ("<parameter=city>Bonn</parameter><parameter=days>2</parameter>", {"city": "Bonn", "days": 2}),
        ("<parameter=city>\na\n<parameter=nope>\nb\n</parameter>\n", {"city": "a\n<parameter=nope>\nb"}),
    ],
    ids=["next", "end", "one-line", "not-a-parameter"],
)
def test_parse_whole_finds_the_end_of_xml_parameters(inner, want):
    assert json.loads(parsed(XML.format(inner), "qwen-xml").tool_calls[0].arguments) == want


def test_parse_whole_reads_an_xml_call_that_was_not_opened():
    text = "<function=ping>\n</function>\n</tool_call>"
    assert parsed(f"Now.\n{text}", "qwen-xml") == Message("Now.", None, calls(("ping", "{}")))
    assert parsed(f"Now.\n{text}", "qwen") == Message(f"Now.\n{text}", None, [])
    prose = "Write <function=name> first."
    assert parsed(prose, "qwen-xml") == Message(prose, None, [])


@pytest.mark.parametrize(
    "inner, want",
    [
        ('{a:<|"|>x, {y} "z"\n<|"|>,b:[1,-2.5e1,<|"|><|"|>],c:{d:true,e:null}}', '{"a": "x, {y} \\"z\\"\\n", "b": '),
        ('{ a : None , b: "q\\n" ,}', '{"a": null, "b": "q\\n"}'),
        ('{<|"|>a b<|"|>:1,"c":False}', '{"a b": 1, "c": false}'),
        ("{a:New York,b:007,c:1.}", '{"a": "New York", "b": "007", "c": "1."}'),
        ("{a:[[],{}]}", '{"a": [[], {}]}'),
    ],
    ids="typical loose keys bare nested".split(),
)
def test_parse_whole_turns_gemma_values_into_json(inner, want):
    message = parsed(f"<|tool_call>call:ping{inner}<tool_call|>", "gemma")
    assert message.content is None
    arguments = message.tool_calls[0].arguments
    assert arguments.startswith(want)
    json.loads(arguments)


def test_parse_whole_reads_several_gemma_calls_in_one_block():
    text = "<|tool_call>call:ping{}call:ping{a:1} <tool_call|>ok"
    assert parsed(text, "gemma") == Message("ok", None, calls(("ping", "{}"), ("ping", '{"a": 1}')))


def test_parse_whole_knows_gemma_labels():
    assert parsed("thought\n<channel|>Three.", "gemma") == Message("Three.", None, [])
    assert parsed("thought\nfully", "gemma") == Message("thought\nfully", None, [])
    assert parsed("<|channel>\nso\n<channel|>Three.", "gemma") == Message("Three.", "so", [])


@pytest.mark.parametrize("format", ["deepseek-v3", "deepseek-v3.1"])
@pytest.mark.parametrize("other", ["deepseek-v3", "deepseek-v3.1"])
def test_parse_whole_reads_both_deepseek_forms(format, other):
    text = written(other, "", "", [("ping", {"a": "`"})])
    assert parsed(text, format) == Message(None, None, calls(("ping", '{"a": "`"}')))
    alone = text.removeprefix(DEEPSEEK[0]).removesuffix(DEEPSEEK[4])
    assert parsed(alone, format) == Message(None, None, calls(("ping", '{"a": "`"}')))


@pytest.mark.parametrize(
    "text, want",
    [
        ('[TOOL_CALLS]ping[CALL_ID]abcdef123[ARGS]{"a": "[ARGS]"}', [("ping", '{"a": "[ARGS]"}')]),
        ('[TOOL_CALLS] [{"name": "ping", "arguments": {"a": 1}, "id": "x"}]', [("ping", '{"a": 1}')]),
        ('[TOOL_CALLS][{"name": "ping"}, {"name": "pong", "arguments": {}}]\n', [("ping", "{}"), ("pong", "{}")]),
        ("[TOOL_CALLS]ping [ARGS] {}\n[TOOL_CALLS]ping[ARGS]{}", [("ping", "{}"), ("ping", "{}")]),
    ],
    ids=["id", "list", "lists", "loose"],
)
def test_parse_whole_reads_mistral_calls_of_all_ages(text, want):
    assert parsed(text, "mistral") == Message(None, None, calls(*want))


def test_parse_whole_leaves_brackets_of_an_answer_alone():
    text = "a [list] [T] [/INST] [TOOL] of [ARGS] [1, 2]"
    assert parsed(text, "mistral") == Message(text, None, [])
    assert parsed("[THINK]so [1][/THINK]\n[2]", "mistral") == Message("[2]", "so [1]", [])


LFM2_CALL = "<|tool_call_start|>[ping({})]<|tool_call_end|>"


@pytest.mark.parametrize(
    "inner, want",
    [
        ('a=\'x\', b="it\'s", c=""', {"a": "x", "b": "it's", "c": ""}),
        (r"""a='\'\\\n\x41\u00e9\U0001F642\q'""", {"a": "'\\\nAé🙂\\q"}),
        (r"a='\ud83d\ude42'", {"a": "🙂"}),
        ("a=True, b=None, c=false, d=-1.5e3", {"a": True, "b": None, "c": False, "d": -1500.0}),
        ("e=.5, f=1_000, g=nan", {"e": 0.5, "f": 1000.0, "g": "nan"}),
        ("a={'': 1, '<b\\'>': 2}", {"a": {"": 1, "<b'>": 2}}),
        ("a=[1, 'b', [], {'c': (2, 3)}], d={}", {"a": [1, "b", [], {"c": [2, 3]}], "d": {}}),
        ("a={\"b\": [true, null], 'c': 1, 2: 3,}, ", {"a": {"b": [True, None], "c": 1, "2": 3}}),
        (" a = New York , b = 007", {"a": "New York", "b": 7.0}),
        ("a='x\ny<b>)]'", {"a": "x\ny<b>)]"}),
        ('a="""say "x"\n""", b=\'\'\'\'\'\', c="", d=[""]', {"a": 'say "x"\n', "b": "", "c": "", "d": [""]}),
        ("", {}),
    ],
    ids="quotes escapes pair words numbers keys nested json bare line three none".split(),
)
def test_parse_whole_turns_python_values_into_json(inner, want):
    message = parsed(LFM2_CALL.replace("{}", inner), "lfm2")
    assert message.content is None and len(message.tool_calls) == 1
    assert json.loads(message.tool_calls[0].arguments) == want


def test_parse_whole_reads_lfm2_calls_that_deviate():
    two = calls(("ping", "{}"), ("ping", '{"a": 1}'))
    for inner in ("[ping(), ping(a=1)]", "[ ping( ),\nping( a = 1 ,) ]", "ping(), ping(a=1)"):
        assert parsed(f"<|tool_call_start|>{inner}<|tool_call_end|>ok", "lfm2") == Message("ok", None, two)
    text = '<|tool_call_start|>[{"name": "ping", "arguments": {}}, {"name": "ping", "arguments": {"a": 1}}]'
    assert parsed(f"{text}<|tool_call_end|>\nok", "lfm2") == Message("ok", None, two)


GLM_CALL = "<tool_call>weather{}</tool_call>"


@pytest.mark.parametrize(
    "inner, want",
    [
        ("<arg_key>city</arg_key><arg_value>a <b> </arg_value> c</arg_value>", {"city": "a <b> </arg_value> c"}),
        ("\n<arg_key> city </arg_key>\n\n<arg_value>\n5\n</arg_value>\n", {"city": "\n5\n"}),
        ("<arg_key>days</arg_key><arg_value> 5 </arg_value>", {"days": 5}),
        ("<arg_key>days</arg_key><arg_value>many</arg_value>", {"days": "many"}),
        ('<arg_key>where</arg_key><arg_value>{"x": 1}</arg_value>', {"where": {"x": 1}}),
        ("", {}),
    ],
)
def test_parse_whole_reads_glm_values(inner, want):
    (call,) = parsed(GLM_CALL.format(inner), "glm").tool_calls
    assert (call.name, json.loads(call.arguments)) == ("weather", want)


def test_parse_whole_reads_a_glm_call_of_json():
    text = '<tool_call>{"name": "ping", "arguments": {"a": 1}}</tool_call>'
    assert parsed(text, "glm") == Message(None, None, calls(("ping", '{"a": 1}')))


@pytest.mark.parametrize(
    "text",
    [
        '<minimax:tool_call><invoke name="weather"><parameter name="days">5</parameter></invoke></minimax:tool_call>',
        "<minimax:tool_call>\n<invoke name=weather>\n<parameter name='days'>5</parameter>\n</invoke>",
        '<invoke name="weather"><parameter name="days">5</invoke>',
    ],
)
def test_parse_whole_reads_minimax_calls_that_deviate(text):
    assert parsed(text, "minimax") == Message(None, None, calls(("weather", '{"days": 5}')))


HARMONY_MARKS = shown_tokens("harmony", tools=False)
THOUGHT, FINAL = "<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    "text, want",
    [
        (
            f"<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>{FINAL}c",
            "a\n\nb|c",
        ),
        (f"<|channel|>commentary<|message|>Plan.<|end|>{FINAL}Done.<|return|>", "|Plan.\n\nDone."),
        (f"<|channel|>analysis<|message|>a<|end|>\n{FINAL}b \n<|return|>", "a|b \n"),
        (f"<|channel|>analysis<|message|>not ended {FINAL}b", "not ended|b"),
        ("<|channel|>analysis<|message|>a<|channel|>final<|message|>b", "a|b"),
        ("<|channel|>analysis<|message|>a<|end|>assistant<|channel|>final<|message|>b", "a|b"),
        ("<|channel|>analysis to=python code<|message|>print(1)<|call|>", "print(1)|"),
        ("<|channel|>final <|constrain|>json<|message|>{}", "|{}"),
        ("<|message|>no channel", "|no channel"),
        ("<|start|>assistant<|message|>no channel", "|no channel"),
        ("<|start|>user<|message|>Go on.<|end|>", "Go on.|"),
        ("<|start|>functions.ping to=assistant<|channel|>commentary<|message|>pong<|end|>", "pong|"),
        (f"<|channel|>?? <|end|>{FINAL}b", "??|b"),
        (f"<|channel|>commentary?commentary?<|end|>{FINAL}b", "|?commentary?\n\nb"),
        (f"<|channel|>commentary to=assistant<|channel|>analysis<|message|>a<|end|>{FINAL}b", "a|b"),
        ("<|channel|>final The answer is 4.", "|The answer is 4."),
        ("<|channel|>final<|message|>a<|message|>b<|constrain|>c", "|abc"),
        ("The answer", "|The answer"),
        (" to= is no header", "| to= is no header"),
        ("to=functions.ping, then?", "|to=functions.ping, then?"),
        ("assistant of yours", "|assistant of yours"),
        ("\n- two", "|\n- two"),
    ],
)
def test_parse_whole_reads_harmony_messages(text, want):
    """Reasoning and content, of answers that keep to the format, and of slips that models make."""
    reasoning, _, content = want.partition("|")
    assert parsed(text, "harmony") == Message(content, reasoning or None, [])


@pytest.mark.parametrize(
    "text, name, arguments",
    [
        ("<|channel|>commentary to=functions.ping <|constrain|>json<|message|>{}", "ping", "{}"),
        (" to=functions.ping<|channel|>commentary json<|message|> {} \n<|call|>", "ping", "{}"),
        ("<|channel|>commentary to=functions.ping<|message|><|call|>", "ping", "{}"),
        ("<|start|>assistant to=functions.ping<|channel|>analysis<|message|>{}<|call|>", "ping", "{}"),
        ("to=functions.ping <|message|>{}<|call|>", "ping", "{}"),
        ("<|channel|>commentary to=ping<|constrain|>json<|message|>{}<|end|>", "ping", "{}"),
        ("<|channel|>commentary to=files.read json<|message|>{}<|call|>", "files.read", "{}"),
        ("<|channel|>commentary to=functions.ping<|channel|>commentary<|message|>{}", "ping", "{}"),
        ('<|channel|>commentary to=functions.ping json<|message|>{"a": "x\ny"}<|call|>', "ping", '{"a": "x\\ny"}'),
        ('<|channel|>commentary to=functions.ping json<|message|>{"a": "\\"<\\\\"}', "ping", '{"a": "\\"<\\\\"}'),
        ('<|channel|>commentary to=functions.ping json<|message|>{"a": "<|message|>"}', "ping", '{"a": "<|message|>"}'),
        ("<|channel|>commentary to=functions.ping code<|message|>print(1)<|call|>", "ping", "print(1)"),
    ],
)
def test_parse_whole_reads_harmony_calls_that_deviate(text, name, arguments):
    assert parsed(text, "harmony") == Message(None, None, calls((name, arguments)))
    again = f"{text}{'' if text.endswith('|>') else '<|end|>'}{FINAL}Done."
    assert parsed(again, "harmony") == Message("Done.", None, calls((name, arguments)))


def test_parse_whole_reads_harmony_calls_one_behind_the_other_without_markers_between():
    call = "<|channel|>commentary to=functions.ping json<|message|>"
    text = f'{call}{{"a": "<|channel|>"}}{call}{{}}<|channel|>final<|message|>Done.'
    assert parsed(text, "harmony") == Message("Done.", None, calls(("ping", '{"a": "<|channel|>"}'), ("ping", "{}")))


def test_parse_whole_shows_harmony_calls_by_their_channel_if_there_are_no_tools():
    text = written("harmony", "Hm.", "why", [("ping", {"a": 1})])
    assert parsed(text, "harmony", tools=None) == Message('Hm.\n\n{"a": 1}', "why", [])
    inner = "<|channel|>analysis to=python code<|message|>print(1)<|call|>"
    assert parsed(inner, "harmony", tools=None) == Message("", "print(1)", [])


def test_parser_cut_anywhere_in_harmony_shows_a_beginning_and_no_markers():
    """Each beginning of an answer gives a beginning of what the whole one gives."""
    text = written("harmony", "See: a < b.", "So\n\nwhat?", [("weather", {"city": "Bonn"}), ("ping", {})])
    whole = parsed(text, "harmony")
    for end in range(len(text)):
        message = parsed(text[:end], "harmony")
        seen = [message.reasoning_content or "", message.content or "", *(c.arguments for c in message.tool_calls)]
        want = [whole.reasoning_content, whole.content, *(c.arguments for c in whole.tool_calls)]
        assert all(full.startswith(part.rstrip("< \n")) for part, full in zip(seen, want, strict=False)), (end, seen)
        assert not any("<|" in part for part in seen)
        assert not any(c.arguments.endswith("<") for c in message.tool_calls)
        assert [c.name for c in message.tool_calls] == ["weather", "ping"][: len(message.tool_calls)]


def test_parser_holds_no_more_than_a_header():
    parser = parser_for("harmony", TOOLS)
    assert not parser.feed("<|channel|>final" + " word" * 90)
    assert parser.feed(" word" * 90)[0].text.startswith("word word")


# Malformed and cut


@pytest.mark.parametrize(
    "format, text",
    [
        ("qwen", "Use <tool_call> for calls."),
        ("qwen", '<tool_call>{"name": 5}</tool_call> x'),
        ("qwen", '<tool_call>{"name": "", "arguments": {}}'),
        ("qwen", '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
        ("qwen", '<tool_call>{"arguments": {"a": 1'),
        ("qwen", '<tool_call>{"name": "pi'),
        ("qwen", "<tool_call>[1]</tool_call>"),
        ("qwen-xml", "<tool_call><function=></function></tool_call>"),
        ("qwen-xml", "<tool_call>\n<function=pi"),
        ("glm", "Use <tool_call> for calls."),
        ("glm", "<tool_call>pi"),
        ("glm", "<tool_call><arg_key>a</arg_key></tool_call>"),
        ("minimax", "Use <minimax:tool_call> for calls."),
        ("minimax", '<minimax:tool_call>\n<invoke name="pi'),
        ("minimax", '<invoke name="">\n</invoke>'),
        ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>functions.pi"),
        ("kimi", "<|tool_call_begin|>functions.ping:0<|tool_call_argument_begin|>none<|tool_call_end|>"),
        ("mistral", "Use [TOOL_CALLS] for calls."),
        ("mistral", "[TOOL_CALLS]ping[ARG"),
        ("mistral", "[TOOL_CALLS]ping[ARGS]none"),
        ("mistral", "[TOOL_CALLS][1, 2] [TOOL] [/THINK"),
        ("mistral", '[TOOL_CALLS][{"arguments": {}}]'),
        ("lfm2", "Use <|tool_call_start|> for calls."),
        ("lfm2", "<|tool_call_start|>[ping"),
        ("lfm2", "<|tool_call_start|>[ping]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[(a=1)]<|tool_call_end|>"),
        ("gemma", "<|tool_call>ping{}<tool_call|>"),
        ("gemma", "<|tool_call>call:ping<tool_call|>"),
        ("gemma", "<|tool_call>call:"),
        ("deepseek-v3", f"{DEEPSEEK[0]}{DEEPSEEK[4]}"),
        ("deepseek-v3.1", f"{DEEPSEEK[0]}{DEEPSEEK[1]}ping{DEEPSEEK[3]}"),
        ("deepseek-v3.1", f"{DEEPSEEK[1]}ping{DEEPSEEK[2]}none{DEEPSEEK[3]}"),
    ],
)
def test_parse_whole_leaves_what_is_no_call_as_content(format, text):
    assert parsed(text, format) == Message(text, None, [])


@pytest.mark.parametrize(
    "format, text, arguments, content",
    [
        ("qwen", '<tool_call>{"name": "ping", "arguments": {"a": "b', '{"a": "b', None),
        ("qwen", '<tool_call>{"name": "ping", "arguments": {"a": }}</tool_call>x', '{"a": }', "x"),
        ("qwen", '<tool_call>{"name": "ping", "arguments": {"a": 1</tool_call>x', '{"a": 1', "x"),
        ("qwen-xml", "<tool_call><function=ping><parameter=a>\nb", '{"a": "b', None),
        ("qwen-xml", "<tool_call><function=ping>{a}</function></tool_call>x", "{a}</function>", "x"),
        ("qwen-xml", "<tool_call><function=ping><parameter=a</tool_call>x", "<parameter=a", "x"),
        ("glm", "<tool_call>ping\n<arg_key>a</arg_key>\n<arg_value>b", '{"a": "b', None),
        ("glm", "<tool_call>ping<arg_key>a</tool_call>x", "<arg_key>a", "x"),
        ("glm", "<tool_call>ping<arg_key>a</arg_key><arg_value>b</tool_call>x", '{"a": "b"}', "x"),
        ("minimax", '<invoke name="ping"><parameter name="a">b', '{"a": "b', None),
        ("minimax", '<invoke name="ping">{a}</invoke>x', "{a}", "x"),
        ("minimax", '<invoke name="ping"><parameter name="a</invoke>x', '<parameter name="a', "x"),
        ("kimi", '<|tool_call_begin|>functions.ping:0<|tool_call_argument_begin|>{"a": "b', '{"a": "b', None),
        ("kimi", '<|tool_call_begin|>ping<|tool_call_argument_begin|>{"a": 1<|tool_call_end|>x', '{"a": 1', "x"),
        ("mistral", '[TOOL_CALLS]ping[ARGS]{"a": "b', '{"a": "b', None),
        ("mistral", '[TOOL_CALLS]ping[ARGS]{"a": } x', '{"a": }', "x"),
        ("lfm2", "<|tool_call_start|>[ping(a='b", '{"a": "b', None),
        ("lfm2", "<|tool_call_start|>[ping(a=1, 2)]<|tool_call_end|>x", '{"a": 1, 2)]', "x"),
        ("lfm2", "<|tool_call_start|>[ping(a=[1)]<|tool_call_end|>x", '{"a": [1)]', "x"),
        ("lfm2", "<|tool_call_start|>[ping(a=1<|tool_call_end|>x", '{"a": 1', "x"),
        ("lfm2", "<|tool_call_start|>[ping(a='b<|tool_call_end|>x", '{"a": "b', "x"),
        ("gemma", '<|tool_call>call:ping{a:<|"|>b', '{"a": "b', None),
        ("gemma", "<|tool_call>call:ping{a:1,b c}<tool_call|>x", '{"a": 1,b c}', "x"),
        ("gemma", "<|tool_call>call:ping{a:[1}<tool_call|>x", '{"a": [1}', "x"),
        ("gemma", "<|tool_call>call:ping{a:1,b<tool_call|>x", '{"a": 1,b', "x"),
        ("gemma", '<|tool_call>call:ping{<|"|>b<tool_call|>x', '{<|"|>b', "x"),
        ("gemma", '<|tool_call>call:ping{a:<|"|>b<tool_call|>x', '{"a": "b', "x"),
        ("deepseek-v3.1", f"{DEEPSEEK[1]}ping{DEEPSEEK[2]}" + '{"a": "b', '{"a": "b', None),
        ("deepseek-v3.1", f"{DEEPSEEK[1]}ping{DEEPSEEK[2]}" + '{"a": "b' + DEEPSEEK[3] + "x", '{"a": "b', "x"),
    ],
)
def test_parse_whole_passes_arguments_on_that_cannot_be_read(format, text, arguments, content):
    assert parsed(text, format) == Message(content, None, calls(("ping", arguments)))


@pytest.mark.parametrize("format", CALLING)
def test_parser_counts_calls_begun_and_complete(format):
    text = written(format, "", "", [("ping", {"city": "x"}), ("ping", {"city": "y"})])
    parser = parser_for(format, TOOLS)
    seen = []
    for character in text:
        parser.feed(character)
        seen.append((parser.calls, parser.complete))
    parser.end()
    assert parser.calls == parser.complete == 2
    assert [pair for pair, _ in itertools.groupby(seen)] == [(0, 0), (1, 0), (1, 1), (2, 1), (2, 2)]


# What holds for any text


def markers(format):
    known = FORMATS[format]
    found = [*(known.reasoning or ()), *(known.call or ()), *(known.calls or ()), known.separator, known.quote]
    return [mark for mark in found if mark]


PIECES = {
    "plain": ["<think>", "a"],
    "qwen": ['{"name": "ping", "arguments": ', '{"arguments": ', '"name": "ping"', '{"a": "', '"}', "}", ",", "\\"],
    "qwen-xml": ["<function=weather>", "<function=", "<parameter=city>", "<parameter=days>", "</parameter>", "\n12\n"],
    "glm": ["ping", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "city", "\n12\n"],
    "minimax": ['"ping">', "ping>", '<parameter name="city">', "<parameter name=", "</parameter>", "12"],
    "kimi": ["functions.", "ping", ":0", '{"a": "', '"}', "{}"],
    "mistral": ["ping", "[CALL_ID]", "[", "[{", '"name": "ping"', '"arguments": ', '{"a": "', '"}', "{}", "]", ","],
    "lfm2": ["[", "ping(", "ping", "a=", "'", '"', "\\", "12", "{", "}", ")", "]", ", ", ": ", '{"name": "ping"}'],
    "gemma": ["thought\n", "call:ping{", "call:", "a:", "12", "[", "]", "{", "}", ",", '"'],
    "deepseek-v3": ["function", "ping", "\n```json\n", '{"a": "', '"}', "\n```", "{}"],
    "deepseek-v3.1": ["ping", '{"a": 1}', '"', "\\"],
    "harmony": [
        "<|message|>",
        "<|constrain|>",
        "<|return|>",
        "analysis",
        "final",
        "commentary",
        "json",
        '{"a": "',
        '"}',
    ],
}
PIECES["harmony"] += [" to=functions.ping", "to=", "assistant", "<|channel|>final<|message|>"]
PIECES["qwen-xml"] += ["</function>", *PIECES["qwen"]]


def texts(format):
    usual = [*markers(format), *PIECES[format], " ", "\n", "<", "</", "x", "ä", "🙂"]
    return st.lists(st.sampled_from(usual) | st.text(max_size=3), max_size=14).map("".join)


FORMAT_AND_TEXT = st.sampled_from(list(FORMATS)).flatmap(lambda name: st.tuples(st.just(name), texts(name)))


def cut(text, places):
    places = sorted({min(place, len(text)) for place in places})
    return [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]


@settings(max_examples=250, deadline=None)
@given(FORMAT_AND_TEXT, st.lists(st.integers(0, 120), max_size=8), st.booleans(), st.booleans())
@example(("deepseek-v3", f"{DEEPSEEK[1]}a<b{DEEPSEEK[2]}{{}}"), [], False, True)
def test_deltas_of_any_cut_make_the_whole(pair, places, inside, tools):
    format, text = pair
    given_tools = TOOLS if tools else None
    want = parsed(text, format, given_tools, in_reasoning=inside)
    for pieces in (cut(text, places), list(text), [text, ""]):
        parser = parser_for(format, given_tools, in_reasoning=inside, ids=numbered())
        deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.end()
        assert gather(deltas) == want
        assert all(isinstance(delta, CallBegin) or delta.text for delta in deltas)


def bare(text, format):
    for mark in markers(format):
        text = text.replace(mark, "")
    return "".join(text.split())


@settings(max_examples=250, deadline=None)
@given(FORMAT_AND_TEXT, st.booleans(), st.booleans())
def test_text_without_calls_is_neither_lost_nor_doubled(pair, inside, tools):
    format, text = pair
    parser = parser_for(format, TOOLS if tools else None, in_reasoning=inside)
    deltas = [*parser.feed(text), *parser.end()]
    if format == "harmony":  # headers are no text
        assert not any(mark in delta.text for delta in deltas if isinstance(delta, Content) for mark in HARMONY_MARKS)
    elif not parser.calls:
        out = "".join(delta.text for delta in deltas)
        label = FORMATS[format].label.strip()
        assert bare(out, format).replace(label, "") == bare(text, format).replace(label, "")
    if format == "plain":
        assert gather(deltas).content == text


WORDS = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="<"), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.from_regex(r"[a-z_]{1,5}", fullmatch=True), inner),
    max_leaves=6,
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "city": WORDS,
        "days": st.integers(),
        "fine": st.booleans(),
        "where": st.dictionaries(st.from_regex(r"[a-z]{1,5}", fullmatch=True), VALUES, max_size=3),
    },
)
ANSWERS = st.tuples(
    st.sampled_from(CALLING),
    WORDS.map(str.strip),
    WORDS.map(str.strip),
    st.lists(st.tuples(st.just("weather"), ARGUMENTS), max_size=3),
    st.lists(st.integers(0, 400), max_size=8),
)


@settings(max_examples=150, deadline=None)
@given(ANSWERS)
def test_what_a_format_writes_comes_back(answer):
    format, content, reasoning, pairs, places = answer
    parser = parser_for(format, TOOLS)
    text = written(format, content, reasoning, pairs)
    message = gather([d for piece in cut(text, places) for d in parser.feed(piece)] + parser.end())
    assert (message.content or "", message.reasoning_content or "") == (content, reasoning)
    assert [(call.name, json.loads(call.arguments)) for call in message.tool_calls] == pairs
    assert parser.complete == len(pairs)


def test_parser_streams_strings_of_arguments_as_they_come():
    for format in CALLING:
        parser = parser_for(format, TOOLS)
        text = written(format, "", "", [("weather", {"city": "a b c d e f g"})])
        at = text.index("d e")
        assert gather(parser.feed(text[:at])).tool_calls[0].arguments == '{"city": "a b c '


def test_parser_merges_deltas_of_a_kind():
    parser = parser_for("qwen", TOOLS, ids=numbered())
    deltas = parser.feed('<think>a <b> c</think>d <b> e<tool_call>{"name": "ping", "arguments": {"a": "<"}}')
    want = [Reasoning("a <b> c"), Content("d <b> e"), CallBegin(0, "call_0", "ping"), CallArguments(0, '{"a": "<"}')]
    assert deltas == want


HOSTILE = [
    *["<", "<t", "<tool_call>", '<tool_call>{"arguments": [', '<tool_call>{"name": "ping", "arguments": {"a": "'],
    *["<think>", "</think>", " ", " \n", "\n<parameter=city>", "</parameter>\n", "</function>\n", "{", '"', "\\", ","],
    *["<|tool_call>call:ping{a:", '<|"|>', "call:ping{}", "<|channel>", "".join(DEEPSEEK[:3]), "x"],
    *["<|start|>", "<|channel|>commentary to=ping", "<|message|>", "<|end|>", "to=", "assistant"],
    *["[", "[T", "[TOOL_CALLS]", "[TOOL_CALLS]ping", '[TOOL_CALLS][{"name": "ping"}, ', "<|tool_call_start|>[ping(a="],
]
PREFIXES = [
    *["", "<tool_call><function=weather><parameter=city>", "<tool_call><function=weather><parameter=tags>"],
    *['<tool_call>{"name": "ping", "arguments": ', '<tool_call>{"arguments": ', "<|tool_call>call:ping{a:"],
    *['<|tool_call>call:ping{a:<|"|>', f'{DEEPSEEK[1]}ping{DEEPSEEK[2]}{{"a": "'],
    *["<|channel|>analysis", '<|channel|>commentary to=ping<|message|>{"a": "'],
    *['[TOOL_CALLS]ping[ARGS]{"a": ', "<|tool_call_start|>[ping(a='", "<|tool_call_start|>[ping(a=["],
]


@pytest.mark.parametrize("format", FORMATS)
def test_parser_reads_each_character_a_bounded_number_of_times(format, monkeypatch):
    """Steps per character do not grow with the length."""
    steps = 0
    more = Parser._more

    def counted(self):
        nonlocal steps
        steps += 1
        return more(self)

    monkeypatch.setattr(Parser, "_more", counted)
    for unit, prefix in itertools.product(HOSTILE, PREFIXES):
        counts = []
        for times in (1, 4):
            steps = 0
            text = prefix + unit * (500 // len(unit)) * times
            parser = parser_for(format, TOOLS)
            for at in range(0, len(text), 97):
                parser.feed(text[at : at + 97])
            parser.end()
            counts.append(steps)
        assert counts[1] <= 4 * counts[0] + 60, (unit, prefix, counts)


def test_parse_whole_takes_a_million_characters():
    message = parsed(XML.format(f"<parameter=city>\n{'a<b>' * 250_000}\n</parameter>\n"), "qwen-xml")
    assert len(message.tool_calls[0].arguments) == 1_000_000 + len('{"city": ""}')


# Around the parser


def test_call_id_is_new_each_time():
    first, second = call_id(), call_id()
    assert first != second and first.startswith("call_") and len(first) == 29


def test_parser_names_the_formats():
    with pytest.raises(InvalidArgument, match="format is 'llama', expected one of plain, qwen"):
        parser_for("llama")


@pytest.mark.parametrize(
    "tools",
    [
        [{}],
        [{"type": "function", "function": None}],
        [{"name": "ping", "parameters": []}],
        [{"function": {"name": "ping", "parameters": {"properties": [1]}}}],
        [{"function": {"name": "ping", "parameters": {"properties": {"a": 5, "b": {"$ref": "#/properties/b"}}}}}],
        [{"function": {"name": "ping", "parameters": {"properties": {"a": {"$ref": "http://x"}, "b": {"type": 1}}}}}],
    ],
)
def test_parser_takes_odd_tools(tools):
    text = XML.replace("weather", "ping").format("<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n")
    assert json.loads(parsed(text, "qwen-xml", tools).tool_calls[0].arguments) == {"a": "1", "b": "2"}


def test_parser_follows_each_reference_once(monkeypatch):
    seen = []
    types = _arguments._types
    monkeypatch.setattr(_arguments, "_types", lambda *args: seen.append(args) or types(*args))
    each = {f"S{n}": {"anyOf": [{"$ref": f"#/$defs/S{n + 1}"}] * 20} for n in range(20)}
    parameters = {"properties": {"a": {"$ref": "#/$defs/S0"}}, "$defs": each}
    parser_for("qwen-xml", [{"function": {"name": "f", "parameters": parameters}}])
    assert 0 < len(seen) < 200


def tokenizer(template=None, tokens=(), special=()):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: n for n, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(token, normalized=False) for token in tokens])
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return Tokenizer(backend, templates=ChatTemplates({"default": (template, "t")}) if template is not None else None)


@pytest.mark.parametrize(
    "template, tokens, want",
    [
        (None, (), "plain"),
        ("{{ messages }}", (), "plain"),
        ("<tool_call>\\n{{ call.name }}", ("<tool_call>", "<think>"), "qwen"),
        ("no tools", ("<think>", "</think>"), "qwen"),
        ("<tool_call>\\n<function=x>\\n<parameter=y>", ("<tool_call>",), "qwen-xml"),
        ("<tool_call>{name}\\n<arg_key>k</arg_key>\\n<arg_value>v", ("<tool_call>", "<think>"), "glm"),
        ("toolcall = '<minimax:tool_call>'", ("<think>",), "minimax"),
        ("<|tool_calls_section_begin|>", ("<|tool_call_argument_begin|>", "<|tool_call_begin|>"), "kimi"),
        ("no calls", ("[TOOL_CALLS]", "[ARGS]", "[THINK]"), "mistral"),
        ("'[TOOL_CALLS]' + name + '[ARGS]' + arguments", (), "mistral"),
        ("[TOOL_CALLS] [{", ("[TOOL_CALLS]",), "plain"),
        ("no calls", ("<|tool_call_start|>", "<think>"), "lfm2"),
        ("<|tool_call>call:", (), "gemma"),
        ("no tools", ("<|channel>", "<channel|>"), "gemma"),
        ("<｜tool▁sep｜>' + x + '\\n```json", ("<think>",), "deepseek-v3"),
        ("<｜tool▁sep｜>", ("<think>",), "deepseek-v3.1"),
        ("<|tool_call> ```json", ("<｜tool▁sep｜>", "<think>"), "gemma"),
        ("'<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>'", (), "harmony"),
        ("'<|start|>' + message.role + '<|message|>'", ("<|channel|>", "<|call|>"), "harmony"),
        ("'<|start|>' + message.role + '<|message|>'", (), "plain"),
    ],
)
def test_format_of_goes_by_template_and_tokens(template, tokens, want):
    assert format_of(tokenizer(template, tokens)) == want


@pytest.mark.parametrize(
    "format, prompt, want",
    [
        ("qwen", "<|im_start|>assistant\n<think>\n", True),
        ("qwen", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("qwen", "what is <think>?<|im_end|>\n", False),
        ("deepseek-v3.1", "<｜Assistant｜><think>", True),
        ("deepseek-v3.1", "<｜Assistant｜></think>", False),
        ("glm", "<|assistant|><think>", True),
        ("glm", "<|assistant|>\n<think></think>", False),
        ("minimax", "]~b]ai\n<think>\n", True),
        ("kimi", "<|im_assistant|>assistant<|im_middle|>", False),
        ("mistral", "[/INST][THINK]", True),
        ("mistral", "[/INST]", False),
        ("gemma", "<|turn>model\n<|channel>thought\n", True),
        ("gemma", "<|turn>model\n<|channel>thought\n<channel|>", False),
        ("gemma", "<|turn>model\n", False),
        ("plain", "<think>", False),
        ("harmony", "<|start|>assistant", False),
        ("harmony", "<|start|>assistant<|channel|>analysis<|message|>", True),
        ("harmony", "<|start|>assistant<|channel|>final<|message|>", False),
    ],
)
def test_in_reasoning_looks_at_the_end_of_the_prompt(format, prompt, want):
    assert in_reasoning(format, prompt) is want


def test_shown_tokens_become_text_although_they_are_special():
    model = tokenizer(special=(*markers("gemma"), "<turn|>"))
    text = written("gemma", "ok", "why", [("ping", {"a": "b"})])
    ids = model.encode(text + "<turn|>")
    hidden, seen = model.detokenizer(), model.detokenizer(shown=shown_tokens("gemma", tools=True))
    assert "<|" not in "".join(map(hidden.add, ids))
    assert "".join(map(seen.add, ids)) == text
    assert shown_tokens("gemma", tools=False) == ("<|channel>", "<channel|>")
    assert shown_tokens("plain", tools=True) == ()


def test_markers_have_one_bracket_and_none_begins_another():
    for format in FORMATS:
        for mark in markers(format):
            assert mark[0] == ("[" if format == "mistral" else "<") and mark.rindex(mark[0]) == 0
            assert not FORMATS[format].parser.text.match(mark)
            assert [other for other in markers(format) if other.startswith(mark)] == [mark]


def test_a_format_with_calls_has_a_grammar_and_a_parser_of_them():
    for name, format in FORMATS.items():
        assert format.name == name
        assert (format.call is not None) == (format.write_call is not None) == (format.parser is not Parser)


def test_with_arguments_gives_templates_what_they_take():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    changed = with_arguments(messages, "qwen")
    assert changed[0] == messages[0]
    assert changed[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert with_arguments(messages, "deepseek-v3.1")[1]["tool_calls"][0] == call
    assert with_arguments(changed, "deepseek-v3.1")[1]["tool_calls"][0] == call


def test_with_arguments_gives_harmony_one_call_a_message():
    """Each with its result behind it, and what was thought and said before the first of them as `thinking`."""
    made = [{"id": f"c{n}", "type": "function", "function": {"name": f"f{n}", "arguments": "{}"}} for n in range(3)]
    user = {"role": "user", "content": "x"}
    results = [{"role": "tool", "tool_call_id": f"c{n}", "content": f"r{n}"} for n in (2, 0, 9, 1)]
    answer = {"role": "assistant", "content": "ok", "reasoning_content": "done"}
    calling = {"role": "assistant", "content": "Plan.", "reasoning_content": "why", "tool_calls": made}
    changed = with_arguments([user, calling, *results, answer, user], "harmony")
    assert [m["content"] for m in changed] == ["x", "", "r0", "", "r1", "", "r2", "r9", "ok", "x"]
    assert [m["tool_calls"][0]["function"]["name"] for m in changed if "tool_calls" in m] == ["f0", "f1", "f2"]
    assert [(n, m["thinking"]) for n, m in enumerate(changed) if "thinking" in m] == [(1, "why\n\nPlan.")]
    assert changed[1]["tool_calls"][0]["function"]["arguments"] == {}
    # what the model goes on with keeps its thoughts
    assert with_arguments([user, answer], "harmony")[1]["thinking"] == "done"
    alone = with_arguments([user, {"role": "assistant", "content": "", "tool_calls": made[:1]}, results[1]], "harmony")
    assert [m["role"] for m in alone] == ["user", "assistant", "tool"] and "thinking" not in alone[1]


def test_mistral_has_short_ids_and_two_efforts():
    call = {"id": "call_abc", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "call_abc"}]
    first, result = with_arguments(messages, "mistral")
    assert first["tool_calls"][0]["id"] == result["tool_call_id"] == "000000000"
    efforts = [FORMATS["mistral"].effort(effort)["reasoning_effort"] for effort in ("none", "minimal", "low", "high")]
    assert efforts == ["none", "none", "high", "high"]


def test_with_arguments_gives_calls_the_ids_that_templates_of_kimi_write():
    def call(id, name):
        return {"id": id, "type": "function", "function": {"name": name, "arguments": "{}"}}

    messages = [
        {"role": "assistant", "tool_calls": [call("call_a", "f"), call("call_b", "g")]},
        {"role": "tool", "tool_call_id": "call_b", "content": "2"},
        {"role": "tool", "tool_call_id": "unknown", "content": "1"},
        {"role": "assistant", "tool_calls": [call("call_c", "f")]},
    ]
    first, result, other, second = with_arguments(messages, "kimi")
    assert first["tool_calls"] == [call("functions.f:0", "f"), call("functions.g:1", "g")]
    assert (result["tool_call_id"], other) == ("functions.g:1", messages[2])
    assert second["tool_calls"] == [call("functions.f:2", "f")]
    assert messages[0]["tool_calls"][0]["id"] == "call_a"


@pytest.mark.parametrize("name", ["functions.ping:0", "functions.ping", "ping:12", "ping", "functions.ping:"])
def test_parse_whole_takes_names_of_kimi_with_and_without_what_makes_them_ids(name):
    text = f"<|tool_call_begin|>{name}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    assert parsed(text, "kimi").tool_calls == calls(("ping", "{}"))


@pytest.mark.parametrize("arguments", ["{", "[1]", "5", 5, None, "[" * 100_000, '{"a": NaN}'])
def test_with_arguments_refuses_what_is_no_object(arguments):
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    with pytest.raises(InvalidArgument, match=r"^messages\[0\].tool_calls\[0\].function.arguments is .*, expected"):
        with_arguments([message], "qwen")
