"""Recording which experts tokens choose: what is noted, what the model does meanwhile and afterwards, files."""

import dataclasses
import io
import json
import threading
import zipfile

import numpy as np
import pytest

import penstock
from penstock.analysis.expert_routes import load_expert_routes, record
from penstock.errors import CheckpointError, InvalidArgument
from penstock.models import layers
from tests.models.common import dense_config, moe_config, some_tokens, write_model

CONFIG = moe_config(mlp_only_layers=[1], intermediate_size=160)  # of four layers the second has no experts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("mixed"), CONFIG)


@pytest.fixture(scope="module")
def llm(folder):
    return penstock.load(folder, device="cpu", activations="float32")


def defined(folder, tokens, monkeypatch):
    """The choices as the definitions of the ops make them, a layer after the other, int [T, L, k]."""
    noted = []
    plain = layers.experts

    def noting(step, x, ids, *args, **kwargs):
        noted.append(ids.copy())
        return plain(step, x, ids, *args, **kwargs)

    llm = penstock.load(folder, device="reference", activations="float32")
    with monkeypatch.context() as patch:
        patch.setattr(f"{llm.engine.model.family.forward.__module__}.experts", noting)
        llm.logits(tokens)
    return np.stack(noted, axis=1)


def test_record_notes_what_every_token_chose(folder, llm, monkeypatch):
    prompt = some_tokens(40)
    routes = record(llm, prompt, max_tokens=12, temperature=1.0, seed=3)
    assert routes.tokens[:40].tolist() == prompt
    assert routes.decode.tolist() == [False] * 40 + [True] * (len(routes.tokens) - 40)
    assert (routes.experts, routes.layers, routes.ids.dtype) == (7, (0, 2, 3), np.int32)
    want = defined(folder, routes.tokens.tolist(), monkeypatch)
    np.testing.assert_array_equal(np.sort(routes.ids), np.sort(want))  # a fused router gives them in another order


def test_record_gives_the_answer_of_generate(llm):
    options = {"max_tokens": 20, "temperature": 1.2, "top_k": 50, "seed": 7}
    want = llm.generate(some_tokens(9), **options)
    routes = record(llm, some_tokens(9), **options)
    assert routes.tokens.tolist() == [*some_tokens(9), *want.tokens[:-1]]
    assert "".join(routes.texts) == llm.tokenizer.decode(routes.tokens.tolist())


def test_record_notes_every_piece_of_a_long_prompt(llm):
    tokens, pieces = some_tokens(600), []
    whole = record(llm, tokens, max_tokens=3, progress=pieces.append)
    assert pieces == [256, 256, 88, 1, 1]
    assert whole.ids.shape == (602, 3, 3) and whole.ids.min() >= 0
    np.testing.assert_array_equal(whole.ids[:256], record(llm, tokens[:256], max_tokens=1).ids)


def test_record_of_one_token_has_no_decode_steps(llm):
    routes = record(llm, some_tokens(5), max_tokens=1)
    assert routes.ids.shape[0] == 5 and not routes.decode.any()


def test_record_counts_and_bytes(llm):
    routes = record(llm, some_tokens(30), max_tokens=2)
    want = [[int((routes.ids[:, layer] == expert).sum()) for expert in range(7)] for layer in range(3)]
    assert routes.counts().tolist() == want
    assert routes.counts().sum() == 31 * 3 * 3
    assert routes.expert_bytes == (3 * 32 * 64 * 2,) * 3  # gate, up, down in bfloat16
    assert routes.nbytes == 7 * 3 * 3 * 32 * 64 * 2


def test_record_leaves_the_model_as_it_was(llm, monkeypatch):
    before = llm.generate(some_tokens(6), max_tokens=8).tokens
    record(llm, some_tokens(6), max_tokens=8)
    assert llm.engine.programs.wrap is None
    copied = []
    monkeypatch.setattr(type(llm.engine.device), "copy_all", lambda self, into, arrays: copied.append(into))
    used = llm.engine.caches.pools[None].used
    decoded = llm.engine.open()
    llm.engine.prefill(decoded, some_tokens(6))
    llm.engine.decode([decoded], [1])
    llm.engine.close(decoded)
    assert copied == [] and llm.engine.caches.pools[None].used == used
    monkeypatch.undo()
    assert llm.generate(some_tokens(6), max_tokens=8).tokens == before


