"""CUDA kernels of products: few rows against quantized and dense weights, experts, heads, rounding of activations."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import penstock
from penstock import ops
from penstock.backends.cuda import _exact, linear
from penstock.backends.cuda._launch import multiprocessors
from penstock.backends.cuda._matvec import config
from penstock.errors import PenstockError
from penstock.quant import ExpertBlobs
from tests.gpu.common import DEVICE, GPU, reference, run, to_device, to_host
from tests.ops.common import EPS, assert_close, assert_same_bits, i32, normal, quantized

REL = {kind: 4e-6 + (0 if kind == "float32" else 2 * eps) for kind, eps in EPS.items()}


def some(*values, least=2):
    """All values on a GPU, the last few in the interpreter, which takes a tenth of a second for a program."""
    return values if GPU else values[-least:]


def close(got, want, dtype="float32"):
    """Within the tolerance of the op cases: against the largest output."""
    assert_close("y", got, want, REL[dtype], max(np.abs(want.astype(np.float64)).max(initial=0), 1e-3))


# -- many rows, codes that are not rounded ---------------------------------------------------------------------------


@pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize(
    ("bits", "gs", "dtype", "T", "N", "groups", "programs"),
    [
        (4, 64, "bfloat16", 70, 33, 3, 1),
        (8, 64, "bfloat16", 17, 140, 5, 8),
        (8, 32, "float16", 5, 130, 4, 8),
        (4, 32, "bfloat16", 33, 70, 6, 8),
        (2, 64, "float16", 3, 65, 5, 1),
        (4, 128, "bfloat16", 1, 1, 1, 1),
    ],
)
def test_exact_product_does_not_round_weights(
    bits, gs, dtype, T, N, groups, programs, residual, rng, monkeypatch
):  # fmt: skip
    """Of any number of groups, which several programs share where there are few tiles."""
    monkeypatch.setattr(_exact, "EXACT_PROGRAMS", programs * multiprocessors(to_device(np.zeros(1, "float32"))))
    _exact._launch.cache_clear()
    x, w = (
        normal(rng, T, groups * gs, dtype=dtype),
        quantized(rng, N, groups * gs, bits=bits, group_size=gs, dtype=dtype),
    )
    want = reference(ops.quantized_matmul, x=x, w=w, dtype="float32")
    more = normal(rng, T, N) if residual else None
    got = torch.full((T, N), torch.nan, device=DEVICE) if more is None else to_device(more.copy())
    assert _exact.takes_codes(to_device(x), to_device(w))
    _exact.exact_product(to_device(x), to_device(w), got, None if more is None else got)
    close(got.cpu().numpy(), want if more is None else want + more)
    _exact._launch.cache_clear()


@pytest.mark.parametrize("out", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("T", "N", "K", "x", "norm"), [(17, 70, 320, "float32", "bfloat16"), (40, 33, 192, "bfloat16", "float32")]
)
def test_exact_product_norms_its_rows(T, N, K, x, norm, out, rng, monkeypatch):
    """Rows of a stream, rounded to the activations' dtype once they are normed."""
    taken, launch = [], _exact.exact_product
    monkeypatch.setattr(linear, "exact_product", lambda *args: (taken.append(args[4:]), launch(*args)))
    monkeypatch.setattr(_exact, "EXACT_ROUNDED", (17, 192, 0))
    monkeypatch.setattr(_exact, "SCORES", (1024, 0, 64, 128, 4, 3))
    call = {
        "x": normal(rng, T, K, dtype=x, scale=3),
        "norm_weight": normal(rng, K, dtype=norm),
        "w": quantized(rng, N, K, group_size=64),
        "eps": 1e-5,
        "dtype": out,
        "normed": "bfloat16",
    }
    got, want = run(ops.norm_matmul, **call), reference(ops.norm_matmul, **call)
    assert got.dtype == want.dtype and len(taken) == 1 and len(taken[0]) == 3
    # a normed number may be rounded the other way
    assert_close("y", got, want, 4e-3 + 2 * EPS[out], float(np.abs(want.astype(np.float64)).max()))


