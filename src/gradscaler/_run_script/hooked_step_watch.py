"""A watch of each operation in one step of PyTorch, of whatever optimizer."""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from gradscaler._run_script.step_watch import StepWatch
from gradscaler.diagnose import Monitor
from gradscaler.diagnose._graph.guard import guarded
from gradscaler.diagnose._graph.hooks import Handle, remove_unless_stepping, uncompiled
from gradscaler.diagnose._graph.search import Search


class HookedStepWatch(StepWatch):
    """Watches a step until any optimizer of PyTorch steps; ``model`` may hold several models."""

    def __init__(self, step: int, monitor: Monitor, model: Any) -> None:
        super().__init__(step, monitor, Search(model))
        self._handles: list[Handle] = [
            register_optimizer_step_post_hook(uncompiled(guarded(lambda *_: self.step_ended()))),
            register_optimizer_step_pre_hook(uncompiled(guarded(lambda *_: self.stop()))),
        ]

    def close(self) -> None:
        """Watch no more, as the run has ended."""
        super().close()
        remove_unless_stepping(self._handles)
