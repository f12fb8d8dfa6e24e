"""A scheduler whose engine is elsewhere, against an engine that a test plays: refusals, ends, restarts."""

import contextlib
import socket
import struct
import threading
import time
from typing import ClassVar

import pytest

pytest.importorskip("msgspec", reason="the extra `server` is not installed")

import penstock
from penstock.engine import channel, remote
from penstock.engine.channel import Connection, FromFront
from penstock.engine.remote import BUFFER, RemoteScheduler
from penstock.errors import Cancelled, CheckpointError, EngineDied, InvalidArgument, OutOfMemory, QueueFull

INFO = {"max_context": 64, "vocab_size": 100}


class Played:
    """In place of `_Engine`: the other end of the socket is the test's. Each start takes the next script."""

    scripts: ClassVar[list] = []
    made: ClassVar[list] = []

    def __init__(self, module, resources=None):
        ours, theirs = socket.socketpair()
        theirs.settimeout(10)
        self.ready, self.answer, self.last_note, self.process = threading.Event(), None, "", self
        self.connection = Connection(ours, channel.FromEngine)
        self.other, self.raw = Connection(theirs, FromFront), theirs
        self.pid, self.killed, self.received = len(self.made), False, []
        self.made.append(self)
        threading.Thread(target=self._run, args=(self.scripts.pop(0),), daemon=True).start()

    def _run(self, script):
        self.received += self.other.receive()
        script(self)

    def messages(self, kind):
        """Of that kind, all that came; waits for one."""
        while not any(isinstance(message, kind) for message in self.received):
            self.received += self._next()
        return [message for message in self.received if isinstance(message, kind)]

    def _next(self):
        found = self.other.receive()
        assert found, "nothing more came"
        return found

    def send(self, message):
        with contextlib.suppress(OSError):
            self.connection.send(message)

    def die(self):
        self.raw.shutdown(socket.SHUT_RDWR)
        self.raw.close()

    def kill(self):
        self.killed = True
        self.die()

    def wait(self, timeout=None):
        return 0

    def end(self):
        self.connection.close()

    def status(self):
        return "status 3"


def loaded(engine, sequences=2, queue=1):
    engine.other.send(channel.Progress(0.5, "a remark"), channel.Ready(dict(INFO), sequences, queue))


@pytest.fixture
def play(monkeypatch):
    """Makes a RemoteScheduler on engines with these scripts; and what it told."""
    monkeypatch.setattr(remote, "_Engine", Played)
    tokenizer = penstock.load().tokenizer

    def start(*scripts):
        Played.scripts, Played.made = list(scripts), []
        told: list = []
        names = ("notify", "damaged", "given_up")
        hooks = {name: lambda value, name=name: told.append((name, value)) for name in names}
        made = RemoteScheduler("x", channel.Start({}, {}), tokenizer, progress=lambda share: None, **hooks)
        return made, Played.made, told

    return start


