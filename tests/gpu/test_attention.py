"""CUDA attention: layouts, windows, lengths and pages that are not there, head sizes, many rows as one row."""

from typing import Any

import numpy as np
import pytest
import torch

import penstock
from penstock import ops
from penstock.backends.cuda import _attend
from penstock.errors import BackendError
from tests.gpu.common import reference, run, to_device, to_host
from tests.ops.common import EPS, assert_close, assert_same_bits, i32, normal

PAGE = 16


def paged(rng, lengths, H=4, Hkv=2, D=32, Dv=32, dtype="float32", entries=5, page=PAGE, window=None) -> dict[str, Any]:
    """Arguments of `attention_paged`; rows behind the lengths and in front of the window are NaN."""
    B = len(lengths)
    table = rng.permutation(B * entries + 2)[: B * entries].reshape(B, entries).astype(np.int32)
    k, v = (normal(rng, B * entries + 2, page, Hkv * width, dtype=dtype) for width in (D, Dv))
    for b, length in enumerate(lengths):
        for p in {*range(entries * page)} - {*range(max(length - window, 0) if window else 0, length)}:
            k[table[b, p // page], p % page] = v[table[b, p // page], p % page] = np.nan
    q = normal(rng, B, H, D, dtype=dtype)
    where = {"block_table": table, "lengths": i32(*lengths)}
    return {"q": q, "k_pages": k, "v_pages": v, **where, "scale": D**-0.5, "window": window}


def close(got, want, dtype="float32"):
    rel = 4e-6 if dtype == "float32" else 2 * EPS[dtype]
    assert_close("y", got, want, rel, max(np.abs(want.astype(np.float64)).max(initial=0), 1e-3))


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(("page", "entries"), [(7, 20), (64, 3)])  # a table look-up per row, and one per tile
def test_attention_paged_reads_what_length_and_window_say(page, entries, window, rng):
    call = paged(rng, [0, 1, 140], dtype="bfloat16", page=page, entries=entries, window=window)
    close(run(ops.attention_paged, **call), reference(ops.attention_paged, **call), "bfloat16")


def test_attention_paged_of_lengths_and_pages_out_of_range(rng):
    call = paged(rng, [80, 40, 48])
    want = reference(ops.attention_paged, **call)
    odd: dict[str, Any] = call | {"lengths": i32(1000, -1, -(2**31))}
    y = run(ops.attention_paged, **odd)
    close(y[0], want[0])
    assert not y[1:].any()
    short: dict[str, Any] = call | {"window": 16}
    windowed = reference(ops.attention_paged, **short)
    call["block_table"][1] = [-1, 2**31 - 1, 17, 1000, -(2**31)]
    call["block_table"][2, :2] = -1  # in front of the window, where pages may be gone
    y = run(ops.attention_paged, **short)
    close(y[::2], windowed[::2])
    assert not y[1].any()
    assert not run(ops.attention_paged, **call)[1].any()


@pytest.mark.parametrize("page", [7, 64])
@pytest.mark.parametrize("gone", [0, 1, 2])
def test_attention_paged_leaves_out_a_page_that_is_not_there(gone, page, rng):
    call = paged(rng, [3 * page - 1], page=page, entries=3)
    kept = [p for p in range(3 * page - 1) if p // page != gone]
    k, v = (call[name][call["block_table"][0]].reshape(3 * page, -1)[kept] for name in ("k_pages", "v_pages"))
    q = {"q": call["q"][0], "scale": call["scale"]}
    want = reference(ops.attention_decode, **q, k_cache=k, v_cache=v, seq_len=len(kept))
    call["block_table"][0, gone] = -1
    close(run(ops.attention_paged, **call)[0], want)


def test_attention_decode_of_slots_that_are_not_there_is_zero(rng):
    k, v = normal(rng, 3, 9, 8), normal(rng, 3, 9, 8)
    call = {"q": normal(rng, 4, 2, 8), "k_cache": k, "v_cache": v, "scale": 0.5}
    y = run(ops.attention_decode, **call, seq_len=i32(9, 9, 9, 4), slots=i32(-1, 3, 2, 0))
    assert not y[:2].any()
    want = reference(ops.attention_decode, **call, seq_len=i32(1, 1, 9, 4), slots=i32(0, 0, 2, 0))
    close(y[2:], want[2:])


@pytest.mark.parametrize(("H", "Hkv", "D", "Dv"), [(1, 1, 1, 1), (3, 1, 61, 7), (2, 2, 80, 96), (17, 1, 192, 128)])
def test_attention_of_odd_heads(H, Hkv, D, Dv, rng):
    k, v = normal(rng, 40, Hkv * D, dtype="bfloat16"), normal(rng, 40, Hkv * Dv, dtype="bfloat16")
    call = {"q": normal(rng, 3, H, D, dtype="bfloat16"), "k_cache": k, "v_cache": v, "scale": D**-0.5}
    close(run(ops.attention_prefill, start=33, **call), reference(ops.attention_prefill, start=33, **call), "bfloat16")


@pytest.mark.parametrize("window", [None, 5])
def test_attention_prefill_takes_its_start_from_an_array_and_reads_no_further(window, rng):
    k, v = normal(rng, 4, PAGE, 32), normal(rng, 4, PAGE, 32)
    table = i32(2, 0, 3)
    k[3, 8:] = v[3, 8:] = np.nan
    call = {"q": normal(rng, 21, 4, 16), "k_cache": k, "v_cache": v, "scale": 0.25, "window": window}
    want = reference(ops.attention_prefill, start=19, block_table=table, **call)
    close(run(ops.attention_prefill, start=np.array(19, np.int32), block_table=table, **call), want)


def test_attention_in_splits_equals_attention_in_one(rng, monkeypatch):
    call = paged(rng, [80, 0, 33], entries=5)
    want = reference(ops.attention_paged, **call)
    for splits in (1, 2, 3):
        monkeypatch.setattr(_attend, "_splits", lambda *_, splits=splits: splits)
        close(run(ops.attention_paged, **call), want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_is_the_same_for_a_row_alone_and_among_others(dtype, rng):
    call = {name: to_device(value) for name, value in paged(rng, [80, 17, 64], dtype=dtype).items()}
    with penstock.backend("cuda", deterministic=True):
        together = ops.attention_paged(**call)
        for b in range(3):
            rows = {name: call[name][b : b + 1].clone() for name in ("q", "block_table", "lengths")}
            assert_same_bits("y", to_host(ops.attention_paged(**call | rows)), to_host(together[b : b + 1]))
        k, v = to_device(normal(rng, 90, 64, dtype=dtype)), to_device(normal(rng, 90, 64, dtype=dtype))
        q = to_device(normal(rng, 23, 4, 32, dtype=dtype))
        whole = to_host(ops.attention_prefill(q, k, v, 61, 0.2))
        for low, high in ((0, 1), (1, 5), (5, 23)):
            part = ops.attention_prefill(q[low:high].clone(), k, v, 61 + low, 0.2)
            assert_same_bits("y", to_host(part), whole[low:high])


def test_attention_takes_scales_of_any_sign_and_refuses_wide_heads(rng):
    q, k, v = normal(rng, 3, 2, 16), normal(rng, 9, 16), normal(rng, 9, 16)
    for scale in (0.0, -0.7):
        call = {"q": q, "k_cache": k, "v_cache": v, "start": 6, "scale": scale}
        close(run(ops.attention_prefill, **call), reference(ops.attention_prefill, **call))
    wide = np.zeros((2, 1, 600), np.float32)
    with pytest.raises(BackendError, match="600 .* expected at most 576"):
        run(ops.attention_prefill, q=wide, k_cache=wide[:, 0], v_cache=wide[:, 0], start=0, scale=1.0)


def test_attention_softmax_in_place_and_of_nothing_but_minus_infinity(rng):
    scores = normal(rng, 3, 1500, scale=4)
    scores[1, :1400] = -np.inf
    want = reference(ops.attention_softmax, scores=scores, seq_len=1400)
    x = to_device(scores.copy())
    with penstock.backend("cuda"):
        ops.attention_softmax(x, 1400, out=x)
    assert_close("y", to_host(x), want, 2e-6)
    assert not to_host(x)[1, :1400].any()


def test_attention_scores_leave_other_columns(rng):
    out = torch.full((4, 20), 7.0, device=to_device(np.zeros(1)).device)
    q, k = to_device(normal(rng, 4, 8)), to_device(normal(rng, 12, 16))
    with penstock.backend("cuda"):
        ops.attention_scores(q, k, 9, 1.0, 2, 20, out=out)
        ops.attention_scores(q, k, 0, 1.0, 2, 20, out=out)
    assert (out[:, 9:] == 7).all() and not (out[:, :9] == 7).any()


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("start", [31, 32, 64, 159])
def test_attention_prefill_of_one_row_at_a_position_on_the_device(start, window, rng):
    """The row ends a tile or begins one, so that its last split has one position."""
    q, k, v = normal(rng, 1, 4, 32), normal(rng, 10, PAGE, 64), normal(rng, 10, PAGE, 64)
    call = {"q": q, "k_cache": k, "v_cache": v, "start": np.array(start, np.int32), "scale": 0.2, "window": window}
    call |= {"block_table": rng.permutation(10).astype(np.int32)}
    close(run(ops.attention_prefill, **call), reference(ops.attention_prefill, **call))


@pytest.mark.parametrize("lengths", [[140], [0, 1, 140]])  # one in splits, three in one
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_paged_gates_its_result(lengths, dtype, rng):
    call = paged(rng, lengths, Hkv=1, dtype=dtype, entries=10)
    gate = normal(rng, len(lengths), 4, 32, dtype=dtype, scale=3)
    close(run(ops.attention_paged, **call, gate=gate), reference(ops.attention_paged, **call, gate=gate), dtype)


@pytest.mark.parametrize(
    ("heads", "group", "wide", "B", "positions", "tile"),
    [
        (2, 8, 256, 1, 1024, (16, 16, 4, 2)),  # Qwen3.6: a table of 4 pages, of 17, of 64; 32 sequences
        (2, 8, 256, 1, 4352, (16, 32, 4, 2)),
        (2, 8, 256, 1, 16384, (16, 64, 4, 2)),
        (2, 8, 256, 32, 1024, (16, 64, 4, 2)),
        (8, 2, 256, 1, 1024, (16, 16, 4, 2)),  # Gemma 4: before the window is full, a window, all positions
        (8, 2, 256, 1, 1088, (16, 32, 4, 2)),
        (2, 8, 512, 1, 1024, (16, 16, 4, 2)),
        (2, 8, 512, 1, 4352, (16, 32, 8, 3)),
        (1, 128, 576, 1, 1024, (16, 64, 8, 2)),  # DeepSeek-V3
        (1, 128, 576, 1, 32768, (64, 64, 8, 2)),
    ],
)
def test_attention_takes_smaller_tiles_where_programs_are_few(heads, group, wide, B, positions, tile):
    latent = wide > 512
    parts = (512, 64, 512) if latent else (wide, 0, wide)
    plan = _attend._plan(parts, 2, group, latent, 227)
    wanted = 132 if wide > 256 else 264
    assert _attend._spread(plan, group, B * heads, positions, wanted, latent)[:4] == tile


# -- before attention ------------------------------------------------------------------------------------------------


def unprepared(rng, T, H=4, Hkv=2, D=40, width=24, dtype="float32", gated=True, norm_values=True, entries=3):
    rows = {"q": H * D * (1 + gated), "k": Hkv * D, "v": Hkv * D}
    call = {name: normal(rng, T, wide, dtype=dtype) for name, wide in rows.items()}
    call |= {name: normal(rng, D) for name in ("q_norm", "k_norm")}
    call |= {name: normal(rng, T * entries + 1, 4, Hkv * D, dtype=dtype) for name in ("key_pages", "value_pages")}
    table = rng.permutation(T * entries).reshape(T, entries).astype(np.int32)
    where = {"inv_freq": ops.rope_inv_freq(width, 1e4), "block_table": table, "positions": i32(*range(T))}
    return call | where | {"H": H, "rotary_dim": width, "gated": gated, "norm_values": norm_values}


def prepared(call):
    """Outputs and pages by the kernel, in copies of the pages."""
    call = {name: to_device(np.copy(v) if isinstance(v, np.ndarray) else v) for name, v in call.items()}
    with penstock.backend("cuda"):
        q, gate = ops.attention_prepare(**call)
    return to_host((q, gate, call["key_pages"], call["value_pages"]))


def test_attention_prepare_skips_rows_and_pages_that_are_not_there(rng):
    call = unprepared(rng, 5)
    call["positions"], call["block_table"][2:] = i32(-1, 11, 12, 2, 0), [[0, 1, 2], [-1, 3, 4], [99, 5, 6]]
    q, gate, *pages = prepared(call)
    one = {n: v[1:2] if n in ("q", "k", "v", "positions", "block_table") else v for n, v in call.items()}
    alone = prepared(one)  # the only row that is written
    assert not q[0].any()
    for name, got, want in zip(("key_pages", "value_pages"), pages, alone[2:], strict=True):
        assert_same_bits(name, got, want)
    room = {"positions": i32(0, 11, 12, 2, 0), "block_table": np.arange(20, dtype=np.int32).reshape(5, 4)}
    room |= {name: np.zeros((20, 4, 80), "float32") for name in ("key_pages", "value_pages")}
    want, want_gate = reference(ops.attention_prepare, **{**call, **room})
    assert_close("q", q[1:], want[1:], 2e-6)
    assert_same_bits("gate", gate, want_gate)


def test_attention_prepare_of_a_sequence_that_starts_nowhere_writes_nothing(rng):
    call = unprepared(rng, 6) | {"positions": np.array(-4, np.int32), "block_table": i32(0, 1, 2)}
    q, _, *pages = prepared(call)
    assert not q.any()
    for name, got in zip(("key_pages", "value_pages"), pages, strict=True):
        assert_same_bits(name, got, call[name])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_attention_prepare_rows_do_not_depend_on_how_many_there_are(dtype, rng):
    call = unprepared(rng, 70, H=1, Hkv=1, D=20, width=20, dtype=dtype)
    few = {n: v[:3] if n in ("q", "k", "v", "positions", "block_table") else v for n, v in call.items()}
    with penstock.backend("cuda", deterministic=True):
        many, some = (ops.attention_prepare(**{n: to_device(v) for n, v in c.items()}) for c in (call, few))
    for name, a, b in zip(("q", "gate"), to_host(many), to_host(some), strict=True):
        assert_same_bits(name, a[:3], b)


# -- on a GPU --------------------------------------------------------------------------------------------------------

# query heads, key-value heads, width of a head, window: Qwen3.6, the two kinds of Gemma 4, Llama 3
MODELS = {"qwen": (16, 2, 256, None), "sliding": (16, 8, 256, 1024), "global": (16, 2, 512, None),
          "llama": (32, 8, 128, None)}  # fmt: skip


def in_pages(H, Hkv, D, positions, dtype, sequences=1):
    """Random k and v in shuffled pages of 256, the table [sequences, n], and the same rows in order."""
    n = -(-positions // 256)
    k, v = (torch.randn(sequences * n, 256, Hkv * D, device="cuda", dtype=dtype) for _ in range(2))
    table = torch.randperm(sequences * n, device="cuda").int().view(sequences, n)
    rows = [x[table.long()].view(sequences, n * 256, Hkv, D)[:, :positions] for x in (k, v)]
    return k, v, table, rows


def oracle(q, k, v, start, window, scale):
    """q [T, H, D] at start … over k, v [n, Hkv, D], in float64 by torch."""
    G = q.shape[1] // k.shape[1]
    at, p = start + torch.arange(len(q), device="cuda")[:, None], torch.arange(len(k), device="cuda")
    seen = (p <= at) & (p > at - (window or len(k) + 1))
    scores = torch.einsum("thd,phd->htp", q.double(), k.double().repeat_interleave(G, 1)) * scale
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("htp,phd->thd", weights, v.double().repeat_interleave(G, 1))


def assert_near(got, want, dtype):
    error = float((got.double() - want).norm() / want.norm())
    assert error < {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}[dtype], error


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("model", MODELS)
def test_attention_at_model_shapes(model, dtype):
    H, Hkv, D, window = MODELS[model]
    k, v, table, rows = in_pages(H, Hkv, D, 2500, dtype, sequences=2)
    for start, T in ((0, 700), (2400, 100), (2499, 1), (1111, 3)):
        q = torch.randn(T, H, D, device="cuda", dtype=dtype)
        y = ops.attention_prefill(q, k, v, start, D**-0.5, window, block_table=table[1].clone())
        end = start + T
        assert_near(y, oracle(q, rows[0][1, :end], rows[1][1, :end], start, window, D**-0.5), dtype)
    q = torch.randn(2, H, D, device="cuda", dtype=dtype)
    lengths = torch.tensor([2500, 1023], dtype=torch.int32, device="cuda")
    y = ops.attention_paged(q, k, v, table, lengths, D**-0.5, window)
    for b, n in enumerate(lengths.tolist()):
        assert_near(y[b : b + 1], oracle(q[b : b + 1], rows[0][b, :n], rows[1][b, :n], n - 1, window, D**-0.5), dtype)


@pytest.mark.cuda
def test_attention_replays_from_a_graph_with_other_lengths():
    H, Hkv, D, _ = MODELS["qwen"]
    k, v, table, rows = in_pages(H, Hkv, D, 9000, torch.bfloat16, sequences=3)
    q = torch.randn(3, H, D, device="cuda", dtype=torch.bfloat16)
    lengths = torch.tensor([1, 2, 3], dtype=torch.int32, device="cuda")
    start = torch.tensor(0, dtype=torch.int32, device="cuda")
    ops.attention_paged(q, k, v, table, lengths, D**-0.5)
    ops.attention_prefill(q, k, v, start, D**-0.5, block_table=table[0].clone())
    graph, first = torch.cuda.CUDAGraph(), table[0].clone()
    with torch.cuda.graph(graph):
        y = ops.attention_paged(q, k, v, table, lengths, D**-0.5)
        z = ops.attention_prefill(q, k, v, start, D**-0.5, block_table=first)
    for given in ([9000, 1, 0], [17, 8192, 4097]):
        lengths.copy_(torch.tensor(given, dtype=torch.int32))
        start.fill_(given[0] // 2)
        graph.replay()
        for b, n in enumerate(given):
            if n == 0:
                assert not y[b].any()
            else:
                assert_near(y[b : b + 1], oracle(q[b : b + 1], rows[0][b, :n], rows[1][b, :n], n - 1, None, D**-0.5),
                            torch.bfloat16)  # fmt: skip
        n = given[0] // 2
        assert_near(z, oracle(q, rows[0][0, : n + 3], rows[1][0, : n + 3], n, None, D**-0.5), torch.bfloat16)


@pytest.mark.cuda
@pytest.mark.parametrize("fixed", [False, True])
def test_attention_repeats_its_bits_over_poisoned_outputs(fixed):
    H, Hkv, D, _ = MODELS["qwen"]
    k, v, table, _ = in_pages(H, Hkv, D, 40_000, torch.bfloat16)
    q = torch.randn(1, H, D, device="cuda", dtype=torch.bfloat16)
    many = torch.randn(1000, H, D, device="cuda", dtype=torch.bfloat16)
    lengths = torch.tensor([39_999], dtype=torch.int32, device="cuda")
    found = set()
    for poison in (float("nan"), 1e30, 0.0) * 10:
        y, z = torch.full_like(q, poison), torch.full_like(many, poison)
        scratch = torch.full((1 << 22,), poison, device="cuda")  # freed, so the parts of the splits are made of it
        del scratch
        with penstock.backend("cuda", deterministic=fixed):
            ops.attention_paged(q, k, v, table, lengths, D**-0.5, out=y)
            ops.attention_prefill(many, k, v, 30_000, D**-0.5, block_table=table[0].clone(), out=z)
        found.add((to_host(y).tobytes(), to_host(z).tobytes()))
    assert len(found) == 1


@pytest.mark.cuda
def test_attention_prefill_of_a_hundred_thousand_rows():
    T = 100_000
    q, k, v = (torch.randn(T, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    y = ops.attention_prefill(q, k.view(T, -1), v.view(T, -1), 0, 0.125)
    for t in (0, 1, 63, 64, 50_001, T - 1):
        assert_near(y[t : t + 1], oracle(q[t : t + 1], k[: t + 1], v[: t + 1], t, None, 0.125), torch.bfloat16)


@pytest.mark.cuda
def test_attention_of_a_row_among_many_has_its_own_bits():
    H, Hkv, D, _ = MODELS["qwen"]
    k, v, table, _ = in_pages(H, Hkv, D, 3000, torch.bfloat16, sequences=64)
    q = torch.randn(64, H, D, device="cuda", dtype=torch.bfloat16)
    lengths = torch.randint(0, 3001, (64,), device="cuda", dtype=torch.int32)
    with penstock.backend("cuda", deterministic=True):
        together = ops.attention_paged(q, k, v, table, lengths, D**-0.5)
        for b in (0, 7, 63):
            one = slice(b, b + 1)
            alone = ops.attention_paged(q[one].clone(), k, v, table[one].clone(), lengths[one].clone(), D**-0.5)
            assert torch.equal(alone, together[one])
        rows = torch.randn(2900, H, D, device="cuda", dtype=torch.bfloat16)
        whole = ops.attention_prefill(rows, k, v, 100, D**-0.5, block_table=table[3].clone())
        for low, high in ((0, 1), (77, 333), (2899, 2900)):
            part = rows[low:high].clone()
            alone = ops.attention_prefill(part, k, v, 100 + low, D**-0.5, block_table=table[3].clone())
            assert torch.equal(alone, whole[low:high])


@pytest.mark.cuda
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(("H", "Hkv", "D", "width", "gated"), [(16, 2, 256, 64, True), (16, 8, 256, 256, False)])
def test_attention_prepare_equals_its_ops_and_replays_at_other_positions(H, Hkv, D, width, gated, sequence):
    T = 300 if sequence else 32
    rng = np.random.default_rng(2)
    call = unprepared(rng, T, H, Hkv, D, width, "bfloat16", gated, not gated, entries=8 if sequence else 4)
    if sequence:
        call |= {"block_table": call["block_table"].reshape(-1)[:100].copy(), "positions": np.array(11, np.int32)}
    call = {name: to_device(value) for name, value in call.items()}
    ops.attention_prepare(**call)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = ops.attention_prepare(**call)
    q, gate = got if gated else (got, None)
    for shift in (0, 3):
        call["positions"] += shift
        pages = [call[name].clone() for name in ("key_pages", "value_pages")]
        graph.replay()
        heads = call["q"].view(T, H, -1)
        want, want_gate = ops.split_q_gate(heads) if gated else (heads, None)
        turned = [call["inv_freq"], call["positions"], 1e-6, width]
        want = ops.head_norm_rope(want, call["q_norm"], *turned)
        k = ops.head_norm_rope(call["k"].view(T, Hkv, D), call["k_norm"], *turned)
        v = call["v"] if gated else ops.rms_norm(call["v"].view(T, Hkv, D), None)
        ops.kv_pages_append(k, v, *pages, call["block_table"], call["positions"])
        assert_near(q, want.double(), torch.bfloat16)
        assert gate is None or torch.equal(gate, want_gate)
        for page, name in zip(pages, ("key_pages", "value_pages"), strict=True):
            assert_near(call[name], page.double(), torch.bfloat16)
