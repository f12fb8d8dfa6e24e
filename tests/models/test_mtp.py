"""Heads that draft: against transformers' modules, the trained ones against their cards, kernels, files, refusals."""

import functools
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import penstock
from penstock import models
from penstock.analysis.survey import survey
from penstock.analysis.verify import check_model
from penstock.api import load_random
from penstock.cli._output import progress_bar
from penstock.convert.run import Options, convert
from penstock.errors import CheckpointError, InvalidArgument
from penstock.models import mtp
from penstock.models.family import AnyFamily
from penstock.models.layers import ExpertStack
from penstock.models.source import CheckpointSource
from penstock.models.split import Mesh, SplitSource
from penstock.quant import QuantizedTensor, dequantize
from penstock.weights.checkpoint import Checkpoint
from penstock.weights.resolve import ANY, resolve_model
from tests.models.common import VOCAB, dense_config, error, moe_config, next_config, some_tokens, tensors, write_model
from tests.models.heads import Drafter, Made, head_inputs, make_head
from tests.models.test_deepseek_v3 import CONFIGS as DEEPSEEK
from tests.models.test_deepseek_v3 import config_of as deepseek
from tests.models.test_llama import CONFIGS as LLAMA
from tests.models.test_split import CASES as SPLIT
from tests.models.test_split import Drawn
from tests.parallel.threads import Threads

DEMO = Path(penstock.__file__).parent / "demo" / "model"
TRAINED = "TRAINED_MODELS"  # a folder with trained trunks, and their heads in folders that end with -mtp
SHORT = 5e-6
ONE = {"num_hidden_layers": 1, "full_attention_interval": 1}
# the config of a trunk, and of a model whose single layer is that of its head
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "moe": (moe_config(mtp_num_hidden_layers=1), moe_config(**ONE)),
    "dense": (dense_config(mtp_num_hidden_layers=1), dense_config(**ONE)),
    "next": (next_config(), next_config(**ONE)),
    "deepseek": (deepseek(num_nextn_predict_layers=1), deepseek(num_hidden_layers=1, first_k_dense_replace=0)),
    "flash": (
        DEEPSEEK["flash"] | {"num_nextn_predict_layers": 1},
        {key: value for key, value in DEEPSEEK["flash"].items() if key != "mlp_layer_types"}
        | {"num_hidden_layers": 1, "first_k_dense_replace": 0, "mlp_layer_types": ["sparse"]},
    ),
    "glm": (
        LLAMA["glm"] | {"num_nextn_predict_layers": 1},
        LLAMA["glm"] | {"num_hidden_layers": 1, "first_k_dense_replace": 0},
    ),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    @functools.cache
    def head(name: str) -> Made:
        return make_head(tmp_path_factory.mktemp(name), *FAMILIES[name])

    return head


def rows(count: int, dim: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, dim)).astype(np.float32)


def random_head(name: str, device: str, **options: Any) -> tuple[mtp.Head, AnyFamily]:
    config = FAMILIES[name][0] | {"quantization": {"bits": 4, "group_size": 32}}
    if name == "next":
        config["mtp_num_hidden_layers"] = 1
    model = load_random(config, device=device, activations="float32", max_context=256, **options).engine.model
    assert model.head is not None
    return model.head, model.family


# -- what a head computes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_head_of_released_files_matches_transformers_layer(name: str, made: Callable[[str], Made]) -> None:
    case = made(name)
    head, family = case.read()
    stored = load_file(case.folder / "model.safetensors")
    tokens, hidden = some_tokens(40, seed=3), rows(40, head.config.dim)
    x = head_inputs(stored, case.embed, tokens, hidden, head.config.norm_eps)
    want = case.oracle(x)
    for device in ("reference", "cpu"):
        draft = Drafter(head, family, device)
        _, first = draft({0: (0, tokens[:25])}, hidden[:25])
        _, rest = draft({0: (25, tokens[25:])}, hidden[25:])
        assert error(np.concatenate([first, rest]), want) <= SHORT


