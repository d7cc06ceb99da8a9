"""Loops of MindSpore in PyNative mode: each gradient that is taken of the user's function."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

from gradscaler._run_script.runs import Runs
from gradscaler._run_script.undo import replace
from gradscaler._run_script.watched_run import WatchedRun
from gradscaler.diagnose._graph.guard import guarded
from gradscaler.diagnose._graph.stand_ins import in_place_of
from gradscaler.diagnose._monitor.recorded_loop import Unscaled

Tensor = Any
Cell = Any


class _Forward(NamedTuple):
    """A forward pass whose gradient is taken next, its arguments, and what it returned."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: Any


class GradientLoops:
    """Looks at each gradient by parameters, which is a step. The weights are still those of it.

    Args:
        options: those of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._runs = Runs("mindspore", options)
        self._mindspore: Any = sys.modules["mindspore"]
        self._forward: _Forward | None = None
        self._is_looking = False  # whether a step is run again
        self._models: dict[tuple[int, ...], Cell | None] = {}  # by the ids of parameters

    def start(self) -> None:
        """Watch this process from now on."""
        base: Any = import_module("mindspore.ops.composite.base")
        run, backward = base._pynative_forward_run, base._pynative_func_grad_backward
        see, record = guarded(self._see_forward), guarded(self._record)

        @in_place_of(run)
        def seen_run(fn: Any, sens_param: Any, *args: Any, **kwargs: Any) -> Any:
            made = run(fn, sens_param, *args, **kwargs)
            see(fn, args[: len(args) - bool(sens_param)], kwargs, made[1])
            return made

        @in_place_of(backward)
        def seen_backward(fn: Any, operation: Any, weights: Any, *args: Any) -> Any:
            made = backward(fn, operation, weights, *args)
            record(weights, made)
            return made

        replace(base, "_pynative_forward_run", seen_run)
        replace(base, "_pynative_func_grad_backward", seen_backward)

    def _see_forward(self, function: Any, args: Any, kwargs: Any, results: Any) -> None:
        if not self._is_looking:
            self._forward = _Forward(function, args, kwargs, results)

    def _record(self, weights: Any, made: Any) -> None:
        forward, self._forward = self._forward, None
        if self._is_looking or forward is None or not weights or self._runs.is_off:
            return
        weights = list(weights) if isinstance(weights, (list, tuple)) else [weights]
        run, model = self._run_of(weights)
        if run is None:
            return
        gradients = dict(
            zip((each.name for each in weights), _last(made, len(weights)), strict=False)
        )
        loss = forward.results[0] if isinstance(forward.results, tuple) else forward.results
        replay = None if model is None else partial(self._again, model, forward, weights)
        self._is_looking = True
        try:
            run.record(loss if not loss.ndim else None, gradients, replay)
            run.step_ended()
        finally:
            self._is_looking = False

    def _again(self, model: Cell, forward: _Forward, weights: Sequence[Tensor]) -> tuple[Any, ...]:
        """The model, and a closure that takes the gradient again."""
        has_aux = isinstance(forward.results, tuple) and len(forward.results) > 1
        take = self._mindspore.value_and_grad(forward.function, None, weights, has_aux=has_aux)
        return model, partial(take, *forward.args, **forward.kwargs)

    def _run_of(self, weights: Iterable[Tensor]) -> tuple[WatchedRun | None, Cell | None]:
        key = tuple(map(id, weights))
        if key not in self._models:
            self._models[key] = self._model_of(set(key))
            self._runs.begin(key, Unscaled("mindspore"), None)
        return self._runs.open.get(key), self._models[key]

    def _model_of(self, trained: set[int]) -> Cell | None:
        """The innermost Cell in memory that holds all trained parameters."""
        kind = self._mindspore.nn.Cell
        cells = [each for each in gc.get_objects() if issubclass(type(each), kind)]
        held = ((each, {id(p) for p in each.get_parameters()}) for each in cells)
        found = [(len(own), each) for each, own in held if trained <= own]
        return min(found, key=lambda each: each[0])[1] if found else None


def _last(made: Any, count: int) -> Sequence[Tensor]:
    """The gradients of the parameters, which come after those of the inputs, if there are any."""
    if isinstance(made, (list, tuple)) and len(made) == 2 and isinstance(made[1], (list, tuple)):
        return made[1]
    return made if isinstance(made, (list, tuple)) and len(made) == count else [made]
