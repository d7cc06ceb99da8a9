"""The runs of a process: when one begins, and when it ends."""

from __future__ import annotations

import argparse
import os
import re
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, partial, wraps
from inspect import currentframe
from typing import Any
from weakref import ref

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as hooks
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from gradscaler._in_memory import in_memory
from gradscaler._run_script.after_import import after_import
from gradscaler._run_script.after_init import after_init
from gradscaler._run_script.engines import Engines
from gradscaler._run_script.hand_updates import HandUpdates
from gradscaler._run_script.idle_steps import IdleSteps
from gradscaler._run_script.models import models_of
from gradscaler._run_script.options import MOST_RUNS
from gradscaler._run_script.runs import LOOP, Runs
from gradscaler._run_script.scaler_watch import (
    MAKE_ONCE,
    OF_EACH_STEP,
    FreshScalers,
    ObservedScalers,
    ScalerWatch,
)
from gradscaler._run_script.termination import die_in_groups
from gradscaler._run_script.undo import on_stop, replace
from gradscaler._run_script.variables import (
    RunningNans,
    loss_left_out,
    means_nan,
    nan_among,
    nonfinite_left,
)
from gradscaler._run_script.voice import attempt, conclude_without_step, voice
from gradscaler.diagnose._graph.guard import guarded
from gradscaler.diagnose._graph.hooks import StepHooks
from gradscaler.diagnose._graph.lines import Tracebacks, keep_under
from gradscaler.diagnose._graph.numpy_warnings import noting, numpy_warnings
from gradscaler.diagnose._graph.search import Search
from gradscaler.diagnose._graph.stand_ins import in_place_of
from gradscaler.diagnose._monitor import (
    backward_calls,
    loaders,
    new_optimizers,
    unfit_states,
)
from gradscaler.diagnose._monitor.by_identity import ByIdentity
from gradscaler.diagnose._monitor.engine_scaler import EngineScaler
from gradscaler.diagnose._monitor.models import one_model
from gradscaler.diagnose._monitor.parameters import held_by
from gradscaler.torch import GradScaler, install
from gradscaler.torch._install import is_theirs, raise_as_theirs, replace_sharded

_THEIRS = (
    "a GradScaler that was made before gradscaler.watch() scales this loss, so the training is not "
    "watched. Make the scaler after that call."
)


