"""Which replica gets a request; what happens when one ends, played as in test_remote.py; shares of the machine."""

import threading

import pytest

pytest.importorskip("msgspec", reason="the extra `server` is not installed")

import penstock
from penstock.engine import channel, remote, resources
from penstock.engine.metrics import SchedulerMetrics, total
from penstock.engine.remote import BUFFER, RemoteScheduler
from penstock.engine.replicas import BLOCK, Candidate, PrefixMemory, Replicas, block_digests, choose
from penstock.engine.resources import Resources, share_machine
from penstock.errors import BackendError, CheckpointError, EngineDied, InvalidArgument, QueueFull
from tests.engine.test_remote import INFO, Played, eventually


@pytest.mark.parametrize(
    ("length", "candidates", "number", "by_prefix"),
    [
        (10, [(0, 2, 8, 1), (0, 1, 8, 2)], 1, False),  # shared, load, slots, turn
        (10, [(0, 1, 8, 5), (0, 1, 8, 3), (0, 1, 8, 4)], 1, False),  # equal loads: the longest without a request
        (10, [(0, 0, 8, 0), (0, 0, 8, 0)], 0, False),
        (0, [(0, 3, 8, 1), (0, 2, 8, 2)], 1, False),  # no prompt
        (10, [(3, 5, 8, 1), (0, 0, 8, 2)], 1, False),  # exactly 0.3 is not enough
        (10, [(4, 5, 8, 1), (0, 0, 8, 2)], 0, True),
        (100, [(31, 5, 8, 1), (48, 6, 8, 2), (0, 0, 8, 3)], 1, True),  # the longest
        (100, [(48, 6, 8, 1), (48, 5, 8, 2), (16, 0, 8, 3)], 1, True),  # equally long: the less loaded
        (100, [(48, 5, 8, 2), (48, 5, 8, 1), (0, 0, 8, 3)], 1, True),
        (10, [(10, 8, 8, 1), (0, 0, 8, 2)], 0, True),  # as many as its slots above
        (10, [(10, 9, 8, 1), (0, 0, 8, 2)], 1, False),  # more
        (10, [(10, 27, 8, 1), (0, 18, 8, 2)], 0, True),  # exactly 1.5 times
        (10, [(10, 28, 8, 1), (0, 18, 8, 2)], 1, False),
        (10, [(10, 7, 2, 1), (0, 5, 9, 2)], 0, True),  # 2 above, the busiest one's slots
        (10, [(10, 0, 8, 1), (0, 30, 8, 2)], 0, False),  # the least loaded has the prefix, too
        (10, [(7, 900, 8, 4)], 0, True),  # the only one
    ],
)
def test_choose(length, candidates, number, by_prefix):
    assert choose(length, [Candidate(*one) for one in candidates]) == (number, by_prefix)


def test_prefix_memory_finds_whole_blocks_and_whole_prompts():
    memory, prompt = PrefixMemory(), list(range(2 * BLOCK + 5))
    assert block_digests([]) == [] and memory.shared([], 0) == 0
    memory.add(block_digests(prompt))

    def shared(tokens):
        return memory.shared(block_digests(tokens), len(tokens))

    assert shared(prompt) == len(prompt)
    assert shared([*prompt, 7]) == shared([*prompt[:-1], 99]) == shared(prompt[:-1]) == 2 * BLOCK
    assert shared(prompt[: BLOCK + 3]) == shared([*prompt[:BLOCK], 99, *prompt[BLOCK + 1 :]]) == BLOCK
    assert shared([99, *prompt[1:]]) == shared(prompt[BLOCK:]) == shared([5]) == 0


def test_prefix_memory_is_bounded_and_forgets_the_oldest_from_its_end():
    memory = PrefixMemory(blocks=4)
    first, second, long = ([start] * (3 * BLOCK) for start in (1, 2, 3))
    for prompt in (first, second):
        memory.add(block_digests(prompt))
    assert len(memory) == 4
    assert memory.shared(block_digests(first), len(first)) == BLOCK
    assert memory.shared(block_digests(second), len(second)) == len(second)
    memory.add(block_digests(long * 3))
    assert len(memory) == 4 and memory.shared(block_digests(long * 3), 9 * BLOCK) == 4 * BLOCK


