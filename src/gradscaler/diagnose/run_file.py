"""A run file to append to; :mod:`gradscaler.diagnose.runs` reads it."""

from __future__ import annotations

import json
import os
import warnings
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from weakref import finalize

from gradscaler.diagnose.runs import VERSION, Line, Start, read_run

_SPELLED = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}


class RunFile:
    """A run file to append to.

    Args:
        path: of a file that is not there yet, is empty, or holds a run, which goes on then. A line
            that its last writer was killed in is cut off.
        start: its first line. Its ``step`` is raised to the file's last.

    Attributes:
        step: the last step in the file, 0 if it is new.

    Raises:
        ValueError: the file holds something else; it is left as it is.
        OSError: it cannot be read or written.
    """

    def __init__(self, path: Path, start: Start) -> None:
        self.step = start.step
        whole = 0
        if path.exists() and (not path.is_file() or path.stat().st_size):
            self.step = max(self.step, read_run(path).num_steps)
            whole = _end_of_last_line(path)
        self._file = path.open("ab", buffering=0)
        finalize(self, self._file.close)  # many a script never closes its monitor
        self._has_failed = False
        if whole:
            self._file.truncate(whole)
        self._append({"gradscaler": VERSION, "kind": start.kind, **vars(start), "step": self.step})

    def write(self, line: Line) -> None:
        """Append a line, in one piece. If that fails it warns, and no more are written."""
        if self._has_failed:
            return
        try:
            self._append({"kind": line.kind, **vars(line)})
        except OSError as error:
            self._has_failed = True
            what = f"The run file ends here, and the training goes on: {error}"
            warnings.warn(RuntimeWarning(what), stacklevel=2)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, record: dict[str, Any]) -> None:
        text = json.dumps(record, default=vars)
        if "NaN" in text or "Infinity" in text:  # a name may hold these, too
            text = json.dumps(json.loads(text, parse_constant=_SPELLED.__getitem__))
        data = text.encode() + b"\n"
        end = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(data) != len(data):
                raise OSError("only a part of a line could be written")
        except BaseException as error:  # an interrupt leaves no part of a line, either
            self._file.truncate(end)
            if isinstance(error, OSError):
                raise OSError(f"{self._file.name}: {error}") from error
            raise


def _end_of_last_line(path: Path) -> int:
    """Where a file's last line break is; what comes after it is torn."""
    with path.open("rb") as file:
        return sum(len(line) for line in file if line.endswith(b"\n"))


def now() -> str:
    """The time, for a :class:`Start`."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
