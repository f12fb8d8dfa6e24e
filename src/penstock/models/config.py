"""Reading config.json strictly: every key a model relies on is named, typed and checked before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from penstock.errors import CheckpointError, InvalidArgument

_MISSING: Any = object()
_LARGEST = 1 << 31  # sizes, counts and positions are int32 in kernels
MOST_ROWS = 1 << 20  # of what is made by the config alone, before a tensor is looked at: orders of rows, frequencies


class Fields:
    """The keys of one JSON object, with errors that say where a value stands, what it is and what was expected.

    Raises CheckpointError for a missing key without a default and for a value of another kind or out of range. A key
    that is null counts as missing where a default is given.
    """

    def __init__(self, values: Any, where: str) -> None:
        if not isinstance(values, Mapping):
            raise CheckpointError(f"{where} is {_shown(values)}, expected an object")
        self.values: Mapping[str, Any] = values
        self.where = where

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def error(self, key: str, expected: str) -> CheckpointError:
        if key not in self.values:
            return CheckpointError(f"{self.where}: {key} is missing, expected {expected}")
        return CheckpointError(f"{self.where}: {key} is {_shown(self.values[key])}, expected {expected}")

    def _value(self, key: str, default: Any, expected: str) -> Any:
        value = self.values.get(key)
        if value is None:
            if default is _MISSING:
                raise self.error(key, expected)
            return default
        return value

    def integer(self, key: str, default: Any = _MISSING, least: int = 1, most: int = _LARGEST) -> Any:
        expected = f"an integer from {least} to {most}"
        value = self._value(key, default, expected)
        if value is default:
            return value
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # some exporters write 32000.0
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.error(key, expected)
        return value

    def number(self, key: str, default: Any = _MISSING, above: float = -math.inf, most: float = math.inf) -> Any:
        bounds = (f" above {above:g}" if above > -math.inf else "") + (f" up to {most:g}" if most < math.inf else "")
        value = self._value(key, default, f"a number{bounds}")
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, f"a number{bounds}")
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
        if not (math.isfinite(value) and above < value <= most):
            raise self.error(key, f"a number{bounds}")
        return value

    def boolean(self, key: str, default: Any = _MISSING) -> Any:
        value = self._value(key, default, "true or false")
        if not isinstance(value, bool) and value is not default:
            raise self.error(key, "true or false")
        return value

    def choice(self, key: str, allowed: Sequence[Any], default: Any = _MISSING) -> Any:
        """One of the values that penstock supports."""
        expected = f"one of {', '.join(map(repr, allowed))}" if len(allowed) > 1 else repr(allowed[0])
        value = self._value(key, default, expected)
        if value is not default and not any(type(value) is type(a) and value == a for a in allowed):
            raise self.error(key, expected)
        return value

    def items(self, key: str, kind: type, default: Any = _MISSING) -> Any:
        """A list of strings or integers."""
        expected = f"a list of {'strings' if kind is str else 'integers'}"
        value = self._value(key, default, expected)
        if value is default:
            return value
        if not isinstance(value, list) or any(isinstance(v, bool) or not isinstance(v, kind) for v in value):
            raise self.error(key, expected)
        return tuple(value)

    def table(self, key: str, default: Any = _MISSING) -> Any:
        """A nested object, itself as Fields."""
        value = self._value(key, default, "an object")
        if value is default:
            return value
        if not isinstance(value, Mapping):
            raise self.error(key, "an object")
        return Fields(value, f"{self.where}: {key}")

    def require(self, condition: bool, message: str) -> None:
        """A relation between several keys holds."""
        if not condition:
            raise CheckpointError(f"{self.where}: {message}")


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write very long integers
        return f"a very long {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def text_part(raw: Any, known: Sequence[str], wrapper: str, nested: Sequence[str]) -> tuple[Fields, str]:
    """The keys of a text model and its model_type: of config.json itself, one of `known`, or of the `text_config` of a
    `wrapper` (a model that sees, too), one of `nested`.

    The head is tied if a wrapper or its text model says so: transformers makes wrappers that do around text models that
    do not, and looks at the wrapper; a head in the files counts all the same.
    """
    top = Fields(raw, "config.json")
    if top.values.get("model_type") != wrapper:
        return top, top.choice("model_type", known)
    fields = top.table("text_config")
    if "tie_word_embeddings" in top and (top.values["tie_word_embeddings"] or "tie_word_embeddings" not in fields):
        tied = {"tie_word_embeddings": top.values["tie_word_embeddings"]}
        fields = Fields({**fields.values, **tied}, fields.where)
    return fields, fields.choice("model_type", nested, nested[0])


def query_scale(fields: Fields) -> tuple[float, int]:
    """How much queries grow with their position, and from which on: of `ops.position_scale`, by `rope_parameters`."""
    table = fields.table("rope_parameters")
    return table.number("llama_4_scaling_beta"), table.integer("original_max_position_embeddings")


def layer_types(
    fields: Fields, layers: int, known: Sequence[str], interval: int | None = None, default: str | None = None
) -> tuple[str, ...]:
    """`layer_types`, or every `interval`-th layer of the last known kind and the others of the first."""
    found = fields.items("layer_types", str, None)
    if found is None:
        if interval is None:
            if default is None:
                raise fields.error("layer_types", f"a list of {layers} layer kinds")
            return (default,) * layers
        return tuple(known[-1] if (n + 1) % interval == 0 else known[0] for n in range(layers))
    for kind in found:
        if kind not in known:
            raise CheckpointError(f"{fields.where}: layer_types has {kind!r}, expected {', '.join(map(repr, known))}")
    if len(found) != layers:
        raise CheckpointError(
            f"{fields.where}: layer_types has {len(found)} entries, expected {layers} (one per layer)"
        )
    return found


def expert_groups(fields: Fields, count: int) -> tuple[int, int, int]:
    """Groups of `count` experts, how many of them a token may choose from, and how many experts it chooses."""
    groups, top_groups = fields.integer("n_group", 1), fields.integer("topk_group", 1)
    k = fields.integer("num_experts_per_tok", most=count)
    fields.require(count % groups == 0, f"n_routed_experts is {count}, expected a multiple of n_group ({groups})")
    fields.require(top_groups <= groups, f"topk_group is {top_groups}, expected at most n_group ({groups})")
    fields.require(groups == 1 or count // groups >= 2, f"n_group is {groups}, expected two experts or more in each")
    room = top_groups * (count // groups)
    fields.require(k <= room, f"num_experts_per_tok is {k}, expected at most {room} (topk_group groups of experts)")
    return groups, top_groups, k


def first_layers(raw: Mapping[str, Any], layers: int | Literal["all"] | None, where: str) -> tuple[dict[str, Any], str]:
    """A config.json with its first layers only, and a remark about it for the model's name.

    As many as `layers` says, else as the config's own key "layers" says, else all. Raises InvalidArgument for more
    than there are.
    """
    config = dict(raw)
    own = config.pop("layers", None)
    inner = config.get("text_config")
    text = dict(inner) if isinstance(inner, dict) and "num_hidden_layers" in inner else config
    whole = text.get("num_hidden_layers")
    count = own if layers is None else layers
    if layers == "all" or count is None:
        return config, ""
    if not isinstance(whole, int) or isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= whole:
        raise InvalidArgument(f"{where}: layers is {count!r}, expected 1 to {whole} (num_hidden_layers) or all")
    text["num_hidden_layers"] = count
    for key in ("layer_types", "mlp_layer_types", "intermediate_size", "activation_sparsity_pattern"):
        if isinstance(each := text.get(key), list):
            text[key] = each[:count]
    if isinstance(shared := text.get("num_kv_shared_layers"), int):  # the last ones of all
        text["num_kv_shared_layers"] = max(0, shared - (whole - count))
    if text is not config:
        config["text_config"] = text
    return config, f", {count} of {whole} layers" if count < whole else ""
