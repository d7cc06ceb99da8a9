"""A run file to append to."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any
from weakref import finalize

from gradscaler.diagnose._run.lines import VERSION, Line, Start
from gradscaler.diagnose._run.reader import read_run

_SPELLED = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}


class RunFile:
    """A run file to append to: one that does not exist, is empty, or holds a run to continue.

    If its last writer was killed, the incomplete last line is cut off. ``start`` is written first,
    with its ``step`` raised to the file's last. A file that holds something else stays as it is.

    Attributes:
        step: the last step in the file, 0 if it is new.

    Raises:
        ValueError: the file holds something else.
        OSError: the file cannot be read or written.
    """

    def __init__(self, path: Path, start: Start) -> None:
        self.step = start.step
        whole = 0  # where the last complete line ends
        if path.exists() and (not path.is_file() or path.stat().st_size):
            self.step = max(self.step, read_run(path).num_steps)
            with path.open("rb") as file:
                whole = sum(len(line) for line in file if line.endswith(b"\n"))
        self._file = path.open("ab", buffering=0)
        finalize(self, self._file.close)  # many scripts never close their monitor
        self._has_failed = False
        if whole:
            self._file.truncate(whole)
        self._append({"gradscaler": VERSION, "kind": start.kind, **vars(start), "step": self.step})

    def write(self, line: Line) -> None:
        """Append a line, whole. If that fails, warn, and write no more lines."""
        if self._has_failed:
            return
        try:
            self._append({"kind": line.kind, **vars(line)})
        except OSError as error:
            self._has_failed = True
            what = f"The run file ends here, and the training continues: {error}"
            warnings.warn(RuntimeWarning(what), stacklevel=2)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, record: dict[str, Any]) -> None:
        text = json.dumps(record, default=vars)
        if "NaN" in text or "Infinity" in text:  # a name may hold these too
            text = json.dumps(json.loads(text, parse_constant=_SPELLED.__getitem__))
        data = text.encode() + b"\n"
        end = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(data) != len(data):
                raise OSError("only a part of a line could be written")
        except BaseException as error:  # an interrupt, too, leaves no part of a line
            self._file.truncate(end)
            if isinstance(error, OSError):
                raise OSError(f"{self._file.name}: {error}") from error
            raise
