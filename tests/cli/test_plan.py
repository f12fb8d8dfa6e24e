import functools
import itertools
import json
import math
import shutil

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import constants, errors

import penstock
from penstock import models
from penstock.analysis import plan as planning
from penstock.analysis.expert_routes import ExpertRoutes
from penstock.analysis.ranks import ASSUMED_LINKS, busiest_rank
from penstock.backends.cpu.device import CpuDevice
from penstock.engine.cache import Caches
from penstock.experts.simulate import Trace, simulate
from penstock.models import mtp
from penstock.models.source import CheckpointSource
from penstock.models.split import Mesh, SplitSource
from penstock.models.step import PagedKV, RecurrentState
from penstock.units import parse_size
from penstock.weights.checkpoint import Checkpoint
from penstock.weights.safetensors import SafetensorsFile
from tests.cli.common import call
from tests.cli.model import DEMO
from tests.cli.test_bench import TINY
from tests.models.gguf_files import write
from tests.models.test_gguf_architectures import tokenizer_keys

MEASURED = ("--memory-bandwidth", "10", "--link-bandwidth", "4", "--disk-bandwidth", "0.5")


def planned(capsys, *arguments):
    shown = call(capsys, "plan", *arguments, *MEASURED, "--json")
    assert shown.status == 0, shown.err
    return json.loads(shown.out)


@pytest.fixture(scope="module")
def demo():
    return penstock.load(device="cpu")


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY))
    return str(path)


# -- bytes -----------------------------------------------------------------------------------------------------------


def test_plan_parts_are_the_bytes_of_the_loaded_weights(capsys, demo):
    found = planned(capsys, "--device", "cpu", "--device-memory", "8G")
    model = demo.engine.model
    assert sum(found["parts"].values()) == models.bytes_of((model.weights, model.head))
    assert sum(found["parts"].values()) - found["parts"]["draft head"] == models.bytes_of(model.weights)
    file = SafetensorsFile.open(DEMO / "model.safetensors")
    sizes = {name: file.array(name).nbytes for name in file.tensors}
    assert found["parts"]["experts"] == sum(size for name, size in sizes.items() if ".switch_mlp." in name)
    assert found["parts"]["embeddings"] == sum(size for name, size in sizes.items() if "embed_tokens." in name)
    assert found["parts"]["head"] == sum(size for name, size in sizes.items() if "lm_head." in name)
    own = found["experts"]
    assert (own["layers"], own["per_layer"], own["per_token"]) == (8, 16, 4)
    assert 16 * sum(own["bytes_each"]) == found["parts"]["experts"]


def test_plan_of_a_config_needs_no_weights(capsys, tiny):
    found = planned(capsys, tiny, "--device", "cpu", "--device-memory", "8G")
    assert found["model"] == "tiny"
    assert sum(found["parts"].values()) == penstock.api.random_nbytes(TINY)
    assert found["resident"] and found["fits"] and found["flags"] == []


def test_cache_needs_by_hand():
    layouts = [PagedKV(40, 24), PagedKV(40, 24, window=1000), RecurrentState((3, 10), (2, 4, 5)), PagedKV(8, 8)]
    needs = planning.cache_needs(Caches(layouts, "bfloat16", CpuDevice()))
    assert needs.per_1000 == 1000 * (64 + 16) * 2
    assert needs.windows == (4 + 2) * 256 * 64 * 2  # pages of 256 positions that a window of 1000 touches, and two
    assert needs.state == 3 * 10 * 2 + 2 * 4 * 5 * 4


def test_plan_caches_are_those_of_the_engine(capsys, demo):
    found = planned(capsys, "--device", "cpu", "--max-context", "1500")["caches"]
    assert (found["context"], found["bytes"]) == (1500, demo.engine.caches.bytes_of(1500))
    assert found["state_bytes_per_sequence"] == demo.engine.caches.bytes_of(0)
    assert planned(capsys, "--device", "cpu")["caches"]["context"] == 2048  # all that the model has


