"""The requests that the endpoints take, and the answers as the OpenAPI description shows them.

Fields are those of OpenAI, with the extensions that clients of vLLM, llama.cpp and mlx-lm send. Types are strict: true
is no number, 1.5 no integer. IGNORED are accepted and change nothing; NEUTRAL belong to features that penstock lacks
and are accepted with the values that ask for nothing; any other unknown field is refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, field_validator, model_validator

from penstock.server.errors import THREAD_UNSUPPORTED, ApiError
from penstock.text.stop import MAX_STOPS

MAX_TOKENS = 2**31 - 1
MAX_TOOLS = 128
MAX_PROMPTS = 128
MAX_INPUTS = 2048  # texts to embed
MAX_MESSAGES = 20_000
MAX_PARTS = 20_000  # of a message
MAX_CALLS = 1024  # of a message
MAX_IDS = 200_000
MAX_NAMES = 1024  # of an object whose names are free

IGNORED = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention prompt_cache_options "
    "verbosity prediction cache_prompt id_slot slot_id timings_per_token priority request_id session_id num_ctx "
    "keep_alive client_metadata".split()
)

# Parameters of features that penstock does not have, with the values that do not ask for them.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "typical_p": (1, 0),
    "tfs_z": (1,),
    "top_a": (0,),
    "xtc_probability": (0,),
    "xtc_threshold": (0.1,),
    "mirostat": (0,),
    "mirostat_tau": (5,),
    "mirostat_eta": (0.1,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "dynatemp_exponent": (1,),
    "min_tokens": (0,),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "moderation": (),
    "top_logprobs": (0,),
    "length_penalty": (1,),
    "best_of": (1,),
    "prompt_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "return_progress": (False,),
    "n_probs": (0,),
    "grammar": ("",),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "echo": (False,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none",),
    "audio": (),
    "web_search_options": (),
    "adapters": (),
    "draft_model": ("default_model",),
    "chat_template": (),
    "documents": ([],),
    "background": (False,),
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "context_management": (),
    "max_tool_calls": (),
    "compaction": (),
    "mcp_servers": ([],),
}
_ADVICE = {
    "functions": "tools",
    "function_call": "tool_choice",
    "n_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "repetition_context_size": "repetition_context",
    "guided_json": "response_format",
    "chat_template": "chat_template_kwargs (the template is the model's own)",
}

_T = TypeVar("_T")

Items = Annotated[list[_T], Field(fail_fast=True)]  # an error for every wrong item takes a kilobyte each
Number = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Penalty = Annotated[float, Field(ge=-1e6, le=1e6)]
Object = Annotated[dict[str, Any], Field(max_length=MAX_NAMES)]
TextOrTexts = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": MAX_STOPS},
                {"type": "null"},
            ]
        }
    ),
]


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1, "maxItems": MAX_IDS}


def _texts_schema(most: int) -> WithJsonSchema:
    text = {"type": "string", "minLength": 1}
    several = [{"type": "array", "items": one, "minItems": 1, "maxItems": most} for one in (text, _IDS)]
    return WithJsonSchema(
        {"description": "Text, token ids, or a list of either.", "anyOf": [text, several[0], _IDS, several[1]]}
    )


class Strict(BaseModel):
    """Base of all requests."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _no_others(cls, data: Any) -> Any:
        """Refuse the first unknown field."""
        for name in data:
            if name not in cls.model_fields:
                raise _unknown(name, cls.model_fields)
        return data


