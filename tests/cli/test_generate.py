import importlib.util
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock import api
from penstock.cli import generate as verb
from penstock.cli._foreign import LOADING, SAMPLING
from tests.cli.common import call, program
from tests.cli.model import write_small_model

DEMO = Path(penstock.__file__).parent / "demo" / "model"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_small_model(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="module")
def llm(folder):
    return api.load(folder, device="reference")


@pytest.fixture
def loaded(monkeypatch, llm):
    """Let the program use the model that is already there; the arguments it would have loaded one with."""
    asked = {}

    def load(model, notify=None, **arguments):
        asked.update(arguments, model=model, notify=notify)
        if notify:
            notify("a remark")
        return llm

    monkeypatch.setattr(api, "load", load)
    return asked


def typed(monkeypatch, text):
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def test_generate_prints_text_to_stdout_and_numbers_to_stderr(capsys, loaded, llm):
    shown = call(capsys, "generate", "-p", "Once upon a time", "-m", "5")
    expected = llm.chat([{"role": "user", "content": "Once upon a time"}], max_tokens=5)
    assert (shown.status, shown.out) == (0, f"{expected.text}\n")
    remark, prompt, generation, memory = shown.err.splitlines()
    assert remark == "a remark"
    assert prompt.startswith(f"Prompt: {expected.usage.prompt_tokens} tokens, ")
    assert prompt.endswith(" tokens-per-sec")
    assert generation.startswith("Generation: 5 tokens, ")
    assert re.fullmatch(r"Peak memory: \d+\.\d{3} GB", memory)


def test_generate_quietly_prints_the_text_alone(capsys, loaded, llm):
    shown = call(capsys, "generate", "-p", "hello", "-m", "2", "--ignore-chat-template", "--verbose", "F")
    assert shown.err == ""
    assert shown.out == llm.generate("hello", max_tokens=2).text + "\n"
    assert loaded["notify"] is None