def test_record_that_fails_leaves_the_model_as_it_was(llm):
    def fail(count):
        raise RuntimeError("enough")

    before = llm.generate(some_tokens(6), max_tokens=8).tokens
    with pytest.raises(RuntimeError, match="enough"):
        record(llm, some_tokens(6), max_tokens=8, progress=fail)
    assert llm.engine.programs.wrap is None
    assert llm.engine.caches.pools[None].used == 0
    assert llm.generate(some_tokens(6), max_tokens=8).tokens == before


def test_record_keeps_another_wrap(llm):
    seen = []

    def other(node, kernel):
        seen.append(node.op.name)
        return kernel

    llm.engine.programs.wrap = other
    try:
        routes = record(llm, some_tokens(6), max_tokens=2)
        assert llm.engine.programs.wrap is other
    finally:
        llm.engine.programs.wrap = None
    assert "moe_forward" in seen and "rms_norm" in seen
    np.testing.assert_array_equal(routes.ids, record(llm, some_tokens(6), max_tokens=2).ids)


def test_record_keeps_other_threads_waiting(llm):
    """A step of another thread would be noted in the device of this one's."""
    taken = []

    def try_it(count):
        def take():
            taken.append(llm.engine.lock.acquire(blocking=False))
            if taken[-1]:
                llm.engine.lock.release()

        other = threading.Thread(target=take)
        other.start()
        other.join()

    record(llm, some_tokens(30), max_tokens=3, progress=try_it)
    assert taken == [False] * 3


def test_record_refuses_what_has_no_routes(folder, tmp_path):
    reference = penstock.load(folder, device="reference")
    with pytest.raises(InvalidArgument, match=r"^routes: device is 'reference', expected cpu or cuda"):
        record(reference, [1], max_tokens=1)
    dense = penstock.load(write_model(tmp_path / "dense", dense_config()), device="cpu")
    with pytest.raises(InvalidArgument, match=r"^routes: qwen3_5_text has no experts, expected a model with experts"):
        record(dense, [1], max_tokens=1)
    assert dense.engine.programs is not None and dense.engine.programs.wrap is None


# -- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def routes(llm):
    return record(llm, some_tokens(20), max_tokens=5, name="mixed")


def test_routes_come_back_from_a_file(routes, tmp_path):
    routes.save(tmp_path / "r.npz")
    back = load_expert_routes(tmp_path / "r.npz")
    for field in dataclasses.fields(routes):
        np.testing.assert_array_equal(getattr(back, field.name), getattr(routes, field.name), field.name)
    assert [path.name for path in tmp_path.iterdir()] == ["r.npz"]
    with np.load(tmp_path / "r.npz") as plain:
        np.testing.assert_array_equal(plain["ids"], routes.ids)


