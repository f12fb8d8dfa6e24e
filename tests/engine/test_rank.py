"""What ranks agree on before they run a model, and what is refused before there are any."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch.distributed", reason="the extra `distributed` is not installed")
pytest.importorskip("msgspec", reason="the extra `distributed` is not installed")

import torch

from penstock.engine import rank as ranks
from penstock.engine.rank import Rank, rank_backend, rank_options, warn_of_cores
from penstock.errors import BackendError, CheckpointError, EngineDied, InvalidArgument
from penstock.models.split import Mesh
from penstock.parallel.group import RankGroup, torch_distributed
from penstock.parallel.launch import RankOptions, Torchrun, join_torchrun
from tests.parallel.threads import Threads


def engine(**changes: Any) -> Any:
    """What `Rank.agree` looks at."""
    given = {"activations": "int8", "dtype": "float32", "state_dtype": "float32", "deterministic": False}
    given |= {"fingerprint": "a" * 40, "context": 100, "answers": 8, "device": "cpu"} | changes
    return SimpleNamespace(
        device=SimpleNamespace(name=given["device"]),
        model=SimpleNamespace(fingerprint=given["fingerprint"]),
        max_context=given["context"],
        most_sequences=given["answers"],
        programs=SimpleNamespace(max_context=given["context"], most_of_ranks=256),
        **{name: given[name] for name in ("activations", "dtype", "state_dtype", "deterministic")},
    )


def agreed(tmp_path: Any, work: Callable[[Rank], Any]) -> list[Any]:
    """What two ranks get out of this, each in a thread with a group of its own; errors as they are."""

    def one(number: int) -> Any:
        store = torch_distributed().FileStore(str(tmp_path / "store"), 2)
        group = RankGroup(store, number, 2, address="127.0.0.1")
        try:
            return work(Rank(group, Mesh(number, 2), {}, 2, None))
        except Exception as error:
            return error
        finally:
            group.close()

    return Threads(2).run(one)


def test_the_least_context_and_sequences_of_all_ranks_count(tmp_path):
    engines = [engine(context=100, answers=5), engine(context=90, answers=8)]
    assert agreed(tmp_path, lambda rank: rank.agree(engines[rank.mesh.rank])) == [None, None]
    assert [(one.max_context, one.programs.max_context, one.programs.most_of_ranks) for one in engines] == [
        (90, 90, 5),
        (90, 90, 5),
    ]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"fingerprint": "b" * 40}, f"rank 1: weights differ from rank 0's: {'b' * 16}, expected {'a' * 16}"),
        ({"activations": "float32"}, "rank 1: settings differ from rank 0's: .*float32.*, expected .*int8"),
        ({"device": "cuda"}, "rank 1: settings differ from rank 0's: .*'cuda'.*, expected .*'cpu'"),
    ],
)
def test_ranks_with_other_files_or_settings_are_refused_on_all(tmp_path, other, message):
    found = agreed(tmp_path, lambda rank: rank.agree(engine(**(other if rank.mesh.rank else {}))))
    for error in found:
        with pytest.raises(InvalidArgument, match=f"^{message}"):
            raise error


def test_a_rank_of_another_version_is_refused_on_all(tmp_path, monkeypatch):
    class Other(Rank):
        def _exchange(self, own):
            return super()._exchange(own | ({"penstock": "0.0.1"} if self.mesh.rank else {}))

    monkeypatch.setattr(sys.modules[__name__], "Rank", Other)
    for error in agreed(tmp_path, lambda rank: rank.agree(engine())):
        with pytest.raises(InvalidArgument, match=r"^rank 1: penstock differ from rank 0's: 0\.0\.1, expected"):
            raise error


@pytest.mark.parametrize(
    ("failure", "kind", "message"),
    [(CheckpointError("x.safetensors: it is gone"), CheckpointError, "x.safetensors: it is gone"),
     (ZeroDivisionError("division by zero"), EngineDied, "ZeroDivisionError: division by zero")],
)  # fmt: skip
def test_a_load_that_fails_on_one_rank_fails_on_all_with_its_cause(tmp_path, failure, kind, message):
    def work(rank: Rank) -> None:
        if rank.mesh.rank == 1:
            rank.failed(failure)
            raise failure
        rank.agree(engine())

    first, second = agreed(tmp_path, work)
    assert second is failure
    with pytest.raises(kind, match=f"^rank 1: {message}$"):
        raise first


def test_more_ranks_than_gpus_are_refused_but_by_gloo(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [rank_backend("cuda", size) for size in (1, 2)] == ["nccl", "nccl"]
    assert rank_backend("cpu", 9) == "gloo"
    with pytest.raises(BackendError, match=r"3 ranks on this machine, expected at most 2 \(its GPUs\)"):
        rank_backend("cuda", 3)
    monkeypatch.setenv("PENSTOCK_RANK_BACKEND", "gloo")
    assert rank_backend("cuda", 3) == "gloo"


def test_ranks_share_the_cores_and_a_warning_says_if_there_are_fewer(monkeypatch):
    monkeypatch.setattr(ranks, "physical_cores", lambda: 7)
    given = {"device": "cpu", "dtype": "auto", "activations": "auto", "threads": None}
    assert [rank_options(given, size)["threads"] for size in (2, 3, 9)] == [3, 2, 1]
    assert rank_options(given | {"threads": 4}, 2)["threads"] == 2
    said: list[str] = []
    for size, device in ((7, "cpu"), (8, "cpu"), (8, "cuda")):
        warn_of_cores(size, device, said.append)
    assert said == ["tensor_parallel_size: 8 ranks share 7 cores, which makes them slower than one"]


def test_a_rendezvous_that_cannot_be_reached_is_named(monkeypatch):
    from penstock.parallel import launch

    monkeypatch.setattr(launch, "_JOIN_SECONDS", 0.2)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(EngineDied, match=r"^rank 1: 127\.0\.0\.1:1 cannot be reached: "):
        join_torchrun(Torchrun(1, 2, 1, 2), RankOptions())


def test_the_extra_is_named_where_torch_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    with pytest.raises(
        BackendError, match=r"torch is not installed, expected it \(pip install 'penstock\[distributed\]'"
    ):
        torch_distributed()
