"""Everything that docs/python.md shows runs as written."""

import re
from pathlib import Path

TEXT = (Path(__file__).parents[1] / "docs" / "python.md").read_text()


def test_python_blocks_run_in_order(capsys):
    names: dict[str, object] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL):
        exec(compile(block, "python.md", "exec"), names)
    assert "(3, 256)" in capsys.readouterr().out


def test_links_lead_somewhere():
    assert all(
        (Path(__file__).parents[1] / "docs" / target).is_file()
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", TEXT)
    )
