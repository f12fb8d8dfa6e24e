"""Everything that docs/quickstart.md shows of the program and the library runs as written."""

import re
from pathlib import Path

import pytest

from tests.cli.common import call

TEXT = (Path(__file__).parents[2] / "docs" / "quickstart.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


COMMANDS = [line for block in blocks("sh") for line in block.splitlines() if "penstock " in line]


def test_quickstart_python_blocks_run_in_order(capsys):
    names: dict[str, object] = {}
    for block in blocks("python"):
        exec(compile(block, "quickstart.md", "exec"), names)
    assert "Peak memory" in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_quickstart_options_exist(capsys, command):
    verb, *words = command.partition("penstock ")[2].split()
    known = call(capsys, verb, "--help").out
    for word in words:
        if re.fullmatch(r"--?[a-z-]+", word) and word != "-":
            assert re.search(rf"(^|[ ,]){word}\b", known, re.MULTILINE), word


def test_quickstart_flags_of_the_table_exist(capsys):
    known = call(capsys, "generate", "--help").out
    listed = re.findall(r"^\| (`-.*?) \|", TEXT, re.MULTILINE)
    assert len(listed) > 8
    for flag in re.findall(r"`(-[a-z-]+)", " ".join(listed)):
        assert re.search(rf"(^|[ ,]){flag}\b", known, re.MULTILINE), flag
