"""How models write reasoning and tool calls: one module per chat format, and which one a model has.

A format is a module with a ChatFormat (its markers, the grammar of its calls, its parser) and a line in FORMATS.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.errors import InvalidArgument
from penstock.text.formats.arguments import loads
from penstock.text.formats.base import ChatFormat, Parser
from penstock.text.formats.deepseek import DEEPSEEK_V3, DEEPSEEK_V3_1
from penstock.text.formats.deltas import Message, call_id, gather
from penstock.text.formats.gemma import GEMMA
from penstock.text.formats.glm import GLM
from penstock.text.formats.harmony import HARMONY
from penstock.text.formats.kimi import KIMI
from penstock.text.formats.lfm2 import LFM2
from penstock.text.formats.minimax import MINIMAX
from penstock.text.formats.mistral import MISTRAL
from penstock.text.formats.plain import PLAIN
from penstock.text.formats.qwen import QWEN
from penstock.text.formats.qwen_xml import QWEN_XML
from penstock.text.tokenizer import Tokenizer

# by name; where several fit a model, it has the last one
FORMATS: Mapping[str, ChatFormat] = {
    format.name: format
    for format in (PLAIN, QWEN, QWEN_XML, DEEPSEEK_V3_1, DEEPSEEK_V3, GEMMA, GLM, MINIMAX, KIMI, LFM2, MISTRAL, HARMONY)
}


def format_of(tokenizer: Tokenizer) -> str:
    """Which of FORMATS a model writes: by the signs in its chat template or among its tokens."""
    return [name for name, format in FORMATS.items() if format.fits(tokenizer)][-1]


def parser_for(
    format: str,
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    in_reasoning: bool = False,
    ids: Callable[[], str] = call_id,
) -> Parser:
    """A new parser for one answer. Arguments as for Parser; raises InvalidArgument for a format that is not known."""
    if format not in FORMATS:
        raise InvalidArgument(f"format is {format!r:.40}, expected one of {', '.join(FORMATS)}")
    known = FORMATS[format]
    return known.parser(known, tools, in_reasoning=in_reasoning, ids=ids)


def parse_whole(
    text: str,
    format: str,
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    in_reasoning: bool = False,
    ids: Callable[[], str] = call_id,
) -> Message:
    """The message of a whole text: what `gather` makes of the deltas of its parser."""
    parser = parser_for(format, tools, in_reasoning=in_reasoning, ids=ids)
    return gather([*parser.feed(text), *parser.end()])


def in_reasoning(format: str, prompt: str) -> bool:
    """Whether a prompt ends with the opening of the reasoning, so that the model's text begins inside it."""
    known = FORMATS[format]
    if known.reasoning is None:
        return False
    return prompt.rstrip().removesuffix(known.label.rstrip() or "\n").rstrip().endswith(known.reasoning[0])


def shown_tokens(format: str, tools: bool) -> tuple[str, ...]:
    """Tokens that a parser has to see, as text, also where the tokenizer calls them special.

    tools: whether the request has any; without them only the markers of the reasoning are needed.
    """
    return FORMATS[format].shown(tools)


def headers_shown(tokenizer: Tokenizer) -> dict[str, Any]:
    """Options of a request whose text is shown as it is written: with its markers, where it means nothing without."""
    known = FORMATS[format_of(tokenizer)]
    return {"shown": known.shown(tools=True)} if known.headers else {}


def with_arguments(messages: Sequence[Mapping[str, Any]], format: str) -> list[dict[str, Any]]:
    """Messages for a chat template: with the arguments of earlier calls, JSON text in requests, in the form that
    templates of `format` take (an object, or text), with the ids that it has, and whatever else these want
    (`ChatFormat.for_template`).

    Raises InvalidArgument for arguments that are no JSON object. Whatever else is wrong is left to the template.
    """
    keep_text = FORMATS[format].arguments_as_text
    changed = []
    for n, message in enumerate(messages):
        calls = message.get("tool_calls") if isinstance(message, Mapping) else None
        if isinstance(calls, list | tuple):
            where = f"messages[{n}].tool_calls"
            calls = [_with_arguments(call, f"{where}[{i}]", keep_text) for i, call in enumerate(calls)]
            message = {**message, "tool_calls": calls}
        changed.append(message)
    call_ids = FORMATS[format].call_ids
    return FORMATS[format].for_template(changed if call_ids is None else _with_ids(changed, call_ids))


def _with_ids(messages: Sequence[Any], call_ids: Callable[[str, int], str]) -> list[Any]:
    """Messages whose calls, and the results of them, have the ids that a format gives calls."""
    changed, ids, number = [], {}, 0
    for message in messages:
        if isinstance(message, Mapping):
            calls = []
            for call in message.get("tool_calls") or ():
                function = call.get("function") if isinstance(call, Mapping) else None
                if isinstance(function, Mapping):
                    made = call_ids(str(function.get("name")), number)
                    ids[str(call.get("id"))], call = made, {**call, "id": made}
                    number += 1
                calls.append(call)
            if calls:
                message = {**message, "tool_calls": calls}
            if (answered := ids.get(str(message.get("tool_call_id")))) and "tool_call_id" in message:
                message = {**message, "tool_call_id": answered}
        changed.append(message)
    return changed


def _with_arguments(call: Any, where: str, keep_text: bool) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "arguments" not in function:
        return call
    given = function["arguments"]
    try:
        value = loads(given or "{}") if isinstance(given, str) else given
    except ValueError:
        value = None
    if not isinstance(value, Mapping):
        raise InvalidArgument(f"{where}.function.arguments is {given!r:.60}, expected the JSON text of an object")
    if keep_text:
        value = given or "{}" if isinstance(given, str) else json.dumps(value, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": value}}
