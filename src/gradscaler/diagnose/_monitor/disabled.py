"""A scaler that is disabled though the model computes in float16."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from gradscaler.diagnose._gradients.reading import Tensor
from gradscaler.diagnose._graph.nodes import in_order
from gradscaler.diagnose._monitor import backward_calls
from gradscaler.diagnose._monitor.step_log import StepLog
from gradscaler.diagnose._record.events import Counted, Event

_ENOUGH = 10  # backward passes that are looked at


class DisabledScaler:
    """Notes the first backward passes of PyTorch that compute in float16 under a disabled scaler.

    The scaler announces nothing then. The graph of a loss shows what autocast chose, so the model
    needs no hook, which would be saved and scripted with it.
    """

    def __init__(self, log: StepLog) -> None:
        self._seen: list[Counted] = []
        self._num_left = _ENOUGH
        self._log = weakref.ref(log)
        backward_calls.listen(self)

    def before_backward(self, losses: Sequence[Tensor]) -> None:
        """Look at the graphs of the losses."""
        self._num_left -= 1
        if not self._num_left:
            self.stop()
        log = self._log()
        with suppress(Exception):
            if log is not None and any(map(_has_float16, losses)):
                self._seen.append(Counted(Event.DISABLED))
                log.note_early(self._seen)

    def after_backward(self) -> None:
        """Nothing to do."""

    def stop(self) -> None:
        """Look at no more passes."""
        backward_calls.ignore(self)


def _has_float16(loss: Tensor) -> bool:
    """Whether an operation in the graph of a loss made float16."""
    torch: Any = sys.modules["torch"]
    made = (each for node in in_order(loss) for each in node._input_metadata)
    return any(each.dtype == torch.float16 for each in made)
