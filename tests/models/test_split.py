"""Models split over ranks: the sum of all parts is the whole, for every family and spelling of experts.

Ranks are threads here, joined by a communicator that the test has; tests/parallel has processes.
"""

import functools
import itertools
import zlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.analysis.weights import walk
from penstock.dtypes import bfloat16
from penstock.engine.engine import Engine, Model
from penstock.errors import InvalidArgument
from penstock.models import bytes_of, family_of, placed, replaced
from penstock.models.layers import ExpertStack
from penstock.models.random import Random, RandomPart, Shapes
from penstock.models.source import ShapeOnlySource
from penstock.models.split import Mesh, Part, SplitSource, share_heads, share_width, taken
from penstock.ops.device import device_for
from tests.models.common import dense_config, error, moe_config, next_config, seeing
from tests.models.test_deepseek_v3 import config_of as deepseek_config
from tests.models.test_deepseek_v3 import mistral_config
from tests.models.test_gemma3 import config_of as gemma3_config
from tests.models.test_gemma3n import config_of as gemma3n_config
from tests.models.test_gemma4 import config_of as gemma_config
from tests.models.test_kimi_linear import config_of as kimi_config
from tests.models.test_lfm2 import CONFIGS as LFM2
from tests.models.test_llama import EXPERTS, GLM, MINIMAX, MINISTRAL
from tests.models.test_llama import config_of as llama_config
from tests.models.test_source import resident
from tests.parallel.threads import Threads

GROUP = 32
BOUND = 5e-6  # of the largest logit: float32 sums in another order


@dataclass(frozen=True)
class Weighed:
    """Weights as `walk` takes them."""

    weights: Any
    config: Any = None


def _rng(path: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(path.encode()))


@functools.lru_cache(1000)  # every rank of a model draws them all
def _drawn(path: str, shape: tuple[int, ...], bits: int) -> Any:
    narrow = 0.25 if path.endswith(("o_proj", "out_proj", "down_proj")) else 1.0
    drawn = (_rng(path).standard_normal(shape) * narrow * shape[-1] ** -0.5).astype(np.float32)
    if bits == 16 or shape[-1] % GROUP:
        return drawn.astype(bfloat16)
    rows = penstock.quantize(drawn.reshape(-1, shape[-1]), bits=bits, group_size=GROUP)
    return rows.with_arrays(*(array.reshape(*shape[:-1], -1) for array in rows.arrays))


class Drawn:
    """Weights that depend on their path alone. spelling: of the experts, "stacked", "joined" or "each"."""

    def __init__(self, spelling: str = "stacked", bits: int = 4, tied_head: bool = False) -> None:
        self.layout, self.spelling, self.bits = "mlx", spelling, bits

    def __contains__(self, path: str) -> bool:
        if path.endswith(("switch_mlp.gate_proj", "switch_glu.gate_proj")):
            return self.spelling == "stacked"
        if path.endswith("experts.gate_up_proj"):
            return self.spelling == "joined"
        return path != "lm_head" and not path.endswith(("embed_q", "unembed_out"))

    def weight(self, path: str, *shape: int) -> Any:
        return _drawn(path, shape, self.bits)

    def vector(self, path: str, *shape: int) -> np.ndarray:
        drawn = _rng(path).standard_normal(shape).astype(np.float32)
        return 0.1 * drawn if path.endswith("bias") or "conv1d" in path else 1 + 0.2 * drawn

    def rows(self, path: str, order: np.ndarray, *shape: int) -> Any:
        whole = self.weight(path, *shape)
        if isinstance(whole, np.ndarray):
            return np.ascontiguousarray(whole[order])
        return whole.with_arrays(*(np.ascontiguousarray(array[order]) for array in whole.arrays))

    def stack(self, paths: Any, *shape: int) -> Any:
        if len(paths) == 1:
            return self.weight(paths[0], *shape)
        found = [self.weight(path, *shape[1:]) for path in paths]
        if isinstance(found[0], np.ndarray):
            return np.stack(found)
        columns = zip(*(one.arrays for one in found), strict=True)
        return found[0].with_arrays(*(np.stack(column) for column in columns))

    def mark_used(self, paths: Any) -> None:
        pass


