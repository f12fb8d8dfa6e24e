"""Weights that change, vanish or break under a running server: /health and every request say so, without a path."""

import contextlib
import errno
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import penstock
from penstock.api import LLM
from penstock.cli.main import run
from penstock.engine.protect import _mapped_bytes, protect
from penstock.errors import CheckpointError
from penstock.experts import reader
from penstock.server.errors import without_folders
from penstock.weights.resolve import resolve_model
from tests.server.common import CHAT, PROMPT, Place, error_of, serving, wait_for

LONG = {"messages": PROMPT, "max_tokens": 1900, "temperature": 0, "ignore_eos": True, "stream": True}


@pytest.fixture
def folder(tmp_path) -> Path:
    return Path(shutil.copytree(resolve_model(None).path, tmp_path / "model"))


def load(folder: Path, **options: str) -> LLM:
    return penstock.load(folder, device="cpu", **options)


def shorten(llm: LLM, file: Path, size: int) -> None:
    """Between two steps: a step that reads what is mapped beyond the end of its file ends the process."""
    with llm.engine.lock:
        os.truncate(file, size)


def refused(place: Place, folder: Path, reason: str) -> None:
    """/health and requests are 503 with a reason, and no message has a folder of this machine."""
    health = place.client.get("/health")
    assert health.status_code == 503 and health.json()["status"] == "error"
    tokens = place.client.post("/tokenize", json={"content": "a"})
    for answer in (health, place.chat(), place.chat(stream=True), tokens):
        error = error_of(answer)
        assert answer.status_code == 503 and error["code"] == "weights_damaged"
        assert reason in error["message"] and str(folder.parent) not in answer.text
    assert place.client.get("/metrics").status_code == 200


def test_a_shortened_file_is_stated_without_a_request(folder, caplog):
    file = folder / "model.safetensors"
    data = file.read_bytes()
    llm = load(folder)
    with serving(llm) as place:
        assert place.chat().status_code == 200
        shorten(llm, file, len(data) // 2)
        wait_for(lambda: place.client.get("/health").status_code == 503, 20)
        refused(place, folder, f"model.safetensors: has {len(data) // 2} bytes, expected the {len(data)} it had")
        file.write_bytes(data)
        refused(place, folder, "model.safetensors")  # what was read meanwhile is not known: it stays
    assert str(file) in caplog.text  # the log says which


def test_a_file_shortened_under_an_answer_ends_it(folder):
    llm = load(folder)
    with serving(llm) as place, place.client.stream("POST", CHAT, json=LONG) as response:
        lines = response.iter_lines()
        next(lines)
        shorten(llm, folder / "model.safetensors", 5000)
        *_, last = (line for line in lines if line)
        assert "weights_damaged" in last and str(folder) not in last
        refused(place, folder, "model.safetensors: has 5000 bytes")
        assert place.service.loaded is not None and place.service.loaded[1].metrics().failed == 1


def test_copied_weights_do_not_need_their_file(folder):
    plain, llm = load(folder), load(folder)
    want = plain.logits(range(5, 40))
    assert _mapped_bytes(llm.engine.model.weights, experts=True) > 0
    said = protect(llm.engine)
    assert said.endswith("their files may change") and "were copied into memory" in said
    assert not any(_mapped_bytes(llm.engine.model.weights, experts) for experts in (False, True))
    assert llm.engine.model.from_files == 0
    with serving(llm) as place:
        before = place.chat().json()["choices"]
        os.truncate(folder / "model.safetensors", 0)
        assert place.chat().json()["choices"] == before
        assert place.client.get("/health").status_code == 200
    np.testing.assert_array_equal(llm.logits(range(5, 40)), want)


def test_what_does_not_fit_is_leased_and_a_writer_ends_the_service(folder):
    llm = load(folder)
    model = llm.engine.model
    dense = _mapped_bytes((model.weights, model.head), experts=False)
    said = protect(llm.engine, room=dense)
    assert "were copied into memory" in said and "are mapped, with" in said
    assert _mapped_bytes(llm.engine.model.weights, experts=False) == 0
    if "with a lease" not in said:
        pytest.skip("no leases on this file system")
    file = folder / "model.safetensors"
    with serving(llm) as place, place.client.stream("POST", CHAT, json=LONG) as response:
        lines = response.iter_lines()
        next(lines)
        with pytest.raises(BlockingIOError):
            os.open(file, os.O_WRONLY | os.O_NONBLOCK)

        def shortened() -> bool:
            with contextlib.suppress(BlockingIOError):
                opened = os.open(file, os.O_WRONLY | os.O_NONBLOCK | os.O_TRUNC)
                os.close(opened)
                return True
            return False

        wait_for(shortened, 20)  # between two steps, or when none runs
        assert any("weights_damaged" in line for line in lines)
        refused(place, folder, "model.safetensors: another program opened it for writing")


def test_without_room_and_lease_it_is_said(folder):
    llm = load(folder)
    with (folder / "model.safetensors").open("r+b"):  # who writes already keeps everybody from a lease
        assert "without a lease on their files" in protect(llm.engine, room=0)
    streamed = load(folder, expert_cache="4M")
    assert protect(streamed.engine).endswith("their files may change")  # experts are read, not mapped
    assert streamed.engine.reads_files
    np.testing.assert_array_equal(streamed.logits([1, 2, 3]), llm.logits([1, 2, 3]))


def test_streamed_experts_that_cannot_be_read_are_stated(folder, monkeypatch):
    with serving(load(folder, expert_cache="2M")) as place:
        real = reader.preadv

        def broken(*_: object) -> int:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(reader, "preadv", broken)
        answer = place.chat(max_tokens=64)
        assert answer.status_code == 503 and error_of(answer)["code"] == "weights_damaged"
        monkeypatch.setattr(reader, "preadv", real)
        refused(place, folder, "model.safetensors: cannot be read at byte")


def test_a_damaged_record_is_stated(folder):
    """Bits that rot: nothing says that the file changed but the hashes of its records."""
    assert run(["pack", str(folder)]) == 0
    file, llm = folder / "experts.penstock", load(folder, expert_cache="4M")
    with serving(llm) as place:
        data, status = np.fromfile(file, np.uint8), file.stat()
        for layer in llm.engine.experts.store.layers:
            data[[extent.start for extent in layer.parts[0].extents]] ^= 1
        data.tofile(file)
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        answer = place.chat(max_tokens=64)
        assert answer.status_code == 503 and "is damaged" in error_of(answer)["message"]
        refused(place, folder, "experts.penstock: expert ")


def test_a_router_that_yields_nan_is_an_error_and_no_text(folder):
    llm = load(folder)
    with serving(llm) as place:
        llm.engine.model.weights.layers[1].mlp.router.scales[0] = np.nan
        answer = place.chat(seed=7)
        error = error_of(answer)
        assert answer.status_code == 500 and error["code"] == "NonFiniteLogits"
        assert error["message"].endswith("; first in layer 1, mlp.router (quantized_matmul)")
        assert place.client.get("/health").status_code == 200


@pytest.mark.parametrize(
    "message, shown",
    [
        ("/srv/my models/a.bin: cannot be read at byte 5: Input/output error", "a.bin: cannot be read at byte 5: "),
        ("models/a.bin: has 3 bytes", "a.bin: has 3 bytes"),
        ("/srv/odd: folder/a.bin: was written", "a.bin: was written"),
        ("experts: Input/output error", "experts: Input/output error"),
    ],
)
def test_messages_lose_the_folders_alone(message, shown):
    assert without_folders(CheckpointError(message)).startswith(shown)
