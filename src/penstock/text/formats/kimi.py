"""Kimi's models (K2, Kimi-Linear): lists of calls between special tokens, the arguments in JSON.

<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"x": 1}<|tool_call_end|> …
<|tool_calls_section_end|>. A call's name is its id as well: calls of a conversation are counted from 0.
"""

import re
from collections.abc import Mapping
from typing import Any

from penstock.text.formats.base import ChatFormat
from penstock.text.formats.deepseek import DeepSeekParser
from penstock.text.lark import Lark, arguments, literal

_SEPARATOR = "<|tool_call_argument_begin|>"
_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d*)?")


def _call_id(name: str, number: int) -> str:
    return f"functions.{name}:{number}"


def _write_call(lark: Lark, name: str, parameters: Mapping[str, Any], strict: bool) -> str:
    separator, values = lark.mark(_SEPARATOR), arguments(lark, parameters, strict)
    return f"{literal(f'functions.{name}:')} /[0-9]{{1,4}}/ {separator} {values}"


class KimiParser(DeepSeekParser):
    """Reads names with and without what makes them ids."""

    def _name_of(self, written: str) -> str:
        found = _ID.fullmatch(written)
        return written if written in self._tools or found is None else found[1]


KIMI = ChatFormat(
    "kimi",
    reasoning=("<think>", "</think>"),
    call=("<|tool_call_begin|>", "<|tool_call_end|>"),
    calls=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    separator=_SEPARATOR,
    arguments_as_text=True,
    call_ids=_call_id,
    signs=(_SEPARATOR,),
    write_call=_write_call,
    parser=KimiParser,
)
