"""Grammars: what they allow token by token, what models write under them, and which schemas are refused."""

import contextlib
import functools
import itertools
import json
import sys

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

import penstock
from penstock.errors import InvalidArgument
from penstock.text import grammar as module
from penstock.text.formats import FORMATS, parse_whole, shown_tokens
from penstock.text.grammar import Grammar, grammar_for, grammar_for_tools, grammar_of_gbnf
from penstock.text.grammar_end import shortest_end
from penstock.text.tokenizer import Tokenizer

pytest.importorskip("llguidance")

WHERE = {"type": "object", "properties": {"x": {"type": "number"}, "ok": {"type": "boolean"}}, "required": ["x"]}
PARAMETERS = {
    "type": "object",
    "properties": {
        "days": {"type": "integer"},
        "city": {"type": "string"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "where": {"$ref": "#/$defs/Where"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city", "where"],
    "$defs": {"Where": WHERE},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "ping"}},
]
NAMED = {"type": "function", "function": {"name": "ping"}}
CALLING = [name for name in FORMATS if name != "plain"]
NEXT = "<|end|><|start|>assistant"  # between two messages of harmony


def marks(format):
    return shown_tokens(format, tools=True)


def byte_level(plain=(), special=(), end="<|endoftext|>"):
    """A tokenizer of single bytes, and of the tokens given."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: n for n, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(token, normalized=False) for token in plain])
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in (*special, end)])
    return Tokenizer(backend, eos_ids=[backend.token_to_id(end)])


def schema_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def allowed(grammar):
    bits = np.unpackbits(grammar.mask().view(np.uint8), bitorder="little")
    return bits.nonzero()[0].tolist()


def taken(grammar, tokenizer, text):
    """How many tokens of a text the grammar takes, of how many."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    for n, token in enumerate(ids):
        if token not in allowed(grammar):
            return n, len(ids)
        grammar.accept(token)
    return len(ids), len(ids)


def fits(grammar, tokenizer, text):
    """Whether a text fits as a whole."""
    grammar = grammar.copy()
    took, count = taken(grammar, tokenizer, text)
    return took == count and not tokenizer.eos_ids.isdisjoint(allowed(grammar))


@pytest.fixture(scope="module")
def plain():
    return byte_level(special=("<|special|>",))


@pytest.fixture(scope="module")
def llm():
    return penstock.load()


# Masks


def test_mask_has_a_bit_per_token_of_the_model(plain):
    grammar = grammar_for({"type": "json_object"}, plain, plain.vocab_size + 40)
    words = grammar.mask()
    assert words.dtype == np.uint32 and words.shape == (-(-(plain.vocab_size + 40) // 32),)
    assert allowed(grammar) == plain.encode("{")
    assert not grammar.done


def test_mask_never_allows_special_tokens_and_ids_without_one(plain):
    grammar = grammar_for(schema_format({"type": "string"}), plain, plain.vocab_size + 40)
    assert taken(grammar, plain, '"a') == (2, 2)
    inside = allowed(grammar)
    assert len(inside) > 100 and max(inside) < 256
    assert plain.backend.token_to_id("<|special|>") not in inside


def test_mask_allows_an_end_only_where_the_text_is_whole(plain):
    grammar = grammar_for(schema_format({"type": "array", "items": {"type": "integer"}}), plain)
    ends = plain.eos_ids
    for character in "[1, -2":
        assert ends.isdisjoint(allowed(grammar)) and not grammar.done
        assert taken(grammar, plain, character) == (1, 1)
    assert taken(grammar, plain, "]") == (1, 1)
    assert grammar.done and set(allowed(grammar)) == ends
    number = grammar_for(schema_format({"type": "integer"}), plain)
    assert taken(number, plain, "12") == (2, 2)
    assert not number.done and ends < set(allowed(number))
    number.accept(*ends)
    assert number.done


def test_accept_takes_every_token_of_the_mask():
    """Also where an added token stands for its text; a token that is refused changes nothing."""
    tokenizer = byte_level(plain=("<think>", '": ', "ab"))
    schema = {"type": "object", "properties": {"<think>": {"const": "<think>a"}}, "required": ["<think>"]}
    grammar = grammar_for(schema_format({**schema, "additionalProperties": False}), tokenizer)
    rng, refused = np.random.default_rng(1), 0
    for _ in range(40):
        inside = allowed(grammar)
        for token in inside:
            grammar.copy().accept(token)
        for token in set(range(tokenizer.vocab_size)) - set(inside):
            with contextlib.suppress(InvalidArgument):
                grammar.copy().accept(token)
                continue
            refused += 1
        assert allowed(grammar) == inside
        if grammar.done:
            assert refused > 1000
            return
        grammar.accept(int(rng.choice(inside)))
    raise AssertionError("the text did not end")


@pytest.mark.parametrize("token", [-1, 10_000, 2**40])
def test_accept_names_a_token_out_of_range(plain, token):
    with pytest.raises(InvalidArgument, match=f"^grammar: token is {token}, expected 0 to {plain.vocab_size - 1}"):
        grammar_for({"type": "json_object"}, plain).accept(token)


def test_accept_names_a_token_that_is_not_allowed(plain):
    grammar = grammar_for({"type": "json_object"}, plain)
    (wrong,) = plain.encode("[")
    with pytest.raises(InvalidArgument, match=f"^grammar: token {wrong} is not allowed, expected one of the mask$"):
        grammar.accept(wrong)
    assert fits(grammar, plain, "{}")


def test_copy_goes_its_own_way(plain):
    first = grammar_for(schema_format({"enum": ["ab", "ac"]}), plain)
    taken(first, plain, '"a')
    second = first.copy()
    assert taken(second, plain, 'b"') == (2, 2) and second.done
    assert not first.done and fits(first, plain, 'c"')


def test_white_space_in_json_is_bounded(plain):
    grammar = grammar_for({"type": "json_object"}, plain)
    assert fits(grammar, plain, '{\n        "a": {\n            "b": [1, 2]\n        }\n}')
    assert fits(grammar, plain, '{"a":1,\r\n\t\t"b" : [ ]}')
    for space in ("  ", "\t", "\n\n", " \n", "\n" + " " * 21):
        assert not fits(grammar, plain, "{" + space + "}"), space


def test_greedy_json_of_a_small_model_ends():
    """It likes white space best, wherever it may write some."""
    llm = penstock.load()
    inner = {"type": "object", "properties": {"e": {"enum": ["x", "y"]}}, "required": ["e"]}
    properties = {"a": {"type": "string", "maxLength": 12}, "b": {"type": "boolean"}, "c": {"type": "null"}, "d": inner}
    closed = {"additionalProperties": False}
    schema = {"type": "object", "properties": {**properties, "d": inner | closed}, "required": list("abcd")} | closed
    answer = llm.chat([{"role": "user", "content": "hello"}], max_tokens=100, response_format=schema_format(schema))
    assert answer.finish_reason == "stop" and list(json.loads(answer.text)) == list("abcd")


# What a response_format means


SCHEMAS = [
    ({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, '{"a": 1}', '{"b": 1}'),
    ({"$ref": "#/$defs/N", "$defs": {"N": {"type": "array", "items": {"$ref": "#/$defs/N"}}}}, "[[], [[]]]", "[1]"),
    ({"enum": ["x", 1, None]}, "null", "true"),
    ({"type": "string", "pattern": "^[a-c]+$", "maxLength": 3}, '"abc"', '"abcd"'),
    ({"anyOf": [{"type": "integer", "minimum": 3}, {"type": "null"}]}, "3", "2"),
    (
        {"oneOf": [{"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]} for kind in "ab"]},
        '{"kind": "b"}',
        '{"kind": "c"}',
    ),
    ({"type": "string", "format": "date"}, '"2024-02-29"', '"2024-13-01"'),
    ({"x-guidance": {"whitespace_flexible": False}, "type": "array"}, "[ ]", "{}"),
]


@pytest.mark.parametrize("schema, good, bad", SCHEMAS)
def test_grammar_for_holds_to_the_schema(plain, schema, good, bad):
    grammar = grammar_for(schema_format(schema), plain)
    assert fits(grammar, plain, good) and not fits(grammar, plain, bad)


def test_grammar_for_json_object_takes_objects_and_a_schema(plain):
    grammar = grammar_for({"type": "json_object"}, plain)
    assert fits(grammar, plain, '{"a": ["ä", 1.5e3, {"b": null}]}') and not fits(grammar, plain, "[1]")
    grammar = grammar_for({"type": "json_object", "schema": {"type": "array"}}, plain)
    assert fits(grammar, plain, "[1]")


def test_grammar_for_text_is_none(plain):
    assert grammar_for(None, plain) is None
    assert grammar_for({"type": "text"}, plain) is None


@pytest.mark.parametrize("special", [True, False], ids=["special", "plain"])
def test_grammar_for_leaves_room_for_harmony_messages(special):
    tokenizer = byte_level(special=marks("harmony")) if special else byte_level(plain=marks("harmony"))
    own = grammar_for({"type": "json_object"}, tokenizer, format="harmony")
    inside = grammar_for({"type": "json_object"}, tokenizer, format="harmony", in_reasoning=True)
    final, thought = "<|channel|>final<|message|>", f"<|channel|>analysis<|message|>{{}} <b> hm{NEXT}"
    for text in (final, f"{thought}{final}", f"{thought}{thought}<|channel|>final <|constrain|>json<|message|>", ""):
        assert fits(own, tokenizer, f'{text}{{"a": 1}}'), text
    for text in (
        final,
        f"<|channel|>analysis<|message|>{{}}{NEXT}",
        thought,
        f"<|channel|>commentary<|message|>a{NEXT}",
    ):
        assert not fits(own, tokenizer, f"{text}hm")
    assert fits(inside, tokenizer, f'so{NEXT}{thought}{final}{{"a": 1}}')
    assert not fits(inside, tokenizer, '{"a": 1}')


def test_grammar_for_harmony_ends_where_its_tokens_do():
    """<|call|> and <|return|> are end tokens: allowed behind a whole call, and nowhere else."""
    tokenizer = byte_level(special=marks("harmony"))
    ends = {tokenizer.backend.token_to_id(mark) for mark in ("<|call|>", "<|return|>")}
    tokenizer.eos_ids |= ends
    grammar = grammar_for_tools(TOOLS, "required", "harmony", tokenizer, parallel=False)
    head = "<|channel|>commentary to=functions.ping <|constrain|>json<|message|>{"
    for count, token in enumerate(tokenizer.encode(head + "}"), 1):
        assert ends.isdisjoint(allowed(grammar)), count
        grammar.accept(token)
    assert grammar.done and set(allowed(grammar)) == tokenizer.eos_ids
    both = grammar_for({"type": "json_object"}, tokenizer, format="harmony", tools=TOOLS)
    call = f"{head}}}"
    assert fits(both, tokenizer, call) and fits(both, tokenizer, f"{call}{NEXT}{call}")
    assert fits(both, tokenizer, "<|channel|>final<|message|>{}")
    assert not fits(both, tokenizer, f"{call}{NEXT}<|channel|>final<|message|>{{}}")


@pytest.mark.parametrize("format", [name for name in CALLING if name != "harmony"])
@pytest.mark.parametrize("special", [True, False], ids=["special", "plain"])
def test_grammar_for_leaves_room_for_reasoning(format, special):
    tokenizer = byte_level(special=marks(format)) if special else byte_level(plain=marks(format))
    opening, closing = FORMATS[format].reasoning
    own = grammar_for({"type": "json_object"}, tokenizer, format=format)
    inside = grammar_for({"type": "json_object"}, tokenizer, format=format, in_reasoning=True)
    assert fits(own, tokenizer, '{"a": 1}')
    assert fits(own, tokenizer, f'{opening}\n{{}} "</b>" hm{closing}\n\n{{"a": 1}}')
    assert fits(own, tokenizer, f"{opening}{closing}{{}}")
    assert not fits(own, tokenizer, f"{opening}hm{closing}hm")
    assert fits(inside, tokenizer, f'so{closing}\n{{"a": 1}}')
    assert not fits(inside, tokenizer, '{"a": 1}')


def test_grammar_for_allows_calls_beside_the_json():
    tokenizer = byte_level(special=marks("gemma"))
    grammar = grammar_for({"type": "json_object"}, tokenizer, format="gemma", tools=TOOLS, parallel=False)
    assert fits(grammar, tokenizer, "{}") and fits(grammar, tokenizer, "<|tool_call>call:ping{}<tool_call|>")
    assert not fits(grammar, tokenizer, "<|tool_call>call:pong{}<tool_call|>")


# Models under a grammar


def shape(value):
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    return [shape(item) for item in value] if isinstance(value, list) else type(value).__name__


def test_a_model_that_knows_no_json_writes_it(llm):
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2, "maxItems": 2},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    }
    grammar = grammar_for(schema_format(schema), llm.tokenizer, llm.config.vocab_size)
    wanted = {"name": "str", "age": "int", "tags": ["str", "str"]}
    done = [
        llm.generate("Once upon a time", max_tokens=400, temperature=t, seed=seed, grammar=grammar.copy())
        for t, seed in [(0.0, 0), (1.2, 1)]
    ]
    for completion in done:
        assert completion.finish_reason == "stop"
        value = json.loads(completion.text)
        assert shape(value) == wanted and value["age"] <= 150 and len(value["name"]) <= 8
    assert len({completion.text for completion in done}) > 1


FREE = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "tale": {"type": "string"}, "legs": {"type": "integer"}},
    "required": ["name", "tale", "legs"],
}
SEVERAL = {
    "type": "object",
    "properties": {"foxes": {"type": "array", "items": FREE | {"additionalProperties": False}, "minItems": 1}},
    "required": ["foxes"],
}


@pytest.mark.parametrize("asked", [{"type": "json_object"}, schema_format(FREE), schema_format(SEVERAL)], ids=range(3))
@pytest.mark.parametrize("most", [50, 73, 100])
def test_json_is_closed_before_the_last_token(llm, asked, most):
    """Strings that a model would never end, and what is required behind them."""
    grammar = grammar_for(asked, llm.tokenizer, llm.config.vocab_size)
    for options in ({}, {"temperature": 1.5, "seed": most}):
        done = llm.chat([{"role": "user", "content": "A fox"}], max_tokens=most, response_format=asked, **options)
        assert len(done.tokens) <= most and done.finish_reason in (("length",) if not options else ("length", "stop"))
        assert isinstance(json.loads(done.text), dict) and fits(grammar, llm.tokenizer, done.text)


@pytest.mark.parametrize(
    "text, end",
    [
        ("", "{}"),
        ('{"a": "b', '{"a": "b"}'),
        ('{"a": "b\\', '{"a": "b\\n"}'),
        ('{"a": "b\\u00', '{"a": "b\\u0000"}'),
        ('{"a": [1, {"b": tr', '{"a": [1, {"b": true}]}'),
        ('{"a": -', '{"a": -0}'),
        ('{"a": 1.', '{"a": 1.0}'),
        ('{"a', '{"a":null}'),
        ('{"a": ', '{"a": null}'),
        ('{"a": [[', '{"a": [[]]}'),
        ('{"a": 1,', '{"a": 1,"":null}'),
        ('{"a": "}"', '{"a": "}"}'),
    ],
)
def test_the_end_closes_what_is_open(plain, text, end):
    grammar = grammar_for({"type": "json_object"}, plain)
    for token in plain.encode(text, add_special_tokens=False):
        grammar.accept(token)
    need = len(plain.encode(end[len(text) :], add_special_tokens=False))
    grammar.end_within(need + 4)
    written = text
    while not grammar.done:
        [token] = allowed(grammar)
        assert grammar.closing
        grammar.accept(token)
        written += plain.decode([token])
    assert written == end and json.loads(end) is not None


def test_the_end_of_long_strings_and_deep_lists(plain):
    schema = {"type": "object", "properties": {"a": {"type": "string", "minLength": 90}}, "required": ["a"]}
    for asked, begun, end in (
        (schema_format(schema), '{"a":"x', '{"a":"x' + "0" * 89 + '"}'),
        ({"type": "json_object"}, '{"a":' + "[" * 40, '{"a":' + "[" * 40 + "]" * 40 + "}"),
    ):
        grammar = grammar_for(asked, plain)
        for token in plain.encode(begun, add_special_tokens=False):
            grammar.accept(token)
        found = shortest_end(grammar._matcher, grammar._tokens, 200)
        assert found is not None and begun + plain.decode(found) == end
        assert shortest_end(grammar._matcher, grammar._tokens, len(found) - 1) is None


def test_no_second_call_begins_that_has_no_room(plain):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    one = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    ids = plain.encode(one, add_special_tokens=False)
    for room, ends in ((len(ids) + 20, False), (len(ids), True)):
        grammar = grammar_for_tools(tools, "required", "qwen", plain)
        grammar.end_within(len(ids) + room)
        for token in ids:
            assert token in allowed(grammar)
            grammar.accept(token)
        assert (set(allowed(grammar)) <= plain.eos_ids) == ends and not grammar.closing
    free = grammar_of_gbnf("root ::= [a-z]+", plain)
    free.end_within(9)
    for token in plain.encode("abcdefghi", add_special_tokens=False):
        assert len(allowed(free)) > 20
        free.accept(token)


def test_the_end_is_not_looked_for_before_it_is_near(plain):
    free, held = (grammar_for({"type": "json_object"}, plain) for _ in range(2))
    held.end_within(300)
    for n, token in enumerate(plain.encode('{"a": "' + "x" * 280, add_special_tokens=False)):
        assert (held.mask() == free.mask()).all() and not held.closing, n
        free.accept(token)
        held.accept(token)


def test_reasoning_is_not_ended(llm):
    grammar = grammar_for(
        {"type": "json_object"}, llm.tokenizer, llm.config.vocab_size, format="qwen", in_reasoning=True
    )
    done = llm.generate("Once", max_tokens=60, grammar=grammar)
    assert len(done.tokens) == 60 and done.finish_reason == "length" and "{" not in done.text


def test_a_model_cut_off_has_written_a_beginning(llm):
    grammar = grammar_for(schema_format(FREE), llm.tokenizer, llm.config.vocab_size)
    completion = llm.generate("Once", max_tokens=5, temperature=1.0, seed=0, grammar=grammar.copy())
    ids = completion.tokens
    assert completion.finish_reason == "length" and len(ids) == 5 and completion.text.startswith("{")
    for token in ids:
        grammar.accept(token)


@pytest.mark.parametrize("format", [name for name in CALLING if name not in ("deepseek-v3", "gemma")])
def test_a_model_that_knows_no_calls_writes_one(llm, format):
    parameters = {
        "type": "object",
        "properties": {"unit": {"enum": ["C", "F"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["unit", "days"],
    }
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    grammar = grammar_for_tools(tools, "required", format, llm.tokenizer, llm.config.vocab_size, parallel=False)
    begun = (FORMATS[format].calls or FORMATS[format].call)[0]  # else the model might reason without end
    begun = "<|channel|>commentary" if format == "harmony" else begun
    for token in llm.tokenizer.encode(begun, add_special_tokens=False):
        grammar.accept(token)
    completion = llm.generate(f"Once{begun}", max_tokens=200, temperature=1.0, seed=3, grammar=grammar)
    message = parse_whole(begun + completion.text, format, tools)
    assert completion.finish_reason == "stop" and message.content is None
    assert shape(json.loads(message.tool_calls[0].arguments)) == {"unit": "str", "days": "int"}


# Calls


def call(format, name, arguments):
    """A call as the format writes it, its arguments given as JSON, as (name, text) of parameters, or as Gemma's."""
    opening, closing = FORMATS[format].call
    if format == "qwen":
        return f'{opening}\n{{"name": "{name}", "arguments": {arguments}}}\n{closing}'
    if format == "qwen-xml":
        values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments)
        return f"{opening}\n<function={name}>\n{values}</function>\n{closing}"
    if format == "glm":
        values = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in arguments)
        return f"{opening}{name}\n{values}{closing}"
    if format == "minimax":
        values = "".join(f'<parameter name="{k}">{v}</parameter>\n' for k, v in arguments)
        return f'{opening}"{name}">\n{values}{closing}'
    if format == "harmony":
        return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}"
    if format == "gemma":
        return f"{opening}call:{name}{arguments}{closing}"
    separator = FORMATS[format].separator
    if format == "kimi":
        return f"{opening}functions.{name}:0{separator}{arguments}{closing}"
    if format == "lfm2":
        return f"{name}({arguments})"
    if format == "deepseek-v3":
        return f"{opening}function{separator}{name}\n```json\n{arguments}\n```{closing}"
    return f"{opening}{name}{separator}{arguments}{closing}"


def whole(format, *calls):
    if format == "harmony":
        return NEXT.join(calls) + "<|call|>"
    if format == "lfm2":
        return f"<|tool_call_start|>[{', '.join(calls)}]<|tool_call_end|>"
    opening, closing = FORMATS[format].calls or ("", "")
    line = "\n" if format.startswith("qwen") else FORMATS[format].between
    inside = line if opening else ""
    return opening + inside + line.join(calls) + inside + closing


EMPTY = {
    "qwen": "{}",
    "qwen-xml": [],
    "glm": [],
    "minimax": [],
    "kimi": "{}",
    "mistral": "{}",
    "lfm2": "",
    "gemma": "{}",
    "deepseek-v3": "{}",
    "deepseek-v3.1": "{}",
    "harmony": "{}",
}
JSON_GOOD = [
    '{"city": "Köln", "where": {"x": 1}}',
    '{"days": 3, "city": "", "unit": "F", "where": {"x": -0.5, "ok": true}, "tags": ["a", "b"]}',
]
JSON_BAD = ['{"city": "a"}', '{"city": 5, "where": {"x": 1}}', '{"city": "a", "unit": "K"', '{"other": 1', "[]"]
XML_GOOD = [
    [("city", "Köln\n<b>"), ("where", '{"x": 1}')],
    [("days", "3"), ("city", ""), ("unit", "F"), ("where", '{"x": 2, "ok": false}'), ("tags", '["a"]')],
]
XML_BAD = [[("city", "a")], [("days", "many")], [("city", "a"), ("unit", "K")], [("city", "a"), ("where", "{}")]]
GEMMA_GOOD = [
    '{city:<|"|>Köln, {"}<|"|>,where:{x:1}}',
    '{city:<|"|><|"|>,days:3,tags:[<|"|>a<|"|>,<|"|>b<|"|>],unit:<|"|>F<|"|>,where:{ok:true,x:-0.5}}',
]
GEMMA_BAD = ['{city:<|"|>a<|"|>}', "{city:5", '{city:<|"|>a<|"|>,unit:<|"|>K', "{where:", "{,"]
PYTHON_GOOD = [
    'city="Köln", where={"x": 1}',
    'days=3, city="", unit="F", where={"x": -0.5, "ok": true}, tags=["a", "b"]',
]
PYTHON_BAD = ['city="a"', "city=5", 'city="a", unit="K"', "other=1", "city=Bonn"]
CASES = {
    "qwen": (JSON_GOOD, JSON_BAD),
    "qwen-xml": (XML_GOOD, XML_BAD),
    "glm": (XML_GOOD, XML_BAD),
    "minimax": (XML_GOOD, XML_BAD),
    "kimi": (JSON_GOOD, JSON_BAD),
    "mistral": (JSON_GOOD, JSON_BAD),
    "lfm2": (PYTHON_GOOD, PYTHON_BAD),
    "gemma": (GEMMA_GOOD, GEMMA_BAD),
    "deepseek-v3": (JSON_GOOD, JSON_BAD),
    "deepseek-v3.1": (JSON_GOOD, JSON_BAD),
    "harmony": (JSON_GOOD, JSON_BAD),
}


@pytest.mark.parametrize("format", CALLING)
@pytest.mark.parametrize("special", [True, False], ids=["special", "plain"])
def test_grammar_for_tools_takes_calls_of_the_tools(format, special):
    tokenizer = byte_level(special=marks(format)) if special else byte_level(plain=marks(format))
    grammar = grammar_for_tools(TOOLS, "required", format, tokenizer)
    good, bad = CASES[format]
    ping = call(format, "ping", EMPTY[format])
    for arguments in good:
        text = whole(format, call(format, "weather", arguments))
        assert fits(grammar, tokenizer, text), text
        found = parse_whole(text, format, TOOLS).tool_calls[0]
        assert set(json.loads(found.arguments)) >= {"city", "where"}
        assert fits(grammar, tokenizer, whole(format, ping, call(format, "weather", arguments)))
    for arguments in bad:
        assert not fits(grammar, tokenizer, whole(format, call(format, "weather", arguments))), arguments
    assert fits(grammar, tokenizer, whole(format, ping))
    assert not fits(grammar, tokenizer, whole(format, call(format, "pong", EMPTY[format])))
    assert not fits(grammar, tokenizer, "Hello.")
    closing = NEXT if format == "harmony" else f"{FORMATS[format].reasoning[1]}\n"
    inside = grammar_for_tools(TOOLS, "required", format, tokenizer, in_reasoning=True)
    assert fits(inside, tokenizer, f"so{closing}{whole(format, ping)}")


@pytest.mark.parametrize("format", CALLING)
def test_grammar_for_tools_holds_to_the_tool_that_is_named(format):
    tokenizer = byte_level(special=marks(format))
    grammar = grammar_for_tools(TOOLS, NAMED, format, tokenizer, parallel=False)
    ping = call(format, "ping", EMPTY[format])
    assert fits(grammar, tokenizer, whole(format, ping))
    assert not fits(grammar, tokenizer, whole(format, ping, ping))
    assert not fits(grammar, tokenizer, whole(format, call(format, "weather", CASES[format][0][0])))


@pytest.mark.parametrize("format", CALLING)
def test_any_call_that_is_drawn_can_be_read(format):
    """Random tokens that the grammar allows, with a liking for those that end things."""
    tokenizer = byte_level(special=marks(format))
    properties = {key: PARAMETERS["properties"][key] for key in ("days", "unit", "where")}
    parameters = {**PARAMETERS, "properties": properties, "required": ["where"]}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    grammar = grammar_for_tools(tools, "required", format, tokenizer)
    ends = {tokenizer.encode(character)[0] for character in '"}],' if character} | tokenizer.eos_ids
    ends |= {tokenizer.backend.token_to_id(mark) for mark in marks(format)}
    rng = np.random.default_rng(5)
    for _ in range(5):
        drawing, ids = grammar.copy(), []
        while not drawing.done and len(ids) < 2000:
            inside = allowed(drawing)
            liked = [token for token in inside if token in ends]
            token = int(rng.choice(liked if liked and rng.random() < 0.5 else inside))
            drawing.accept(token)
            if token in tokenizer.eos_ids:
                break
            ids.append(token)
        message = parse_whole(tokenizer.decode(ids, skip_special_tokens=False), format, tools)
        assert message.content is None and message.tool_calls
        for found in message.tool_calls:
            arguments = json.loads(found.arguments)
            assert "where" in arguments and arguments.keys() <= properties.keys()
            assert type(arguments.get("days", 0)) is int and arguments.get("unit", "C") in ("C", "F")
            assert isinstance(arguments["where"]["x"], int | float)


def test_gemma_calls_follow_references_unions_and_free_values():
    tree = {
        "type": "object",
        "properties": {"next": {"anyOf": [{"$ref": "#/$defs/T"}, {"type": "null"}]}, "any": {}, "two": {}},
        "required": ["next"],
    }
    tree["properties"]["two"] = {"type": ["integer", "string"]}
    parameters = {"properties": {"tree": {"$ref": "#/$defs/T"}}, "required": ["tree"], "$defs": {"T": tree}}
    tokenizer = byte_level(special=marks("gemma"))
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    grammar = grammar_for_tools(tools, "required", "gemma", tokenizer)
    for value in [
        "{next:null}",
        '{next:{next:null,two:5},two:<|"|>a<|"|>}',
        '{any:{a:[1,{}],b:<|"|>c<|"|>},next:null}',
    ]:
        assert fits(grammar, tokenizer, f"<|tool_call>call:f{{tree:{value}}}<tool_call|>"), value
    assert not fits(grammar, tokenizer, "<|tool_call>call:f{tree:{two:true")


def test_grammar_for_tools_forces_nothing_unless_told(plain):
    for choice in (None, "auto", "none"):
        assert grammar_for_tools(TOOLS, choice, "qwen", plain) is None


def test_keywords_that_are_not_supported_count_for_strict_tools_only(plain):
    parameters = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    function = {"name": "f", "parameters": parameters}
    assert grammar_for_tools([{"function": function}], "required", "qwen", plain)
    with pytest.raises(InvalidArgument, match='^tools cannot be used: Unimplemented keys: \\["uniqueItems"\\]$'):
        grammar_for_tools([{"function": {**function, "strict": True}}], "required", "qwen", plain)


# What is refused


@pytest.mark.parametrize(
    "response_format, message",
    [
        ([], "response_format is a list, expected an object with a type"),
        ({}, "response_format.type is None, expected text, json_object or json_schema"),
        ({"type": "xml"}, "response_format.type is 'xml', expected text, json_object or json_schema"),
        ({"type": "json_schema"}, "response_format.json_schema.schema is missing, expected a JSON schema"),
        ({"type": "json_schema", "json_schema": []}, "response_format.json_schema.schema is missing"),
        ({"type": "json_object", "schema": 5}, "response_format.schema is a int, expected a JSON schema"),
        (schema_format({"type": "foo"}), "response_format cannot be used: Invalid type: foo"),
        (schema_format({"not": {}}), 'response_format cannot be used: Unimplemented keys: ["not"]'),
        (schema_format({"$ref": "http://example.org/x"}), "response_format cannot be used: Resource"),
        (schema_format({"type": "string", "pattern": "("}), "response_format cannot be used: unclosed group"),
        (schema_format({"enum": []}), "response_format cannot be used: Unsatisfiable schema"),
        (schema_format({"$ref": "#"}), "response_format cannot be used: no text fits"),
        (schema_format({"const": float("nan")}), "response_format holds values that JSON does not have"),
        (schema_format({"const": {1, 2}}), "response_format holds values that JSON does not have"),
        (schema_format({"const": "\ud800"}), "response_format has lone surrogates, expected valid Unicode"),
        (schema_format({"const": "x" * 70_000}), "response_format has 70013 characters of schema, expected at most"),
    ],
)
def test_grammar_for_says_what_is_wrong(plain, response_format, message):
    with pytest.raises(InvalidArgument) as caught:
        grammar_for(response_format, plain)
    assert str(caught.value).startswith(message)
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)


def nested(depth):
    schema = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize("depth", [64, 1_000, 100_000])
def test_grammar_for_refuses_deep_schemas(plain, depth):
    with pytest.raises(InvalidArgument, match="^response_format is nested deeper than 64 levels"):
        grammar_for(schema_format(nested(depth)), plain)
    assert grammar_for(schema_format(nested(62)), plain)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 999_983},
        {"allOf": [{"type": "string", "pattern": f"[a-z]{{{n},{n + 50}}}x.*"} for n in range(40)]},
    ],
    ids=["multiples", "patterns"],
)
def test_grammar_for_gives_up_on_schemas_that_take_long(plain, schema, monkeypatch):
    monkeypatch.setattr(module, "MAX_SECONDS", 0.7)
    with pytest.raises(InvalidArgument, match="^response_format cannot be used: it takes longer than 0.7 s"):
        grammar_for(schema_format(schema), plain)
    monkeypatch.setattr(module, "MAX_SECONDS", 100)  # it is known now
    with pytest.raises(InvalidArgument, match="takes longer"):
        grammar_for(schema_format(schema), plain)


