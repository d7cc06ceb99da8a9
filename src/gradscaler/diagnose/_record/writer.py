"""Writes a run to a run file, and gives its numbers to a user's function."""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import warnings
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

from gradscaler.diagnose._record.lines import VERSION, Line, Sample, Start, VerdictLine
from gradscaler.diagnose._record.reader import read
from gradscaler.diagnose._record.recorded_run import RecordedRun
from gradscaler.diagnose._record.step import Before

logger = logging.getLogger("gradscaler")

_fcntl: Any = importlib.import_module("fcntl") if os.name == "posix" else None
_OF_SCALER = "scale", "scales"  # of a sample; and "skips", if there are none
_SPELLED = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}
_SHARE = 'give each process a Monitor and a file of its own, path="run.{rank}.jsonl"'
_open_files: set[FileIO] = set()  # keeps a file open until its monitor has written the last lines


class RunFile:
    """A run file to append to.

    The file may be missing, be empty, or hold a run to continue. An incomplete last line, left by a
    writer that was killed, is cut off. The constructor writes ``start``, and raises its ``step`` to
    the last step in the file. It does not change a file that holds something else.

    The constructor refuses a second writer, in this process or another, until the first one closes
    the file or its process ends. A forked child cannot write to a file that its parent opened. A
    second writer is not detected on Windows, nor on a file system without locks; there is a warning
    on such a file system.

    Attributes:
        step: the last step in the file; 0 if the file is new.
        before: how the run that the file already holds ended; None if that is unknown.

    Raises:
        ValueError: the file holds something else, or has another writer.
        OSError: the file cannot be read or written.
    """

    def __init__(self, path: Path, start: Start) -> None:
        if path.exists() and not path.is_file():
            raise ValueError(f"{path}: is not a file")
        self.step = start.step
        self.before: Before | None = None
        self._has_failed = False
        self._left_out = () if start.policy else _OF_SCALER
        self._file = path.open("ab", buffering=0)
        try:
            _lock(self._file)
            _open_files.add(self._file)
            if self._file.seek(0, os.SEEK_END):
                run = read(path, RecordedRun)
                self.step, self.before = max(self.step, run.num_steps), run.ended
                what = "%s: holds a run of %d steps already; this one is appended, and judged alone"
                if self.step:
                    logger.warning(what, path, self.step)
                with path.open("rb") as file:  # find the end of the last complete line
                    whole = sum(len(line) for line in file if line.endswith(b"\n"))
                self._file.truncate(whole)
            fields = {**vars(start), "step": self.step}
            if start.world_size == 1:
                del fields["rank"], fields["world_size"]
            self._append({"gradscaler": VERSION, "kind": start.kind, **fields})
        except BaseException:  # an interrupt must not leave a lock behind either
            self.close()
            raise

    def write(self, line: Line) -> None:
        """Append a whole line. If that fails, warn once and ignore all later lines."""
        if self._has_failed:
            return
        try:
            kept = {name: n for name, n in vars(line).items() if name not in self._left_out}
            if self._left_out and not kept.get("skips"):
                kept.pop("skips", None)
            self._append({"kind": line.kind, **kept})
        except ValueError:
            if not self._file.closed:  # a signal handler may have closed it in the meantime
                raise
        except OSError as error:
            self._has_failed = True
            what = f"This process writes no more lines, and the training continues: {error}"
            warnings.warn(RuntimeWarning(what), stacklevel=2)

    def close(self) -> None:
        """Close the file, so that another writer can open it."""
        self._file.close()
        _open_files.discard(self._file)

    def _append(self, record: dict[str, object]) -> None:
        if self._file.closed:
            raise OSError(f"{self._file.name}: was opened before this process was forked; {_SHARE}")
        text = json.dumps(record, default=vars)
        if "NaN" in text or "Infinity" in text:  # may also be part of a name, so parse the text
            text = json.dumps(json.loads(text, parse_constant=_SPELLED.__getitem__))
        data = text.encode() + b"\n"
        end = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(data) != len(data):
                raise OSError("only a part of a line could be written")
        except BaseException as error:  # an interrupt must not leave part of a line either
            self._file.truncate(end)
            if isinstance(error, OSError):
                raise OSError(f"{self._file.name}: {error}") from error
            raise


def _lock(file: FileIO) -> None:
    """Lock a file against other writers until it is closed; ValueError if it has one already."""
    if _fcntl is None:
        return
    flags = _fcntl.LOCK_EX | _fcntl.LOCK_NB
    try:
        try:
            _fcntl.flock(file, flags)
        except BlockingIOError:
            gc.collect()  # the writer may be an unreachable monitor that was not yet collected
            _fcntl.flock(file, flags)
    except BlockingIOError:
        what = f"{file.name}: another monitor is writing to this file; close() it, or"
        raise ValueError(f"{what} {_SHARE}") from None
    except OSError as error:
        what = f"{file.name} cannot be locked, so a second writer goes unnoticed: {error}"
        warnings.warn(RuntimeWarning(what), stacklevel=4)


def _close_in_child() -> None:
    """Close the files in a forked child, so that they and their locks stay the parent's."""
    for file in _open_files:
        file.close()
    _open_files.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


class Log(Protocol):
    """A function that takes scalars by their names, such as ``wandb.log``."""

    def __call__(self, scalars: dict[str, float], /, *, step: int) -> object:
        """Log the scalars of a step."""


class ScalarLog:
    """Gives the numbers of samples, and the kinds of findings, to a user's function."""

    def __init__(self, log: Log, has_scaler: bool = True) -> None:
        self._log: Log | None = log
        self._has_scaler = has_scaler

    def write(self, line: Line) -> None:
        """Give the function a line's scalars, if there are any.

        If it raises, warn once, and call it no more: a training must not end because of its log.
        """
        scalars = _scalars_of(line, self._has_scaler)
        if self._log is None or not scalars:
            return
        try:
            self._log({f"gradscaler/{name}": n for name, n in scalars.items()}, step=line.step)
        except Exception as error:
            self._log = None
            what = f"log is called no more, and the training continues: {error!r}"
            warnings.warn(RuntimeWarning(what), stacklevel=2)

    def close(self) -> None:
        """Call the function no more."""
        self._log = None


def _scalars_of(line: Line, has_scaler: bool) -> dict[str, float]:
    if isinstance(line, VerdictLine):
        return {f"findings/{finding.kind}": 1.0 for finding in line.findings}
    if not isinstance(line, Sample):
        return {}
    numbers = {"loss_scale": line.scale, "skipped_steps": len(line.skips)} if has_scaler else {}
    seen = {"loss": line.loss, "gradient_norm": line.norm}
    seen |= {} if line.shares is None else vars(line.shares)
    return {name: float(n) for name, n in {**numbers, **seen}.items() if n is not None}
