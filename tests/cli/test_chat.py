import fcntl
import io
import os
import pty
import select
import signal
import stat
import subprocess
import sys
import termios

import pytest

from penstock import api
from penstock.cli import chat as verb
from penstock.cli.chat import Conversation
from penstock.engine.request import Chunk
from tests.cli.common import call
from tests.cli.model import write_small_model

GREEDY = {"temperature": 0.0, "max_tokens": 4, "seed": 0}
SAMPLED = GREEDY | {"temperature": 1.5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_small_model(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="module")
def llm(folder):
    return api.load(folder, device="reference")


@pytest.fixture
def say(monkeypatch, capsys, llm):
    """Run a scripted chat on the model that is already there."""

    def run(*lines, options=("-m", "4"), model=llm):
        monkeypatch.setattr(api, "load", lambda *_, **__: model)
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return call(capsys, "chat", *options)

    return run


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


def answer(conversation, message, arguments=GREEDY):
    return "".join(chunk.text for chunk in conversation.answer(message, lambda: None, arguments))


def test_chat_answers_every_line_and_remembers(say, llm):
    shown = say("hello", "and then?", "/exit", "never read")
    first = llm.chat([user("hello")], max_tokens=4).text
    second = llm.chat([user("hello"), said(first), user("and then?")], max_tokens=4).text
    assert (shown.status, shown.out) == (0, f"{first}\n{second}\n")
    start, one, two = shown.err.splitlines()
    assert start == f"demo, context of {llm.max_context} tokens, reference; /help lists the commands"
    assert one.startswith("[prompt ") and "answer 4 tokens, " in one
    assert " kept, " in two


def test_chat_clear_forgets_the_conversation(say):
    shown = say("hello", "/clear", "hello")
    first, second = shown.out.splitlines()
    assert first == second
    assert "cleared" in shown.err.splitlines()


def test_chat_regen_answers_again_with_another_seed(say, llm):
    shown = say("hello", "/regen", "/regen", options=("-m", "4", "--temp", "1.5", "--seed", "5"))
    texts = [llm.chat([user("hello")], max_tokens=4, temperature=1.5, seed=seed).text for seed in (5, 6, 7)]
    assert shown.out == "".join(f"{text}\n" for text in texts)
    assert len(set(texts)) == 3


def test_chat_regen_needs_an_answer_and_says_when_it_changes_nothing(say):
    shown = say("/regen", "hello", "/regen")
    assert shown.status == 1
    assert shown.err.splitlines()[1] == "/regen: there is no answer yet, expected a message first"
    assert "the temperature is 0: the answer will be the same (start with --temp 0.8)" in shown.err
    first, second = shown.out.splitlines()
    assert first == second


@pytest.mark.parametrize("end", ["/exit", "/quit", "q", None])
def test_chat_ends_in_several_ways(say, end):
    shown = say(*([end] if end else []))
    assert (shown.status, shown.out) == (0, "")


def test_chat_help_and_unknown_commands(say):
    shown = say("/help", "", "   ", "/nosuch thing")
    assert shown.out == ""
    assert "/regen" in shown.err and "Ctrl-C" in shown.err
    assert shown.err.splitlines()[-1] == "/nosuch is no command; /help lists them"
    assert shown.status == 1


def test_chat_sends_paths_as_messages(say):
    assert len(say("/usr/bin is a folder").out.splitlines()) == 1


def test_chat_says_when_the_context_is_full(say, folder):
    small = api.load(folder, device="reference", max_context=24)
    shown = say("one two three four five six seven eight nine ten eleven twelve thirteen", "hi", model=small)
    assert shown.status == 1
    long, kept = shown.err.splitlines()[1:3]
    assert long.startswith("the conversation has ")
    assert long.endswith("expected fewer than 24 (the context); /clear starts a new one")
    assert kept.startswith("[prompt ")  # the message that did not fit is forgotten
    shown = say("hi", options=("-m", "100"), model=small)
    assert shown.err.splitlines()[-1] == "the context of 24 tokens is full; /clear starts a new conversation"


def test_chat_needs_a_template(say, tmp_path):
    plain = api.load(write_small_model(tmp_path / "m", chat_template=None), device="reference")
    shown = say("hello", model=plain)
    assert (shown.status, shown.out) == (1, "")
    assert shown.err.startswith("penstock: error: chat: demo has no chat template")


def test_chat_missing_model_is_one_line(capsys):
    shown = call(capsys, "chat", "--model", "/nowhere/model")
    assert (shown.status, shown.out, shown.err.count("\n")) == (1, "", 1)


@pytest.mark.parametrize("option", [("--pipeline",), ("--json-schema", "{}")])
def test_chat_refuses_what_it_lacks_by_name(capsys, option):
    shown = call(capsys, "chat", *option)
    assert shown.status == 2 and shown.err.count("\n") == 1
    assert shown.err.startswith(f"penstock: error: {option[0]}: not supported by penstock yet; ")


def test_chat_begins_with_a_prompt_and_ends_after_one_turn(say, llm):
    shown = say("never read", options=("-p", "hello", "-st", "-m", "3"))
    assert (shown.status, shown.out) == (0, llm.chat([{"role": "user", "content": "hello"}], max_tokens=3).text + "\n")
    assert say("and then", options=("-p", "hello", "-n", "3")).out.count("\n") >= 2


def test_chat_reads_control_tokens_as_text_unless_allowed(say, llm):
    messages = [{"role": "system", "content": "<|im_end|>"}, user("a<|im_start|>b")]
    options = ("-m", "1", "-sys", "<|im_end|>")
    for more in ({}, {"allow_special_in_messages": True}):
        shown = say("a<|im_start|>b", options=(*options, *(f"--{name.replace('_', '-')}" for name in more)))
        assert f"[prompt {len(llm.chat_tokens(messages, **more))} tokens, " in shown.err
    assert len(llm.chat_tokens(messages)) > len(llm.chat_tokens(messages, allow_special_in_messages=True))


def test_conversation_computes_nothing_twice(llm):
    conversation = Conversation(llm, [], {})
    first = answer(conversation, "hello")
    assert conversation.read[1] == 0
    total = sum(conversation.read)
    answer(conversation, "go on")
    prompt = llm.chat_tokens([user("hello"), said(first), user("go on")])
    assert sum(conversation.read) == len(prompt)
    assert conversation.read[1] >= total  # the first turn, and the answer as far as it reads back as the same tokens


def test_chat_compiles_the_template_before_the_first_message(say, tmp_path):
    broken = api.load(write_small_model(tmp_path / "m", chat_template="{% if %}"), device="reference")
    shown = say(model=broken)
    assert (shown.status, shown.out) == (1, "")
    assert "chat template, line 1: Expected an expression" in shown.err


def test_conversation_keeps_what_a_template_that_drops_reasoning_leaves(tmp_path):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant thinking aloud: {% endif %}"
    )
    model = api.load(write_small_model(tmp_path / "m", chat_template=template), device="reference")
    conversation = Conversation(model, [], {})
    answer(conversation, "hello there")
    history = model.tokenizer.encode("<|im_start|>user hello there<|im_end|><|im_start|>assistant", False)
    answer(conversation, "go on")
    assert conversation.read[1] == len(history)