@pytest.fixture
def play(monkeypatch):
    """Makes replicas on played engines: of each replica the scripts of its starts; and what was told."""
    tokenizer = penstock.load().tokenizer

    def start(*scripts, **sizes):
        made: list[list] = [[] for _ in scripts]
        lock, told = threading.Lock(), []

        def engine(module, resources=None):
            number = int(module)
            with lock:
                Played.scripts, Played.made = [scripts[number][len(made[number])]], made[number]
                return Played(module)

        monkeypatch.setattr(remote, "_Engine", engine)

        def make(number, given_up):
            return RemoteScheduler(str(number), channel.Start({}, {}), tokenizer, given_up=given_up)

        def tell(name):
            return lambda value: told.append((name, value))

        return Replicas(len(scripts), make, notify=tell("notify"), given_up=tell("given_up")), made, told

    return start


def ready(sequences=2, queue=1, **info):
    def script(engine):
        engine.other.send(channel.Ready(INFO | info, sequences, queue))

    return script


def later(event):
    def script(engine):
        event.wait(10)
        ready()(engine)

    return script


def prompts(engine):
    """The first tokens of all requests that have come to an engine, which sends nothing itself."""
    engine.messages(channel.Submit)
    return [message.prompt[0] for message in engine.received if isinstance(message, channel.Submit)]


def long_prompt(first):
    return [first] * 20


def test_replicas_are_one_scheduler_with_the_least_context_and_all_slots(play):
    replicas, [[one], [other]], _ = play([ready(2, 1)], [ready(3, 4, max_context=32)])
    assert (replicas.max_sequences, replicas.ready.queue, replicas.ready.model["max_context"]) == (5, 5, 32)
    with pytest.raises(InvalidArgument, match="expected fewer than 32"):
        replicas.request([1] * 40)
    one.other.send(channel.Metrics({"running": 1, "generated_tokens": 5}, {"cache_bytes": 7, "weight_bytes": 3}))
    other.other.send(channel.Metrics({"running": 2, "queue_seconds": 0.5}, {"cache_bytes": 4, "weight_bytes": 3}))
    eventually(lambda: replicas.metrics().running == 3 and replicas.metrics().queue_seconds == 0.5)
    assert replicas.metrics().generated_tokens == 5 and replicas.stats == {"cache_bytes": 11, "weight_bytes": 3}


def test_requests_go_by_prefix_and_load_and_come_back_to_their_readers(play):
    replicas, [[one], [other]], _ = play([ready(8, 8)], [ready(8, 8)])
    handles = [replicas.submit(replicas.request(long_prompt(first), max_tokens=50)) for first in (1, 2, 1, 1, 2, 3)]
    eventually(lambda: replicas.schedulers[0].load == 3 and replicas.schedulers[1].load == 3)
    assert prompts(one) == [1, 1, 1] and prompts(other) == [2, 2, 3]
    assert replicas.chosen == {(0, False): 1, (0, True): 2, (1, False): 2, (1, True): 1}
    number = other.messages(channel.Submit)[0].id
    other.other.send(channel.Tokens([number] * BUFFER, [9] * BUFFER))
    assert other.messages(channel.Pause)[0].id == number
    eventually(lambda: handles[1].ready)
    assert len(handles[1].read()) == BUFFER and other.messages(channel.Resume)[0].id == number
    handles[1].cancel()
    assert other.messages(channel.Cancel)[0].id == number
    assert not [message for message in one.received if not isinstance(message, channel.Start | channel.Submit)]


def test_a_replica_that_dies_takes_its_requests_along_and_no_others(play):
    again = threading.Event()
    replicas, [first, [other]], told = play([ready(), later(again)], [ready(9, 9)])
    handles = [replicas.submit(replicas.request(long_prompt(token), max_tokens=4)) for token in (1, 2, 3)]
    first[0].die()
    for lost in handles[::2]:
        with pytest.raises(EngineDied, match="a new one is being started"):
            lost.result(5)
    eventually(lambda: replicas.available == [1])
    assert replicas.unavailable is None
    replicas.submit(replicas.request(long_prompt(1))).cancel()  # though the first one had this beginning
    eventually(lambda: prompts(other) == [2, 1])
    number = other.messages(channel.Submit)[0].id
    other.other.send(channel.Tokens([number], [9], {0: "length"}), channel.End(number, 0, [1, 0.0, 1, 0.0, 0.0, 0.0]))
    assert handles[1].result(5).tokens == [9]
    assert replicas.metrics().failed == 2
    again.set()
    eventually(lambda: replicas.available == [0, 1])
    replicas.submit(replicas.request(long_prompt(3))).cancel()
    assert prompts(first[1]) == [3]
    assert replicas.chosen[0, True] == 0 and not told  # what the new engine has not seen is no reason


