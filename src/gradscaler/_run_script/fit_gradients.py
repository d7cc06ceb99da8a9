"""Gradients that a ``train_step`` of a Keras model's own does not zero, on PyTorch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from gradscaler._run_script.kept_gradients import KeptGradients
from gradscaler._run_script.undo import replace
from gradscaler.diagnose import Finding
from gradscaler.diagnose._findings import judge
from gradscaler.diagnose._findings.evidence import Evidence
from gradscaler.diagnose._findings.frameworks import framework_named
from gradscaler.diagnose._graph.guard import guarded
from gradscaler.diagnose._graph.stand_ins import in_place_of
from gradscaler.diagnose._locate.locate import is_locating
from gradscaler.diagnose._monitor.own_steps import is_own
from gradscaler.diagnose._monitor.traced_scalers import number_of
from gradscaler.diagnose._record.events import Events, of_unzeroed, texts_of
from gradscaler.diagnose._seams.keras import backend_of

Model = Any


def may_keep_gradients(model: Model) -> bool:
    """Whether a model's own code has to zero its gradients, as Keras' step does by itself."""
    return backend_of(model) == "torch" and is_own(model)


class FitGradients:
    """Counts the steps of one optimizer that use gradients which the step before has used.

    Args:
        note: called in each such step.
    """

    def __init__(self, note: Callable[[], object]) -> None:
        self._note, self._kept = note, KeptGradients()
        self._num_steps = self._num_kept = 0
        tensor = sys.modules["torch"].Tensor
        backward, see = tensor.backward, guarded(self._see_backward)

        @in_place_of(backward)
        def seen(*args: Any, **kwargs: Any) -> Any:
            see()
            return backward(*args, **kwargs)

        replace(tensor, "backward", seen)

    def _see_backward(self) -> None:
        if not is_locating.get():
            self._kept.before_backward()

    def callback(self) -> Any:
        """A callback that looks at gradients after each batch."""
        gradients = self

        class Looking(sys.modules["keras"].callbacks.Callback):  # type: ignore[misc] # untyped base
            num_applied = 0.0

            @guarded
            def on_train_begin(self, logs: Any = None) -> None:
                self.num_applied = number_of(self.model.optimizer.iterations)

            @guarded
            def on_train_batch_end(self, batch: int | None, logs: Any = None) -> None:
                before = self.num_applied
                self.num_applied = number_of(self.model.optimizer.iterations)
                if self.num_applied != before:  # else it adds up those of several batches
                    gradients._see_step(self.model)

        return Looking()

    def _see_step(self, model: Model) -> None:
        self._num_steps += 1
        if self._kept.take(model.optimizer):
            self._num_kept += 1
            self._note()
        self._kept.note_step(model.optimizer, [each.value for each in model.trainable_variables])

    @property
    def finding(self) -> Finding | None:
        """That gradients are not zeroed; None if they are."""
        counts = texts_of(of_unzeroed("") * self._num_kept)
        evidence = Evidence(
            self._num_steps,
            0,
            has_scaler=False,
            framework=framework_named("keras", {"torch": ""}),
            events=Events().after(counts),
        )
        finding = judge(evidence).findings[0]
        return finding if finding.kind == "misuse" else None