def test_exact_product_keeps_rows_apart(rng):
    """A row that is not a number stays alone, and so does the last one of a tile."""
    x, w = normal(rng, 19, 192, dtype="bfloat16"), quantized(rng, 70, 192, group_size=64)
    x[7] = np.nan
    got = torch.full((19, 70), torch.nan, device=DEVICE)
    _exact.exact_product(to_device(x), to_device(w), got)
    others = np.arange(19) != 7
    close(got.cpu().numpy()[others], reference(ops.quantized_matmul, x=x[others], w=w, dtype="float32"))
    assert bool(got[7].isnan().all())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("T", "N", "gs"), [(70, 33, 64), (17, 40, 32), (1, 1, 128)])
def test_scores_of_codes_in_bytes_are_not_rounded(T, N, gs, dtype, rng, monkeypatch):
    monkeypatch.setattr(_exact, "SCORES", (1, 1024, 32, 64, 4, 3))
    x, w = normal(rng, T, 3 * gs, dtype=dtype), quantized(rng, N, 3 * gs, bits=8, group_size=gs, dtype=dtype)
    made = to_device(x), to_device(w)
    got = torch.full((T, N), torch.nan, device=DEVICE)
    assert _exact.takes_exactly(*made, got, True)
    _exact.exact_product(*made, got)
    want = reference(ops.quantized_matmul, x=x, w=w, dtype="float32")
    close(got.cpu().numpy(), want)
    with penstock.backend("cuda"):
        assert torch.equal(ops.quantized_matmul(*made, dtype="float32"), got)  # which goes this way


# -- matvec ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("T", some(2, 4, 8, 7, 11, 1, least=3))
@pytest.mark.parametrize(("bits", "gs", "dtype"), [(4, 64, "bfloat16"), (8, 128, "float32"), (2, 32, "float16")])
def test_matvec_takes_several_rows(T, bits, gs, dtype, rng):
    arguments = {
        "x": normal(rng, T, 5 * gs, dtype=dtype),
        "w": quantized(rng, 21, 5 * gs, bits=bits, group_size=gs),
        "dtype": "float32",
    }
    close(run(ops.quantized_matmul, "matvec", **arguments), reference(ops.quantized_matmul, **arguments))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_matvec_of_a_row_that_begins_anywhere(dtype, rng):
    """As a part of a joined product does, whose other parts have odd numbers of columns."""
    x, w = normal(rng, 1, 3 * 64 + 5, dtype=dtype), quantized(rng, 21, 3 * 64, group_size=64)
    joined, weight = to_device(x), to_device(w)
    for first in range(4):
        want = reference(ops.quantized_matmul, x=np.ascontiguousarray(x[:, first : first + 192]), w=w)
        with penstock.backend("cuda"):
            got = ops.quantized_matmul(joined[:, first : first + 192], weight)
        close(to_host(got), want, dtype)


@pytest.mark.skipif(GPU, reason="a GPU has its own errors")
def test_the_interpreter_refuses_addresses_as_a_gpu_does():
    x = torch.arange(8, dtype=torch.int16)
    with pytest.raises(Exception, match="load of numbers of 4 bytes"):
        _first_word[(1,)](x[1:], x)
    _first_word[(1,)](x[2:], x)
    assert x[0] == 2 and x[1] == 3


@triton.jit
def _first_word(x_ptr, y_ptr):
    word = tl.pointer_type(tl.int32)
    tl.store(y_ptr.to(word), tl.load(x_ptr.to(word)))


@pytest.mark.parametrize("N", some(7, 9, 15, 16, 33, 1, 17))
def test_matvec_of_any_number_of_outputs(N, rng):
    """H2: rows beyond N take part in nothing."""
    arguments = {"x": normal(rng, 2, 192, dtype="bfloat16"), "w": quantized(rng, N, 192, group_size=64)}
    close(run(ops.quantized_matmul, **arguments), reference(ops.quantized_matmul, **arguments), "bfloat16")