def test_plan_puts_into_slots_what_the_rest_leaves(capsys):
    memory = 275 << 20
    found = planned(capsys, "--device", "cpu", "--device-memory", "275M")
    dense = sum(found["parts"].values()) - found["parts"]["experts"]
    rest = dense + found["caches"]["bytes"] + found["working_bytes"]
    assert not found["resident"] and found["fits"]
    assert found["tiers"]["device"]["bytes"] == memory - rest
    assert found["tiers"]["host"]["bytes"] == 0 and found["tiers"]["disk"]["bytes"] == found["parts"]["experts"]
    share = (memory - rest) / found["parts"]["experts"]
    assert found["tiers"]["device"]["hit_rate"] == pytest.approx(share)
    assert found["tiers"]["disk"]["hit_rate"] == pytest.approx(1 - share)
    assert found["needed_bytes"] == rest + 4 * found["experts"]["bytes_each"][0]


def test_plan_at_the_least_memory_fits_and_below_does_not(capsys):
    need = planned(capsys, "--device", "cpu", "--device-memory", "1G")["needed_bytes"]
    assert planned(capsys, "--device", "cpu", "--device-memory", str(need))["fits"]
    found = planned(capsys, "--device", "cpu", "--device-memory", str(need - 1))
    assert not found["fits"] and found["predicted"] is None and found["flags"] == []
    shown = call(capsys, "plan", "--device", "cpu", "--device-memory", "200M", *MEASURED)
    assert shown.status == 0
    assert shown.out.splitlines()[-1].startswith("Does not fit: needs at least 272.99 MiB, 200.00 MiB are there.")
    assert "shorter --max-context" not in shown.out
    longer = call(capsys, "plan", "--device", "cpu", "--device-memory", str(need - (1 << 20)), *MEASURED)
    assert longer.out.splitlines()[-1].endswith("A shorter --max-context would fit.")


def test_plan_flags_stay_within_the_budget(capsys):
    found = planned(capsys, "--device", "cpu", "--device-memory", "275M")
    flags = dict(zip(found["flags"][::2], found["flags"][1::2], strict=True))
    assert list(flags) == ["--expert-cache", "--expert-io"]
    cache, least = parse_size(flags["--expert-cache"], "x"), 4 * found["experts"]["bytes_each"][0]
    assert least <= cache <= found["tiers"]["device"]["bytes"]
    assert cache > 0.9 * found["tiers"]["device"]["bytes"]


@pytest.mark.parametrize(
    ("nbytes", "least", "flag"),
    [
        (6 << 30, 0, "6G"),
        ((6 << 30) + 1, 0, "6G"),
        (int(4.19 * 2**30), 0, "4.1G"),
        (900 << 20, 0, "900M"),
        ((1 << 30) + (90 << 20), 1 << 30, "1G"),
        ((1 << 30) + (90 << 20), (1 << 30) + (80 << 20), "1114M"),
        (1500, 1400, "1.4K"),
        (1500, 1499, "1500"),
    ],
)
def test_flag_is_rounded_down_but_not_below_the_least(nbytes, least, flag):
    assert planning._flag(nbytes, least) == flag
    assert least <= parse_size(flag, "x") <= nbytes


# -- speed -----------------------------------------------------------------------------------------------------------


def test_plan_predicts_bytes_over_bandwidth(capsys, demo):
    found = planned(capsys, "--device", "cpu", "--device-memory", "275M")
    chosen = 4 * sum(found["experts"]["bytes_each"])
    parts = {name: size for name, size in found["parts"].items() if name not in ("experts", "embeddings", "draft head")}
    warm, cold = found["predicted"]["warm"], found["predicted"]["cold"]
    row = found["parts"]["embeddings"] // demo.config.vocab_size
    every = sum(parts.values()) + row + chosen
    assert warm["bytes_per_token"]["memory"] == cold["bytes_per_token"]["memory"] == every
    assert cold["bytes_per_token"]["disk"] == chosen
    missed = chosen * found["tiers"]["disk"]["hit_rate"]
    assert warm["bytes_per_token"]["disk"] == round(missed)
    for step in (warm, cold):
        moved = step["bytes_per_token"]
        assert step["seconds_per_token"] == pytest.approx(moved["memory"] / 10e9 + moved["disk"] / 0.5e9)
        assert step["tokens_per_s"] == pytest.approx(1 / step["seconds_per_token"])


