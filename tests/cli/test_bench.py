import csv
import importlib
import io
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import penstock
from penstock import models
from penstock.api import LLM
from penstock.cli import bench as verb
from penstock.cli._model import UsageError
from penstock.engine import admission
from penstock.engine.draft_gate import DraftGate
from penstock.engine.engine import Engine
from penstock.engine.runner import unready_runs
from penstock.engine.sampling import Sampler
from penstock.engine.scheduler import Scheduler
from penstock.errors import CheckpointError, NonFiniteLogits
from penstock.models.config import first_layers
from penstock.ops.device import device_type
from penstock.weights.resolve import resolve_model, shipped_configs
from tests.cli.common import call
from tests.cli.model import write_small_model
from tests.engine.capturing import CapturingHost

SHIPPED = Path(penstock.__file__).parent / "configs"

TINY = {
    "model_type": "qwen3_next",
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "partial_rotary_factor": 0.5,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
    "quantization": {"bits": 4, "group_size": 32},
}


@pytest.fixture(autouse=True)
def small_yardstick(monkeypatch):
    monkeypatch.setattr("penstock.analysis.bandwidth.array_bytes", lambda: 1 << 24)


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY | {"layers": 2}))
    return str(path)


def run(capsys, tiny, *options):
    return call(capsys, "bench", "--random", tiny, "--device", "reference", "-r", "2", *options)


def test_bench_prints_llama_benchs_table(capsys, tiny):
    shown = run(capsys, tiny, "-p", "5", "-n", "2", "-d", "0,3")
    assert (shown.status, shown.err) == (0, "")
    table, _, more = shown.out.rstrip().partition("\n\n")  # behind it, how long kernels were compiled for
    assert not more or more.startswith("Before: ")
    heading, rule, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines())
    assert heading == ["model", "size", "params", "backend", "threads", "test", "t/s", "first ms", "GB/s", "of read"]
    assert all(set(cell) <= {"-", ":"} for cell in rule)
    assert [row[5] for row in rows] == ["pp5", "tg2", "pp5 @ d3", "tg2 @ d3"]
    assert {row[0] for row in rows} == {"tiny, 2 of 3 layers"}
    assert {row[3] for row in rows} == {"REFERENCE"}
    assert all(" ± " in row[6] for row in rows)
    assert [bool(row[7]) for row in rows] == [True, False, True, False]
    assert [bool(row[8]) for row in rows] == [False, True, False, True]
    assert len({len(line) for line in table.splitlines()}) == 1


def test_bench_json_has_the_names_of_both_peers(capsys, tiny):
    shown = run(capsys, tiny, "-p", "4", "-n", "2", "-b", "1,3", "-o", "json")
    prompt, alone, together = json.loads(shown.out)
    assert (prompt["test"], prompt["n_prompt"], prompt["n_gen"], prompt["n_depth"]) == ("pp4", 4, 0, 0)
    assert prompt["prompt_tps"] == prompt["avg_ts"] > 0
    assert prompt["generation_tps"] is None and prompt["share_of_read"] is None
    assert alone["generation_tps"] == alone["avg_ts"] > 0
    assert alone["prompt_tps"] is None
    assert (alone["batch_size"], together["batch_size"]) == (1, 3)
    assert together["avg_ts"] == pytest.approx(sum(3 * 2 / ns * 1e9 for ns in together["samples_ns"]) / 2)
    for row in (alone, together):
        assert row["read_gb_per_s"] > 0.1
        assert row["share_of_read"] == pytest.approx(row["gb_per_s"] / row["read_gb_per_s"])
        assert row["gb_per_s"] == pytest.approx(row["active_bytes"] * row["avg_ts"] / row["batch_size"] / 1e9)
        assert len(row["samples_ts"]) == len(row["samples_ns"]) == 2
        assert row["peak_memory"] > 0.01


