"""The tokenizer of a GGUF file from `tokenizer.ggml.*`, special tokens and chat template included.

Three kinds (`tokenizer.ggml.model`): `gpt2`, byte-level BPE, whose file has tokens and merges and names only how text
is cut into words before merging (`tokenizer.ggml.pre`; a name that is not known is refused: with another cut the model
would read other tokens); `llama`, SentencePiece, whose merges follow from the scores of tokens; `gemma4`, such tokens
with merges of their own. Both of the latter write a space as ▁, and what is no token as bytes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from penstock.errors import CheckpointError
from penstock.text.template import ChatTemplates
from penstock.text.tokenizer import Tokenizer, harmony_ends
from penstock.text.words import DEEPSEEK3, GPT2, KIMI, LLAMA3, O200K, QWEN2, QWEN35, TEKKEN
from penstock.weights.files import short
from penstock.weights.gguf import GgufFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type

# Added tokens that end a turn or a text, for files that do not say which one ends a turn; as llama.cpp knows them.
_ENDS_OF_TURN = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<turn|>", "<|tool_response>", "[EOT]"),
    *("<|endoftext|>", "<|end_of_text|>", "<eos>", "[EOS]", "<EOT>", "<|eom_id|>"),
)
_ENDS_OF_HARMONY = ("<|return|>", "<|call|>", "<|endoftext|>")  # where <|end|> ends one message of several


@dataclass(frozen=True)
class _Pre:
    """How words are cut: each pattern cuts what the ones before it left; and what models of that kind do besides."""

    patterns: tuple[str, ...]
    add_bos: bool = False
    ignore_merges: bool = False  # a word that is a token is that token, whatever the merges would make of it
    normalizer: Callable[[], Any] | None = None


_DEFAULT = _Pre((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))
_LLAMA_BPE = _Pre((LLAMA3,), add_bos=True, ignore_merges=True)
_DIGITS = _Pre((r"\p{N}", GPT2))
_NFC_QWEN2 = _Pre((QWEN2,), normalizer=normalizers.NFC)
PRE: dict[str, _Pre] = {
    "default": _DEFAULT,
    "gpt-2": _Pre((GPT2,)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"), _LLAMA_BPE),
    **dict.fromkeys(("smaug-bpe", "dbrx", "chatglm-bpe"), _Pre((LLAMA3,))),
    "glm4": _Pre((LLAMA3,), ignore_merges=True),
    "tekken": _Pre((TEKKEN,), add_bos=True, ignore_merges=True),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "command-r", "exaone"), _DIGITS),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _NFC_QWEN2),
    **dict.fromkeys(("stablelm2", "megrez", "hunyuan", "grok-2"), _Pre((QWEN2,))),
    "qwen35": _Pre((QWEN35,), normalizer=normalizers.NFC),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), _Pre((O200K,))),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _Pre(DEEPSEEK3)),
    "kimi-k2": _Pre((KIMI,), ignore_merges=True),
    "deepseek-coder": _Pre((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")),
}
KINDS = ("gpt2", "llama", "gemma4")
_SPACE = "▁"


def gguf_tokenizer(file: GgufFile) -> Tokenizer:
    """The tokenizer of a file. What a user should know is added to its `notices`.

    Raises CheckpointError, naming file and key, for a kind of tokenizer that is not supported and for what is missing
    or contradictory.
    """
    return _Reader(file).tokenizer()


class _Reader:
    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self._keys = file.metadata

    def tokenizer(self) -> Tokenizer:
        kind = self._value("model", str, "the kind of tokenizer", required=True)
        if kind not in KINDS:
            raise self._error("model", f"'gpt2' (byte-level BPE), 'llama' (SentencePiece) or '{KINDS[2]}'")
        pre = self._pre() if kind == "gpt2" else _Pre((), add_bos=True)
        tokens = self._value("tokens", list, "the vocabulary", required=True)
        types = self._types(len(tokens))
        vocab = self._vocab(tokens, types)
        backend = self._backend(vocab, pre) if kind == "gpt2" else self._pieces(kind, tokens, types, vocab)
        control = [token for token, kind in zip(tokens, types, strict=True) if kind in (CONTROL, UNKNOWN)]
        defined = [token for token, kind in zip(tokens, types, strict=True) if kind == USER_DEFINED]
        backend.add_special_tokens([AddedToken(token, normalized=False) for token in control])
        backend.add_tokens([AddedToken(token, normalized=False) for token in defined])
        named = {name: self._token(f"{name}_token_id", tokens) for name in ("bos", "eos", "eot", "eom")}
        if kind == "llama":  # SentencePiece's own, for files that do not say it
            for name, number in (("bos", 1), ("eos", 2)):
                if named[name] is None and number < len(tokens) and types[number] == CONTROL:
                    named[name] = number
        if (processor := self._post_processor(tokens, named, pre)) is not None:
            backend.post_processor = processor
        special = {f"{n}_token": tokens[i] for n, i in named.items() if n in ("bos", "eos") and i is not None}
        return Tokenizer(
            backend,
            eos_ids=self._ends(named, [*control, *defined], vocab, harmony_ends(backend)),
            eos_id=named["eos"],
            bos_id=named["bos"],
            templates=self._templates(special),
            source=str(self.file.path),
        )

    def _pre(self) -> _Pre:
        name = self._value("pre", str, "the name of a way to cut words")
        if name is None:
            self.file.notices.append(
                f"{self.file.path}: tokenizer.ggml.pre is missing; words are cut in the default way, which may be wrong"
            )
            return _DEFAULT
        if name not in PRE:
            raise self._error("pre", f"one of {', '.join(PRE)}")
        return PRE[name]

    def _types(self, count: int) -> list[int]:
        found = self._keys.get("tokenizer.ggml.token_type")
        if found is None:
            return [NORMAL] * count
        if not isinstance(found, np.ndarray) or found.dtype.kind not in "iu" or len(found) != count:
            raise self._error("token_type", f"{count} integers, one per token")
        return found.tolist()

    def _vocab(self, tokens: Sequence[Any], types: Sequence[int]) -> dict[str, int]:
        """Ids by token, without those that only fill the table up."""
        vocab: dict[str, int] = {}
        for number, (token, kind) in enumerate(zip(tokens, types, strict=True)):
            if kind == UNUSED:
                continue
            if not token:
                raise CheckpointError(f"{self.file.path}: tokenizer.ggml.tokens: token {number} is empty")
            if vocab.setdefault(token, number) != number:
                found = f"tokens {vocab[token]} and {number} are both {short(token)}"
                raise CheckpointError(f"{self.file.path}: tokenizer.ggml.tokens: {found}, expected each once")
        if not vocab:
            raise self._error("tokens", "a vocabulary")
        return vocab

    def _listed_merges(self, vocab: dict[str, int]) -> list[tuple[str, str]]:
        merges: list[tuple[str, str]] = []
        for n, merge in enumerate(self._value("merges", list, "the merges of byte-pair encoding", required=True)):
            cut = merge.find(" ", 1)  # a space is never part of a token, it is written as Ġ or ▁
            left, right = merge[:cut], merge[cut + 1 :]
            if cut < 0 or left not in vocab or right not in vocab or left + right not in vocab:
                found = f"merge {n} is {short(merge)}, expected two tokens that make a third one"
                raise CheckpointError(f"{self.file.path}: tokenizer.ggml.merges: {found}")
            merges.append((left, right))
        return merges

    def _scored_merges(self, vocab: dict[str, int], types: Sequence[int]) -> list[tuple[str, str]]:
        """What SentencePiece merges: two pieces that are a token together, those of a higher score first."""
        scores = self._keys.get("tokenizer.ggml.scores")
        if not isinstance(scores, np.ndarray) or scores.dtype.kind not in "fiu" or len(scores) != len(types):
            raise self._error("scores", f"{len(types)} numbers, one per token")
        if not np.isfinite(scores).all():
            number = int(np.argmin(np.isfinite(scores)))
            raise CheckpointError(f"{self.file.path}: tokenizer.ggml.scores: token {number} has {scores[number]}")
        found: list[tuple[float, int, int, str, str]] = []
        for token, number in vocab.items():
            if types[number] not in (NORMAL, USER_DEFINED):
                continue
            for cut in range(1, len(token)):
                left, right = token[:cut], token[cut:]
                if left in vocab and right in vocab:
                    found.append((-float(scores[number]), -cut, number, left, right))
        return [(left, right) for *_, left, right in sorted(found)]

    def _pieces(
        self, kind: str, tokens: Sequence[str], types: Sequence[int], vocab: dict[str, int]
    ) -> tokenizers.Tokenizer:
        """Tokens with ▁ for a space; characters that are none of them become bytes, or the unknown token."""
        merges = self._scored_merges(vocab, types) if kind == "llama" else self._listed_merges(vocab)
        prefix = self._value("add_space_prefix", bool, "true or false")
        prefix = kind == "llama" if prefix is None else prefix
        number = self._token("unknown_token_id", tokens)
        if number is None:
            number = next((n for n, found in enumerate(types) if found == UNKNOWN), None)
        unknown = None if number is None or tokens[number] not in vocab else tokens[number]
        backend = self._bpe(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
        spaces = normalizers.Replace(" ", _SPACE)
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces  # type: ignore[assignment]
        undone = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        if prefix:
            undone.append(decoders.Strip(" ", 1, 0))  # type: ignore[arg-type]
        backend.decoder = decoders.Sequence(undone)  # type: ignore[assignment]
        return backend

    def _bpe(self, vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> tokenizers.Tokenizer:
        try:
            return tokenizers.Tokenizer(models.BPE(vocab, merges, **options))
        except BaseException as error:  # bare Exception, and a BaseException where the library's Rust code panics
            if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
                raise
            reason = " ".join(str(error).split())[:300]
            raise CheckpointError(f"{self.file.path}: tokenizer.ggml.tokens cannot be used: {reason}") from None

    def _backend(self, vocab: dict[str, int], pre: _Pre) -> tokenizers.Tokenizer:
        backend = self._bpe(vocab, self._listed_merges(vocab), ignore_merges=pre.ignore_merges)
        cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
        if pre.normalizer is not None:
            backend.normalizer = pre.normalizer()
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])  # type: ignore[assignment]
        backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
        return backend

    def _post_processor(self, tokens: Sequence[str], named: dict[str, int | None], pre: _Pre) -> Any:
        """Puts a BOS before and an EOS behind a text, if the file (or else the kind of tokenizer) says so."""
        added: dict[str, dict[str, Any]] = {}
        for name, default in (("bos", pre.add_bos), ("eos", False)):
            wanted = self._value(f"add_{name}_token", bool, "true or false")
            number = named[name]
            if wanted and number is None:
                raise self._error(f"{name}_token_id", f"a token: add_{name}_token is true")
            if (default if wanted is None else wanted) and number is not None:
                added[name] = {"id": name, "ids": [number], "tokens": [tokens[number]]}
        if not added:
            return None
        single = [name for name in ("bos", "$A", "eos") if name == "$A" or name in added]
        pair = [*single, *(name.replace("$A", "$B") for name in single)]
        return processors.TemplateProcessing(single, pair, list(added.values()))

    def _ends(
        self, named: dict[str, int | None], added: Sequence[str], vocab: dict[str, int], harmony: frozenset[int]
    ) -> set[int]:
        ends = {named[name] for name in ("eos", "eot", "eom")} - {None}
        if harmony:
            return (ends | harmony) - {vocab.get("<|end|>")}  # type: ignore[return-value]
        if named["eot"] is None:
            marks = _ENDS_OF_HARMONY if "<|return|>" in added else _ENDS_OF_TURN
            ends |= {vocab[token] for token in added if token in marks}
        return ends  # type: ignore[return-value]

    def _templates(self, special: dict[str, str]) -> ChatTemplates | None:
        sources: dict[str, tuple[str, str]] = {}
        for key, text in self._keys.items():
            name = "default" if key == "tokenizer.chat_template" else key.removeprefix("tokenizer.chat_template.")
            if key.startswith("tokenizer.chat_template") and name and name != key:
                if not isinstance(text, str):
                    raise CheckpointError(f"{self.file.path}: {key} is {short(text)}, expected a chat template")
                sources[name] = text, f"{self.file.path}: {key}"
        return ChatTemplates(sources, special) if sources else None

    def _token(self, key: str, tokens: Sequence[str]) -> int | None:
        number = self._value(key, int, "a token id")
        if number is not None and not 0 <= number < len(tokens):
            raise self._error(key, f"a token id from 0 to {len(tokens) - 1}")
        return number

    def _value(self, key: str, kind: type, expected: str, required: bool = False) -> Any:
        value = self._keys.get(f"tokenizer.ggml.{key}")
        if (value is None and required) or (value is not None and type(value) is not kind):
            raise self._error(key, expected)
        return value

    def _error(self, key: str, expected: str) -> CheckpointError:
        value = self._keys.get(f"tokenizer.ggml.{key}")
        found = "is missing" if value is None else f"is {_shown(value)}"
        return CheckpointError(f"{self.file.path}: tokenizer.ggml.{key} {found}, expected {expected}")


def _shown(value: Any) -> str:
    if isinstance(value, list | np.ndarray):
        return f"an array of {len(value)}"
    return short(value)
