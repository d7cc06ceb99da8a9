"""Loops of TensorFlow that change their variables by hand, by the gradients of a tape."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from threading import get_ident
from traceback import FrameSummary
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from gradscaler._run_script.runs import Runs
from gradscaler._run_script.step_shapes import EarlyStep, broadcast_in
from gradscaler._run_script.tape_steps import (
    Calls,
    Function,
    Loop,
    StepOperations,
    Tensor,
    Variable,
    end_if_second_trains,
    optimizers_stepped,
    tensorflow,
)
from gradscaler._run_script.traced_calls import Call, do_nothing, is_looking, looking, loss_in
from gradscaler._run_script.undo import replace
from gradscaler.diagnose._graph.call_site import is_of_user
from gradscaler.diagnose._graph.guard import guarded
from gradscaler.diagnose._graph.stand_ins import FILE, in_place_of
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


@dataclass
class _Compiled:
    """A function of ``tf.function`` that takes a gradient by variables.

    Attributes:
        variables: these; none before it was traced, or if no gradient is taken in it.
        broadcast: where its loss compares each output with each target; empty if nowhere.
        value: of the smallest variable, before the call that runs.
        first: the first call, whose step is recorded with the second.
        num_unchanged: how many calls have left the variables as they were.
        loop: its steps; None before a call has changed a variable.
    """

    variables: list[Variable] = field(default_factory=list)
    broadcast: str = ""
    value: NDArray[Any] | None = None
    first: Call | None = None
    num_unchanged: int = 0
    loop: Loop | None = None

    @property
    def smallest(self) -> Variable:
        """The variable of the fewest numbers."""
        return min(self.variables, key=lambda each: each.shape.num_elements())


class HandLoops:
    """Puts a monitor on variables that change between two gradients, though no optimizer steps.

    A gradient by variables, which is taken eagerly, is a step then. So is a call of a function of
    ``tf.function`` that takes one, and changes them.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._runs = options, Runs(_NAME, options)
        self._first: dict[int, _First] = {}  # by the id of the first variable
        self._loops: dict[int, Loop] = {}  # by the same
        self._num_unchanged = 0  # gradients after which a variable was as before
        self._early: dict[int, EarlyStep] = {}
        self._num_noted: dict[int, int] = {}
        self._functions = WeakKeyDictionary[Function, _Compiled]()
        self._calling = Calls[_Compiled]()

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
        self._see_calls()
        _leave_out_of_errors()

    def _see_calls(self) -> None:
        """See the calls of functions that are compiled."""
        function = type(tensorflow().function(do_nothing))
        call = function.__call__
        before, after = guarded(self._before_call), guarded(self._after_call)

        @in_place_of(call)
        def seen(own: Function, *args: Any, **kwargs: Any) -> Any:
            inside = self._calling.own is not None or is_looking()
            called = None if inside else before(own, args, kwargs)
            if called is None:
                return call(own, *args, **kwargs)
            self._calling[get_ident()] = called
            try:
                results = call(own, *args, **kwargs)
            finally:
                del self._calling[get_ident()]
            after(called, Call(own, args, kwargs, results))
            return results

        replace(function, "__call__", seen)

    def _before_call(self, function: Function, args: Any, kwargs: Any) -> _Compiled | None:
        """What is known of a function of the user's that is called, and runs compiled."""
        is_compiled = tensorflow().executing_eagerly()
        is_compiled = is_compiled and not tensorflow().config.functions_run_eagerly()
        if not is_compiled or optimizers_stepped or self._runs.is_off:
            return None
        if function not in self._functions:
            if not is_of_user(function.python_function):
                return None
            self._functions[function] = _Compiled()
        called = self._functions[function]
        if called.num_unchanged > FEW_CALLS:
            return None
        if called.loop is None:
            called.value = called.smallest.numpy().copy() if called.variables else None
        elif called.loop.watch is not None and called.loop.watch.is_on:
            call = Call(function, args, kwargs, None)
            called.loop.watch.find((args, kwargs), partial(call.locate, called.loop))
        return called

    def _after_call(self, called: _Compiled, call: Call) -> None:
        """Record a step of a function that has changed the variables of its gradient."""
        if not called.variables or optimizers_stepped:
            return
        end_if_second_trains(is_new=called.loop is None)
        if called.loop is None:
            if called.value is None:  # it was traced
                called.first = call
                return
            if np.array_equal(called.smallest.numpy(), called.value):
                called.num_unchanged += 1
                return
            called.loop = self._begin_compiled(called.variables)
            first, called.first = called.first, None
            if first is not None:
                self._record_compiled(called, first, [])
        with looking():
            finite = called.loop.are_finite()
        pairs = zip(called.variables, finite, strict=True)
        self._record_compiled(called, call, [each for each, is_ok in pairs if not is_ok])

    def _begin_compiled(self, variables: list[Variable]) -> Loop:
        loop = Loop(None, variables, None, is_scaled=False, is_compiled=True)
        if self._options.watch is not None:
            loop.watch = StepOperations(TensorFlowSeam(*loop.shown, is_step=True))
        key = id(variables[0])
        self._runs.begin(key, Unscaled(_NAME, is_before=False), None, loop.watch)
        loop.run = self._runs.open.get(key)
        return loop

    def _record_compiled(self, called: _Compiled, call: Call, bad: list[Variable]) -> None:
        loop = called.loop
        if loop is None or loop.run is None:
            return
        if called.broadcast and loop.num_noted < FEW_SAMPLES:
            loop.num_noted += 1
            loop.run.note_operations(called.broadcast, "")
        names = _names_of(called.variables)
        named = {id(each): name for each, name in zip(called.variables, names, strict=True)}
        loop.run.record(loss_in(call.results), {named[id(each)]: each for each in bad})
        loop.run.step_ended()

    def _see_gradient(self, target: Any, sources: Any, made: Any) -> None:
        if self._num_unchanged > FEW_CALLS or optimizers_stepped or self._runs.is_off:
            self._give_up()
            return
        if not hasattr(target, "dtype"):
            return
        variables = tensorflow().nest.flatten(sources)
        if not variables or not all(hasattr(each, "assign") for each in variables):
            return
        if not tensorflow().executing_eagerly():
            if (called := self._calling.own) is not None and hasattr(target, "op"):
                called.variables = variables
                called.broadcast = called.broadcast or broadcast_in(target)
            return
        key = id(variables[0])
        end_if_second_trains(is_new=key not in self._loops)
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
        self._functions.clear()

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


def _leave_out_of_errors() -> None:
    """Leave our frames out of the text that AutoGraph gives an error in the user's code."""
    errors: Any = import_module("tensorflow.python.autograph.pyct.error_utils")
    translate = errors._stack_trace_inside_mapped_code

    def translated(frames: Sequence[FrameSummary], *args: Any) -> Any:
        return translate([each for each in frames if each.filename != FILE], *args)

    replace(errors, "_stack_trace_inside_mapped_code", translated)


def _names_of(variables: list[Variable]) -> list[str]:
    """The variables' names, with a number where one has the name of another."""
    names = list[str]()
    for number, each in enumerate(variables):
        name = each.name.partition(":")[0]
        names.append(f"{name}_{number}" if name in names else name)
    return names