class Session(Runs, backward_calls.BackwardListener):
    """Puts a monitor on each scaler, or on the loop of a process that uses none.

    A run begins with the first backward pass after its optimizers were made, as models are complete
    then. New optimizers, of other parameters, begin a new run.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__("torch", options)
        # Optimizers made since the latest run began, and what each was made with.
        self._new = ByIdentity[list[ref[torch.Tensor]]]()
        self._in_first: Search | None = None  # sees the operations before the first run
        self._model: Any = None  # of the latest run
        self._known: set[int] = set()  # ids of its parameters
        self._hooks = StepHooks(self)  # if a step is to be watched
        self._scalers, self._observed = FreshScalers(), ObservedScalers()
        self._has_given_up = False
        self._waits = self._is_told = False  # for an optimizer, as a scaler of PyTorch's is in use
        self._is_watching = False  # else an optimizer that is seen was made before
        self._running = RunningNans()  # of the latest run
        self._by_hand, self._idle = HandUpdates(), IdleSteps()
        self._lines = Tracebacks()  # of the first forward pass, which comes before the monitor

    def start(self) -> None:
        """Watch this process from now on."""
        after_import("torch.distributed.fsdp.sharded_grad_scaler", replace_sharded)
        on_stop.enter_context(install())
        on_stop.enter_context(raise_as_theirs())  # a script must not end because it is watched
        attempt(die_in_groups)
        after_init(Optimizer, self._see_optimizer)
        after_init(LRScheduler, self._see_schedule)
        after_init(torch.autograd.set_detect_anomaly, keep_under)
        self._is_watching = True
        after_import("fastai.optimizer", self._see_fastai)
        after_init(GradScaler, self._see_scaler)
        engines = Engines(self._begin_scaled, lambda scaler: self.end_step(id(scaler)))
        after_import("deepspeed.runtime.engine", engines.watch)
        load = unfit_states.noting(torch.nn.Module.load_state_dict)
        replace(torch.nn.Module, "load_state_dict", load)
        on_stop.callback(unfit_states.forget)
        load = new_optimizers.noting_rates(Optimizer.load_state_dict)
        replace(Optimizer, "load_state_dict", load)
        for kind in (LRScheduler, *LRScheduler.__subclasses__()):
            if load := vars(kind).get("load_state_dict"):
                replace(kind, "load_state_dict", new_optimizers.noting_progress(load))
        replace(DataLoader, "__iter__", loaders.noting(DataLoader.__iter__))
        on_stop.callback(loaders.forget)
        if any(map(is_theirs, in_memory(torch.amp.GradScaler))):
            self._see_theirs()
        # What Python calls with each warning; scripts replace showwarning, its public name.
        if show := getattr(warnings, "_showwarnmsg", None):
            replace(warnings, "_showwarnmsg", noting(show))
            on_stop.callback(numpy_warnings.forget)
        backward_calls.listen(self)
        self._idle.start()
        _leave_children_alone()
        self._end_first()

    def stop(self) -> None:
        """End all runs, and begin no more."""
        super().stop()
        self.break_off("")
        self._observed.remove()

    def break_off(self, reason: str) -> None:
        """Begin no more, as an error has ended those that were open."""
        super().break_off(reason)
        self._new.clear()
        self._end_watch_of_first()
        self._idle.stop()
        backward_calls.ignore(self)
        self._lines.stop()

    @property
    def _is_full(self) -> bool:
        """Whether this is a child that was forked, or enough runs are on file."""
        return self.is_off or not self._num_left

    def _see_optimizer(self, optimizer: Optimizer) -> None:
        if self._is_watching:
            new_optimizers.note_made(optimizer, currentframe())
        if self._known.issuperset(map(id, held_by(optimizer))):
            return
        if self._is_full:
            self._end_last()
            return
        if not self._new or self._waits:
            self._waits = False
            self._end_open()  # not in the backward pass, where a watch cannot be left
            self._lines.start()
            backward_calls.listen(self)
        self._new[optimizer] = [ref(p) for p in held_by(optimizer)]
        if self._options.watch == 1 and not self.open:
            self._watch_first()

    def _watch_first(self) -> None:
        """See operations from here on, as the first run begins after its first forward pass."""
        self._end_watch_of_first()
        optimizers = list(self._new)
        model = models_of(optimizers, [_alive(self._new.get(each, [])) for each in optimizers])
        self._in_first = Search(one_model(model))
        with suppress(RuntimeError):  # in a compiled function
            self._in_first.start()

    def _end_watch_of_first(self) -> None:
        search, self._in_first = self._in_first, None
        if search is not None:
            search.stop()

    def _see_schedule(self, schedule: LRScheduler) -> None:
        if self._is_watching:
            new_optimizers.note_made(schedule, currentframe())

    def _end_last(self) -> None:
        """End the last run that is watched, as its monitor would hear the next one's passes."""
        if not self.is_off and self.open:
            self._end_open()
            self._options.latest = None
            voice.note(f"no more runs are watched, as there were {MOST_RUNS} in this process.")

    def _see_fastai(self) -> None:
        after_init(_fastais_optimizer(), self._see_optimizer)

    def _see_scaler(self, scaler: GradScaler) -> None:
        if not self._is_full:
            key, begin = id(scaler), partial(self._begin_scaled, scaler)
            stepped, ended = partial(self._scalers.note, key), partial(self.end_step, key)
            self._observed.add(scaler, ScalerWatch(begin, stepped, ended))

    def _see_theirs(self) -> None:
        """Leave losses alone that PyTorch's own scalers scale, which were made before the watch."""
        scale, see = torch.amp.GradScaler.scale, guarded(self._leave_alone)

        @in_place_of(scale)
        def seen(scaler: Any, outputs: Any) -> Any:
            see(scaler)
            return scale(scaler, outputs)

        replace(torch.amp.GradScaler, "scale", seen)

    def _leave_alone(self, scaler: Any) -> None:
        if self._is_full or not is_theirs(scaler) or not scaler.is_enabled():
            return
        backward_calls.ignore(self)
        self._lines.stop()
        if not self._is_told:
            voice.note(_THEIRS)
        self._is_told = self._waits = True

    def before_backward(self, losses: Sequence[Any]) -> None:
        """Begin the run of a loop without a scaler, which hears of this backward pass, too."""
        self._idle.stop()
        if self._new and not self._is_full:  # else a scaler was first to see the new optimizers
            self._begin(LOOP, None)
        elif self._num_left == MOST_RUNS and not self.is_off and not self._options.is_watched:
            self._by_hand.note(losses)  # no optimizer was made yet, nor one of Keras'
            return
        backward_calls.ignore(self)

    def _begin_scaled(self, scaler: GradScaler | EngineScaler) -> None:
        if self._is_full or not (self._new or id(scaler) not in self.open):
            return
        if self._scalers.are_made_each_step:
            self._give_up()
        else:
            self._begin(id(scaler), scaler)

    def _give_up(self) -> None:
        """Watch no more, as each scaler makes a step alone, whose file shows nothing."""
        self._has_given_up, self._num_left = True, 0
        runs, self.open = self.open, {}
        for run in runs.values():
            attempt(run.discard)
        voice.note(f"{OF_EACH_STEP} {MAKE_ONCE}")

    def _begin(self, key: int, scaler: GradScaler | EngineScaler | None) -> None:
        """Begin a run; those of earlier optimizers end."""
        self._lines.stop()
        if self._new:
            self._end_open()
        self.begin(key, scaler, None)

    def _open(self, key: object, scaler: Any, *_: Any) -> None:
        self._find_model(scaler)
        model, is_watched = one_model(self._model), self._options.watch is not None
        search, self._in_first = self._in_first, None
        super()._open(key, scaler, model, search or (Search(model) if is_watched else None))
        self._running = RunningNans()
        self.open[key].at_samples(self._running.look)
        if is_watched:  # after the hooks of the monitor, which count the steps
            self._hooks.add(guarded(self._before_step), guarded(self._after_step))

    def _before_step(self, *_: object) -> None:
        for run in self.open.values():
            run.stepping()

    def _after_step(self, *_: object) -> None:
        for key in self.open:
            self.end_step(key)

    def _end_open(self) -> None:
        super()._end_open()
        self._hooks.remove()

    def _find_model(self, scaler: Any) -> None:
        """Find the model of the optimizers that were made since the latest run began."""
        optimizers = list(self._new)
        first = [_alive(self._new.get(each, [])) for each in optimizers]
        self._new.clear()
        if isinstance(scaler, EngineScaler):
            self._model = scaler.model
        elif optimizers:
            self._model = models_of(optimizers, first)
        else:
            return
        models = self._model.values() if isinstance(self._model, dict) else [self._model]
        self._known = {id(p) for model in models for p in model.parameters()}

    def end(self) -> None:
        """Close all files, and print the verdicts."""
        if self._has_no_word:
            return
        if not self._options.is_notebook:  # its variables may be those of earlier cells
            attempt(self._see_left_out)
        attempt(self._end_watch_of_first)
        attempt(self._see_variables)
        super().end()
        if self._has_given_up:
            voice.conclude(f"as said above: {OF_EACH_STEP}")
        if self._num_left == MOST_RUNS and not self._is_told:
            self._num_left = 0
            if not (self._by_hand.conclude() or self._idle.conclude()):
                conclude_without_step(self._options)

    def _see_left_out(self) -> None:
        """See the loss for which the script has ended before its backward pass, if there is one."""
        trace, self._options.trace = self._options.trace, None
        loss = loss_left_out(trace)
        if loss is None:
            for run in list(self.open.values())[-1:]:
                run.left = nonfinite_left(trace)
            return
        if self._new and not self._is_full:  # it is the first loss of a run
            self._begin(LOOP, None)
        for run in list(self.open.values())[-1:]:
            run.leave_out(loss)

    def _see_variables(self) -> None:
        """See what the script's evaluation, or that of a notebook's cell, has left as NaN."""
        names, cell = dict(vars(sys.modules["__main__"])), self._options.cell
        if means_nan(names.get("__file__") or ""):
            names = {}
        if self._options.is_notebook:
            names = {name: each for name, each in names.items() if _has_word(cell, name)}
        if name := nan_among(names) or self._running.name:
            for run in self.open.values():
                run.nan_left = name


def _has_word(code: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", code) is not None


def _alive(tensors: Sequence[ref[torch.Tensor]]) -> list[torch.Tensor]:
    """Those of some weights that are alive, but in float16.

    An engine scales the loss of these itself, and skips steps in health, too.
    """
    found = [each() for each in tensors]
    return [p for p in found if p is not None and p.dtype != torch.float16]


@cache
def _leave_children_alone() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_leave_child_alone)


def _leave_child_alone() -> None:
    """Let no warning say that a forked child cannot write to its parent's file: it need not."""
    what = ".*was opened before this process was forked"
    warnings.filterwarnings("ignore", what, RuntimeWarning)


def _fastais_optimizer() -> Any:
    """The class of fastai's optimizers, which call none of PyTorch's hooks, so that this does."""
    kind = sys.modules["fastai.optimizer"].Optimizer
    step = kind.step

    @wraps(step)
    def announced(self: Any, *args: Any, **kwargs: Any) -> Any:
        for before in list(hooks._global_optimizer_pre_hooks.values()):
            before(self, args, kwargs)
        result = step(self, *args, **kwargs)
        for after in list(hooks._global_optimizer_post_hooks.values()):
            after(self, args, kwargs)
        return result

    replace(kind, "step", announced)
    return kind