def test_bench_times_the_steps_of_one_scheduler(capsys, tiny, monkeypatch):
    """With a clock that counts steps: a prompt is one, an answer as many as it has tokens, whatever came before."""
    steps, submitted, schedulers = 0, [], set()
    own_step, own_submit = Scheduler.step, Scheduler.submit

    def step(self):
        nonlocal steps
        steps += 1
        schedulers.add(self)
        return own_step(self)

    def submit(self, request, *args, **more):
        submitted.append((len(request.prompt), request.max_tokens, request.eos, request.params.temperature))
        return own_submit(self, request, *args, **more)

    monkeypatch.setattr(Scheduler, "step", step)
    monkeypatch.setattr(Scheduler, "submit", submit)
    monkeypatch.setattr(verb, "compile_progress", SimpleNamespace(clock=lambda: float(steps), seconds=lambda: 0.0))
    options = "-p 5 -n 2 -b 1,3 -pg 4,3 -d 0,7 -o json".split()
    rows = {(row["test"], row["batch_size"]): row for row in json.loads(run(capsys, tiny, *options).out)}
    seconds = {key: [ns / 1e9 for ns in row["samples_ns"]] for key, row in rows.items()}
    at_once = {("pp5", 1): 1, ("tg2", 1): 2, ("tg2", 3): 2, ("pp4+tg3", 1): 4}
    deep = {(f"{name} @ d7", batch): count for (name, batch), count in at_once.items()}
    assert seconds == {key: [count] * 2 for key, count in (at_once | deep).items()}
    assert {key: row["ttft_ms"] for key, row in rows.items() if row["ttft_ms"]} == dict.fromkeys(
        [("pp5", 1), ("pp4+tg3", 1), ("pp5 @ d7", 1), ("pp4+tg3 @ d7", 1)], 1e3
    )
    (scheduler,) = schedulers
    assert not scheduler.threaded and scheduler.max_sequences == 3 and scheduler.idle
    assert {(eos, temperature) for _, count, eos, temperature in submitted if count == 1} == {(frozenset(), 0.0)}
    assert {(eos, temperature) for _, count, eos, temperature in submitted if count > 1} == {(frozenset(), 1.0)}
    alone = [(length, count) for length, count, *_ in submitted if count < 7]
    # three runs each: one before those that count; the depth of a prompt is read once
    shallow = [(5, 1)] * 3 + [(1, 3)] * 3 + [(4, 4)] * 3
    assert alone == [*shallow, (7, 1), *[(5, 1)] * 3, *[(7, 3)] * 3, (7, 1), *[(4, 4)] * 3]
    caches = scheduler._engine.caches
    assert caches.slots_used == 0 and not any(pool.used for pool in caches.pools.values())


def test_bench_answers_wait_until_the_prompts_of_others_are_read(capsys, tiny, monkeypatch):
    steps, own_step = 0, Scheduler.step

    def step(self):
        nonlocal steps
        steps += 1
        self._execution._token_seconds = math.inf  # a step has one chunk of a prompt, beside the answers
        return own_step(self)

    monkeypatch.setattr(Scheduler, "step", step)
    monkeypatch.setattr(device_type("reference"), "chunk_alignment", 4)
    monkeypatch.setattr(verb, "compile_progress", SimpleNamespace(clock=lambda: float(steps), seconds=lambda: 0.0))
    row = json.loads(run(capsys, tiny, *"-p 0 -n 2 -b 3 -d 40 -r 1 -o jsonl".split()).out)
    assert row["samples_ns"] == [2e9]
    assert steps > 2 * 3 * 10


def test_bench_refuses_batches_that_cannot_run_together(capsys, tiny, monkeypatch):
    shown = run(capsys, tiny, "-n", "2", "-p", "0", "-b", "1,300")
    assert (shown.status, shown.err.count("\n")) == (1, 1)
    assert shown.err.startswith(
        "penstock: error: -b: is 300, expected at most 256: no more run in one step here; -b counts"
    )
    monkeypatch.setattr(admission, "memory_for_sequences", lambda engine, count: 2 * engine.caches.bytes_of(64))
    shown = run(capsys, tiny, "-n", "40", "-p", "0", "-b", "3")
    assert (shown.status, shown.out, shown.err.count("\n")) == (1, "", 1)
    assert re.search(r"error: -b: 3 sequences of 48 positions do not fit together in [\d.]+ .B; take fewer", shown.err)


def test_bench_ends_with_the_error_of_a_request(capsys, tiny, monkeypatch):
    def nan(self, logits, position, mask=None):
        raise NonFiniteLogits("sample: the model produced non-finite logits at position 1")

    monkeypatch.setattr(Sampler, "sample", nan)
    for options in (("-n", "2", "-p", "0", "-b", "3"), ("-n", "0", "-p", "3", "-d", "2")):
        shown = run(capsys, tiny, *options)
        assert (shown.status, shown.out, shown.err.count("\n")) == (1, "", 1)
        assert "non-finite logits" in shown.err


