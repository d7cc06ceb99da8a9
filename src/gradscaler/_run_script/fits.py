"""Keras' ``fit`` and ``train_on_batch``, whatever the backend: callbacks that see each step."""

from __future__ import annotations

import argparse
import atexit
import math
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from gradscaler._run_script.files import RunFiles
from gradscaler._run_script.fit_data import FirstBatch
from gradscaler._run_script.fit_gradients import FitGradients, may_keep_gradients
from gradscaler._run_script.fit_losses import (
    broadcast,
    dead_output,
    of_labels,
    of_logits,
    of_one_output,
    swapped,
)
from gradscaler._run_script.fit_rates import FitRates
from gradscaler._run_script.fit_weights import FitWeights, of_narrow_weights
from gradscaler._run_script.options import MOST_RUNS, STOPPED
from gradscaler._run_script.termination import before_termination
from gradscaler._run_script.undo import on_stop, replace
from gradscaler._run_script.voice import attempt, voice
from gradscaler._run_script.watched_run import WatchedRun
from gradscaler.diagnose import Finding, Located, Verdict, inspect, locate
from gradscaler.diagnose._findings import judge
from gradscaler.diagnose._findings.evidence import Evidence
from gradscaler.diagnose._findings.frameworks import Framework, framework_named
from gradscaler.diagnose._graph.guard import guarded
from gradscaler.diagnose._monitor.fit_batches import FitBatches, Replay, num_replicas, steps_of
from gradscaler.diagnose._monitor.recorder import RecordedParameters
from gradscaler.diagnose._monitor.streaks import MOST_NONFINITE
from gradscaler.diagnose._monitor.traced_scalers import number_of
from gradscaler.diagnose._record.lines import BadStep
from gradscaler.diagnose._record.source import show_source_of
from gradscaler.diagnose._record.thresholds import FELL, LONG, ROSE
from gradscaler.diagnose._seams.keras import backend_of

_CURES = (
    "Look at the batch, at logarithms, roots and divisions by 0 in the loss, lower the learning "
    "rate, and clip gradients (clipnorm)."
)


# Keras may tell the loss of a batch after that of the next one, so the step may be one too late.
_STEPS_BEFORE = 2
_ON_REPLICAS = (
    "with several replicas, Keras gives no batch. Train without tf.distribute, with a batch as "
    "large as that of all replicas."
)


