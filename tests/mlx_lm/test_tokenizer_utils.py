"""Tokenizers under transformers' names, text as tokens arrive, functions as tools."""

import enum
from typing import Any, Literal

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from penstock.errors import InvalidArgument
from penstock.mlx_lm import load_tokenizer
from penstock.mlx_lm._schema import tool_schema
from penstock.mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    HubTokenizer,
    NaiveStreamingDetokenizer,
    SPMStreamingDetokenizer,
    TokenizerWrapper,
    load,
)
from penstock.text.template import ChatTemplates
from penstock.text.tokenizer import Tokenizer
from tests.mlx_lm.notebook import MODEL

WORDS = ["<unk>", "<s>", "▁the", "▁fox", "<0xC3>", "<0xA9>", "\n", "▁", "s"]


@pytest.fixture
def tokenizer() -> TokenizerWrapper:
    return load_tokenizer(MODEL)


def word_tokenizer(*steps: Any) -> Tokenizer:
    made = tokenizers.Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.decoder = decoders.Sequence(list(steps))
    return Tokenizer(made, eos_ids=[1])


def streamed(wrapper: TokenizerWrapper, ids: list[int]) -> list[str]:
    detokenizer = wrapper.detokenizer
    parts = []
    for token in ids:
        detokenizer.add_token(token)
        parts.append(detokenizer.last_segment)
    detokenizer.finalize()
    parts.append(detokenizer.last_segment)
    assert detokenizer.tokens == ids and detokenizer.text == "".join(parts)
    return parts


def test_byte_level_text_as_it_arrives(tokenizer):
    assert isinstance(tokenizer.detokenizer, BPEStreamingDetokenizer)
    assert "".join(streamed(tokenizer, tokenizer.encode(" a fox"))) == "a fox"  # the first space is left out
    fox = tokenizer.encode("é\U0001f98a<|im_end|>", add_special_tokens=False)
    parts = streamed(tokenizer, fox)
    assert "".join(parts) == "é\U0001f98a<|im_end|>" and not any("�" in part for part in parts)
    space = tokenizer.convert_tokens_to_ids("Ġ")
    assert streamed(tokenizer, [54, space, 55]) == ["S", "", " T", ""]
    half = tokenizer.encode("\U0001f98a", add_special_tokens=False)[:1]
    assert streamed(tokenizer, half) == ["", "�"] and streamed(tokenizer, [10**6]) == ["!", ""]
    first, second = tokenizer.detokenizer, tokenizer.detokenizer
    first.add_token(54)
    assert second.text == "" and first.text == "S"


def test_sentencepiece_text_as_it_arrives():
    replace, fallback, fuse = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
    ids = [2, 3, 4, 5, 8]
    trimmed = TokenizerWrapper(word_tokenizer(replace, fallback, fuse, decoders.Strip(" ", 1, 0)))
    assert isinstance(trimmed.detokenizer, SPMStreamingDetokenizer)
    assert streamed(trimmed, ids) == ["the", " fox", "", "é", "s", ""]
    whole = TokenizerWrapper(word_tokenizer(replace, fallback, fuse))
    assert streamed(whole, ids) == [" the", " fox", "", "é", "s", ""] and whole.eos_token_ids == {1}
    other = TokenizerWrapper(word_tokenizer(replace, fuse))
    assert isinstance(other.detokenizer, NaiveStreamingDetokenizer)
    assert streamed(other, [2, 3, 6, 8]) == [" the", " fox", "\n", "s", ""]


def test_names_of_transformers(tokenizer):
    ids = tokenizer.encode("a fox")
    assert tokenizer("a fox").input_ids == ids and tokenizer(["a", "b"])["attention_mask"] == [[1], [1]]
    np.testing.assert_array_equal(tokenizer.encode("a fox", return_tensors="np"), [ids])
    assert tokenizer.decode(np.array(ids)) == tokenizer.decode(tuple(ids)) == "a fox"
    assert tokenizer.decode(ids[0]) == "a" and tokenizer.decode([3]) == "<|im_end|>"
    assert tokenizer.decode([3], skip_special_tokens=True) == ""
    assert tokenizer.batch_decode([ids, ids[:1]]) == ["a fox", "a"] and tokenizer.tokenize("a fox") == ["a", "Ġfox"]
    assert tokenizer.convert_ids_to_tokens(3) == "<|im_end|>" and tokenizer.convert_tokens_to_ids(["Ġfox"]) == ids[1:]
    assert 3 in tokenizer.all_special_ids and tokenizer.unk_token is None and tokenizer.is_fast
    tokenizer.pad_token = "<|im_start|>"
    assert tokenizer.pad_token_id == 2 and tokenizer.special_tokens_map["pad_token"] == "<|im_start|>"
    with pytest.raises(InvalidArgument, match="pad_token is 'nope', expected a token of the vocabulary"):
        tokenizer.pad_token = "nope"
    with pytest.raises(InvalidArgument, match="return_tensors is 'pt', expected None or 'np'"):
        tokenizer.encode("a", return_tensors="pt")
    for name in ("nothing_like_this", "_hidden", "image_token"):
        assert not hasattr(tokenizer, name)
    assert "TokenizerWrapper(HubTokenizer(Tokenizer(4096" in repr(tokenizer)
    assert load(MODEL).eos_token_ids == {1, 3} and load(MODEL, eos_token_ids=5).eos_token_ids >= {5}