def test_bench_jsonl_and_csv_have_a_line_per_row(capsys, tiny):
    lines = run(capsys, tiny, "-p", "2,3", "-n", "0", "-o", "jsonl").out.splitlines()
    assert [json.loads(line)["test"] for line in lines] == ["pp2", "pp3"]
    rows = list(csv.DictReader(io.StringIO(run(capsys, tiny, "-p", "2", "-n", "1", "-o", "csv").out)))
    assert [row["test"] for row in rows] == ["pp2", "tg1"]
    assert float(rows[1]["avg_ts"]) > 0 and rows[0]["generation_tps"] == ""


def test_bench_layers_override_the_file(capsys, tiny):
    found = {}
    for layers in ("1", "all", None):
        options = ("-p", "2", "-n", "0", "-o", "jsonl", *(("--layers", layers) if layers else ()))
        found[layers] = json.loads(run(capsys, tiny, *options).out)
    assert [found[layers]["model"] for layers in found] == ["tiny, 1 of 3 layers", "tiny", "tiny, 2 of 3 layers"]
    sizes = [found[layers]["model_n_params"] for layers in ("1", None, "all")]
    assert sizes == sorted(sizes) and len(set(sizes)) == 3


def test_bench_runs_on_the_cpu_kernels(capsys, tiny):
    options = "-p 2 -n 2 -pg 2,2 -t 1 -r 1 -o jsonl".split()
    shown = call(capsys, "bench", "--random", tiny, *options)
    rows = [json.loads(line) for line in shown.out.splitlines()]
    assert [(row["test"], row["backend"], row["n_threads"]) for row in rows] == [
        ("pp2", "CPU", 1),
        ("tg2", "CPU", 1),
        ("pp2+tg2", "CPU", 1),
    ]


def test_bench_measures_the_demo_model_if_none_is_named(capsys):
    shown = call(capsys, "bench", "--device", "reference", "-p", "1", "-n", "0", "-r", "1", "-o", "jsonl")
    assert json.loads(shown.out)["model"] == "demo"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "m", "--random", "r"), "--random: made-up weights need no --model"),
        (("--layers", "2"), "--layers: expected together with --random"),
        (("-p", "0", "-n", "0"), "-p and -n: are both 0"),
        (("-p", "x"), "-p: is 'x', expected numbers"),
        (("-d", "9-1"), "-d: '9-1' is no rising range"),
        (("-b", "0"), "-b: is '0', expected up to 1000 numbers of at least 1"),
        (("-t", "0"), "-t: is '0'"),
        (("-pg", "5"), "-pg: is '5', expected two numbers such as 512,128"),
        (("-o", "sql"), "Invalid value for '-o' / '--output'"),
        (("-r", "0"), "Invalid value for '-r'"),
        (("-ngl", "20"), "-ngl: is '20', expected 0 (--device cpu), or auto, all, 99"),
        (("-ot", "exps=CPU"), "-ot: not supported by penstock yet; --expert-cache"),
        (("--speculate", "8"), "--speculate: is '8', expected 1 to 7 or off, auto, mtp, ngram, draft"),
        (("--speculate", "3", "--num-draft-tokens", "2"), "--num-draft-tokens: expected without --speculate 3"),
        (("--random", "r", "--draft-model", "m"), "--draft-model: expected with a stored model"),
        (("--random", "r", "--speculate", "draft"), "--draft-model: expected with a stored model"),
        (("--acceptance", "0.5"), "--acceptance: expected together with --speculate N"),
        (("--speculate", "3", "--acceptance", "0.5,1.2"), "--acceptance: is '0.5,1.2', expected numbers from 0 to 1"),
    ],
)
def test_bench_wrong_usage_is_status_2(capsys, arguments, message):
    shown = call(capsys, "bench", *arguments)
    assert (shown.status, shown.out) == (2, "")
    assert shown.err.startswith(f"penstock: error: {message}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--random", "nosuch"), "--random: there is no 'nosuch', expected the path of a config.json"),
        (("--random", "/nowhere/config.json"), "/nowhere/config.json: no such file"),
        (("--random", "gemma4-26b-a4b"), "config.json: model_type is 'gemma4', expected one of"),
        (
            ("--random", "qwen3.5-397b-a17b", "--layers", "all"),
            f"{SHIPPED}/qwen3.5-397b-a17b.json: needs 223.24 GB of memory (223.02 GB for its weights, 226.84 MB ",
        ),
        (("--model", "/nowhere/model"), "'/nowhere/model': no such folder"),
    ],
)
def test_bench_failures_are_one_line_and_status_1(capsys, monkeypatch, arguments, message):
    monkeypatch.setattr("penstock.machine.available_memory", lambda: 24 << 30)
    if "gemma4-26b-a4b" in arguments:
        monkeypatch.setattr(models, "FAMILIES", {"qwen3_next": "qwen3_5"})
    shown = call(capsys, "bench", *arguments)
    assert (shown.status, shown.out, shown.err.count("\n")) == (1, "", 1)
    assert shown.err.startswith(f"penstock: error: {message}")


