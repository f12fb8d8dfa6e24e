"""The site of the documents: what is made from the package is whole, pages say what is true, and it builds."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock.cli.main import program
from penstock.settings import Settings, variable
from tests.cli.common import call
from tools.docs import reference
from tools.docs.conf import NAVIGATION

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md"))]
PAGES += [ROOT / "SECURITY.md", ROOT / "benchmarks" / "NOTES.md", ROOT / "benchmarks" / "peers" / "README.md"]
RESULTS = ROOT / "benchmarks" / "results"


def headings(text: str) -> list[str]:
    return re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)


# -- what is made from the package -----------------------------------------------------------------------------------


def test_every_public_op_is_in_the_reference_with_its_signature_and_shapes():
    page = reference.ops()
    named = [name for name in penstock.ops.__all__ if isinstance(getattr(penstock.ops, name), penstock.ops.Op)]
    assert len(named) > 80 and set(named) == set(penstock.ops.REGISTRY)
    for name in named:
        _, _, section = page.partition(f"\n### {name}\n")
        section = section.partition("\n### ")[0]
        signature, _, rest = section.partition("```python\n")[2].partition("\n```")
        parameters = penstock.ops.REGISTRY[name].signature.parameters
        assert signature.startswith(f"{name}(") and all(f"{parameter}: " in signature for parameter in parameters)
        shapes = re.search(rf"```text\n{name}\(\n(.*)\n\) → (\w+ \[[\d, ]*\]|None)", rest, re.DOTALL)
        assert shapes and (re.search(r"\w \[\d", shapes[1]) or name.endswith("_inv_freq")), name
    assert all(f"### {name}\n" in page for name in reference.helpers())


def test_the_api_has_every_public_name():
    found = set(headings(reference.api()))
    modules = {"errors", "mlx_lm", "models", "ops"}
    assert {name for name in penstock.__all__ if not name.startswith("_")} - modules <= found
    for kind in (penstock.LLM, reference.Session):
        methods = {f"{kind.__name__}.{name}" for name in vars(kind) if not name.startswith("_")}
        assert methods - found <= {"LLM.add_timings"}
    page = reference.api()
    errors = [
        name for name, kind in vars(penstock.errors).items() if isinstance(kind, type) and issubclass(kind, Exception)
    ]
    assert len(errors) > 10 and all(f"| `{name}` |" in page for name in errors)


def test_commands_and_settings_are_all_there(capsys):
    page = reference.commands()
    for name, command in program().commands.items():
        assert (f"\n## {name}\n" in f"\n{page}") is not command.hidden, name
        if not command.hidden:
            section = page.partition(f"## {name}\n")[2].partition("\n## ")[0]
            options = [option for part in command.params if not part.hidden for option in part.opts]
            assert all(option in section for option in options if option.startswith("-"))
    table = reference.settings()
    assert all(f"| `{variable(one)}` |" in table for one in reference.fields(Settings))


def test_prose_keeps_what_a_docstring_says():
    text = "Sum of `a_b` and c_d * 2 <x>.\n\ny = a[0]\n    code * here\nsee docs/cpu.md; kind: of sum_of | rest"
    made = reference.prose(text, names=["kind", "sum_of"])
    assert r"Sum of `a_b` and c\_d \* 2 \<x\>." in made and "```text\ncode * here\n```" in made
    assert r"see [docs/cpu.md](../cpu.md); `kind`: of `sum_of` \| rest" in made


def test_marks_are_replaced_and_nothing_else():
    for name in ("api", "ops", "commands", "settings"):
        text = (DOCS / "reference" / f"{name}.md").read_text()
        assert len(reference.MARK.findall(text)) == 1 and "make docs" in text
        filled = reference.filled(text)
        assert "made from the package" not in filled and "*The rest of this page" not in filled
        assert len(filled) > 2 * len(text) or name == "settings"
    assert reference.filled("no mark") == "no mark"


# -- pages -----------------------------------------------------------------------------------------------------------


def test_every_page_has_a_place_in_the_navigation():
    listed = [re.sub(r".*<(.*)>", r"\1", entry) for entries in NAVIGATION.values() for entry in entries]
    paths = [(ROOT / f"{name[1:]}.md" if name.startswith("/") else DOCS / f"{name}.md") for name in listed]
    assert len(set(paths)) == len(paths) and {*paths, DOCS / "index.md"} == set(PAGES)


def slug(heading: str) -> str:
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page):
    text = re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL))
    for target, anchor in re.findall(r"\]\((?!https?:|mailto:)([^)#\s]*)#?([^)\s]*)\)", text):
        found = (page.parent / target).resolve() if target else page
        assert found.exists() and found.is_relative_to(ROOT), target
        if anchor:
            assert anchor in map(slug, headings(found.read_text())), f"{target}#{anchor}"


@pytest.mark.parametrize("name", ["index", "for-developers", "for-researchers"])
def test_python_blocks_run(name, capsys):
    names: dict[str, object] = {}
    blocks = re.findall(r"^```python\n(.*?)^```$", (DOCS / f"{name}.md").read_text(), re.MULTILINE | re.DOTALL)
    for block in blocks:
        exec(compile(block, f"{name}.md", "exec"), names)
    assert blocks and capsys.readouterr().out


@pytest.mark.parametrize(
    "name", ["index", "for-users", "for-operators", "for-researchers", "troubleshooting", "comparison"]
)
def test_options_of_commands_exist(name, capsys):
    text = (DOCS / f"{name}.md").read_text()
    commands = re.findall(r"(?:`|^|\s)penstock ([a-z_]+)((?: [^`\n]*)?)", text, re.MULTILINE)
    verbs = [(verb, words) for verb, words in commands if verb in program().commands]
    for verb, words in verbs:
        known = call(capsys, verb, "--help").out
        for option in re.findall(r"(?<=\s)--?[a-z][a-z-]*", words.partition("#")[0]):
            assert re.search(rf"(^|[ ,]){option}\b", known, re.MULTILINE), (verb, option)
    assert verbs


def test_messages_that_troubleshooting_explains_are_in_the_sources():
    text = (DOCS / "troubleshooting.md").read_text()
    sources = " ".join(path.read_text() for path in (ROOT / "src" / "penstock").rglob("*.py"))
    sources = re.sub(r"\"\s+f?\"", "", sources)  # a message over several lines
    sources = re.sub(r"\{[^{}]*\}", "…", re.sub(r"\{[^{}\"']*\{[^{}]*\}[^{}]*\}", "…", sources)).replace("\\'", "'")
    cells = [
        line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `") and "penstock " not in line[:12]
    ]
    assert len(cells) > 12
    for cell in cells:
        message = cell.removeprefix("| ").strip("` ")
        fixed = re.split(r"…|;|, |\bMODEL\b|'[\w.]*'|\b[\d.]+(?: [GM]?B)?\b|--[a-z-]+|PENSTOCK_\w+", message)
        for part in fixed:
            part = part.strip(" :,;?()").removeprefix("is ")
            if len(part.split()) > 1:
                assert part in sources, (message, part)


# -- numbers ---------------------------------------------------------------------------------------------------------


def rows_of(heading: str) -> list[list[str]]:
    text = (DOCS / "comparison.md").read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| |")]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]


def number(cell: str) -> float:
    return float(cell.split()[0].replace(",", ""))


def test_the_gpu_column_is_that_of_the_results():
    runs = {run["what"]: run["rows"] for run in json.loads((RESULTS / "h200_rows.json").read_text())["runs"]}
    qwen = {(row["test"], row["batch_size"]): row["avg_ts"] for row in runs["qwen3.6-35b-a3b"]}
    tests = [("tg64", 1), ("tg64", 8), ("tg64", 32), ("tg64", 128), ("pp512", 1), ("pp4096", 1)]
    runs = {run["what"]: run["rows"] for run in json.loads((RESULTS / "h200_decode.json").read_text())["runs"]}
    gemma = next(row["avg_ts"] for row in runs["gemma4-26b-a4b"] if row["batch_size"] == 1)
    prompt = next(r["avg_ts"] for r in json.loads((RESULTS / "h200_gemma.json").read_text()) if r["test"] == "pp4096")
    shown = [number(row[1]) for row in rows_of("One H200")]
    assert shown == pytest.approx([*(qwen[test] for test in tests), gemma, prompt], abs=0.6)
    peers = (ROOT / "benchmarks" / "peers" / "README.md").read_text()
    assert all(f"{n} tok/s" in peers for n in (68, 261, 73, 7724, 1230))


def test_the_cpu_table_is_that_of_the_samples():
    shown = rows_of("One core of a CPU")
    for column, peer in enumerate(("penstock", "llama_cpp", "mlx_lm"), 1):
        best = []
        for model in ("qwen3.6", "llama3.2"):
            found = json.loads((RESULTS / f"peers_{peer}_{model}.json").read_text())
            rows = {row["test"]: row for row in (found if isinstance(found, list) else found["rows"])}
            for test in ("pp32", "tg8", "tg8 @ d64"):
                row = rows[test]
                best.append((row["n_prompt"] or row["n_gen"]) * 1e9 / min(row["samples_ns"]))
        digits = 1 if peer == "mlx_lm" else 0
        assert [number(row[column]) for row in shown] == [round(one, digits) for one in best], peer


# -- the project -----------------------------------------------------------------------------------------------------


def test_the_version_is_the_same_everywhere():
    version = penstock.__version__
    released = re.findall(
        r"^## \[(\d+\.\d+\.\d+)\] - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert released[0] == version
    assert f"| {version.rpartition('.')[0]} | yes |" in (ROOT / "SECURITY.md").read_text()


def test_issue_forms_have_what_github_wants():
    yaml = pytest.importorskip("yaml")
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    assert len(forms) > 3
    for form in forms:
        found = yaml.safe_load(form.read_text())
        if form.name == "config.yml":
            assert set(found) == {"blank_issues_enabled", "contact_links"}
            continue
        assert {"name", "description", "body"} <= set(found)
        ids = [part["id"] for part in found["body"] if part["type"] != "markdown"]
        assert len(set(ids)) == len(ids) > 1
        for part in found["body"]:
            assert part["type"] in ("markdown", "textarea", "input")
            assert ("value" if part["type"] == "markdown" else "label") in part["attributes"]


# -- the build -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for name in ("sphinx", "furo", "myst_parser"):
        if importlib.util.find_spec(name) is None:
            pytest.skip("the extra `docs` is not installed")
    folder = tmp_path_factory.mktemp("site")
    made = re.search(r"^SPHINX = \$\(PY\) (.*) \. build/site$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert made
    command = [
        sys.executable,
        *made[1].replace("build/doctrees", str(folder / "trees")).split(),
        ".",
        str(folder / "site"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return folder / "site"


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_needs_no_network(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(PAGES)
    for page in pages:
        text = page.read_text()
        assert not re.findall(r"<(?:script|img|iframe|source)[^>]* src=\"(?:https?:)?//[^\"]*\"", text), page
        assert not re.findall(r"<link[^>]* href=\"(?:https?:)?//[^\"]*\"", text), page
        for target in re.findall(r"(?:href|src)=\"(?!https?:|data:|mailto:|#)([^\"#?]+)", text):
            assert (page.parent / target).exists(), (page.name, target)
    styles = " ".join(path.read_text() for path in site.rglob("*.css"))
    assert not re.findall(r"url\([\"']?(?:https?:)?//|@import", styles)
    ops = (site / "docs" / "reference" / "ops.html").read_text()
    assert all(f'id="{name.replace("_", "-")}"' in ops for name in penstock.ops.REGISTRY)


@pytest.mark.slow
def test_the_site_is_read_and_searched_from_its_files(site):
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("chromium is not installed")
    asked: list[str] = []
    problems: list[str] = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 390, "height": 800})
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto((site / "index.html").as_uri())
        page.wait_for_url("**/docs/index.html")
        for name in ("index", "comparison", "troubleshooting", "reference/ops", "reference/api", "server"):
            page.goto((site / "docs" / f"{name}.html").as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= 390, name  # nothing sticks out on a phone
        page.goto((site / "search.html").as_uri() + "?q=gated_delta_net")
        page.locator("ul.search li a").first.wait_for(timeout=20000)
        browser.close()
    assert not problems and [url for url in asked if not url.startswith(("file:", "data:"))] == []
