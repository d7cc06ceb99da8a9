"""One run under a monitor: its file, its findings on the way, and its verdict at the end."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import Any

from gradscaler._run_script.options import STOPPED
from gradscaler._run_script.step_watch import StepWatch
from gradscaler._run_script.voice import NO_STEP, is_quiet_rank, say, shown
from gradscaler.diagnose import Finding, Monitor
from gradscaler.diagnose._monitor.models import one_model

# Kinds of findings after which no scale brings a training back, for a run with a scaler.
_LOST = {"parameter", "divergence", "activations", "loss", "nan", "floor", "silent"}


class WatchedRun:
    """A run that begins now.

    Args:
        scaler: the scaler; None for a loop that has none.
        model: the model, or several by their names.
        path: a new file.
        options: those of the command line.
    """

    def __init__(self, scaler: Any, model: Any, path: Path, options: argparse.Namespace) -> None:
        self._path, self._may_stop = path, options.stop
        self._is_over, self._process = False, os.getpid()
        model = one_model(model)
        self._monitor = Monitor(scaler, model, options.every, path, tell=self._tell)
        self._watch = StepWatch(options.watch, self._monitor, model) if options.watch else None

    def step_ended(self) -> None:
        """Note that a scaler has ended a step, which it may have skipped."""
        if self._watch is not None:
            self._watch.step_ended()

    def _tell(self, finding: Finding) -> None:
        """Print a finding, and end the process there if that was asked for."""
        if self._is_over or os.getpid() != self._process:  # the verdict says it, or the parent
            return
        say(finding.text)
        if self._may_stop and (self._monitor.bad_step is not None or finding.kind in _LOST):
            raise SystemExit(STOPPED)

    def end(self) -> None:
        """Close the file, and print the verdict; a run without a step leaves no file."""
        self._is_over = True
        if self._watch is not None:
            self._watch.close()
        self._monitor.close()
        history, verdict = self._monitor.history, self._monitor.verdict
        if not history and verdict.kind == "normal":
            self._path.unlink(missing_ok=True)
            say(NO_STEP)
        elif verdict.kind != "normal" or not is_quiet_rank():
            steps = history[-1].step if history else 0
            file = shown(self._path)
            ranks = re.sub(r"\.rank\d+\.jsonl", ".rank*.jsonl", file)
            say(
                f"after {steps:,} step{'s' * (steps != 1)}: {verdict.text}",
                f"file:   {file}",
                f"report: python -m gradscaler report {ranks} -o report.html",
            )
