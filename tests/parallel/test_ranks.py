"""A model over processes: the same answers as on one, closed to others, and the end of all when one fails."""

import contextlib
import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch.distributed", reason="the extra `distributed` is not installed")
pytest.importorskip("msgspec", reason="the extra `distributed` is not installed")

import penstock
from penstock.engine.reading import Reading
from penstock.engine.speculate import StepCosts
from penstock.errors import EngineDied, InvalidArgument
from penstock.models import bytes_of
from penstock.parallel.group import RankGroup, torch_distributed
from tests.models.common import error

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks at processes through /proc")

EXACT: dict[str, Any] = {"device": "cpu", "activations": "float32"}
BOUND = 1e-5
PROMPT = "Once upon a time"


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    return False


def wait_for(true, seconds=10.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def processes_of(llm):
    return llm._close.peek()[1].__self__._processes


def pids_of(llm) -> list[int]:
    """Processes of the ranks that this one has started."""
    return processes_of(llm).pids


@pytest.fixture(scope="module")
def one():
    return penstock.load(**EXACT)


@pytest.fixture(scope="module")
def two():
    os.environ["PENSTOCK_API_KEY"] = "never travels"
    try:
        with penstock.load(**EXACT, tensor_parallel_size=2) as llm:
            yield llm
    finally:
        del os.environ["PENSTOCK_API_KEY"]


def test_logits_and_texts_are_those_of_one_rank(one, two):
    ids = np.random.default_rng(3).integers(0, one.config.vocab_size, 300).tolist()
    assert error(two.logits(ids), one.logits(ids)) < BOUND
    assert two.generate(PROMPT, max_tokens=24).text == one.generate(PROMPT, max_tokens=24).text
    prompts = [PROMPT, "The king", "A fox and a hen"]
    options = {"max_tokens": 12, "temperature": 0.9, "top_p": 0.9, "seed": 7}
    texts = [[answer.text for answer in llm.generate(prompts, **options)] for llm in (one, two)]
    assert texts[0] == texts[1]
    np.testing.assert_allclose(two.embed([PROMPT, "A fox"]), one.embed([PROMPT, "A fox"]), atol=BOUND)
    hooks = {"logits_processors": [lambda tokens, logits: logits - tokens[-1] * (np.arange(logits.shape[1]) % 2)]}
    assert two.generate(PROMPT, max_tokens=6, **hooks).text == one.generate(PROMPT, max_tokens=6, **hooks).text
    found = two.generate(PROMPT, max_tokens=3, logprobs=2)
    assert found.logprobs == pytest.approx(one.generate(PROMPT, max_tokens=3, logprobs=2).logprobs, abs=1e-4)


def test_log_probabilities_of_a_prompt_are_those_of_one_rank(one, two):
    ids = np.random.default_rng(4).integers(0, one.config.vocab_size, 300).tolist()
    found = []
    for llm in (one, two):
        scheduler = llm.scheduler
        handle = scheduler.submit(scheduler.request(ids, max_tokens=3, reading=Reading("logprobs", 2)))
        text = handle.result().text
        found.append((text, [np.concatenate(arrays) for arrays in zip(*handle.pieces, strict=True)]))
    (text, want), (other, got) = found
    assert other == text and len(want[0]) == 299
    for number in (0, 3):
        np.testing.assert_allclose(got[number], want[number], atol=1e-4)
    assert two.generate(PROMPT, max_tokens=4).text == one.generate(PROMPT, max_tokens=4).text


def test_the_head_of_the_first_rank_drafts_for_all(one, two, monkeypatch):
    """Drafts travel with the step that verifies them; answers of several lengths, accepted counts and prompts."""
    monkeypatch.setattr(StepCosts, "__call__", lambda self, tokens: 1.0)
    prompts = [PROMPT, "The king", "A fox and a hen", PROMPT + " there was a king who" * 30]
    for options in ({}, {"temperature": 0.8, "seed": 7}):
        want = [answer.tokens for answer in one.generate(prompts, max_tokens=40, speculate="off", **options)]
        found = two.generate(prompts, max_tokens=40, speculate="mtp", num_draft_tokens=3, **options)
        assert [answer.tokens for answer in found] == want
        assert all(0 < answer.timings.draft_n_accepted < answer.timings.draft_n for answer in found)
    with two.session() as session:
        for n, _ in enumerate(session.stream(PROMPT, max_tokens=20, speculate="mtp")):
            if n == 9:
                break
        assert session.tokens[-10:] == one.generate(PROMPT, max_tokens=10, speculate="off").tokens


def test_sessions_are_saved_whole_and_go_on_with_any_number_of_ranks(one, two, tmp_path):
    for first, second in ((one, two), (two, one)):
        session = first.session()
        session.append(PROMPT + " there was a king")
        session.save(tmp_path / "session")
        other = penstock.restore(tmp_path / "session", second)
        want = session.generate(" who", max_tokens=8).text
        moment = other.snapshot()
        assert other.generate(" who", max_tokens=8).text == want
        other.rewind(moment)
        assert other.generate(" who", max_tokens=8).text == want
        session.close()
        other.close()


def test_a_rank_keeps_about_half_and_knows_no_key(one, two):
    split, whole = (llm.stats().weight_bytes - bytes_of(llm.engine.model.head) for llm in (two, one))
    assert split < 0.55 * whole  # the head is whole, on the first rank
    [pid] = pids_of(two)
    assert b"PENSTOCK_API_KEY" not in Path(f"/proc/{pid}/environ").read_bytes()
    assert b"penstock.parallel" in Path(f"/proc/{pid}/cmdline").read_bytes()


def listening(pid: int) -> set[str]:
    """Addresses at which a process listens, as /proc spells them."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.update(re.findall(r"socket:\[(\d+)\]", str(descriptor.readlink())))
    found = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes and (fields[3] == "0A" or table.startswith("udp")):
                found.add(fields[1].partition(":")[0])
    return found


def test_ranks_listen_on_the_loopback_device_alone_and_meet_in_a_folder_of_this_user(two):
    for pid in (os.getpid(), *pids_of(two)):
        assert listening(pid) == {"0100007F"}  # 127.0.0.1
    folder = processes_of(two)._folder
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_second_split_model_is_refused_and_the_first_goes_on(two):
    with pytest.raises(InvalidArgument, match="this process has a split model; close it first"):
        penstock.load(**EXACT, tensor_parallel_size=2)
    assert two.generate(PROMPT, max_tokens=2).tokens


def test_death_of_a_rank_ends_all_and_says_which(two):
    """The last one of this module that needs `two`."""
    [pid] = pids_of(two)
    folder = processes_of(two)._folder
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineDied, match=r"rank 1: its process ended \(signal 9\)"):
        for _ in range(200):
            two.generate(PROMPT, max_tokens=4)
    two.close()
    assert not folder.exists()
    with pytest.raises(EngineDied):
        two.generate(PROMPT, max_tokens=1)


def test_gloo_takes_the_interface_of_the_environment(monkeypatch, tmp_path):
    def group() -> RankGroup:
        return RankGroup(torch_distributed().FileStore(str(tmp_path / "store"), 1), 0, 1)

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    group().close()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    with pytest.raises(EngineDied, match="rank 0: the other ranks cannot be reached: .*nosuch0"):
        group()


def test_a_note_travels_with_a_sum(tmp_path):
    import torch

    def work(rank: int) -> list[Any]:
        group = RankGroup(torch_distributed().FileStore(str(tmp_path / "store"), 2), rank, 2, address="127.0.0.1")
        given: list[tuple[Any, Any]] = [(np.full((3, 5), rank + 0.5, np.float32), np.array([0, rank], np.float32))]
        given.append((torch.full((7,), 2 + rank, dtype=torch.bfloat16), torch.tensor([rank, 1], dtype=torch.bfloat16)))
        for array, note in given:
            group.all_reduce(array, note)
        group.all_reduce(given[0][0])
        group.close()
        return [one.tolist() for pair in given for one in pair]

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(work, range(2)))
    assert found == [[[[4.0] * 5] * 3, [0, 1], [5.0] * 7, [1, 2]]] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0, expected 1 to 1024"),
        ({"tensor_parallel_size": True}, "tensor_parallel_size is True"),
        ({"tensor_parallel_size": 2, "step_timeout": 0}, "step_timeout is 0, expected seconds above 0"),
        ({"tensor_parallel_size": 2, "expert_parallel": "on"}, "expert_parallel is 'on', expected True or False"),
    ],
)
def test_wrong_numbers_are_refused_before_anything_is_started(options, message):
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        penstock.load(**EXACT, **options)


CLI = [sys.executable, "-m", "penstock"]
GENERATE = ["generate", "--device", "cpu", "--activations", "float32", "--prompt", PROMPT, "--max-tokens", "8"]


def run(*command, seconds=120, **more):
    """stdout, stderr and status of a program; no process of it is left."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, **more)
    return done.stdout, done.stderr, done.returncode


def test_more_ranks_than_heads_end_with_one_line_and_status_1():
    out, err, status = run(*CLI, *GENERATE, "-tp", "5")
    assert status == 1 and not out
    assert "4 heads of 64 columns that read 2 cannot be shared out in groups of 64 columns" in err.splitlines()[-1]


@pytest.mark.slow
def test_the_command_line_and_torchrun_give_the_text_of_one_rank():
    want, _, status = run(*CLI, *GENERATE, "--verbose", "false")
    assert status == 0
    assert run(*CLI, *GENERATE, "-tp", "2", "--verbose", "false")[::2] == (want, 0)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "penstock"]
    assert run(*torchrun, *GENERATE, "--verbose", "false")[::2] == (want, 0)
    out, err, status = run(*torchrun, *GENERATE, "-tp", "3")
    assert status == 1 and not out
    assert "tensor_parallel_size is 3, expected 2: so many processes were started by torchrun" in err


