"""A run file to append to, and the numbers of a run for TensorBoard."""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import warnings
from io import FileIO
from pathlib import Path
from typing import Any

from gradscaler.diagnose._findings.evidence import Before
from gradscaler.diagnose._run.lines import VERSION, Line, Sample, Start
from gradscaler.diagnose._run.reader import read_run

logger = logging.getLogger("gradscaler")

_fcntl: Any = importlib.import_module("fcntl") if os.name == "posix" else None
_SPELLED = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}
_SHARE = 'give each process a Monitor and a file of its own, path="run.{rank}.jsonl"'
_open_files: set[FileIO] = set()  # so that none is collected before its monitor writes the rest


class RunFile:
    """A run file to append to: one that does not exist, is empty, or holds a run to continue.

    If its last writer was killed, the incomplete last line is cut off. ``start`` is written first,
    with its ``step`` raised to the file's last. A file that holds something else stays as it is.

    A second writer is refused, whichever process it is in, until the first closes the file or
    ends. A forked child is no writer: it cannot write what its parent opened. On Windows, and on a
    file system without locks, a second writer goes unnoticed; the latter warns.

    Attributes:
        step: the last step in the file, 0 if it is new.
        before: how the run that it holds already ended, if that is known.

    Raises:
        ValueError: the file holds something else, or has a writer.
        OSError: the file cannot be read or written.
    """

    def __init__(self, path: Path, start: Start) -> None:
        if path.exists() and not path.is_file():
            raise ValueError(f"{path}: is not a file")
        self.step = start.step
        self.before: Before | None = None
        self._has_failed = False
        self._file = path.open("ab", buffering=0)
        try:
            _lock(self._file)
            _open_files.add(self._file)
            if self._file.seek(0, os.SEEK_END):
                run = read_run(path)
                self.step, self.before = max(self.step, run.num_steps), run.ended
                what = "%s: holds a run of %d steps already; this one is appended, and judged alone"
                if self.step:
                    logger.warning(what, path, self.step)
                with path.open("rb") as file:  # up to where the last complete line ends
                    whole = sum(len(line) for line in file if line.endswith(b"\n"))
                self._file.truncate(whole)
            fields = {**vars(start), "step": self.step}
            if start.world_size == 1:
                del fields["rank"], fields["world_size"]
            self._append({"gradscaler": VERSION, "kind": start.kind, **fields})
        except BaseException:  # an interrupt, too, leaves no lock
            self.close()
            raise

    def write(self, line: Line) -> None:
        """Append a line, whole. If that fails, warn, and write no more lines."""
        if self._has_failed:
            return
        try:
            self._append({"kind": line.kind, **vars(line)})
        except ValueError:
            if not self._file.closed:  # as a signal handler may have done on the way
                raise
        except OSError as error:
            self._has_failed = True
            what = f"This process writes no more lines, and the training continues: {error}"
            warnings.warn(RuntimeWarning(what), stacklevel=2)

    def close(self) -> None:
        """Close the file, which another may write to from then on."""
        self._file.close()
        _open_files.discard(self._file)

    def _append(self, record: dict[str, Any]) -> None:
        if self._file.closed:
            raise OSError(f"{self._file.name}: was opened before this process was forked; {_SHARE}")
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


def _lock(file: FileIO) -> None:
    """Keep other writers away until the file is closed; ValueError if it has one."""
    if _fcntl is None:
        return
    flags = _fcntl.LOCK_EX | _fcntl.LOCK_NB
    try:
        try:
            _fcntl.flock(file, flags)
        except BlockingIOError:
            gc.collect()  # the writer may be a monitor that nothing refers to
            _fcntl.flock(file, flags)
    except BlockingIOError:
        what = f"{file.name}: another monitor is writing to this file; close() it, or"
        raise ValueError(f"{what} {_SHARE}") from None
    except OSError as error:
        what = f"{file.name} cannot be locked, so a second writer goes unnoticed: {error}"
        warnings.warn(RuntimeWarning(what), stacklevel=4)


def _close_in_child() -> None:
    """Leave the files, and their locks, to the process that was forked."""
    for file in _open_files:
        file.close()
    _open_files.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def load_writer() -> Any:
    """TensorBoard's ``Writer``; ImportError if it is not installed."""
    try:
        return importlib.import_module("tensorboard.summary").Writer
    except ImportError:
        raise ImportError("tensorboard= needs TensorBoard: pip install tensorboard") from None


class EventFile:
    """A directory of event files that holds the numbers of each sample under ``gradscaler/``."""

    def __init__(self, writer: Any, directory: str | os.PathLike[str]) -> None:
        self._writer = writer(os.fspath(directory))

    def write(self, line: Line) -> None:
        """Write the numbers of a sample; ignore other lines."""
        if not isinstance(line, Sample):
            return
        numbers = {
            "loss_scale": line.scale,
            "skipped_steps": len(line.skips),
            "loss": line.loss,
            "gradient_norm": line.norm,
            **({} if line.shares is None else vars(line.shares)),
        }
        scalars = [("loss_scale", scale, step) for step, scale in line.scales]
        scalars += [(name, n, line.step) for name, n in numbers.items() if n is not None]
        for name, number, step in scalars:
            self._writer.add_scalar(f"gradscaler/{name}", number, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()
