"""Steps of optimizers in a script that never makes a backward pass, so that they move nothing."""

from __future__ import annotations

from inspect import currentframe
from typing import Any

from gradscaler._run_script.voice import voice
from gradscaler.diagnose._graph.hooks import StepHooks, weakly
from gradscaler.diagnose._graph.step_lines import lines_around
from gradscaler.diagnose._monitor.parameters import held_by
from gradscaler.diagnose._record.thresholds import FEW_CALLS


class IdleSteps:
    """Counts the steps without a gradient before the first backward pass."""

    def __init__(self) -> None:
        self._count, self._at = 0, ""
        self._is_on = False  # as hooks stay where a step is going through them
        self._hooks = StepHooks(self)

    def start(self) -> None:
        """Count from now on."""
        self._is_on = True
        self._hooks.add(None, weakly(self._note))

    def _note(self, optimizer: Any, *_: object) -> None:
        if not self._is_on:
            return
        is_own = not type(optimizer).__module__.startswith("torch.")  # it may need no gradient
        if is_own or any(p.grad is not None for p in held_by(optimizer)):  # of torch.autograd.grad
            self.stop()
            return
        self._count += 1
        if self._count == 1 and "step" in (lines := lines_around(currentframe())):
            self._at = f" at {lines['step']}"

    def stop(self) -> None:
        """Count no more: there is a gradient, or the watch is over."""
        self._count, self._is_on = 0, False
        self._hooks.remove()

    def conclude(self) -> bool:
        """Say that no backward pass was made; False if there were too few steps to say so."""
        if self._count < FEW_CALLS:
            return False
        voice.conclude(
            f"step() was called {self._count:,} times{self._at}, and backward() never, so no "
            "parameter had a gradient, and nothing was trained. Call backward() on the loss before "
            "each step()."
        )
        return True
