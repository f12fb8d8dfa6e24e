"""What a notebook meets: names, texts of objects, options per prompt, event loops, JSON, forks of a session."""

import asyncio
import gc
import json
import pydoc
import subprocess
import sys
import weakref
from pathlib import Path
from typing import get_overloads

import pytest

import penstock
from penstock.api import LLM
from penstock.errors import Cancelled, InvalidArgument

PROMPT = "Once upon a time"
FEW = {"max_tokens": 4}


@pytest.fixture(scope="module")
def llm():
    return penstock.load(device="cpu")


def test_public_names_are_shown_before_they_are_imported():
    assert set(penstock.__all__) <= set(dir(penstock))
    assert not [name for name in dir(penstock) if name.startswith("_") and not name.startswith("__")]
    assert (Path(penstock.__file__).parent / "py.typed").is_file()


def test_modules_of_the_public_names_are_there_without_an_import():
    code = "import penstock, sys; assert 'penstock.api' not in sys.modules; penstock.models.register, penstock.ops"
    subprocess.run([sys.executable, "-c", code], check=True)
    text = pydoc.render_doc(penstock, renderer=pydoc.plaintext)
    assert all(f"{name}(" in text for name in ("load", "restore", "quantize", "class LLM", "embed", "agenerate"))


def test_a_closed_model_gives_its_memory_back_and_refuses_everything():
    with penstock.load(device="cpu") as llm:
        engine = weakref.ref(llm.engine)
        unread = llm.stream(PROMPT)
        next(unread)
        session = llm.session()
    with pytest.raises(Cancelled, match="closed before the answer was complete"):
        list(unread)
    with pytest.raises(Cancelled, match="takes no requests"):
        session.generate(PROMPT)
    asked = (lambda: llm.generate(PROMPT), lambda: llm.embed(PROMPT), lambda: llm.config)
    for refused in (*asked, llm.session, llm.stats):
        with pytest.raises(InvalidArgument, match="model: it was closed, expected an open one"):
            refused()
    assert repr(llm) == "LLM(closed)"
    llm.close()
    session.close()
    del session, unread
    gc.collect()
    assert engine() is None


def test_texts_of_objects(llm):
    answer = llm.generate(PROMPT, **FEW)
    assert str(answer) == answer.text and f"{answer}" == answer.text
    with llm.session() as session:
        session.append("a")
        assert repr(session) == f"Session({len(session)} tokens of {llm.max_context})"
    assert repr(session) == f"Session(closed of {llm.max_context})"
    assert repr(llm.tokenizer).startswith(f"Tokenizer({llm.tokenizer.vocab_size} tokens, ends at [")


def test_overloads_tell_one_prompt_from_several():
    for method in (LLM.generate, LLM.agenerate):
        assert [one.__annotations__["return"] for one in get_overloads(method)] == ["Completion", "list[Completion]"]


def test_options_that_are_lists_have_one_value_per_prompt(llm):
    prompts = [PROMPT, "The king"]
    found = llm.generate(prompts, max_tokens=[2, 5], temperature=[0.0, 0.9], seed=[1, 2], stop=[["zzz"], []])
    assert [len(answer.tokens) for answer in found] == [2, 5]
    assert found[1].text == llm.generate("The king", max_tokens=5, temperature=0.9, seed=2).text
    both = llm.generate(prompts, max_tokens=3, stop=["zzz", "yyy"])  # stop strings of both
    assert [len(answer.tokens) for answer in both] == [3, 3]
    with pytest.raises(InvalidArgument, match="seed has 3 values, expected 2: one per prompt"):
        llm.generate(prompts, seed=[1, 2, 3])


def test_a_stream_of_several_prompts_has_their_numbers(llm):
    prompts = [PROMPT, "The king", "A fox"]
    texts = ["", "", ""]
    for number, chunk in llm.stream_batch(prompts, max_tokens=[3, 4, 2]):
        texts[number] += chunk.text
    assert texts == [answer.text for answer in llm.generate(prompts, max_tokens=[3, 4, 2])]
    with pytest.raises(InvalidArgument, match="prompts is one prompt, expected a list"):
        llm.stream_batch(PROMPT)


def test_answers_in_an_event_loop(llm):
    async def several():
        one, many = await asyncio.gather(llm.agenerate(PROMPT, **FEW), llm.agenerate([PROMPT, "The king"], **FEW))
        streamed = [chunk.text async for chunk in llm.astream(PROMPT, **FEW)]
        task = asyncio.create_task(llm.agenerate(PROMPT, max_tokens=2000))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return one, many, "".join(streamed)

    one, many, streamed = asyncio.run(several())
    want = llm.generate(PROMPT, **FEW).text
    assert one.text == streamed == many[0].text == want
    assert many[1].text == llm.generate("The king", **FEW).text
    assert llm.scheduler.metrics().running == 0


def test_a_response_format_holds_without_a_server(llm):
    pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = llm.chat([{"role": "user", "content": "Once upon a time"}], max_tokens=60, response_format=wanted)
    assert json.loads(answer.text)["a"] in (1, 2)
    for answer in llm.generate(
        [PROMPT, "The king"], max_tokens=12, response_format=wanted
    ):  # the demo likes white space
        assert "".join(answer.text.split()).startswith('{"a"')
    with pytest.raises(InvalidArgument, match="expected one of the two"):
        llm.generate(PROMPT, response_format=wanted, grammar=object())


def test_a_fork_goes_on_by_itself(llm):
    with llm.session() as session:
        session.append(PROMPT)
        other = session.fork()
        first, second = (one.generate(" there", max_tokens=5).text for one in (session, other))
        assert first == second and other.tokens == session.tokens
        other.append(" a fox")
        assert len(other) > len(session)
        other.close()
        assert session.generate(max_tokens=2).tokens


def test_a_tokenizer_as_transformers_has_it(llm):
    tokenizer = llm.tokenizer
    ids = tokenizer.encode("a fox")
    assert tokenizer("a fox") == {"input_ids": ids, "attention_mask": [1] * len(ids)}
    assert tokenizer(["a fox", "b"])["input_ids"] == [ids, tokenizer.encode("b")]
    assert tokenizer.eos_token_id == tokenizer.eos_id and tokenizer.bos_token_id == tokenizer.bos_id
    assert tokenizer.eos_token_id in tokenizer.eos_ids
    messages = [{"role": "user", "content": "hello"}]
    text = tokenizer.apply_chat_template(messages)
    tokens = tokenizer.apply_chat_template(messages, tokenize=True)
    assert isinstance(text, str) and tokens == tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"] == tokens
    with pytest.raises(InvalidArgument, match="expected it with tokenize=True"):
        tokenizer.apply_chat_template(messages, return_dict=True)