@pytest.mark.parametrize("groups", some(2, 7, 8, 33, 1, 9))
@pytest.mark.parametrize("bits", [4, 6])
def test_matvec_of_any_number_of_groups(bits, groups, rng):
    arguments = {"x": normal(rng, 1, 32 * groups), "w": quantized(rng, 5, 32 * groups, bits=bits)}
    close(run(ops.quantized_matmul, **arguments), reference(ops.quantized_matmul, **arguments))


@pytest.mark.parametrize("K", [12288, 12864])
def test_programs_that_share_a_long_row_add_up(K, rng):
    """In the order of their parts, the same every time; the residual counts once, and may be what is written."""
    N = 5000 if GPU else 70  # two to three tiles of rows for each multiprocessor
    x, residual = normal(rng, 1, K, dtype="bfloat16"), normal(rng, 1, N)
    w = quantized(rng, N, K, group_size=64)
    assert config(4, 64, N, K, 1, 1, 1, False, False, False, multiprocessors(torch.empty(0, device=DEVICE))).parts > 1
    want = reference(ops.matmul_add, residual=residual, x=x, w=w)
    on = {"x": to_device(x), "w": to_device(w)}
    made = []
    for _ in range(3):  # counters are 0 again after each
        out = to_device(residual.copy())
        with penstock.backend("cuda"):
            ops.matmul_add(residual=out, **on, out=out)
        made.append(to_host(out))
    close(made[0], want)
    assert_same_bits("again", made[1], made[0])
    assert_same_bits("again", made[2], made[0])


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
def test_matvec_takes_scales_of_any_float(kind, rng):
    arguments = {"x": normal(rng, 1, 96, dtype="bfloat16"), "w": quantized(rng, 18, 96, dtype=kind), "dtype": "float32"}
    close(run(ops.quantized_matmul, **arguments), reference(ops.quantized_matmul, **arguments))


def test_matvec_keeps_all_bits_of_float32(rng):
    """The last 8 bits of an activation count as much as they should."""
    w, whole = quantized(rng, 3, 256), np.ones((1, 256), np.float32)
    more = whole + np.float32(255 * 2.0**-23)
    got = run(ops.quantized_matmul, x=more, w=w).astype(np.float64) - run(ops.quantized_matmul, x=whole, w=w)
    want = (more - whole).astype(np.float64) @ ops.dequantize(w).astype(np.float64).T
    assert_close("difference", got, want, 0.1, np.abs(want).max())


@pytest.mark.parametrize("kind", some("float32", "float16", "bfloat16"))
@pytest.mark.parametrize(("T", "N", "K"), [(1, 3, 1), (2, 9, 131), (8, 5, 64), (9, 4, 33)])
def test_dense_matvec(T, N, K, kind, rng):
    arguments = {"x": normal(rng, T, K), "w": normal(rng, N, K, dtype=kind, scale=K**-0.5)}
    close(run(ops.matmul, "matvec", **arguments), reference(ops.matmul, **arguments))


def test_fused_gate_up_equals_its_parts(rng):
    x, gate, up = normal(rng, 3, 96), quantized(rng, 19, 96, bits=3), quantized(rng, 19, 96, bits=3)
    arguments = {"x": x, "gate_w": gate, "up_w": up}
    close(run(ops.fused_gate_up_swiglu, "matvec", **arguments), reference(ops.fused_gate_up_swiglu, **arguments))


def test_deterministic_rows_do_not_depend_on_their_number(rng):
    x, w = normal(rng, 11, 128, dtype="bfloat16"), to_device(quantized(rng, 20, 128, group_size=64))
    with penstock.backend("cuda", deterministic=True):
        many = to_host(ops.quantized_matmul(to_device(x), w))
        for t in (0, 10):
            assert_same_bits("row", to_host(ops.quantized_matmul(to_device(x[t : t + 1]), w)), many[t : t + 1])