def eventually(true, seconds=5.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_an_engine_that_cannot_load_raises_its_error(play):
    def fails(engine):
        engine.other.send(channel.NotLoaded("CheckpointError", "model: is damaged"))

    with pytest.raises(CheckpointError, match="model: is damaged"):
        play(fails)
    with pytest.raises(EngineDied, match=r"while it loaded the model \(status 3\)"):
        play(lambda engine: engine.die())


def test_a_request_that_was_dropped_is_not_paused_by_tokens_on_their_way(play):
    scheduler, [engine], _ = play(loaded)
    scheduler.submit(scheduler.request([5], max_tokens=60))
    [message] = engine.messages(channel.Submit)
    late = channel.Tokens([message.id] * BUFFER, [9] * BUFFER)
    engine.other.send(channel.Metrics({}, {}), late, late)
    eventually(lambda: scheduler._live[message.id].queue.full)
    handle = scheduler.submit(scheduler.request([6], max_tokens=4))
    while len(engine.messages(channel.Submit)) < 2:
        engine.received += engine._next()
    assert [type(one) for one in engine.received[-2:]] == [channel.Cancel, channel.Submit]
    engine.other.send(channel.End(message.id, 0, [1, 0.0, 0, 0.0, 0.0, 0.0]))
    eventually(lambda: len(scheduler._live) == 1)
    del handle


def test_requests_are_checked_here_and_their_tokens_come_with_their_numbers(play):
    scheduler, [engine], told = play(loaded)
    assert ("notify", "a remark") in told and scheduler.max_sequences == 2
    with pytest.raises(InvalidArgument, match="expected fewer than 64"):
        scheduler.request([1] * 64)
    with pytest.raises(InvalidArgument, match="ids from 0 to 99"):
        scheduler.request([100])
    request = scheduler.request([5, 6, 7], max_tokens=4, stop=["never"], temperature=0.5, seed=3, logprobs=1)
    handle = scheduler.submit(request, "someone")
    with pytest.raises(InvalidArgument, match="submitted before"):
        scheduler.submit(request)
    [message] = engine.messages(channel.Submit)
    assert (message.prompt, message.max_tokens, message.client) == ([5, 6, 7], 4, "someone")
    number = message.id
    engine.other.send(channel.State(number, "prompt", 2, [1, 0.0, 0, 0.0, 0.25, 0.0]))
    eventually(lambda: handle.state == "prompt")
    engine.other.send(
        channel.Tokens([number, number + 7], [9, 9], {}, {0: (-0.5, [(9, -0.5)])}),  # and one of an unknown request
        channel.Tokens([number], [11], {0: "length"}, {0: (-1.5, None)}),
        channel.End(number, 2, [1, 0.5, 2, 0.75, 0.25, 0.0]),
    )
    done = handle.result(5)
    assert done.tokens == [9, 11] and done.finish_reason == "length" and done.logprobs == [-0.5, -1.5]
    assert done.top_logprobs == [((9, -0.5),), ()]
    assert done.usage.cached_tokens == 2 and done.timings.generation_seconds == 0.75
    assert not scheduler._live
    handle.cancel()  # which is not sent any more
    scheduler.submit(scheduler.request([1])).cancel()
    cancelled = engine.messages(channel.Cancel)
    assert [message.id for message in cancelled] == [engine.messages(channel.Submit)[-1].id] != [number]


def test_a_full_queue_is_refused_here_unless_another_client_has_more(play):
    scheduler, [engine], _ = play(loaded)  # room for 3
    handles = [scheduler.submit(scheduler.request([1]), "a") for _ in range(3)]
    with pytest.raises(QueueFull, match="3 requests are running or waiting"):
        scheduler.submit(scheduler.request([1]), "a")
    assert scheduler.metrics().refused == 1
    handles.append(scheduler.submit(scheduler.request([1]), "b"))  # the engine turns one of a's away
    while len(engine.messages(channel.Submit)) < 4:
        engine.received += engine._next()
    engine.other.send(channel.Failed(3, "QueueFull", "queue: full", 9))
    with pytest.raises(QueueFull, match="queue: full") as full:
        handles[2].result(5)
    assert full.value.retry_after == 9
    for number in (1, 2):
        engine.other.send(channel.State(number, "prompt", 0, [1, 0.0, 0, 0.0, 0.0, 0.0]))
    eventually(lambda: handles[1].state == "prompt")
    with pytest.raises(QueueFull):  # those of a have begun
        scheduler.submit(scheduler.request([1]), "c")


@pytest.mark.parametrize("kind, error", [("OutOfMemory", OutOfMemory), ("ZeroDivisionError", RuntimeError)])
def test_what_the_engine_refuses_reaches_the_reader(play, kind, error):
    scheduler, [engine], _ = play(loaded)
    handle = scheduler.submit(scheduler.request([1]))
    engine.other.send(channel.Failed(engine.messages(channel.Submit)[0].id, kind, "no"))
    with pytest.raises(error, match="no"):
        handle.result(5)


def test_a_reader_that_lags_is_told_to_the_engine_and_so_is_its_return(play):
    scheduler, [engine], _ = play(loaded)
    handle = scheduler.submit(scheduler.request([1], max_tokens=500))
    [number] = [message.id for message in engine.messages(channel.Submit)]
    engine.other.send(channel.Tokens([number] * (BUFFER - 1), [9] * (BUFFER - 1)))
    eventually(lambda: len(handle._queue._tokens) == BUFFER - 1)
    engine.other.send(channel.Tokens([number] * 3, [9] * 3))
    assert engine.messages(channel.Pause)[0].id == number
    eventually(lambda: len(handle._queue._tokens) == BUFFER + 2)
    assert len(handle.read()) == BUFFER + 2
    assert engine.messages(channel.Resume)[0].id == number
    assert len(engine.messages(channel.Pause)) == 1


def test_dropped_handles_are_cancelled_with_the_next_numbers(play):
    scheduler, [engine], _ = play(loaded)
    scheduler.submit(scheduler.request([1]))
    engine.messages(channel.Submit)
    engine.other.send(channel.Metrics({"running": 1, "generated_tokens": 5}, {"cache_bytes": 7}))
    assert engine.messages(channel.Cancel)[0].id == 1
    assert scheduler.metrics().generated_tokens == 5 and scheduler.stats == {"cache_bytes": 7}


def test_weights_that_cannot_be_read_are_told(play):
    _, [engine], told = play(loaded)
    engine.other.send(channel.Damaged("model: changed"))
    eventually(lambda: any(name == "damaged" and str(error) == "model: changed" for name, error in told))


@pytest.mark.parametrize("how", ["ends", "babbles", "announces too much"])
def test_an_engine_that_dies_is_started_again_once(play, how):
    go_on = threading.Event()

    def second(engine):
        go_on.wait(5)
        loaded(engine)

    scheduler, engines, told = play(loaded, second)
    handle = scheduler.submit(scheduler.request([1]))
    if how == "babbles":
        engines[0].raw.sendall(struct.pack("<I", 3) + b"abc")
    elif how == "announces too much":
        engines[0].raw.sendall(struct.pack("<I", 2**32 - 1))
    else:
        engines[0].die()
    with pytest.raises(EngineDied, match=r"the engine process ended \(status 3\); a new one is being started"):
        handle.result(5)
    assert scheduler.unavailable is not None
    with pytest.raises(EngineDied, match="a new one"):
        scheduler.submit(scheduler.request([1]))
    go_on.set()
    eventually(lambda: scheduler.unavailable is None)
    again = scheduler.submit(scheduler.request([2]))
    [message] = engines[1].messages(channel.Submit)
    assert message.prompt == [2] and not any(name == "given_up" for name, _ in told)
    engines[1].die()
    with pytest.raises(EngineDied, match="the second time within 60 s"):
        again.result(5)
    eventually(lambda: any(name == "given_up" and "second time" in reason for name, reason in told))
    with pytest.raises(EngineDied):
        scheduler.submit(scheduler.request([1]))
    assert len(engines) == 2


def test_deaths_that_are_far_apart_are_each_the_first(play, monkeypatch):
    monkeypatch.setattr(remote, "RESTART_SECONDS", 0.0)
    scheduler, engines, told = play(loaded, loaded, loaded)
    for number in range(2):
        engines[number].die()
        eventually(lambda count=number + 2: len(engines) == count and scheduler.unavailable is None)
    assert not any(name == "given_up" for name, _ in told)


def test_a_new_engine_that_cannot_load_is_the_last_one(play):
    def fails(engine):
        engine.other.send(channel.NotLoaded("CheckpointError", "model: is gone"))

    _, [engine], told = play(loaded, fails)
    engine.die()
    eventually(lambda: any(name == "given_up" and "which failed: model: is gone" in reason for name, reason in told))


def test_close_asks_the_engine_and_ends_what_is_left(play):
    scheduler, [engine], told = play(loaded)
    handle = scheduler.submit(scheduler.request([1]))

    def engine_closes():
        assert engine.messages(channel.Close)[0].deadline == 2.5
        engine.die()

    thread = threading.Thread(target=engine_closes)
    thread.start()
    scheduler.close(2.5)
    thread.join()
    assert scheduler.closing
    with pytest.raises(Cancelled, match="closing"):
        handle.result(5)
    with pytest.raises(Cancelled):
        scheduler.submit(scheduler.request([1]))
    assert not any(name == "given_up" for name, _ in told) and scheduler.unavailable is None
