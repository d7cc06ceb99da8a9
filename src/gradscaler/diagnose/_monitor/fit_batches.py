"""The batch of each step of Keras' ``fit``, which is run again if it fails; and a callback."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial, reduce
from importlib import import_module
from inspect import signature
from itertools import islice, zip_longest
from typing import Any

import numpy as np

from gradscaler.diagnose._graph.guard import guarded
from gradscaler.diagnose._locate.locate import is_locating
from gradscaler.diagnose._locate.unnoticed import unnoticed
from gradscaler.diagnose._monitor.own_steps import is_own, up_to_optimizer
from gradscaler.diagnose._monitor.traced_scalers import ScalerState, policy_of, state_of
from gradscaler.diagnose._seams.keras import backend_of, package_of

Model = Any
Batch = Any
Variable = Any


class FitBatches:
    """Keeps the batches of the latest call in ``fit``, between ``start()`` and ``stop()``.

    The model's ``train_function`` takes an iterator. It gets one that holds the batches of one
    call, which are the same, so the compiled step is the same, too. With several replicas, a batch
    is the framework's own, and none is kept.

    Args:
        callback: one of a ``fit`` of Keras 3 or tf_keras.
        before: called with the model before each step, and with what takes its gradients. Of
            several steps in one execution, all come before the first.

    Attributes:
        latest: the batches, of which there are several with ``steps_per_execution``.
    """

    def __init__(
        self, callback: Any, before: Callable[[Model, Replay], object] | None = None
    ) -> None:
        self._model = callback.model
        self._params = getattr(callback, "params", None)  # the same in all callbacks of a fit
        self._before = None if before is None else guarded(before)
        self.latest: list[Batch] = []

    def start(self) -> None:
        """Keep batches from now on; the model has its train function by then."""
        function = self._model.train_function
        if function is None or num_replicas(self._model) > 1:
            return
        if getattr(function, "params", self) is not self._params:
            function = getattr(function, "of_gradscaler", function)  # of an interrupted fit
            self._see(function)
        self._model.train_function.listeners.append(self)

    def _see(self, function: Any) -> None:
        listeners: list[FitBatches] = []

        def seen(*args: Any) -> Any:
            batches = list(islice(iter(args[-1]), steps_of(self._model)))
            if not batches:
                raise StopIteration
            state = args[0] if len(args) > 1 else None
            given = self._as_given(args[-1], batches)
            build = partial(_build, self._model, function, given, batches[0])
            for each in tuple(listeners):  # one may stop meanwhile
                each._see_call(batches, state, build)
            return function(*args[:-1], given)

        seen.of_gradscaler, seen.params = function, self._params  # type: ignore[attr-defined]
        seen.listeners = listeners  # type: ignore[attr-defined]
        self._model.train_function = seen

    def _see_call(
        self, batches: list[Batch], state: Sequence[Any] | None, build: Callable[[], None]
    ) -> None:
        self.latest = batches
        if self._before is not None:
            for batch in batches:  # those after the first have the weights from before it
                self._before(self._model, Replay(self._model, batch, state, build))

    def _as_given(self, given: Any, batches: list[Batch]) -> Any:
        """Batches in an iterator of the kind that was given, or in a list in PyTorch."""
        if package_of(self._model) == "keras":
            return batches if backend_of(self._model) == "torch" else iter(batches)
        # Keras 2 compiles for a kind of iterator: it would take those of Python as constants.
        data = sys.modules["tensorflow"].data
        held = reduce(data.Dataset.concatenate, map(data.Dataset.from_tensors, batches))
        variant = data.experimental.to_variant(held)
        return iter(data.experimental.from_variant(variant, given.element_spec))

    def stop(self) -> None:
        """Keep none any more, and leave the model as it was."""
        function = self._model.train_function
        listeners = getattr(function, "listeners", [])
        if self in listeners:
            listeners.remove(self)
            if not listeners:
                self._model.train_function = function.of_gradscaler
        self.latest = []

    def replay_of(self, batch: Batch) -> tuple[Model, Callable[[], object]]:
        """The model, and a closure that takes the gradients of a batch again."""
        return self._model, Replay(self._model, batch).gradients


class Replay:
    """Takes the gradients of a model on a batch again.

    Args:
        model: the model.
        batch: the batch.
        state: the values of the model's variables during ``fit`` on JAX, where the variables
            themselves hold none; None if they do.
        build: creates the model's variables before its first step.

    Attributes:
        batch: the one given.
        build: the one given.
        loss: the loss; None before the gradients were taken.
        found: the gradients by the variables' names.
    """

    def __init__(
        self,
        model: Model,
        batch: Batch,
        state: Sequence[Any] | None = None,
        build: Callable[[], object] | None = None,
    ) -> None:
        self._model, self._state = model, state
        self.batch = batch
        self.build = build or (lambda: None)
        self.loss: Any = None
        self.found: dict[str, Any] = {}

    def gradients(self) -> object:
        """The loss and its gradients, which belong to no step of the training."""
        context = copy_context()
        context.run(is_locating.set, True)
        take = self._of_own_step if is_own(self._model) else self._of_loss
        with unnoticed():
            pairs = context.run(take)
        self.found = {_name(of): each for of, each in pairs if each is not None}
        return self.loss, list(self.found.values())

    def _of_own_step(self) -> list[tuple[Variable, Any]]:
        """The variables, and the gradients that a ``train_step`` of the model's own takes."""
        given: tuple[Any, ...] = (self.batch,)
        is_pure = backend_of(self._model) == "jax"
        if is_pure:
            given = tuple([each.value for each in held] for held in self._lists()), self.batch
        with up_to_optimizer(self._model) as pairs:
            made = self._model.train_step(*given)
        logs = made[0] if is_pure else made
        self.loss = logs.get("loss", 0.0) if isinstance(logs, dict) else 0.0
        return pairs

    def _of_loss(self) -> list[tuple[Variable, Any]]:
        """The variables, and the gradients of the loss."""
        trained = self._model.trainable_variables
        self.loss, gradients = getattr(self, f"_on_{backend_of(self._model)}")(trained)
        return list(zip(trained, gradients, strict=True))

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Where the model's variables have the values of the step, which ``fit`` takes on JAX."""
        taken = [(variable, variable._value, value) for variable, value in self._values()]
        try:
            for variable, _, value in taken:
                variable._value = value
            yield
        finally:
            for variable, before, _ in taken:
                variable._value = before

    def _lists(self) -> tuple[Sequence[Variable], ...]:
        """The variables of a state of JAX."""
        model, optimizer = self._model, self._model.optimizer
        return (
            model.trainable_variables,
            model.non_trainable_variables,
            optimizer.variables,
            model.metrics_variables,
        )

    def _values(self) -> Iterator[tuple[Variable, Any]]:
        if self._state is not None:
            for variables, values in zip(self._lists(), self._state, strict=False):
                yield from zip(variables, values, strict=True)

    def _loss(self) -> Any:
        package = package_of(self._model)
        parts = sys.modules[package].utils.unpack_x_y_sample_weight(self.batch)
        x, y, sample_weight = parts
        is_asked = package != "keras" or "training" in signature(self._model.call).parameters
        outputs = self._model(x, training=True) if is_asked else self._model(x)
        told = {"training": True} if package == "keras" else {}
        return self._model.compute_loss(x, y, outputs, sample_weight, **told)

    def _on_tensorflow(self, trained: Sequence[Variable]) -> tuple[Any, Sequence[Any]]:
        # Keras 2 would convert a loss to another file, whose lines are none of the user's.
        autograph = import_module("tensorflow.python.autograph.core.ag_ctx")
        as_written = autograph.ControlStatusCtx(status=autograph.Status.DISABLED)
        with as_written, sys.modules["tensorflow"].GradientTape() as tape:
            loss = self._loss()
        return loss, tape.gradient(loss, trained)

    def _on_torch(self, trained: Sequence[Variable]) -> tuple[Any, Sequence[Any]]:
        loss = self._loss()
        loss.backward()
        return loss, [variable.value.grad for variable in trained]

    def _on_jax(self, trained: Sequence[Variable]) -> tuple[Any, Sequence[Any]]:
        def loss_of(values: Sequence[Any]) -> Any:
            mapping = list(zip(trained, values, strict=True))
            with sys.modules["keras"].StatelessScope(state_mapping=mapping):
                return self._loss()

        values = [variable.value for variable in trained]
        found: tuple[Any, Sequence[Any]] = sys.modules["jax"].value_and_grad(loss_of)(values)
        return found