def test_gate_up_reads_rows_of_one_joined_weight(rng):
    """Gate and up as row views of one weight, from an odd row on."""
    joined, x = quantized(rng, 42, 96, bits=3), normal(rng, 2, 96)
    made = to_device(joined)
    gate, up = (made.with_arrays(*(a[rows] for a in made.arrays)) for rows in (slice(0, 21), slice(21, 42)))
    parts = [joined.with_arrays(*(a[rows] for a in joined.arrays)) for rows in (slice(0, 21), slice(21, 42))]
    for op in (ops.fused_gate_up_swiglu, ops.fused_gate_up_geglu):
        with penstock.backend("cuda"):
            got = to_host(op(to_device(x), gate, up))
        close(got, reference(op, x=x, gate_w=parts[0], up_w=parts[1]))


# -- norm before, residual after -------------------------------------------------------------------------------------


@pytest.mark.parametrize("T", some(2, 8, 3, 1))
@pytest.mark.parametrize(("bits", "gs", "dtype"), [(4, 64, "bfloat16"), (8, 32, "float32"), (6, 32, "float16")])
def test_norm_matmul_is_the_product_of_the_norm(T, bits, gs, dtype, rng):
    """Rows of very different sizes: each has its own norm."""
    x = normal(rng, T, 5 * gs, dtype=dtype) * np.array([[1], [8], [0.125]] * 3, dtype)[:T]
    w, norm = quantized(rng, 21, 5 * gs, bits=bits, group_size=gs), normal(rng, 5 * gs, dtype="float16")
    got = run(ops.norm_matmul, "matvec", x=x, norm_weight=norm, w=w, eps=1e-4, dtype="float32")
    want = run(ops.quantized_matmul, "matvec", x=run(ops.rms_norm, x=x, weight=norm, eps=1e-4), w=w, dtype="float32")
    close(got, want, dtype)
    if dtype == "bfloat16":
        assert np.mean(got != want) < 0.1  # the two sum squares in another order at most


@pytest.mark.parametrize("T", some(64, 9, 19, least=1))
def test_router_scores_of_more_rows_than_a_pass_takes(T, rng):
    """float32 scores of a small weight: all passes in one launch, with a norm before them or not."""
    x, w, norm = normal(rng, T, 128, dtype="bfloat16"), quantized(rng, 21, 128, bits=8), normal(rng, 128)
    close(*(how(ops.quantized_matmul, x=x, w=w, dtype="float32") for how in (run, reference)))
    want = run(ops.quantized_matmul, x=run(ops.rms_norm, x=x, weight=norm), w=w, dtype="float32")
    close(run(ops.norm_matmul, x=x, norm_weight=norm, w=w, dtype="float32"), want, "bfloat16")


def test_matmul_add_writes_over_the_residual(rng):
    w, x, residual = quantized(rng, 64, 64), normal(rng, 2, 64, dtype="bfloat16"), normal(rng, 2, 64, dtype="bfloat16")
    want = reference(ops.matmul_add, residual=residual, x=x, w=w)
    for out in ("residual", "x"):
        made = {"residual": to_device(residual.copy()), "x": to_device(x.copy()), "w": to_device(w)}
        with penstock.backend("cuda"):
            ops.matmul_add(**made, out=made[out])
        close(to_host(made[out]), want, "bfloat16")


@pytest.mark.cuda
@pytest.mark.parametrize(("N", "K", "bits"), [(12352, 2048, 4), (257, 2048, 8), (1024, 2816, 4), (2112, 7168, 4)])
def test_norm_matmul_at_model_shapes_repeats_and_replays(N, K, bits, rng):
    x, norm, w = normal(rng, 1, K, dtype="bfloat16"), normal(rng, K, dtype="bfloat16"), quantized(rng, N, K, bits=bits)
    made = [to_device(value) for value in (x, norm, w)]
    want = ops.quantized_matmul(ops.rms_norm(made[0], made[1]), made[2])
    got = ops.norm_matmul(*made)
    assert (got != want).float().mean() < 0.01
    close(to_host(got), to_host(want), "bfloat16")
    assert all(torch.equal(ops.norm_matmul(*made), got) for _ in range(20))


