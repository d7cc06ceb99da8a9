"""The notebook or the shell of IPython that this process is, if it is one."""

from __future__ import annotations

import re
import sys
import time
from contextlib import suppress
from html import escape
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

_SINCE = time.time()  # runs of this process began later
_CELL = re.compile(r"In\[(\d+)\]")


def shell() -> Any:
    """IPython's shell; None without one."""
    found: Any = sys.modules.get("IPython")
    return found and found.get_ipython()


def lines_of_cell(name: str, since: float) -> list[str]:
    """The lines of a cell such as ``"In[3]"``; empty if it is no cell of this process.

    ``since`` is when the run began that names it. The kernel may have been started again since.
    """
    found = _CELL.fullmatch(name)
    if found is None or shell() is None or since < int(_SINCE):
        return []
    cells: list[str] = shell().history_manager.input_hist_parsed
    return [*cells, *[""] * int(found[1])][int(found[1])].splitlines()


def show(text: str, html: str) -> None:
    """Show something under the cell that runs, if this is a notebook; nothing it raises matters."""
    with suppress(Exception):
        if shell() is not None:
            data = {"text/plain": text, "text/html": html}
            sys.modules["IPython"].display.display(data, raw=True)


def page_of(path: Path) -> str:
    """The report on a run file, in a frame; empty if none can be made."""
    report, read_run = "gradscaler.diagnose.report", import_module("gradscaler.diagnose").read_run
    with suppress(ValueError, ImportError, OSError), TemporaryDirectory() as folder:
        page = Path(folder, "report.html")
        import_module(report).write(read_run(path), page)
        inner = escape(page.read_text("utf-8"))
        return f'<iframe srcdoc="{inner}" width="100%" height="600"></iframe>'
    return ""