def test_bench_refuses_what_is_longer_than_the_context(capsys, tiny):
    shown = run(capsys, tiny, "-p", "200", "-d", "500")
    assert shown.status == 1
    assert "max_context is 700, expected 1 to 512" in shown.err


@pytest.mark.parametrize("options", [("-b", "1,2000000"), ("-n", "200000000", "-p", "0")])
def test_bench_refuses_batches_and_contexts_beyond_memory(capsys, tmp_path, monkeypatch, options):
    monkeypatch.setattr("penstock.backends.cpu.device.available_memory", lambda: 8 << 30)
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY | {"max_position_embeddings": 1 << 30}))
    shown = call(capsys, "bench", "--random", str(path), *options)
    assert (shown.status, shown.out, shown.err.count("\n")) == (1, "", 1)
    assert re.search(r"needs [\d.]+ GB of memory \(.* GB for \d+ x \d+ positions\), 8.59 GB are free", shown.err)


def test_bench_refuses_dims_beyond_any_memory(capsys, tmp_path):
    path = tmp_path / "huge.json"
    path.write_text(json.dumps(TINY | {"vocab_size": 1 << 30, "hidden_size": 1 << 22}))
    shown = call(capsys, "bench", "--random", str(path))
    assert (shown.status, shown.out, shown.err.count("\n")) == (1, "", 1)
    assert "GB" in shown.err


def test_bench_draws_on_the_device_and_says_what_preparing_took(capsys, tiny, monkeypatch):
    pytest.importorskip("torch")
    importlib.import_module("tests.gpu.interpreter").quicken()
    monkeypatch.setattr(verb, "PREPARING", 1)
    shown = call(capsys, "bench", "--random", tiny, "--layers", "1", "--device", "cuda", *"-p 0 -n 2 -r 1".split())
    assert (shown.status, shown.err) == (0, "")
    heading, _, row, *footer = shown.out.splitlines()
    assert [cell.strip() for cell in heading.split("|")[-5:-1]] == ["first ms", "GB/s", "of copy", "host us"]
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells[3] == "CUDA" and cells[7] == "" and float(cells[10]) > 0
    assert not footer or re.fullmatch(r"Before: [\d.]+ s to compile and capture programs\.", footer[-1])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("512", [512]),
        ("1,8, 3", [1, 8, 3]),
        ("0-4+2", [0, 2, 4]),
        ("1-9*3", [1, 3, 9]),
        ("3-5", [3, 4, 5]),
        ("2-7*2,1", [2, 4, 1]),
    ],
)
def test_numbers_reads_lists_and_ranges(text, expected):
    assert verb.numbers("-p", text) == expected


@pytest.mark.parametrize("text", ["", ",", "1,,2", "-5", "1-4*1", "0-8*2", "1-4+0", "1-", "1.5", "１", "0-99999"])
def test_numbers_refuses_the_rest(text):
    with pytest.raises(UsageError, match="^-p: "):
        verb.numbers("-p", text)


def test_planned_orders_tests_by_depth():
    names = [test.name for test in verb.planned([512, 0], [128], ["64,32"], [0, 4096], [1])]
    assert names == ["pp512", "tg128", "pp64+tg32", "pp512 @ d4096", "tg128 @ d4096", "pp64+tg32 @ d4096"]


def test_layer_count_is_a_number_or_all():
    assert [verb.layer_count(text) for text in ("7", "all", None)] == [7, "all", None]
    with pytest.raises(UsageError, match="--layers: is 'some', expected a number or all"):
        verb.layer_count("some")