def test_generate_has_the_defaults_of_mlx_lm(capsys, loaded, monkeypatch, llm):
    asked = {}
    monkeypatch.setattr(llm, "stream", lambda tokens, **arguments: asked.update(arguments, tokens=tokens) or iter(()))
    assert call(capsys, "generate").status == 0
    assert loaded["model"] is None
    assert loaded["max_context"] is None and loaded["threads"] is None and loaded["offline"] is None
    assert asked["tokens"] == llm.chat_tokens([{"role": "user", "content": "hello"}])
    expected = {"max_tokens": 100, "temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0, "logprobs": None}
    assert asked.items() >= expected.items()
    assert isinstance(asked["seed"], int)


def test_generate_reads_control_tokens_of_the_prompt_as_text_unless_allowed(capsys, loaded, monkeypatch, llm):
    prompts = []
    monkeypatch.setattr(llm, "stream", lambda tokens, **_: prompts.append(tokens) or iter(()))
    for option in ((), ("--allow-special-in-messages",), ("--ignore-chat-template",)):
        assert call(capsys, "generate", "-p", "a<|im_end|>b", "--prefill-response", "<|im_end|>", *option).status == 0
    messages, end = [{"role": "user", "content": "a<|im_end|>b"}], llm.tokenizer.encode("<|im_end|>")
    assert prompts[0] == llm.chat_tokens(messages) + end
    assert prompts[1] == llm.chat_tokens(messages, allow_special_in_messages=True) + end
    assert prompts[2] == llm.tokenizer.encode("a<|im_end|>b<|im_end|>") and len(prompts[0]) > len(prompts[1])


def test_generate_options_reach_the_model(capsys, loaded, monkeypatch, llm):
    asked = {}
    monkeypatch.setattr(llm, "stream", lambda tokens, **arguments: asked.update(arguments, tokens=tokens) or iter(()))
    options = "-hf some/model --revision main --offline --device cpu --dtype float32 --activations float32 -t 1 -c 2K"
    options += " --state-dtype bfloat16"
    options += " --temp 0.7 --top-p 0.9 --min-p 0.05 --top-k 40 --seed 7 --repetition-penalty 1.1 --stop END --stop ."
    options += " --presence-penalty 0.5 --frequency-penalty 0.25 -m 3 --extra-eos-token 5 <|im_end|> -p"
    shown = call(capsys, "generate", *options.split(), r"a\tb\nc")
    assert shown.status == 0
    assert (
        loaded.items()
        >= {
            "model": "some/model",
            "revision": "main",
            "offline": True,
            "device": "cpu",
            "dtype": "float32",
            "state_dtype": "bfloat16",
            "activations": "float32",
            "threads": 1,
            "max_context": 2048,
        }.items()
    )
    assert asked["tokens"] == llm.chat_tokens([{"role": "user", "content": "a\tb\nc"}])
    assert (
        asked.items()
        >= {
            "temperature": 0.7,
            "top_p": 0.9,
            "min_p": 0.05,
            "top_k": 40,
            "seed": 7,
            "repetition_penalty": 1.1,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.25,
            "max_tokens": 3,
            "extra_eos": [5, 3],
            "stop": ["END", "."],
        }.items()
    )


@pytest.mark.parametrize("spelling", ["--max-kv-size", "-c", "--ctx-size", "--max-model-len"])
@pytest.mark.parametrize(("text", "context"), [("512", 512), ("1k", 1000), ("0", None)])
def test_generate_takes_the_context_under_every_name(capsys, loaded, monkeypatch, llm, spelling, text, context):
    monkeypatch.setattr(llm, "stream", lambda tokens, **arguments: iter(()))
    assert call(capsys, "generate", spelling, text).status == 0
    assert loaded["max_context"] == context


def test_generate_json_is_one_object(capsys, loaded, llm):
    options = ("--temp", "0.9", "--seed", "11", "--logprobs", "2", "--json", "--ignore-chat-template")
    shown = call(capsys, "generate", "-p", "The", "-m", "4", *options)
    found = json.loads(shown.out)
    expected = llm.generate("The", max_tokens=4, temperature=0.9, seed=11, logprobs=2)
    assert (shown.status, shown.err) == (0, "")
    assert (found["text"], found["tokens"], found["finish_reason"]) == (expected.text, expected.tokens, "length")
    assert found["seed"] == 11
    assert found["usage"] == {
        "prompt_tokens": expected.usage.prompt_tokens,
        "completion_tokens": 4,
        "total_tokens": expected.usage.prompt_tokens + 4,
        "cached_tokens": 0,
    }
    assert found["timings"]["prompt_tps"] > 0 and found["timings"]["generation_tps"] > 0
    assert [one["token"] for one in found["logprobs"]] == expected.tokens
    assert [one["logprob"] for one in found["logprobs"]] == expected.logprobs
    assert all(len(one["top_logprobs"]) == 2 for one in found["logprobs"])


def test_generate_json_names_a_seed_that_gives_the_text_again(capsys, loaded):
    options = ("-p", "The", "-m", "4", "--temp", "2", "--json", "--ignore-chat-template")
    first = json.loads(call(capsys, "generate", *options).out)
    again = json.loads(call(capsys, "generate", *options, "--seed", str(first["seed"])).out)
    assert again["tokens"] == first["tokens"]


def test_generate_reads_the_prompt_from_stdin(capsys, loaded, monkeypatch, llm):
    typed(monkeypatch, "a\\n\nb")
    shown = call(capsys, "generate", "-p", "-", "-m", "1", "--json", "--ignore-chat-template")
    assert json.loads(shown.out)["usage"]["prompt_tokens"] == len(llm.tokenizer.encode("a\\n\nb"))


def test_generate_puts_system_prompt_variables_and_beginning_into_the_template(capsys, tmp_path, monkeypatch):
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}|{% endfor %}{{ mood }}{{ bos_token }}>"
    folder = write_small_model(tmp_path / "m", chat_template=template)
    model = api.load(folder, device="reference")
    prompts = []
    monkeypatch.setattr(api, "load", lambda *_, **__: model)
    monkeypatch.setattr(model, "stream", lambda tokens, **_: prompts.append(tokens) or iter(()))
    options = ("--system-prompt", "be kind", "--chat-template-config", '{"mood": "mild"}', "--prefill-response", "Yes,")
    assert call(capsys, "generate", "-p", "hi", *options).status == 0
    text = "system:be kind|user:hi|mild<|bos|>>Yes,"
    assert prompts == [model.tokenizer.encode(text, add_special_tokens=False)]


