"""Reads a run from its file, or from the files of several ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gradscaler.diagnose._run.checks import loads, shown, value_as
from gradscaler.diagnose._run.lines import (
    VERSION,
    Line,
    Sample,
    Skip,
    Start,
    VerdictLine,
    Watched,
)
from gradscaler.diagnose._run.ranks import of_ranks
from gradscaler.diagnose._run.run import Run

_LONGEST_LINE = 2**26  # bytes; a model of 10,000 parameters takes 2**22
_KINDS: dict[str, type[Line]] = {
    kind.kind: kind for kind in (Start, Sample, Skip, VerdictLine, Watched)
}


def read_run(path: str | Path, *others: str | Path) -> Run:
    """Read a run file, or the files of several ranks of one run.

    An incomplete last line, left by a writer that was killed, is ignored. For several files, the
    result is the run of the rank at fault. Its verdict covers all ranks, and its attribute
    ``ranks`` holds every run by rank.

    A rank whose verdict names a cause of skipped steps goes before the others. Among several such
    ranks, the one at fault is the rank whose gradients were first to hold an Inf or a NaN in the
    latest streak of skips. A tie goes to the rank with the fewest skips whose loss is finite or
    unknown; then to the most severe verdict: parameter, divergence, activations, loss, nan, floor,
    data; then to the lowest rank. If ranks used different scales or skipped different steps, the
    verdict begins with these differences, and its kind is ``"ranks"``.

    Raises:
        ValueError: a file is not a valid run, or the files do not belong together. The message is
            one line that names the file, the number of the line and the mistake.
        OSError: a file cannot be read.
    """
    if not others:
        return _read(Path(path))
    return of_ranks([(str(each), _read(Path(each))) for each in (path, *others)])


class RunFollower:
    """Reads a run file as it grows, each line once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._restart()

    def _restart(self) -> None:
        self._lines: dict[type[Line], list[Any]] = {kind: [] for kind in _KINDS.values()}
        self._number = self._end = 0  # lines read so far, and the offset in bytes where they end
        self._first = b""  # the first line
        self._identity: tuple[int, int] | None = None
        self._run: Run | None = None

    def read(self) -> Run | None:
        """Return the run so far, or None if the file has no complete line.

        It is the same object until new lines are found. If the file was truncated or replaced, it
        is read again from its start.

        Raises:
            ValueError, OSError: for the same reasons as :func:`read_run`.
        """
        if self._path.exists() and not self._path.is_file():
            raise ValueError(f"{self._path}: is not a file")
        with self._path.open("rb") as file:
            status = os.fstat(file.fileno())
            first = file.readline(_LONGEST_LINE)
            is_same = (status.st_dev, status.st_ino) == self._identity and first == self._first
            if not is_same or status.st_size < self._end:
                self._restart()
                self._identity, self._first = (status.st_dev, status.st_ino), first
            file.seek(self._end)
            for data in iter(lambda: file.readline(_LONGEST_LINE), b""):
                if not data.endswith(b"\n") and len(data) < _LONGEST_LINE:
                    break
                self._add(data)
        if self._run is None and self._lines[Start]:
            starts, samples, skips, verdicts, watched = map(tuple, self._lines.values())
            self._run = Run(starts, samples, skips, verdicts, watched=watched)
        return self._run

    def _add(self, data: bytes) -> None:
        number = self._number + 1
        try:
            line = _line(loads(data), first=number == 1)
        except (ValueError, RecursionError) as error:
            what = error if isinstance(error, ValueError) else "is nested too deeply"
            raise ValueError(f"{self._path}: line {number}: {what}") from None
        self._lines[type(line)].append(line)
        self._number, self._end, self._run = number, self._end + len(data), None


def _read(path: Path) -> Run:
    run = RunFollower(path).read()
    if run is None:
        raise ValueError(f"{path}: line 1: is empty or incomplete, so the file holds no run")
    return run


def _line(record: dict[str, object], first: bool) -> Line:
    """Convert a record to a line; ValueError if it is not one, or cannot come first."""
    if first and "gradscaler" not in record:
        raise ValueError("is not the first line of a gradscaler run")
    version = record.get("gradscaler", VERSION)
    if version != VERSION:
        raise ValueError(f"the format's version is {shown(version)}, not {VERSION}")
    kind = record.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS or (first and kind != Start.kind):
        raise ValueError(f"kind: {shown(kind)} is not one that belongs here")
    return value_as(_KINDS[kind], record)  # type: ignore[no-any-return]
