"""The way of tokens to a client: bytes of events, many tokens with one write, many streams with one wake."""

import asyncio
import json
import threading

import pytest

from penstock.engine.request import RequestLimits, Timings, make_request
from penstock.engine.response import ChunkQueue, ResponseHandle, Token, TokenBatch, wait_any
from penstock.errors import CheckpointError
from penstock.server.answer import Answer
from penstock.server.chat import ChatShape, TextShape, failed
from penstock.server.limits import Limits
from penstock.server.responses import ResponsesShape
from penstock.server.schema import ResponsesRequest
from penstock.server.stream import EventStream
from penstock.text.formats import parser_for
from penstock.text.token_texts import TokenTexts

TEXT = 'He said "Ho!\\",\n\ttwo — 三 \U0001f98a\u2028 and left.'


class Stream:
    """A written answer on its way: tokens are put by the test."""

    def __init__(self, llm, parser=None, index=0, **options):
        self.tokenizer = llm.tokenizer
        limits = RequestLimits(llm.max_context, llm.config.vocab_size)
        request = make_request(limits, llm.tokenizer, [1, 2, 3], 99, options.pop("stop", ()), options)
        self.woken, self.cancels = 0, []
        self.queue = ChunkQueue(4, self._wake, Timings(3, 0.5, 2, 0.25, 0.125))
        self.handle = ResponseHandle(request, self.queue, llm.tokenizer, self.cancels.append)
        self.answer = Answer(index, self.handle, parser, TokenTexts(llm.tokenizer))

    def _wake(self):
        self.woken += 1

    def put(self, text, reason=None, **more):
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        for token in ids[:-1]:
            self.queue.put(Token(token, **more))
        self.queue.put(Token(ids[-1], reason, **more))
        if reason is not None:
            self.queue.end(None)
        return len(ids)


def parsed(data):
    return [json.loads(line[6:]) for line in data.decode().split("\n") if line.startswith("data: {")]


@pytest.mark.parametrize("shape, key", [(ChatShape, "delta"), (TextShape, "text")])
@pytest.mark.parametrize("usage", [False, True])
def test_events_of_text_are_the_json_of_the_whole_object(llm, shape, key, usage):
    """The bytes that are put together are those that one json.dumps of the event gives."""
    made = shape('a "model"', "print")
    stream = Stream(llm, index=0)
    events = made.events([stream.answer], usage)
    count = stream.put(TEXT, "length")
    data = events.read()
    assert events.done and data.endswith(b"\n\ndata: [DONE]\n\n") and data.isascii()
    found = parsed(data)
    opening, ending = (1, 1) if key == "delta" else (0, 1)
    assert len(found) <= count + opening + ending + usage
    for event, line in zip(found, data.split(b"\n\n"), strict=False):
        assert line == b"data: " + json.dumps(event, separators=(",", ":")).encode()
        names = ["id", "created", "model", "system_fingerprint", "object", *["usage"] * usage, "choices"]
        assert [name for name in event if name != "timings"][: len(names)] == names or event["choices"] == []
        for choice in event["choices"]:
            assert list(choice) == ["index", key, "logprobs", "finish_reason"]
    texts = [event["choices"][0][key] for event in found if event["choices"]]
    if key == "delta":
        assert texts[0] == {"role": "assistant", "content": ""} and texts[-1] == {}
        texts = [delta.get("content", "") for delta in texts]
    assert "".join(texts) == TEXT
    assert found[-1 - usage]["choices"][0]["finish_reason"] == "length"
    assert found[-1]["timings"]["queue_ms"] == 125.0
    if usage:
        assert found[-1]["choices"] == [] and found[-1]["usage"]["completion_tokens"] == count


def test_what_is_ready_is_read_at_once_and_nothing_is_read_twice(llm):
    stream = Stream(llm)
    events = ChatShape("m", "f").events([stream.answer], False)
    assert len(parsed(events.read())) == 1  # the opening
    assert events.read() == b"" and not events.done
    count = stream.put("Once upon a time there was")
    assert len(parsed(events.read())) == count and events.read() == b""
    assert stream.woken == 1  # the queue was full once
    stream.put(" a fox", "stop")
    assert [event["choices"][0]["finish_reason"] for event in parsed(events.read())][-1] == "stop" and events.done


def test_the_last_token_comes_with_the_end_and_its_numbers(llm):
    stream = Stream(llm)
    stream.queue.put(Token(5, "length"))
    assert stream.handle.read() == [] and not stream.handle.ended
    stream.queue.timings.prompt_seconds = 8.0
    stream.queue.end(None)
    [chunk] = stream.handle.read()
    assert chunk.finish_reason == "length" and stream.handle.ended and stream.handle.timings.prompt_seconds == 8.0


def test_a_stop_string_ends_the_request_and_later_tokens_are_not_read(llm):
    stream = Stream(llm, stop=["fox"])
    stream.put("Once there was a fox and a hen and a cow")
    pieces = stream.answer.read()
    assert pieces[-1].finish_reason == "stop" and stream.answer.ended
    assert stream.cancels[0] is True and stream.answer.read() == []
    assert "fox" not in "".join(chunk.text for chunk in stream.handle.chunks)


