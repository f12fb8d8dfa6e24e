"""How models write reasoning and tool calls, and which way a model has."""

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Format:
    """The markers of one way of writing. None of them has a < behind its first character or begins another one.

    reasoning: what opens and closes it, and the label that stands behind the opening. call: what opens and closes a
    tool call; calls: what opens and closes a list of them. separator: behind the name. quote: around strings.
    """

    reasoning: tuple[str, str] | None = None
    label: str = ""
    call: tuple[str, str] | None = None
    calls: tuple[str, str] | None = None
    separator: str = ""
    quote: str = ""


_THINK = ("<think>", "</think>")
_QWEN = Format(_THINK, call=("<tool_call>", "</tool_call>"))
_DEEPSEEK = Format(
    _THINK,
    call=("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    calls=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    separator="<｜tool▁sep｜>",
)

FORMATS: Mapping[str, Format] = {
    "plain": Format(),
    # <tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>
    "qwen": _QWEN,
    # <tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>
    "qwen-xml": _QWEN,
    # <|tool_call>call:f{x:1,y:<|"|>text<|"|>}<tool_call|>
    "gemma": Format(
        ("<|channel>", "<channel|>"), label="thought\n", call=("<|tool_call>", "<tool_call|>"), quote='<|"|>'
    ),
    # <｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"x": 1}\n```<｜tool▁call▁end｜>
    "deepseek-v3": _DEEPSEEK,
    # <｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜>
    "deepseek-v3.1": _DEEPSEEK,
}


def format_of(tokenizer: Tokenizer) -> str:
    """Which of FORMATS a model writes: by the markers in its chat template, or else among its tokens."""
    template = tokenizer.chat_template or ""

    def has(text: str) -> bool:
        return text in template or tokenizer.backend.token_to_id(text) is not None

    if has("<|tool_call>") or has("<|channel>"):
        return "gemma"
    if has(_DEEPSEEK.separator):
        return "deepseek-v3" if "```json" in template else "deepseek-v3.1"
    if "<function=" in template and "<parameter=" in template:
        return "qwen-xml"
    if has("<tool_call>") or has("<think>"):
        return "qwen"
    return "plain"


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
    known = FORMATS[format]
    marks = known.reasoning or ()
    if tools:
        marks += (known.call or ()) + (known.calls or ()) + (known.separator, known.quote)
    return tuple(mark for mark in marks if mark)
