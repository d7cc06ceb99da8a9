"""The runs of a process: when one begins, and when it ends."""

from __future__ import annotations

import argparse
import atexit
import os
import warnings
from collections.abc import Iterable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch.optim import Optimizer

from gradscaler._run_script import fastai
from gradscaler._run_script.after_import import after_import
from gradscaler._run_script.after_init import after_init, in_memory
from gradscaler._run_script.files import RunFiles
from gradscaler._run_script.models import models_of
from gradscaler._run_script.options import MOST_RUNS
from gradscaler._run_script.scaler_watch import (
    MAKE_ONCE,
    OF_EACH_STEP,
    FreshScalers,
    ObservedScalers,
    ScalerWatch,
)
from gradscaler._run_script.termination import before_termination, die_in_groups
from gradscaler._run_script.undo import on_stop, replace
from gradscaler._run_script.variables import loss_left_out
from gradscaler._run_script.voice import attempt, say, say_no_step
from gradscaler._run_script.watched_run import WatchedRun
from gradscaler.diagnose._findings.frameworks import framework_named
from gradscaler.diagnose._graph.guard import guard, guarded
from gradscaler.diagnose._graph.lines import Tracebacks
from gradscaler.diagnose._graph.stand_ins import in_place_of
from gradscaler.diagnose._monitor import backward_calls, unfit_states
from gradscaler.diagnose._monitor.by_identity import ByIdentity
from gradscaler.torch import GradScaler, install
from gradscaler.torch._install import is_theirs, raise_as_theirs, replace_sharded

_THEIRS = (
    "a GradScaler that was made before gradscaler.watch() scales this loss, so the training is not "
    "watched. Make the scaler after that call."
)
_LOOP = 0  # the key of the loop without a scaler; others are the ids of scalers


