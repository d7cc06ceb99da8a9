"""Loops of TensorFlow that change their variables by hand, by the gradients of a tape."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradscaler._run_script.runs import Runs
from gradscaler._run_script.step_shapes import EarlyStep
from gradscaler._run_script.tape_steps import (
    Loop,
    StepOperations,
    Tensor,
    Variable,
    optimizers_stepped,
    tensorflow,
)
from gradscaler._run_script.traced_calls import is_looking
from gradscaler._run_script.undo import replace
from gradscaler.diagnose._graph.guard import guarded
from gradscaler.diagnose._graph.stand_ins import in_place_of
from gradscaler.diagnose._monitor.recorded_loop import Unscaled
from gradscaler.diagnose._record.thresholds import FEW_CALLS, FEW_SAMPLES
from gradscaler.diagnose._seams.tensorflow import TensorFlowSeam

_NAME = "tf_keras"  # whose words are those of TensorFlow


class _First(NamedTuple):
    """The first gradient by some variables, and the value that one of them had then."""

    loss: Tensor
    gradients: Mapping[str, Any]
    variable: Variable
    value: NDArray[Any]
    early: EarlyStep


class HandLoops:
    """Puts a monitor on variables that change between two gradients, though no optimizer steps.

    A gradient by variables, which is taken eagerly, is a step then.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._runs = options, Runs(_NAME, options)
        self._first: dict[int, _First] = {}  # by the id of the first variable
        self._loops: dict[int, Loop] = {}  # by the same
        self._num_unchanged = 0  # gradients after which a variable was as before
        self._early: dict[int, EarlyStep] = {}
        self._num_noted: dict[int, int] = {}

    def start(self) -> None:
        """Watch this process from now on."""
        tape = tensorflow().GradientTape
        gradient, see = tape.gradient, guarded(self._see_gradient)

        @in_place_of(gradient)
        def seen(own: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
            made = gradient(own, target, sources, *args, **kwargs)
            if not is_looking():
                see(target, sources, made)
            return made

        replace(tape, "gradient", seen)

    def _see_gradient(self, target: Any, sources: Any, made: Any) -> None:
        if self._num_unchanged > FEW_CALLS or optimizers_stepped or self._runs.is_off:
            self._give_up()
            return
        if not tensorflow().executing_eagerly() or not hasattr(target, "dtype"):
            return
        variables = tensorflow().nest.flatten(sources)
        if not variables or not all(hasattr(each, "assign") for each in variables):
            return
        key = id(variables[0])
        names = _names_of(variables)
        gradients = dict(zip(names, tensorflow().nest.flatten(made), strict=True))
        if key in self._loops:
            self._record(key, target, gradients)
        elif key not in self._first:
            self._begin_to_see(key, target, dict(zip(names, variables, strict=True)), gradients)
        else:
            self._first[key].early.see_gradient()
            first = self._first[key]
            if np.array_equal(first.variable.numpy(), first.value):
                self._num_unchanged += 1  # gradients of several batches are added up
                return
            del self._first[key]
            self._begin(key, variables, names, first)
            self._record(key, first.loss, first.gradients)
            self._record(key, target, gradients)

    def _begin_to_see(
        self,
        key: int,
        loss: Tensor,
        variables: Mapping[str, Variable],
        gradients: Mapping[str, Any],
    ) -> None:
        moved = [variables[name] for name, each in gradients.items() if each is not None]
        if not moved:
            return
        smallest = min(moved, key=lambda each: each.shape.num_elements())
        value, early = smallest.numpy().copy(), EarlyStep()
        self._first[key] = _First(loss, gradients, smallest, value, early)
        early.see_gradient()

    def _give_up(self) -> None:
        """Keep nothing of gradients that an optimizer takes."""
        for each in self._first.values():
            each.early.stop()
        self._first.clear()

    def _begin(self, key: int, variables: list[Variable], names: list[str], first: _First) -> None:
        loop = Loop(None, variables, None, is_scaled=False, is_compiled=False)
        if self._options.watch is not None:
            loop.watch = StepOperations(TensorFlowSeam(*loop.shown, is_step=True))
        self._runs.begin(key, Unscaled(_NAME), None, loop.watch)
        loop.run = self._runs.open.get(key)
        self._loops[key], self._early[key], self._num_noted[key] = loop, first.early, 0

    def _record(self, key: int, loss: Tensor, gradients: Mapping[str, Any]) -> None:
        run, early = self._loops[key].run, self._early[key]
        if run is None:
            return
        if self._num_noted[key]:
            run.step_ended()
        if self._num_noted[key] < FEW_SAMPLES:
            missing = any(each is None for each in gradients.values())
            run.note_operations(early.broadcast, early.passes_none if missing else "")
        self._num_noted[key] += 1
        run.record(loss, gradients)


def _names_of(variables: list[Variable]) -> list[str]:
    """The variables' names, with a number where one has the name of another."""
    names = list[str]()
    for number, each in enumerate(variables):
        name = each.name.partition(":")[0]
        names.append(f"{name}_{number}" if name in names else name)
    return names
