"""What each rounding of the GPU's bfloat16 activations costs, on the CPU: a trained checkpoint by the GPU's own graph.

    python benchmarks/emulate_rounding.py FOLDER --text FILE [--rows 24] [--json FILE]

FOLDER is a quantized checkpoint, FILE plain text that it was not trained on: rows of 256 tokens, as check_trained.py
takes them. The step of a row is traced and fused for CUDA; its nodes run one after the other on the CPU in float32, and
what a node makes is rounded to bfloat16 where a site of SITES says so. Compared are the logits with those of exact
products. Not emulated: float32 sums in another order, and probabilities of attention rounded on their way to a product.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from check_trained import COSINE, ROW, cosines, losses
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent / "ops"))
from common import machine

import penstock
from penstock import ops
from penstock.api import LLM
from penstock.dtypes import bfloat16
from penstock.engine.steps import Run, step_arrays
from penstock.graph.fuse import fuse
from penstock.graph.trace import Graph, Node, Value
from penstock.quant import QuantizedTensor, dequantize

SITES = {
    "stream": "the residual stream between blocks",
    "router": "normed rows on their way into routers (and the shared expert's score)",
    "head": "normed rows on their way into the head",
    "normed": "normed rows on their way into other products",
    "branch": "what a block adds to the stream",
    "projections": "other results of products: q, k, v, gates, latents",
    "hidden": "gated rows between the two products of a feed-forward block",
    "queries": "rotated queries and what is made of them",
    "attention": "results of attention",
    "cache": "keys, values and latents; rows of convolutions",
    "delta": "convolution, unit rows, delta rule and gated norm of a DeltaNet layer",
    "weights": "quantized weights made dense for products of many rows (not of routers and head)",
}
EVERY = frozenset(SITES)

_PRODUCTS = (ops.quantized_matmul, ops.matmul)
_ROUTERS = (ops.moe_route, ops.moe_softmax_topk, ops.moe_group_route)
_GATED = {ops.fused_gate_up_swiglu: ops.swiglu, ops.fused_gate_up_geglu: ops.geglu}
_ADDED_TO_STREAM = (
    *(ops.residual_add, ops.residual_norm, ops.norm_add, ops.norm_add_scalar, ops.post_attn_triple_norm),
    *(ops.post_ff_norm2_endlayer, ops.moe_combine_residual),
)
_OF_STREAM = (
    *(ops.quantized_embedding, ops.embedding, ops.mul, ops.residual_add, ops.norm_add, ops.norm_add_scalar),
    *(ops.moe_shared_forward, ops.moe_combine_residual, ops.post_ff_norm2_endlayer),
)
_DELTA = (ops.conv1d_causal, ops.rms_norm_qk, ops.gated_delta_net, ops.gated_rms_norm)
_ATTENTION = (ops.attention_paged, ops.mla_sdpa, ops.mla_out_per_head, ops.mla_prefill, ops.add)
_QUERIES = (ops.attention_prepare, ops.mla_prepare, ops.mla_q_prime)
_EXACT = (ops.gdn_decay_beta, ops.softcap, *_ROUTERS)  # float32 on the GPU


def rounded(x: np.ndarray) -> np.ndarray:
    return x.astype(bfloat16).astype(np.float32)


class Emulation:
    """One step of a model by the graph that CUDA runs, rounded at some sites."""

    def __init__(self, llm: LLM, row: int) -> None:
        self.engine = llm.engine
        programs = self.engine.programs
        assert programs is not None
        self.windows = programs.windows
        with self._step([0] * row) as given:
            widths = (given[name].shape[1] for name in self.windows.values())
            self.graph: Graph = fuse(programs.graph(row, 1, max(widths, default=1), row), "cuda")
            self.arrays = programs.cache_arrays()
        self.dense: dict[tuple[int, tuple[int, ...]], np.ndarray] = {}
        self.readers: dict[Value, list[Node]] = {}
        for node in self.graph.nodes:
            for value in node.reads:
                self.readers.setdefault(value.base, []).append(node)
        self.sites = {node: [self._site(node, out) for out in node.outs] for node in self.graph.nodes}

    def _site(self, node: Node, out: Value | None) -> str | None:
        """Where an output belongs; "normed" also for rows that routers and the head read beside others."""
        if out is None or node.op in _EXACT:
            return None
        readers = [reader.op for reader in self.readers.get(out, ())]
        if node.op in (ops.rms_norm, ops.rms_norm_triple):
            return "normed"
        if node.op is ops.residual_norm:
            return "normed" if out is node.outs[0] else "stream"
        if node.op is ops.post_attn_triple_norm:
            return "stream" if out is node.outs[0] else "normed"
        if node.op in _OF_STREAM:
            return "stream"
        if node.op in _PRODUCTS:
            if node["dtype"] == "float32":
                return None
            return "branch" if any(op in _ADDED_TO_STREAM for op in readers) else "projections"
        if node.op is ops.moe_forward:
            return "branch"
        for site, found in (("delta", _DELTA), ("attention", _ATTENTION), ("queries", _QUERIES), ("hidden", _GATED)):
            if node.op in found:
                return site
        raise SystemExit(f"{node.op.name}: it is not known here, expected it in a site")

    @contextlib.contextmanager
    def _step(self, tokens: list[int]) -> Iterator[dict[str, np.ndarray]]:
        """Inputs of a step of these tokens of a new sequence."""
        sequence = self.engine.open()
        self.engine.caches.reserve(sequence, len(tokens))
        yield step_arrays([Run(sequence, np.array(tokens, np.int32), "all")], self.windows)
        self.engine.close(sequence)

    def logits(self, tokens: list[int], sites: frozenset[str]) -> np.ndarray:
        """Logits after each token, rounded at these sites."""
        whole: dict[Value, np.ndarray] = {}  # before it was rounded
        with self._step(tokens) as given, penstock.backend("cpu"):
            found = {value: (self.arrays | given)[name] for name, value in self.graph.inputs.items()}
            for node in self.graph.nodes:
                reads = self._source(node, whole, found, sites)
                args = {name: _of(arg, reads) if isinstance(arg, Value) else arg for name, arg in node.args.items()}
                outs = self._run(node, args, sites)
                for out, made, site in zip(node.outs, outs, self.sites[node], strict=True):
                    if out is not None:
                        whole[out], found[out] = made, rounded(made) if site in sites else made
                if "cache" in sites and node.op is not ops.gated_delta_net:  # whose state is float32
                    for value in node.writes:
                        found[value][...] = rounded(found[value])
        (output,) = self.graph.outputs
        return found[output]

    def _source(self, node: Node, whole: dict, found: dict, sites: frozenset[str]) -> dict[Value, np.ndarray]:
        """Where a node reads: routers and the head have a site of their own for their rows."""
        if node.op not in _PRODUCTS or node["dtype"] != "float32":
            return found
        site = "router" if self._is_router(node) else "head"
        x = node["x"].base
        if self.sites[x.node][x.node.outs.index(x)] != "normed":
            return found
        return {**found, x: rounded(whole[x]) if site in sites else whole[x]}

    def _is_router(self, node: Node) -> bool:
        return node.outs[0] not in self.graph.outputs and all(
            reader.op is not ops.softcap for reader in self.readers[node.out]
        )

    def _weight(self, w: Any, sites: frozenset[str]) -> Any:
        if not isinstance(w, QuantizedTensor) or "weights" not in sites:
            return w
        key = w.packed.ctypes.data, tuple(w.shape)
        if key not in self.dense:
            self.dense[key] = rounded(dequantize(w))
        return self.dense[key]

    def _run(self, node: Node, args: dict[str, Any], sites: frozenset[str]) -> tuple[Any, ...]:
        op = node.op
        if op is ops.quantized_embedding or (op in _PRODUCTS and node["dtype"] == "float32"):
            return (op(**args),)
        args = {name: self._weight(arg, sites) for name, arg in args.items()}
        keep: Callable[[np.ndarray], np.ndarray] = rounded if "hidden" in sites else lambda x: x
        if op is ops.quantized_matmul:
            return (_times(args["x"], args["w"]),)
        if op in _GATED:
            return (_GATED[op](_times(args["x"], args["gate_w"]), _times(args["x"], args["up_w"])),)
        if op is ops.moe_forward:
            return (_routed(args, keep),)
        if op is ops.moe_shared_forward:
            x = args["x"]
            assert args["norm_weight"] is None and args["shared_up_w"] is not None and args["act"] == "silu"
            own = ops.swiglu(_times(x, args["shared_gate_w"]), _times(x, args["shared_up_w"]))
            shared = _times(keep(own), args["shared_down_w"])
            rest = (args["residual"], None, None, shared, args["shared_score"])
            return (ops.moe_combine_residual(*rest, moe_sum=_routed(args, keep)),)
        made = op(**args)
        outs = made if isinstance(made, tuple) else (made,)
        given = iter(outs)
        return tuple(None if out is None else next(given) for out in node.outs)


def _of(value: Value, found: dict[Value, np.ndarray]) -> np.ndarray:
    base = found[value.base]
    if base.shape == value.shape and not value.is_part:
        return base
    return base.reshape(-1)[value.offset : value.offset + value.spec.size].reshape(value.shape)


def _times(x: np.ndarray, w: Any) -> np.ndarray:
    return ops.quantized_matmul(x, w) if isinstance(w, QuantizedTensor) else x @ w.T


def _routed(args: dict[str, Any], keep: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """The sum of the chosen experts, float32 [T, dim]."""
    names = ("x", "gate_w", "up_w", "ids", "slot_of", "act")
    h = ops.expert_gate_up(*(args[name] for name in names))
    return ops.expert_down_sum(keep(h), args["down_w"], args["ids"], args["weights"], args["slot_of"])


def variants() -> dict[str, frozenset[str]]:
    """Sites that are rounded, by name."""
    named = {
        "bfloat16 everywhere": EVERY,
        "float32 stream": EVERY - {"stream"},
        "float32 stream and router": EVERY - {"stream", "router"},
        "float32 stream, router and head": EVERY - {"stream", "router", "head"},
        "float32 stream, router and branch": EVERY - {"stream", "router", "branch"},
    }
    named |= {f"all but stream, router and {site}": EVERY - {"stream", "router", site} for site in EVERY_OTHER}
    return named | {f"{site} alone": frozenset({site}) for site in SITES}


EVERY_OTHER = [site for site in SITES if site not in ("stream", "router", "head", "branch")]


def compare(exact: np.ndarray, got: np.ndarray, rows: list[list[int]]) -> dict[str, float]:
    def perplexity(logits: np.ndarray) -> float:
        parts = np.split(logits, len(rows))
        return float(np.exp(np.mean([losses(part, row) for part, row in zip(parts, rows, strict=True)])))

    near = cosines(exact, got)
    return {
        "share": float(np.mean(near >= COSINE)),
        "argmax": float(np.mean(exact.argmax(1) == got.argmax(1))),
        "perplexity": perplexity(got) / perplexity(exact) - 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=24, help="rows of 256 tokens")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="variants that start so; default all")
    parser.add_argument("--json", type=Path, help="also write the rows and the machine to this file")
    args = parser.parse_args()

    llm = penstock.load(args.folder, device="cpu", activations="float32")
    tokens = llm.tokenizer.encode(args.text.read_text(encoding="utf-8"))
    rows = [list(tokens[start : start + ROW]) for start in range(0, args.rows * ROW, ROW)]
    exact = np.concatenate([llm.logits(row) for row in rows])
    emulation = Emulation(llm, ROW)
    plain = emulation.logits(rows[0], frozenset())
    off = float(np.abs(plain - exact[:ROW]).max() / np.abs(exact[:ROW]).max())
    if off > 1e-4:
        raise SystemExit(f"the graph without roundings is off by {off:.2g}, expected at most 1e-4")
    table = Table("rounded to bfloat16", f"cosine ≥ {COSINE}", "argmax", "perplexity", title=args.folder.name)
    found = []
    for name, sites in variants().items():
        if args.only and not name.startswith(tuple(args.only)):
            continue
        got = np.concatenate([emulation.logits(row, sites) for row in rows])
        found.append({"variant": name, "rounded": sorted(sites), **compare(exact, got, rows)})
        row = found[-1]
        table.add_row(name, f"{row['share']:.2%}", f"{row['argmax']:.2%}", f"{row['perplexity']:+.3%}")
    Console(width=120).print(table)
    if args.json:
        about = {"model": args.folder.name, "machine": machine(), "rows": found}
        args.json.write_text(json.dumps(about, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