def callback_of(framework: str, scaler: object, record: Callable[..., None]) -> Any:
    """A callback of Keras or tf_keras that records each step of ``fit``, and its failing batch."""
    keras: Any = sys.modules[framework]

    class Recording(keras.callbacks.Callback):  # type: ignore[misc] # untyped base
        mean = 0.0  # of the losses of the epoch so far
        batches: FitBatches | None = None
        state: ScalerState | None = None  # of the scaler, after the latest call of several steps

        @guarded
        def on_train_begin(self, logs: object = None) -> None:
            self.batches = FitBatches(self)
            self.batches.start()
            if steps_of(self.model) > 1:
                self.state = state_of(scaler)

        @guarded
        def on_train_end(self, logs: object = None) -> None:
            if self.batches is not None:
                self.batches.stop()

        def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
            self.mean = 0.0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            for step in self._look(logs) or ():
                record(**step)

        @guarded
        def _look(self, logs: Any) -> list[dict[str, Any]]:
            """What is recorded of each step of the latest call."""
            model = self.model  # on JAX, reading it updates the optimizer's variables
            before, self.mean = self.mean, float(np.mean((logs or {}).get("loss", 0.0)))
            is_bad = math.isfinite(before) and not math.isfinite(self.mean)
            seen = self.batches
            replays = [partial(seen.replay_of, each) for each in seen.latest] if seen else []
            states: list[Any] = [None]
            if self.state is None:  # Keras may decide later to take several steps in a call
                replays = replays[-1:]
            else:
                first, self.state = self.state, state_of(scaler)
                backoff = getattr(policy_of(scaler), "backoff_factor", 0.5)
                states = first.each_of(len(replays) or steps_of(model), self.state, backoff)
            steps: list[dict[str, Any]] = [
                {"scaler": state, "replay": replay}
                for state, replay in zip_longest(states, replays)
            ]
            steps[-1]["loss"] = self.mean if is_bad else None
            return steps

    return Recording()


def steps_of(model: Model) -> int:
    """How many steps of a training one call of Keras takes."""
    if package_of(model) == "keras":
        return int(model.steps_per_execution)
    steps = model._steps_per_execution
    return 1 if steps is None else int(steps.numpy())  # with replicas, one for each


def _build(model: Model, function: Any, given: Iterator[Batch], batch: Batch) -> None:
    """Create the variables of a model without an input shape, as its first step would."""
    if package_of(model) == "keras":
        model._symbolic_build(data_batch=batch)
    elif hasattr(function, "get_concrete_function"):  # else Keras 2 runs eagerly
        function.get_concrete_function(given)  # the first step takes what this traces


def num_replicas(model: Model) -> int:
    """How many replicas of a model TensorFlow trains, each on a part of the batch."""
    strategy = getattr(model, "distribute_strategy", None)
    return int(getattr(strategy, "num_replicas_in_sync", 1))


def _name(variable: Variable) -> str:
    """The name of a variable: its path in Keras 3."""
    return str(getattr(variable, "path", None) or variable.name.partition(":")[0])