def test_routes_are_not_written_by_halves(routes, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    routes.save(tmp_path / "r.npz")
    before = (tmp_path / "r.npz").read_bytes()
    monkeypatch.setattr(np, "savez_compressed", fail)
    with pytest.raises(InvalidArgument, match=r"r\.npz: cannot be written: No space left on device$"):
        routes.save(tmp_path / "r.npz")
    assert (tmp_path / "r.npz").read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def changed(routes, path, about, arrays):
    """A file in which something is other than it was written; None leaves an array out."""
    routes.save(path)
    with np.load(path) as plain:
        found = {name: plain[name] for name in plain.files}
    if about is not None:
        found["about"] = np.frombuffer(json.dumps(json.loads(found["about"].tobytes()) | about).encode(), np.uint8)
    np.savez(path, **{name: array for name, array in (found | arrays).items() if array is not None})
    return path


@pytest.mark.parametrize(
    ("about", "arrays", "message"),
    [
        ({"format": "other"}, {}, "is 'other' version 1, expected 'penstock-routes' version 1"),
        ({"version": 2}, {}, "is 'penstock-routes' version 2, expected"),
        ({"experts": 3}, {}, "do not fit together"),
        ({"layers": [0]}, {}, "do not fit together"),
        ({"layers": "abc"}, {}, "do not fit together"),
        ({"expert_bytes": [1, 2, -3]}, {}, "do not fit together"),
        ({"texts": ["a"]}, {}, "do not fit together"),
        ({"model": 3}, {}, "do not fit together"),
        (None, {"ids": None}, "is no recorded routing: "),
        (None, {"ids": np.zeros((24, 3, 3), np.int64)}, "do not fit together"),
        (None, {"ids": np.full((24, 3, 3), -2, np.int32)}, "do not fit together"),
        (None, {"ids": np.zeros((24, 3), np.int32)}, "do not fit together"),
        (None, {"ids": np.zeros((0, 3, 3), np.int32)}, "do not fit together"),
        (None, {"decode": np.zeros(5, bool)}, "do not fit together"),
        (None, {"ids": np.array([{}], object)}, "is no recorded routing: "),
        (None, {"about": np.frombuffer(b"{", np.uint8)}, "is no recorded routing: "),
        (None, {"about": np.frombuffer(b"[1]", np.uint8)}, "is no recorded routing: "),
        (None, {"about": np.frombuffer(b"[" * 100_000, np.uint8)}, "is no recorded routing: "),
    ],
)
def test_load_routes_refuses_what_does_not_fit(about, arrays, message, routes, tmp_path):
    with pytest.raises(CheckpointError) as caught:
        load_expert_routes(changed(routes, tmp_path / "r.npz", about, arrays))
    assert str(caught.value).startswith(f"{tmp_path / 'r.npz'}: ") and message in str(caught.value)


def test_load_routes_refuses_files_of_other_kinds(routes, tmp_path):
    path = tmp_path / "r.npz"
    for content in (b"", b"hello", b"PK\x03\x04"):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="is no recorded routing"):
            load_expert_routes(path)
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        load_expert_routes(tmp_path / "none.npz")
    with pytest.raises(CheckpointError, match="cannot be read: Is a directory"):
        load_expert_routes(tmp_path)
    routes.save(path)
    whole = path.read_bytes()
    for size in range(0, len(whole), 97):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            load_expert_routes(path)


@pytest.mark.parametrize("offset, value", [(6, 1), (6, 0x40), (8, 99)], ids=["encrypted", "patched", "other method"])
def test_load_routes_refuses_archives_that_zipfile_cannot_read(offset, value, routes, tmp_path):
    path = tmp_path / "r.npz"
    routes.save(path)
    whole = bytearray(path.read_bytes())
    for magic, more in ((b"PK\x03\x04", 0), (b"PK\x01\x02", 2)):
        whole[whole.index(magic) + offset + more] = value
    path.write_bytes(whole)
    with pytest.raises(CheckpointError, match="is no recorded routing"):
        load_expert_routes(path)


def test_load_routes_refuses_bytes_that_cannot_be_unpacked(routes, tmp_path):
    path = tmp_path / "r.npz"
    routes.save(path)
    whole = bytearray(path.read_bytes())
    start = whole.index(b"tokens.npy") + len("tokens.npy")
    whole[start : start + 40] = b"\xff" * 40
    path.write_bytes(whole)
    with pytest.raises(CheckpointError, match="is no recorded routing"):
        load_expert_routes(path)


def test_load_routes_does_not_unpack_endless_arrays(tmp_path, monkeypatch):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<i4", "fortran_order": False, "shape": (1 << 50, 1, 1)})
    with zipfile.ZipFile(tmp_path / "r.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tokens.npy", header.getvalue())
    with pytest.raises(CheckpointError, match="is no recorded routing"):
        load_expert_routes(tmp_path / "r.npz")
    with zipfile.ZipFile(tmp_path / "r.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tokens.npy", bytes(1 << 20))
    monkeypatch.setattr("penstock.analysis.expert_routes._LIMIT", 1 << 19)
    with pytest.raises(CheckpointError, match="unpacks to 1048576 bytes, expected at most 524288"):
        load_expert_routes(tmp_path / "r.npz")