class Fits:
    """Looks at the losses of each ``fit``, and puts a monitor on its loss-scaling optimizer.

    Keras' own LossScaleOptimizer stays as it is, so that a saved model can be loaded without
    gradscaler.

    Args:
        name: the package, ``"keras"`` or ``"tf_keras"``.
        options: those of the command line.
    """

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self._name, self._keras = name, _package(name)
        self._options, self._files = options, RunFiles(options)
        self._process, self._is_over = os.getpid(), False
        self._losses = WeakKeyDictionary[Any, Losses]()  # by optimizer
        self._scaled = WeakKeyDictionary[Any, WatchedRun]()  # the latest keeps its model alive
        self._watched = WeakKeyDictionary[Any, FitWatch]()  # by optimizer
        self._gradients = WeakKeyDictionary[Any, FitGradients]()  # by optimizer
        self._batches = WeakKeyDictionary[Any, _Batches]()  # by optimizer
        self._to_end: list[Losses] = []

    def start(self) -> None:
        """Watch each ``fit`` and ``train_on_batch`` from now on."""
        kind, model = self._keras.callbacks.CallbackList, self._keras.Model
        initialize, callbacks_for = kind.__init__, guarded(self._callbacks_for)
        train = model.train_on_batch
        begin, end = guarded(self._begin_call), guarded(self._end_call)
        nested = getattr(self._keras, "tree", None) or sys.modules["tensorflow"].nest
        flatten = nested.flatten

        @wraps(initialize)
        def initialized(own: Any, callbacks: Any = None, *args: Any, **kwargs: Any) -> None:
            users = flatten(callbacks or [])
            ours = callbacks_for(kwargs.get("model"), users) or []
            initialize(own, [*users, *ours], *args, **kwargs)

        @wraps(train)
        def trained(own: Any, *args: Any, **kwargs: Any) -> Any:
            callbacks, made = begin(own), None
            try:
                made = train(own, *args, **kwargs)
            finally:
                end(own, callbacks, made)
            return made

        replace(kind, "__init__", initialized)
        replace(model, "train_on_batch", trained)
        on_stop.callback(self._stop)

    def _begin_call(self, model: Any) -> list[Any]:
        """The callbacks of a call of ``train_on_batch``, which get its batch."""
        callbacks, params = self._callbacks_for(model), dict[str, Any]()
        if callbacks:
            model.make_train_function()
        for each in callbacks:
            each.set_params(params)
            each.set_model(model)
            each.on_train_begin()
        return callbacks

    def _end_call(self, model: Any, callbacks: list[Any] | None, made: Any) -> None:
        """Show callbacks what a call returned; None if it has raised."""
        logs = {} if made is None else self._logs(model, made)
        for each in callbacks or ():
            if made is not None:
                each.on_train_batch_end(None, logs)
            each.on_train_end()

    def _logs(self, model: Any, made: Any) -> dict[str, Any]:
        """What a call returned, by name: a number, or a list, has the names of the metrics."""
        if isinstance(made, Mapping):
            return dict(made)
        values = made if isinstance(made, (list, tuple)) else [made]
        names = model.metrics_names or ["loss"]
        return dict(zip(names, values, strict=False))

    def _stop(self) -> None:
        self._end()
        atexit.unregister(self._end)
        self._is_over = True

    def _callbacks_for(self, model: Any, users: Sequence[Any] = ()) -> list[Any]:
        optimizer = getattr(model, "optimizer", None)
        if optimizer is None or self._is_over or os.getpid() != self._process:
            return []
        if optimizer not in self._losses and len(self._to_end) < MOST_RUNS:
            attempt(partial(self._begin, optimizer, model))
        if optimizer in self._losses:
            self._losses[optimizer].users = users
        of = self._gradients, self._batches, self._losses, self._scaled, self._watched
        runs = [each.get(optimizer) for each in of]
        callbacks = [run.callback() for run in runs if run is not None]
        for each in callbacks:
            # Keras 2 gives others what it would give them without ours, and times none that has a
            # name of its own.
            each._supports_tf_logs, type(each).__name__ = True, "Callback"
        return callbacks

    def _begin(self, optimizer: Any, model: Any) -> None:
        if not self._options.is_watched:
            self._options.is_watched = True
            before_termination(self._end)
        is_scaled = isinstance(optimizer, self._keras.mixed_precision.LossScaleOptimizer)
        watch = None
        if self._options.watch is not None:
            self._options.has_watched = True
            watch = FitWatch(self._name, self._options.watch, is_scaled)
            self._watched[optimizer] = watch
        losses = Losses(self._name, is_scaled, self._options, watch)
        self._losses[optimizer] = losses
        self._batches[optimizer] = _Batches(losses.batch, self._keras)
        self._to_end.append(losses)
        if is_scaled:
            self._end_scaled()
            given = optimizer, model, self._files, self._options, _framework(self._name)
            self._scaled[optimizer] = WatchedRun(*given)
        else:
            self._options.latest = losses
        if may_keep_gradients(model):
            note = partial(self._scaled[optimizer].note_unzeroed, "") if is_scaled else bool
            losses.gradients = self._gradients[optimizer] = FitGradients(note)
        atexit.unregister(self._end)
        atexit.register(self._end)  # before monitors close by themselves

    def _end_scaled(self) -> None:
        for run in list(self._scaled.values()):
            run.end()
        self._scaled.clear()

    def _end(self) -> None:
        if os.getpid() == self._process:
            self._end_scaled()
            while self._to_end:
                self._to_end.pop(0).end()


class _Batches(NamedTuple):
    """The first batch, and the package that looks at it."""

    first: FirstBatch
    keras: Any

    def callback(self) -> Any:
        """A callback that gets it."""
        return self.first.callback(self.keras.callbacks.Callback)