# -- activations="int8" ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_activations_are_rounded_as_defined(dtype, rng):
    from penstock.backends.cuda._activations import round_activations

    x = normal(rng, 3, 128, dtype=dtype, scale=3)
    x[1, 32:64] = 0
    x[2, :32] = np.linspace(-127, 127, 32) * 0.5  # delta 0.5: halves fall between two bytes
    groups = x.astype(np.float32).reshape(-1, 32)
    delta = np.abs(groups).max(1, keepdims=True) / np.float32(127)
    rounded = np.rint(np.divide(groups, delta, where=delta > 0, out=np.zeros_like(groups))) * delta
    assert np.array_equal(to_host(round_activations(to_device(x), 32)), rounded.reshape(x.shape))


# -- experts ---------------------------------------------------------------------------------------------------------


def test_experts_that_are_not_there_give_zeros(rng):
    """Ids below 0 or beyond the experts, and slots of −1, read nothing."""
    experts, x = to_device(quantized(rng, 3, 17, 64)), to_device(normal(rng, 2, 64))
    ids, slot_of = to_device(i32([0, 9, -1], [2, 1, 3])), to_device(i32(2, -1, 0, 5))
    out = torch.full((2, 3, 17), float("nan"), device=DEVICE)
    with penstock.backend("cuda"):
        ops.expert_matmul(x, experts, ids, slot_of, out=out)
    got = to_host(out)
    assert not got[0, 1:].any() and not got[1, 1:].any()
    host, rows = experts.to("cpu"), to_host(x)
    for (t, i), slot in {(0, 0): 2, (1, 0): 0}.items():
        close(got[t, i], reference(ops.quantized_matmul, x=rows[t], w=host[slot]))


@pytest.mark.parametrize("dense", [False, True])
def test_expert_rows_of_absent_experts_count_as_nothing(dense, rng):
    from penstock.backends.cuda._matvec_experts import expert_down_sum_rows, expert_gate_up_rows

    gate, up, down = quantized(rng, 3, 32, 64), quantized(rng, 3, 32, 64), quantized(rng, 3, 21, 32)
    if dense:
        gate, up, down = (penstock.ops.dequantize(w) for w in (gate, up, down))
    x, weights = normal(rng, 2, 64), np.abs(normal(rng, 2, 3))
    ids, slot_of = i32([0, 4, 1], [-1, 2, 0]), i32(1, 2, -1, 0)
    h = torch.full((2, 3, 32), float("nan"), device=DEVICE)
    y = torch.full((2, 21), float("nan"), device=DEVICE)
    where, places = to_device(ids), to_device(slot_of)
    expert_gate_up_rows(to_device(x), to_device(gate), to_device(up), where, places, "gelu_tanh", h)
    expert_down_sum_rows(h, to_device(down), where, to_device(weights), places, y)
    slots = {(0, 0): 1, (0, 2): 2, (1, 2): 1}
    want_h, want_y = np.zeros((2, 3, 32)), np.zeros((2, 21))
    for (t, i), slot in slots.items():
        pair = {"x": x[t : t + 1], "ids": i32([slot]), "act": "gelu_tanh"}
        want_h[t, i] = reference(ops.expert_gate_up, gate_w=gate, up_w=up, **pair)[0, 0]
        part = reference(ops.expert_matmul, x=to_host(h)[t, i], experts=down, ids=i32(slot))[0]
        want_y[t] += weights[t, i].astype(np.float64) * part
    close(to_host(h), want_h)
    close(to_host(y), want_y)


def test_a_sequence_of_experts_by_ids_and_slots(rng):
    experts = [quantized(rng, 5, 32, bits=8) for _ in range(3)]
    arguments = {"x": normal(rng, 2, 32), "experts": experts, "ids": i32([1, 3], [0, 1]), "slot_of": i32(2, 0, -1, 1)}
    close(run(ops.expert_matmul, **arguments), reference(ops.expert_matmul, **arguments))


