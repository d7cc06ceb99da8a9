"""Calls of TensorFlow's compiled functions, which can be run again if nobody notices it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

from gradscaler._run_script.tape_steps import (
    Function,
    Loop,
    Optimizer,
    Tensor,
    Variable,
    tensorflow,
)
from gradscaler._run_script.voice import voice
from gradscaler.diagnose import Located, locate
from gradscaler.diagnose._locate.locate import locate_in
from gradscaler.diagnose._locate.unnoticed import unnoticed
from gradscaler.diagnose._seams.tensorflow import TensorFlowSeam

_IS_NOTICED = (
    "it calls Python, or reads from an iterator or a dataset, and another run would do so again"
)
_OF_PYTHON = "PyFunc", "EagerPyFunc"  # operations, of tf.py_function and tf.numpy_function
_running: list[None] = []  # one for each step that is run again


@dataclass
class Traced:
    """What was seen when a function was traced.

    Attributes:
        steps: the optimizers that step in it and their variables, by the optimizers' ids.
        takes_gradient: whether it takes a gradient by variables.
        broadcast: where its loss compares each output with each target; empty if nowhere.
        has_replicas: whether several replicas step in it.
        targets: what gradients were taken of, in its graph, by the first variable's id.
        before: how many steps each optimizer had taken before its second call.
    """

    steps: dict[int, tuple[Optimizer, list[Variable]]] = field(default_factory=dict)
    takes_gradient: bool = False
    broadcast: str = ""
    has_replicas: bool = False
    targets: dict[int, Tensor] = field(default_factory=dict)
    before: list[int] | None = None
    _is_known: bool = False  # whether a call takes several steps

    @property
    def num_applied(self) -> list[int]:
        """How many steps each optimizer has taken."""
        return [int(each.iterations.numpy()) for each, _ in self.steps.values()]

    def loss_of(self, variables: Sequence[Variable], results: Any) -> Tensor | None:
        """The loss among its results that the gradients of variables were taken of, if returned."""
        target = None if not variables else self.targets.get(id(variables[0]))
        if target is None or target.shape.rank:
            return None
        flatten = tensorflow().nest.flatten
        made = flatten(getattr(target.graph, "structured_outputs", None))
        leaves = flatten(results)
        if len(made) != len(leaves):
            return None
        pairs = zip(made, leaves, strict=True)
        return next((leaf for each, leaf in pairs if _returns(each, target)), None)

    def note_loop(self, function: Function) -> None:
        """Say once if a call takes several steps, as that of a loop over a dataset does."""
        if self._is_known or self.before is None:
            return
        self._is_known = True
        pairs = zip(self.num_applied, self.before, strict=True)
        most = max(after - before for after, before in pairs)
        if most > 1:
            name = function.python_function.__name__
            voice.note(f"a call of {name}() takes {most:,} steps and is counted as one.")


class Call(NamedTuple):
    """A call of a function that is compiled."""

    function: Function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: Any

    @property
    def variables(self) -> list[Variable] | None:
        """All variables that the call reads or writes; None if another call would be noticed.

        It would be by an iterator that it reads from, and by functions of Python that it calls.
        """
        data = tensorflow().data
        leaves = tensorflow().nest.flatten((self.args, self.kwargs))
        if any(isinstance(each, (data.Iterator, data.Dataset)) for each in leaves):
            return None
        traced = self.function.get_concrete_function(*self.args, **self.kwargs)
        graph = traced.graph.as_graph_def()
        called = attrgetter("library.function")(graph)
        nodes = chain(graph.node, *(each.node_def for each in called))
        if any(node.op in _OF_PYTHON for node in nodes):
            return None
        variables = list(traced.graph.variables)
        known = {id(each.handle) for each in variables}
        kinds = "resource", "variant"
        captured = (each for each in traced.captured_inputs if each.dtype.name in kinds)
        return variables if all(id(each) in known for each in captured) else None

    def again(self, loop: Loop) -> tuple[Any, ...]:
        """The model, and a closure that calls again; it does nothing if it cannot."""
        variables = self.variables
        if variables is None or (loop.is_scaled and loop.scale is None):
            return loop.model, do_nothing
        return loop.model, partial(self._run_again, loop, variables)

    def locate(self, loop: Loop) -> Located | None:
        """Locate the first Inf or NaN of a call that comes next.

        An Inf or NaN comes before an error of the call, such as of a matrix without an inverse.

        Raises:
            RuntimeError: the script would notice one more call.
            Exception: that of the call, if no Inf or NaN came before it.
        """
        variables = self.variables
        if variables is None:
            raise RuntimeError(_IS_NOTICED)
        errors = list[Exception]()

        def closure() -> Any:
            try:
                return self._run_again(loop, variables)
            except Exception as error:
                errors.append(error)
                return None

        if loop.model is not None:
            located = locate(loop.model, closure)
        else:
            located = locate_in(TensorFlowSeam(*loop.shown), closure)
        if errors and located is None:
            raise errors[0]
        return located

    def _run_again(self, loop: Loop, variables: Sequence[Variable]) -> Any:
        """Call again, silently, and leave variables as they were.

        A loss is not scaled in it, so that what overflows does so at any scale.
        """
        before = [(each, each.read_value()) for each in variables]
        try:
            if loop.scale is not None:
                loop.scale.assign(1.0)
            with looking(), unnoticed():
                return self.function(*self.args, **self.kwargs)
        finally:
            for variable, value in before:
                variable.assign(value)


@contextmanager
def looking() -> Iterator[None]:
    """Run what the watches of either package of Keras must not see."""
    _running.append(None)
    try:
        yield
    finally:
        _running.pop()


def is_looking() -> bool:
    """Whether a step is run again.

    The guard's lock is held then, and threads that the step starts, as those of replicas, must not
    wait for it.
    """
    return bool(_running)


def loss_in(results: Any) -> Tensor | None:
    """The loss among the results of a function: by its name, else the only number.

    Of several without such a name, one may be a metric. One that is not finite is taken.
    """
    named: list[Any] = []
    if isinstance(results, Mapping):
        named = [results[name] for name in results if "loss" in name]
    leaves = tensorflow().nest.flatten(named or results)
    numbers = [each for each in leaves if hasattr(each, "dtype") and not each.shape.rank]
    numbers = [each for each in numbers if each.dtype.is_floating]
    if named or len(numbers) == 1:
        return next(iter(numbers), None)
    return next((each for each in numbers if not math.isfinite(each)), None)


def _returns(output: Any, target: Tensor) -> bool:
    """Whether an output of a graph is a tensor of it, or a copy."""
    inputs = [] if getattr(output, "op", None) is None else list(output.op.inputs)
    return output is target or (len(inputs) == 1 and inputs[0] is target)


def do_nothing() -> None:
    """Do nothing."""
