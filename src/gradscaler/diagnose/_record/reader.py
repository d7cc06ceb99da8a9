"""Reads the lines of a run file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Generic

from gradscaler.diagnose._record.checks import loads, shown, value_as
from gradscaler.diagnose._record.lines import (
    VERSION,
    BadStep,
    Line,
    Sample,
    Skip,
    Start,
    VerdictLine,
    Watched,
)
from gradscaler.diagnose._record.recorded_run import RunT

_LONGEST_LINE = 2**26  # bytes; a model of 10,000 parameters takes 2**22
_KINDS: dict[str, type[Line]] = {
    kind.kind: kind for kind in (Start, Sample, Skip, VerdictLine, Watched, BadStep)
}
_UNSCALED = {"scale": 1.0, "scales": [], "skips": []}  # of a sample, without a scaler


class RunFollower(Generic[RunT]):
    """Reads a run file as it grows, each line once, into runs of a class."""

    def __init__(self, path: Path, kind: type[RunT]) -> None:
        self._path = path
        self._kind = kind
        self._restart()

    def _restart(self) -> None:
        self._lines: dict[type[Line], list[Any]] = {kind: [] for kind in _KINDS.values()}
        self._number = self._end = 0  # lines read so far, and the offset in bytes where they end
        self._first = b""  # the first line
        self._identity: tuple[int, int] | None = None
        self._run: RunT | None = None

    def read(self) -> RunT | None:
        """Return the run so far, or None if the file has no complete line.

        It is the same object until new lines are found. If the file was truncated or replaced, it
        is read again from its start.

        Raises:
            ValueError, OSError: for the same reasons as :func:`~gradscaler.diagnose.read_run`.
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
            starts, samples, skips, verdicts, watched, bad = map(tuple, self._lines.values())
            lines = starts, samples, skips, verdicts, watched
            self._run = self._kind(*lines, bad_steps=bad, file=self._path.name)
        return self._run

    def _add(self, data: bytes) -> None:
        number = self._number + 1
        try:
            starts = self._lines[Start]
            unscaled = _UNSCALED if starts and not starts[-1].policy else {}
            line = _line({**unscaled, **loads(data)}, first=number == 1)
        except (ValueError, RecursionError) as error:
            what = error if isinstance(error, ValueError) else "is nested too deeply"
            raise ValueError(f"{self._path}: line {number}: {what}") from None
        self._lines[type(line)].append(line)
        self._number, self._end, self._run = number, self._end + len(data), None


def read(path: Path, kind: type[RunT]) -> RunT:
    """Read a run file; ValueError or OSError as by :func:`~gradscaler.diagnose.read_run`."""
    run = RunFollower(path, kind).read()
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
