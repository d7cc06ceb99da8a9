"""A run, read from its file, or from those of all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gradscaler.diagnose._run.checks import loads, shown, value_as
from gradscaler.diagnose._run.lines import VERSION, Line, Sample, Skip, Start, VerdictLine
from gradscaler.diagnose._run.ranks import of_ranks
from gradscaler.diagnose._run.run import Run

_LONGEST_LINE = 2**26  # bytes; a model of 10,000 parameters takes 2**22
_KINDS: dict[str, type[Line]] = {kind.kind: kind for kind in (Start, Sample, Skip, VerdictLine)}


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


def _read(path: Path) -> Run:
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: is not a file")
    lines: dict[type[Line], list[Any]] = {kind: [] for kind in _KINDS.values()}
    with path.open("rb") as file:
        for number, data in enumerate(iter(lambda: file.readline(_LONGEST_LINE), b""), 1):
            if not data.endswith(b"\n") and len(data) < _LONGEST_LINE:
                break
            try:
                line = _line(loads(data), first=number == 1)
            except (ValueError, RecursionError) as error:
                what = error if isinstance(error, ValueError) else "is nested too deeply"
                raise ValueError(f"{path}: line {number}: {what}") from None
            lines[type(line)].append(line)
    if not lines[Start]:
        raise ValueError(f"{path}: line 1: is empty or incomplete, so the file holds no run")
    starts, samples, skips, verdicts = map(tuple, lines.values())
    return Run(starts, samples, skips, verdicts)


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
