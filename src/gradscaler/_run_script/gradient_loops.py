"""Loops of MindSpore: each gradient by parameters that is taken of the user's function."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from inspect import getclosurevars, isfunction
from typing import Any, NamedTuple
from weakref import ref

from gradscaler._run_script.compiled_steps import CompiledSteps, at_scale_1, scale_of
from gradscaler._run_script.runs import Runs
from gradscaler._run_script.undo import replace
from gradscaler._run_script.watched_run import WatchedRun
from gradscaler.diagnose import Located, inspect
from gradscaler.diagnose._graph.guard import guarded
from gradscaler.diagnose._graph.places import in_memory
from gradscaler.diagnose._graph.stand_ins import in_place_of
from gradscaler.diagnose._locate.locate import is_locating
from gradscaler.diagnose._locate.unnoticed import unnoticed
from gradscaler.diagnose._monitor.recorded_loop import Unscaled
from gradscaler.diagnose._monitor.replay import MOST_IN_VAIN, located_in
from gradscaler.diagnose._monitor.traced_scalers import number_of

Tensor = Any
Cell = Any
Replay = Callable[[], tuple[Any, ...]]


class _Forward(NamedTuple):
    """A forward pass whose gradient is taken, its arguments, and what it returned first."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Tensor | None
    has_aux: bool  # whether it returned more, of which no gradient is taken


@dataclass
class _Loop:
    """The steps by gradients of some parameters.

    Attributes:
        first: the first parameter, which is gone where another has its id.
        model: what holds the parameters; None if nothing does.
        scaler: what scales the loss; None if nothing does.
        is_loss_scaled: whether the loss that is seen is a scaled one.
        is_fixed: whether the scale is fixed, and the script alone may leave a step out.
        record: records the latest step of a scaler, once it is known what became of it.
        num_searches: how many more steps may be searched in vain.
    """

    first: ref[Tensor]
    model: Callable[[], Cell | None]
    scaler: Any
    is_loss_scaled: bool = False
    is_fixed: bool = False
    record: Callable[[], None] | None = None
    num_searches: int = MOST_IN_VAIN