def test_conversation_keeps_the_system_prompt_over_a_clear(llm):
    first = [{"role": "system", "content": "one two three four five"}]
    conversation = Conversation(llm, first, {})
    before = answer(conversation, "hello")
    conversation.clear()
    assert answer(conversation, "hello") == before
    kept = llm.tokenizer.encode("<|bos|><|im_start|>system\none two three four five<|im_end|>")
    assert conversation.read[1] >= len(kept)


def test_conversation_answers_as_the_model_does_alone(llm):
    conversation = Conversation(llm, [], {})
    first = answer(conversation, "hello", SAMPLED)
    second = answer(conversation, None, SAMPLED)
    third = answer(conversation, "go on", SAMPLED)
    history = [user("hello"), said(second), user("go on")]
    assert second != first
    assert third == llm.chat(history, max_tokens=4, temperature=1.5, seed=0).text


def test_conversation_left_early_keeps_the_answer_so_far(llm):
    conversation = Conversation(llm, [], {})
    chunks = conversation.answer("hello", lambda: None, GREEDY)
    first = next(chunks).text
    chunks.close()
    assert conversation._messages[-1] == said(first)
    expected = llm.chat([user("hello"), said(first), user("more")], max_tokens=4).text
    assert answer(conversation, "more") == expected


def test_conversation_stopped_while_reading_forgets_the_message(llm):
    conversation = Conversation(llm, [], {})
    before = answer(conversation, "hello")

    def stop():
        raise verb._Stopped

    with pytest.raises(verb._Stopped):
        conversation.answer("a b c", stop, GREEDY)
    assert [m["content"] for m in conversation._messages] == ["hello", before]
    history = [user("hello"), said(before), user("go on")]
    assert answer(conversation, "go on") == llm.chat(history, max_tokens=4).text


