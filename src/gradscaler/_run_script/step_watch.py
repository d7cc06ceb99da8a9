"""A watch of each operation in one step, which the user asked for by its number."""

from __future__ import annotations

from typing import Protocol

from gradscaler._run_script.batches import prepared_by
from gradscaler._run_script.voice import voice
from gradscaler.diagnose import Located, Monitor
from gradscaler.diagnose._findings.advice import of_result
from gradscaler.diagnose._graph.guard import guard
from gradscaler.diagnose._record.located import Given
from gradscaler.diagnose._record.source import show_source_of


class Search(Protocol):
    """What shows the operations of a step."""

    @property
    def located(self) -> Located | None:
        """The first Inf or NaN that reached a result; None if there is none."""

    def start(self) -> None:
        """Begin to look."""

    def stop(self) -> None:
        """Look no more."""

    def end_in(self, results: object) -> None:
        """Note the results of a pass."""


class StepWatch:
    """Watches a step from the end of the step before until an optimizer steps.

    Args:
        step: its number in the run.
        monitor: the monitor of the run, which counts the steps.
        search: what shows the operations.
        is_begun: whether the search is on already, as before a first step.
    """

    def __init__(
        self, step: int, monitor: Monitor, search: Search, *, is_begun: bool = False
    ) -> None:
        self._step, self._monitor, self._search = step, monitor, search
        self._is_on = is_begun
        guard.add(self)

    def break_off(self, _: str) -> None:
        """Watch no more after an error."""
        self._step, self._is_on = 0, False  # the hooks, of which one may be running, do nothing
        self._search.stop()

    def stepping(self, gradients: object) -> None:
        """Note the gradients with which an optimizer steps, and watch no more."""
        if self._is_on:
            self._search.end_in(gradients)
            self.stop()

    def step_ended(self) -> None:
        """Watch from here on if the next step is the one; a skipped one ends here."""
        self.stop()
        history = self._monitor.history
        if history and history[-1].step + 1 == self._step and not self._is_on:
            try:
                self._search.start()
                self._is_on = True
            except RuntimeError as error:  # such as in a compiled step of the optimizer
                voice.note(f"step {self._step:,} is not watched: {error}")
                self._step = 0

    def close(self) -> None:
        """Watch no more, as the run has ended, maybe in the step to watch or before it."""
        nothing = "the run ended in it, and no operation had made an Inf or NaN"
        self.stop(nothing, latest="", advises=True)
        steps = self._monitor.history[-1].step if self._monitor.history else 0
        if self._step:
            missed = f"so step {self._step:,} was not watched"
            voice.note(f"the run ended after step {steps:,}, {missed}.")

    def stop(
        self,
        nothing: str = "no operation made an Inf or NaN",
        latest: str = "no Inf or NaN reached a gradient; the latest: ",
        advises: bool = False,
    ) -> None:
        """Stop watching, and say what was seen, which may be no more than the -Inf of a mask.

        ``advises`` says whether to say what to do, as no verdict does on a step that did not end.
        """
        if self._is_on:
            step, self._is_on, self._step = self._step, False, 0
            self._search.stop()
            if getattr(self._search, "has_failed", False):
                return
            # Where the latest Inf or NaN was made, if known, which may have reached no result.
            located, made = self._search.located, getattr(self._search, "latest", None)
            seen = located or (nothing if made is None else f"{latest}{made}")
            if isinstance(located, Given) and (source := prepared_by(step)):
                seen = f"{seen}. It was {source}"
            elif advises and (advice := of_result(located or made)):
                seen = f"{seen}. {advice[0].upper()}{advice[1:]}."
            voice.note(f"step watched: {seen}")
            show_source_of(None if located is None else located.line)
            if located is not None and not getattr(self._search, "may_overflow", False):
                self._monitor.note_located(located)