class Session:
    """Puts a monitor on each scaler, or on the loop of a process that uses none.

    A run begins with the first backward pass after its optimizers were made, as models are complete
    then. New optimizers, of other parameters, begin a new run.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._files = options, RunFiles(options)
        self._process = os.getpid()
        self._new = ByIdentity[None]()  # optimizers made since the latest run began
        self._model: Any = None  # of the latest run
        self._known: set[int] = set()  # ids of its parameters
        self._runs: dict[int, WatchedRun] = {}
        self._num_runs = 0
        self._scalers, self._observed = FreshScalers(), ObservedScalers()
        self._has_given_up = False
        self._waits = self._is_told = False  # for an optimizer, as a scaler of PyTorch's is in use
        self._lines = Tracebacks()  # of the first forward pass, which comes before the monitor

    def start(self) -> None:
        """Watch this process from now on."""
        after_import("torch.distributed.fsdp.sharded_grad_scaler", replace_sharded)
        replace(guard, "say", say)
        guard.add(self)
        on_stop.callback(self._stop)
        on_stop.enter_context(install())
        on_stop.enter_context(raise_as_theirs())  # a script must not end because it is watched
        attempt(die_in_groups)
        after_init(Optimizer, self._see_optimizer)
        after_import("fastai.optimizer", self._see_fastai)
        after_init(GradScaler, self._see_scaler)
        load = unfit_states.noting(torch.nn.Module.load_state_dict)
        replace(torch.nn.Module, "load_state_dict", load)
        on_stop.callback(unfit_states.places.clear)
        if any(map(is_theirs, in_memory(torch.amp.GradScaler))):
            self._see_theirs()
        _leave_children_alone()
        self._end_first()

    def _end_first(self) -> None:
        """Let the verdict come before monitors close by themselves at exit."""
        atexit.unregister(self.end)
        atexit.register(self.end)

    def _stop(self) -> None:
        self.end()
        self.break_off("")
        self._observed.remove()
        guard.remove(self)
        atexit.unregister(self.end)

    def break_off(self, _: str) -> None:
        """Begin no more runs, as an error has ended those that were open."""
        self._num_runs = MOST_RUNS
        self._new.clear()
        backward_calls.ignore(self)
        self._lines.stop()

    @property
    def _is_off(self) -> bool:
        """Whether this is a child that was forked, or enough runs are on file."""
        return os.getpid() != self._process or self._num_runs >= MOST_RUNS

    def _see_optimizer(self, optimizer: Optimizer) -> None:
        if _held_by([optimizer]) <= self._known:
            return
        if self._is_off:
            self._end_last()
            return
        if not self._new or self._waits:
            self._waits = False
            self._end_runs()  # not in the backward pass, where a watch cannot be left
            self._lines.start()
            backward_calls.listen(self)
        self._new[optimizer] = None

    def _end_last(self) -> None:
        """End the last run that is watched, as its monitor would hear the next one's passes."""
        if os.getpid() == self._process and self._runs:
            self._end_runs()
            self._options.latest = None
            say(f"no more runs are watched, as there were {MOST_RUNS} in this process.")

    def _see_fastai(self) -> None:
        after_init(fastai.own_optimizer(), self._see_optimizer)

    def _see_scaler(self, scaler: GradScaler) -> None:
        if not self._is_off:
            key, begin = id(scaler), partial(self._begin_scaled, scaler)
            stepped, ended = partial(self._scalers.note, key), partial(self._end_step, key)
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
        if self._is_off or not is_theirs(scaler) or not scaler.is_enabled():
            return
        backward_calls.ignore(self)
        self._lines.stop()
        if not self._is_told:
            say(_THEIRS)
        self._is_told = self._waits = True

    def before_backward(self, losses: Sequence[Any]) -> None:
        """Begin the run of a loop without a scaler, which hears of this backward pass, too."""
        if self._new and not self._is_off:  # else a scaler was first to see the new optimizers
            self._begin(_LOOP, None)
        backward_calls.ignore(self)

    def after_backward(self) -> None:
        """Nothing to do."""

    def _begin_scaled(self, scaler: GradScaler) -> None:
        if self._is_off or not (self._new or id(scaler) not in self._runs):
            return
        if self._scalers.are_made_each_step:
            self._give_up()
        else:
            self._begin(id(scaler), scaler)

    def _give_up(self) -> None:
        """Watch no more, as each scaler makes a step alone, whose file shows nothing."""
        self._has_given_up, self._num_runs = True, MOST_RUNS
        runs, self._runs = self._runs, {}
        for run in runs.values():
            attempt(run.discard)
        say(f"{OF_EACH_STEP} {MAKE_ONCE}")

    def _end_step(self, key: int) -> None:
        if key in self._runs:
            self._runs[key].step_ended()

    def _begin(self, key: int, scaler: GradScaler | None) -> None:
        """Begin a run; those of earlier optimizers end."""
        attempt(partial(before_termination, self.end))
        self._lines.stop()
        if self._new:
            self._end_runs()
        self._num_runs += 1
        attempt(partial(self._open, key, scaler))
        self._end_first()

    def _open(self, key: int, scaler: GradScaler | None) -> None:
        self._find_model()
        given = scaler, self._model, self._files, self._options
        self._runs[key] = WatchedRun(*given, framework_named("torch", {}))

    def _find_model(self) -> None:
        """Find the model of the optimizers that were made since the latest run began."""
        if optimizers := list(self._new):
            self._new.clear()
            self._model = models_of(optimizers)
            models = self._model.values() if isinstance(self._model, dict) else [self._model]
            self._known = {id(p) for model in models for p in model.parameters()}

    def end(self) -> None:
        """Close all files, and print the verdicts."""
        if os.getpid() == self._process:
            if not self._options.is_notebook:  # its variables may be those of earlier cells
                attempt(self._see_left_out)
            self._end_runs()
            if self._has_given_up:
                say(f"as said above: {OF_EACH_STEP}")
            if not self._num_runs and not self._is_told:
                self._num_runs = MOST_RUNS
                say_no_step(self._options)

    def _see_left_out(self) -> None:
        """See the loss for which the script has ended before its backward pass, if there is one."""
        loss, self._options.trace = loss_left_out(self._options.trace), None
        if loss is None:
            return
        if self._new and not self._is_off:  # it is the first loss of a run
            self._begin(_LOOP, None)
        for run in list(self._runs.values())[-1:]:
            run.leave_out(loss)

    def _end_runs(self) -> None:
        runs, self._runs = self._runs, {}
        for run in runs.values():
            attempt(run.end)


@cache
def _leave_children_alone() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_leave_child_alone)


def _leave_child_alone() -> None:
    """Let no warning say that a forked child cannot write to its parent's file: it need not."""
    what = ".*was opened before this process was forked"
    warnings.filterwarnings("ignore", what, RuntimeWarning)


def _held_by(optimizers: Iterable[Optimizer]) -> set[int]:
    return {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
