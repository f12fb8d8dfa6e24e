"""CPU products beyond the cases of tests/ops: the same bits for every variant, tile, thread count and batch."""

import os
import subprocess
import sys

import numba
import numpy as np
import pytest

import penstock
from penstock import machine, ops
from penstock.backends.cpu import _simd, _threads, linear
from penstock.backends.cpu._simd import at
from penstock.backends.cpu.compile import keep_alive
from penstock.errors import BackendError
from penstock.quant import E4M3, ExpertBlobs, QuantizedTensor, pack_codes
from tests.ops.common import assert_close, assert_same_bits, i32, normal, quantized

VARIANTS = [name for name in linear.VARIANTS if linear._runs_here(name)]
FORMATS = [
    pytest.param(bits, gs, marks=[] if bits in (3, 4, 8) else pytest.mark.slow)  # each width compiles every variant
    for bits in (2, 3, 4, 5, 6, 8)
    for gs in (32, 64, 128)
]


def on_cpu(op, *args, variant=None, **kwargs):
    with penstock.backend("cpu", variant=variant):
        return op(*args, **kwargs)


@pytest.fixture
def two_threads():
    before = _threads.threads()
    yield
    _threads.set_threads(before)


def test_best_variant_is_one_that_runs():
    assert linear._best() == linear.VARIANTS[VARIANTS[0]]
    assert "portable" in VARIANTS


def test_variant_that_cannot_run_is_refused(monkeypatch, rng):
    monkeypatch.setattr(linear, "_runs_here", lambda name: name == "portable")
    with pytest.raises(BackendError, match=r"variant 'vnni' needs avx512f, .*, not all usable here"):
        on_cpu(ops.quantized_matmul, normal(rng, 1, 64), quantized(rng, 3, 64), variant="vnni")


@pytest.mark.parametrize("bits, gs", FORMATS)
def test_quantized_matmul_int8_has_the_same_bits_in_every_variant(bits, gs, rng):
    w = quantized(rng, 19, 3 * 512 + 128, bits=bits, group_size=gs, dtype=("float32", "float16", "bfloat16")[bits % 3])
    x = normal(rng, 5, w.shape[1])
    want = on_cpu(ops.quantized_matmul, x, w, "int8", variant="portable")
    for variant in VARIANTS:
        assert_same_bits(variant, on_cpu(ops.quantized_matmul, x, w, "int8", variant=variant), want)


@pytest.mark.parametrize("K", [32, 64, 96, 480, 512, 544, 1056])
def test_quantized_matmul_takes_every_multiple_of_a_group(K, rng):
    w, x = quantized(rng, 17, K), normal(rng, 3, K)
    for activations in ("int8", "float32"):
        with penstock.backend("reference"):
            want = ops.quantized_matmul(x, w, activations)
        got = on_cpu(ops.quantized_matmul, x, w, activations)
        assert_close("y", got, want, 4e-6, np.abs(want).max())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("K", [2 * 512 + 32, 3 * 512 - 32, 2 * 512])
