"""Steps of MindSpore that are one graph with their optimizer: in graph mode, or by ``jit``."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradscaler._in_memory import in_memory
from gradscaler._run_script.runs import Runs
from gradscaler._run_script.undo import replace
from gradscaler.diagnose import inspect
from gradscaler.diagnose._graph.guard import guarded
from gradscaler.diagnose._graph.stand_ins import in_place_of
from gradscaler.diagnose._locate.unnoticed import unnoticed
from gradscaler.diagnose._monitor.recorded_loop import Unscaled
from gradscaler.diagnose._monitor.traced_scalers import number_of

Call = Callable[..., Any]
Cell = Any
Parameter = Any
Tensor = Any
Values = Sequence[NDArray[Any]]


class _Graph(NamedTuple):
    """A graph with the step of an optimizer.

    Attributes:
        trained: the parameters that the optimizer trains.
        parameters: all that it reads or changes, the optimizer's own among them.
        scaler: the scaler whose scale is among them, and which skips a failing step; None if there
            is none.
    """

    trained: Sequence[Parameter]
    parameters: Sequence[Parameter]
    scaler: Any

    @property
    def ids(self) -> frozenset[int]:
        """The ids of the parameters that are trained."""
        return frozenset(map(id, self.trained))

    @property
    def key(self) -> object:
        """The key of a run, which graphs that train the same parameters share."""
        return "graph", self.ids


class CompiledSteps:
    """Looks at the loss and the parameters after each call of a graph that holds an optimizer.

    The weights of a failing step are overwritten by then, unless the script left the step out. They
    are kept in the step to watch.

    Args:
        options: those of the command line.
        runs: the runs of this process.
        model_of: the model of trained parameters, by their ids; None if none is found.

    Attributes:
        optimizers: the base classes of optimizers.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        runs: Runs,
        model_of: Callable[[frozenset[int]], Cell | None],
    ) -> None:
        self._options, self._runs = options, runs
        self._model_of = model_of
        self._mindspore: Any = sys.modules["mindspore"]
        experimental: Any = import_module("mindspore.experimental.optim")
        self._communication: Any = import_module("mindspore.communication.management").GlobalComm
        self.optimizers = self._mindspore.nn.Optimizer, experimental.Optimizer
        self._graphs: dict[str, _Graph | None] = {}  # by the names that MindSpore gave them
        self._num_steps: Counter[object] = Counter()  # by the key of a run
        self._depth = 0  # calls of graphs that run
        self._graph: _Graph | None = None  # of the outermost call
        self._before: Values | None = None  # values of its parameters, in the step to watch

    def start(self, see_function: Call) -> None:
        """Watch this process from now on.

        Args:
            see_function: called after each call of a compiled function, with it, its arguments and
                its result.
        """
        api: Any = import_module("mindspore.graph.api")
        cell = self._mindspore.nn.Cell
        self._see_compiled(
            api._JitExecutor, lambda jit, phase: jit._graph_executor.get_params(phase)
        )
        of_cells = api._cell_graph_executor._graph_executor
        self._see_compiled(cell, lambda own, _: of_cells.get_params(own.compile_phase))
        self._see_calls(api._JitExecutor, "__call__", lambda jit: jit.fn, guarded(see_function))
        self._see_calls(cell, "compile_and_run", lambda own: own)

    def _see_compiled(self, kind: Any, parameters_of: Call) -> None:
        """See which graph a call runs, between its compilation, or a look for it, and its run."""
        compiling, see = kind.compile, guarded(self._see_graph)
        alone = self.optimizers  # that take gradients from outside

        @in_place_of(compiling)
        def seen(own: Any, *args: Any, **kwargs: Any) -> Any:
            made = compiling(own, *args, **kwargs)
            if not isinstance(getattr(own, "obj", own), alone):
                see(made or own.compile_phase, partial(parameters_of, own, made))
            return made

        replace(kind, "compile", seen)

    def _see_calls(
        self, kind: Any, name: str, function_of: Callable[[Any], Call], first: Call | None = None
    ) -> None:
        run, see = getattr(kind, name), guarded(self._see_call)

        @in_place_of(run)
        def seen(own: Any, *args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            try:
                made = run(own, *args, **kwargs)
            finally:
                self._depth -= 1
            if not self._depth:
                function = function_of(own)
                if first is not None:
                    first(function, args, kwargs, made)
                see(partial(function, *args, **kwargs), made)
            return made

        replace(kind, name, seen)

    def _see_graph(self, phase: str, parameters_of: Call) -> None:
        """Note the graph of the outermost call, and the values before it in the step to watch."""
        if self._depth != 1 or self._runs.is_off:
            return
        if phase not in self._graphs:
            self._graphs[phase] = self._graph_of(list(parameters_of().values()))
        self._graph = graph = self._graphs[phase]
        if graph is None:
            return
        if graph.key not in self._runs.open:  # before the step, which moves the scale
            unscaled = Unscaled("mindspore", is_before=False)
            model = self._model_of(graph.ids) if graph.scaler else None
            self._runs.begin(graph.key, graph.scaler or unscaled, model)
        if self._options.watch == self._num_steps[graph.key] + 1:
            self._before = _values_of(graph.parameters)

    def _graph_of(self, parameters: Sequence[Parameter]) -> _Graph | None:
        """A graph by its parameters; None if those of no optimizer are among them."""
        ids = set(map(id, parameters))
        trained: dict[int, Parameter] = {}
        for optimizer in in_memory(self.optimizers):
            of = {id(each): each for each in optimizer.parameters}
            if any(id(each) in ids for each in optimizer.get_parameters() if id(each) not in of):
                trained |= of
        if not trained:
            return None
        fixed = self._mindspore.amp.StaticLossScaler
        skipping = (each for each in self.scalers() if not isinstance(each, fixed))
        scalers = (each for each in skipping if id(scale_of(each)) in ids)
        return _Graph(list(trained.values()), parameters, next(scalers, None))

    def scalers(self) -> list[Any]:
        """The scalers in memory whose scale is a parameter."""
        kinds = self._mindspore.nn.TrainOneStepWithLossScaleCell, self._mindspore.amp.LossScaler
        parameter = self._mindspore.Parameter
        return [each for each in in_memory(kinds) if isinstance(scale_of(each), parameter)]

    def _see_call(self, again: partial[Any], made: Any) -> None:
        """Record a step after it."""
        graph, self._graph = self._graph, None
        before, self._before = self._before, None
        if graph is None or graph.key not in self._runs.open:
            return
        self._num_steps[graph.key] += 1
        model = self._model_of(graph.ids)
        loss = next((number_of(each) for each in self._numbers(made)), None)
        named = {each.name: each for each in graph.trained}
        bad = {each.name: named[each.name] for each in inspect(named)}
        values: list[Values] = []  # that a replay may change

        def replay() -> Any:
            values.append(_values_of(graph.parameters))
            if before is not None:
                _set(graph.parameters, before)
            if graph.scaler is not None:  # so that a large scale is not the cause
                scale = scale_of(graph.scaler)
                _set([scale], [np.ones_like(scale.asnumpy())])
            return model, partial(self._run_again, again)

        is_there = model is not None and (before is not None or not bad)
        # A step that gets its data from a queue takes the next batch, and one of several processes
        # may be the only one that runs its step again.
        is_alone = bool(again.args or again.keywords) and not self._communication.INITED
        gradients = None if graph.scaler else bad
        try:
            self._runs.open[graph.key].record(
                loss, gradients, replay if is_there and is_alone else None
            )
        finally:
            for each in values:
                _set(graph.parameters, each)

    def _run_again(self, again: Call) -> Any:
        """Run a step in PyNative mode up to its optimizer, which would not be in the graph after.

        Parameters that it sets there, such as the powers of Adam's betas, are cut off from it.
        """
        done = self._mindspore.Tensor(True)
        calls = [kind.__call__ for kind in self.optimizers]  # that are seen
        for kind in self.optimizers:
            kind.__call__ = lambda *_: done
        try:
            with unnoticed():
                return again()
        finally:
            for kind, call in zip(self.optimizers, calls, strict=True):
                kind.__call__ = call

    def _numbers(self, made: Any) -> Iterator[Tensor]:
        """The floating-point numbers in a result."""
        if isinstance(made, self._mindspore.Tensor):
            yield from [made] * (not made.ndim and made.is_floating_point())
        elif isinstance(made, (list, tuple)):
            for each in made:
                yield from self._numbers(each)


def scale_of(scaler: Any) -> Parameter:
    """The scale of a train step, or of a scaler, which a fixed one holds as a number."""
    return getattr(scaler, "scale_sense", getattr(scaler, "scale_value", None))


@contextmanager
def at_scale_1(scaler: Any) -> Iterator[None]:
    """Let a scaler scale nothing."""
    scale = scale_of(scaler)
    before = _values_of([scale])
    try:
        _set([scale], [np.ones_like(before[0])])
        yield
    finally:
        _set([scale], before)


def _values_of(parameters: Iterable[Parameter]) -> Values:
    return [each.asnumpy().copy() for each in parameters]


def _set(parameters: Iterable[Parameter], values: Values) -> None:
    tensor = sys.modules["mindspore"].Tensor
    for parameter, value in zip(parameters, values, strict=True):
        if parameter.asnumpy().tobytes() != value.tobytes():
            parameter.copy_(tensor(value))  # a graph of jit does not see set_data()
