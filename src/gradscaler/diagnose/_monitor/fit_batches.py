"""The batch of each step of Keras' ``fit``, which is run again if it fails; and a callback."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from functools import reduce
from inspect import signature
from itertools import islice
from typing import Any

import numpy as np

from gradscaler.diagnose._graph.guard import guarded
from gradscaler.diagnose._locate.locate import is_locating
from gradscaler.diagnose._locate.unnoticed import unnoticed
from gradscaler.diagnose._monitor.own_steps import is_own, up_to_optimizer
from gradscaler.diagnose._seams.keras import backend_of, package_of

Model = Any
Batch = Any
Variable = Any


class FitBatches:
    """Keeps the latest batch of a model's ``fit``, between ``start()`` and ``stop()``.

    The model's ``train_function`` takes an iterator. It gets one that holds the batches of one
    call, which are the same, so the compiled step is the same, too. With several replicas, a batch
    is the framework's own, and none is kept.

    Args:
        model: a compiled model of Keras 3 or tf_keras.
        before: called with the model before each step, and with what takes its gradients. Of
            several steps in one execution, all come before the first.
    """

    def __init__(
        self, model: Model, before: Callable[[Model, Replay], object] | None = None
    ) -> None:
        self._model, self._before = model, guarded(before or _nothing)
        self._function: Any = None
        self.latest: Batch | None = None

    def start(self) -> None:
        """Keep batches from now on; the model has its train function by then."""
        function = self._model.train_function
        function = getattr(function, "of_gradscaler", function)  # of a fit that was interrupted
        if function is None or self._function is not None or _num_replicas(self._model) > 1:
            return
        self._function = function

        def seen(*args: Any) -> Any:
            batches = list(islice(iter(args[-1]), self._num_steps))
            if not batches:
                raise StopIteration
            self.latest = batches[-1]
            for batch in batches:  # those after the first have the weights from before it
                state = args[0] if len(args) > 1 else None
                self._before(self._model, Replay(self._model, batch, state))
            return function(*args[:-1], self._as_given(args[-1], batches))

        seen.of_gradscaler = function  # type: ignore[attr-defined]
        self._model.train_function = seen

    @property
    def _num_steps(self) -> int:
        """How many steps one call takes."""
        if package_of(self._model) == "keras":
            return int(self._model.steps_per_execution)
        steps = self._model._steps_per_execution
        return 1 if steps is None else int(steps)

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
        if self._function is not None:
            self._model.train_function, self._function = self._function, None
        self.latest = None

    def replay(self) -> tuple[Model, Callable[[], object]]:
        """The model, and a closure that takes the gradients of the latest batch again."""
        return self._model, Replay(self._model, self.latest).gradients


class Replay:
    """Takes the gradients of a model on a batch again.

    Args:
        model: the model.
        batch: the batch.
        state: the values of the model's variables during ``fit`` on JAX, where the variables
            themselves hold none; None if they do.

    Attributes:
        loss: the loss; None before the gradients were taken.
        found: the gradients by the variables' names.
    """

    def __init__(self, model: Model, batch: Batch, state: Sequence[Any] | None = None) -> None:
        self._model, self._state = model, state
        self._batch = batch
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
        given: tuple[Any, ...] = (self._batch,)
        is_pure = backend_of(self._model) == "jax"
        if is_pure:
            given = tuple([each.value for each in held] for held in self._lists()), self._batch
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
        parts = sys.modules[package].utils.unpack_x_y_sample_weight(self._batch)
        x, y, sample_weight = parts
        is_asked = package != "keras" or "training" in signature(self._model.call).parameters
        outputs = self._model(x, training=True) if is_asked else self._model(x)
        told = {"training": True} if package == "keras" else {}
        return self._model.compute_loss(x, y, outputs, sample_weight, **told)

    def _on_tensorflow(self, trained: Sequence[Variable]) -> tuple[Any, Sequence[Any]]:
        with sys.modules["tensorflow"].GradientTape() as tape:
            loss = self._loss()
        return loss, tape.gradient(loss, trained)

    def _on_torch(self, trained: Sequence[Variable]) -> tuple[Any, Sequence[Any]]:
        loss = self._loss()
        if not bool(loss.isfinite().all()):  # its gradients say nothing about where that began
            return loss, [None for _ in trained]
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


def callback_of(framework: str, record: Callable[..., None]) -> Any:
    """A callback of Keras or tf_keras that records each step of ``fit``, and its failing batch."""
    keras: Any = sys.modules[framework]

    class Recording(keras.callbacks.Callback):  # type: ignore[misc] # untyped base
        mean = 0.0  # of the losses of the epoch so far
        batches: FitBatches | None = None

        @guarded
        def on_train_begin(self, logs: object = None) -> None:
            self.batches = FitBatches(self.model)
            self.batches.start()

        @guarded
        def on_train_end(self, logs: object = None) -> None:
            if self.batches is not None:
                self.batches.stop()

        def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
            self.mean = 0.0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if (step := self._look(logs)) is not None:
                loss, replay = step
                record(loss=loss, replay=replay)

        @guarded
        def _look(self, logs: Any) -> tuple[float | None, Callable[[], object] | None]:
            _ = self.model  # on JAX, reading it updates the optimizer's variables
            before, self.mean = self.mean, float(np.mean((logs or {}).get("loss", 0.0)))
            is_bad = math.isfinite(before) and not math.isfinite(self.mean)
            seen = self.batches
            replay = None if seen is None or seen.latest is None else seen.replay
            return (self.mean if is_bad else None), replay

    return Recording()


def _nothing(*_: object) -> None:
    """Do nothing."""


def _num_replicas(model: Model) -> int:
    strategy = getattr(model, "distribute_strategy", None)
    return int(getattr(strategy, "num_replicas_in_sync", 1))


def _name(variable: Variable) -> str:
    """The name of a variable: its path in Keras 3."""
    return str(getattr(variable, "path", None) or variable.name.partition(":")[0])
