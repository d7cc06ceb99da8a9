"""One run under a monitor: its file, its findings on the way, and its verdict at the end."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from gradscaler._run_script.batches import prepared_by
from gradscaler._run_script.files import RunFiles
from gradscaler._run_script.options import STOPPED
from gradscaler._run_script.step_watch import Search, StepWatch
from gradscaler._run_script.voice import conclude_without_step, is_quiet_rank, shown, voice
from gradscaler.diagnose import Finding, Located, Monitor, Verdict, read_run, report
from gradscaler.diagnose._findings.frameworks import Framework
from gradscaler.diagnose._findings.origins import BY_EPS, WARNED
from gradscaler.diagnose._graph.guard import guard, guarded
from gradscaler.diagnose._monitor.models import one_model
from gradscaler.diagnose._record.events import Counted
from gradscaler.diagnose._record.located import is_exact
from gradscaler.diagnose._record.source import show_source_of

# Kinds of findings after which no scale brings a training back, for a run with a scaler.
_LOST = {"parameter", "divergence", "activations", "loss", "nan", "floor", "silent"}
# What a watched step may name the maker of: always, or if the run itself did not.
_OF_VALUES, _OF_OPERATIONS = {"data", "silent"}, {"nan", "loss", "activations"}
# A step is watched from its batch on, so that what prepares the batch is not seen.
_FROM_BATCH = {"keras", "jax"}
# A script may have looked at a number that is no loss, or that it keeps nowhere.
_HINT = " If it found a NaN, {} names the operation."


class WatchedRun:
    """A run that begins now.

    Args:
        scaler: the scaler; None for a loop that has none.
        model: the model, or several by their names.
        files: give the run a new file. If it cannot be written, the run has none.
        options: those of the command line, and how the script has ended.
        framework: what it trains in; ``--watch`` counts where it can watch a step.
        search: what shows the operations of a step.
    """

    def __init__(
        self,
        scaler: Any,
        model: Any,
        files: RunFiles,
        options: argparse.Namespace,
        framework: Framework,
        search: Search | None = None,
    ) -> None:
        self._options, self._has_scaler = options, scaler is not None
        self._is_over, self._process = False, os.getpid()
        self._num_unchanged = 0  # steps that left the weights as they were
        self._is_broken = False  # whether the watch ended before the run
        guard.add(self)
        self._advice: set[str] = set()  # that was printed on the way
        self._lines_shown: set[str | None] = set()
        self.began = monotonic()
        self.lost_at: float | None = None  # when a failure that costs weights was told first
        self.is_aside = False  # whether it trains nothing, beside others that do
        self.left = ""  # a variable that is not finite where the script has raised an error
        self.nan_left = ""  # a variable that the script's evaluation has left as NaN
        self._origin = ""  # what made a batch's numbers where no watch of this process can see it
        model = one_model(model)
        voice.note_rank()
        given, tell = (scaler, model, options.every), guarded(self._tell)
        self._path: Path | str  # or why there is none
        try:
            self._path = files.next()
            self._monitor = Monitor(*given, self._path, tell=tell)
        except OSError as error:  # the folder, or the disk is full
            why = f"{shown(options.folder)} cannot be written to ({error.strerror or error})"
            self._path = f"none, as {why}; name another folder with {options.elsewhere}"
            self._monitor = Monitor(*given, tell=tell)
        options.latest = self
        self._watch: StepWatch | None = None
        self._first_watched = framework.first_watched
        self._is_from_batch = framework.name in _FROM_BATCH
        self._proposes_watch = framework.has_watch and options.watch is None
        if options.watch is None or not framework.has_watch or search is None:
            return
        try:
            is_begun = options.watch == framework.first_watched == 1
            is_begun &= getattr(search, "is_on", True)
            self._watch = StepWatch(options.watch, self._monitor, search, is_begun=is_begun)
        except BaseException:  # nobody would close it
            self._close()
            raise

    @property
    def verdict(self) -> Verdict | None:
        """The verdict so far; None before the first step, unless something is wrong, or over."""
        verdict = self._monitor.verdict
        is_known = self._is_broken or self._monitor.history or verdict.kind != "normal"
        return verdict if is_known else None

    def report(self, path: Path) -> None:
        """Write a report on the steps so far.

        Raises:
            ValueError: the run has no file, or the name has another ending.
        """
        if isinstance(self._path, str):
            raise ValueError(f"there is no run file to report on: {self._path}")
        self._monitor.flush()
        report.write(read_run(self._path), path)

    @property
    def html(self) -> str:
        """The report in a notebook's output, or the verdict if no report can be made."""
        return self._monitor._repr_html_()

    def callback(self) -> Any:
        """A callback of Keras that records each step."""
        return self._monitor.callback()

    def record(
        self,
        loss: Any,
        gradients: Mapping[str, Any] | None,
        replay: Any = None,
        finite: bool | None = None,
    ) -> None:
        """Record a step of a loop whose scaler, if it has one, does not announce its steps.

        Without one, the step is about to be applied. The gradients are None if they are unknown;
        ``finite`` says whether they are, if a scaler does not.
        """
        self.stepping([each for each in (gradients or {}).values() if each is not None])
        self._monitor.record(loss=loss, gradients=gradients, replay=replay, finite=finite)

    def note_located(self, located: Located) -> None:
        """Note where the failure of the step began that is recorded next."""
        self._monitor.note_located(located)

    def note_applied(self, located: Located | None) -> None:
        """Note that the script applies the step that is recorded next in spite of an Inf or NaN."""
        self._monitor.note_applied(located)

    def stepping(self, gradients: Sequence[Any] = ()) -> None:
        """Note that an optimizer steps, with these gradients if no graph has shown them."""
        if self._watch is not None:
            self._watch.stepping(gradients)

    def note_unzeroed(self, name: str) -> None:
        """Note that the step that begins uses gradients that were not zeroed; see Monitor."""
        self._monitor.note_unzeroed(name)

    def note_events(self, events: Iterable[Counted]) -> None:
        """Note what was seen of the step that is not over."""
        self._monitor.note_events(events)

    def note_stayed(self, name: str, count: int) -> None:
        """Note backward passes without a step, before which a gradient held an Inf or NaN."""
        self._monitor.note_stayed(name, count)

    def note_operations(self, broadcast: str, passes_none: str) -> None:
        """Note operations of the step that is recorded next; see Monitor."""
        self._monitor.note_operations(broadcast, passes_none)

    def note_repeated(self) -> None:
        """Note that a step that begins repeats that of a scaler; see Monitor."""
        self._monitor.note_repeated()

    def leave_unchanged(self, located: Located | None) -> None:
        """Note that the step that is recorded next left the weights as they were, and why."""
        self._num_unchanged += 1
        if located is not None:
            self._monitor.note_located(located, is_left_out=True)

    def step_ended(self) -> None:
        """Note that a step has ended, which a scaler may have skipped."""
        if self._watch is not None:
            self._watch.step_ended()

    def _tell(self, finding: Finding) -> None:
        """Print a finding, and end the process there if that was asked for."""
        if self._is_over or os.getpid() != self._process:  # the verdict says it, or the parent
            return
        if finding.kind in _OF_VALUES and self._proposes_watch and not self._origin:
            self._origin = prepared_by(next(iter(finding.steps), 0), in_workers=True)
        if voice.tell(finding.cause if finding.action in self._advice else finding.text):
            self._advice.add(finding.action)
            self._show_line(finding)
        is_lost = self._monitor.bad_step is not None or finding.kind in _LOST
        if is_lost and self.lost_at is None:
            self.lost_at = monotonic()
        if self._options.stop and is_lost:
            raise SystemExit(STOPPED)

    def _show_line(self, finding: Finding) -> None:
        """Show the finding's line under the cell of a notebook, once."""
        if finding.line not in self._lines_shown:
            self._lines_shown.add(finding.line)
            show_source_of(finding.line)

    def at_samples(self, look: Callable[[], None]) -> None:
        """Look at something in each step that the monitor samples, before its optimizer's step."""
        self._monitor.at_samples(guarded(look))

    def leave_out(self, loss: Any) -> None:
        """Give the verdict a loss that no backward pass has taken."""
        self._is_over = True
        self._monitor.leave_out(loss)

    def break_off(self, _: str) -> None:
        """Note that the monitor has ended, which the verdict says."""
        self._is_broken = True

    def discard(self) -> None:
        """Close the file, and remove it."""
        self._close()
        self._remove_file()

    def _remove_file(self) -> None:
        if isinstance(self._path, Path):
            self._path.unlink(missing_ok=True)

    @property
    def _lines(self) -> list[str]:
        """Where the file is, and the command that draws it."""
        if isinstance(self._path, str):
            return [f"file:   {self._path}"]
        file = shown(self._path)
        ranks = re.sub(r"\.rank\d+\.jsonl", ".rank*.jsonl", file)
        return [f"file:   {file}", f"report: python -m gradscaler report {ranks} -o report.html"]

    def _close(self) -> None:
        self._is_over = True
        guard.remove(self)
        if self._watch is not None:
            self._watch.close()
        self._monitor.close()

    def end(self, *, proposes_watch: bool = True) -> None:
        """Close the file, and print the verdict; a run without a step leaves no file."""
        self._proposes_watch &= proposes_watch
        if self.nan_left:
            self._monitor.note_nan_left(self.nan_left)
        self._close()
        try:
            history, verdict = self._monitor.history, self._monitor.verdict
        except Exception:
            if not self._is_broken:
                raise
            history = ()
        if self._is_broken and not history:
            voice.conclude("no verdict, as the watch ended.", self._lines[0])
            return
        steps = history[-1].step if history else 0
        again = self._options.again.format(steps + 1)
        is_told = verdict.kind in _LOST | _OF_VALUES | _OF_OPERATIONS
        if self.left and self._proposes_watch and not is_told:
            where = f"the script ended in step {steps + 1:,}, where {self.left}"
            voice.note(f"{where}: {again} names what made it.")
        if not history and verdict.kind == "normal":
            self._remove_file()
            conclude_without_step(self._options)
        elif verdict.kind == "normal" and self.is_aside:
            self._remove_file()
        elif verdict.kind == "normal" and self._options.has_failed:
            hint = _HINT.format(again) if self._proposes_watch and not self.left else ""
            voice.conclude(f"the script ended after step {steps}.{hint}", self._lines[0])
        elif verdict.kind != "normal" or not is_quiet_rank():
            self._say_verdict(verdict, steps)

    def _say_verdict(self, verdict: Verdict, steps: int) -> None:
        """Print a verdict, without advice that was printed on the way, and where the file is."""
        text, first = f": {verdict.text}", verdict.findings[0]
        if first.action in self._advice:
            text = f", as said above{text.replace(first.text, first.cause, 1)}"
        # A watch begins where an optimizer, or a scaler, has ended the step before.
        unseen = {s.step for s in self._monitor.history if s.skipped and not self._has_scaler}
        bad = next((step for step in first.steps if step - 1 not in unseen), 0)
        is_unseen = first.line is None or "--watch" in first.action  # as of compiled code
        has_bad_loss = any(s.step == bad and s.has_bad_loss for s in self._monitor.history)
        is_unseen = is_unseen and (first.kind in _OF_OPERATIONS or has_bad_loss)
        is_known = first.line is not None and is_exact(self._monitor.located)
        is_known |= self._is_from_batch and first.line is not None
        is_known |= WARNED in first.cause
        if BY_EPS in first.cause:  # it made that in the step before, from finite numbers
            is_known, is_unseen = True, False
        is_open = (first.kind in _OF_VALUES and not is_known) or is_unseen
        is_made_before = is_open and bad >= self._first_watched and self._proposes_watch
        origin = f"{self._options.again.format(bad)} names what made it"
        if first.kind in _OF_VALUES and self._origin:
            origin = self._origin
        if self._num_unchanged:
            text = f", of which {self._num_unchanged:,} left the weights as they were{text}"
        voice.conclude(
            f"after {steps:,} step{'s' * (steps != 1)}{text}",
            *self._lines,
            *[f"origin: {origin}"] * is_made_before,
        )
        self._show_line(first)
