"""Grammars that hold a model's text to JSON, to a JSON schema or to a tool call, token by token, by llguidance.

A schema comes from outside and may be made to cost: it is limited in size and depth, and a large one or one with
patterns, intersections or multiples, which llguidance may take minutes to work out, is tried in a process of its own
first, which is ended when its time is over.
"""

import functools
import json
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.errors import InvalidArgument
from penstock.text.formats import FORMATS
from penstock.text.grammar_end import shortest_end
from penstock.text.lark import Lark, Tools, arguments
from penstock.text.tokenizer import Tokenizer

MAX_SCHEMA = 64 << 10  # characters of JSON
MAX_DEPTH = 64
MAX_WRITTEN_OUT = (
    10_000  # characters of a pattern whose repetitions are written out: 60 ms for a token, at 90 000 800 ms
)
MAX_SECONDS = 3.0  # for a schema that is tried first

_HORIZON = 256  # tokens before the last one from which on the end is looked for
_SLACK = 4  # tokens that one token may add to the end: what it opens has to be closed, and may need a value
_MAX_ALTERNATIVES = 10_000  # open at once while parsing; an object with n optional properties has about 4 n
_MANY = 16 << 10  # characters of a schema that is tried first
_COSTLY = {"pattern", "patternProperties", "propertyNames", "multipleOf", "allOf", "not", "if", "oneOf"}
_TRIAL = """
import contextlib, resource, sys
with contextlib.suppress(OSError, ValueError):
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
limits = LLParserLimits(max_items_in_row=int(sys.argv[1]), verbose_errors=False)
matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_lark(sys.stdin.read()), log_level=0, limits=limits)
matcher.compute_bitmask()
print(matcher.get_error())
"""