def test_hostile_patterns_and_references_do_no_harm(plain):
    doubled = {f"S{n}": {"anyOf": [{"$ref": f"#/$defs/S{n + 1}"}] * 2} for n in range(30)}
    schemas = [
        {"type": "string", "pattern": "^(a+)+$"},
        {"type": "string", "pattern": "([ab]{0,1000}){0,1000}"},
        {"$ref": "#/$defs/S0", "$defs": {**doubled, "S30": {"type": "integer"}}},
        {"type": "array", "minItems": 2**31, "items": {"type": "array", "minItems": 2**31}},
        functools.reduce(lambda inner, _: {"type": "array", "maxItems": 1000, "items": inner}, range(20), {}),
    ]
    for schema in schemas:
        grammar = grammar_for(schema_format(schema), plain)
        for token in itertools.islice(iter(lambda g=grammar: allowed(g)[-1], None), 20):
            if token in plain.eos_ids:
                break
            grammar.accept(token)


DEEP = [
    "(((a{100}){100}){100})",
    "^a{100000}$",
    f"^x{'(' * 40}a{'{2})' * 40}$",
    "(a{4000000000}){4000000000}",
    "a{" + "9" * 5000 + "}",
]


@pytest.mark.parametrize("pattern", DEEP, ids=range(len(DEEP)))
@pytest.mark.parametrize(
    "schema",
    [
        lambda pattern: {"type": "string", "pattern": pattern},
        lambda pattern: {"type": "object", "properties": {"a": {"items": {"type": "string", "pattern": pattern}}}},
        lambda pattern: {"type": "object", "patternProperties": {pattern: {}}},
    ],
    ids=["here", "inside", "keys"],
)
def test_patterns_that_repeat_too_much_are_refused_at_once(plain, schema, pattern, monkeypatch):
    """Not after a trial, and not when the text has come to them."""
    monkeypatch.setattr(module, "_trial", lambda text: pytest.fail("it was tried"))
    with pytest.raises(InvalidArgument, match="^response_format has a pattern that repeats too much, expected at most"):
        grammar_for(schema_format(schema(pattern)), plain)
    tools = [{"function": {"name": "f", "parameters": {"properties": {"a": schema(pattern)}}}}]
    with pytest.raises(InvalidArgument, match="^tools has a pattern that repeats too much, expected at most"):
        grammar_for_tools(tools, "required", "qwen", plain)


