"""Loops of Paddle and TensorPlay: backward passes, and the steps of optimizers."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from functools import partial
from importlib import import_module
from typing import Any
from weakref import WeakSet

import numpy as np

from gradscaler._in_memory import in_memory
from gradscaler._run_script.after_init import after_init
from gradscaler._run_script.kept_gradients import KeptGradients
from gradscaler._run_script.runs import LOOP, Runs
from gradscaler._run_script.scaler_watch import ObservedScalers, ScalerWatch
from gradscaler._run_script.step_watch import Search
from gradscaler._run_script.undo import on_stop, replace
from gradscaler.diagnose._gradients.arrays import dtype_name, sample_of, to_numpy
from gradscaler.diagnose._gradients.reading import are_finite, inspect, largest
from gradscaler.diagnose._graph.guard import guard, guarded
from gradscaler.diagnose._graph.stand_ins import in_place_of
from gradscaler.diagnose._graph.threads import end_if_in_threads
from gradscaler.diagnose._locate.locate import seam_named, seam_of
from gradscaler.diagnose._monitor.early_losses import EarlyLosses
from gradscaler.diagnose._monitor.models import one_model
from gradscaler.diagnose._monitor.parameters import eps_of
from gradscaler.diagnose._monitor.recorded_loop import Unscaled
from gradscaler.diagnose._record.thresholds import FEW_ELEMENTS, MOVED_BY, UNSTEPPED_LOSSES

Optimizer = Any
Tensor = Any


class BackwardLoops:
    """Puts a monitor on each scaler, or on the loop of a process that uses none.

    A run begins with the first step, or with the first scaled loss, after optimizers were made, or
    with gradients that stay Inf or NaN without a step.

    Args:
        name: the framework's package, ``"paddle"`` or ``"tensorplay"``.
        options: those of the command line.
    """

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self._name, self._options, self._runs = name, options, Runs(name, options)
        self._framework = sys.modules[name]
        self._new: WeakSet[Optimizer] = WeakSet()  # made since the latest run began
        self._known: list[Optimizer] = []  # of the latest run
        self._names: dict[int, str] = {}  # of its parameters, by id
        self._observed, self._kept = ObservedScalers(), KeptGradients()
        self._early: EarlyLosses | None = None  # of the latest run
        self._stepping = 0  # calls of step() that run
        self._loss: Tensor | None = None  # of the latest backward pass
        self._scaled: WeakSet[Optimizer] = WeakSet()  # that a scaler stepped since then
        self._num_passes = 0  # backward passes after the latest step
        self._most_passes = 1  # the most before a step
        self._classes: set[type] = set()  # of optimizers, whose step is seen
        self._loop, self._unheld = Unscaled(name), _Unheld(None, ())  # of the latest run
        self._in_first: Search | None = (
            None  # sees the operations of step 1, if it is to be watched
        )

    def start(self) -> None:
        """Watch this process from now on."""
        is_paddle = self._name == "paddle"
        kind = self._framework.optimizer if is_paddle else self._framework.optim
        after_init(kind.Optimizer, self._see_optimizer)
        if is_paddle:  # the only one that does not call the base class' __init__()
            after_init(kind.AdamW, self._see_optimizer)
        else:
            on_stop.enter_context(import_module("gradscaler.tensorplay._install").install())
        adapter = import_module(f"gradscaler.{self._name}")
        after_init(adapter.GradScaler, self._see_scaler)
        on_stop.callback(self._observed.remove)
        on_stop.callback(self.break_off, "")
        guard.add(self)
        backward, see = self._framework.Tensor.backward, guarded(self._see_loss)

        @in_place_of(backward)
        def seen(loss: Tensor, *args: Any, **kwargs: Any) -> Any:
            see(loss)
            return backward(loss, *args, **kwargs)

        replace(self._framework.Tensor, "backward", seen)
        self._see_steps_by(self._framework.amp.GradScaler)

    def _see_steps_by(self, kind: Any) -> None:
        """See which optimizers the framework's own scaler steps."""
        step = kind.step
        before, after = guarded(self._scaled.discard), guarded(self._note_scaled)

        @in_place_of(step)
        def seen(scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            before(optimizer)
            made = step(scaler, optimizer, *args, **kwargs)
            after(optimizer)
            return made

        replace(kind, "step", seen)

    def _note_scaled(self, optimizer: Optimizer) -> None:
        """Note that a scaler has stepped an optimizer, or skipped its step."""
        if not self._runs.is_off:
            self._scaled.add(optimizer)

    def _see_optimizer(self, optimizer: Optimizer) -> None:
        """See the steps of an optimizer's class, and of those that it derives from."""
        is_eager = getattr(self._framework, "in_dynamic_mode", lambda: True)()  # Paddle's has two
        if self._runs.is_off or not is_eager:
            return
        end_if_in_threads(is_new=True, trains=False)  # else it ends the run of another one
        self._new.add(optimizer)
        if self._options.watch == 1 and not self._runs.open:
            self._watch_first()
        for kind in type(optimizer).__mro__:
            if kind not in self._classes:
                self._classes.add(kind)
                for name in {"step", "minimize"} & vars(kind).keys():  # Paddle has both
                    self._see_steps_of(kind, name)

    def _watch_first(self) -> None:
        """See operations from here on, as the first run begins after its first forward pass."""
        self._end_first()
        model = self._model_of(self._new)
        self._in_first = None if model is None else seam_of(model)
        if self._in_first is not None:
            self._in_first.start()

    def break_off(self, _: str) -> None:
        """See no more operations."""
        self._end_first()
        self._end_early()

    def _end_first(self) -> None:
        if self._in_first is not None:
            self._in_first.stop()

    def _end_early(self) -> None:
        if self._early is not None:
            self._early.stop()

    def _see_steps_of(self, kind: Any, name: str) -> None:
        step = getattr(kind, name)
        before, after = guarded(self._before_step), guarded(self._after_step)

        @in_place_of(step)
        def seen(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            before(optimizer)
            try:
                return step(optimizer, *args, **kwargs)
            finally:
                after(optimizer)

        replace(kind, name, seen)

    def _see_scaler(self, scaler: Any) -> None:
        if not self._runs.is_off and scaler.observed.is_enabled:
            begin, end = (
                partial(self._begin_scaled, scaler),
                partial(self._runs.end_step, id(scaler)),
            )
            self._observed.add(scaler, ScalerWatch(begin, self._note_scaled, end))

    def _begin_scaled(self, scaler: Any) -> None:
        self._scaled.clear()
        if not self._runs.is_off and (self._new or id(scaler) not in self._runs.open):
            self._begin(id(scaler), scaler)

    def _see_loss(self, loss: Tensor) -> None:
        if not self._runs.is_off:
            end_if_in_threads(is_new=bool(self._new))
            self._loss = loss.detach()
            self._scaled.clear()
            self._kept.before_backward()
            self._see_unstepped()
            if self._early is not None:
                self._early.see(loss)

    def _see_unstepped(self) -> None:
        """Note a gradient that stays Inf or NaN, before each tenth backward pass without a step."""
        self._num_passes += 1
        few = UNSTEPPED_LOSSES * self._most_passes
        if self._stepping or self._num_passes % few or self._is_scaled:
            return
        held = [p for p in self._held().values() if p.grad is not None]
        if are_finite(p.grad for p in held):
            return
        found = next((each for each in held if inspect(each.grad)), None)
        if found is None:
            return
        if self._new or LOOP not in self._runs.open:
            self._begin(LOOP, None)
        if (run := self._runs.open.get(LOOP)) is not None:
            run.note_stayed(self._names.get(id(found), found.name), few)

    def _held(self) -> dict[int, Tensor]:
        """The parameters of all optimizers, by their ids."""
        return {id(p): p for each in (*self._known, *self._new) for p in _parameters_of(each)}

    @property
    def _is_scaled(self) -> bool:
        """Whether a scaler's steps are recorded."""
        return any(key != LOOP for key in self._runs.open)

    def _before_step(self, optimizer: Optimizer) -> None:
        self._stepping += 1
        if self._stepping > 1 or self._runs.is_off:
            return
        self._most_passes = max(self._most_passes, self._num_passes)
        self._num_passes, is_scaled = 0, self._is_scaled
        if self._new and not is_scaled:
            self._begin(LOOP, None)
        is_kept, name = self._kept.take(optimizer), self._name_of(optimizer)
        for run in self._runs.open.values() if is_kept else ():
            run.note_unzeroed(name)
        events = [] if self._early is None else self._early.take(self._held)
        for run in self._runs.open.values() if events else ():
            run.note_events(events)
        for run in self._runs.open.values() if optimizer in self._scaled else ():
            run.note_repeated()
        trained = [p for p in _parameters_of(optimizer) if p.requires_grad]
        gradients = {self._names.get(id(p), p.name): p.grad for p in trained}
        if LOOP in self._runs.open and gradients and not is_scaled:
            self._loop.outside = self._unheld.take() or self._loop.outside
            self._runs.open[LOOP].record(self._loss, gradients)
            self._loss = None

    def _after_step(self, optimizer: Optimizer) -> None:
        self._stepping -= 1
        if self._stepping or self._runs.is_off:
            return
        self._kept.note_step(optimizer, _parameters_of(optimizer))
        if self._early is not None:
            self._early.step_ended()
        self._runs.end_step(LOOP)

    def _name_of(self, optimizer: Optimizer) -> str:
        """The module of an optimizer's first parameter, if there are several optimizers."""
        firsts = [next(_parameters_of(each), None) for each in self._known]
        if sum(first is not None for first in firsts) < 2:
            return ""
        first = next(_parameters_of(optimizer), None)
        return self._names.get(id(first), "").rpartition(".")[0]

    def _begin(self, key: int, scaler: Any) -> None:
        """Begin a run of the optimizers that were made since the latest one, which ends."""
        is_new = bool(self._new)
        if is_new:
            self._runs.end()
            self._known = list(self._new)
            self._new.clear()
            self._kept.clear()
        model = self._model_of(self._known)
        if is_new:
            self._end_early()
            self._early = EarlyLosses(seam_named(self._name), model)
        named = [] if model is None else model.named_parameters()
        self._names = {id(parameter): name for name, parameter in named}
        each = [eps_of(optimizer) or 0.0 for optimizer in self._known]
        eps = min(each, default=0.0) or None
        weights = partial(_growth, _norms_of(self._held()), self._held)
        self._loop = Unscaled(self._name, eps=eps, lost_eps=self._lost_eps, weights=weights)
        self._unheld = _Unheld(model, self._held().keys())
        watched, of = (self._loop, None) if scaler is None else (scaler, model)
        search, self._in_first = self._in_first, None
        if model is not None and self._options.watch != 1:
            search = seam_of(model)
        self._runs.begin(key, watched, of, search)

    @property
    def _lost_eps(self) -> float | None:
        """An eps that is 0 in float16, in which TensorPlay's optimizers step such parameters."""
        for optimizer in self._known if self._name == "tensorplay" else ():
            eps, kinds = eps_of(optimizer), map(dtype_name, _parameters_of(optimizer))
            if eps and not np.float16(eps) and "float16" in kinds:
                return eps
        return None

    def _model_of(self, optimizers: Iterable[Optimizer]) -> Any:
        """The model in memory that optimizers train; several by their classes' names."""
        nn = self._framework.nn
        base = getattr(nn, "Layer", None) or nn.Module
        trained = {id(p) for each in optimizers for p in _parameters_of(each)}
        ours = "holds_gradscaler_models"  # of an earlier run
        every = [each for each in in_memory(base) if not hasattr(type(each), ours)]
        inner = {id(child) for each in every for child in each.children()}
        outer = (each for each in every if id(each) not in inner)
        found = [each for each in outer if any(id(p) in trained for p in each.parameters())]
        if len(found) < 2:
            return next(iter(found), None)
        return one_model({f"{type(m).__name__}_{n}": m for n, m in enumerate(found)})


def _growth(
    before: Mapping[int, float], held: Callable[[], Mapping[int, Tensor]]
) -> tuple[float, float] | None:
    """The norm of some matrices before the first step, and now; None if that is not finite."""
    now = _norms_of({key: p for key, p in held().items() if key in before})
    if len(now) < len(before):
        return None
    return math.hypot(*before.values()), math.hypot(*now.values())


def _norms_of(parameters: Mapping[int, Tensor]) -> dict[int, float]:
    """The 2-norms of matrices that are finite; biases may stay large while a decay shrinks them."""
    arrays = {key: to_numpy(p) for key, p in parameters.items() if len(p.shape) > 1}
    norms = {key: float(np.linalg.norm(a.astype("float64"))) for key, a in arrays.items()}
    return {key: norm for key, norm in norms.items() if math.isfinite(norm)}


def _parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """The parameters that an optimizer holds, of whatever group."""
    groups = getattr(optimizer, "param_groups", None) or optimizer._parameter_list or ()
    for each in groups:  # Paddle's list has parameters, or groups of them
        yield from each["params"] if isinstance(each, dict) else [each]


class _Unheld:
    """Finds parameters that have a gradient, that no optimizer holds, and that stand.

    It looks in the first steps of a run. Those before the first that is held are left out: a
    backbone may be meant to stay.

    Args:
        model: the model; None if it is not known.
        held: the ids of the parameters that optimizers hold.
    """

    def __init__(self, model: Any, held: Container[int]) -> None:
        self._model, self._held = model, held
        self._steps = 0
        self._parts: dict[str, tuple[bytes, bytes]] = {}  # of a parameter, and of its gradient

    def take(self) -> tuple[str, ...]:
        """Note a step that begins; return the names in the step that shows them, else none."""
        self._steps += 1
        if self._model is None or self._steps not in (1, MOVED_BY):
            return ()
        now = {name: (_part_of(p), _part_of(p.grad)) for name, p in self._used()}
        before, self._parts = self._parts, now
        both = {name: (before[name], now[name]) for name in now if name in before}
        # The gradient of a model of before stands, too.
        return tuple(n for n, (old, new) in both.items() if old[0] == new[0] and old[1] != new[1])

    def _used(self) -> Iterator[tuple[str, Tensor]]:
        is_after = False
        for name, parameter in self._model.named_parameters():
            is_held = id(parameter) in self._held
            is_after |= is_held
            if is_after and not is_held and parameter.grad is not None and largest(parameter.grad):
                yield name, parameter


def _part_of(array: Any) -> bytes:
    return sample_of(array, FEW_ELEMENTS).tobytes()