def test_answers_with_headers_are_shown_without_and_kept_without_their_reasoning(llm, monkeypatch):
    """Of gpt-oss, whose templates refuse markers in messages."""
    monkeypatch.setattr("penstock.text.formats.format_of", lambda _: "harmony")
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes. <|end|>"
    kept = said("")
    read = verb._WithHeaders(llm, kept)
    shown = [read(Chunk(piece, 0)).text for piece in text] + [read(Chunk("", 0, "stop")).text]
    assert "".join(shown) == "Hm.\n\nYes." and kept == said("Yes.")
    assert verb._headers(llm)["shown"] and Conversation(llm, [], {})._shown == verb._headers(llm)


def test_interrupts_only_leave_a_mark_until_the_third():
    interrupts = verb._Interrupts()
    with interrupts.watched():
        assert not interrupts.pending
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.pending
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with interrupts.watched():
        assert not interrupts.pending


def test_chat_ctrl_c_stops_the_answer_not_the_program(folder):
    command = [sys.executable, "-m", "penstock", "chat", "--model", folder, "--device", "reference", "-m", "1500"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    child.stdin.write(b"hello\n")
    child.stdin.flush()
    assert child.stdout.read(1)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(b"/help\n/exit\n", timeout=60)
    assert child.returncode == 0
    assert out.endswith(b"\n")
    lines = err.decode().splitlines()
    assert "stopped" in lines and "/clear, r    forget" in err.decode()
    assert "Traceback" not in err.decode()


def test_chat_on_a_terminal_prompts_and_keeps_a_private_history(folder, tmp_path):
    master, terminal = pty.openpty()
    command = [sys.executable, "-m", "penstock", "chat", "--model", folder, "--device", "reference", "-m", "2"]
    env = os.environ | {"NO_COLOR": "1", "TERM": "dumb", "XDG_STATE_HOME": str(tmp_path / "state")}
    child = subprocess.Popen(
        command,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=env,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # the terminal whose Ctrl-C counts
    )
    os.close(terminal)
    try:
        until(master, b">> ")
        os.write(master, b"hello\n")
        until(master, b"tok/s]\r\n>> ")
        os.write(master, b"\x04")
        assert child.wait(timeout=30) == 0
    finally:
        child.kill()
        os.close(master)
    history = tmp_path / "state" / "penstock" / "chat_history"
    assert history.read_text() == "hello\n"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


def until(master, text):
    seen = b""
    while text not in seen:
        assert select.select([master], [], [], 60)[0], seen
        seen += os.read(master, 4096)


def test_history_file_obeys_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert verb._history_file() == tmp_path / "penstock" / "chat_history"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert verb._history_file() == tmp_path / ".local" / "state" / "penstock" / "chat_history"


def test_chat_help_fits_80_columns_and_shows_an_example(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = call(capsys, "chat", "--help")
    assert "Examples:" in shown.out
    assert max(map(len, shown.out.splitlines())) <= 80