@pytest.mark.parametrize(
    ("pattern", "size"),
    [
        ("", 0),
        ("abc", 3),
        ("a{3}b", 4),
        ("(ab){3}c", 7),
        ("((ab){3}c){2}", 14),
        ("a{2,5}", 2),
        ("a{0,5}", 1),
        ("[a-z]{10}", 10),
        (r"[\]{9}]{10}", 10),
        ("[]{9}]{10}", 10),
        (r"\p{L}{10}", 10),
        (r"\(a{10}", 11),
        (r"\x{1F600}{2}", 2),
        ("{3}", 0),
        ("a)b{2}", 4),
        ("((a{2}", 2),
    ],
)
def test_written_out_counts_what_repetitions_must_give(pattern, size):
    assert module._written_out(pattern) == size


@pytest.mark.parametrize(
    "tools, choice, format, message",
    [
        (TOOLS, "required", "plain", "tool_choice asks for a call, but the model's chat template has no form for one"),
        ([], "required", "qwen", "tool_choice asks for a call, but there are no tools"),
        (TOOLS, "any", "qwen", "tool_choice is 'any', expected none, auto, required or a function with a name"),
        (TOOLS, {"type": "allowed_tools"}, "qwen", "tool_choice is {'type': 'allowed_tools'}, expected"),
        (TOOLS, {"type": "function", "function": {"name": "f"}}, "qwen", "tool_choice names 'f', expected one of the"),
        ([{"type": "function"}], "required", "qwen", "tools[0] has no function with a name"),
        ([{"function": {"name": "f", "parameters": 5}}], "required", "qwen", "tools[0].function.parameters is 5"),
        ([{"function": {"name": "a b"}}], "required", "qwen", "a tool is named 'a b', expected a name without spaces"),
        (
            [{"function": {"name": "f", "parameters": {"properties": {"a>": {}}}}}],
            "required",
            "qwen-xml",
            "the tool f has a parameter named 'a>', expected no spaces and brackets",
        ),
        (
            [{"function": {"name": "f", "parameters": {"properties": {"a": nested(64)}}}}],
            "required",
            "gemma",
            "tools is nested deeper than 64 levels",
        ),
    ],
)
def test_grammar_for_tools_says_what_is_wrong(plain, tools, choice, format, message):
    with pytest.raises(InvalidArgument) as caught:
        grammar_for_tools(tools, choice, format, plain)
    assert str(caught.value).startswith(message)