class Grammar:
    """What may come next in one answer. Each request needs its own; `copy` makes another one in the same state.

    Before a token is drawn: `mask`, which has end tokens in it where the text may end; after it: `accept`. With
    `end_within` JSON that nears that number of tokens is closed.
    """

    def __init__(self, matcher: Any, tokens: Any, vocab_size: int, source: str) -> None:
        self.source = source  # in Lark: `grammar_of_source` makes the same grammar of it
        self._matcher = matcher
        self._tokens = tokens
        self._vocab_size = vocab_size
        self._left: int | None = None  # tokens that the answer may still have
        self._look = 0  # so many being left, it is time to see how many the end takes
        self._end: list[int] | None = None  # what the text is ended with
        self._cut = False  # what it is ended with is more than it had

    def end_within(self, tokens: int) -> None:
        """The answer has at most so many more tokens: where the text is JSON, it is closed before they are over."""
        self._left, self._look, self._end, self._cut = tokens, min(tokens, _HORIZON), None, False

    @property
    def closing(self) -> bool:
        """Whether something in the text is being closed, or has been, because of `end_within`."""
        return self._cut

    @property
    def done(self) -> bool:
        """Whether the text is complete: nothing but an end token may follow."""
        return self._matcher.is_stopped()

    def mask(self) -> np.ndarray:
        """uint32 words [ceil(vocab / 32)], not to be written to: bit i % 32 of word i // 32 says whether token i is
        allowed, of the model's vocabulary.

        Raises InvalidArgument if the grammar turns out to be too costly or to allow no token.
        """
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        if self._matcher.is_error():
            raise InvalidArgument(f"grammar: {_reason(self._matcher.get_error())}")
        if not words.any():
            raise InvalidArgument("grammar: no token fits, expected a schema that some text does")
        if self._left is not None and self._end is None and self._left <= _HORIZON:
            self._consider_end(self._left, words)
        return words if self._end is None else self._only(self._end[:1] or self._tokens.eos_tokens, words)

    def _consider_end(self, left: int, words: np.ndarray) -> None:
        """Begin to end the text if it is time; else say when to look again, which is before much can be opened.

        A text that may end here does so where another one of its kind, such as a second call, has no room.
        """
        if self._matcher.is_accepting():
            more = self._least_more(left, words)
            if more > _SLACK and more + _SLACK >= left:
                self._end = []
            return
        if left > self._look:
            return
        end = shortest_end(self._matcher, self._tokens, left)
        if end is None:
            self._look = left - _SLACK
        elif len(end) + _SLACK >= left:
            self._end, self._cut = end, True
        else:
            self._look = left - max(1, (left - len(end) - _SLACK) // 2)

    def _least_more(self, left: int, words: np.ndarray) -> int:
        """Tokens of a short continuation of a text that may end here; `left` if it has more, 0 if there is none."""
        going_on = self._without(self._tokens.eos_tokens, words)
        if not going_on.any():
            return 0
        trial = self._matcher.deep_copy()
        trial.consume_token(int(np.unpackbits(going_on.view(np.uint8), bitorder="little").argmax()))
        end = shortest_end(trial, self._tokens, left)
        return left if end is None else 1 + len(end)

    @staticmethod
    def _without(tokens: Sequence[int], words: np.ndarray) -> np.ndarray:
        found = words.copy()
        for token in tokens:
            found[token // 32] &= ~np.uint32(1 << token % 32)
        return found

    def _only(self, tokens: Sequence[int], words: np.ndarray) -> np.ndarray:
        found = np.zeros_like(words)
        for token in tokens:
            found[token // 32] |= words[token // 32] & np.uint32(1 << token % 32)
        return found if found.any() else words

    def accept(self, token: int) -> None:
        """The token was drawn. Raises InvalidArgument, naming it, if it is not allowed here; nothing changes then."""
        if not 0 <= token < self._vocab_size:
            raise InvalidArgument(f"grammar: token is {token}, expected 0 to {self._vocab_size - 1}")
        tokens = [token]
        if self.done and token in self._tokens.eos_tokens:
            return
        if self._matcher.validate_tokens(tokens) < 1:
            # an added token such as <think> stands for its text here, which llguidance allows but does not take
            tokens = self._tokens.greedy_tokenize(self._tokens.decode_str(tokens))
            if not tokens or self._matcher.validate_tokens(tokens) < len(tokens):
                raise InvalidArgument(f"grammar: token {token} is not allowed, expected one of the mask")
        if not self._matcher.consume_tokens(tokens):
            raise InvalidArgument(f"grammar: {_reason(self._matcher.get_error())}")
        if self._left is not None:
            self._left -= 1
        if self._end is not None:
            self._end = self._end[1:] if self._end[:1] == [token] else []

    def copy(self) -> "Grammar":
        return Grammar(self._matcher.deep_copy(), self._tokens, self._vocab_size, self.source)


def grammar_for(
    response_format: Mapping[str, Any] | None,
    tokenizer: Tokenizer,
    vocab_size: int | None = None,
    *,
    format: str = "plain",
    in_reasoning: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
    parallel: bool = True,
) -> Grammar | None:
    """The grammar of a request's response_format; None for {"type": "text"} and for no response_format.

    {"type": "json_object"}, with a "schema" if wanted, or {"type": "json_schema", "json_schema": {"schema": ...}}: the
    schema holds with and without "strict". vocab_size: of the model, which may have more ids than the tokenizer has
    tokens, or fewer: those beyond are never allowed. format and in_reasoning: as for the parser, so that a model may
    reason before its JSON. tools: calls of these are allowed instead of the JSON; parallel: several of them.

    The first call for a tokenizer prepares it (seconds for a large vocabulary), and a costly schema may take
    MAX_SECONDS: not for an event loop. Raises InvalidArgument for a response_format that is not understood, for a
    schema that is invalid, not supported or too costly, and if llguidance is not installed.
    """
    schema = _schema_of(response_format)
    if schema is None:
        return None
    tokens = _prepared(tokenizer, vocab_size)
    _check_schema("response_format", schema)
    lark = Lark(tokenizer, tokens)
    answer = lark.json(schema, lenient=False)
    if len(lark.text(answer)) > _MANY or _is_costly(schema):
        _try_out("response_format", lark.text(answer))
    calls = ""
    if tools and FORMATS[format].call is not None:
        calls = _calls(lark, format, _named(tools), parallel)
    text = lark.text(FORMATS[format].write_answer(lark, in_reasoning, answer, calls))
    return _made("response_format", text, tokens)


def grammar_for_tools(
    tools: Sequence[Mapping[str, Any]],
    choice: Any,
    format: str,
    tokenizer: Tokenizer,
    vocab_size: int | None = None,
    *,
    in_reasoning: bool = False,
    parallel: bool = True,
) -> Grammar | None:
    """The grammar of a request's tool_choice: "required" or {"type": "function", "function": {"name": ...}} force
    calls in the model's format; None for "auto", "none" and no choice.

    Names, types, enumerations and required parameters hold in every format, further keywords where arguments are JSON;
    keywords that are not supported count only if the function is "strict". parallel: several calls may follow each
    other. Raises InvalidArgument as `grammar_for`, for a name that no tool has, and for a model whose format has no
    calls.
    """
    if choice is None or choice in ("auto", "none"):
        return None
    chosen = _chosen(tools, choice)
    if FORMATS[format].call is None:
        raise InvalidArgument("tool_choice asks for a call, but the model's chat template has no form for one")
    tokens = _prepared(tokenizer, vocab_size)
    lark = Lark(tokenizer, tokens)
    calls = _calls(lark, format, chosen, parallel)
    return _made("tools", lark.text(FORMATS[format].write_answer(lark, in_reasoning, calls=calls)), tokens)


def grammar_of_source(source: str, tokenizer: Tokenizer, vocab_size: int | None = None) -> Grammar:
    """A grammar from the `source` of one that another process made and checked, for the same tokenizer.

    Raises InvalidArgument as `grammar_for`.
    """
    return _made("grammar", source, _prepared(tokenizer, vocab_size))


def grammar_of_gbnf(text: str, tokenizer: Tokenizer, vocab_size: int | None = None) -> Grammar:
    """A grammar in GBNF, as llama.cpp has it: rules `name ::= …`, the first one read is `root`.

    Raises InvalidArgument for what is no such grammar, is larger than a schema may be, takes too long to work out or
    fits no text, and if llguidance is not installed.
    """
    if len(text) > MAX_SCHEMA:
        raise InvalidArgument(f"grammar has {len(text)} characters, expected at most {MAX_SCHEMA}")
    tokens = _prepared(tokenizer, vocab_size)
    from llguidance.gbnf_to_lark import gbnf_to_lark

    _check_unicode("grammar", text)
    if not re.search(r"^\s*root\s*::=", text, re.MULTILINE):
        raise InvalidArgument('grammar has no rule root, expected GBNF such as root ::= "yes" | "no"')
    try:
        lark = gbnf_to_lark(text)
    except (Exception, RecursionError) as error:  # its own class, and what a parser meets in text that ends too soon
        raise InvalidArgument(f"grammar is no GBNF: {_reason(str(error) or type(error).__name__)}") from None
    _try_out("grammar", lark)
    return _made("grammar", lark, tokens)


def _schema_of(response_format: Any) -> Mapping[str, Any] | None:
    if response_format is None:
        return None
    if not isinstance(response_format, Mapping):
        kind = type(response_format).__name__
        raise InvalidArgument(f"response_format is a {kind}, expected an object with a type")
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        schema, where = response_format.get("schema"), "response_format.schema"
        if schema is None:
            return {"type": "object"}
    elif kind == "json_schema":
        outer = response_format.get("json_schema")
        schema = outer.get("schema") if isinstance(outer, Mapping) else None
        where = "response_format.json_schema.schema"
    else:
        raise InvalidArgument(f"response_format.type is {kind!r:.40}, expected text, json_object or json_schema")
    if not isinstance(schema, Mapping):
        found = "missing" if schema is None else f"a {type(schema).__name__}"
        raise InvalidArgument(f"{where} is {found}, expected a JSON schema")
    return schema


def _named(tools: Sequence[Mapping[str, Any]]) -> Tools:
    """Parameters and strictness of tools, by name."""
    found: dict[str, tuple[Mapping[str, Any], bool]] = {}
    for n, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str):
            raise InvalidArgument(f"tools[{n}] has no function with a name, expected one")
        parameters = function.get("parameters")
        if not isinstance(parameters, Mapping | None):
            raise InvalidArgument(f"tools[{n}].function.parameters is {parameters!r:.40}, expected a JSON schema")
        found[name] = parameters or {}, function.get("strict") is True
    return found


def _chosen(tools: Sequence[Mapping[str, Any]], choice: Any) -> Tools:
    """Those of the tools that a tool_choice leaves."""
    found = _named(tools)
    if not found:
        raise InvalidArgument("tool_choice asks for a call, but there are no tools")
    if choice == "required":
        return found
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    if not isinstance(function, Mapping):
        raise InvalidArgument(f"tool_choice is {choice!r:.60}, expected none, auto, required or a function with a name")
    name = function.get("name")
    if not isinstance(name, str) or name not in found:
        raise InvalidArgument(f"tool_choice names {name!r:.60}, expected one of the tools: {', '.join(found)[:200]}")
    return {name: found[name]}


def _calls(lark: Lark, format: str, tools: Tools, parallel: bool) -> str:
    """The rule for calls of tools, their schemas checked."""
    _check_schema("tools", [parameters for parameters, _ in tools.values()])
    trial = lark.empty()
    text = trial.text(" | ".join([arguments(trial, *tool) for tool in tools.values()]))
    if len(text) > _MANY or any(_is_costly(parameters) for parameters, _ in tools.values()):
        _try_out("tools", text)
    try:
        return FORMATS[format].write_calls(lark, tools, parallel)
    except RecursionError:
        raise InvalidArgument("tools have references that nest too deeply, expected a flatter schema") from None


def _made(what: str, text: str, tokens: Any) -> Grammar:
    """The grammar of a text in Lark, its first mask worked out."""
    from llguidance import LLMatcher, LLParserLimits

    _check_unicode(what, text)
    limits = LLParserLimits(max_items_in_row=_MAX_ALTERNATIVES, verbose_errors=False)
    matcher = LLMatcher(tokens, LLMatcher.grammar_from_lark(text), log_level=0, limits=limits)
    grammar = Grammar(matcher, tokens, tokens.vocab_size, text)
    try:
        grammar.mask()
    except InvalidArgument as error:
        raise InvalidArgument(f"{what} cannot be used: {str(error).removeprefix('grammar: ')}") from None
    return grammar


def _try_out(what: str, text: str) -> None:
    """Refuse what takes too long to work out."""
    _check_unicode(what, text)
    if failed := _trial(text):
        raise InvalidArgument(f"{what} cannot be used: {_reason(failed)}")


def _check_unicode(what: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"{what} has lone surrogates, expected valid Unicode") from None


def _check_schema(what: str, schema: Any) -> None:
    """Refuse a schema that is no JSON, too large or too deep, or has a pattern that is."""
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, Mapping):
                _check_patterns(what, value)
                inner.extend(value.values())
            elif isinstance(value, list | tuple):
                inner.extend(value)
        level = inner
    if level:
        raise InvalidArgument(f"{what} is nested deeper than {MAX_DEPTH} levels, expected a flatter schema")
    try:
        size = len(json.dumps(schema, ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError):
        raise InvalidArgument(f"{what} holds values that JSON does not have, expected a JSON schema") from None
    if size > MAX_SCHEMA:
        raise InvalidArgument(f"{what} has {size} characters of schema, expected at most {MAX_SCHEMA}")


def _check_patterns(what: str, schema: Mapping[str, Any]) -> None:
    """Refuse patterns whose cost would show only when the text comes to them, in a step that all requests wait for."""
    pattern, keys = schema.get("pattern"), schema.get("patternProperties")
    patterns = [pattern] if isinstance(pattern, str) else []
    patterns += [key for key in keys if isinstance(key, str)] if isinstance(keys, Mapping) else []
    if any(_written_out(pattern) > MAX_WRITTEN_OUT for pattern in patterns):
        raise InvalidArgument(
            f"{what} has a pattern that repeats too much, expected at most {MAX_WRITTEN_OUT} characters "
            "with its repetitions written out"
        )


_TOKEN = re.compile(r"\\[pPxuU]\{[^}]*\}|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(\d+)(?:,\d*)?\}|.", re.DOTALL)


def _written_out(pattern: str) -> int:
    """About how many characters a pattern has if what is repeated is written as often as it must occur.

    Never much more than MAX_WRITTEN_OUT: it counts no further.
    """
    open_groups, last = [0], 0
    for token in _TOKEN.finditer(pattern):
        more = 1
        if token[1] is not None:  # {least,most} of the last one, which is counted once already
            least = int(token[1]) if len(token[1]) < 10 else MAX_WRITTEN_OUT + 1
            more = last * (max(least, 1) - 1)
            last += more
        elif token[0] == "(":
            open_groups.append(0)
            continue
        elif token[0] == ")" and len(open_groups) > 1:
            last = more = open_groups.pop()
        else:
            last = 1
        last = min(last, MAX_WRITTEN_OUT + 1)
        open_groups[-1] = min(open_groups[-1] + more, MAX_WRITTEN_OUT + 1)
    return sum(open_groups)


def _is_costly(schema: Any) -> bool:
    if isinstance(schema, Mapping):
        return (
            not _COSTLY.isdisjoint(schema)
            or ("$ref" in schema and len(schema) > 1)
            or any(_is_costly(value) for value in schema.values())
        )
    return isinstance(schema, list | tuple) and any(_is_costly(value) for value in schema)


_trials = threading.Semaphore(2)  # at a time, however many requests bring costly schemas


@functools.lru_cache(maxsize=128)
def _trial(text: str) -> str:
    """Work a grammar out in another process; returns what is wrong with it, "" if nothing is."""
    with _trials:
        try:
            run = subprocess.run(
                [sys.executable, "-c", _TRIAL, str(_MAX_ALTERNATIVES)],
                input=text.encode(),
                capture_output=True,
                timeout=MAX_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"it takes longer than {MAX_SECONDS:g} s to work out, expected a simpler schema"
    if run.returncode:
        return f"it could not be worked out (exit status {run.returncode}), expected a simpler schema"
    return run.stdout.decode(errors="replace").strip()


_lock = threading.Lock()
_cache: weakref.WeakKeyDictionary[Tokenizer, dict[Any, Any]] = weakref.WeakKeyDictionary()


def _prepared(tokenizer: Tokenizer, vocab_size: int | None) -> Any:
    """llguidance's form of a tokenizer, made once."""
    try:
        from llguidance import LLTokenizer
    except ImportError:
        raise InvalidArgument(
            "response_format, grammars and a forced tool_choice need llguidance, which is not installed: "
            "pip install 'penstock[grammar]'"
        ) from None
    vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
    key = vocab_size, tokenizer.eos_ids
    with _lock:
        made = _cache.setdefault(tokenizer, {})
        if key not in made:
            ends = sorted(token for token in tokenizer.eos_ids if token < vocab_size)
            if not ends:
                raise InvalidArgument("response_format needs a model that has an end-of-text token, this one has none")
            try:
                text = tokenizer.backend.to_str()
                if vocab_size < tokenizer.vocab_size:
                    text = _cut(text, vocab_size)
                made[key] = LLTokenizer(text, n_vocab=vocab_size, eos_token=ends)
            except (ValueError, RuntimeError) as error:
                raise InvalidArgument(
                    f"response_format cannot be used with this model's tokenizer: {_reason(str(error))}"
                ) from None
        return made[key]


def _cut(text: str, size: int) -> str:
    """A tokenizer.json without the tokens from id `size` on."""
    content = json.loads(text)
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < size]
    model = content["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {piece: number for piece, number in model["vocab"].items() if number < size}
    else:
        model["vocab"] = model["vocab"][:size]
    if "merges" in model:
        known = model["vocab"]
        model["merges"] = [[a, b] for a, b in model["merges"] if a in known and b in known and a + b in known]
    return json.dumps(content)


def _reason(text: str) -> str:
    """What llguidance says, on one line and without its listings."""
    text, _, error = text.partition("\n<")[0].partition("\nerror: ")
    text = re.split(r"\n *\d* *\|", error or text)[0].partition(" Enable '")[0]
    text = re.sub(r"^at \d+\(\d+\): ", "", " ".join(text.split()))
    text = text.removeprefix("failed to compile JSON schema: ")[:300]
    return "no text fits, expected a schema that some text does" if text.startswith("NoExtension") else text