def test_generate_without_a_template_takes_the_prompt_as_it_is(capsys, tmp_path):
    folder = write_small_model(tmp_path / "m", chat_template=None)
    shown = call(capsys, "generate", "--model", folder, "--device", "reference", "-p", "hi", "-m", "2", "--json")
    expected = api.load(folder, device="reference").generate("hi", max_tokens=2)
    assert json.loads(shown.out)["tokens"] == expected.tokens
    refused = call(capsys, "generate", "--model", folder, "--device", "reference", "--system-prompt", "x")
    assert refused.status == 2
    assert refused.err.endswith("--system-prompt: the model has no chat template, expected a prompt alone\n")


def test_generate_ends_at_extra_tokens_and_stop_texts(capsys, loaded, llm):
    common = ("-p", "a", "--ignore-chat-template", "--json", "-m", "4")
    whole = json.loads(call(capsys, "generate", *common).out)
    cut = json.loads(call(capsys, "generate", *common, "--extra-eos-token", str(whole["tokens"][2])).out)
    assert (cut["tokens"], cut["finish_reason"]) == (whole["tokens"][:3], "stop")
    assert cut["text"] == llm.tokenizer.decode(whole["tokens"][:2])
    middle = whole["text"][2:4]
    stopped = json.loads(call(capsys, "generate", *common, "--stop", middle).out)
    assert (stopped["text"], stopped["finish_reason"]) == (whole["text"].partition(middle)[0], "stop")


def test_generate_continues_a_saved_session(capsys, loaded, llm, tmp_path):
    file = str(tmp_path / "session.safetensors")
    with llm.session() as session:
        session.append(llm.chat_tokens([{"role": "user", "content": "Once upon"}])[:-4])  # without what ends a message
        session.save(file)
        read = len(session)
    options = ("--prompt-cache-file", file, "-p", " a time", "-m", "3", "--json")
    found = json.loads(call(capsys, "generate", *options).out)
    rest = llm.tokenizer.encode(" a time<|im_end|>\n<|im_start|>assistant\n")
    whole = llm.generate([*session.tokens, *rest], max_tokens=3)
    assert found["tokens"] == whole.tokens
    assert found["usage"]["cached_tokens"] == read
    assert found["usage"]["prompt_tokens"] == whole.usage.prompt_tokens


def test_generate_takes_or_refuses_the_options_of_others_by_name(capsys, loaded, monkeypatch, llm):
    """Each with one line: a remark that its wish is met, or the nearest way."""
    monkeypatch.setattr(llm, "stream", lambda tokens, **arguments: iter(()))
    for option in (*LOADING, *SAMPLING):
        for name in option.names:
            shown = call(capsys, "generate", "--verbose", "F", name, *(() if option.flag else ("17",)))
            assert shown.err.count("\n") == 1, name
            if option.noted is None:
                assert (shown.status, shown.err) == (0, f"penstock: {name}: {option.remark}\n"), name
            else:
                assert (shown.status, shown.out) == (2, ""), name
                assert shown.err.startswith(f"penstock: error: {name}: not supported by penstock yet"), name
                assert option.instead and option.instead in shown.err, name