def test_plan_for_a_gpu_has_three_tiers(capsys, monkeypatch):
    """10 MiB of experts: 3 MiB fit on the GPU, 6 MiB in host memory."""
    monkeypatch.setattr(planning, "_PROCESS", 10 << 20)
    need = planned(capsys, "--device", "cuda", "--device-memory", "2G", "--host-memory", "1G")["needed_bytes"]
    memory = need + (3 << 20) - 4 * 82944
    found = planned(capsys, "--device", "cuda", "--device-memory", str(memory), "--host-memory", "16M")
    experts, chosen = found["parts"]["experts"], 4 * 8 * 82944
    tiers = found["tiers"]
    assert tiers["device"] == {"bytes": 3 << 20, "hit_rate": pytest.approx((3 << 20) / experts)}
    assert tiers["host"] == {"bytes": 6 << 20, "hit_rate": pytest.approx((3 << 20) / experts)}
    warm, cold = (found["predicted"][name]["bytes_per_token"] for name in ("warm", "cold"))
    assert cold["link"] == cold["disk"] == chosen
    assert warm["link"] == round(chosen * (1 - (3 << 20) / experts))
    assert warm["disk"] == round(chosen * (1 - (6 << 20) / experts))
    seconds = warm["memory"] / 10e9 + warm["link"] / 4e9 + warm["disk"] / 0.5e9
    assert found["predicted"]["warm"]["seconds_per_token"] == pytest.approx(seconds)
    assert found["flags"][:4] == ["--expert-cache", "3M", "--expert-host", "6M"]
    few = planned(capsys, "--device", "cuda", "--device-memory", str(memory), "--host-memory", "12M")
    assert few["tiers"]["host"]["bytes"] == 0 and "--expert-host" not in few["flags"]  # less than is on the GPU


def test_plan_without_a_gpu_predicts_nothing_that_was_not_measured(capsys, monkeypatch):
    monkeypatch.setattr(planning, "unusable", lambda: "no GPU")
    arguments = ("--device", "cuda", "--host-memory", "4G", "--json")
    need = planned(capsys, *arguments, "--device-memory", "2G")["needed_bytes"]
    arguments = (*arguments, "--device-memory", str(need))
    found = json.loads(call(capsys, "plan", *arguments, "--disk-bandwidth", "1").out)
    assert found["gb_per_s"] == {"memory": None, "link": None, "disk": 1.0} and not found["resident"]
    assert found["predicted"]["warm"]["tokens_per_s"] is None
    shown = call(capsys, "plan", "--device", "cuda")
    assert (shown.status, shown.out) == (2, "")
    assert "--device-memory: expected for a GPU that is not here (no GPU)" in shown.err


def test_plan_measures_the_disk_on_the_experts(capsys, monkeypatch):
    found = json.loads(
        call(capsys, "plan", "--device", "cpu", "--device-memory", "275M", "--memory-bandwidth", "10", "--json").out
    )
    assert found["gb_per_s"]["disk"] > 0
    assert found["gb_per_s_from"]["disk"] in ("pagecache reads of experts", "direct reads of experts")
    assert found["flags"][-1] == found["gb_per_s_from"]["disk"].partition(" ")[0]


