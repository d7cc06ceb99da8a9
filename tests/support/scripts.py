"""A script under ``gradscaler run``, and alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support import programs

SECONDS = 600.0  # for a program, on a busy machine
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "GLOG_v": "3"}


class Ran(NamedTuple):
    """A script that ran under ``gradscaler run``.

    Attributes:
        printed: what it wrote to stdout.
        said: the words of gradscaler, one text for each finding and verdict, in one line.
        files: the run files, in the order of the runs.
    """

    printed: str
    said: list[str]
    files: list[Path]

    @property
    def verdicts(self) -> list[str]:
        """The words at the end of each run."""
        return [each for each in self.said if each.startswith("after ")]


def alone(script: Path, folder: Path) -> str:
    """What a script prints without gradscaler."""
    ended = programs.run(script, cwd=folder, env={**os.environ, **QUIET})
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def watched(script: Path, folder: Path, *options: str) -> Ran:
    """Run a script under ``gradscaler run``, which must not end by an error of its own."""
    printed, errors = _run(["-m", "gradscaler", "run", *options, str(script)], folder)
    assert "an error of gradscaler" not in errors, errors
    said = [" ".join(part.split()) for part in errors.split("gradscaler: ")[1:]]
    files = sorted((folder / "gradscaler-runs").glob("*.jsonl"), key=_number)
    return Ran(printed, said, files)


def fixtures_of(script: Path) -> tuple[Any, Any, Any]:
    """Fixtures of a module: a script alone, watched, and with its step 13 watched."""

    def fixture(run: Any, *options: str) -> Any:
        def ran(tmp_path_factory: pytest.TempPathFactory) -> Any:
            return run(script, tmp_path_factory.mktemp("script"), *options)

        return pytest.fixture(scope="module")(ran)

    return fixture(alone), fixture(watched), fixture(watched, "--watch", "13")


def lines_of(script: Path, *functions: str) -> dict[str, int]:
    """The number of the line of a script that calls each function."""
    lines = list(enumerate(script.read_text().splitlines(), start=1))
    return {name: next(n for n, line in lines if f".{name}(" in line) for name in functions}


def _number(path: Path) -> int:
    """The number of a run in its process; the first has none."""
    number = path.stem.rpartition(".")[2]
    return int(number) if number.isdecimal() else 1


def _run(words: list[str], folder: Path) -> tuple[str, str]:
    ended = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        text=True,
        capture_output=True,
        timeout=SECONDS,
        env={**os.environ, **QUIET},
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout, ended.stderr