def test_expert_blobs_are_refused(rng):
    w = quantized(rng, 3, 32)
    blob = np.concatenate([a.view(np.uint8).reshape(-1) for a in w.arrays])
    sizes = np.cumsum([0] + [a.nbytes for a in w.arrays])
    blobs = ExpertBlobs([blob], *map(int, sizes[:3]), 3, 32, 4, 32)
    with penstock.backend("cuda"), pytest.raises(PenstockError, match=r"^expert_matmul: experts .* host .* expected"):
        ops.expert_matmul(to_device(normal(rng, 32)), blobs)


@pytest.mark.parametrize("kind", ["quantized", "dense"])
def test_batched_matvec_multiplies_head_by_head(kind, rng):
    from penstock.backends.cuda._matvec import batched_matvec

    w = quantized(rng, 3, 18, 64, bits=8) if kind == "quantized" else normal(rng, 3, 18, 40)
    x = normal(rng, 2, 3, w.shape[-1])
    out = torch.full((2, 3, 18), float("nan"), device=DEVICE)
    batched_matvec(to_device(x), to_device(w), out)
    each = penstock.ops.dequantize(w) if kind == "quantized" else w
    close(to_host(out), np.einsum("thk,hnk->thn", x.astype(np.float64), each.astype(np.float64)))


# -- on a GPU --------------------------------------------------------------------------------------------------------