@pytest.mark.parametrize("name", FAMILIES)
def test_head_on_the_cpu_matches_the_definition_in_ragged_steps(name: str) -> None:
    reference = Drafter(*random_head(name, "reference"), "reference", sequences=3)
    head = random_head(name, "cpu")
    fused, plain = Drafter(*head, "cpu", sequences=3), Drafter(*head, "cpu", sequences=3, fused=False)
    dim, tokens = reference.head.config.dim, some_tokens(60, seed=4)
    steps = [
        {2: (0, tokens[:17]), 0: (0, tokens[17:18])},
        {0: (1, tokens[18:21]), 1: (0, tokens[30:41]), 2: (17, tokens[21:22])},
        {1: (11, tokens[41:42]), 0: (4, tokens[42:43]), 2: (18, tokens[43:44])},
    ]
    for number, runs in enumerate(steps):
        hidden = rows(sum(len(run) for _, run in runs.values()), dim, number)
        want = reference(runs, hidden)
        for draft in (fused, plain):
            for got, expected in zip(draft(runs, hidden), want, strict=True):
                assert error(got, expected) <= 1e-5


def test_state_after_the_norm_is_what_the_next_draft_gets() -> None:
    """Norm weights of 0.2 to 3: the state before the norm, which has no such scale, drafts other tokens."""
    head, family = random_head("moe", "cpu")
    spread = np.random.default_rng(2).uniform(0.2, 3.0, head.config.dim).astype(np.float32)
    head = replace(head, weights=replace(head.weights, norm=spread))
    tokens, hidden = some_tokens(48), rows(48, head.config.dim)
    draft = Drafter(head, family, "cpu")
    after, logits = draft({0: (0, tokens)}, hidden)
    np.testing.assert_allclose(np.mean((after / spread) ** 2, axis=1), 1, rtol=1e-3)  # it is after the norm
    table = dequantize(head.weights.head) if isinstance(head.weights.head, QuantizedTensor) else head.weights.head
    assert error(logits, after @ table.T) <= 1e-5
    first = logits.argmax(axis=1)
    second = [
        Drafter(head, family, "cpu")({0: (1, first)}, state)[1].argmax(axis=1) for state in (after, after / spread)
    ]
    assert np.mean(second[0] != second[1]) > 0.3


def test_fewer_rows_draft_the_best_of_their_tokens() -> None:
    head, family = random_head("moe", "cpu")
    tokens, hidden = some_tokens(9), rows(9, head.config.dim)
    h, every = Drafter(head, family, "cpu")({0: (0, tokens)}, hidden)
    few = mtp.with_rows(head, 100)
    same, some = Drafter(few, family, "cpu")({0: (0, tokens)}, hidden)
    assert few.rows == 100 and head.rows == VOCAB and mtp.with_rows(head, VOCAB) is head
    np.testing.assert_array_equal(same, h)
    np.testing.assert_array_equal(some, every[:, :100])
    for count in (0, VOCAB + 1):
        with pytest.raises(InvalidArgument, match=f"rows is {count}, expected 1 to {VOCAB}"):
            mtp.with_rows(head, count)


@pytest.mark.parametrize("name", ["qwen", "deepseek", "glm"])
@pytest.mark.parametrize("experts_split", [False, True])
def test_the_parts_of_a_head_on_all_ranks_are_the_whole(name: str, experts_split: bool) -> None:
    raw = SPLIT[name][0]
    family = models.family_of(raw)
    config, source = family.read_config(raw), Drawn()
    tables = [source.weight(path, config.vocab_size, config.dim) for path in mtp.TABLES]
    tokens, hidden = some_tokens(7), rows(7, config.dim)
    want = Drafter(mtp.read(source, family, config, *tables), family, "reference")({0: (0, tokens)}, hidden)

    def work(rank: int) -> tuple[np.ndarray, ...]:
        mesh = Mesh(rank, 2, experts_split)
        assert family.split is not None
        split = family.split(config, mesh, 32)
        part = SplitSource(source, split, mesh)
        first, stop = mesh.share(config.vocab_size)
        own = [part.weight(path, stop - first, config.dim) for path in mtp.TABLES]
        head = mtp.read(part, family, split.config, *own)
        if not experts_split:
            head = models.replaced(head, ExpertStack, lambda one: replace(one, slot_of=mesh.slot_of(config.experts)))
        return Drafter(head, family, "reference", mesh=mesh)({0: (0, tokens)}, hidden)

    for found in Threads(2).run(work):
        for got, expected in zip(found, want, strict=True):
            assert error(got, expected) <= SHORT


