"""The scale of an optimizer, and what is multiplied and divided by it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
from keras import ops

from gradscaler._keras_like import arguments
from gradscaler._keras_like.where import where_or_choose
from gradscaler.keras import operations
from gradscaler.policies import FixedScale, Rule, ScaleState

Tensor = Any
Variable = Any


class Scale:
    """Mixin of an optimizer: a policy, and the variables that it moves.

    They go by the names that Keras' own wrapper has for them, and are there in a static optimizer,
    too, so that one can load what the other saved.
    """

    _policy: Rule
    built: bool
    name: str
    add_variable: Any
    _trainable_variables: list[Variable]
    _overwrite_variable_with_gradient: Any

    def _create_variables(self) -> None:
        self.step_counter = self.add_variable((), dtype="int", name="step_counter")
        with keras.name_scope(self.name, caller=self):
            self.dynamic_scale = keras.Variable(
                self.initial_scale,
                dtype="float32",
                trainable=False,
                autocast=False,  # in a layer, whose float16 may not hold the scale
                name="dynamic_scale",
            )
        if getattr(self._policy, "hysteresis", 1) > 1:
            self.nonfinite_counter = self.add_variable((), dtype="int", name="nonfinite_counter")
        self._loss_has_been_scaled = False
        # Compiled code sets these when it is traced alone, so the first is never taken back.
        self._gradients_have_been_unscaled = False
        self._next_step_unscales = False

    @property
    def policy(self) -> Rule:
        """The rule by which the scale moves."""
        return self._policy

    @property
    def dynamic(self) -> bool:
        """Whether the scale moves."""
        return not isinstance(self._policy, FixedScale)

    @property
    def initial_scale(self) -> float:
        """The scale before the first step; the scale itself if it does not move."""
        return arguments.initial_scale_of(self._policy)

    @initial_scale.setter
    def initial_scale(self, initial_scale: float) -> None:
        self._policy = arguments.with_initial_scale(self._policy, initial_scale)
        if hasattr(self, "dynamic_scale") and not self.built:
            self.dynamic_scale.assign(self.initial_scale)

    @property
    def dynamic_growth_steps(self) -> int | None:
        """Finite steps in a row before the scale grows; None if it does not move.

        A compiled training step keeps the number that it was compiled with.
        """
        return arguments.growth_steps_of(self._policy)

    @dynamic_growth_steps.setter
    def dynamic_growth_steps(self, dynamic_growth_steps: int | None) -> None:
        self._policy = arguments.with_growth_steps(self._policy, dynamic_growth_steps)

    @property
    def dynamic_counter(self) -> Tensor | None:
        """Finite steps since the scale moved or a step was skipped; None if the scale is fixed.

        An integer scalar variable.
        """
        return self.step_counter if self.dynamic else None

    @property
    def loss_scale(self) -> Tensor:
        """The current scale, a float32 scalar tensor that stays as it is when the scale moves."""
        return ops.copy(self._scale)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss times the scale, in float32 at least; ``apply`` then divides the gradients."""
        self._next_step_unscales = True
        return self._scaled(loss)

    def get_scaled_loss(self, loss: Any) -> Any:
        """The loss times the scale, in float32 at least; of a callable, one that returns it."""
        if callable(loss):
            return lambda: self._scaled(loss())
        return self._scaled(loss)

    def get_unscaled_gradients(self, grads: Iterable[Tensor | None]) -> list[Tensor | None]:
        """The gradients divided by the scale, each of the dtype and kind that it was; None is None.

        ``apply_gradients`` takes gradients as they are from then on. Only in the step after
        ``scale_loss``, and in ``apply``, they are divided.
        """
        self._gradients_have_been_unscaled = True
        self._next_step_unscales = False
        scale = self._scale
        return [
            None if g is None else ops.cast(operations.divide(g, scale), g.dtype) for g in grads
        ]

    @property
    def _scale(self) -> Tensor:
        return ops.convert_to_tensor(
            self.dynamic_scale if self.dynamic else self.initial_scale, "float32"
        )

    def _scaled(self, loss: Tensor) -> Tensor:
        self._loss_has_been_scaled = True
        return operations.multiply(loss, self._scale)

    def _unscaled(self, grads: list[Any], variables: list[Variable] | None) -> list[Any]:
        scale = self._scale
        variables = self._trainable_variables if variables is None else variables
        return [
            grad
            if grad is None or self._overwrite_variable_with_gradient(variable)
            else operations.divide(grad, scale)
            for grad, variable in zip(grads, variables, strict=True)
        ]

    def _update(self, found_inf: Tensor, known: bool | None = None) -> None:
        if not self.dynamic:
            return
        kept = [self.dynamic_scale, self.step_counter]
        if hasattr(self, "nonfinite_counter"):
            kept.append(self.nonfinite_counter)
        values = [ops.copy(variable) for variable in kept]  # read once
        state = ScaleState(*values, *[0] * (len(ScaleState._fields) - len(kept)))
        where = where_or_choose(operations.where, found_inf, known)
        moved = self._policy.update(state, found_inf, where)
        for variable, value in zip(kept, moved, strict=False):
            variable.assign(value)