@pytest.mark.parametrize("file", sorted(SHIPPED.glob("*.json")), ids=lambda file: file.stem)
def test_shipped_configs_have_the_published_number_of_parameters(file):
    raw = resolve_model(file, ["config"]).read_config()
    text = raw.get("text_config", raw)
    published = {
        "qwen3.6-35b-a3b": (35, 3),
        "qwen3-next-80b-a3b": (80, 3),
        "qwen3.5-397b-a17b": (397, 17),
        "gemma4-26b-a4b": (25.2, 3.8),
        "gemma4-e2b": (4.63, 2.28),  # 5.1 with the towers for pictures and sound
        "gemma4-e4b": (7.46, 4.64),  # 8 with them
        "gemma3-27b": (27, 27),
        "gemma3-4b": (3.88, 3.88),
        "gemma3n-e2b": (4.46, 2.44),  # 5.4 with the towers for pictures and sound
        "gemma3n-e4b": (6.87, 4.52),  # 7.8 with them
        "deepseek-v3": (671, 37),
        "llama-3.2-3b": (3.21, 3.21),
        "qwen3.8-27b": (26.9, 26.9),
        "gpt-oss-20b": (20.9, 3.6),
        "glm-4.6": (355, 32),
        "glm-4.5-air": (106, 12),
        "glm-4.7-flash": (30, 3),
        "minimax-m2": (230, 10),
        "kimi-linear-48b-a3b": (49.1, 3),
        "mixtral-8x7b": (46.7, 12.9),
        "qwen1.5-moe-a2.7b": (14.3, 2.7),
        "ministral-3-3b": (3.43, 3.43),
        "ministral-3-8b": (8.49, 8.49),
        "ministral-3-14b": (13.5, 13.5),
        "mistral-small-4": (119, 6.5),
        "mistral-large-3": (673, 39),
        "lfm2-8b-a1b": (8.34, 1.5),
        "lfm2-1.2b": (1.17, 1.17),
    }[file.stem]
    assert 1 <= raw["layers"] < text["num_hidden_layers"]
    assert len(text.get("layer_types", [None] * text["num_hidden_layers"])) == text["num_hidden_layers"]
    assert count_parameters(text) == pytest.approx(published[0] * 1e9, rel=0.02)
    assert resolve_model(file.stem.upper(), ["config"]).path == file


def count_with_inputs(c):
    """Of a Gemma whose layers have inputs of their own, and share keys and values."""
    dim, H, Hkv, P = (
        c[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "hidden_size_per_layer_input")
    )
    layers, total = c["num_hidden_layers"], c["vocab_size"] * c["hidden_size"]
    for n, kind in enumerate(c["layer_types"]):
        own = n < layers - c["num_kv_shared_layers"]
        D = c.get("global_head_dim", c["head_dim"]) if kind == "full_attention" else c["head_dim"]
        wide = 2 if c.get("use_double_wide_mlp") and not own else 1
        width = c["intermediate_size"][n] if "altup_num_inputs" in c else c["intermediate_size"]
        own |= "altup_num_inputs" in c  # where files have keys and values that are not used
        total += dim * D * (2 * H + 2 * Hkv * own) + 3 * dim * width * wide + 2 * dim * (P + c.get("laurel_rank", 0))
    total += 2 * (c.get("altup_num_inputs", 1) - 1) * dim**2
    return total + layers * P * (c["vocab_size_per_layer_input"] + dim)