class _Bad(NamedTuple):
    """A loss that is not finite.

    Attributes:
        epoch: of ``fit``; 0 in ``train_on_batch``.
        batch: of that epoch, or the number of the call.
        loss: its value.
        name: its name.
        num_steps: how many batches, with this one as the last, Keras tells one loss for.
    """

    epoch: int
    batch: int
    loss: float
    name: str
    num_steps: int = 1

    def __str__(self) -> str:
        where = f"batch {self.batch} of epoch {self.epoch}"
        if self.num_steps > 1:
            where = f"one of batches {self.batch - self.num_steps + 1} to {where[6:]}"
        return (
            f"The {self.name} is {self.loss:g} at {where if self.epoch else f'call {self.batch}'}"
        )


class Losses:
    """The losses that Keras gives its callbacks: the mean of an epoch so far.

    Keras may call a callback of batches from several threads, while it trains on. So a later batch
    may come first, and the model can be read only at the end of an epoch.
    """

    def __init__(
        self, name: str, is_scaled: bool, options: argparse.Namespace, watch: FitWatch | None
    ) -> None:
        self._name, self._watch = name, watch
        self._may_stop, self._is_scaled = options.stop and not is_scaled, is_scaled
        self._proposes_watch = options.watch is None and not is_scaled
        self._again, self._has_replicas = options.again, False
        self._num_epochs = self._num_steps = 0  # the steps are those of epochs that have ended
        self._num_calls = 0  # of train_on_batch
        self._first: _Bad | None = None
        self._weights = ""  # a clause about them after that
        self._cures = _CURES  # of the first
        self._advice = ""  # that was not said on the way
        self._narrow = ""  # what says that float16 loses what the optimizer divides by
        self._origin: list[str] = []  # the line that proposes to watch the first
        self._is_earlier = False  # whether the first came after a later one, which was told
        self._begun: tuple[int, float] | None = None  # the first batch of epoch 1, and its loss
        self._latest: float | None = None  # the mean loss of the latest epoch
        self._first_mean: float | None = None  # that of the first epoch
        self.gradients: FitGradients | None = None  # which a step of the model's own may keep
        self.batch, self._states, self._rates = FirstBatch(), FitWeights(), FitRates()
        self.users: Sequence[Any] = ()  # the callbacks of the user's
        self._swapped = self._of_logits = self._broadcast = (
            ""  # mistakes in the loss that compile() was given
        )
        self._dead = ""  # that the last layer gives nothing but 0
        self._of_one = ""  # or nothing but 1

    def callback(self) -> Any:
        """A callback that looks at the loss after each batch, which is on the host then."""
        losses = self

        class Looking(_package(self._name).callbacks.Callback):  # type: ignore[misc] # untyped base
            async_safe = not losses._may_stop
            epoch = steps = 0
            num_steps = 1  # of a call
            trained: Any = None  # the model: on JAX, reading it here in a step would break that

            @guarded
            def on_train_begin(self, logs: Any = None) -> None:
                self.trained = self.model
                self.num_steps = steps_of(self.model)
                losses._has_replicas = num_replicas(self.model) > 1
                losses._see_begin(self.model, self.params)

            @guarded
            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                losses._num_epochs += 1
                self.epoch, self.steps = epoch + 1, 0
                losses._rates.begin(self.model.optimizer)

            @guarded
            def on_train_batch_end(self, batch: int | None, logs: Any = None) -> None:
                name, loss = _loss_in(logs or {})
                if batch is None:
                    losses._see_call(self.model, name, loss)
                    return
                # The last call of an epoch may take fewer steps than Keras counts.
                params = getattr(self, "params", None) or {}  # a loop of the user's has none
                end = min(batch + 1, params.get("steps") or batch + 1)
                self.steps = max(self.steps, end)
                if self.epoch == 1:
                    losses._begun = min(losses._begun or (batch, loss), (batch, loss))
                if not math.isfinite(loss):
                    num_steps = min(self.num_steps - (batch + 1 - end), end)
                    losses._see_bad(_Bad(self.epoch, end, loss, name, num_steps), self.trained)

            @guarded
            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                first, where = losses._num_steps + 1, f" (epoch {self.epoch})"
                losses._rates.end(self.model.optimizer, losses.users, first, where)
                losses._num_steps += self.steps
                if logs and "loss" in logs:
                    losses._latest = float(np.mean(logs["loss"]))
                    if losses._num_epochs == 1:
                        losses._first_mean = losses._latest
                losses._look_at(self.model, "at the end of the epoch")
                losses._see_weights(self.model)
                losses._see_shapes(self.model)

        return Looking()

    def _see_begin(self, model: Any, params: Any) -> None:
        """See a model before a fit; a call of ``train_on_batch`` has no parameters of a fit."""
        if not self._num_steps:
            self._swapped = swapped(model)
            self._of_logits = of_logits(model)
            self._of_one = of_one_output(model)
            for each in filter(None, [self._of_one, self._of_logits]):
                voice.tell(each)
        if params:
            self._see_weights(model)

    def _see_shapes(self, model: Any) -> None:
        """See once whether the loss compares each output with each label."""
        if self._num_epochs > 1:
            return
        self._broadcast = broadcast(model, self.batch.labels)
        if self._broadcast:
            voice.tell(self._broadcast)

    def _see_weights(self, model: Any) -> None:
        """See a model's weights before the first epoch, and at the end of each."""
        self._narrow = of_narrow_weights(model)
        if self._first is not None or self._is_scaled:
            return
        was_told = bool(self._states.bad)
        self._states.see(model, self._num_epochs)
        if self._states.have_stood and self.batch.inputs is not None:
            self._dead, self.batch.inputs = dead_output(model, self.batch.inputs), None
        if self._states.bad and not was_told:
            voice.tell(" ".join(filter(None, [self._states.bad, self.batch.text])))

    def _see_call(self, model: Any, name: str, loss: float) -> None:
        """See the loss of a call of ``train_on_batch``, after which the model can be read."""
        self._num_calls += 1
        self._num_steps += 1
        self._begun = self._begun or (0, loss)
        self._latest = loss
        self._rates.end(model.optimizer, (), self._num_steps)
        self._rates.begin(model.optimizer)  # of the next call
        if not math.isfinite(loss):
            try:
                self._see_bad(_Bad(0, self._num_calls, loss, name), model)
            finally:
                self._look_at(model, "after it")

    def _see_bad(self, found: _Bad, model: Any) -> None:
        is_first, self._first = self._first is None, min(self._first or found, found)
        if self._first is found:
            self._origin = self._origin_of(self._num_seen(found))
            self._is_earlier, self._narrow = not is_first, of_narrow_weights(model)
        cures = self._swapped or self.batch.text or self._of_eps or _CURES
        self._cures = cures if is_first else self._cures
        if is_first and not self._cause and not voice.tell(f"{found}. {cures}", *self._origin):
            self._advice = f" {cures}"
        if self._may_stop:
            raise SystemExit(STOPPED)

    def _num_seen(self, bad: _Bad) -> int:
        """The number of a step whose loss is not finite."""
        return self._num_steps + bad.batch * bool(bad.epoch)

    @property
    def _of_eps(self) -> str:
        """What the optimizer's eps may have done; empty if the loss is bad before a step."""
        has_begun = self._begun is not None and math.isfinite(self._begun[1])
        return self._narrow if has_begun else ""

    @property
    def _cause(self) -> str:
        """What a watched step has shown, as a sentence; empty if nothing."""
        return "" if self._watch is None or self._watch.cause is None else f" {self._watch.cause}"

    def _origin_of(self, step: int) -> list[str]:
        """The line that proposes to watch a step."""
        origin = f"origin: {self._again.format(max(step, 2))} names what made it"
        origin += ", on one replica with all of the batch" * self._has_replicas
        return [origin] * self._proposes_watch

    def _look_at(self, model: Any, when: str) -> None:
        """See once whether a loss that was not finite has left the weights finite."""
        if self._first is None or self._weights:
            return
        bad = next(iter(RecordedParameters(model).nonfinite()), None)
        weights = "all weights were finite" if bad is None else f"{bad.name} was not finite"
        self._weights = f"; {weights} {when}"

    @property
    def verdict(self) -> Verdict | None:
        """What the losses show so far; None before the first."""
        if self._first is not None:
            kind, cause = "loss", f"{self._first}{self._weights}."
            action = self._cause.strip() or self._cures
        elif self._begun is not None:
            found = None if self.gradients is None else self.gradients.finding
            kind = "misuse" if self._mistakes(found) else "normal"
            kind = "parameter" if self._states.bad else kind
            cause, action = f"The losses are finite{self._went}.", self._said_of_finite(found)
        else:
            return None
        return Verdict(kind, f"{cause} {action}".rstrip(), None, (Finding(kind, cause, action),))

    @property
    def html(self) -> str:
        """The verdict in a notebook's output."""
        return "" if self.verdict is None else self.verdict._repr_html_()

    def report(self, _: Path) -> None:
        """Raise a ValueError, as no file has the losses."""
        raise ValueError(
            "there is no run file to report on: fit and train_on_batch have one only with a "
            "LossScaleOptimizer"
        )

    def end(self) -> None:
        """Print what the losses show, unless they are finite and a monitor gives a verdict."""
        count, of = self._num_epochs, "epoch"
        if not count:
            count, of = self._num_calls, "call"
        where = "fit" if self._num_epochs else "train_on_batch"
        after = f"after {count:,} {of}{'s' * (count != 1)} of {where}"
        found = None if self.gradients is None else self.gradients.finding
        if self._first is not None:
            later = ", though Keras told a later one before" * self._is_earlier
            first = f"{self._first}, the first that is not finite{later}{self._weights}"
            lines = self._origin if self._advice or self._is_earlier else []
            mistake = f" {found.text}" if found else ""
            why = self._cause or self._advice or f" {self._swapped or self._of_eps}".rstrip()
            voice.conclude(f"{after}: {first}.{why}{mistake}", *lines)
        elif count and not self._is_scaled:
            advice = self._said_of_finite(found)
            voice.conclude(f"{after}: the losses are finite{self._went}. {advice}".rstrip())
        self.users = ()  # which may keep the model alive

    @property
    def _went(self) -> str:
        """A clause on how the losses went, which Keras may not have told."""
        if self._begun is None or self._latest is None:
            return ""
        if self._num_epochs < 2 or self._first_mean is None:
            return f", and went from {self._begun[1]:g} to {self._latest:g}"
        return f", and the mean of an epoch went from {self._first_mean:g} to {self._latest:g}"

    def _said_of_finite(self, found: Finding | None) -> str:
        """What else is to be said where all losses are finite; empty if nothing is."""
        if self._states.bad:
            return " ".join(filter(None, [self._states.bad, self.batch.text]))
        return self._mistakes(found) or self._if_not_fallen

    def _mistakes(self, found: Finding | None) -> str:
        """What is wrong though all losses and weights are finite; empty if nothing was seen."""
        causes = [found.text if found else "", self._of_logits, self._broadcast]
        rates = self._rates.still(self._num_steps)
        states = self._states.still(self._num_steps, self._rates.latest)
        causes += [self._of_one or rates or (states and self._dead) or states]
        causes += [self._swapped] if self._if_not_fallen else []
        return " ".join(filter(None, causes))

    @property
    def _if_not_fallen(self) -> str:
        """What to do if the losses rose, or did not fall in many steps; empty if they fell."""
        if self._begun is None or self._latest is None:
            return ""
        first = self._begun[1]
        if self._latest > ROSE * abs(first):
            lower = "lower the learning rate, and scale inputs."
            return self._of_eps or f"If they should have fallen, {lower}"
        if self._num_steps < LONG or self._latest < first - FELL * abs(first):
            return ""
        return "If they should have fallen, look at the learning rate, inputs and targets."


