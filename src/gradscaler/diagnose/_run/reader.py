"""A run, read from its file, or from those of all ranks."""

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

    A last line without its end, whose writer was killed, is left out. Several files make one run:
    the rank's that is at fault, with a verdict on all, and with all of them by rank in its
    attribute ``ranks``.

    The rank at fault is one whose own verdict names a cause of skipped steps, if there is one. Of
    several it is the one whose gradients hold an Inf or a NaN since the earliest step of the latest
    streak of skips; then the one with the most severe verdict: parameter, divergence, activations,
    loss, nan, floor, data; then the lowest. If ranks used different scales or skipped different
    steps, the verdict begins with that, and its kind is ``"ranks"``.

    Raises:
        ValueError: a file is not a valid run, or the files do not belong together. The message is
            one line, and names the file, the line's number and what is wrong there.
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
        self._number = self._end = 0  # of lines that were read, and where the last one ends
        self._first = b""  # the first line
        self._identity: tuple[int, int] | None = None
        self._run: Run | None = None

    def read(self) -> Run | None:
        """The run so far, the same object while nothing is new; None without a complete line.

        A file that was truncated or replaced is read from its start.

        Raises:
            ValueError, OSError: as :func:`read_run` does.
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


def _line(record: dict[str, Any], first: bool) -> Line:
    """The line of a record; ValueError if it is not a line of a run, or cannot be the first."""
    if first and "gradscaler" not in record:
        raise ValueError("is not the first line of a gradscaler run")
    version = record.get("gradscaler", VERSION)
    if version != VERSION:
        raise ValueError(f"the format's version is {shown(version)}, not {VERSION}")
    kind = record.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS or (first and kind != Start.kind):
        raise ValueError(f"kind: {shown(kind)} is not one that belongs here")
    return value_as(_KINDS[kind], record)  # type: ignore[no-any-return]