class Open(BaseModel):
    """Base of parts that clients send back as they got them: fields that are not read may stand there."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=())


class Request(Strict):
    """What all requests that generate have in common."""

    model: str | None = Field(None, description="A name that /v1/models lists; the loaded model if left out.")
    temperature: float | None = Field(None, ge=0, le=1e6, description="0 takes the best token.")
    top_p: float | None = Field(None, ge=0, le=1)
    stream: bool | None = None

    # extensions
    top_k: int | None = Field(None, ge=-1, le=MAX_TOKENS)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-1, le=2**64 - 1, description="The same seed, the same text; -1 draws one.")
    repetition_penalty: float | None = Field(None, ge=1e-3, le=1e3)
    repetition_context: int | None = Field(
        None, ge=-1, le=MAX_TOKENS, description="Last tokens that repetition_penalty counts: -1 for all, 0 for none."
    )
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[
        Any,
        WithJsonSchema(
            {
                "anyOf": [
                    {
                        "type": "object",
                        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
                        "additionalProperties": {"type": "number", "minimum": -1e30, "maximum": 1e30},
                        "maxProperties": MAX_IDS,
                    },
                    {"type": "null"},
                ]
            }
        ),
    ] = None
    stop: TextOrTexts = None
    stop_token_ids: Items[Annotated[int, Field(ge=0, le=MAX_TOKENS)]] | None = Field(None, max_length=1024)
    ignore_eos: bool | None = None
    speculate: Literal["off", "auto", "mtp", "ngram", "draft"] | None = Field(
        None, description="What drafts of the next tokens come from; the answer is the same."
    )
    num_draft_tokens: int | None = Field(None, ge=1, le=7, description="Drafts of a step at the most.")
    chat_template_kwargs: Object | None = Field(None, description="Variables of the model's chat template.")

    IGNORED: ClassVar[frozenset[str]] = IGNORED
    CALLED: ClassVar[dict[str, str]] = {"repeat_penalty": "repetition_penalty", "repeat_last_n": "repetition_context"}

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        """Leave out what is ignored, give second names their first, refuse what penstock cannot do."""
        known, kept = cls.model_fields, {}
        for name, value in data.items():
            if name in known:
                kept[name] = value
            elif name in cls.CALLED:
                kept.setdefault(cls.CALLED[name], value)
            elif name in NEUTRAL and name not in cls.IGNORED:
                if value is not None and not any(_same(value, neutral) for neutral in NEUTRAL[name]):
                    raise ApiError(400, _refused(name), param=name, code="unsupported_parameter")
            elif name not in cls.IGNORED:
                raise _unknown(name, known)
        return kept

    @field_validator("stop")
    @classmethod
    def _stops(cls, value: Any) -> list[str]:
        return _stop_strings(value)

    @field_validator("logit_bias")
    @classmethod
    def _bias(cls, value: Any) -> dict[int, float] | None:
        if value is None:
            return None
        if not isinstance(value, dict):
            raise ValueError("is of a wrong type, expected an object of token ids and numbers")
        if len(value) > MAX_IDS:
            raise ValueError(f"has {len(value)} entries, expected at most {MAX_IDS}")
        bias = {}
        for key, number in value.items():
            if not (key.isascii() and key.isdigit() and len(key) <= 9):
                raise ValueError(f"has the key {key[:40]!r}, expected token ids")
            if isinstance(number, bool) or not isinstance(number, int | float) or not abs(number) <= 1e30:
                raise ValueError(f"[{key}] is {str(number)[:40]}, expected a number from -1e30 to 1e30")
            bias[int(key)] = float(number)
        return bias


def _stop_strings(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("is of a wrong type, expected a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"has {len(stops)} strings, expected at most {MAX_STOPS}")
    if not all(stops):
        raise ValueError("has an empty string, expected at least one character")
    return stops


def _same(value: Any, neutral: Any) -> bool:
    if isinstance(value, bool) != isinstance(neutral, bool):
        return False
    return value == neutral


def _unknown(name: str, known: Iterable[str]) -> ApiError:
    near = _ADVICE.get(name) or next(iter(difflib.get_close_matches(name[:80], known, 1)), None)
    hint = f"; did you mean {near}?" if near else ""
    short = name if len(name) <= 80 else f"{name[:77]}..."
    return ApiError(400, f"{short!r} is no field of this request{hint}", param=name[:80], code="unknown_parameter")


def _refused(name: str) -> str:
    advice = f"; use {_ADVICE[name]}" if name in _ADVICE else ""
    return f"{name} is not supported by this server{advice}"


class StreamOptions(Open):
    include_usage: bool | None = None


# --------------------------------------------------------------------------------------------------------------------
# Chat


class Part(Open):
    """A part of a message. Only text is taken."""

    type: str
    text: str | None = None

    @field_validator("type")
    @classmethod
    def _text_only(cls, value: str) -> str:
        if value not in ("text", "input_text", "output_text", "refusal"):
            raise ValueError(f"is {value[:40]!r}, expected text: images, sound and files are not supported")
        return value

    @model_validator(mode="after")
    def _has_text(self) -> Part:
        if self.text is None and self.type != "refusal":
            raise ValueError("has no text, expected a string")
        return self


Parts = Annotated[Items[Part], Field(max_length=MAX_PARTS)]


class Function(Open):
    name: str = Field(min_length=1, max_length=128)
    arguments: str | Object | None = None


class ToolCall(Open):
    id: str | None = None
    type: Literal["function"] | None = "function"
    function: Function

    def plain(self) -> dict[str, Any]:
        called = {"name": self.function.name, "arguments": self.function.arguments or "{}"}
        made: dict[str, Any] = {"type": "function", "function": called}
        return made if self.id is None else made | {"id": self.id}


class Message(Open):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Parts | None = None
    name: str | None = None
    tool_calls: Items[ToolCall] | None = Field(None, max_length=MAX_CALLS)
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _complete(self) -> Message:
        if self.content is None and not (self.role == "assistant" and (self.tool_calls or self._thought)):
            raise ValueError("has no content, expected text")
        if self.role == "tool" and not self.tool_call_id:
            raise ValueError("has no tool_call_id, expected that of the call it answers")
        return self

    @property
    def _thought(self) -> str | None:
        return self.reasoning_content or self.reasoning

    @property
    def text(self) -> str | None:
        if isinstance(self.content, list):
            return "".join(part.text or "" for part in self.content)
        return self.content

    def plain(self) -> dict[str, Any]:
        """As chat templates expect it, but for the arguments of tool calls, which are JSON text here."""
        made: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.text or ""}
        if self.name is not None:
            made["name"] = self.name
        if self.tool_calls:
            made["tool_calls"] = [call.plain() for call in self.tool_calls]
        if self.tool_call_id is not None:
            made["tool_call_id"] = self.tool_call_id
        if self._thought:
            made["reasoning_content"] = self._thought
        return made


class FunctionTool(Open):
    name: str = Field(pattern=r"^[a-zA-Z0-9_.\-]{1,128}$")
    description: str | None = None
    parameters: Object | None = None
    strict: bool | None = None


class Tool(Open):
    type: Literal["function"]
    function: FunctionTool


class NamedFunction(Open):
    name: str


class NamedTool(Open):
    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Open):
    name: str | None = Field(None, max_length=128)
    description: str | None = None
    schema_: Object | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Open):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.schema_ is None):
            raise ValueError("has no json_schema.schema, expected a JSON schema")
        return self


class Generating(Request):
    """Chat and text completions."""

    n: int | None = Field(None, ge=1, le=128, description="Answers to give.")
    max_tokens: Count | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    json_schema: Object | None = Field(None, description="Short form of response_format, as in llama.cpp.")
    expert_heat: bool | None = Field(None, description="Count the experts that the answer chooses, where that is told.")

    @model_validator(mode="after")
    def _options_fit(self) -> Generating:
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options goes with stream: true", param="stream_options", code="invalid_value")
        return self


class ChatRequest(Generating):
    """/v1/chat/completions."""

    messages: Items[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Items[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    modalities: Items[Literal["text"]] | None = Field(None, max_length=16)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs goes with logprobs: true", param="top_logprobs", code="invalid_value")
        check_tools([tool.function.name for tool in self.tools or ()], self.tool_choice)
        return self

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


def check_tools(names: list[str], choice: Any) -> None:
    """Tools have different names, and the one that must be called is among them."""
    for n, name in enumerate(names):
        if name in names[:n]:
            raise ApiError(400, f"tools has two functions named {name}", param="tools", code="invalid_value")
    wanted = choice if isinstance(choice, str | None) else getattr(choice, "function", choice).name
    if wanted in (None, "none", "auto"):
        return
    if not names:
        raise ApiError(400, "tool_choice asks for a call, but there are no tools", param="tool_choice")
    if wanted != "required" and wanted not in names:
        raise ApiError(
            400, f"tool_choice is {wanted[:80]!r}, expected the name of one of the tools", param="tool_choice"
        )


# --------------------------------------------------------------------------------------------------------------------
# Text completions


class CompletionRequest(Generating):
    """/v1/completions."""

    prompt: Annotated[Any, _texts_schema(MAX_PROMPTS)]
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = Field(
        None, description="0 goes with echo or prompt_logprobs."
    )
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = Field(None, description="The prompt in front of the answer, with its logprobs.")
    prompt_logprobs: int | None = Field(None, ge=0, le=20, description="Log probabilities of the prompt, as in vLLM.")

    @model_validator(mode="after")
    def _reads(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            message = "max_tokens is 0, expected at least 1 without echo: true and prompt_logprobs"
            raise ApiError(400, message, param="max_tokens", code="invalid_value")
        if self.stream and self.prompt_logprobs is not None:
            message = "prompt_logprobs does not go with stream: true; echo and logprobs do"
            raise ApiError(400, message, param="prompt_logprobs", code="invalid_value")
        return self

    @field_validator("prompt")
    @classmethod
    def _prompts(cls, value: Any) -> list[str | list[int]]:
        return _texts_or_ids(value, MAX_PROMPTS)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _texts_or_ids(value: Any, most: int) -> list[str | list[int]]:
    """Always a list of prompts."""
    if isinstance(value, str) or _is_ids(value):
        value = [value]
    if not isinstance(value, list) or not value:
        raise ValueError("is of a wrong type or empty, expected text, token ids or a list of either")
    if len(value) > most:
        raise ValueError(f"has {len(value)} prompts, expected at most {most}")
    for n, item in enumerate(value):
        if not (isinstance(item, str) or _is_ids(item)):
            raise ValueError(f"[{n}] is of a wrong type or empty, expected text or token ids")
        if isinstance(item, list) and len(item) > MAX_IDS:
            raise ValueError(f"[{n}] has {len(item)} token ids, expected at most {MAX_IDS}")
    return value


# --------------------------------------------------------------------------------------------------------------------
# Embeddings


class EmbeddingRequest(Strict):
    """/v1/embeddings."""

    model: str | None = Field(None, description="A name that /v1/models lists; the loaded model if left out.")
    input: Annotated[Any, _texts_schema(MAX_INPUTS)]
    encoding_format: Literal["float", "base64"] | None = Field(None, description="base64: little-endian float32.")
    dimensions: None = Field(None, description="Embeddings have the width of the model.")

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        if data.get("dimensions") is not None:
            raise ApiError(400, _refused("dimensions"), param="dimensions", code="unsupported_parameter")
        return {name: value for name, value in data.items() if name not in IGNORED}

    @field_validator("input")
    @classmethod
    def _inputs(cls, value: Any) -> list[str | list[int]]:
        return _texts_or_ids(value, MAX_INPUTS)


# --------------------------------------------------------------------------------------------------------------------
# Responses


class ReasoningPart(Open):
    """A part of the reasoning that an earlier response brought."""

    type: Literal["reasoning_text"]
    text: str


ReasoningParts = Annotated[Items[ReasoningPart], Field(max_length=MAX_PARTS)]


class InputItem(Open):
    """A message, a call that the model made, the result of one, or the reasoning before either."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | Parts | ReasoningParts | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | Parts | None = None

    @model_validator(mode="after")
    def _complete(self) -> InputItem:
        if self.type in (None, "message") and (self.role is None or self.content is None):
            raise ValueError("has no role or no content, expected a message")
        parts = self.content if isinstance(self.content, list) else []
        if self.type != "reasoning" and any(isinstance(part, ReasoningPart) for part in parts):
            raise ValueError("has reasoning_text in its content, expected text")
        if self.type == "function_call" and (self.name is None or self.call_id is None):
            raise ValueError("has no name or no call_id, expected those of a function call")
        if self.type == "function_call_output" and (self.call_id is None or self.output is None):
            raise ValueError("has no call_id or no output, expected those of a function call")
        return self