def test_quantized_matmul_of_a_few_rows_has_the_bits_of_many(bits, K, rng):
    w = quantized(rng, linear.SMALL * 8 // (bits * K) + 5, K, bits=bits, group_size=32)  # large enough for two threads
    x = normal(rng, 5, K)
    many = on_cpu(ops.quantized_matmul, x, w, "int8")
    for variant in (name for name in VARIANTS if name != "portable"):
        for rows in (slice(0, 1), slice(1, 3)):
            assert_same_bits(variant, on_cpu(ops.quantized_matmul, x[rows], w, "int8", variant=variant), many[rows])


@pytest.mark.parametrize("N", [19, 419], ids=["one thread", "threads"])
@pytest.mark.parametrize("K", [480, 704, 1056])
def test_fused_gate_up_of_rows_that_end_within_a_block_is_two_products(K, N, rng):
    """Of two rows at once: the last block of one lies beside the other row."""
    gate, up = (quantized(rng, N, K, bits=4, group_size=32) for _ in range(2))
    x = normal(rng, 2, K)
    for variant in VARIANTS:
        g, u = (on_cpu(ops.quantized_matmul, x, w, "int8", variant=variant) for w in (gate, up))
        for fused, gated in ((ops.fused_gate_up_swiglu, ops.swiglu), (ops.fused_gate_up_geglu, ops.geglu)):
            got = on_cpu(fused, x, gate, up, "int8", variant=variant)
            assert_close(variant, got, np.float64(on_cpu(gated, g, u)), 4e-7)


@pytest.mark.parametrize("K", [2880, 64 * 7, 512 + 128, 1536])
@pytest.mark.parametrize(
    "form",
    [
        {"bits": 4, "group_size": 32},
        {"bits": 4, "group_size": 64},
        {"bits": 8, "group_size": 32},
        {"bits": 8, "group_size": 64},
        {"bits": 3, "group_size": 64},
        {"mode": "mxfp4"},
        {"mode": "nvfp4"},
        {"mode": "mxfp8"},
    ],
    ids=str,
)
def test_expert_matmul_of_any_width_has_the_bits_of_every_way(form, K, rng):
    """Widths that end within a block of 512: one, two and more rows of an expert, which lies anywhere."""
    experts = quantized(rng, 3, 21, K, **form)
    x = normal(rng, 6, 1, K)
    ids = i32(2, 0, 1, 2, 0, 2)[:, None]  # expert 1 has one row, 0 two, 2 three
    int8 = {"activations": "int8"}
    want = on_cpu(ops.expert_matmul, x, experts, ids, **int8, variant="portable")
    with penstock.backend("reference"):
        assert_close("y", want, ops.expert_matmul(x, experts, ids, **int8), 4e-6, np.abs(want).max())
    for variant in VARIANTS:
        assert_same_bits(variant, on_cpu(ops.expert_matmul, x, experts, ids, **int8, variant=variant), want)
        for t in range(len(x)):
            alone = on_cpu(ops.expert_matmul, x[t : t + 1], experts, ids[t : t + 1], **int8, variant=variant)
            assert_same_bits(f"{variant}, row {t}", alone, want[t : t + 1])
            plain = on_cpu(ops.quantized_matmul, x[t], experts[ids[t, 0]], "int8", variant=variant)
            assert_same_bits(f"{variant}, row {t} of a plain product", plain, want[t])


@pytest.mark.skipif("vnni" not in VARIANTS, reason="AVX-512 VNNI")
@pytest.mark.parametrize("vbmi", [True, False])
def test_mxfp8_sums_are_those_of_whole_numbers(vbmi, monkeypatch, rng):
    """Every code as E4M3 · 2^9, also on CPUs that cannot look up bytes in 128 others; the largest sums fit 32 bits."""
    monkeypatch.setattr(_simd, "_has_vbmi", lambda real=_simd._has_vbmi: vbmi and real())
    K, n, kind, how = 640, 4, _simd.MXFP8, _simd.VNNI

    @numba.njit
    def by_rows(codes, xq, sums):
        return _simd.group_dots(at(codes, 0), at(xq, 0), at(sums, 0), n, K, 32, kind, how)

    @numba.njit
    def by_panel(codes, xq, sums, scales, delta, acc, y):
        panel = np.empty(K * 16, np.uint8)
        _simd.code_panel(at(codes, 0), K, 16, at(panel, 0), K, kind)
        nan = _simd.e4m3_panel(at(panel, 0), at(sums, 0), K // 32)
        p, s, b, x, d = at(panel, 0), at(scales, 0), at(sums, 0), at(xq, 0), at(delta, 0)
        _simd.panel_dots(p, s, b, x, d, d, at(acc, 0), at(y, 0), 16, 16, K, 32, p, kind, n)
        keep_alive(panel)
        return nan

    codes = np.arange(16 * K).astype(np.uint8).reshape(16, K)
    codes[(codes & 0x7F) == 0x7F] = 0
    codes[3], codes[4] = 0x7E, 0xFE  # the largest numbers
    xq = rng.integers(-127, 128, (n, K)).astype(np.int8)
    xq[1] = 127
    whole = (E4M3[codes] * 512).astype(np.int64)
    want = (xq[:, None].astype(np.int64) * whole).reshape(n, 16, K // 32, 32).sum(-1)
    assert np.abs(want).max() == 448 * 512 * 127 * 32
    sums = np.zeros((n, K // 32), np.int32)
    scales, start, acc = (np.ones(size, np.float32) for size in (K // 2, K // 2, 16 * 16 * n))
    delta, y = np.zeros((n, K // 32), np.float32), np.zeros((n, 16), np.float32)
    for r in range(16):
        assert not by_rows(codes[r], xq, sums)
        np.testing.assert_array_equal(sums, want[:, r])
    for group in range(0, K // 32, 7):  # one at a time: a float32 has no room for all
        delta[:] = 0
        delta[:, group] = 1
        assert not by_panel(codes, xq ^ np.int8(-128), start, scales, delta, acc, y)
        np.testing.assert_array_equal(y, want[:, :, group].astype(np.float32) * np.float32(_simd.E4M3_UNIT))
    codes[9, 600] = 0xFF
    assert by_rows(codes[9], xq, sums) and by_panel(codes, xq, start, scales, delta, acc, y)


@pytest.mark.parametrize("activations", ["int8", "float32"])
@pytest.mark.parametrize("N", [1, 7, 15, 16, 17, 33])
def test_quantized_matmul_rows_do_not_depend_on_the_batch(activations, N, rng):
    w, x = quantized(rng, N, 192), normal(rng, 32, 192)
    single = np.concatenate([on_cpu(ops.quantized_matmul, x[t : t + 1], w, activations) for t in range(32)])
    for B in range(1, 33):
        assert_same_bits(f"B = {B}", on_cpu(ops.quantized_matmul, x[:B], w, activations), single[:B])


@pytest.mark.parametrize("activations", ["int8", "float32"])
def test_products_do_not_depend_on_the_number_of_threads(activations, rng, two_threads):
    w, x = quantized(rng, 700, 512), normal(rng, 9, 512)
    gate, down = quantized(rng, 6, 96, 512), quantized(rng, 6, 512, 96)
    ids, weights = np.stack([rng.permutation(6)[:2] for _ in range(9)]).astype(np.int32), np.abs(normal(rng, 9, 2))
    results = []
    for count in (1, min(2, _threads.available())):
        _threads.set_threads(count)
        experts = on_cpu(ops.moe_forward, x, ids, weights, gate, gate, down, activations=activations)
        results.append((on_cpu(ops.quantized_matmul, x, w, activations), experts))
    for one, two in zip(*results, strict=True):
        assert_same_bits("y", one, two)


@pytest.mark.parametrize("activations", ["int8", "float32"])
def test_moe_forward_rows_do_not_depend_on_the_batch(activations, rng):
    gate, up, down = quantized(rng, 5, 32, 128), quantized(rng, 5, 32, 128), quantized(rng, 5, 128, 32)
    x, weights = normal(rng, 32, 128), np.abs(normal(rng, 32, 3))
    ids = np.stack([rng.permutation(5)[:3] for _ in range(32)]).astype(np.int32)

    def run(rows):
        return on_cpu(ops.moe_forward, x[rows], ids[rows], weights[rows], gate, up, down, activations=activations)

    single = np.concatenate([run(slice(t, t + 1)) for t in range(32)])
    for B in (2, 3, 8, 31, 32):
        assert_same_bits(f"B = {B}", run(slice(0, B)), single[:B])


def test_expert_matmul_reads_blobs_and_sequences_like_a_stack(rng):
    stack, x = quantized(rng, 4, 9, 64), normal(rng, 64)
    ids = np.array([3, 0, 3], np.int32)
    want = on_cpu(ops.expert_matmul, x, stack, ids)
    blobs = [np.concatenate([a.view(np.uint8).reshape(-1) for a in stack[e].arrays]) for e in range(4)]
    words, scales = stack[0].packed.nbytes, stack[0].scales.nbytes
    as_blobs = ExpertBlobs(blobs, 0, words, words + scales, 9, 64, 4, 32)
    assert_same_bits("sequence", on_cpu(ops.expert_matmul, x, [stack[e] for e in range(4)], ids), want)
    assert_same_bits("blobs", on_cpu(ops.expert_matmul, x, as_blobs, ids), want)


def test_quantized_matmul_reads_a_memory_map_without_copying(tmp_path, rng):
    w = quantized(rng, 33, 128)
    for name, array in zip(("packed", "scales", "biases"), w.arrays, strict=True):
        array.view(np.uint8).tofile(tmp_path / name)
    mapped = QuantizedTensor(
        np.memmap(tmp_path / "packed", np.uint32, "r", shape=w.packed.shape),
        np.memmap(tmp_path / "scales", w.scales.dtype, "r", shape=w.scales.shape),
        np.memmap(tmp_path / "biases", w.biases.dtype, "r", shape=w.biases.shape),
        w.bits,
        w.group_size,
    )
    x = normal(rng, 2, 128)
    assert_same_bits("y", on_cpu(ops.quantized_matmul, x, mapped, "int8"), on_cpu(ops.quantized_matmul, x, w, "int8"))
    assert np.shares_memory(linear.stack_of(mapped).codes, mapped.packed)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_quantized_matmul_int8_shows_what_is_not_finite(bad, rng):
    w, x = quantized(rng, 5, 64), normal(rng, 3, 64)
    x[1, 40] = bad
    for variant in VARIANTS:
        y = on_cpu(ops.quantized_matmul, x, w, "int8", variant=variant)
        assert np.isnan(y[1]).all()
        assert np.isfinite(y[[0, 2]]).all()


def test_int8_rows_round_ties_to_even_and_keep_tiny_groups():
    x = np.zeros((1, 96), np.float32)
    x[0, :4] = [127, 0.5, 1.5, -2.5]
    x[0, 32:35] = np.array([190, 190 | 1 << 31, 64], np.uint32).view(np.float32)  # subnormals: delta is one step
    w = linear.stack_of(quantized(np.random.default_rng(0), 1, 96))
    rows = linear.int8_rows(x, w, linear.whole(1), linear.PORTABLE)
    xq, delta, total = rows.xq, rows.delta, rows.total
    assert xq[0, :4].tolist() == [127, 0, 2, -2]
    assert xq[0, 32:35].tolist() == [127, -127, 64]
    assert delta[0].tolist() == [1.0, np.float32(1.401298464324817e-45), 0.0]
    assert not xq[0, 64:].any()
    assert total[0, 0] == 127  # of the rounded numbers


@pytest.mark.slow
def test_offsets_beyond_two_to_the_31_are_reached(rng):
    N, K = (1 << 26) + 16, 64  # 2.1 GB of packed words: the last row lies past a 32-bit byte offset
    packed = np.zeros((N, K // 8), np.uint32)
    scales = np.zeros((N, 1), np.float32)
    packed[-1] = pack_codes(np.arange(K) % 16, 4)
    scales[-1] = 1
    if machine.memory()[1] // 3 < (1 << 31):
        pytest.skip("too little memory")
    w = QuantizedTensor(packed, scales, np.zeros_like(scales), 4, 64)
    x = np.ones((1, K), np.float32)
    assert on_cpu(ops.quantized_matmul, x, w, "int8")[0, -1] == pytest.approx(480, rel=1e-6)


def test_portable_variant_runs_without_the_compiler():
    code = """
import numpy as np, penstock
from penstock import ops
rng = np.random.default_rng(0)
w = penstock.quant.quantize_reference(rng.standard_normal((3, 64)).astype("f4"), 4, 32)
x = rng.standard_normal((2, 64)).astype("f4")
for activations in ("int8", "float32"):
    with penstock.backend("cpu"):
        got = ops.quantized_matmul(x, w, activations)
    with penstock.backend("reference"):
        want = ops.quantized_matmul(x, w, activations)
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()
print("ok")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"NUMBA_DISABLE_JIT": "1"}, capture_output=True, text=True
    )
    assert done.stdout == "ok\n", done.stderr
