"""Loops of TensorFlow: gradients of tapes, and steps of Keras' optimizers, compiled or not."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from inspect import unwrap
from threading import get_ident
from traceback import walk_stack
from typing import Any
from weakref import WeakKeyDictionary

from gradscaler._in_memory import in_memory
from gradscaler._run_script.after_init import after_init
from gradscaler._run_script.cut_gradients import cut_under_tape, told_of_none
from gradscaler._run_script.runs import Runs
from gradscaler._run_script.step_shapes import EarlyStep, broadcast_in, in_fit
from gradscaler._run_script.tape_steps import (
    Calls,
    Divided,
    Function,
    Loop,
    Model,
    Optimizer,
    StepOperations,
    Tensor,
    Variable,
    end_if_second_trains,
    num_replicas,
    optimizers_stepped,
    tensorflow,
    thread_of_step,
)
from gradscaler._run_script.traced_calls import (
    Call,
    Traced,
    do_nothing,
    is_looking,
    looking,
    loss_in,
)
from gradscaler._run_script.undo import replace
from gradscaler._run_script.voice import voice
from gradscaler.diagnose._graph.call_site import is_of_user
from gradscaler.diagnose._graph.guard import guarded
from gradscaler.diagnose._graph.stand_ins import in_place_of
from gradscaler.diagnose._graph.threads import end_if_in_threads
from gradscaler.diagnose._monitor.parameters import eps_of
from gradscaler.diagnose._monitor.recorded_loop import Unscaled
from gradscaler.diagnose._monitor.traced_scalers import number_of, state_of
from gradscaler.diagnose._monitor.undivided import undivided
from gradscaler.diagnose._record.thresholds import FEW_SAMPLES
from gradscaler.diagnose._seams.tensorflow import TensorFlowSeam

_STEPS = "apply", "apply_gradients"  # the methods of optimizers


class TapeLoops:
    """Puts a monitor on each optimizer of Keras 3 on TensorFlow, and of tf_keras, that steps.

    An optimizer that steps eagerly shows its gradients. One that steps in a function of
    ``tf.function`` was seen when that was traced. A call of that function is a step: its result has
    the loss, and its variables show afterwards whether the gradients were finite. ``fit`` is
    watched by itself, and several replicas are not watched.

    Args:
        name: the package of the optimizers, ``"keras"`` or ``"tf_keras"``.
        options: those of the command line.
    """

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self._name, self._options = name, options
        self._keras: Any = sys.modules[name]
        self._runs = Runs("keras on tensorflow" if name == "keras" else name, options)
        self._loops: dict[int, Loop] = {}  # by the id of the optimizer
        self._is_new = False  # whether optimizers were made since the latest run began
        self._functions = WeakKeyDictionary[Function, Traced | None]()  # None: not the user's
        self._calling = Calls[Traced]()
        self._latest: Call | None = None  # that took the gradient for a step outside of it
        self._losses: dict[int, Tensor] = {}  # by the id of the first variable
        self._stepping = Counter[int]()  # calls of steps that run, by thread
        self._scaled: Callable[[], None] | None = None  # records a step that runs
        self._scaled_losses: dict[int, Any] = {}  # the latest, by the id of what scaled it
        self._undivided: dict[int, list[Any]] = {}  # its gradients, by the same
        self._early = EarlyStep()
        self._cut, self._has_told_of_none = "", False  # of gradients that are all None
        self._num_looks_for_cut = FEW_SAMPLES

    def start(self) -> None:
        """Watch this process from now on, unless Keras has another backend."""
        if self._keras.backend.backend() != "tensorflow":
            return
        self._see_tensorflow()
        optimizers, adapter = self._keras.optimizers, import_module(f"gradscaler.{self._name}")
        bases = [optimizers.Optimizer]
        if self._name == "tf_keras":
            bases.append(optimizers.legacy.Optimizer)
        for base in bases:
            after_init(base, self._see_optimizer)
        wrappers = [self._keras.mixed_precision.LossScaleOptimizer, adapter.LossScaleOptimizer]
        wrappers += [getattr(adapter, f"LossScaleOptimizerV{n}", wrappers[1]) for n in (2, 3)]
        kinds = {kind: None for each in (*bases, *wrappers) for kind in each.__mro__}
        for kind in kinds:
            for method in set(_STEPS).intersection(vars(kind)):
                self._see_steps_of(kind, method)
            if "get_scaled_loss" in vars(kind):  # of tf_keras; the other divides by itself
                self._see_scaled_losses_of(kind)

    def _see_tensorflow(self) -> None:
        """See the gradients of tapes, and the calls of functions that are compiled."""
        tape, function = tensorflow().GradientTape, type(tensorflow().function(do_nothing))
        gradient, call = tape.gradient, function.__call__
        see = guarded(self._see_gradient)
        before, after = guarded(self._before_call), guarded(self._after_call)

        @in_place_of(gradient)
        def seen_gradient(own: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
            made = gradient(own, target, sources, *args, **kwargs)
            if not is_looking():
                see(target, sources, made)
            return made

        @in_place_of(call)
        def seen_call(own: Function, *args: Any, **kwargs: Any) -> Any:
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

        replace(tape, "gradient", seen_gradient)
        replace(function, "__call__", seen_call)

    def _see_scaled_losses_of(self, kind: Any) -> None:
        scale, see = kind.get_scaled_loss, guarded(self._see_scaled_loss)

        @in_place_of(scale)
        def seen(optimizer: Optimizer, loss: Any) -> Any:
            scaled = scale(optimizer, loss)
            see(optimizer, scaled)
            return scaled

        seen.autograph_info__ = {}  # AutoGraph need not convert it
        replace(kind, "get_scaled_loss", seen)

    def _see_scaled_loss(self, optimizer: Optimizer, scaled: Any) -> None:
        if not (is_looking() or self._runs.is_off):
            self._scaled_losses[id(optimizer)] = scaled

    def _see_optimizer(self, _: Optimizer) -> None:
        if not self._runs.is_off:
            end_if_in_threads(is_new=True, trains=False)  # else it ends the run of another one
        self._is_new = True

    def _see_steps_of(self, kind: Any, method: str) -> None:
        step = getattr(kind, method)
        before, after = guarded(self._before_step), guarded(self._after_step)

        @in_place_of(step)
        def seen(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if is_looking():
                return step(optimizer, *args, **kwargs)
            args = tuple(map(_kept, args))
            kwargs = {name: _kept(each) for name, each in kwargs.items()}
            before(optimizer, method, args, kwargs)
            try:
                return step(optimizer, *args, **kwargs)
            finally:
                after(optimizer)

        seen.autograph_info__ = {}  # AutoGraph need not convert it
        replace(kind, method, seen)

    def _see_gradient(self, target: Any, sources: Any, made: Any) -> None:
        for key, scaled in list(self._scaled_losses.items()):
            if scaled is target:
                del self._scaled_losses[key]
                self._undivided[key] = tensorflow().nest.flatten(made)
        first = sources[0] if isinstance(sources, (list, tuple)) and sources else sources
        is_cut = all(each is None for each in tensorflow().nest.flatten(made))
        if is_cut and self._num_looks_for_cut:
            self._num_looks_for_cut -= 1  # an optimizer may never get them
            self._cut = cut_under_tape()
        if not hasattr(first, "assign"):  # of an input, as for a penalty
            return
        if not _is_eager():
            called = self._calling.own
            broadcast = broadcast_in(target) if hasattr(target, "op") else ""
            if called is None:
                in_fit[first] = broadcast
            else:
                called.takes_gradient = True
                called.targets[id(first)] = target
                called.broadcast = called.broadcast or broadcast
        elif hasattr(target, "dtype"):
            self._early.see_gradient()
            self._losses[id(first)], self._latest = target, None

    def _before_step(self, optimizer: Optimizer, method: str, args: Any, kwargs: Any) -> None:
        thread = thread_of_step()
        self._stepping[thread] += 1
        optimizers_stepped[:] = [None]
        is_inner = self._stepping[thread] > 1 or is_looking()
        if is_inner or self._runs.is_off or self._is_unseen(optimizer):
            return
        pairs = _pairs(optimizer, method, args, kwargs)
        if not any(gradient is not None for gradient, _ in pairs):
            self._tell_of_none([variable for _, variable in pairs])
        pairs = [each for each in pairs if each[0] is not None]
        scaled = {id(each) for each in self._undivided.pop(id(optimizer), [])}
        undivided[optimizer] = any(id(gradient) in scaled for gradient, _ in pairs)
        trained = [variable for _, variable in pairs]
        if not _is_eager():
            if (called := self._calling.own) is not None:
                called.steps[id(optimizer)] = optimizer, trained
                called.has_replicas |= num_replicas() > 1
            return
        loop = None
        if pairs and not self._is_in_fit():
            loop = self._loop_of(optimizer, trained, is_compiled=False)
        if loop is None:
            return
        loss, scale = self._losses.pop(id(trained[0]), None), 1.0
        if loop.is_scaled:
            scale = number_of(state_of(optimizer).scale)
            loss = None if loss is None else Divided(loss, scale)
        if loss is None and self._latest is not None:
            loss = loss_in(self._latest.results)
        gradients = {loop.name_of(variable): gradient for gradient, variable in pairs}
        if loop.is_scaled:  # it is known after the step whether it was skipped
            scale = scale if _divides(optimizer, method) else 1.0
            divided = {name: Divided(each, scale) for name, each in gradients.items()}
            given = divided if loop.is_half else None  # else samples compare with the wrong range
            self._scaled = partial(self._record, loop, loss, given, self._latest)
        else:
            self._record(loop, loss, gradients, self._latest)

    def _is_unseen(self, optimizer: Optimizer) -> bool:
        """Whether several replicas step in a way that is not watched, which is said once.

        Eagerly, each of them steps in a thread of its own, and a scaler counts for all of them.
        """
        is_scaled = isinstance(optimizer, self._keras.mixed_precision.LossScaleOptimizer)
        is_unseen = num_replicas() > 1 and (_is_eager() or is_scaled)
        if is_unseen and not self._options.is_watched:  # it is where fit trains
            self._options.is_watched = True
            voice.note(
                "the steps of several replicas are not watched eagerly, or with a loss scaler. "
                "To have them watched, train on one, with all of the batch."
            )
        return is_unseen

    def _tell_of_none(self, variables: Sequence[Variable]) -> None:
        """Say once that an optimizer gets no gradient, which is an error."""
        if variables and not (self._has_told_of_none or self._is_in_fit()):
            self._has_told_of_none = True
            voice.note(told_of_none(variables, self._cut))

    def _after_step(self, optimizer: Optimizer) -> None:
        thread = thread_of_step()
        self._stepping[thread] -= 1
        if self._stepping[thread] or is_looking():
            return
        record, self._scaled = self._scaled, None
        if record is not None:
            record()
        loop = self._loops.get(id(optimizer))
        if loop is not None and loop.run is not None and not loop.is_compiled:
            loop.run.step_ended()

    def _is_in_fit(self) -> bool:
        """Whether ``fit`` calls, which runs eagerly if the user asked for it."""
        fit = unwrap(self._keras.Model.fit).__code__
        return any(frame.f_code is fit for frame, _ in walk_stack(sys._getframe()))

    def _before_call(self, function: Function, args: Any, kwargs: Any) -> Traced | None:
        """What is known of a function of the user's that is called, and runs compiled."""
        is_compiled = _is_eager() and not tensorflow().config.functions_run_eagerly()
        if not is_compiled or self._runs.is_off:
            return None
        if function not in self._functions:
            is_own = is_of_user(function.python_function)
            self._functions[function] = Traced() if is_own else None
        called = self._functions[function]
        if called is not None and called.steps and called.before is None:
            called.before = called.num_applied
        if called is not None and (called.steps or called.takes_gradient):
            call = Call(function, args, kwargs, None)
            for key, loop in self._loops.items():
                watch = loop.watch
                if watch is not None and watch.is_on and (key in called.steps or not called.steps):
                    watch.find((args, kwargs), partial(call.locate, loop))
        return called

    def _after_call(self, called: Traced, call: Call) -> None:
        """Record a step of each optimizer that stepped in a compiled function."""
        if not called.steps:
            self._latest = call if called.takes_gradient else self._latest
        called.note_loop(call.function)
        for optimizer, variables in called.steps.values():
            loop = self._loop_of(
                optimizer, variables, is_compiled=True, has_watch=not called.has_replicas
            )
            if loop is None or loop.run is None:
                continue
            loss = None if loop.is_scaled else called.loss_of(variables, call.results)
            if loss is None and len(called.steps) == 1:
                loss = loss_in(call.results)
            if loop.is_scaled:
                self._record(loop, loss, None, call)
            else:
                with looking():
                    finite = loop.are_finite()
                pairs = zip(loop.variables, finite, strict=True)
                bad = {loop.name_of(variable): variable for variable, is_ok in pairs if not is_ok}
                is_kept = not bad and not called.has_replicas  # else its weights are lost
                self._record(loop, loss, bad, call if is_kept else None)
            loop.run.step_ended()

    def _record(
        self, loop: Loop, loss: Any, gradients: Mapping[str, Any] | None, call: Call | None
    ) -> None:
        replay = None
        if call is not None and loop.model is not None:
            replay = partial(call.again, loop)
        if loop.run is None:
            return
        traced = None if call is None else self._functions.get(call.function)
        broadcast = self._early.broadcast if traced is None else traced.broadcast
        if broadcast and loop.num_noted < FEW_SAMPLES:
            loop.num_noted += 1
            loop.run.note_operations(broadcast, "")
        loop.run.record(loss, gradients, replay)

    def _loop_of(
        self,
        optimizer: Optimizer,
        variables: Sequence[Variable],
        is_compiled: bool,
        has_watch: bool = True,
    ) -> Loop | None:
        """The loop of an optimizer, which begins with its first step; None if it has no run."""
        key = id(optimizer)
        is_new = key not in self._loops or self._is_new
        end_if_second_trains(is_new=is_new)
        if self._runs.is_off:
            return None
        if is_new:
            self._begin(optimizer, variables, is_compiled, has_watch)
        loop = self._loops[key]
        return loop if loop.run is not None else None

    def _begin(
        self,
        optimizer: Optimizer,
        variables: Sequence[Variable],
        is_compiled: bool,
        has_watch: bool,
    ) -> None:
        """Begin a run; those of optimizers that were made before the latest ones end."""
        if self._is_new:
            self._is_new = False
            self._loops.clear()
            self._runs.end()
        is_scaled = isinstance(optimizer, self._keras.mixed_precision.LossScaleOptimizer)
        model = self._model_of(variables)
        loop = Loop(optimizer, variables, model, is_scaled, is_compiled)
        if self._options.watch is not None and has_watch:
            loop.watch = StepOperations(TensorFlowSeam(*loop.shown, is_step=True))
        unscaled = Unscaled(self._name, not is_compiled, eps_of(optimizer))
        scaler = optimizer if is_scaled else unscaled
        # After a step that is compiled, the weights are no evidence of how it failed.
        known = model if is_scaled or not is_compiled else None
        self._runs.begin(id(optimizer), scaler, known, loop.watch, has_watch)
        if not has_watch:
            voice.note(
                "of several replicas, losses and weights are watched. To have an operation and its "
                "line named, train on one, with all of the batch."
            )
        loop.run = self._runs.open.get(id(optimizer))
        self._loops[id(optimizer)] = loop

    def _model_of(self, variables: Sequence[Variable]) -> Model | None:
        """The smallest model or layer in memory that holds the most of some variables."""
        trained, layers = {id(each) for each in variables}, in_memory(self._keras.layers.Layer)
        held = ((each, {id(one) for one in each.trainable_variables}) for each in layers)
        found = [(len(own & trained), -len(own), each) for each, own in held if own & trained]
        return max(found, key=lambda each: each[:2])[2] if found else None


def _kept(given: Any) -> Any:
    """An argument that can be read twice: zip() gives its pairs once."""
    return list(given) if hasattr(given, "__next__") else given


def _pairs(optimizer: Optimizer, method: str, args: Any, kwargs: Any) -> list[tuple[Any, Any]]:
    """The gradients that are given to an optimizer, each with its variable; some may be None."""
    given = args[0] if args else next(iter(kwargs.values()))
    if method == "apply":
        variables = args[1] if len(args) > 1 else kwargs.get("trainable_variables")
        given = zip(given, variables or optimizer._trainable_variables, strict=False)
    return list(given)


def _divides(optimizer: Optimizer, method: str) -> bool:
    """Whether a step of a loss scaler divides the gradients by the scale, as in Keras 3."""
    if not hasattr(optimizer, "apply"):
        return False
    is_done = getattr(optimizer, "_gradients_have_been_unscaled", False)
    return method == "apply" or not is_done or optimizer._next_step_unscales


def _is_eager() -> bool:
    return bool(tensorflow().executing_eagerly())
