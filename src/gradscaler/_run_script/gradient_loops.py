"""Loops of MindSpore: each gradient by parameters that is taken of the user's function."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

from gradscaler._run_script.compiled_steps import CompiledSteps
from gradscaler._run_script.runs import Runs
from gradscaler._run_script.undo import replace
from gradscaler._run_script.voice import voice
from gradscaler._run_script.watched_run import WatchedRun
from gradscaler.diagnose._graph.guard import guarded
from gradscaler.diagnose._graph.places import in_memory
from gradscaler.diagnose._graph.stand_ins import in_place_of
from gradscaler.diagnose._locate.locate import is_locating
from gradscaler.diagnose._locate.unnoticed import unnoticed
from gradscaler.diagnose._monitor.recorded_loop import Unscaled

_SCALED = (
    "a loop that takes scaled gradients outside of a graph is not watched, as the scaler may skip "
    "its steps: Monitor.record(replay=) names the operation there."
)

Tensor = Any
Cell = Any


class _Forward(NamedTuple):
    """A forward pass whose gradient is taken, its arguments, and what it returned first."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Tensor | None
    has_aux: bool  # whether it returned more, of which no gradient is taken


class GradientLoops:
    """Looks at each gradient by parameters, which is a step. The weights are still those of it.

    In graph mode, such a gradient is a graph of its own. If the optimizer is in a graph, too, that
    graph is the step.

    Args:
        options: those of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._runs = Runs("mindspore", options)
        self._mindspore: Any = sys.modules["mindspore"]
        self._forward: _Forward | None = None  # whose gradient is taken next, in PyNative mode
        self._known: dict[frozenset[int], bool] = {}  # whether gradients of them are watched
        self._models: dict[frozenset[int], Cell | None] = {}  # by the ids of parameters
        self._steps = CompiledSteps(options, self._runs, self._model_of)

    def start(self) -> None:
        """Watch this process from now on."""
        base: Any = import_module("mindspore.ops.composite.base")
        run, backward = base._pynative_forward_run, base._pynative_func_grad_backward
        see, record = guarded(self._see_forward), guarded(self._record_seen)

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
        self._steps.start(self.see_graph)

    def _see_forward(self, function: Any, args: Any, kwargs: Any, results: Any) -> None:
        if is_locating.get():
            return
        has_aux = isinstance(results, tuple) and len(results) > 1
        loss = results[0] if isinstance(results, tuple) else results
        self._forward = _Forward(function, args, kwargs, loss, has_aux)

    def _record_seen(self, weights: Any, made: Any) -> None:
        if not is_locating.get():
            forward, self._forward = self._forward, None
            self._record(forward, weights, made)

    def see_graph(self, function: Any, args: Any, kwargs: Any, made: Any) -> None:
        """Record a step if a compiled function is a gradient, which MindSpore compiles itself."""
        if not function.__qualname__.endswith("Grad.__call__.<locals>.after_grad"):
            return
        of = inspect.getclosurevars(function).nonlocals
        take, weights = of["grad_"], of.get("weights")
        loss = None
        if take.get_value:
            result, made = made
            loss = result[0] if take.has_aux else result
        elif take.has_aux:
            made = made[0]
        args = args[: len(args) - bool(take.sens_param)]
        self._record(_Forward(of["fn"], args, kwargs, loss, take.has_aux), weights, made)

    def _record(self, forward: _Forward | None, weights: Any, made: Any) -> None:
        if forward is None or not weights or self._runs.is_off:
            return
        weights = list(weights) if isinstance(weights, (list, tuple)) else [weights]
        run, model = self._run_of(forward.function, weights)
        if run is None:
            return
        gradients = dict(
            zip((each.name for each in weights), _last(made, len(weights)), strict=False)
        )
        loss = None if forward.loss is None or forward.loss.ndim else forward.loss
        replay = None if model is None else partial(self._again, model, forward, weights)
        run.record(loss, gradients, replay)
        run.step_ended()

    def _again(self, model: Cell, forward: _Forward, weights: Sequence[Tensor]) -> tuple[Any, ...]:
        """The model, and a closure that takes the gradient again."""

        def take() -> Any:  # which MindSpore would compile if it were made in graph mode
            of = forward.function, None, weights, forward.has_aux
            with unnoticed():
                return self._mindspore.value_and_grad(*of)(*forward.args, **forward.kwargs)

        return model, take

    def _run_of(
        self, function: Any, weights: Iterable[Tensor]
    ) -> tuple[WatchedRun | None, Cell | None]:
        key = frozenset(map(id, weights))
        if key not in self._known:
            self._known[key] = not self._is_scaled(function)
            if not self._known[key]:
                voice.note(_SCALED)
        if key not in self._runs.open and self._known[key]:
            self._runs.begin(key, Unscaled("mindspore"), None, has_watch=False)
        return self._runs.open.get(key), self._model_of(key)

    def _is_scaled(self, function: Any) -> bool:
        """Whether a function refers to a scaler, which may skip what is seen here."""
        scalers = self._steps.scalers()
        if getattr(function, "__name__", "") == "aux_fn":  # MindSpore's, around the user's
            function = inspect.getclosurevars(function).nonlocals["fn"]
        if inspect.isfunction(function):
            found = inspect.getclosurevars(function)
            held = [*found.nonlocals.values(), *found.globals.values()]
        else:
            held = list(getattr(getattr(function, "__self__", function), "__dict__", {}).values())
        is_network = any(getattr(each, "network", None) is function for each in scalers)
        return is_network or any(each is scaler for each in held for scaler in scalers)

    def _model_of(self, trained: frozenset[int]) -> Cell | None:
        """The innermost Cell in memory that holds all trained parameters."""
        if trained not in self._models:
            cells = in_memory(self._mindspore.nn.Cell)
            held = ((each, {id(p) for p in each.get_parameters()}) for each in cells)
            found = [(len(own), each) for each, own in held if trained <= own]
            inner = min(found, key=lambda each: each[0])[1] if found else None
            self._models[trained] = inner
        return self._models[trained]


def _last(made: Any, count: int) -> Sequence[Tensor]:
    """The gradients of the parameters, which come after those of the inputs, if there are any."""
    if isinstance(made, (list, tuple)) and len(made) == 2 and isinstance(made[1], (list, tuple)):
        return made[1]
    return made if isinstance(made, (list, tuple)) and len(made) == count else [made]