@pytest.mark.slow
def test_two_nodes_of_two_ranks_give_the_text_of_one(tmp_path):
    want, _, _ = run(*CLI, *GENERATE, "--verbose", "false")
    options = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:29871"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "penstock", *GENERATE]
    nodes = [
        subprocess.Popen([*command, "--verbose", "false"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for _ in range(2)
    ]
    texts = [node.communicate(timeout=120)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0]
    assert sorted(texts) == ["", want]


@pytest.mark.slow
def test_a_rank_that_hangs_ends_all_soon_after_the_time_of_a_step():
    with penstock.load(**EXACT, tensor_parallel_size=2, step_timeout=3) as llm:
        llm.generate(PROMPT, max_tokens=8)
        [pid] = pids_of(llm)
        os.kill(pid, signal.SIGSTOP)
        begin = time.monotonic()
        with pytest.raises(EngineDied, match="rank 0: a step took more than 3 s, a rank hangs"):
            llm.generate(PROMPT, max_tokens=8)
        assert time.monotonic() - begin < 13
        wait_for(lambda: not alive(pid))


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_ranks_end_with_the_process_that_started_them(how):
    code = (
        "import penstock, time\n"
        "llm = penstock.load(device='cpu', tensor_parallel_size=2)\n"
        "print(*llm._close.peek()[1].__self__._processes.pids, flush=True)\n"
        "time.sleep(100)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 1
    process.send_signal(how)
    process.wait(15)
    wait_for(lambda: not any(map(alive, pids)))


@pytest.mark.slow
def test_a_made_up_model_is_measured_over_ranks():
    [config] = Path(penstock.__file__).parent.glob("demo/*/config.json")
    bench = ["bench", "--random", str(config), "--device", "cpu", "-p", "8", "-n", "3", "-r", "1"]
    sizes = []
    for ranks in ([], ["-tp", "2"]):
        out, err, status = run(*CLI, *bench, "-o", "json", *ranks)
        assert status == 0, err
        sizes.append(json.loads(out)[0]["model_size"])
    assert sizes[1] < 0.55 * sizes[0]


@pytest.mark.slow
def test_two_split_models_are_compared_one_after_the_other(tmp_path):
    text = tmp_path / "tale.txt"
    text.write_text(f"{PROMPT} there was a king who had a fox and a hen. " * 10)
    [demo] = (config.parent for config in Path(penstock.__file__).parent.glob("demo/*/config.json"))
    common = ["perplexity", "--data-path", str(text), "-c", "24", "--chunks", "2", "--device", "cpu", "--json"]
    found = []
    for ranks in ([], ["-tp", "2"]):
        out, err, status = run(*CLI, *common, "--reference", str(demo), *ranks)
        assert status == 0, err
        found.append(json.loads(out))
    assert found[1]["perplexity"] == pytest.approx(found[0]["perplexity"], rel=1e-2)
    assert found[1]["divergence"]["kl_max"] == 0 and found[1]["divergence"]["same_top"] == 1


@pytest.mark.slow
def test_ranks_stream_their_own_experts_where_one_alone_misses(one):
    """Of 16 experts a layer rank 0 has 6 and the others 5, for which alone there is room."""
    ids = np.random.default_rng(5).integers(0, one.config.vocab_size, 70).tolist()
    layers = one.engine.model.weights.layers
    room = 5 * len(layers) * bytes_of(layers[0].mlp.routed) // 16
    with penstock.load(**EXACT, tensor_parallel_size=3, expert_cache=str(room)) as llm:
        assert error(llm.logits(ids), one.logits(ids)) < BOUND
        assert llm.generate(PROMPT, max_tokens=24).text == one.generate(PROMPT, max_tokens=24).text
        stats = llm.stats()
        assert stats.expert_bytes == room and (stats.expert_reads or 0) > 6 * len(layers)


@pytest.mark.slow
def test_a_model_that_is_garbage_collected_ends_its_ranks():
    llm = penstock.load(**EXACT, tensor_parallel_size=2)
    pids = pids_of(llm)
    del llm
    gc.collect()
    wait_for(lambda: not any(map(alive, pids)))


@pytest.mark.slow
def test_ranks_that_were_started_otherwise_are_refused_on_all_nodes():
    options = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:29872"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "penstock", *GENERATE]
    nodes = [
        subprocess.Popen(
            [*command, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL
        )
        for more in ([], ["--activations", "int8"])
    ]
    told = [node.communicate(timeout=120) for node in nodes]
    assert [node.returncode for node in nodes] == [1, 1]
    assert not told[0][0] and not told[1][0]
    assert "rank 1: settings differ from rank 0's" in told[0][1] + told[1][1]


@pytest.mark.slow
def test_a_scheduler_with_prefixes_cancellations_and_preemption_gives_the_texts_of_one_rank(one):
    from penstock.engine.scheduler import Scheduler

    rng = np.random.default_rng(5)
    shared = rng.integers(0, 250, 600).tolist()  # two chunks, which are stored
    prompts = [
        shared[: int(rng.integers(1, 600))] + rng.integers(0, 250, int(rng.integers(1, 40))).tolist() for _ in range(10)
    ]
    prompts += [[*shared, n] for n in range(4)]
    want = [one.generate(prompt, max_tokens=6).tokens for prompt in prompts]
    with penstock.load(**EXACT, tensor_parallel_size=2) as llm:
        scheduler = Scheduler(llm, max_sequences=3, memory=64 << 20, buffer=2)
        for turn in range(2):
            handles = [scheduler.submit(scheduler.request(prompt, max_tokens=6), buffer=100) for prompt in prompts]
            dropped = [scheduler.submit(scheduler.request(prompt, max_tokens=50)) for prompt in prompts[:4]]
            for handle in dropped[:2]:
                handle.cancel()
            del dropped
            assert [handle.result(60).tokens for handle in handles] == want, turn
        assert scheduler.metrics().prefix_entries > 0
        scheduler.close(0)


@pytest.mark.slow
def test_an_interrupt_counts_between_steps_and_the_model_goes_on(one):
    with penstock.load(**EXACT, tensor_parallel_size=2) as llm:
        llm.generate(PROMPT, max_tokens=2)
        for delay in (0.05, 0.13, 0.4):
            timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                llm.generate(PROMPT, max_tokens=2000)
        assert llm.generate(PROMPT, max_tokens=8).text == one.generate(PROMPT, max_tokens=8).text