def random_weight(*shape, bits=4, gs=64):
    """A quantized weight made on the device: quantizing a vocabulary on the host takes minutes."""
    *rows, K = shape
    packed = torch.randint(-(2**31), 2**31 - 1, (*rows, K * bits // 32), device=DEVICE, dtype=torch.int32)
    scales = (torch.rand(*rows, K // gs, device=DEVICE) + 0.5).bfloat16() * K**-0.5
    return penstock.QuantizedTensor(packed, scales, -scales * (2 ** (bits - 1) - 0.5), bits, gs)


MODEL_SHAPES = [
    (1, 248320, 2048, 4),
    (8, 12288, 2048, 4),
    (1, 8192, 2048, 4),
    (3, 2048, 4096, 4),
    (1, 256, 2048, 8),
    (1, 2816, 2816, 4),
    (2, 2816, 2112, 4),
    (1, 18432, 7168, 4),
    (4, 7168, 2048, 3),
    (5, 4096, 4096, 6),
    (1, 12288, 2048, 2),
    (6, 4096, 2048, 5),
]


@pytest.mark.cuda
@pytest.mark.parametrize(("T", "N", "K", "bits"), MODEL_SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_matvec_at_model_shapes(T, N, K, bits, dtype):
    w, x = random_weight(N, K, bits=bits), torch.randn(T, K, device=DEVICE).to(dtype)
    out = torch.full((T, N), float("nan"), device=DEVICE)
    ops.quantized_matmul(x, w, dtype="float32", out=out)
    rows = slice(0, 20000)
    part = w.with_arrays(*(a[rows] for a in w.arrays))
    want = x.double() @ ops.dequantize(part).double().T
    assert (out[:, rows] - want).abs().max() <= 4e-6 * want.abs().max()
    assert not out.isnan().any()
    assert all(torch.equal(out, ops.quantized_matmul(x, w, dtype="float32")) for _ in range(10))


@pytest.mark.cuda
@pytest.mark.parametrize(("dim", "width", "E"), [(2048, 512, 256), (2816, 704, 128), (7168, 2048, 16)])
def test_expert_decode_at_model_shapes(dim, width, E):
    gate, up, down = random_weight(E, width, dim), random_weight(E, width, dim), random_weight(E, dim, width)
    x = torch.randn(2, dim, device=DEVICE).bfloat16()
    ids = torch.stack([torch.randperm(E, device=DEVICE)[:8] for _ in range(2)]).int()
    weights = torch.rand(2, 8, device=DEVICE)
    y = ops.moe_forward(x, ids, weights, gate, up, down)
    want = torch.zeros(2, dim, device=DEVICE, dtype=torch.float64)
    for t in range(2):
        for i, e in enumerate(ids[t].tolist()):
            a, b = (ops.dequantize(w[e]).double() @ x[t].double() for w in (gate, up))
            h = (torch.nn.functional.silu(a) * b).bfloat16().double()
            want[t] += weights[t, i].double() * (ops.dequantize(down[e]).double() @ h)
    assert (y - want).abs().max() <= 2**-7 * want.abs().max()
    assert all(torch.equal(y, ops.moe_forward(x, ids, weights, gate, up, down)) for _ in range(10))


@pytest.mark.cuda
def test_products_in_a_graph_follow_their_inputs():
    """Each product reads what the one before wrote, while kernels start before the ones before them end."""
    ws = [random_weight(2048, 2048) for _ in range(4)]
    x = torch.randn(1, 2048, device=DEVICE).bfloat16()

    def chain(y):
        for i in range(40):
            y = ops.quantized_matmul(y, ws[i % 4])
        return y

    chain(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain(x)
    for _ in range(5):
        x.copy_(torch.randn(1, 2048, device=DEVICE))
        graph.replay()
        step = x
        for i in range(40):
            step = ops.quantized_matmul(step, ws[i % 4])
            torch.cuda.synchronize()
        assert torch.equal(y, step)


@pytest.mark.cuda
def test_experts_in_a_graph_follow_their_ids():
    E, x = random_weight(16, 512, 2048), torch.randn(1, 2048, device=DEVICE).bfloat16()
    ids = torch.zeros(1, 8, device=DEVICE, dtype=torch.int32)
    ops.expert_matmul(x, E, ids)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.expert_matmul(x, E, ids)
    for _ in range(3):
        ids.copy_(torch.randint(0, 16, (1, 8), device=DEVICE))
        graph.replay()
        assert torch.equal(y, ops.expert_matmul(x, E, ids.clone()))


@pytest.mark.cuda
def test_experts_read_the_ids_that_were_just_written():
    """Layers in a graph: a kernel writes ids, the next reads them, and the one after may start before that ends."""
    from penstock.backends.cuda._matvec_experts import expert_down_sum_rows, expert_gate_up_rows

    gate_up, down = random_weight(16, 1024, 2048), random_weight(16, 2048, 512)
    start, weights = torch.zeros(1, 8, device=DEVICE, dtype=torch.int32), torch.rand(1, 8, device=DEVICE)
    ids = torch.empty_like(start)
    h, y = (torch.empty(shape, device=DEVICE, dtype=torch.bfloat16) for shape in ((1, 8, 512), (1, 2048)))
    x = torch.randn(1, 2048, device=DEVICE).bfloat16()

    def layers(wait):
        found = []
        for layer in range(20):
            torch.remainder(start + 3 * layer, 16, out=ids)
            wait()
            expert_gate_up_rows(x, gate_up, None, ids, None, "silu", h)
            wait()
            expert_down_sum_rows(h, down, ids, weights, None, y, after_gate_up=True)
            wait()
            found.append(y.clone())
        return torch.cat(found)

    layers(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = layers(lambda: None)
    for _ in range(5):
        start.copy_(torch.randperm(16, device=DEVICE)[:8])
        graph.replay()
        assert torch.equal(got, layers(torch.cuda.synchronize))


@pytest.mark.parametrize("T", [1, 3, 8, 19])  # products of few rows and tiles
@pytest.mark.parametrize("bits", [4, 6, 0])
def test_norm_matmul_rounds_the_normed_rows_of_a_float32_stream(T, bits, rng):
    """As near to the definition as float32 sums are, a few roundings that went the other way aside; without the
    rounding it would be 1.7e-3 off.
    """
    K, N = 192, 37
    w = quantized(rng, N, K, bits=bits) if bits else normal(rng, N, K, dtype="bfloat16")
    call = {"x": normal(rng, T, K), "norm_weight": normal(rng, K), "w": w, "dtype": "float32", "normed": "bfloat16"}
    got, want = run(ops.norm_matmul, **call), reference(ops.norm_matmul, **call)
    unrounded = reference(ops.norm_matmul, **call | {"normed": None})
    size = np.sqrt(np.mean(np.square(want)))
    assert np.sqrt(np.mean(np.square(got - want))) <= 3e-4 * size
    assert np.sqrt(np.mean(np.square(unrounded - want))) >= 1e-3 * size