class FitWatch:
    """Watches the operations of a step of ``fit``, and of the two before it.

    A loss of NaN shows weights that an earlier step has lost, whose own loss is finite. Each of the
    three is run once more, eagerly, before it is run by ``fit``.

    Args:
        name: the package, ``"keras"`` or ``"tf_keras"``.
        step: its number, in all calls of ``fit`` and ``train_on_batch`` with one optimizer.
        is_scaled: whether that optimizer skips a step whose gradients are not finite.
    """

    def __init__(self, name: str, step: int, is_scaled: bool) -> None:
        self._name = name
        self._step, self._is_scaled, self._num_steps = step, is_scaled, 0
        self.cause: str | None = None  # of its failure, which was told

    def callback(self) -> Any:
        """A callback that gets each batch before its step."""
        watch = self

        class Watching(_package(self._name).callbacks.Callback):  # type: ignore[misc] # untyped base
            batches: FitBatches | None = None

            @guarded
            def on_train_begin(self, logs: Any = None) -> None:
                if num_replicas(self.model) > 1 and watch._step:
                    voice.note(f"step {watch._step:,} is not watched: {_ON_REPLICAS}")
                    watch._step = 0
                self.batches = FitBatches(self, watch._before)
                self.batches.start()

            @guarded
            def on_train_end(self, logs: Any = None) -> None:
                if self.batches is not None:
                    self.batches.stop()

        return Watching()

    def _before(self, model: Any, replay: Replay) -> None:
        self._num_steps += 1
        num_before = _STEPS_BEFORE + steps_of(model) - 1  # Keras tells one loss for each call
        if not self._step - num_before <= self._num_steps <= self._step:
            return
        try:
            if not model.built:
                replay.build()
            located = self._locate(model, replay)
        except Exception as error:  # such as for a batch that only a step of the model's own takes
            voice.note(f"step {self._step:,} is not watched: {error}")
            self._step = 0
            return
        if located is not None:
            self._step = 0
            loss, found = number_of(replay.loss), inspect(replay.found)
            bad = BadStep(
                self._num_steps,
                loss,
                found[:MOST_NONFINITE],
                located=located,
                is_left_out=self._is_scaled,
            )
            evidence = Evidence(
                self._num_steps, 0, has_scaler=False, framework=_framework(self._name), bad_step=bad
            )
            verdict = judge(evidence)
            self.cause = verdict.findings[0].cause
            text, narrow = of_labels(model, replay.batch, located), ""
            if self._num_steps > 1:  # else no step has changed the weights
                narrow = of_narrow_weights(model)
            is_seen = not text and not (narrow and located.line is None)  # else no clamp helps
            said = [verdict.text if is_seen else self.cause, text or narrow]
            self.cause = " ".join(filter(None, [self.cause, text or narrow]))
            voice.note(f"step watched: {' '.join(filter(None, said))}")
            show_source_of(located.line)
        elif self._num_steps == self._step:
            voice.note("step watched: no operation made an Inf or NaN")

    def _locate(self, model: Any, replay: Replay) -> Located | None:
        with replay.in_step():
            located = locate(model, replay.gradients)
            if located is not None and backend_of(model) == "jax":
                replay.gradients()  # JAX has only traced them
            return located


def _loss_in(logs: Mapping[str, Any]) -> tuple[str, float]:
    """The loss of a step, and its name; of several, as of a GAN, one that is not finite."""
    names = ["loss"] if "loss" in logs else [name for name in logs if "loss" in name]
    losses = {name: float(np.mean(logs[name])) for name in names}  # of each row, if of one's own
    bad = (pair for pair in losses.items() if not math.isfinite(pair[1]))
    return next(bad, next(iter(losses.items()), ("loss", 0.0)))


def _framework(name: str) -> Framework:
    return framework_named(name, {_package(name).backend.backend(): ""})


def _package(name: str) -> Any:
    """Keras or tf_keras, which the script has imported."""
    return sys.modules[name]
