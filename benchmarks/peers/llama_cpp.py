"""llama.cpp on a made-up Q4_0 model: tokens per second of reading and of writing, as `penstock bench --random`.

    python benchmarks/peers/llama_cpp.py llama-3.2-3b --layers 8 -p 512 -n 128 -d 0,4096 --json llama.json

Writes a random GGUF of the config's dims into --folder, runs it with llama-cpp-python or the llama-bench on PATH, and
deletes it. Matrices are Q4_0 (embeddings and head too), routers, norms and other small tensors F32, as llama-quantize
--pure leaves them; instead of a vocabulary the file has its size. Needs gguf and one of the two.
"""

import argparse
import ctypes
import json
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
import peer

sys.path = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent]  # its name is mine

INSTALL = "pip install llama-cpp-python (CMAKE_ARGS=-DGGML_CUDA=on for an NVIDIA GPU), or put llama-bench on PATH"


# --------------------------------------------------------------------------------------------------------------------
# A model as llama.cpp stores it: metadata and tensors of every architecture


class Tensor(NamedTuple):
    """A tensor of a GGUF file; shape as NumPy has it, the input features last."""

    name: str
    shape: tuple[int, ...]
    quantized: bool = True


Described = tuple[str, dict[str, Any], list[Tensor]]


def small(name: str, *shape: int) -> Tensor:
    return Tensor(name, shape, quantized=False)


def describe(config: dict[str, Any]) -> Described:
    """Architecture, metadata (keys that start with a dot belong to it) and tensors of a config."""
    kind, text = config["model_type"], peer.text_config(config)
    if kind not in FAMILIES:
        peer.stop(f"llama.cpp: no GGUF is written for model_type {kind!r}, only for {', '.join(sorted(FAMILIES))}")
    arch, metadata, blocks = FAMILIES[kind](text)
    dim, vocab, rope = text["hidden_size"], text["vocab_size"], text.get("rope_parameters", {})
    common = {
        "general.file_type": 2,  # mostly Q4_0
        "tokenizer.ggml.model": "no_vocab",
        ".vocab_size": vocab,
        ".block_count": text["num_hidden_layers"],
        ".context_length": text["max_position_embeddings"],
        ".embedding_length": dim,
        ".attention.head_count": text["num_attention_heads"],
        ".attention.layer_norm_rms_epsilon": text["rms_norm_eps"],
        ".rope.freq_base": float(text.get("rope_theta") or rope.get("rope_theta", 0)),
    }
    ends = [Tensor("token_embd.weight", (vocab, dim)), small("output_norm.weight", dim)]
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    ends += [] if tied else [Tensor("output.weight", (vocab, dim))]
    return arch, common | metadata, ends + blocks


def mlp(block: str, dim: int, width: int, suffix: str = "") -> list[Tensor]:
    return [
        Tensor(f"{block}.ffn_gate{suffix}.weight", (width, dim)),
        Tensor(f"{block}.ffn_up{suffix}.weight", (width, dim)),
        Tensor(f"{block}.ffn_down{suffix}.weight", (dim, width)),
    ]


def experts(block: str, count: int, dim: int, width: int) -> list[Tensor]:
    return [
        small(f"{block}.ffn_gate_inp.weight", count, dim),
        Tensor(f"{block}.ffn_gate_exps.weight", (count, width, dim)),
        Tensor(f"{block}.ffn_up_exps.weight", (count, width, dim)),
        Tensor(f"{block}.ffn_down_exps.weight", (count, dim, width)),
    ]


def attention(block: str, dim: int, q: int, kv: int, out: int) -> list[Tensor]:
    return [
        Tensor(f"{block}.attn_q.weight", (q, dim)),
        Tensor(f"{block}.attn_k.weight", (kv, dim)),
        Tensor(f"{block}.attn_v.weight", (kv, dim)),
        Tensor(f"{block}.attn_output.weight", (dim, out)),
    ]