def test_chat_templates(tokenizer):
    user = {"role": "user", "content": "hello"}
    ids = tokenizer.apply_chat_template([user])
    assert ids == tokenizer.encode(tokenizer.apply_chat_template([user], tokenize=False), add_special_tokens=False)
    assert len(tokenizer.apply_chat_template([user], add_generation_prompt=True)) > len(ids)
    assert tokenizer.apply_chat_template([[user], [user]], return_dict=True) == [ids, ids]  # mlx-lm has no dict, either
    np.testing.assert_array_equal(tokenizer.apply_chat_template([user], return_tensors="np"), [ids])
    shown = "{{ enable_thinking }}|{{ messages[-1].content }}|{{ messages[-1].thinking }}|{{ extra }}"
    answer = {"role": "assistant", "content": 4.5, "reasoning": "why", "tool_calls": None}
    found = tokenizer.apply_chat_template([user, answer], chat_template=shown, tokenize=False, extra=[1])
    assert found == "False|4.5|why|[1]"
    assert (
        tokenizer.apply_chat_template([user], chat_template=shown, tokenize=False, enable_thinking=True)[:4] == "True"
    )
    half = [user, {"role": "assistant", "content": "The "}]
    assert tokenizer.apply_chat_template(half, tokenize=False, continue_final_message=True).endswith("\nThe ")
    for options, message in (
        ({"continue_final_message": True, "add_generation_prompt": True}, "expected one of them"),
        ({"continue_final_message": "reasoning"}, "the last message has no text as reasoning"),
        ({"continue_final_message": True, "chat_template": "x"}, "the template leaves out the last content"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            tokenizer.apply_chat_template(half, **options)
    tokenizer.chat_template = None
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidArgument, match="the model has no chat template"):
        tokenizer.apply_chat_template([user])


def test_thinking_and_tool_calls():
    def made(*more: str, template: str = "") -> TokenizerWrapper:
        backend = tokenizers.Tokenizer(
            models.WordLevel({word: n for n, word in enumerate(["a", *more])}, unk_token="a")
        )
        return TokenizerWrapper(
            HubTokenizer(Tokenizer(backend, templates=ChatTemplates({"default": (template, "x")}), eos_ids=[0]))
        )

    plain = made()
    assert not plain.has_thinking and plain.think_start_id is None and plain.tool_parser is None
    thinks = made("<think>", "</think>")
    assert (thinks.think_start, thinks.think_end_id, thinks.think_start_tokens) == ("<think>", 2, (1,))
    gemma = made("<|channel>", "<channel|>")
    assert (gemma.think_start, gemma.think_end) == ("<|channel>thought", "<channel|>")
    calls = made("<tool_call>", "</tool_call>", template="<tool_call> tool_call.name")
    assert calls.has_tool_calling and (calls.tool_call_start, calls.tool_call_end) == ("<tool_call>", "</tool_call>")
    assert calls.tool_parser is not None
    call = '{"name": "add", "arguments": {"a": 1, "b": [2.5]}}'
    assert calls.tool_parser(call) == {"name": "add", "arguments": {"a": 1, "b": [2.5]}}
    for wrong in ("hello", '{"name": "add", "arguments": {"a": 1, }'):
        with pytest.raises(InvalidArgument, match="is no tool call"):
            calls.tool_parser(wrong)


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


def search(
    query: str,
    *,
    limit: int = 5,
    kinds: list[Literal["a", "b"]] | None = None,
    colour: Colour = Colour.RED,
    where: dict[str, float] | str = "",
    pair: tuple[int, str] = (1, ""),
    order: str = "up",
    flag: bool | int = False,
    rest: Any = None,
) -> list[str]:
    """
    Search for things.

    More about it.

    Args:
        query: What to look for,
            in some words: any
        limit: The most
        kinds: Which
        colour: Of it
        where: Places
        pair: Two
        order: How (choices: ["up", "down"])
        flag: Whether
        rest: More

    Returns:
        What was found
    """
    return [query, str((limit, kinds, colour, where, pair, order, flag, rest))]


def test_a_function_is_a_tool():
    found = tool_schema(search)["function"]
    assert found["name"] == "search" and found["description"] == "Search for things.\n\nMore about it."
    properties = found["parameters"]["properties"]
    assert properties["query"] == {"type": "string", "description": "What to look for, in some words: any"}
    assert properties["order"]["enum"] == ["up", "down"] and properties["order"]["description"] == "How"
    assert found["parameters"]["required"] == ["query"] and found["return"]["description"] == "What was found"
    assert properties["kinds"]["items"] == {"type": "string", "enum": ["a", "b"]} and properties["kinds"]["nullable"]
    assert properties["flag"]["type"] == ["boolean", "integer"] and properties["rest"] == {"description": "More"}


@pytest.mark.slow
def test_a_tool_is_as_transformers_writes_it():
    transformers = pytest.importorskip("transformers.utils.chat_template_utils")
    assert transformers.get_json_schema(search) == tool_schema(search)


def test_functions_that_say_too_little_are_refused():
    def bare(a: int) -> int:
        return a

    def untyped(a):
        """It does.

        Args:
            a: A thing
        """

    def silent(a: int):
        """It does."""

    def odd(a: np.ndarray):
        """It does.

        Args:
            a: A thing
        """

    for function, message in (
        (bare, "bare has no docstring"),
        (untyped, "untyped has no type hint for a"),
        (silent, "the docstring of silent does not describe a"),
        (odd, "odd has the type .* for a, expected one that JSON has"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            tool_schema(function)