def count_parameters(c):
    """Of a text model, from the shapes of its matrices alone."""
    if c.get("hidden_size_per_layer_input"):
        return count_with_inputs(c)
    dim, total = c["hidden_size"], 0
    kinds = c.get("layer_types") or [
        "full_attention" if (n + 1) % c.get("full_attention_interval", 1) == 0 else "linear_attention"
        for n in range(c["num_hidden_layers"])
    ]
    for n, kind in enumerate(kinds):
        H, Hkv = c["num_attention_heads"], c["num_key_value_heads"]
        D = c.get("head_dim", dim // H)
        if "conv_L_cache" in c:
            total += 4 * dim * dim if kind == "conv" else dim * D * (2 * H + 2 * Hkv)
            if n < c.get("num_dense_layers", n + 1):
                total += 3 * dim * (c["intermediate_size"] if "intermediate_size" in c else c["block_ff_dim"] * 2 // 3)
            else:
                total += c["num_experts"] * 3 * dim * c["moe_intermediate_size"]
            continue
        if not {"moe_intermediate_size", "num_local_experts"} & c.keys() and "linear_num_key_heads" not in c:
            total += dim * D * (2 * H + 2 * Hkv) + 3 * dim * c["intermediate_size"]
            continue
        if n + 1 in c.get("linear_attn_config", {}).get("kda_layers", ()):
            delta = c["linear_attn_config"]
            D, own = delta["head_dim"], delta["num_heads"] * delta["head_dim"]
            total += dim * (4 * own + 2 * D + delta["num_heads"]) + 2 * D * own
        elif "kv_lora_rank" in c:
            nope, rope, v = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
            rank = c["q_lora_rank"]
            total += dim * H * (nope + rope) if rank is None else rank * (dim + H * (nope + rope))
            total += dim * (c["kv_lora_rank"] + rope) + c["kv_lora_rank"] * H * (nope + v) + H * v * dim
        elif kind == "linear_attention":
            key = c["linear_num_key_heads"] * c["linear_key_head_dim"]
            value = c["linear_num_value_heads"] * c["linear_value_head_dim"]
            total += dim * (2 * key + 2 * value) + value * dim
        elif "global_head_dim" in c:
            whole = kind == "full_attention"  # where values are keys
            D, Hkv = (c["global_head_dim"], c["num_global_key_value_heads"]) if whole else (D, Hkv)
            total += dim * D * (2 * H + (1 if whole else 2) * Hkv)
        else:
            gate = "linear_num_key_heads" in c  # of q
            total += dim * D * ((3 if gate else 2) * H + 2 * Hkv)
        if not {"moe_intermediate_size", "num_local_experts"} & c.keys():
            total += 3 * dim * c["intermediate_size"]
            continue
        expert = 3 * dim * (c.get("moe_intermediate_size") or c["intermediate_size"])
        if n < c.get("first_k_dense_replace", 0):
            total += 3 * dim * c["intermediate_size"]
        else:
            total += (
                next(c[key] for key in ("num_experts", "n_routed_experts", "num_local_experts") if key in c) * expert
            )
            shared = c.get("n_shared_experts", c.get("num_shared_experts", 0))
            total += 3 * dim * c.get("shared_expert_intermediate_size", 0) + shared * expert
            total += 3 * dim * c["intermediate_size"] if "global_head_dim" in c else 0
    return total + c["vocab_size"] * dim * (1 if c["tie_word_embeddings"] else 2)


def test_shipped_configs_of_known_families_are_read():
    read = []
    for name in shipped_configs():
        raw, _ = first_layers(resolve_model(name, ["config"]).read_config(), None, name)
        if raw["model_type"] in models.FAMILIES:
            models.family_of(raw).read_config(raw)
            read.append(name)
    assert {"qwen3.6-35b-a3b", "qwen3-next-80b-a3b", "qwen3.5-397b-a17b"} <= set(read)


def test_read_config_refuses_what_is_no_object(tmp_path):
    file = tmp_path / "config.json"
    file.write_text("[]")
    with pytest.raises(CheckpointError, match="is a list, expected an object"):
        resolve_model(tmp_path, ["config"]).read_config()


def test_bench_shows_progress_on_a_terminal_only(monkeypatch, capsys):
    monkeypatch.setattr(verb.sys, "stderr", SimpleNamespace(isatty=lambda: False))
    with verb._shown("x") as progress:
        progress("y")
    assert capsys.readouterr().out == ""


def test_bench_help_fits_80_columns_and_shows_an_example(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = call(capsys, "bench", "--help")
    assert "Examples:" in shown.out
    assert max(map(len, shown.out.splitlines())) <= 80


# -- benchmark, as mlx-lm has it -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["1", "3"])
def test_benchmark_prints_the_lines_of_mlx_lm(capsys, monkeypatch, tmp_path, size):
    rests = []
    monkeypatch.setattr("penstock.cli.benchmark.time.sleep", rests.append)
    small = write_small_model(tmp_path / "small")
    options = ["--model", small, "--device", "reference", "-p", "2", "-g", "3", "-b", size, "-n", "2", "--delay", "1"]
    shown = call(capsys, "benchmark", *options, "--prefill-step-size", "512", "--trust-remote-code")
    assert shown.status == 0
    assert re.findall("^penstock: (--.*?): ", shown.err, re.MULTILINE) == ["--trust-remote-code", "--prefill-step-size"]
    warmup, about, *trials, averages = shown.out.splitlines()
    assert warmup == "Running warmup.."
    assert about == f"Timing with prompt_tokens=2, generation_tokens=3, batch_size={size}."
    number = r"\d+\.\d{3}"
    values = f"prompt_tps={number}, generation_tps={number}, peak_memory={number}"
    assert [re.fullmatch(rf"Trial {n}:  {values}, total_time={number}", line) is None for n, line in
            enumerate(trials, 1)] == [False] * 2  # fmt: skip
    assert re.fullmatch(f"Averages: {values}", averages)
    assert rests == [1, 1]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("-p", "0"), 2, "Invalid value for '--prompt-tokens'"),
        (("-g", "1"), 2, "Invalid value for '--generation-tokens'"),
        (("-n", "0"), 2, "Invalid value for '--num-trials'"),
        (("-qa",), 2, "-qa: not supported by penstock yet; --activations int8"),
        (("--pipeline",), 2, "--pipeline: not supported by penstock yet; -tp N"),
        (("--device", "reference", "-b", "100000", "-p", "1", "-g", "2"), 1, "-b: is 100000, expected at most "),
    ],
)
def test_benchmark_failures_are_one_line(capsys, arguments, status, message):
    shown = call(capsys, "benchmark", *arguments)
    assert (shown.status, shown.out, shown.err.count("\n")) == (status, "", 1)
    assert shown.err.startswith(f"penstock: error: {message}")


