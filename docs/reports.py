"""Run the trainings of docs/reports.md as a user would, and write what is said below each.

make reports

A new report needs its training, and an empty text block below it.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import torch._dynamo  # an optimizer imports it, which takes seconds

import gradscaler._run_script.session  # noqa: F401 # or each child would import it
from gradscaler.__main__ import main as gradscaler_command

PAGE = Path(__file__).with_name("reports.md")
SCRIPT = "train.py"
PARTS = re.compile(
    r"^```python\n(?P<code>.*?)^```\n\n```text\n(?P<said>.*?)^```\n"
    r"(?:(?:(?!```|##)[^\n]*\n)*```diff\n(?P<change>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)
HUNK = re.compile(r"((?:^-.*\n)*)((?:^\+.*\n)*)", re.MULTILINE)
ERROR = re.compile(r"^[\w.]+Error: .*\n", re.MULTILINE)
VERDICT = re.compile(
    r"^gradscaler: after .*?(?=^  file:)|^gradscaler: no .*? verdict$\n",
    re.MULTILINE | re.DOTALL,
)


class Report(NamedTuple):
    """A report on the page.

    Attributes:
        title: its heading.
        code: its training.
        said: what the page shows below the training.
        change: the lines that its repair removes and adds.
    """

    title: str
    code: str
    said: str
    change: str

    def repaired(self) -> str:
        """The training with its repair."""
        code = self.code
        for old, new in HUNK.findall(self.change):
            old, new = (
                re.sub("^.", "", each, flags=re.M) for each in (old, new)
            )
            if code.count(old) != 1 and old:
                raise ValueError(
                    f"{self.title}: the training has no line\n{old}"
                )
            code = code.replace(old, new) if old else code
        return code


def reports() -> list[Report]:
    """The reports on the page, in their order."""
    page = PAGE.read_text(encoding="utf-8")
    return [
        Report(
            re.findall(r"^### (.+)$", page[: match.start()], re.M)[-1],
            match["code"],
            match["said"],
            match["change"] or "",
        )
        for match in PARTS.finditer(page)
    ]


def said_of(code: str) -> str:
    """The error and the verdict of a training under ``gradscaler run``."""
    # The child would remove a TemporaryDirectory at its exit.
    folder = tempfile.mkdtemp()
    Path(folder, SCRIPT).write_text(code)
    process = os.fork()  # a fresh one would import PyTorch each time
    if not process:
        _train(folder)
    os.waitpid(process, 0)
    printed = Path(folder, "stderr").read_text()
    shutil.rmtree(folder)
    errors = [
        textwrap.fill(error, 100, subsequent_indent="  ") + "\n"
        for error in ERROR.findall(printed)
    ]
    return "".join(errors[-1:] + VERDICT.findall(printed))


def _train(folder: str) -> None:
    """Run the training in a folder, and end this process."""
    try:
        os.chdir(folder)
        with (
            Path("stderr").open("w") as sys.stderr,
            mock.patch("gradscaler._run_script.voice._STDERR", sys.stderr),
            # So that a slow machine does not leave out what takes time.
            mock.patch(
                "gradscaler.diagnose._graph.budget.clock", return_value=0.0
            ),
            # So that the verdict is whole, and does not refer to what was said on the way.
            mock.patch("gradscaler._run_script.watched_run.WatchedRun._tell"),
        ):
            _run()
    finally:
        os._exit(0)


def _run() -> None:
    torch.set_num_threads(1)
    try:
        gradscaler_command(["run", SCRIPT])
    except Exception:
        sys.excepthook(*sys.exc_info())
    atexit._run_exitfuncs()


def main() -> None:
    """Write the page with what is said of each training today."""
    page = PAGE.read_text(encoding="utf-8")
    for report in reports():
        before = f"{report.code}```\n\n```text\n{report.said}```\n"
        after = f"{report.code}```\n\n```text\n{said_of(report.code)}```\n"
        page = page.replace(before, after)
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
