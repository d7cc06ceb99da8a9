"""Loops of PyTorch in which an optimizer of Keras steps, by its ``apply``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from inspect import unwrap
from traceback import walk_stack
from typing import Any

from gradscaler._run_script.runs import Runs
from gradscaler._run_script.undo import replace
from gradscaler.diagnose._graph.guard import guarded
from gradscaler.diagnose._graph.stand_ins import in_place_of
from gradscaler.diagnose._graph.threads import end_if_in_threads
from gradscaler.diagnose._locate.locate import is_locating
from gradscaler.diagnose._monitor.by_identity import ByIdentity
from gradscaler.diagnose._monitor.parameters import eps_of
from gradscaler.diagnose._monitor.recorded_loop import Unscaled

Optimizer = Any
Tensor = Any

_NAME = "keras on torch"


class KerasLoops:
    """Puts a monitor on each optimizer of Keras that steps in a loop of PyTorch.

    ``fit`` is watched by itself, and an optimizer that scales losses is not watched.

    Args:
        options: those of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._keras: Any = sys.modules["keras"]
        self._runs = Runs(_NAME, options)
        self._numbers, self._num_known = ByIdentity[int](), 0  # of optimizers; the keys of runs
        self._loss: Tensor | None = None  # of the latest backward pass
        self._stepping = 0  # calls of steps that run

    def start(self) -> None:
        """Watch this process from now on, if Keras computes by PyTorch."""
        if self._keras.backend.backend() != "torch":
            return
        tensor, base = sys.modules["torch"].Tensor, self._keras.optimizers.Optimizer
        backward, see = tensor.backward, guarded(self._see_loss)

        @in_place_of(backward)
        def seen_backward(loss: Tensor, *args: Any, **kwargs: Any) -> Any:
            see(loss)
            return backward(loss, *args, **kwargs)

        replace(tensor, "backward", seen_backward)
        kinds = (*base.__mro__, self._keras.mixed_precision.LossScaleOptimizer)
        for kind in kinds:
            if "apply" in vars(kind):
                self._see_steps_of(kind)

    def _see_steps_of(self, kind: Any) -> None:
        step = kind.apply
        before, after = guarded(self._before_step), guarded(self._after_step)

        @in_place_of(step)
        def seen(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            before(optimizer, *args, **kwargs)
            try:
                return step(optimizer, *args, **kwargs)
            finally:
                after(optimizer)

        replace(kind, "apply", seen)

    def _see_loss(self, loss: Tensor) -> None:
        if not (is_locating.get() or self._runs.is_off):
            self._loss = loss.detach()

    def _before_step(
        self, optimizer: Optimizer, grads: Sequence[Any], trainable_variables: Any = None
    ) -> None:
        self._stepping += 1
        if self._stepping > 1 or self._runs.is_off or self._is_elsewhere(optimizer):
            return
        end_if_in_threads(is_new=optimizer not in self._numbers)
        if not (key := self._numbers.get(optimizer, 0)):
            self._num_known += 1
            self._numbers[optimizer] = key = self._num_known
            scaler = Unscaled("keras", eps=eps_of(optimizer))
            self._runs.begin(key, scaler, None, has_watch=False)
        if (run := self._runs.open.get(key)) is not None:
            trained = trainable_variables or optimizer._trainable_variables
            pairs = zip(trained, grads, strict=False)
            gradients = {str(each.path): gradient for each, gradient in pairs}
            loss, self._loss = self._loss, None
            run.record(loss, {name: each for name, each in gradients.items() if each is not None})

    def _after_step(self, optimizer: Optimizer) -> None:
        self._stepping -= 1
        if not self._stepping:
            self._runs.end_step(self._numbers.get(optimizer, 0))

    def _is_elsewhere(self, optimizer: Optimizer) -> bool:
        """Whether ``fit`` steps, which is watched by itself, or an optimizer that scales losses."""
        if isinstance(optimizer, self._keras.mixed_precision.LossScaleOptimizer):
            return True
        model = self._keras.Model
        codes = {unwrap(each).__code__ for each in (model.fit, model.train_on_batch)}
        return is_locating.get() or any(
            frame.f_code in codes for frame, _ in walk_stack(sys._getframe())
        )
