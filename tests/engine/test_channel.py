"""Messages between the front and the engine process: frames, and what is no frame."""

import socket
import struct
import threading

import pytest

pytest.importorskip("msgspec", reason="the extra `server` is not installed")

from penstock.engine import channel
from penstock.engine.channel import ChannelError, Connection
from penstock.engine.reading import Reading
from penstock.engine.request import Request, Timings
from penstock.engine.sampling import SamplingParams
from penstock.errors import CheckpointError, EngineDied, QueueFull

FROM_FRONT = [
    channel.Start({"path_or_hub_id": None, "threads": 3}, {"queue": 7, "read_timeout": 1.5}),
    channel.Submit(1, [5, 0, 70_000], {"temperature": 0.5, "seed": 2**64 - 1, "logit_bias": {3: -1e30}}, 9, [2, 4]),
    channel.Submit(2, [], {}, 1, [], "key 3", 'start: "a"'),
    channel.Submit(3, [7], {}, 0, [], reading=Reading("logprobs", 5)),
    channel.Cancel(3, True),
    channel.Pause(4),
    channel.Resume(5),
    channel.Close(None),
    channel.Close(2.5),
]
FROM_ENGINE = [
    channel.Tokens([1, 2, 1], [10, 11, 12], {1: "stop"}, {2: (-0.5, [(12, -0.5), (3, -1.25)]), 0: (-1.0, None)}),
    channel.Tokens([], []),
    channel.Read(1, [b"\0\1\2\3", b""]),
    channel.State(1, "prompt", 64, [1, 0.5, 0, 0.0, 0.25]),
    channel.End(2, 0, [1, 2.0, 3, 4.0, 5.0]),
    channel.Failed(3, "QueueFull", "full", 4),
    channel.Progress(0.5, "a remark"),
    channel.Ready({"max_context": 2048, "quantization": None}, 8, 256),
    channel.NotLoaded("CheckpointError", "model: is damaged"),
    channel.Damaged("model: changed"),
    channel.Metrics({"running": 1, "queue_seconds": 0.5}, {"expert_hits": None}),
]


def pair(receives=channel.FromFront | channel.FromEngine):
    ours, theirs = socket.socketpair()
    theirs.settimeout(10)
    return ours, Connection(theirs, receives)


@pytest.mark.parametrize("message", [*FROM_FRONT, *FROM_ENGINE], ids=lambda message: type(message).__name__)
def test_every_message_comes_out_as_it_went_in(message):
    ours, receiver = pair(channel.FromFront if message in FROM_FRONT else channel.FromEngine)
    Connection(ours, channel.FromEngine).send(message)
    [found] = receiver.receive()
    assert found == message and type(found) is type(message)


def test_whole_numbers_stay_whole_numbers():
    ours, receiver = pair()
    Connection(ours, channel.FromFront).send(channel.Metrics({"running": 3, "queue_seconds": 2.0}, {}))
    [found] = receiver.receive()
    assert type(found.scheduler["running"]) is int and type(found.scheduler["queue_seconds"]) is float


def test_messages_of_one_write_come_together_and_bytes_in_any_pieces():
    ours, receiver = pair()
    sender = Connection(ours, channel.FromFront)
    sender.send(*FROM_ENGINE)
    assert receiver.receive() == FROM_ENGINE
    data = b"".join(sender._frames(FROM_FRONT))
    found = []

    def drip():
        for byte in data:
            ours.send(bytes([byte]))

    thread = threading.Thread(target=drip)
    thread.start()
    while len(found) < len(FROM_FRONT):
        found += receiver.receive()
    thread.join()
    assert found == FROM_FRONT


def test_the_end_of_a_connection_is_no_message_and_within_one_an_error():
    ours, receiver = pair()
    ours.close()
    assert receiver.receive() == []
    ours, receiver = pair()
    frame = b"".join(Connection(ours, channel.FromFront)._frames([channel.Pause(7)]))
    ours.send(frame[:-1])
    ours.close()
    with pytest.raises(ChannelError, match=f"ended within a message, after {len(frame) - 1} bytes"):
        receiver.receive()


def test_a_frame_that_is_too_long_is_refused_before_it_arrives_and_is_not_sent(monkeypatch):
    ours, receiver = pair()
    ours.send(struct.pack("<I", channel.MAX_FRAME + 1))
    with pytest.raises(ChannelError, match=f"{channel.MAX_FRAME + 1} bytes is announced"):
        receiver.receive()
    monkeypatch.setattr(channel, "MAX_FRAME", 20)
    with pytest.raises(ChannelError, match="expected at most 20"):
        Connection(ours, channel.FromFront).send(channel.Damaged("x" * 30))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x90",
        b"\x92\xa5Other\x01",
        b"\x92\xa5Pause\xa1x",
        b"\x94\xa5Pause\x01\x02\x03",
        b"\x80",
        b"\x05",
    ],
    ids=["empty", "no msgpack", "no kind", "unknown kind", "wrong type", "too many fields", "a map", "a number"],
)
def test_what_is_no_message_ends_the_connection_with_a_reason(payload):
    ours, receiver = pair()
    ours.send(struct.pack("<I", len(payload)) + payload)
    with pytest.raises(ChannelError, match="not a message"):
        receiver.receive()


def test_a_request_of_the_front_is_the_same_request_for_the_engine():
    params = SamplingParams(temperature=0.5, seed=2**64 - 1, logit_bias={3: -1e30}, logprobs=2, top_k=7)
    request = Request([1, 2, 3], params, 9, frozenset({4, 2}), stop=("end",))
    message = channel.submit_message(5, request, "someone")
    assert channel.sampling_params_of(message) == params
    assert (message.id, message.prompt, message.max_tokens, message.eos) == (5, [1, 2, 3], 9, [2, 4])
    assert message.client == "someone" and message.grammar is None


def test_timings_keep_their_types():
    timings = Timings()
    channel.set_timings(timings, channel.timings_values(Timings(3, 0.5, 7, 1.25, 0.125)))
    assert timings == Timings(3, 0.5, 7, 1.25, 0.125) and type(timings.prompt_tokens) is int


def test_errors_keep_their_class_where_it_is_one_of_ours():
    full = channel.error_message(1, QueueFull("queue: full", 17))
    back = channel.error_of(full.kind, full.message, full.retry_after)
    assert isinstance(back, QueueFull) and back.retry_after == 17 and str(back) == "queue: full"
    assert isinstance(channel.error_of("CheckpointError", "x"), CheckpointError)
    for kind in ("ZeroDivisionError", "contextmanager", "Iterator", "__name__"):
        other = channel.error_of(kind, "x")
        assert type(other) is RuntimeError and kind in str(other)
    assert not isinstance(channel.error_of("ZeroDivisionError", "x"), EngineDied)
