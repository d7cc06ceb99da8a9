"""Run the trainings of docs/reports.md as a user would, and write what is said below each.

make reports

A new report needs its training, and an empty text block below it. ``reports.py FRAMEWORK`` runs
those of one framework, which a line above the training names if it is not PyTorch, and keeps their
run files for the gallery.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from gradscaler.__main__ import main as gradscaler_command

PAGE = Path(__file__).with_name("reports.md")
RUNS = Path(__file__).with_name("gallery")
SCRIPT = "train.py"
PARTS = re.compile(
    r"^(?:<!-- framework: (?P<framework>\w+) -->\n)?^```python\n(?P<code>.*?)^```\n"
    r"\n```text\n(?P<said>.*?)^```\n"
    r"(?:(?:(?!```|##)[^\n]*\n)*```diff\n(?P<change>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)
HUNK = re.compile(r"((?:^-.*\n)*)((?:^\+.*\n)*)", re.MULTILINE)
ERROR = re.compile(r"^[\w.]+Error: .*\n", re.MULTILINE)
# A verdict, up to the name of its file. Keras' fit may have no verdict, and says all on the way.
SAID = r"^gradscaler: %s.*\n(?:  (?!file:|report:|origin:).*\n)*"
VERDICT = re.compile(SAID % "(?:after |no .* verdict)", re.MULTILINE)
OF_FIT = re.compile(
    SAID % "(?!step watched: (?:forward|backward))", re.MULTILINE
)
PROPOSED = re.compile(r"^  origin: .*--watch (\d+).*\n", re.MULTILINE)
# What each child would import, which takes seconds.
IMPORTED = {
    "torch": ["torch", "torch._dynamo", "gradscaler._run_script.session"],
    "keras": ["keras", "tensorflow", "gradscaler._run_script.fits"],
    "jax": ["jax", "optax", "gradscaler._run_script.function_loops"],
    "paddle": ["paddle", "gradscaler._run_script.backward_loops"],
    "mindspore": ["mindspore", "gradscaler._run_script.gradient_loops"],
}


class Report(NamedTuple):
    """A report on the page.

    Attributes:
        title: its heading.
        framework: what it trains with.
        code: its training.
        said: what the page shows below the training.
        change: the lines that its repair removes and adds.
    """

    title: str
    framework: str
    code: str
    said: str
    change: str

    @property
    def run(self) -> Path:
        """Its run file, under the name that the site gives its heading."""
        name = re.sub(r"[^\w -]", "", self.title.lower()).replace(" ", "-")
        return RUNS / f"{name}.jsonl"

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
            match["framework"] or "torch",
            match["code"],
            match["said"],
            match["change"] or "",
        )
        for match in PARTS.finditer(page)
    ]


def said_of(code: str, framework: str, run: Path | None = None) -> str:
    """The error and the verdict of a training under ``gradscaler run``.

    Outside of PyTorch it may propose a second command, whose verdict follows. Its run file is kept
    if a path is given. Keras' fit may have none.
    """
    for name in IMPORTED[framework]:
        import_module(name)
    said, printed = _said_by([], code, framework, run)
    every = PROPOSED.finditer(printed)  # one for each optimizer
    proposed = min(every, key=lambda found: int(found[1]), default=None)
    if framework == "torch" or proposed is None:
        return said
    options = ["--watch", proposed[1]]
    again, _ = _said_by(options, code, framework, run)
    command = f"python -m gradscaler run {' '.join(options)} {SCRIPT}"
    return f"{said}{proposed[0]}\n$ {command}\n{again}"


def _said_by(
    options: Sequence[str], code: str, framework: str, run: Path | None
) -> tuple[str, str]:
    """What the page shows of a command, and all that it printed on stderr."""
    # The child would remove a TemporaryDirectory at its exit.
    folder = tempfile.mkdtemp()
    Path(folder, SCRIPT).write_text(code)
    process = os.fork()  # a fresh one would import the framework each time
    if not process:
        _train(folder, options, framework)
    os.waitpid(process, 0)
    printed = Path(folder, "stderr").read_text()
    files = [*Path(folder).glob("**/*.jsonl")]
    if run is not None and len(files) == 1:
        shutil.copyfile(files[0], run)
    shutil.rmtree(folder)
    errors = [
        textwrap.fill(error, 100, subsequent_indent="  ") + "\n"
        for error in ERROR.findall(printed)
    ]
    verdict = OF_FIT if framework == "keras" else VERDICT
    return "".join(errors[-1:] + verdict.findall(printed)), printed


def _train(folder: str, options: Sequence[str], framework: str) -> None:
    """Run the training in a folder, and end this process."""
    try:
        os.chdir(folder)
        with (
            Path("stderr").open("w") as sys.stderr,
            Path("stdout").open("w") as sys.stdout,
            mock.patch("gradscaler._run_script.voice._STDERR", sys.stderr),
            # So that a slow machine does not leave out what takes time.
            mock.patch(
                "gradscaler.diagnose._graph.budget.clock", return_value=0.0
            ),
            # So that the verdict is whole, and does not refer to what was said on the way.
            mock.patch("gradscaler._run_script.watched_run.WatchedRun._tell"),
        ):
            _run(options, framework)
    finally:
        os._exit(0)


def _run(options: Sequence[str], framework: str) -> None:
    if framework == "torch":
        sys.modules["torch"].set_num_threads(1)
    try:
        gradscaler_command(["run", *options, SCRIPT])
    except Exception:
        sys.excepthook(*sys.exc_info())
    atexit._run_exitfuncs()


def main(framework: str = "torch") -> None:
    """Write the page with what is said of each training of a framework today."""
    own = [each for each in reports() if each.framework == framework]
    others = framework != "torch"
    today = [
        said_of(each.code, framework, each.run if others else None)
        for each in own
    ]
    page = PAGE.read_text(encoding="utf-8")
    for report, said in zip(own, today, strict=True):
        before = f"{report.code}```\n\n```text\n{report.said}```\n"
        after = f"{report.code}```\n\n```text\n{said}```\n"
        page = page.replace(before, after)
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
