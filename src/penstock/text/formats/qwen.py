"""Qwen3 and Qwen3-Next: calls of JSON. <tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.text.formats.qwen_xml import QWEN_XML
from penstock.text.lark import Lark, arguments, literal


def _write_call(lark: Lark, name: str, parameters: Mapping[str, Any], strict: bool) -> str:
    before = f'{{"name": {literal(name)}, "arguments": '
    return f'{literal(before)} {arguments(lark, parameters, strict)} "}}"'


# with the markers and the parser of the calls of tags
QWEN = replace(
    QWEN_XML, name="qwen", unopened=(), signs=("<tool_call>", "<think>"), template_signs=(), write_call=_write_call
)