class GradientLoops:
    """Looks at each gradient by parameters, which is a step. The weights are still those of it.

    In graph mode, such a gradient is a graph of its own. If the optimizer is in a graph, too, that
    graph is the step.

    A step of a scaler may be left out after its gradient was taken. So it is recorded when the next
    gradient is taken, or at the end.

    Args:
        options: those of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._runs = Runs("mindspore", options)
        self._mindspore: Any = sys.modules["mindspore"]
        self._forward: _Forward | None = None  # whose gradient is taken next, in PyNative mode
        self._loops: dict[frozenset[int], _Loop] = {}  # by the ids of parameters
        self._models: dict[frozenset[int], ref[Cell]] = {}  # by the same
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
        self._runs.before_end = self._record_latest

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
        of = getclosurevars(function).nonlocals
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
        key = frozenset(map(id, weights))
        loop = self._loop_of(key, forward.function, weights)
        run = self._runs.open.get(key)
        if run is None:
            return
        gradients = dict(
            zip((each.name for each in weights), _last(made, len(weights)), strict=False)
        )
        loss = None if forward.loss is None or forward.loss.ndim else forward.loss
        model = loop.model()
        replay = None if model is None else partial(self._again, model, forward, weights)
        if loop.scaler is None:
            run.record(loss, gradients, replay)
            run.step_ended()
            return
        if loop.record is not None:
            loop.record()
        loop.record = self._scaled_step(run, loop, loss, gradients, replay)

    def _scaled_step(
        self,
        run: WatchedRun,
        loop: _Loop,
        loss: Tensor | None,
        gradients: Mapping[str, Tensor],
        replay: Replay | None,
    ) -> Callable[[], None]:
        """What records a step of a scaler, whose weights are still those of it."""
        scale = number_of(scale_of(loop.scaler))
        of_loss = scale if loop.is_loss_scaled else 1.0
        number = None if loss is None else number_of(loss) / of_loss
        bad = {each.name: gradients[each.name] for each in inspect(gradients)}
        again = partial(_unscaled, replay, loop.scaler) if bad and replay is not None else None
        if not loop.is_fixed:
            divided = {name: each / scale for name, each in bad.items()} or None
            return partial(run.record, number, divided, again, finite=not bad)
        located = None
        if again is not None and loop.num_searches:
            loop.num_searches -= 1
            located = self._located(again)
        return partial(self._record_fixed, run, loop, number, bad, located)

    def _located(self, again: Replay) -> Located | None:
        try:
            return located_in(*again())
        except Exception:  # such as of the user's function, which may take a batch once
            return None

    def _record_fixed(
        self,
        run: WatchedRun,
        loop: _Loop,
        loss: float | None,
        bad: Mapping[str, Tensor],
        located: Located | None,
    ) -> None:
        """Record a step of a fixed scale, which has lost a weight if it was applied."""
        model = loop.model()
        held = {} if model is None else {each.name: each for each in model.get_parameters()}
        is_applied = bool(inspect({name: held[name] for name in bad if name in held}))
        if bad and not is_applied:
            run.leave_unchanged(located)
        elif located is not None:
            run.note_located(located)
        run.record(loss, bad if is_applied else {})

    def _record_latest(self) -> None:
        """Record the steps of which nothing more will be known."""
        for loop in self._loops.values():
            if loop.record is not None:
                loop.record()
            loop.record = None

    def _again(self, model: Cell, forward: _Forward, weights: Sequence[Tensor]) -> tuple[Any, ...]:
        """The model, and a closure that takes the gradient again."""

        def take() -> Any:  # which MindSpore would compile if it were made in graph mode
            of = forward.function, None, weights, forward.has_aux
            with unnoticed():
                return self._mindspore.value_and_grad(*of)(*forward.args, **forward.kwargs)

        return model, take

    def _loop_of(self, key: frozenset[int], function: Any, weights: Sequence[Tensor]) -> _Loop:
        """The loop of some parameters, which begins with their first gradient."""
        loop = self._loops.get(key)
        if loop is not None and loop.first() is None:  # of others, which had the same ids
            del self._loops[key]
            if key in self._runs.open:
                self._runs.open.pop(key).end()
            loop = None
        if loop is None:
            model = self._model_of(key)
            scaler, is_loss_scaled = self._scaler_of(function)
            is_fixed = isinstance(scaler, self._mindspore.amp.StaticLossScaler)
            weak = _nothing if model is None else ref(model)
            loop = _Loop(ref(weights[0]), weak, scaler, is_loss_scaled, is_fixed)
            self._loops[key] = loop
            if key not in self._runs.open:
                is_skipping = scaler is not None and not is_fixed
                given = scaler if is_skipping else Unscaled("mindspore")
                self._runs.begin(key, given, model if is_skipping else None, has_watch=False)
        return loop

    def _scaler_of(self, function: Any) -> tuple[Any, bool]:
        """The scaler that a function refers to, or of what trains it; whether it scales there."""
        scalers = self._steps.scalers()
        if getattr(function, "__name__", "") == "aux_fn":  # MindSpore's, around the user's
            function = getclosurevars(function).nonlocals["fn"]
        if isfunction(function):
            found = getclosurevars(function)
            held = [*found.nonlocals.values(), *found.globals.values()]
        else:
            held = list(getattr(getattr(function, "__self__", function), "__dict__", {}).values())
        of_network = (each for each in scalers if getattr(each, "network", None) is function)
        named = (scaler for scaler in scalers if any(each is scaler for each in held))
        scaler = next(of_network, None)
        return (scaler, False) if scaler is not None else (next(named, None), True)

    def _model_of(self, trained: frozenset[int]) -> Cell | None:
        """The innermost Cell in memory that holds all trained parameters."""
        model = self._models.get(trained, _nothing)()
        if model is None:
            cells = in_memory(self._mindspore.nn.Cell)
            held = ((each, {id(p) for p in each.get_parameters()}) for each in cells)
            found = [(len(own), each) for each, own in held if trained <= own]
            model = min(found, key=lambda each: each[0])[1] if found else None
            if model is not None:
                self._models[trained] = ref(model)
        return model


def _last(made: Any, count: int) -> Sequence[Tensor]:
    """The gradients of the parameters, which come after those of the inputs, if there are any."""
    if isinstance(made, (list, tuple)) and len(made) == 2 and isinstance(made[1], (list, tuple)):
        return made[1]
    return made if isinstance(made, (list, tuple)) and len(made) == count else [made]


def _unscaled(replay: Replay, scaler: Any) -> tuple[Any, ...]:
    """A replay whose loss is not scaled, so that what overflows does so at any scale."""
    model, take = replay()

    def unscaled() -> Any:
        with at_scale_1(scaler):
            return take()

    return model, unscaled


def _nothing() -> None:
    """Do nothing."""