@pytest.mark.parametrize(
    ("option", "remark"),
    [
        (("--xtc-probability", "0.0"), ""),
        (("-fa", "auto"), ""),
        (("--spec-type", "none", "--draft-min", "0"), ""),
        (("--draft-max", "3"), ""),
        (("--draft", "3", "--spec-draft-model", "demo"), ""),
        (("-fa", "on"), "penstock: -fa: attention is always computed in one pass\n"),
        (("-ctk", "f16"), "penstock: -ctk: caches have the numbers of --dtype: float32 on a CPU, bfloat16 on a GPU\n"),
        (
            ("-ngl", "99"),
            "penstock: -ngl 99: where there is a GPU it holds the whole model; --expert-cache bounds its ",
        ),
    ],
)
def test_generate_lets_values_pass_that_ask_for_nothing(capsys, loaded, monkeypatch, llm, option, remark):
    monkeypatch.setattr(llm, "stream", lambda tokens, **arguments: iter(()))
    shown = call(capsys, "generate", "--verbose", "F", *option)
    assert shown.status == 0 and shown.err.startswith(remark) and shown.err.count("\n") == bool(remark)
    assert loaded["device"] == "auto"


def test_generate_takes_no_gpu_layers_as_the_cpu(capsys, loaded):
    assert call(capsys, "generate", "-ngl", "0", "-m", "1").status == 0
    assert loaded["device"] == "cpu"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("-m", "model.gguf"),
            "Invalid value for '--max-tokens' / '-m' / '-n' / '--n-predict' / '--predict': "
            "'model.gguf' is no number of tokens; --model M names the model",
        ),
        (("-ngl", "0", "--device", "cuda"), "-ngl: is 0, which is --device cpu"),
        (("-f", "x", "-p", "y"), "--file: a --prompt is given as well"),
        (("-j", "{}", "--grammar", "x"), "--grammar: --json-schema is given as well"),
        (("-j", "{"), "--json-schema: "),
        (("-j", "[]"), "--json-schema: is a list, expected a JSON schema"),
        (("--logit-bias", "x+1"), "--logit-bias: is 'x+1', expected a token id and a number"),
        (("--chat-template", "chatml"), "--chat-template: names of templates are not known here"),
        (("--prompt-cache-file", "x", "-j", "{}"), "--json-schema: not supported together with --prompt-cache-file"),
        (("hello",), "Got unexpected extra argument (hello)"),
        (("--logprobs", "2"), "--logprobs: expected together with --json"),
        (("--verbose", "maybe"), "--verbose: is 'maybe', expected T or F"),
        (("--chat-template-config", "{"), "--chat-template-config: not valid JSON"),
        (("--chat-template-config", "[1]"), "--chat-template-config: is a list, expected a JSON object"),
        (("--chat-template-config", '{"messages": []}'), "--chat-template-config: 'messages' is set by penstock"),
        (("--prompt-cache-file", "x", "--system-prompt", "y"), "--system-prompt: belongs before what"),
        (("--max-tokens", "0"), "Invalid value for '--max-tokens' / '-m'"),
        (("--temp", "-1"), "Invalid value for '--temp'"),
        (("--temp", "nan"), "Invalid value for '--temp'"),
        (("--repetition-penalty", "0"), "repetition_penalty is 0"),
        (("--top-p", "2"), "Invalid value for '--top-p'"),
        (("--seed", "-2"), "Invalid value for '--seed' / '-s'"),
        (("--device", "tpu"), "Invalid value for '--device'"),
        (("-c", "many"), "Invalid value for '--max-kv-size'"),
        (("-c", ""), "Invalid value for '--max-kv-size'"),
    ],
)
def test_generate_wrong_usage_is_status_2_before_anything_is_loaded(capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(api, "load", lambda *_, **__: pytest.fail("loaded"))
    shown = call(capsys, "generate", *arguments)
    assert (shown.status, shown.out) == (2, "")
    assert shown.err.startswith(f"penstock: error: {message}")
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "/nowhere/model"), "'/nowhere/model': no such folder"),
        (("-p", "\udcff"), "--prompt: is not valid UTF-8"),
        (("--stop", "\udcff"), "--stop: is not valid UTF-8"),
    ],
)
def test_generate_failures_are_one_line_and_status_1(capsys, arguments, message):
    shown = call(capsys, "generate", *arguments)
    assert (shown.status, shown.out) == (1, "")
    assert shown.err.startswith(f"penstock: error: {message}")
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-p", "", "--ignore-chat-template"), "prompt has no tokens"),
        (("-p", "a " * 3000), "prompt has "),
        (("--extra-eos-token", "5000"), "--extra-eos-token: is 5000, expected a token id below 4096"),
        (("--extra-eos-token", "no such token"), "--extra-eos-token: 'no such token' is"),
        (("--prompt-cache-file", "/nowhere/file"), "/nowhere/file: no such file"),
    ],
)
def test_generate_refuses_what_does_not_fit_the_model(capsys, loaded, arguments, message):
    shown = call(capsys, "generate", *arguments)
    assert (shown.status, shown.out) == (1, "")
    assert shown.err.splitlines()[-1].startswith(f"penstock: error: {message}")