def test_an_error_comes_behind_the_events_before_it(llm):
    streams = [Stream(llm, index=index) for index in range(2)]
    events = ChatShape("m", "f").events([stream.answer for stream in streams], False)
    events.read()
    streams[0].put("Once")
    streams[1].put("Once upon")
    streams[1].queue.end(CheckpointError("model: is gone"))
    first = parsed(events.read())
    assert {event["choices"][0]["index"] for event in first} == {0, 1}
    streams[0].put(" more")
    assert parsed(events.read())[0]["choices"][0]["delta"]["content"] == " more"  # before the error is known
    for _ in range(2):
        with pytest.raises(CheckpointError, match="is gone"):
            events.read()
    assert not events.done


def test_reasoning_and_calls_are_told_apart_in_one_read(llm):
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    stream = Stream(llm, parser_for("qwen", tools, ids=lambda: "call_1"))
    events = ChatShape("m", "f").events([stream.answer], False)
    stream.put('<think>\nHm.\n</think>\n\nYes.\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>', "stop")
    deltas = [event["choices"][0]["delta"] for event in parsed(events.read())]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
    assert all(delta["reasoning"] == delta["reasoning_content"] for delta in deltas if "reasoning" in delta)
    assert "".join(delta.get("content", "") for delta in deltas) == "Yes."
    assert [call["id"] for delta in deltas for call in delta.get("tool_calls", ()) if "id" in call] == ["call_1"]


def test_events_of_responses_come_as_they_are_read(llm):
    stream = Stream(llm)
    shape = ResponsesShape(ResponsesRequest(input="x"), "m", {"temperature": 0.0, "top_p": 1.0})
    events = shape.events(stream.answer)
    kinds = [event["type"] for event in parsed(events.read())]
    assert kinds == ["response.created", "response.in_progress"] and not events.done
    count = stream.put("Once upon", "stop")
    found = parsed(events.read())
    assert events.done and found[-1]["type"] == "response.completed"
    assert len([event for event in found if event["type"] == "response.output_text.delta"]) == count
    assert found[-1]["response"]["output"][0]["content"][0]["text"] == "Once upon"


async def sent(events, feed):
    """What an EventStream sends while `feed` puts tokens, message by message."""
    bodies = []

    async def send(message):
        if message["type"] == "http.response.body":
            bodies.append(message["body"])

    async def receive():
        await asyncio.sleep(60)

    stream = EventStream(events, failed, Limits(), 30.0)
    await asyncio.gather(stream({}, receive, send), feed())
    return bodies


def test_tokens_that_are_ready_leave_with_one_write(llm):
    stream = Stream(llm)
    events = ChatShape("m", "f").events([stream.answer], False)
    counts = []

    async def feed():
        await asyncio.sleep(0.05)
        for text in ("Once upon a time", " there was a fox"):
            counts.append(stream.put(text))
            await asyncio.sleep(0.05)
        stream.put(" and a hen", "stop")

    bodies = asyncio.run(sent(events, feed))
    assert [len(parsed(body)) for body in bodies[:3]] == [1, *counts]
    assert bodies[-2].endswith(b"[DONE]\n\n") and bodies[-1] == b"" and len(bodies) == 5


def test_a_failing_answer_ends_its_stream_with_an_event(llm):
    stream = Stream(llm)

    async def feed():
        stream.put("Once")
        stream.queue.end(CheckpointError("/secret/model: is gone"))

    bodies = asyncio.run(sent(ChatShape("m", "f").events([stream.answer], False), feed))
    error = parsed(bodies[-2])[0]["error"]
    assert error["code"] == "weights_damaged" and "secret" not in error["message"] and stream.cancels


def test_one_call_into_the_loop_wakes_all_readers(llm):
    streams = [Stream(llm) for _ in range(5)]

    async def run():
        loop = asyncio.get_running_loop()
        readers = [asyncio.create_task(wait_any([stream.handle])) for stream in streams]
        await asyncio.sleep(0)
        calls, plain = [], loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *args: (calls.append(args), plain(*args))[1]  # type: ignore[method-assign]

        def step():
            batch = TokenBatch()
            for stream in streams:
                stream.queue.put(Token(7), batch)
            batch.wake()

        thread = threading.Thread(target=step)
        thread.start()
        await asyncio.wait_for(asyncio.gather(*readers), 5)
        thread.join()
        return len(calls)

    assert asyncio.run(run()) == 1
    assert all(len(stream.handle.read()) == 1 for stream in streams)


def test_one_of_several_handles_is_enough(llm):
    streams = [Stream(llm) for _ in range(3)]

    async def run():
        waiting = asyncio.create_task(wait_any([stream.handle for stream in streams]))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        streams[2].queue.put(Token(7))
        await asyncio.wait_for(waiting, 5)
        streams[0].queue.put(Token(7))  # its waiter is done already
        await asyncio.wait_for(wait_any([streams[0].handle]), 5)
        await asyncio.wait_for(wait_any([stream.handle for stream in streams]), 5)

    asyncio.run(run())


def test_a_thread_and_a_loop_read_the_same_queue(llm):
    stream = Stream(llm)
    count = stream.put("Once upon a time")

    async def three():
        return [await anext(stream.handle) for _ in range(3)]

    first = asyncio.run(three())
    thread = threading.Timer(0.05, stream.put, [" there", "length"])
    thread.start()
    rest = list(stream.handle)
    text = "".join(chunk.text for chunk in first + rest)
    assert text == "Once upon a time there" and len(first + rest) > count
    with pytest.raises(TimeoutError):
        Stream(llm).handle.result(timeout=0.01)
