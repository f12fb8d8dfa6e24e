"""Times attention on a GPU: decode over paged caches, prefill, and both forms of latent attention (MLA).

    PYTHONPATH=src:. python benchmarks/ops/gpu_attention.py [--json FILE]

Bytes of a decode step are the keys and values in sight, operations of a prefill those of the causal half alone. Tables
and lengths of a decode step are the same for all sets of inputs, as they are for all layers of a model.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.ops.gpu_common import check, compile_ahead, finish, parser, random_weight, row, seconds, sets_of
from penstock import ops

PAGE = 256
ROOM = 131072  # positions that the block table of a sequence has room for
PREFILL = 4096
# query heads, key-value heads, width of a head, window
MODELS = {
    "Qwen3.6-35B-A3B": (16, 2, 256, None),
    "Gemma 4 26B-A4B sliding": (16, 8, 256, 1024),
    "Gemma 4 26B-A4B global": (16, 2, 512, None),
    "Llama 3 8B": (32, 8, 128, None),
}
QWEN, SLIDING, GLOBAL, LLAMA = MODELS
HEADS, NOPE, ROPE, VALUE, RANK = 128, 128, 64, 128, 512  # DeepSeek-V3

Calls = list[Callable[[], torch.Tensor]]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def tables(sequences: int, length: int, room: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Shuffled pages of `length` positions for each sequence, in tables with room for more; and the lengths."""
    n = -(-length // PAGE)
    table = torch.zeros(sequences, max(n, room // PAGE), device="cuda", dtype=torch.int32)
    table[:, :n] = torch.randperm(sequences * n, device="cuda").view(sequences, n)
    return table, torch.full((sequences,), length, device="cuda", dtype=torch.int32)


def in_order(pages: torch.Tensor, table: torch.Tensor, length: int, heads: int) -> torch.Tensor:
    return pages[table[: -(-length // PAGE)].long()].flatten(0, 1)[:length].view(length, heads, -1)


def oracle(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, scale: float) -> torch.Tensor:
    """The last len(q) positions of k, v [n, Hkv, D] attend to all before them, in float64."""
    group, n = q.shape[1] // k.shape[1], len(k)
    at, p = torch.arange(n - len(q), n, device="cuda")[:, None], torch.arange(n, device="cuda")
    scores = torch.einsum("thd,phd->htp", q.double(), k.double().repeat_interleave(group, 1)) * scale
    seen = (p <= at) & (p > at - (window or n))
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("htp,phd->thd", weights, v.double().repeat_interleave(group, 1))


def attention_paged(most: int, name: str, B: int, length: int) -> tuple[Calls, dict[str, Any]]:
    H, Hkv, D, window = MODELS[name]
    table, lengths = tables(B, length, ROOM)
    sets = []
    for _ in range(min(most, sets_of(B * length * Hkv * D * 4))):
        k, v = (normal(B * -(-length // PAGE), PAGE, Hkv * D) for _ in range(2))
        sets.append((normal(B, H, D), k, v, table, lengths, D**-0.5, window))
    q, k, v = sets[0][:3]
    if most > 1 and length <= 32768:
        kept = in_order(k, table[0], length, Hkv), in_order(v, table[0], length, Hkv)
        got = ops.attention_paged(*sets[0])[:1]
        check(f"attention_paged, {name}", got, oracle(q[:1], *kept, window, D**-0.5), 6e-3)
    work = {"shape": f"{name}, {B} x {length}", "nbytes": 4 * B * min(length, window or length) * Hkv * D}
    return [lambda s=s: ops.attention_paged(*s) for s in sets], work


def attention_prefill(most: int, name: str, T: int, start: int) -> tuple[Calls, dict[str, Any]]:
    H, Hkv, D, window = MODELS[name]
    n = start + T
    k, v = (normal(-(-n // PAGE), PAGE, Hkv * D) for _ in range(2))
    q, table = normal(T, H, D), tables(1, n)[0][0].clone()
    at = torch.tensor(start, device="cuda", dtype=torch.int32)
    out = torch.empty_like(q)
    if most > 1:
        ops.attention_prefill(q, k, v, at, D**-0.5, window, block_table=table, out=out)
        kept = in_order(k, table, n, Hkv), in_order(v, table, n, Hkv)
        check(f"attention_prefill, {name}", out[-64:], oracle(q[-64:], *kept, window, D**-0.5), 6e-3)
    seen = sum(min(start + t + 1, window or n) for t in range(T))
    work = {"shape": f"{name}, {T} at {start}", "flops": 4 * seen * D * H}
    return [lambda: ops.attention_prefill(q, k, v, at, D**-0.5, window, block_table=table, out=out)], work


def mla_sdpa(most: int, B: int, length: int) -> tuple[Calls, dict[str, Any]]:
    table, lengths = tables(B, length, ROOM)
    sets = []
    for _ in range(min(most, sets_of(B * length * (RANK + ROPE) * 2))):
        caches = [normal(-(-length // PAGE) * B, PAGE, width) for width in (RANK, ROPE)]
        queries = [normal(B, HEADS, width) for width in (RANK, ROPE)]
        sets.append((*queries, *caches, lengths, 0.07, None, table))
    work = {"nbytes": 2 * B * length * (RANK + ROPE), "flops": 2 * B * HEADS * length * (2 * RANK + ROPE)}
    return [lambda s=s: ops.mla_sdpa(*s) for s in sets], work | {"shape": f"DeepSeek-V3, {B} x {length}"}


def mla_product(most: int, name: str, form: str, T: int) -> tuple[Calls, dict[str, Any]]:
    calls: Calls = []
    for _ in range(min(most, 16 if T == 1 else 1)):
        whole = form == "whole"
        key = random_weight(HEADS * (NOPE + VALUE), RANK) if whole else random_weight(HEADS, RANK, NOPE)
        value = None if whole else random_weight(HEADS, VALUE, RANK)
        q, latents, latent = normal(T, HEADS, NOPE), normal(T, HEADS, RANK), normal(T, RANK)
        if name == "mla_q_prime":
            call = functools.partial(ops.mla_q_prime, q, key)
        elif name == "mla_out_per_head":
            call = functools.partial(ops.mla_out_per_head, latents, *((key, NOPE) if whole else (value,)))
        else:
            more = {"heads": HEADS, "nope": NOPE} if whole else {"unembed_out": value}
            call = functools.partial(ops.mla_expand, latent, key, **more)
        calls.append(call)
    halves = 2 if name == "mla_expand" else 1  # keys and values, or one of them
    nbytes = halves * HEADS * NOPE * (RANK // 2 + RANK // 16)
    work = {"nbytes": nbytes} if T == 1 else {"flops": halves * 2 * T * HEADS * NOPE * RANK}
    return calls, work | {"shape": f"DeepSeek-V3 {form}, {T}"}


def mla_prefill(most: int, T: int) -> tuple[Calls, dict[str, Any]]:
    whole, table = random_weight(HEADS * (NOPE + VALUE), RANK), tables(1, T)[0][0].clone()
    caches = [normal(T // PAGE, PAGE, width) for width in (RANK, ROPE)]
    q, pe = normal(T, HEADS, NOPE), normal(T, HEADS, ROPE)
    flops = T * (T + 1) * HEADS * (NOPE + ROPE + VALUE) + 2 * T * HEADS * (NOPE + VALUE) * RANK
    calls: Calls = [lambda: ops.mla_prefill(q, pe, *caches, 0, 0.07, whole, block_table=table)]
    return calls, {"shape": f"DeepSeek-V3, {T} at 0", "flops": flops}


ROWS: list[tuple[str, tuple[Any, ...]]] = [
    *(("attention_paged", (QWEN, 1, length)) for length in (1024, 8192, 32768, 131072)),
    *(("attention_paged", (QWEN, 32, length)) for length in (1024, 8192)),
    *(("attention_paged", (SLIDING, B, 8192)) for B in (1, 32)),
    *(("attention_paged", (GLOBAL, 1, length)) for length in (1024, 32768)),
    *(("attention_prefill", (name, PREFILL, 0)) for name in MODELS),
    ("attention_prefill", (QWEN, 512, 32768)),
    *(("mla_sdpa", (1, length)) for length in (8192, 32768)),
    *(("mla_q_prime", ("mla_q_prime", form, 1)) for form in ("pair", "whole")),
    ("mla_out_per_head", ("mla_out_per_head", "pair", 1)),
    *(("mla_expand", ("mla_expand", form, PREFILL)) for form in ("pair", "whole")),
    ("mla_prefill", ("mla_prefill", PREFILL)),
]
MAKERS = {
    "attention_paged": attention_paged,
    "attention_prefill": attention_prefill,
    "mla_sdpa": mla_sdpa,
    "mla_prefill": lambda most, _, T: mla_prefill(most, T),
}


def made(number: int, most: int) -> tuple[Calls, dict[str, Any]]:
    name, arguments = ROWS[number]
    return MAKERS.get(name, mla_product)(most, *arguments)


def compile_row(number: int) -> None:
    made(number, 1)[0][0]()
    torch.cuda.synchronize()


def main() -> None:
    args = parser("Times attention on a GPU.").parse_args()
    torch.manual_seed(0)
    compile_ahead(compile_row, [(number,) for number in range(len(ROWS))])
    rows = []
    for number, (name, _) in enumerate(ROWS):
        calls, work = made(number, 64)
        rows.append(row(name, work.pop("shape"), seconds(calls), **work))
        del calls
        torch.cuda.empty_cache()
    finish("Attention", rows, args.json)


if __name__ == "__main__":
    main()
