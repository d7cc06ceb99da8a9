"""Every Python block of the README and of docs/ runs, in the framework that it is about.

Blocks of one page share their names, in their order. Pages in docs/start/ must bring all they use.
Other pages may use what ``given.py`` has: a model, an optimizer, a batch. A block that is not about
PyTorch is marked by a comment in the line before it::

    <!-- framework: jax -->
"""

import os
import re
from pathlib import Path

import given
import pytest

from gradscaler.diagnose import Monitor

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FRAMEWORK = os.environ.get("GRADSCALER_FRAMEWORK", "torch").replace("-", "_")
BLOCK = re.compile(
    r"^(?:<!-- framework: (?P<named>\w+)(?: on (?P<backend>\w+))? -->\n+)?"
    r"```python\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


def blocks(page):
    """The framework, the backend, the first line and the code of each block of a page."""
    text = page.read_text()
    default = page.stem if page.parent.name == "start" else "torch"
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("code"))
        yield match["named"] or default, match["backend"], line, match["code"]


MINE = {
    page: [
        (line, code)
        for name, backend, line, code in blocks(page)
        if name == FRAMEWORK and backend in (None, os.environ.get("KERAS_BACKEND"))
    ]
    for page in PAGES
}


def test_every_block_is_found():
    for page in PAGES:
        fences = len(re.findall(r"^\s*```python", page.read_text(), re.MULTILINE))
        assert fences == len(list(blocks(page))), page


def test_a_page_has_one_title():
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        titles = re.findall(r"^# .+$", text, re.MULTILINE)
        assert len(titles) == (0 if text.startswith("```{include}") or not text.strip() else 1), (
            page
        )


def test_every_framework_has_a_page_to_start_with():
    assert MINE[ROOT / "docs" / "start" / f"{FRAMEWORK}.md"]


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if MINE[page]],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_the_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "document"}
    if page.parent.name != "start":
        names |= getattr(given, f"on_{FRAMEWORK}")()
    with given.kept_settings(FRAMEWORK):
        for line, code in MINE[page]:
            # A traceback shows the line of the page.
            exec(compile("\n" * line + code, page, "exec"), names)
    for monitor in [value for value in names.values() if isinstance(value, Monitor)]:
        monitor.close()
