"""How Sphinx builds the site (`make docs`) from the Markdown files of the repository, which GitHub shows, too."""

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from penstock import __version__  # noqa: E402
from tools.docs.reference import filled  # noqa: E402

project = "penstock"
author = "The penstock authors"
version = release = __version__

extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = ["docs/**", "*.md", "benchmarks/NOTES.md", "benchmarks/peers/README.md"]
exclude_patterns = [".*", "build", "src", "tests", "dist"]
myst_heading_anchors = 4
nitpicky = True
smartquotes = False
highlight_language = "text"

html_theme = "furo"
html_title = f"penstock {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_show_search_summary = False  # it fetches pages, which a browser does not do from files
html_favicon = "../../src/penstock/server/page/icon.svg"
html_theme_options = {"footer_icons": [], "navigation_with_keys": True}

NAVIGATION = {
    "Start": ["quickstart", "for-users", "for-developers", "for-operators", "for-researchers", "examples"],
    "Use": [
        "models",
        "python",
        "Tools and JSON <tools-and-json>",
        "Notebooks of mlx-lm <mlx-lm>",
        "Coming from other programs <coming-from>",
        "Converting <convert>",
        "tools",
        "troubleshooting",
    ],
    "Serve": ["server", "deploy", "distributed", "streaming", "Planning <streaming-plan>", "Speculation <speculation>"],
    "Inside": ["architecture", "graph", "cpu", "kernels", "adding-a-model", "Comparison <comparison>"],
    "Reference": ["reference/api", "reference/ops", "reference/commands", "reference/settings"],
    "Project": [
        "/CHANGELOG",
        "/CONTRIBUTING",
        "/SECURITY",
        "Notes on speed </benchmarks/NOTES>",
        "/benchmarks/peers/README",
        "README </README>",
    ],
}


def read(app: Any, name: str, source: list[str]) -> None:
    """Put what is made from the package into its pages, and the navigation, which GitHub has no use for, into one."""
    source[0] = filled(source[0])
    if name == root_doc:
        for caption, pages in NAVIGATION.items():
            listed = "\n".join(pages)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{listed}\n```\n"


def finish(app: Any, failure: Exception | None) -> None:
    """The first page is that of docs/: who opens the folder is sent there."""
    if failure is None and app.builder.name == "html":
        page = f'<!doctype html><meta charset="utf-8"><title>{project}</title>'
        target = "docs/index.html"
        page += f'<meta http-equiv="refresh" content="0; url={target}"><a href="{target}">{project}</a>\n'
        Path(app.outdir, "index.html").write_text(page)


def setup(app: Any) -> None:
    app.connect("source-read", read)
    app.connect("build-finished", finish)