CASES = {
    "qwen": (moe_config(), "stacked"),
    "qwen-joined": (moe_config(num_attention_heads=4, num_key_value_heads=4, num_experts=5), "joined"),
    "qwen-dense": (dense_config(), "stacked"),
    "qwen-next": (next_config(linear_num_value_heads=8), "each"),
    "gemma": (gemma_config(), "stacked"),
    "gemma3": (gemma3_config(head_dim=32, final_logit_softcapping=30.0), "stacked"),
    "gemma3n": (gemma3n_config(head_dim=32, num_key_value_heads=4), "stacked"),
    "gemma-per-layer": (gemma_config(hidden_size_per_layer_input=32, num_kv_shared_layers=1), "joined"),
    "deepseek": (deepseek_config(v_head_dim=32), "stacked"),
    "deepseek-each": (deepseek_config(v_head_dim=32, q_lora_rank=None), "each"),
    "llama": (llama_config("llama"), "stacked"),
    "qwen2": (llama_config("qwen2"), "stacked"),
    "qwen3-moe": (llama_config("qwen3_moe", **EXPERTS | {"head_dim": 32}), "stacked"),
    "qwen2-moe": (llama_config("qwen2_moe", **EXPERTS | {"head_dim": 32}, shared_expert_intermediate_size=96), "each"),
    "mixtral": (llama_config("mixtral", num_local_experts=5, num_experts_per_tok=2, head_dim=32), "each"),
    "glm": (llama_config("glm4_moe", **GLM | {"head_dim": 32, "num_hidden_layers": 3}), "joined"),
    "kimi": (kimi_config((2,), 3, v_head_dim=32, delta={"num_heads": 4}), "stacked"),
    "kimi-each": (kimi_config((1,), 2, v_head_dim=32, delta={"num_heads": 4}), "each"),
    "minimax": (llama_config("minimax_m2", **MINIMAX | {"head_dim": 32, "num_attention_heads": 4}), "stacked"),
    "mistral4": (seeing(mistral_config(v_head_dim=32)), "joined"),
    "lfm2-moe": (LFM2["moe"], "stacked"),
    "lfm2": (LFM2["dense"] | {"num_attention_heads": 4, "num_key_value_heads": 4}, "each"),
    "ministral": (seeing(llama_config("ministral3", **MINISTRAL | {"head_dim": 32})), "stacked"),
}
TOKENS = np.random.default_rng(0).integers(0, 200, 9).tolist()


def engine_of(raw: Any, source: Any, device: Any, mesh: Mesh | None, **options: Any) -> Engine:
    """A model of these weights, or a rank's part of it, on a device or that of a name; options: of the engine."""
    family = family_of(raw)
    config, split = family.read_config(raw), None
    if mesh is not None:
        assert family.split is not None
        split = family.split(config, mesh, 1 if source.bits == 16 else GROUP)
        source, whole = SplitSource(source, split, mesh), config
        weights, config = family.read_weights(source, split.config), split.config
        if whole.experts and not mesh.experts_split:
            slot_of = mesh.slot_of(whole.experts)
            weights = replaced(weights, ExpertStack, lambda stack: replace(stack, slot_of=slot_of))
    else:
        weights = family.read_weights(source, config)
    model = Model(family, config, weights, "drawn", split=split, mesh=mesh)
    device = device_for(device) if isinstance(device, str) else device
    return Engine(model, **{"activations": "float32", "max_context": 64, "device": device} | options)


