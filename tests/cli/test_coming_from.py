"""Every command line of docs/coming-from.md does what the page says of it: works, works with a remark, is refused.

They run in this process, with the small model in the place of every one that is named: names are resolved as always, in
a cache of the hub that has them, or as files of the folder. Sizes are cut at the end of each line.
"""

import inspect
import io
import re
import runpy
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from penstock import api
from penstock.cli.main import run
from penstock.weights.resolve import resolve_model
from tests.cli.model import write_small_model
from tests.convert.common import write as write_source

PAGE = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text()
ROW = re.compile(r"^\| `(.+?)` \| `(.+?)` \| (works|works, but .+|refused: .+) \|$", re.MULTILINE)
PROGRAMS = {"mlx-lm": r"(python -m )?mlx_lm[. ]", "llama.cpp": "llama-", "vLLM": "vllm "}
SMALL = {
    "generate": "-m 2",
    "chat": "-m 2",
    "benchmark": "-p 2 -g 3 -b 2 -n 1 --delay 0",
    "bench": "-p 2 -n 1 -d 0 -r 1",
    "perplexity": "--sequence-length 8 --num-samples 2",
}


def rows(title: str) -> list[tuple[str, str, str]]:
    """The table below a heading: their line, ours, and what becomes of it."""
    section = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert section, title
    found = [
        (theirs.replace(r"\|", "|"), ours.replace(r"\|", "|"), what) for theirs, ours, what in ROW.findall(section[1])
    ]
    assert len(found) == len(re.findall(r"^\| `", section[1], re.MULTILINE)), "a row has another form"
    return found


def test_the_tables_have_what_they_promise():
    for title, count, working in (("mlx-lm", 34, 30), ("llama.cpp", 23, 16), ("vLLM", 12, 7)):
        table = rows(title)
        assert len(table) == count
        assert sum(what.startswith("works") for _, _, what in table) >= working
        assert all(re.search(rf"(^|\| ){PROGRAMS[title]}", theirs) for theirs, _, _ in table)


def test_command_lines_of_mlx_lm_and_vllm_differ_in_the_program_alone():
    for title in ("mlx-lm", "vLLM"):
        for theirs, ours, _ in rows(title):
            name = "penstock." if "python -m" in theirs else "penstock "
            assert re.sub(r"\bmlx_lm\.|^vllm ", name, theirs) == ours


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the files that the page names, and a cache of the hub with its models."""
    folder = tmp_path_factory.mktemp("work")
    small = write_small_model(tmp_path_factory.mktemp("models") / "small")
    source = write_source(tmp_path_factory.mktemp("models") / "source", "qwen2")
    stub = tmp_path_factory.mktemp("gguf")
    (stub / "Qwen3-0.6B-Q8_0.gguf").touch()
    models = {"mlx-community/Qwen3-0.6B-4bit": small, "Qwen/Qwen3-0.6B": source, "ggml-org/Qwen3-0.6B-GGUF": stub}
    for name, files in models.items():
        cached = folder / "hub" / f"models--{name.replace('/', '--')}"
        (cached / "refs").mkdir(parents=True)
        (cached / "refs" / "main").write_text("0" * 40)
        (cached / "snapshots").mkdir()
        (cached / "snapshots" / ("0" * 40)).symlink_to(files)
    for name in ("model-Q8_0.gguf", "model-F16.gguf"):
        (folder / name).touch()
    (folder / "prompt.txt").write_text("Tell me a story.\n")
    (folder / "text.txt").write_text("Once upon a time there was a fox who lived in a wood. " * 3)
    (folder / "answer.gbnf").write_text('root ::= "yes" | "no"\n')
    (folder / "chat.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    return folder, api.load(small, device="reference")


@pytest.fixture
def here(place, monkeypatch):
    """Run in that folder: models are resolved, and the small one is there already; a server does not listen."""
    folder, llm = place
    monkeypatch.chdir(folder)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setattr("penstock.analysis.bandwidth.array_bytes", lambda: 1 << 20)
    real, templates = inspect.signature(api.load), llm.tokenizer.templates

    def load(model=None, **options):
        real.bind(model, **options)
        assert resolve_model(model, revision=options["revision"], offline=True).path.exists()
        return llm

    def serve(loader, options, access, bound, listening, ready, starter, tls):
        listening()
        loader(lambda share: None)
        return SimpleNamespace(failure=None)

    monkeypatch.setattr(api, "load", load)
    monkeypatch.setattr("penstock.server.run.bind", lambda *_: SimpleNamespace(getsockname=lambda: ("", 8080)))
    monkeypatch.setattr("penstock.server.run.serve", serve)
    monkeypatch.setattr("penstock.engine.protect.protect", lambda engine: "protected")
    monkeypatch.setattr("penstock.server.logs.start_log", lambda *_: None)
    yield
    llm.tokenizer.templates = templates


def executed(line: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit status of a line of a shell."""
    words = shlex.split(line)
    typed = "hello\n/exit\n"
    if words[0] == "cat":
        typed, words = Path(words[1]).read_text(), words[3:]
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    module = words[2] if words[0] == "python" else None
    verb = words[1] if module is None else module.removeprefix("penstock.")
    words = words[2 if module is None else 3 :] + shlex.split(SMALL.get(verb, ""))
    if module is None:
        return run([verb, *words])
    monkeypatch.setattr("sys.argv", [module, *words])
    with pytest.raises(SystemExit) as left:
        runpy.run_module(module, run_name="__main__")
    return left.value.code


@pytest.mark.parametrize("title", PROGRAMS)
def test_every_line_of_the_page_does_what_it_says(capsys, here, monkeypatch, title):
    for theirs, ours, what in rows(title):
        status = executed(ours, monkeypatch)
        shown = capsys.readouterr()
        remarks = re.findall(r"^penstock: -.*$", shown.err, re.MULTILINE)
        if what.startswith("refused: "):
            named = re.match(r"penstock: error: ([\w-]+): .*(; |, expected )", shown.err)
            assert status == 2 and shown.out == "" and shown.err.count("\n") == 1, (ours, shown)
            assert named and named[1] in re.split("[ .]|llama-", theirs), shown.err
            continue
        assert status == 0, (ours, shown.err)
        assert shown.out or " serve" in ours or "server" in ours, ours
        assert not (remarks and what == "works"), (ours, remarks)  # a remark is part of what the page says


def test_every_verb_that_is_refused_says_the_nearest_way(capsys):
    listed = re.search(r"The other verbs are refused in the same way: (.*?)\.\s", PAGE, re.DOTALL)
    assert listed
    for verb in re.findall("`(.*?)`", listed[1]):
        assert run([verb, "--anything", "at", "all"]) == 2
        assert re.fullmatch(rf"penstock: error: {verb}: not supported by penstock yet; .+\n", capsys.readouterr().err)
