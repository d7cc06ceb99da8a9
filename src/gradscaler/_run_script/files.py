"""The run files of a process: names that no other process and no other run uses."""

from __future__ import annotations

import argparse
import os
import sys
import time
from functools import cached_property
from itertools import count
from pathlib import Path

from gradscaler._run_script.voice import rank_of_process


class RunFiles:
    """Names the files of the runs of this process, such as ``train-20260131-0935-4711.jsonl``.

    The ranks of one launch share the name before ``.rank0``, as they have one parent process.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options

    @cached_property
    def _start(self) -> str:
        """What all names begin with; at its first use, as PyTorch may be there before a script."""
        script = Path(sys.argv[0])
        name = script.parent.name if script.stem == "__main__" else script.stem
        name = "notebook" if name == "ipykernel_launcher" else name
        process = os.getpid() if rank_of_process() is None else os.getppid()
        return f"{name or 'run'}-{time.strftime('%Y%m%d-%H%M')}-{process}"

    def next(self) -> Path:
        """A file that does not exist; its folder does.

        Raises:
            OSError: the folder cannot be made or read.
        """
        folder: Path = self._options.folder
        folder.mkdir(parents=True, exist_ok=True)
        rank = rank_of_process()  # a spawned process may join its group late
        ending = "" if rank is None else f".rank{rank}"
        for number in count(1):
            run = f".{number}" if number > 1 else ""
            path = folder / f"{self._start}{run}{ending}.jsonl"
            if not path.exists():
                return path
        raise AssertionError("unreachable")