def answers(engine: Engine) -> np.ndarray:
    """Logits of a prompt, then of tokens one by one."""
    sequence = engine.open()
    rows = [engine.prefill(sequence, TOKENS[:7], every=True)]
    rows += [engine.decode([sequence], [token]) for token in TOKENS[7:]]
    return np.concatenate(rows)


def split_answers(raw: Any, spelling: str, size: int, device: str, experts_split: bool, bits: int = 4) -> list[Any]:
    def work(rank: int) -> np.ndarray:
        return answers(engine_of(raw, Drawn(spelling, bits), device, Mesh(rank, size, experts_split)))

    return Threads(size).run(work)


@pytest.mark.parametrize("case", CASES)
def test_the_sum_of_all_parts_is_the_whole(case):
    """Quantized over two ranks, whose parts end with groups of columns; over more with dense weights, in any parts."""
    raw, spelling = CASES[case]
    for bits, splits in ((4, ((1, False), (2, False), (2, True))), (16, ((3, False), (4, True)))):
        want = answers(engine_of(raw, Drawn(spelling, bits), "reference", None))
        for size, narrow in splits:
            found = split_answers(raw, spelling, size, "reference", narrow, bits)
            for one in found:
                assert error(one, want) < BOUND, (size, narrow)
                np.testing.assert_array_equal(one, found[0])


@pytest.mark.parametrize("case", ["qwen", "gemma", "deepseek", "llama"])
def test_the_kernels_of_all_parts_give_the_whole(case):
    raw, spelling = CASES[case]
    want = answers(engine_of(raw, Drawn(spelling), "cpu", None))
    for one in split_answers(raw, spelling, 2, "cpu", False):
        assert error(one, want) < BOUND


@pytest.mark.parametrize("bits", [2, 3, 5, 6, 8, 16])
def test_columns_of_all_bits_are_cut_at_groups(bits):
    raw, spelling = CASES["qwen"]
    want = answers(engine_of(raw, Drawn(spelling, bits), "reference", None))
    for one in split_answers(raw, spelling, 2, "reference", True, bits):
        assert error(one, want) < BOUND