def test_bench_rows_say_what_was_drafted(capsys):
    arguments = *"-p 4 -n 24 -r 2 --speculate 3 --acceptance 1,0.5,0".split(), "--device", "cpu"
    prompt, answer = json.loads(call(capsys, "bench", *arguments, "-o", "json").out)
    assert (answer["speculate"], answer["acceptance"]) == ("mtp", [1, 0.5, 0]) and prompt["draft_n"] == 0
    assert answer["drafts_per_step"] > 2.5  # few steps end an answer, and may have no room for three
    assert 0.33 < answer["draft_n_accepted"] / answer["draft_n"] < 0.67
    heading, _, _, row, *_ = call(capsys, "bench", *arguments).out.splitlines()
    shown = dict(zip(*([cell.strip() for cell in line.split("|")] for line in (heading, row)), strict=True))
    assert float(shown["drafts"]) > 2.5 and shown["accepted"].endswith("%")


def test_bench_times_no_capture(monkeypatch):
    """Steps with drafts are ready before, and a run in which something is captured all the same does not count."""
    loaded = penstock.load(device="cpu")
    options = {"activations": loaded.engine.activations, "max_context": 300, "drafts": 7, "speculate": "auto"}
    llm = LLM(Engine(loaded.engine.model, device=CapturingHost(), **options), loaded.tokenizer, None, ())
    runs, sizes = [], []
    run = verb.Requests.run

    def noted(self, generation, times):
        before = unready_runs()
        run(self, generation, times)
        runs.append((unready_runs() > before, times.seconds[-1]))

    def late(self, answers, prepared):
        """Two drafts, for which nothing is prepared, from the second run that might count on."""
        sizes.append(prepared)
        return 2 if len(runs) > verb.PREPARING else 0

    monkeypatch.setattr(verb.Requests, "run", noted)
    monkeypatch.setattr(DraftGate, "drafts", late)
    llm.engine.allocate_for([(1, 40)])
    drafting = verb.Drafting.of("auto", "0.5,0.5,0.5")
    (row,) = verb.measured(llm, "demo", [verb.Test(0, 12, 0)], 3, 1, drafting)
    steps: Any = llm.engine.programs.steps  # type: ignore[union-attr]
    assert sorted(steps.draft_seconds(1)) == [0, 1, 3, 7] and (1, 3, 7) in sizes
    assert any(captured for captured, _ in runs[verb.PREPARING :])
    counted = [seconds for captured, seconds in runs if not captured]
    assert [round(1e9 * one) for one in counted[-3:]] == row.samples_ns
    assert len(row.samples_ns) == 3