def test_gemma_calls_refuse_references_that_nest_too_deeply(plain):
    definitions = {f"S{n}": {"type": "array", "items": {"$ref": f"#/$defs/S{n + 1}"}} for n in range(1_000)}
    parameters = {"properties": {"a": {"$ref": "#/$defs/S0"}}, "$defs": definitions}
    with pytest.raises(InvalidArgument, match="^tools .*nest too deeply|^tools cannot be used"):
        grammar_for_tools([{"function": {"name": "f", "parameters": parameters}}], "required", "gemma", plain)


def test_without_llguidance_the_extra_is_named(plain, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    needed = r"need llguidance, which is not installed: pip install 'penstock\[grammar\]'$"
    with pytest.raises(InvalidArgument, match=needed):
        grammar_for({"type": "json_object"}, plain)
    with pytest.raises(InvalidArgument, match=needed):
        grammar_for_tools(TOOLS, "required", "qwen", plain)
    assert grammar_for({"type": "text"}, plain) is None


# Tokenizers


def test_a_tokenizer_is_prepared_once(plain):
    first = module._prepared(plain, None)
    assert module._prepared(plain, plain.vocab_size) is first
    assert module._prepared(plain, plain.vocab_size + 1) is not first


def test_a_vocabulary_with_byte_tokens_works():
    """As Gemma's: words with ▁ for spaces, and <0x..> for bytes."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *'▁{}":,abc12', "▁a", "ab"]
    vocab = {piece: n for n, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("▁", "a"), ("a", "b")], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken("<eos>", normalized=False)])
    tokenizer = Tokenizer(backend, eos_ids=[backend.token_to_id("<eos>")])
    grammar = grammar_for({"type": "json_object"}, tokenizer)
    assert fits(grammar, tokenizer, '{"ab": "a ä", "b":12}') and not fits(grammar, tokenizer, '{"ab": b}')


@pytest.mark.parametrize(
    "tokenizer, message",
    [
        (Tokenizer(byte_level().backend), "response_format needs a model that has an end-of-text token"),
        (
            Tokenizer(tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")), eos_ids=[1]),
            "response_format cannot be used with this model's tokenizer: ",
        ),
    ],
    ids=["no-end", "words"],
)
def test_a_tokenizer_that_cannot_be_used_is_named(tokenizer, message):
    with pytest.raises(InvalidArgument, match=f"^{message}"):
        grammar_for({"type": "json_object"}, tokenizer)


def test_tokens_beyond_the_vocabulary_of_the_model_are_never_allowed():
    """Neither as text nor as markers of calls; those are written with other tokens then."""
    tokenizer = byte_level(plain=('{"', '":'), special=("<tool_call>", "</tool_call>"))
    tokenizer.backend.add_tokens([AddedToken("{", normalized=False), AddedToken('{"name', normalized=False)])
    size, end = tokenizer.backend.token_to_id('":'), tokenizer.backend.token_to_id("a")
    tokenizer.eos_ids |= {end}  # one that the model has, beside one that it has not
    grammar = grammar_for({"type": "json_object"}, tokenizer, size)
    assert allowed(grammar) == sorted(tokenizer.backend.token_to_id(token) for token in ("{", '{"'))
    assert grammar.mask().shape == (-(-size // 32),)
    with pytest.raises(InvalidArgument, match=f"^grammar: token is {size}, expected 0 to {size - 1}"):
        grammar.accept(size)
    calls = grammar_for_tools(TOOLS, "required", "qwen", tokenizer, size)
    assert allowed(calls) == [tokenizer.backend.token_to_id("<")]
    with pytest.raises(InvalidArgument, match="^response_format needs a model that has an end-of-text token"):
        grammar_for({"type": "json_object"}, tokenizer, 5)


def test_mask_reports_a_grammar_that_fails_on_the_way(plain):
    class Failing:
        def compute_bitmask(self):
            return bytes(4)

        def is_error(self):
            return True

        def get_error(self):
            return "lexer error: too many expressions constructed\n<non-verbose/>"

    with pytest.raises(InvalidArgument, match="^grammar: lexer error: too many expressions constructed$"):
        Grammar(Failing(), None, 32, "").mask()