def test_heads_are_shared_out_as_evenly_as_groups_allow():
    def shared(size, heads, kv, width, group):
        found = [share_heads(Mesh(rank, size), heads, kv, width, group) for rank in range(size)]
        assert [n for one in found for n in range(one.first, one.stop)] == list(range(heads))
        per = heads // kv
        for one in found:  # a head reads the key/value head that it read before
            local = one.count // one.kv_count
            heads_here = range(one.first, one.stop)
            assert [one.kv_first + n // local for n in range(one.count)] == [head // per for head in heads_here]
        return [(one.count, one.kv_count) for one in found]

    assert shared(2, 16, 2, 256, 64) == [(8, 1)] * 2
    assert shared(4, 16, 2, 256, 64) == [(4, 1)] * 4
    assert shared(3, 12, 6, 64, 64) == [(4, 2)] * 3
    assert shared(3, 14, 7, 64, 64) == [(4, 2), (4, 2), (6, 3)]
    assert shared(3, 12, 2, 64, 64) == [(6, 1), (3, 1), (3, 1)]
    assert shared(2, 8, 4, 32, 128) == [(4, 2)] * 2
    assert shared(2, 8, 8, 16, 64) == [(4, 4)] * 2
    for size, heads, kv, width, group in ((4, 6, 2, 32, 64), (3, 2, 2, 64, 64), (8, 16, 16, 16, 64)):
        with pytest.raises(InvalidArgument, match=f"tensor_parallel_size is {size}.*groups of {group} columns"):
            share_heads(Mesh(size - 1, size), heads, kv, width, group)


def test_a_width_of_few_groups_leaves_ranks_without_a_part():
    assert [share_width(Mesh(rank, 4), 96, 32) for rank in range(4)] == [(0, 0), (0, 32), (32, 64), (64, 96)]
    with pytest.raises(InvalidArgument, match="width of 100 is no multiple of groups of 32"):
        share_width(Mesh(0, 2), 100, 32)


@pytest.mark.parametrize("experts_split", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_made_up_parts_have_the_shapes_of_a_split(case, experts_split):
    raw = CASES[case][0] | {"quantization": {"bits": 4, "group_size": GROUP}}
    family = family_of(raw)
    config = family.read_config(raw)
    assert family.split is not None

    def shapes(source: Any) -> list[Any]:
        found: list[Any] = []
        placed(family.read_weights(source, split.config), lambda value: found.append(value.shape) or value)
        return found

    for rank in range(2):
        mesh = Mesh(rank, 2, experts_split)
        split = family.split(config, mesh, GROUP)
        made = RandomPart(Random(raw), split, mesh)
        assert shapes(made) == shapes(SplitSource(Drawn("stacked"), split, mesh))


def test_what_all_ranks_have_is_made_up_alike():
    raw = CASES["qwen"][0]
    family = family_of(raw)
    assert family.split is not None
    routers = []
    for rank in range(2):
        mesh = Mesh(rank, 2)
        source = RandomPart(Random(raw), family.split(family.read_config(raw), mesh, GROUP), mesh)
        source.weight("embed_tokens", 7 + rank, 64)
        routers.append(source.weight("layers.1.mlp.gate", 7, 64))
    np.testing.assert_array_equal(*(router.packed for router in routers))


def test_a_rank_keeps_its_share_and_reads_no_other_expert():
    raw = moe_config(hidden_size=256, num_experts=8, moe_intermediate_size=64, vocab_size=4096)
    family: Any = family_of(raw)
    config = family.read_config(raw)
    asked: list[Any] = []

    class Watched(Drawn):
        def weight(self, path, *shape):
            asked.append(path)
            return super().weight(path, *shape)

    whole = family.read_weights(Drawn("each"), config)
    experts = sum(bytes_of(layer.mlp.routed) for layer in whole.layers)
    for rank, size in itertools.product(range(2), (2,)):
        asked.clear()
        mesh = Mesh(rank, size)
        split = family.split(config, mesh, GROUP)
        part = family.read_weights(SplitSource(Watched("each"), split, mesh), split.config)
        own = sum(bytes_of(layer.mlp.routed) for layer in part.layers)
        assert own == experts // size
        assert bytes_of(part) - own <= (1 / size + 0.05) * (bytes_of(whole) - experts)
        chosen = {int(path.split(".experts.")[1].partition(".")[0]) for path in asked if ".experts." in path}
        assert chosen == set(mesh.owned(8))


@pytest.mark.parametrize("experts_split", [False, True], ids=["whole", "narrow"])
@pytest.mark.parametrize("case", CASES)
def test_parts_of_shapes_alone_are_those_of_the_weights(case, experts_split):
    raw, spelling = CASES[case]
    family, mesh = family_of(raw), Mesh(1, 2, experts_split)
    split = family.split(family.read_config(raw), mesh, GROUP)
    kinds = Drawn(spelling), ShapeOnlySource(Drawn(spelling))
    parts = [family.read_weights(SplitSource(kind, split, mesh), split.config) for kind in kinds]
    drawn, shapes = ([(one.path, one.shape, one.nbytes) for one in walk(Weighed(part))] for part in parts)
    assert shapes == drawn and bytes_of(parts[0]) == bytes_of(parts[1])


def test_parts_of_shapes_take_no_memory():
    whole, before = Shapes(moe_config()), resident()
    columns, rows = Part(-1, slice(1 << 13, 1 << 14), 1 << 14), Part(-2, np.arange(1, 1 << 14, 2), 1 << 14)
    parts = [taken(whole.weight("w", 2, 1 << 14, 1 << 14), part) for part in (columns, rows)]
    assert [part.shape for part in parts] == [(2, 1 << 14, 1 << 13), (2, 1 << 13, 1 << 14)]  # 134 MB each
    assert resident() - before < 32 << 20