# -- trained heads ---------------------------------------------------------------------------------------------------


def released(checkpoint: Checkpoint, start: str) -> dict[str, np.ndarray]:
    """Dequantized tensors behind `start` in the names and the form of Hugging Face, float32."""
    found: dict[str, np.ndarray] = {}
    for name in checkpoint.names:
        if not name.startswith(start) or name.endswith((".scales", ".biases")):
            continue
        path = name.removesuffix(".weight")
        weight = checkpoint.tensor(path)
        array = dequantize(weight) if isinstance(weight, QuantizedTensor) else weight.astype(np.float32)
        offset = path.endswith(("layernorm", "q_norm", "k_norm")) or path.removeprefix(start) in (
            "norm",
            "pre_fc_norm_embedding",
            "pre_fc_norm_hidden",
        )
        found[name.removeprefix(start)] = array - 1 if offset else array
    for name in [name for name in found if name.endswith("switch_mlp.gate_proj.weight")]:
        base = name.removesuffix("switch_mlp.gate_proj.weight")
        parts = {part: found.pop(f"{base}switch_mlp.{part}_proj.weight") for part in ("gate", "up", "down")}
        found[f"{base}experts.gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], axis=1)
        found[f"{base}experts.down_proj"] = parts["down"]
    return {name: array.swapaxes(1, 2) if name.endswith("conv1d.weight") else array for name, array in found.items()}


def test_demo_head_matches_transformers_modules() -> None:
    """Trunk and head dequantized: hidden states, drafts, and how often they are what the trunk says."""
    torch = pytest.importorskip("torch")
    from transformers import Qwen3_5MoeTextConfig, Qwen3_5MoeTextModel

    llm = penstock.load(device="cpu", activations="float32")
    model, checkpoint = llm.engine.model, Checkpoint.open(DEMO)
    text = checkpoint.config["text_config"]
    tokens = llm.tokenizer.encode("Once upon a time there was a king who had a daughter")
    tokens = [*tokens, *llm.generate(tokens, max_tokens=40).tokens]

    def states(start: str, config: dict[str, Any], x: np.ndarray) -> np.ndarray:
        own = Qwen3_5MoeTextConfig(**config, experts_implementation="eager")
        built = Qwen3_5MoeTextModel(own).eval().float()
        weights = {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in released(checkpoint, start).items()}
        missing, _ = built.load_state_dict(weights, strict=False)
        assert set(missing) <= {"embed_tokens.weight"}
        with torch.no_grad():
            return built(inputs_embeds=torch.from_numpy(x).float()[None]).last_hidden_state[0].numpy()

    embed, lm_head = (
        dequantize(checkpoint.tensor(f"language_model.{path}")) for path in ("model.embed_tokens", "lm_head")
    )
    trunk = states("language_model.model.", text, embed[tokens])
    assert error(trunk @ lm_head.T, llm.logits(tokens)) <= 1e-5
    parts = {f"mtp.{name}": array for name, array in released(checkpoint, "language_model.mtp.").items()}
    x = head_inputs(parts, embed, tokens[1:], trunk[:-1], text["rms_norm_eps"])
    one = text | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    want = states("language_model.mtp.", one, x)
    assert model.head is not None
    h, logits = Drafter(model.head, model.family, "cpu")({0: (0, tokens[1:])}, trunk[:-1])
    assert error(h, want) <= 1e-5 and error(logits, want @ lm_head.T) <= 1e-5
    right = np.mean(logits[len(tokens) - 42 : -1].argmax(axis=1) == tokens[-40:])
    assert right >= 0.5  # of the trunk's own greedy text; measured over many texts it is about 0.75


@pytest.mark.slow
@pytest.mark.skipif(TRAINED not in os.environ, reason=f"{TRAINED} names no folder with trained models")
@pytest.mark.parametrize("name", ["tiny-qwen3.5-moe", "tiny-deepseek-v3"])
def test_trained_heads_do_what_their_cards_say(name: str) -> None:
    folder = Path(os.environ[TRAINED])
    checkpoint = Checkpoint.open(folder / name)
    family = models.family_of(checkpoint.config)
    config = family.read_config(checkpoint.config)
    llm = penstock.load(folder / name, device="cpu", activations="float32")
    weights = llm.engine.model.weights
    stored = CheckpointSource(checkpoint, *family.names(checkpoint, config))
    files = mtp.open_drafter(folder / f"{name}-mtp", family, config, stored)
    assert files.tables == ()
    head = files.read(family, config, weights.embed, weights.head)
    assert files.source.unused() == []
    compared = 0
    for case in json.loads((folder / f"{name}-mtp" / "mtp-card.json").read_text())["oracle"]["cases"]:
        tokens = case["prompt_ids"] + case["greedy_ids"]
        hidden: list[np.ndarray] = []
        request = penstock.engine.request.reading_request(llm.engine.limits, tokens)
        llm.scheduler.submit(request, rows=hidden.append, hidden=True).result()
        trunk = np.concatenate(hidden)
        draft = Drafter(head, family, "cpu")
        h, logits = draft({0: (0, tokens[1:])}, trunk[:-1])
        np.testing.assert_allclose(trunk[31, :8], case["trunk_h"], atol=1e-4, rtol=0)
        np.testing.assert_allclose(h[31, :8], case["head_h"], atol=1e-4, rtol=0)
        sure = np.array(case["first_draft_gap"]) > 1e-3
        np.testing.assert_array_equal(logits.argmax(axis=1)[sure], np.array(case["first_draft"])[sure])
        for chain in case["chains"]:
            at, state, token = chain["slot"], h[chain["slot"]], int(logits[chain["slot"]].argmax())
            kept = [array.copy() for array in draft.cache]
            for number, (expected, gap) in enumerate(zip(chain["drafts"], chain["gaps"], strict=True)):
                if number:
                    (state,), (row,) = draft({0: (at + number, [token])}, state[None])
                    token = int(row.argmax())
                if gap <= 1e-3:
                    break
                assert token == expected
                compared += 1
            for array, before in zip(draft.cache, kept, strict=True):
                array[...] = before
    assert compared > 1000


# -- files -----------------------------------------------------------------------------------------------------------


def whole(made: Made, folder: Path, config: dict[str, Any]) -> Path:
    """A trunk of the family and the head beside it, as released."""
    write_model(folder, config, {k: v for k, v in tensors(config).items() if not k.startswith("mtp.")})
    shutil.copyfile(made.folder / "model.safetensors", folder / "model-mtp.safetensors")
    return folder


def test_head_beside_its_trunk_is_loaded(made: Callable[[str], Made], tmp_path: Path) -> None:
    folder = whole(made("moe"), tmp_path / "model", FAMILIES["moe"][0])
    notices: list[str] = []
    model = penstock.load(folder, device="cpu", notify=notices.append).engine.model
    assert model.head is not None and not any("mtp" in notice for notice in notices), notices
    assert model.head.weights.embed is model.weights.embed and model.head.weights.head is model.weights.head
    want, _ = made("moe").read()
    np.testing.assert_array_equal(model.head.weights.hidden_norm, want.weights.hidden_norm)
    streamed = penstock.load(folder, device="cpu", expert_cache="50%").engine.model
    assert streamed.experts is not None and streamed.head is not None
    assert streamed.head.weights.layer.mlp.routed.slot_of is None  # its experts are all there


def test_head_of_a_drafter_folder_is_loaded_for_its_trunk(tmp_path: Path) -> None:
    convert(DEMO, tmp_path / "drafter", Options(mtp=True))
    shutil.copytree(DEMO, tmp_path / "trunk", ignore=shutil.ignore_patterns("mtp.safetensors"))
    assert penstock.load(tmp_path / "trunk", device="cpu").engine.model.head is None
    found = penstock.load(tmp_path / "trunk", device="cpu", draft_model=tmp_path / "drafter").engine.model
    own = penstock.load(device="cpu").engine.model
    assert found.head is not None and own.head is not None and found.nbytes == own.nbytes
    for got, want in zip(walk(found.head), walk(own.head), strict=True):
        np.testing.assert_array_equal(got, want)
    (tmp_path / "drafter" / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError):
        assert found.check is not None
        found.check()
    for options, message in (({"draft_model": 3}, "draft_model is 3"), ({"speculate": "off"}, "speculate is 'off'")):
        with pytest.raises(InvalidArgument, match=message):
            penstock.load(tmp_path / "trunk", device="cpu", **{"draft_model": str(tmp_path / "drafter")} | options)
    with pytest.raises(CheckpointError, match="model.safetensors"):
        penstock.load(tmp_path / "trunk", device="cpu", draft_model=tmp_path / "drafter")


def walk(head: mtp.Head) -> list[np.ndarray]:
    """All arrays of a head."""
    found: list[np.ndarray] = []
    models.replaced(head.weights, np.ndarray, found.append)
    models.replaced(head.weights, QuantizedTensor, lambda weight: found.extend(weight.arrays))
    return found


def test_head_that_is_cut_short_is_left_out_with_a_remark(made: Callable[[str], Made], tmp_path: Path) -> None:
    folder = whole(made("moe"), tmp_path / "model", FAMILIES["moe"][0])
    stored = load_file(folder / "model-mtp.safetensors")
    lost = "mtp.layers.0.self_attn.k_proj.weight"
    save_file({k: v for k, v in stored.items() if k != lost}, folder / "model-mtp.safetensors")
    notices: list[str] = []
    assert penstock.load(folder, device="cpu", notify=notices.append).engine.model.head is None
    (remark,) = [notice for notice in notices if "head that drafts is not used" in notice]
    assert "mtp.layers.0.self_attn.k_proj" in remark
    assert any(f"{len(stored)} tensors of model.visual, mtp are skipped" in notice for notice in notices)


@pytest.mark.parametrize("lost", ["mtp.norm.weight", "mtp.fc.weight", "mtp.layers.0.mlp.gate.weight"])
def test_head_with_numbers_that_are_not_finite_is_left_out_with_a_remark(
    lost: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    folder = whole(made("moe"), tmp_path / "model", FAMILIES["moe"][0])
    stored = load_file(folder / "model-mtp.safetensors")
    stored[lost].reshape(-1)[3] = np.nan
    save_file(stored, folder / "model-mtp.safetensors")
    notices: list[str] = []
    assert penstock.load(folder, device="cpu", notify=notices.append).engine.model.head is None
    (remark,) = [notice for notice in notices if "head that drafts is not used" in notice]
    assert f"{lost} has numbers that are not finite" in remark
    with pytest.raises(CheckpointError, match=rf"{lost} has numbers that are not finite, expected finite ones"):
        penstock.load(folder, device="cpu", speculate="mtp")


def drafted(folder: Path, config: dict[str, Any]) -> mtp.Head:
    family = models.family_of(config)
    read = family.read_config(config)
    table = np.zeros((read.vocab_size, read.dim), np.float32)
    return mtp.open_drafter(folder, family, read).read(family, read, table, table)


def as_drafter(folder: Path, source: Path, **changes: Any) -> Path:
    """The folder of a head as a drafter's: config.json with the trunk's inside of it, names as mlx-vlm has them."""
    folder.mkdir()
    text = json.loads((source / "config.json").read_text())["text_config"]
    raw = {"model_type": "qwen3_5_mtp", "text_config": text, "block_size": 3, "tie_word_embeddings": False} | changes
    (folder / "config.json").write_text(json.dumps(raw))
    shutil.copyfile(source / "model.safetensors", folder / "model.safetensors")
    return folder


def test_drafter_folder_with_stacked_experts_has_whole_norms_whatever_its_names_begin_with(tmp_path: Path) -> None:
    """As in a file that `--keep-mtp` wrote."""
    convert(DEMO, tmp_path / "bare", Options(mtp=True, dequantize=True))
    bare, config = tmp_path / "bare", json.loads((tmp_path / "bare" / "config.json").read_text())["text_config"]
    shutil.copytree(bare, tmp_path / "mtp.", ignore=shutil.ignore_patterns("*.index.json"))
    stored = load_file(bare / "model.safetensors")
    save_file({f"mtp.{name}": array for name, array in stored.items()}, tmp_path / "mtp." / "model.safetensors")
    found, want = (drafted(tmp_path / name, config).weights for name in ("mtp.", "bare"))
    np.testing.assert_array_equal(found.norm, want.norm)
    np.testing.assert_array_equal(found.layer.mixer.q_norm, want.layer.mixer.q_norm)


def test_drafter_folder_is_read_in_both_layouts(made: Callable[[str], Made], tmp_path: Path) -> None:
    source, config = made("moe").folder, FAMILIES["moe"][0]
    want = drafted(source, config).weights
    released_names = as_drafter(tmp_path / "hf", source)
    bare = as_drafter(tmp_path / "mlx", source)
    stored = {}
    for name, array in load_file(source / "model.safetensors").items():
        name = name.removeprefix("mtp.")
        if name.endswith("experts.gate_up_proj"):
            base = name.replace("experts.gate_up_proj", "switch_mlp")
            gate, up = np.split(array, 2, axis=1)
            stored |= {f"{base}.gate_proj.weight": gate.copy(), f"{base}.up_proj.weight": up.copy()}
        elif name.endswith("experts.down_proj"):
            stored[name.replace("experts.", "switch_mlp.") + ".weight"] = array
        else:
            stored[name] = array.astype(np.float32) + 1 if name.endswith("norm.weight") or "norm_" in name else array
    save_file(stored, bare / "model.safetensors")
    for folder in (released_names, bare):
        found = drafted(folder, config).weights
        np.testing.assert_array_equal(found.norm, want.norm)
        np.testing.assert_array_equal(found.embedding_norm, want.embedding_norm)
        np.testing.assert_array_equal(found.layer.mixer.q_norm, want.layer.mixer.q_norm)
        np.testing.assert_array_equal(found.layer.mlp.routed.down, want.layer.mlp.routed.down)


@pytest.mark.parametrize(
    ("changes", "text", "message"),
    [
        ({}, {"hidden_size": 128}, "text_config: dim is 128, expected 64: it is the head of another model"),
        ({}, {"vocab_size": 99}, f"text_config: vocab_size is 99, expected {VOCAB}: it is the head of another model"),
        ({}, {"num_experts": 8}, "text_config: experts is 8, expected 7: it is the head of another model"),
        ({}, {"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers is 2, expected 1"),
        ({"model_type": "glm4_moe_lite_mtp"}, {}, "is 'glm4_moe_lite_mtp', expected 'qwen3_5_mtp' for this model"),
        ({"model_type": "gemma4_assistant"}, {}, "is 'gemma4_assistant', a drafter that reads keys and values"),
        ({"model_type": "llama"}, {}, "model_type is 'llama', expected a head of qwen3_5_moe_text"),
        ({"text_config": None}, {}, "text_config"),
    ],
)
def test_drafter_of_another_trunk_is_refused_by_name(
    changes: dict[str, Any], text: dict[str, Any], message: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    folder = as_drafter(tmp_path / "drafter", made("moe").folder, **changes)
    raw = json.loads((folder / "config.json").read_text())
    if raw["text_config"] is not None:
        raw["text_config"] |= text
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError) as raised:
        drafted(folder, FAMILIES["moe"][0])
    assert message in str(raised.value)


@pytest.mark.parametrize("name", ["moe", "deepseek"])
def test_head_that_lacks_a_tensor_or_has_another_shape_is_refused_by_name(
    name: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    stored = load_file(made(name).folder / "model.safetensors")
    fc = next(tensor for tensor in stored if tensor.endswith(("fc.weight", "eh_proj.weight")))
    norm = next(tensor for tensor in stored if tensor.endswith(("mtp.norm.weight", "shared_head.norm.weight")))
    for number, (change, message) in enumerate(
        [
            ({norm: None}, f"has no tensor '{norm.removesuffix('.weight')}"),
            (
                {fc: stored[fc][:-1].copy()},
                rf"{fc.removesuffix('.weight')} has shape \(63, 128\), expected \(64, 128\)",
            ),
        ]
    ):
        folder = tmp_path / str(number)
        shutil.copytree(made(name).folder, folder)
        kept = {tensor: array for tensor, array in (stored | change).items() if array is not None}
        save_file(kept, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            drafted(folder, FAMILIES[name][0])


def test_head_in_fp8_is_read_as_its_numbers(made: Callable[[str], Made], tmp_path: Path) -> None:
    folder = tmp_path / "fp8"
    shutil.copytree(made("next").folder, folder)
    stored = load_file(folder / "model.safetensors")
    scaled: dict[str, np.ndarray] = {}
    for tensor, array in stored.items():
        if array.ndim == 2 and ".layers.0." in tensor and ".gate." not in tensor:
            scaled[tensor] = (array.astype(np.float32) * 8).astype(ml_dtypes.float8_e4m3fn)
            blocks = [-(-size // 128) for size in array.shape]
            scaled[f"{tensor}_scale_inv"] = np.full(blocks, 0.125, np.float32)
    save_file(stored | scaled, folder / "model.safetensors")
    config = FAMILIES["next"][0]
    table = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": table}))
    found = drafted(folder, config).weights
    want = scaled["mtp.layers.0.self_attn.o_proj.weight"].astype(np.float32) / 8
    np.testing.assert_array_equal(found.layer.mixer.out.astype(np.float32), want)
    np.testing.assert_array_equal(found.projection, stored["mtp.fc.weight"])
    assert found.layer.mlp.routed.down.shape[0] == 7


def test_head_with_tables_of_its_own_reads_them_only_if_they_differ(
    made: Callable[[str], Made], tmp_path: Path
) -> None:
    case, config = made("deepseek"), FAMILIES["deepseek"][0]
    stored = load_file(case.folder / "model.safetensors")
    start = "model.layers.4."
    other = (case.lm_head.astype(np.float32) + 1).astype(ml_dtypes.bfloat16)
    stored |= {f"{start}embed_tokens.weight": case.embed, f"{start}shared_head.head.weight": other}
    trunk = {"model.embed_tokens.weight": case.embed, "lm_head.weight": case.lm_head}
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(stored | trunk, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    checkpoint = Checkpoint.open(folder)
    family = models.family_of(config)
    read = family.read_config(config)
    source = CheckpointSource(checkpoint, *family.names(checkpoint, read))
    files = mtp.find(checkpoint, family, read, source)
    assert files is not None and files.tables == ("lm_head",)
    head = files.read(family, read, case.embed, case.lm_head)
    np.testing.assert_array_equal(head.weights.head, other)
    assert head.weights.embed is case.embed and source.unused() == []


def test_model_without_a_head_has_none(tmp_path: Path) -> None:
    config = moe_config()
    assert penstock.load(write_model(tmp_path / "model", config), device="cpu").engine.model.head is None
    for raw in (config, deepseek(), LLAMA["moe"]):
        family = models.family_of(raw)
        assert not mtp.declared(family, family.read_config(raw), raw)
    with pytest.raises(CheckpointError, match="a head that drafts for another model, expected a model"):
        models.family_of({"model_type": "qwen3_5_mtp"})


# -- conversion ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_convert_writes_the_head_alone_as_a_drafter(name: str, made: Callable[[str], Made], tmp_path: Path) -> None:
    case, config = made(name), FAMILIES[name][0]
    convert(case.folder, tmp_path / "dense", Options(mtp=True))
    convert(case.folder, tmp_path / "four", Options(mtp=True, quantize=True, q_bits=4, q_group_size=32))
    raw = json.loads((tmp_path / "four" / "config.json").read_text())
    assert raw["model_type"] == {
        "deepseek": "deepseek_v3_mtp",
        "flash": "glm4_moe_lite_mtp",
        "glm": "glm4_moe_mtp",
    }.get(name, "qwen3_5_mtp")
    assert mtp.is_head(raw) and raw["quantization"]["bits"] == 4
    names = set(load_file(tmp_path / "dense" / "model.safetensors"))
    qwen = raw["model_type"] == "qwen3_5_mtp"
    layer = "layers.0." if qwen else "model.mtp_block."
    assert {"fc.weight", "norm.weight"} <= names if qwen else {"model.eh_proj.weight", "model.enorm.weight"} <= names
    assert f"{layer}mlp.{'' if name == 'dense' else 'switch_mlp.'}down_proj.weight" in names
    family = models.family_of(config)
    tokens, hidden = some_tokens(12, seed=8), rows(12, 64)
    want = Drafter(case.read()[0], family, "cpu")({0: (0, tokens)}, hidden)
    rounded = 0.02 if qwen else SHORT  # 1 + norm is a bfloat16 number
    for folder, bound in (("dense", rounded), ("four", 0.5)):
        found = drafted(tmp_path / folder, config)
        found = replace(found, weights=replace(found.weights, embed=case.embed, head=case.lm_head))
        got = Drafter(found, family, "cpu")({0: (0, tokens)}, hidden)
        assert error(got[0], want[0]) <= bound
        assert error(got[1], want[1]) <= bound
    checks, _ = check_model(tmp_path / "four", None, progress_bar)
    assert [check.name for check in checks if check.problems] == []
    seen = survey(resolve_model(str(tmp_path / "four"), ANY))
    assert len(seen.layers) == 1 and seen.by_role().keys() >= {"attention", "norms"}


def test_convert_keeps_a_head_that_is_in_another_form_than_its_trunk(
    made: Callable[[str], Made], tmp_path: Path
) -> None:
    """A trunk that mlx-lm has converted, and the released head beside it."""
    config = FAMILIES["moe"][0]
    folder = whole(made("moe"), tmp_path / "released", config)
    convert(folder, tmp_path / "trunk", Options(quantize=True, q_group_size=32))
    shutil.copyfile(folder / "model-mtp.safetensors", tmp_path / "trunk" / "mtp.safetensors")
    convert(folder, tmp_path / "both", Options(quantize=True, q_group_size=32, keep_mtp=True))
    convert(tmp_path / "trunk", tmp_path / "again", Options(keep_mtp=True))
    heads = [
        penstock.load(tmp_path / name, device="cpu").engine.model.head
        for name in ("released", "trunk", "both", "again")
    ]
    for head in heads[1:]:
        assert head is not None and heads[0] is not None
        for own, stored in (
            (head.weights.norm, heads[0].weights.norm),
            (head.weights.layer.mixer.k_norm, heads[0].weights.layer.mixer.k_norm),
        ):
            np.testing.assert_allclose(own, stored, rtol=2**-8)  # bfloat16, with its 1 added
    kinds = [isinstance(head.weights.projection, QuantizedTensor) for head in heads if head is not None]
    assert kinds == [False, False, True, False]


def test_convert_refuses_a_head_that_is_not_there(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", moe_config())
    with pytest.raises(CheckpointError, match="has no head that drafts"):
        convert(folder, tmp_path / "made", Options(mtp=True))
    for more in ({"keep_mtp": True}, {"calibrate": "text", "quantize": True}):
        with pytest.raises(InvalidArgument, match="mtp is asked for with"):
            Options(mtp=True, **more)