def llama(text: dict[str, Any]) -> Described:
    dim, heads, kv_heads = text["hidden_size"], text["num_attention_heads"], text["num_key_value_heads"]
    head = text.get("head_dim", dim // heads)
    metadata = {
        ".feed_forward_length": text["intermediate_size"],
        ".attention.head_count_kv": kv_heads,
        ".attention.key_length": head,
        ".attention.value_length": head,
        ".rope.dimension_count": head,
    }
    tensors = [small("rope_freqs.weight", head // 2)] if text.get("rope_scaling") else []
    for i in range(text["num_hidden_layers"]):
        block = f"blk.{i}"
        tensors += [small(f"{block}.attn_norm.weight", dim), small(f"{block}.ffn_norm.weight", dim)]
        tensors += attention(block, dim, heads * head, kv_heads * head, heads * head)
        tensors += mlp(block, dim, text["intermediate_size"])
    return "llama", metadata, tensors


def qwen3_next(text: dict[str, Any], arch: str = "qwen3next") -> Described:
    """Three of four layers are gated delta rules, every layer has experts and a shared one."""
    dim, heads, kv_heads, head = (
        text[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    k_heads, v_heads, width = (
        text[key] for key in ("linear_num_key_heads", "linear_num_value_heads", "linear_value_head_dim")
    )
    keys, values = k_heads * text["linear_key_head_dim"], v_heads * width
    count, shared, every = text["num_experts"], text["shared_expert_intermediate_size"], text["full_attention_interval"]
    rope = text.get("rope_parameters", text)
    metadata = {
        ".feed_forward_length": text.get("intermediate_size", shared),
        ".attention.head_count_kv": kv_heads,
        ".attention.key_length": head,
        ".attention.value_length": head,
        ".rope.dimension_count": int(head * rope["partial_rotary_factor"]),
        ".expert_count": count,
        ".expert_used_count": text["num_experts_per_tok"],
        ".expert_feed_forward_length": text["moe_intermediate_size"],
        ".expert_shared_feed_forward_length": shared,
        ".full_attention_interval": every,
        ".ssm.conv_kernel": text["linear_conv_kernel_dim"],
        ".ssm.state_size": text["linear_key_head_dim"],
        ".ssm.group_count": k_heads,
        ".ssm.time_step_rank": v_heads,
        ".ssm.inner_size": values,
    }
    if "mrope_section" in rope:
        metadata[".rope.dimension_sections"] = [*rope["mrope_section"], 0]
    gates = {"ssm_ba": 2 * v_heads} if arch == "qwen3next" else {"ssm_beta": v_heads, "ssm_alpha": v_heads}
    tensors = []
    for i in range(text["num_hidden_layers"]):
        block = f"blk.{i}"
        tensors += [small(f"{block}.attn_norm.weight", dim), small(f"{block}.post_attention_norm.weight", dim)]
        if (i + 1) % every == 0:
            tensors += attention(block, dim, 2 * heads * head, kv_heads * head, heads * head)  # q and its gate
            tensors += [small(f"{block}.attn_q_norm.weight", head), small(f"{block}.attn_k_norm.weight", head)]
        else:
            tensors += [
                Tensor(f"{block}.attn_qkv.weight", (2 * keys + values, dim)),
                Tensor(f"{block}.attn_gate.weight", (values, dim)),
                small(f"{block}.ssm_conv1d.weight", 2 * keys + values, text["linear_conv_kernel_dim"]),
                small(f"{block}.ssm_dt.bias", v_heads),
                small(f"{block}.ssm_a", v_heads),
                *(Tensor(f"{block}.{name}.weight", (rows, dim)) for name, rows in gates.items()),
                small(f"{block}.ssm_norm.weight", width),
                Tensor(f"{block}.ssm_out.weight", (dim, values)),
            ]
        tensors += experts(block, count, dim, text["moe_intermediate_size"])
        tensors += [small(f"{block}.ffn_gate_inp_shexp.weight", dim), *mlp(block, dim, shared, "_shexp")]
    return arch, metadata, tensors


def qwen3_5_moe(text: dict[str, Any]) -> Described:
    return qwen3_next(text, "qwen35moe")


def gemma4(text: dict[str, Any]) -> Described:
    """Layers with a window and layers without differ in their heads; every layer has an MLP and experts."""
    dim, heads, count, width = (
        text[key] for key in ("hidden_size", "num_attention_heads", "num_experts", "moe_intermediate_size")
    )
    windowed = [kind == "sliding_attention" for kind in text["layer_types"]]
    shapes = {True: (text["head_dim"], text["num_key_value_heads"])}
    shapes[False] = (text["global_head_dim"], text["num_global_key_value_heads"])
    rope = text["rope_parameters"]
    metadata = {
        ".feed_forward_length": text["intermediate_size"],
        ".attention.head_count_kv": [shapes[kind][1] for kind in windowed],
        ".attention.key_length": text["global_head_dim"],
        ".attention.value_length": text["global_head_dim"],
        ".attention.key_length_swa": text["head_dim"],
        ".attention.value_length_swa": text["head_dim"],
        ".attention.sliding_window": text["sliding_window"],
        ".attention.sliding_window_pattern": windowed,
        ".attention.shared_kv_layers": text["num_kv_shared_layers"],
        ".embedding_length_per_layer_input": text["hidden_size_per_layer_input"],
        ".final_logit_softcapping": text["final_logit_softcapping"],
        ".expert_count": count,
        ".expert_used_count": text["top_k_experts"],
        ".expert_feed_forward_length": width,
        ".rope.freq_base": float(rope["full_attention"]["rope_theta"]),
        ".rope.freq_base_swa": float(rope["sliding_attention"]["rope_theta"]),
        ".rope.dimension_count": text["global_head_dim"],
        ".rope.dimension_count_swa": text["head_dim"],
    }
    norms = "attn_norm post_attention_norm ffn_norm post_ffw_norm post_ffw_norm_1 pre_ffw_norm_2 post_ffw_norm_2"
    tensors = [] if all(windowed) else [small("rope_freqs.weight", text["global_head_dim"] // 2)]
    for i, kind in enumerate(windowed):
        block, (head, kv_heads) = f"blk.{i}", shapes[kind]
        tensors += [small(f"{block}.{name}.weight", dim) for name in norms.split()]
        tensors += [small(f"{block}.attn_q_norm.weight", head), small(f"{block}.attn_k_norm.weight", head)]
        own = attention(block, dim, heads * head, kv_heads * head, heads * head)
        if text["attention_k_eq_v"] and not kind:
            own = [tensor for tensor in own if not tensor.name.endswith("attn_v.weight")]
        tensors += own + mlp(block, dim, text["intermediate_size"])
        gate, *stacks = experts(block, count, dim, width)
        joined = Tensor(f"{block}.ffn_gate_up_exps.weight", (count, 2 * width, dim))
        tensors += [gate, joined, stacks[-1]]
        tensors += [small(f"{block}.ffn_gate_inp.scale", dim), small(f"{block}.ffn_down_exps.scale", count)]
        tensors += [small(f"{block}.layer_output_scale.weight", 1)]
    return "gemma4", metadata, tensors


def deepseek_v3(text: dict[str, Any]) -> Described:
    """Attention through a latent: as many heads over one key and value of width kv_lora_rank."""
    dim, heads, q_rank, rank, rope, nope, value = (
        text[key]
        for key in (
            "hidden_size num_attention_heads q_lora_rank kv_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim"
        ).split()
    )
    dense = min(text["first_k_dense_replace"], text["num_hidden_layers"])
    count, width = text["n_routed_experts"], text["moe_intermediate_size"]
    metadata = {
        ".feed_forward_length": text["intermediate_size"],
        ".leading_dense_block_count": dense,
        ".attention.head_count_kv": 1,
        ".attention.q_lora_rank": q_rank,
        ".attention.kv_lora_rank": rank,
        ".attention.key_length": rank + rope,
        ".attention.value_length": rank,
        ".attention.key_length_mla": nope + rope,
        ".attention.value_length_mla": value,
        ".rope.dimension_count": rope,
        ".expert_count": count,
        ".expert_used_count": text["num_experts_per_tok"],
        ".expert_feed_forward_length": width,
        ".expert_shared_count": text["n_shared_experts"],
        ".expert_group_count": text["n_group"],
        ".expert_group_used_count": text["topk_group"],
        ".expert_weights_scale": text["routed_scaling_factor"],
        ".expert_weights_norm": text["norm_topk_prob"],
        ".expert_gating_func": 2,  # sigmoid
    }
    if (scaling := text.get("rope_scaling") or {}).get("type") == "yarn":
        metadata[".rope.scaling.type"] = "yarn"
        metadata[".rope.scaling.factor"] = float(scaling["factor"])
        metadata[".rope.scaling.original_context_length"] = scaling["original_max_position_embeddings"]
        metadata[".rope.scaling.yarn_log_multiplier"] = 0.1 * scaling["mscale_all_dim"]
    tensors = []
    for i in range(text["num_hidden_layers"]):
        block = f"blk.{i}"
        tensors += [
            small(f"{block}.attn_norm.weight", dim),
            small(f"{block}.attn_q_a_norm.weight", q_rank),
            small(f"{block}.attn_kv_a_norm.weight", rank),
            small(f"{block}.ffn_norm.weight", dim),
            Tensor(f"{block}.attn_q_a.weight", (q_rank, dim)),
            Tensor(f"{block}.attn_q_b.weight", (heads * (nope + rope), q_rank)),
            Tensor(f"{block}.attn_kv_a_mqa.weight", (rank + rope, dim)),
            Tensor(f"{block}.attn_k_b.weight", (heads, rank, nope)),
            Tensor(f"{block}.attn_v_b.weight", (heads, value, rank)),
            Tensor(f"{block}.attn_output.weight", (dim, heads * value)),
        ]
        if i < dense:
            tensors += mlp(block, dim, text["intermediate_size"])
        else:
            tensors += experts(block, count, dim, width)
            tensors += [small(f"{block}.exp_probs_b.bias", count)]
            tensors += mlp(block, dim, width * text["n_shared_experts"], "_shexp")
    return "deepseek2", metadata, tensors


FAMILIES = {
    "llama": llama,
    "qwen3_next": qwen3_next,
    "qwen3_5_moe": qwen3_5_moe,
    "gemma4": gemma4,
    "deepseek_v3": deepseek_v3,
}


# --------------------------------------------------------------------------------------------------------------------
# The file

Q4_0 = np.dtype([("scale", "<f2"), ("codes", "u1", 16)])  # 32 weights: scale · (code - 8)
_BLOCKS = 1 << 20  # drawn at once


def write(path: Path, described: Described) -> None:
    """A GGUF with random weights, written piece by piece: the model never lies in memory."""
    import gguf

    arch, metadata, tensors = described
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        _add(writer, f"{arch}{key}" if key.startswith(".") else key, value)
    q4_0, f32 = gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.F32
    for tensor in tensors:
        writer.add_tensor_info(
            tensor.name, tensor.shape, np.dtype("f4"), nbytes(tensor), q4_0 if tensor.quantized else f32
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    rng = np.random.Generator(np.random.SFC64(0))
    with path.open("ab") as file:
        for tensor in tensors:
            file.write(b"\0" * (-file.tell() % writer.data_alignment))
            for piece in random(tensor, rng):
                file.write(piece)
        file.write(b"\0" * (-file.tell() % writer.data_alignment))


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    else:
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](key, value)


def nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor in the file."""
    size = math.prod(tensor.shape)
    return size // 32 * Q4_0.itemsize if tensor.quantized else 4 * size


def random(tensor: Tensor, rng: np.random.Generator) -> Iterator[bytes]:
    """The data of a tensor in pieces. Scales keep the activations tame."""
    if not tensor.quantized:
        yield _vector(tensor, rng).astype("<f4").tobytes()
        return
    # codes are uniform, so a weight has the standard deviation scale · 16 / sqrt(12); make that K^(-1/2) · 0.7
    scale = 0.7 * 12**0.5 / 16 * tensor.shape[-1] ** -0.5
    left = math.prod(tensor.shape) // 32
    while left:
        blocks = np.empty(min(left, _BLOCKS), Q4_0)
        blocks["scale"] = scale
        blocks["codes"] = rng.integers(0, 256, blocks["codes"].shape, np.uint8)
        yield blocks.tobytes()
        left -= blocks.size


def _vector(tensor: Tensor, rng: np.random.Generator) -> np.ndarray:
    if tensor.name.endswith("ssm_a"):
        return np.full(tensor.shape, -1.0)  # decay, below 0
    if any(part in tensor.name for part in ("norm", "scale", "rope_freqs")):
        return np.ones(tensor.shape)
    return rng.standard_normal(tensor.shape) * (tensor.shape[-1] ** -0.5 if len(tensor.shape) > 1 else 0.1)


# --------------------------------------------------------------------------------------------------------------------
# Two ways to run it


class LlamaCpp:
    """llama-cpp-python's binding of the C functions, used as llama-bench uses them."""

    def __init__(self, package: Any, path: Path, length: int, vocab: int, threads: int) -> None:
        self._c, self.vocab, self._lines = package, vocab, []
        log = package.llama_log_callback(lambda level, text, data: self._lines.append((level, text)))
        package.llama_log_set(log, None)
        self._log = log  # C keeps a pointer to it
        package.llama_backend_init()
        parameters = package.llama_model_default_params()
        parameters.n_gpu_layers = 999
        self._model = package.llama_model_load_from_file(str(path).encode(), parameters)
        if not self._model:
            peer.stop(f"llama.cpp: {self._complaint()}")
        settings = package.llama_context_default_params()
        settings.n_ctx = -(-length // 256) * 256
        settings.n_batch = min(settings.n_ctx, 2048)
        settings.n_threads = settings.n_threads_batch = threads
        self._context = package.llama_init_from_model(self._model, settings)
        if not self._context:
            peer.stop(f"llama.cpp: {self._complaint()}")
        self._batch = settings.n_batch
        built = package.llama_print_system_info().decode()  # "CUDA : … | CPU : …"
        self.backend = built.split(" ")[0] if package.llama_supports_gpu_offload() else "CPU"
        self.size, self.parameters = package.llama_model_size(self._model), package.llama_model_n_params(self._model)

    def _complaint(self) -> str:
        errors = [text.decode(errors="replace").strip() for level, text in self._lines if level == 4]
        return errors[0] if errors else "the file could not be loaded"

    def context(self, tokens: Sequence[int]) -> Any:
        """The state of the one context, as bytes; None when it is empty."""
        self._clear()
        if not tokens:
            return None
        self.read(None, tokens)
        state = (ctypes.c_uint8 * self._c.llama_state_seq_get_size(self._context, 0))()
        self._c.llama_state_seq_get_data(self._context, state, len(state), 0)
        return state

    def copy(self, context: Any) -> Any:
        self._clear()
        if context is not None and not self._c.llama_state_seq_set_data(self._context, context, len(context), 0):
            peer.stop("llama.cpp: a saved context could not be restored")

    def read(self, context: Any, tokens: Sequence[int]) -> None:
        for start in range(0, len(tokens), self._batch):
            self._decode(tokens[start : start + self._batch])
        self._c.llama_synchronize(self._context)

    def write(self, context: Any, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._decode([token])
            self._c.llama_synchronize(self._context)

    def check(self) -> None:
        """Stops the program unless logits are finite and differ."""
        self._clear()
        self.read(None, [1, 2, 3])
        logits = np.ctypeslib.as_array(self._c.llama_get_logits_ith(self._context, -1), (self.vocab,))
        if not np.isfinite(logits).all() or not logits.std() > 0:
            peer.stop(f"llama.cpp: expected {self.vocab} finite logits that differ")

    def _decode(self, tokens: Sequence[int]) -> None:
        array = (ctypes.c_int32 * len(tokens))(*tokens)
        if code := self._c.llama_decode(self._context, self._c.llama_batch_get_one(array, len(tokens))):
            peer.stop(f"llama.cpp: llama_decode of {len(tokens)} tokens gave {code}")

    def _clear(self) -> None:
        self._c.llama_memory_clear(self._c.llama_get_memory(self._context), True)


def with_package(package: Any, path: Path, args: argparse.Namespace, vocab: int) -> Iterator[dict[str, Any]]:
    tests = peer.planned(args)
    length = max(test.depth + test.prompt + test.generation for test in tests)
    runner = LlamaCpp(package, path, max(length, 16), vocab, args.threads)
    runner.check()
    facts = {"model_size": runner.size, "model_n_params": runner.parameters, "backend": runner.backend}
    for test in tests:
        yield peer.row(test, peer.seconds(runner, test, args.repetitions), **facts)


def with_llama_bench(binary: str, path: Path, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """llama-bench's own rows. It feeds random tokens too, and does not look at the logits."""
    for test in peer.planned(args):
        command = [binary, "-v", "-m", str(path), "-o", "json", "-t", str(args.threads), "-r", str(args.repetitions)]
        command += ["-p", str(test.prompt), "-n", str(test.generation), "-d", str(test.depth)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line] or ["it failed"]
            peer.stop(f"llama-bench: {errors[0]}")
        (found,) = json.loads(done.stdout)
        facts = {name: found[name] for name in ("model_size", "model_n_params", "build_commit", "build_number")}
        times = [one / 1e9 for one in found["samples_ns"]]
        yield peer.row(test, times, **facts, backend=found["backends"].split(",")[0])


def main(argv: list[str] | None = None) -> None:
    options = peer.parser(__doc__.splitlines()[0])
    options.add_argument("-t", "--threads", type=int, default=peer.machine()["cores"], help="threads (all cores)")
    options.add_argument("--folder", type=Path, help="where the file lies for the time being (the system's /tmp)")
    options.add_argument("--with", dest="way", choices=["llama-cpp-python", "llama-bench"], help="the one there is")
    args = options.parse_args(argv)
    name, config = peer.read_config(args.config, args.layers)
    described = describe(config)
    if not peer.versions("gguf"):
        peer.stop("gguf, which writes the file, is not installed here; pip install gguf", 2)
    package, binary = None, shutil.which("llama-bench")
    if args.way != "llama-bench":
        try:
            import llama_cpp as package
        except (ImportError, OSError) as error:
            if args.way is not None or binary is None:
                peer.stop(f"llama.cpp is not installed here ({error}); {INSTALL}", 2)
    elif binary is None:
        peer.stop(f"llama-bench is not on PATH; {INSTALL}", 2)

    facts = {"model": name, "model_type": described[0], "n_threads": args.threads}
    with tempfile.TemporaryDirectory(prefix="llama_cpp.", dir=args.folder) as folder:
        path = Path(folder) / "random.gguf"
        need, free = sum(map(nbytes, described[2])), shutil.disk_usage(folder).free
        if need > free:
            peer.stop(f"{folder}: the file needs {need / 1e9:.1f} GB, {free / 1e9:.1f} are free; --layers takes fewer")
        write(path, described)
        if package is not None:
            rows = with_package(package, path, args, peer.text_config(config)["vocab_size"])
        else:
            rows = with_llama_bench(str(binary), path, args)
        used = peer.versions("llama-cpp-python", "gguf") if package is not None else {"llama-bench": str(binary)}
        report = peer.Report("llama.cpp", config, used, args.json)
        for found in rows:
            report.add(facts | found)


if __name__ == "__main__":
    main()