def test_generate_of_the_demo_model_in_a_pipe():
    shown = program("generate", "-p", "Once", "-m", "3", "--device", "reference", shell="| cat")
    assert shown.status == 0
    assert shown.out.endswith("\n") and "==========" not in shown.out
    assert [line.partition(":")[0] for line in shown.err.splitlines()] == ["Prompt", "Generation", "Peak memory"]


def test_generate_is_quiet_when_nobody_reads_on(folder):
    options = ("generate", "--model", folder, "--device", "reference", "--ignore-chat-template", "--verbose", "F")
    shown = program(*options, "-m", "500", shell="| head -c 1")
    assert len(shown.out) == 1
    assert shown.err == ""


def test_generate_on_a_terminal_prints_rules_as_mlx_lm(folder):
    options = ["--model", folder, "--device", "reference", "-m", "2", "--ignore-chat-template"]
    status, text = in_terminal("generate", *options)
    lines = text.splitlines()
    at = lines.index("==========")
    assert status == 0
    assert lines[at + 2] == "=========="
    assert [line.partition(":")[0] for line in lines[at + 3 :]] == ["Prompt", "Generation", "Peak memory"]


def in_terminal(*arguments):
    """The program's status and all that it writes to a terminal."""
    master, terminal = pty.openpty()
    command = [sys.executable, "-m", "penstock", *arguments]
    env = os.environ | {"NO_COLOR": "1"}
    child = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=env)
    os.close(terminal)
    text = b""
    while True:
        try:
            data = os.read(master, 4096)
        except OSError:  # how Linux says that the other side is closed
            data = b""
        if not data:
            break
        text += data
    os.close(master)
    return child.wait(), text.decode()


def test_generate_stops_at_ctrl_c_without_a_traceback(folder):
    options = ["--model", folder, "--device", "reference", "-m", "2000", "--ignore-chat-template", "-p", "a"]
    command = [sys.executable, "-m", "penstock", "generate", *options]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    first = child.stdout.read(1)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert (first + out).endswith(b"\n")
    assert b"Traceback" not in err and b"Generation" not in err