def test_the_server_ends_with_the_last_replica(play):
    def fails(engine):
        engine.other.send(channel.NotLoaded("CheckpointError", "model: is gone"))

    replicas, [first, second], told = play([ready(), fails], [ready(), ready()])
    first[0].die()
    eventually(lambda: told and told[0][0] == "notify")
    assert "replica 0 is given up" in told[0][1] and "model: is gone; 1 of 2 go on" in told[0][1]
    assert replicas.unavailable is None
    second[0].die()
    eventually(lambda: len(second) == 2 and replicas.available == [1])
    second[1].die()
    eventually(lambda: told[-1][0] == "given_up" and "second time" in told[-1][1])
    assert "which failed: model: is gone" in str(replicas.unavailable)
    with pytest.raises(EngineDied, match="model: is gone"):
        replicas.submit(replicas.request([1]))


def test_a_full_replica_passes_a_request_on_and_all_full_ones_refuse_it_once(play):
    replicas, [[one], [other]], _ = play([ready(1, 0)], [ready(1, 0)])
    handles = [replicas.submit(replicas.request(long_prompt(1))) for _ in range(2)]
    assert prompts(one) == prompts(other) == [1]
    assert replicas.metrics().refused == 0
    for count in (1, 2):
        with pytest.raises(QueueFull):
            replicas.submit(replicas.request(long_prompt(1)))
        assert replicas.metrics().refused == count
    assert len(handles) == 2


def test_a_replica_that_cannot_load_ends_the_others(play):
    def fails(engine):
        engine.other.send(channel.NotLoaded("CheckpointError", "model: is damaged"))

    closed = threading.Event()

    def closes(engine):
        ready()(engine)
        engine.messages(channel.Close)
        engine.die()
        closed.set()

    with pytest.raises(CheckpointError, match="model: is damaged"):
        play([closes], [fails])
    assert closed.wait(5)


def test_metrics_of_an_engine_that_ended_keep_what_it_has_done():
    before = SchedulerMetrics(running=2, waiting=1, finished=4, generated_tokens=50, pages_used=3, queue_seconds=0.5)
    now = total([before.ended(3), SchedulerMetrics(running=1, generated_tokens=7, memory_total=9)])
    assert now == SchedulerMetrics(
        running=1, finished=4, failed=3, generated_tokens=57, queue_seconds=0.5, memory_total=9
    )


@pytest.fixture
def machine(monkeypatch):
    """A machine with these cores, a grant of them, and GPUs."""

    def make(cores, granted=None, gpus=(), unusable=None):
        monkeypatch.setattr(resources, "cores", lambda: cores)
        monkeypatch.setattr(resources, "physical_cores", lambda: granted or len(cores))
        monkeypatch.setattr(resources, "available_memory", lambda: 1000)
        monkeypatch.setattr(resources.cuda, "unusable", lambda: unusable)
        monkeypatch.setattr(resources.cuda, "visible_gpus", lambda: list(gpus))

    return make


@pytest.mark.parametrize(
    ("cores", "granted", "threads", "shares"),
    [
        ([[0, 4], [1, 5], [2, 6]], None, None, [((0, 4), 1), ((1, 2, 5, 6), 2)]),
        ([[0], [1], [2], [3]], 2, None, [((0, 1), 1), ((2, 3), 1)]),
        ([[0], [1], [2], [3]], None, 3, [((0, 1), 1), ((2, 3), 1)]),
        ([[0], [1], [2], [3]], None, 8, [((0, 1), 4), ((2, 3), 4)]),
        ([[7]], None, None, [((7,), 1), ((7,), 1)]),
    ],
    ids=["threads of a core stay together", "quota", "few threads", "too many threads", "more than cores"],
)
def test_share_machine_gives_each_process_its_cores(machine, cores, granted, threads, shares):
    machine(cores, granted)
    found = share_machine("cpu", 2, threads)
    assert [(one.cpus, one.threads) for one in found] == shares
    assert all(one.memory == 500 and not one.gpus for one in found)


def test_share_machine_gives_each_process_a_gpu_or_says_how_many_there_are(machine):
    machine([[0], [1]], gpus=("GPU-a", "3"))
    assert share_machine("cuda", 2) == [Resources(gpus=("GPU-a",), memory=500), Resources(gpus=("3",), memory=500)]
    assert share_machine("cuda", 2)[1].environ() == {"CUDA_VISIBLE_DEVICES": "3"}
    with pytest.raises(InvalidArgument, match="^3 engines need a GPU each, there are 2$"):
        share_machine("cuda", 3)
    machine([[0]], unusable="no NVIDIA driver is loaded here")
    with pytest.raises(BackendError, match="no NVIDIA driver"):
        share_machine("cuda", 2)