def test_plan_measures_a_packed_file_where_there_is_one(capsys, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder)
    arguments = (str(folder), "--device", "cpu", "--device-memory", "275M", "--memory-bandwidth", "10")
    assert f"penstock pack {folder}" in call(capsys, "plan", *arguments).out
    assert call(capsys, "pack", str(folder)).status == 0
    shown = call(capsys, "plan", *arguments).out
    assert "reads of packed experts" in shown and "penstock pack" not in shown


def test_plan_measures_memory(capsys, monkeypatch):
    monkeypatch.setattr("penstock.analysis.bandwidth.array_bytes", lambda: 1 << 24)
    found = json.loads(call(capsys, "plan", "--device", "cpu", "--device-memory", "8G", "--json").out)
    assert found["gb_per_s"]["memory"] > 0 and found["gb_per_s_from"]["memory"] == "a plain read here"
    assert set(found["gb_per_s"]) == {"memory"}  # a model that fits needs nothing else


# -- recorded routes -------------------------------------------------------------------------------------------------


def recorded(path, layers=8, experts=16, k=4, prompt=20, tokens=60):
    rng = np.random.default_rng(1)
    ids = rng.permuted(np.tile(np.arange(experts // 2), (tokens, layers, 1)), axis=2)[..., :k].astype(np.int32)
    decode = np.arange(tokens) >= prompt
    texts = ("x",) * tokens
    made = ExpertRoutes(
        "made", np.zeros(tokens, np.int32), texts, ids, decode, experts, tuple(range(layers)), (9,) * layers
    )
    made.save(path)
    return Trace(ids, decode, experts)


def test_plan_takes_hit_rates_from_a_recorded_text(capsys, tmp_path):
    trace = recorded(tmp_path / "r.npz")
    arguments = ("--device", "cpu", "--device-memory", "275M")
    plain, found = planned(capsys, *arguments), planned(capsys, *arguments, "--routes", str(tmp_path / "r.npz"))
    share = found["tiers"]["device"]["bytes"] / found["parts"]["experts"]
    want = simulate(trace, int(share * 128), "auto").sum() / trace.chosen.sum()
    assert found["tiers"]["device"]["hit_rate"] == pytest.approx(want)
    assert want > plain["tiers"]["device"]["hit_rate"]  # half of the experts are never chosen
    assert found["predicted"]["warm"]["tokens_per_s"] > plain["predicted"]["warm"]["tokens_per_s"]
    assert (plain["hit_rates_from"], found["hit_rates_from"]) == ("uniform routing", "recorded routes")


def test_plan_refuses_a_recording_of_another_model(capsys, tmp_path):
    recorded(tmp_path / "r.npz", layers=7)
    shown = call(capsys, "plan", "--device", "cpu", "--routes", str(tmp_path / "r.npz"), *MEASURED)
    assert (shown.status, shown.out) == (1, "")
    assert "has 7 layers of 16 experts, 4 per token, expected 8 of 16, 4 per token, as demo has" in shown.err
    recorded(tmp_path / "r.npz", prompt=60)
    shown = call(capsys, "plan", "--device", "cpu", "--routes", str(tmp_path / "r.npz"), *MEASURED)
    assert "has no decoded tokens" in shown.err


# -- the hub ---------------------------------------------------------------------------------------------------------


def test_plan_of_a_hub_model_fetches_its_config_alone(capsys, tmp_path, monkeypatch):
    asked = []

    def download(id, *, revision, allow_patterns, local_files_only, **_):
        if local_files_only:
            raise errors.LocalEntryNotFoundError("not here")
        asked.append((id, *allow_patterns, revision))
        (tmp_path / "config.json").write_text(json.dumps(TINY))
        return str(tmp_path)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    arguments = ("owner/name", "--device", "cpu", "--device-memory", "8G", *MEASURED)
    shown = call(capsys, "plan", *arguments, "--revision", "v2", "--json")
    assert asked == [("owner/name", "config.json", "v2")]
    assert json.loads(shown.out)["model"] == "owner/name"
    assert shown.err == "owner/name: not here; its config.json says how large it is\n"
    shown = call(capsys, "plan", *arguments, "--offline")
    want = "penstock: error: owner/name: no such folder, and not completely in the local cache while offline\n"
    assert (shown.status, shown.err) == (1, want)

    def fail(*args, **kwargs):
        raise ConnectionError("no route\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    shown = call(capsys, "plan", *arguments)
    want = "penstock: error: owner/name: its config.json cannot be had: ConnectionError: no route\n"
    assert (shown.status, shown.err) == (1, want)


def test_plan_of_a_hub_model_that_is_here_reads_its_files(capsys, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda id, **_: str(DEMO))
    found = planned(capsys, "owner/name", "--device", "cpu", "--device-memory", "275M")
    assert found["model"] == "owner/name" and found["experts"]["layers"] == 8


# -- ranks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("experts", ["on", "off"])
def test_plan_of_ranks_has_the_bytes_that_the_largest_one_loads(capsys, experts):
    found = planned(capsys, "--device", "cpu", "--device-memory", "8G", "-tp", "3", "--expert-parallel", experts)
    checkpoint = Checkpoint.open(DEMO)
    family = models.family_of(checkpoint.config)
    config, loaded = family.read_config(checkpoint.config), []
    for rank in range(3):
        mesh = Mesh(rank, 3, experts == "off")
        split = family.split(config, mesh, 64)
        source = SplitSource(CheckpointSource(checkpoint, *family.names(checkpoint, config)), split, mesh)
        weights = family.read_weights(source, split.config)
        head = mtp.find(checkpoint, family, config)
        part = functools.partial(SplitSource, split=split, mesh=mesh)
        loaded.append((weights, head.read(family, split.config, weights.embed, weights.head, part)))
    sizes = [models.bytes_of(weights) for weights in loaded]
    slots = 16 * 4 if experts == "on" else 0  # int32 for each expert
    assert len(set(sizes)) > 1 and found["ranks"]["largest_rank"] == sizes.index(max(sizes))
    assert sum(found["parts"].values()) == max(sizes) + slots
    whole = found["ranks"]["whole_bytes"]
    more = sum(found["ranks"]["repeated_bytes"].values()) - found["ranks"]["repeated_bytes"].get("caches", 0)
    assert sum(sizes) == sum(whole.values()) - whole["caches"] + more
    assert found["ranks"]["repeated_bytes"]["router"] == 2 * whole["router"]
    assert found["flags"] == ["-tp", "3", *(["--expert-parallel", "off"] if experts == "off" else [])]


def test_plan_of_ranks_adds_the_sums_of_the_traced_step(capsys):
    arguments = ("--device", "cpu", "--device-memory", "8G", "-tp", "2")
    found = planned(capsys, *arguments, "--rank-bandwidth", "2", "--rank-latency", "30")
    # the embedding, mixer and MLP of 8 layers: rows of 256 floats; logits of 4096 tokens
    kinds = [("all_reduce", 1024, 17), ("all_gather", 16384, 1)]
    assert [(one["op"], one["bytes"], one["count"]) for one in found["ranks"]["sums"]] == kinds
    step = found["predicted"]["warm"]
    assert step["sum_seconds_per_token"] == pytest.approx(18 * 30e-6 + (17 * 1024 + 0.5 * 16384) / 2e9)
    assert step["seconds_per_token"] == pytest.approx(
        step["sum_seconds_per_token"] + step["bytes_per_token"]["memory"] / 10e9
    )
    assert found["ranks"]["link"] == {"gb_per_s": 2.0, "latency_us": pytest.approx(30), "from": "as given"}
    assert found["ranks"]["possible_sizes"] == [1, 2, 3, 4]
    whole = planned(capsys, "--device", "cpu", "--device-memory", "8G")["predicted"]["warm"]["bytes_per_token"]
    assert step["bytes_per_token"]["memory"] > 0.5 * whole["memory"]  # something is repeated, and one rank is busier
    half = planned(capsys, *arguments, "--rank-bandwidth", "2")["ranks"]["link"]
    assert half["latency_us"] == pytest.approx(1e6 * ASSUMED_LINKS["loopback"].latency)
    assert half["from"].startswith("GB/s as given, the rest of ")


@pytest.mark.parametrize(("owned", "top_k"), [((3, 3), 2), ((4, 3, 3), 4), ((1, 0, 2), 3), ((5,), 3), ((2, 2), 0)])
def test_busiest_rank_is_the_mean_over_all_choices(owned, top_k):
    rank_of = [rank for rank, count in enumerate(owned) for _ in range(count)]
    choices = list(itertools.combinations(rank_of, top_k))
    mean = sum(max(map(choice.count, choice), default=0) for choice in choices) / len(choices)
    assert busiest_rank(owned, top_k) == pytest.approx(mean)


def test_plan_of_ranks_of_deepseek_v3_needs_no_weights(capsys):
    memory = ("--device", "cuda", "--device-memory", "240GB", "--host-memory", "100G")
    found = planned(capsys, "deepseek-v3", *memory, "-tp", "2", "--rank-link", "pcie")
    ranks = found["ranks"]
    assert [(one["op"], one["bytes"], one["count"]) for one in ranks["sums"]] == [
        ("all_reduce", 4 * 7168, 1),
        ("all_reduce", 2 * 7168, 2 * 61),
        ("all_gather", 4 * 129280, 1),
    ]
    assert found["resident"] and ranks["experts_of_rank"] == 128
    assert 2 * found["parts"]["experts"] == ranks["whole_bytes"]["experts"]
    assert ranks["repeated_bytes"]["caches"] == ranks["whole_bytes"]["caches"]  # latents are on every rank
    assert list(ranks["repeated_weights"]["attention"])[:2] == ["q_a", "kv_a"]
    assert ranks["link"]["from"] == "PCIe 4.0 x16, assumed"


def test_plan_of_ranks_says_what_is_assumed_and_that_it_is_a_bound(capsys):
    shown = call(capsys, "plan", "--device", "cpu", "-tp", "2", "--rank-link", "nvlink", *MEASURED)
    assert shown.out.startswith("demo on 2 ranks, cpu, each with ")
    assert "450 GB/s, 6 µs: NVLink of an H100 or H200, assumed" in shown.out
    assert "Predicted: at most " in shown.out and "The model can be split over 1 to 4 ranks." in shown.out


def test_plan_of_ranks_streams_what_does_not_fit_one(capsys):
    arguments = ("--device", "cpu", "--device-memory", "267M", "-tp", "2")
    found = planned(capsys, *arguments)
    assert found["fits"] and not found["resident"]
    assert found["flags"][:3] == ["-tp", "2", "--expert-cache"]
    narrow = planned(capsys, *arguments, "--expert-parallel", "off")
    assert not narrow["fits"]  # not streamed
    shown = call(capsys, "plan", *arguments, "--expert-parallel", "off", *MEASURED)
    assert "Experts that are split along their width are not streamed." in shown.out


def test_plan_counts_states_of_their_dtype(capsys, demo):
    memory = ("--device", "cuda", "--device-memory", "8G", "--host-memory", "8G")
    float32, bfloat16 = (
        planned(capsys, *memory, "--state-dtype", dtype)["caches"]["state_bytes_per_sequence"]
        for dtype in ("float32", "bfloat16")
    )
    states = [one.state for one in demo.engine.caches.layouts if isinstance(one, RecurrentState)]
    assert float32 - bfloat16 == 2 * sum(map(math.prod, states)) > 0


# -- output and wrong usage ------------------------------------------------------------------------------------------


def test_plan_prints_parts_tiers_and_flags(capsys):
    shown = call(capsys, "plan", "--device", "cpu", "--device-memory", "275M", *MEASURED)
    lines = shown.out.splitlines()
    assert lines[0] == "demo on cpu with 275.00 MiB: 8 layers of 16 experts, 4 per token"
    assert [line.split()[0] for line in lines[3:9]] == ["embeddings", "head", "router", "attention", "shared", "norms"]
    assert any(line.startswith("caches, 2048 positions") and "per 1000 tokens" in line for line in lines)
    assert any(line.startswith("memory ") and line.endswith("10.00  as given") for line in lines)
    assert any(line.startswith("disk ") and line.endswith("0.50   as given") for line in lines)
    assert lines[-1].startswith("Flags: --expert-cache ")


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_K"])
def test_plan_of_a_gguf_file_streams_its_experts(capsys, tmp_path, type_name):
    path = str(write(tmp_path / "x.gguf", "qwen35moe", type_name, **tokenizer_keys()))
    fitting = planned(capsys, path, "--device", "cpu")
    memory = (path, "--device", "cpu", "--device-memory", str(fitting["needed_bytes"]))
    found = planned(capsys, *memory)
    assert found["fits"] and not found["resident"] and found["flags"][0] == "--expert-cache"
    shown = call(capsys, "plan", *memory, "--memory-bandwidth", "10")  # the disk is measured
    assert " reads of experts" in shown.out and f"penstock pack {path} makes each expert one read." in shown.out
    assert call(capsys, "pack", path).status == 0
    shown = call(capsys, "plan", *memory, "--memory-bandwidth", "10")
    assert " reads of packed experts" in shown.out and "penstock pack" not in shown.out


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("--device-memory", "6X"), 1, "--device-memory: is '6X', expected a size such as 12G"),
        (("--device-memory", "50%"), 1, "--device-memory: is '50%', expected bytes such as 12G"),
        (("--device-memory", "6G", "--host-memory", "6G"), 2, "--host-memory: on the CPU it is the device's memory"),
        (("--disk-bandwidth", "0"), 2, "--disk-bandwidth: is 0.0, expected GB/s above 0"),
        (("--memory-bandwidth", "nan"), 2, "--memory-bandwidth: is nan, expected GB/s above 0"),
        (("--max-context", "3000"), 1, "--max-context: is 3000, expected 1 to 2048 (the model's positions)"),
        (("--max-context", "0"), 1, "--max-context: is 0, expected 1 to 2048"),
        (("--routes", "none.npz"), 1, "none.npz: cannot be read: No such file"),
        (("no/such/model",), 1, "'no/such/model': no such folder"),
        (("none.json",), 1, "none.json: "),
        (("deepseek-v3", "--revision", "x"), 2, "--revision: expected with a hub id"),
        (("-tp", "5"), 1, "tensor_parallel_size is 5, expected fewer ranks: 4 heads of 64 columns that read 2 cannot"),
        (("-tp", "2", "--rank-latency", "0"), 2, "--rank-latency: is 0.0, expected µs above 0"),
        (("-tp", "2", "--rank-bandwidth", "inf"), 2, "--rank-bandwidth: is inf, expected GB/s above 0"),
        (("--state-dtype", "bfloat16"), 1, "load: state_dtype is 'bfloat16', expected float32: device 'cpu'"),
    ],
)
def test_plan_refuses(capsys, arguments, status, message):
    shown = call(capsys, "plan", "--device", "cpu", *arguments)
    assert (shown.status, shown.out) == (status, "")
    assert shown.err.startswith(f"penstock: error: {message}") and shown.err.count("\n") == 1


def test_plan_refuses_the_reference_device(capsys, monkeypatch):
    monkeypatch.setenv("PENSTOCK_DEVICE", "reference")
    shown = call(capsys, "plan")
    assert shown.err == "penstock: error: plan: device is 'reference', expected cpu or cuda\n"


def test_plan_help_shows_examples_and_fits_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = call(capsys, "plan", "--help")
    assert shown.status == 0 and "penstock plan ./my-model --device-memory 6G" in shown.out
    assert max(map(len, shown.out.splitlines())) <= 80