InputItems = Annotated[Items[InputItem], Field(max_length=MAX_MESSAGES)]


class ResponseTool(FunctionTool):
    type: Literal["function"]


class ResponseToolChoice(Open):
    type: Literal["function"]
    name: str


class TextFormat(Open):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, max_length=128)
    schema_: Object | None = Field(None, alias="schema")
    strict: bool | None = None
    description: str | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> TextFormat:
        if self.type == "json_schema" and self.schema_ is None:
            raise ValueError("has no schema, expected a JSON schema")
        return self


class TextOptions(Open):
    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(Open):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class ResponsesRequest(Request):
    """/v1/responses."""

    input: str | InputItems = Field(description="Text, or a conversation.")
    instructions: str | None = None
    max_output_tokens: Count | None = None
    tools: Items[ResponseTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["disabled"] | None = None
    include: Items[str] | None = Field(None, max_length=64)
    stream_options: Object | None = None

    @field_validator("include")
    @classmethod
    def _without_logprobs(cls, value: list[str] | None) -> list[str] | None:
        if "message.output_text.logprobs" in (value or ()):
            raise ValueError(
                "has message.output_text.logprobs, which is not supported: /v1/chat/completions has logprobs"
            )
        return value

    @model_validator(mode="after")
    def _consistent(self) -> ResponsesRequest:
        if not self.input:
            raise ApiError(400, "input is empty, expected text or a conversation", param="input", code="invalid_value")
        check_tools([tool.name for tool in self.tools or ()], self.tool_choice)
        return self


# --------------------------------------------------------------------------------------------------------------------
# Messages, as in Anthropic's API

_BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")


class TextBlock(Open):
    type: Literal["text"]
    text: str


class ResultPart(Open):
    """A part of what a tool gave back. Only text is taken."""

    type: str
    text: str | None = None

    @model_validator(mode="after")
    def _text_only(self) -> ResultPart:
        if self.type != "text" or self.text is None:
            raise ValueError(f"is of type {self.type[:40]!r}, expected text: images and files are not supported")
        return self


class ContentBlock(Open):
    """A part of a turn: text, thoughts, a call of a tool, or the result of one."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Object | None = None
    tool_use_id: str | None = None
    content: str | Annotated[Items[ResultPart], Field(max_length=MAX_PARTS)] | None = None
    is_error: bool | None = None

    @model_validator(mode="after")
    def _complete(self) -> ContentBlock:
        if self.type not in _BLOCKS:
            known = ", ".join(_BLOCKS)
            raise ValueError(f"is of type {self.type[:40]!r}, expected {known}: images and files are not supported")
        needed = {"text": ("text",), "tool_use": ("id", "name"), "tool_result": ("tool_use_id",)}
        for name in needed.get(self.type, ()):
            if getattr(self, name) is None:
                raise ValueError(f"has no {name}, expected one in a block of type {self.type}")
        return self


class Turn(Open):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[Items[ContentBlock], Field(max_length=MAX_PARTS)]


class MessagesTool(Open):
    """A tool of the client's. Those that Anthropic runs itself are not here."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.\-]{1,128}$")
    type: Literal["custom"] | None = None
    description: str | None = None
    input_schema: Object


class MessagesToolChoice(Open):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _named(self) -> MessagesToolChoice:
        if self.type == "tool" and self.name is None:
            raise ValueError("has no name, expected that of a tool")
        return self


class Thinking(Open):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Count | None = None


class OutputFormat(Open):
    type: Literal["json_schema"]
    schema_: Object = Field(alias="schema")


class OutputConfig(Open):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Prompted(Request):
    """What /v1/messages and /v1/messages/count_tokens have in common."""

    messages: Items[Turn] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: str | Annotated[Items[TextBlock], Field(max_length=MAX_PARTS)] | None = None
    tools: Items[MessagesTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    thread: Annotated[Any, WithJsonSchema({"type": "null"})] = None

    IGNORED: ClassVar[frozenset[str]] = IGNORED | frozenset(
        "context_management container inference_geo betas cache_control speed diagnostics user_profile_id "
        "workspace_id anthropic_version fallbacks fallback_credit_token".split()
    )

    @field_validator("thread")
    @classmethod
    def _nothing_held(cls, value: Any) -> None:
        """The code tells clients to send the whole conversation again without it."""
        if value is not None:
            message = "thread is not supported: no conversation is kept here, expected the whole of it in messages"
            raise ApiError(400, message, param="thread", code=THREAD_UNSUPPORTED)

    @model_validator(mode="after")
    def _consistent(self) -> Prompted:
        choice = self.tool_choice
        named = choice if choice is not None and choice.type == "tool" else None
        wanted = "required" if choice is not None and choice.type == "any" else named
        check_tools([tool.name for tool in self.tools or ()], wanted)
        return self


class MessagesRequest(Prompted):
    """/v1/messages."""

    max_tokens: Count
    stop_sequences: TextOrTexts = None

    @field_validator("stop_sequences")
    @classmethod
    def _sequences(cls, value: Any) -> list[str]:
        return _stop_strings(value)

    @model_validator(mode="after")
    def _stopped(self) -> MessagesRequest:
        self.stop = [*(self.stop or ()), *(self.stop_sequences or ())]
        return self


class CountTokensRequest(Prompted):
    """/v1/messages/count_tokens."""


# --------------------------------------------------------------------------------------------------------------------
# Tokens and templates, as in llama.cpp


class TokenizeRequest(Strict):
    """/tokenize: llama.cpp's fields, or vLLM's `prompt`, to which special tokens are added unless it says otherwise."""

    content: str | None = None
    add_special: bool = Field(False, description="Add what the tokenizer puts around a text, such as a BOS token.")
    with_pieces: bool = Field(
        False, description="Give each token's text beside its id, or its bytes where they are a part of a character."
    )
    model: str | None = None
    prompt: str | None = Field(None, description="In place of content.")
    add_special_tokens: bool = Field(True, description="As add_special, of a prompt.")

    @model_validator(mode="after")
    def _one_text(self) -> TokenizeRequest:
        if self.content is None and self.prompt is None:
            raise ApiError(400, "content is missing, expected text", param="content", code="missing_parameter")
        if self.content is not None and self.prompt is not None:
            message = "the request has content and prompt, expected one of them"
            raise ApiError(400, message, param="prompt", code="invalid_value")
        return self

    @property
    def text(self) -> tuple[str, bool]:
        """What is to be tokenized, and whether special tokens are added."""
        if self.content is not None:
            return self.content, self.add_special
        assert self.prompt is not None
        return self.prompt, self.add_special_tokens


class DetokenizeRequest(Strict):
    """/detokenize."""

    model: str | None = None
    tokens: Items[Annotated[int, Field(ge=0, le=2**32 - 1)]] = Field(max_length=MAX_IDS)


class TemplateRequest(Strict):
    """/apply-template."""

    model: str | None = None
    messages: Items[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    tools: Items[Tool] | None = Field(None, max_length=MAX_TOOLS)
    add_generation_prompt: bool = True
    chat_template_kwargs: Object | None = None