def test_generate_help_fits_80_columns_and_shows_an_example(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = call(capsys, "generate", "--help")
    assert "Examples:" in shown.out
    assert max(map(len, shown.out.splitlines())) <= 80
    assert "--kv-bits" not in shown.out


def test_token_id_takes_ids_and_texts(llm):
    assert verb._token_id(llm, "3") == 3
    assert verb._token_id(llm, "<|im_end|>") == 3


def test_generate_reads_the_prompt_from_a_file_and_makes_escapes_real(capsys, loaded, monkeypatch, llm, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("Tell me\\ta \\x22story\\x22\n")
    read = []
    monkeypatch.setattr(llm, "stream", lambda tokens, **_: read.append(llm.tokenizer.decode(tokens)) or iter(()))
    plain = ("generate", "--verbose", "F", "--no-conversation")
    for words in (
        ("-f", str(file)),
        ("-f", str(file), "-e"),
        ("-p", r"a\nb\"c\xc3\xa9"),
        ("-p", r"a\nb\"\xc3\xa9", "-e"),
        ("-p", r"a\nb", "--no-escape"),
    ):
        assert call(capsys, *plain, *words).status == 0
    assert read == [r"Tell me\ta \x22story\x22", 'Tell me\ta "story"', 'a\nb\\"c\\xc3\\xa9', 'a\nb"é', r"a\nb"]
    for words, message in ((("-f", "/nowhere"), "--file: /nowhere: no such file"),
                           (("-e", "-p", r"\xff"), r"--escape: \xff is not valid UTF-8")):  # fmt: skip
        shown = call(capsys, *plain, *words)
        assert (shown.status, shown.err) == (1, f"penstock: error: {message}\n")


@pytest.mark.skipif(importlib.util.find_spec("llguidance") is None, reason="needs penstock[grammar]")
def test_generate_holds_the_answer_to_a_schema_or_a_grammar(capsys, loaded, tmp_path):
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    (tmp_path / "s.json").write_text(json.dumps(schema))
    (tmp_path / "g.gbnf").write_text('# two words\nroot ::= word " " word\nword ::= "yes" | "no"\n')
    for words in (("-j", json.dumps(schema)), ("-jf", str(tmp_path / "s.json"))):
        shown = call(capsys, "generate", "-n", "40", "--verbose", "F", *words)
        assert json.loads(shown.out)["n"] in (1, 2)
    gbnf = 'root ::= ("yes" | "no") " " ("yes" | "no")'
    for words in (("--grammar", gbnf), ("--grammar-file", f"{tmp_path}/g.gbnf")):
        shown = call(capsys, "generate", "-n", "40", "--verbose", "F", *words)
        assert re.fullmatch("(yes|no) (yes|no)\n", shown.out)
    for wrong, message in (
        ("answer ::= x", "grammar has no rule root"),
        ('root ::= "yes', "grammar is no GBNF"),
        ("root ::= missing", "grammar "),
        ("root ::= " + '"a" ' * 20_000, "grammar has 80009 characters"),
    ):
        shown = call(capsys, "generate", "--verbose", "F", "--grammar", wrong)
        assert (shown.status, shown.out, shown.err.count("\n")) == (1, "", 1)
        assert shown.err.startswith(f"penstock: error: {message}")


def test_generate_limits_the_repetition_penalty_and_adds_biases(capsys, loaded, monkeypatch, llm):
    asked = []
    monkeypatch.setattr(llm, "stream", lambda tokens, **options: asked.append(options) or iter(()))
    for last in ("64", "-1", "0"):
        words = ["--repeat-penalty", "1.1", "--repeat-last-n", last, "-l", "7-100", "--logit-bias", "15+1.5"]
        assert call(capsys, "generate", *words, "-n", "-1", "-s", "-1").status == 0
    limits = [(options["repetition_penalty"], options["repetition_context"]) for options in asked]
    assert limits == [(1.1, 64), (1.1, None), (1.0, None)]
    assert {options["max_tokens"] for options in asked} == {llm.max_context}
    assert asked[0]["logit_bias"] == {7: -100.0, 15: 1.5} and asked[0]["seed"] != asked[1]["seed"]


def test_generate_takes_another_chat_template(capsys, folder, monkeypatch):
    own = api.load(folder, device="reference")
    monkeypatch.setattr(api, "load", lambda *_, **__: own)
    read = []
    monkeypatch.setattr(own, "stream", lambda tokens, **_: read.append(own.tokenizer.decode(tokens)) or iter(()))
    assert call(capsys, "generate", "--chat-template", "A: {{ messages[0].content }} B:", "-p", "hi").status == 0
    assert read == ["A: hi B:"]


def test_cache_prompt_writes_what_generate_goes_on_from(capsys, loaded, llm, tmp_path):
    file = str(tmp_path / "cache.safetensors")
    shown = call(capsys, "cache_prompt", "-p", "Once upon", "--prompt-cache-file", file)
    assert shown.status == 0 and re.fullmatch(rf"{file}: \d+ tokens, .*B\n", shown.out)
    assert re.search(r"^Processed \d+ tokens \(.* tok/s\)\nPeak memory: .* GB$", shown.err, re.MULTILINE)
    found = json.loads(call(capsys, "generate", "--prompt-cache-file", file, "-p", " a time", "-m", "3", "--json").out)
    start = llm.chat_tokens([{"role": "user", "content": "Once upon"}])[:-5]  # without what ends a message
    rest = llm.tokenizer.encode(" a time<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
    assert found["tokens"] == llm.generate([*start, *rest], max_tokens=3).tokens
    assert found["usage"]["cached_tokens"] == len(start)
    plain = ("-p", "Once", "--ignore-chat-template", "--prompt-cache-file", file)
    assert call(capsys, "cache_prompt", *plain).status == 0
    ends = ("--prompt-cache-file", file, "-p", " upon", "--ignore-chat-template", "-m", "3", "--json")
    found = json.loads(call(capsys, "generate", *ends).out)
    whole = llm.generate([*llm.tokenizer.encode("Once"), *llm.tokenizer.encode(" upon", False)], max_tokens=3)
    assert found["tokens"] == whole.tokens
    stopped = json.loads(call(capsys, "generate", *ends, "--extra-eos-token", str(whole.tokens[0])).out)
    assert len(stopped["tokens"]) == 1


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (("-p", "x"), 2, "--prompt-cache-file: is missing"),
        (("--prompt-cache-file", "x"), 2, "--prompt: is missing"),
        (("-p", "x", "--prompt-cache-file", "x", "--kv-bits", "4"), 2, "--kv-bits: not supported by penstock yet"),
        (("-p", "x", "--prompt-cache-file", "/nowhere/x"), 1, "/nowhere/x: cannot be written: No such file"),
    ],
)
def test_cache_prompt_failures_are_one_line(capsys, loaded, words, status, message):
    shown = call(capsys, "cache_prompt", *words)
    assert (shown.status, shown.out) == (status, "")
    assert f"penstock: error: {message}" in shown.err.splitlines()[-1]


def test_cache_prompt_looks_at_the_file_before_it_loads_the_model(capsys, tmp_path):
    for path, message in (("/nowhere/x", "No such file"), (str(tmp_path), "is a folder")):
        shown = call(capsys, "cache_prompt", "-p", "x", "--prompt-cache-file", path, "--model", "no/such/model")
        assert (shown.status, shown.out) == (1, "")
        assert shown.err.startswith(f"penstock: error: {path}: cannot be written: {message}")
    assert not list(tmp_path.iterdir())


def test_generate_drafts_with_a_second_model(capsys):
    demo = str(DEMO)
    line = ("generate", "-p", "The king", "-m", "12", "--temp", "0.8", "--seed", "3", "--device", "cpu")
    plain = call(capsys, *line, "--speculate", "off")
    for more in (("--speculate", "draft", "--num-draft-tokens", "2"), ()):
        shown = call(capsys, *line, "--draft-model", demo, *more)
        assert (shown.status, shown.out) == (0, plain.out)
    lacking = call(capsys, *line, "--speculate", "draft")
    assert lacking.status == 1 and "draft_model is None, expected a model that drafts" in lacking.err
    assert lacking.err.count("\n") == 1
