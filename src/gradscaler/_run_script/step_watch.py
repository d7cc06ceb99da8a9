"""A watch of each operation in one step, which the user asked for by its number."""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from gradscaler._run_script.voice import say
from gradscaler.diagnose import Monitor
from gradscaler.diagnose._graph.search import Search


class StepWatch:
    """Watches a step from the end of the step before until an optimizer steps.

    Args:
        step: its number in the run.
        monitor: the monitor of the run, which counts the steps.
        model: the model, or a module that holds several.
    """

    def __init__(self, step: int, monitor: Monitor, model: Any) -> None:
        self._step, self._monitor = step, monitor
        self._search = Search(model)
        self._is_on = False
        self._handles = [
            register_optimizer_step_post_hook(lambda *_: self.step_ended()),
            register_optimizer_step_pre_hook(lambda *_: self._stop()),
        ]

    def step_ended(self) -> None:
        """Watch from here on if the next step is the one; a skipped one ends here."""
        self._stop()
        history = self._monitor.history
        if history and history[-1].step + 1 == self._step and not self._is_on:
            self._is_on = True
            self._search.start()

    def close(self) -> None:
        """Watch no more, as the run has ended, maybe in the step to watch or before it."""
        self._stop("the run ended in it, and no operation had made an Inf or NaN", latest="")
        steps = self._monitor.history[-1].step if self._monitor.history else 0
        if self._step:
            say(f"the run ended after step {steps:,}, so step {self._step:,} was not watched.")
        while self._handles:
            self._handles.pop().remove()

    def _stop(
        self,
        nothing: str = "no operation made an Inf or NaN",
        latest: str = "no Inf or NaN reached a gradient; the latest: ",
    ) -> None:
        """Stop watching, and say what was seen, which may be no more than the -Inf of a mask."""
        if self._is_on:
            self._is_on, self._step = False, 0
            self._search.stop()
            located, made = self._search.located, self._search.latest
            say(f"step watched: {located or (nothing if made is None else f'{latest}{made}')}")
            if located is not None:
                self._monitor.note_located(located)
