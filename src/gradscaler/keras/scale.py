"""The scale of an optimizer, and what is multiplied and divided by it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
from keras import ops

from gradscaler._keras_like import arguments
from gradscaler._keras_like.wrapper import Wrapper, next_values
from gradscaler.keras.operations import on_backend

Tensor = Any
Variable = Any


class Scale(Wrapper):
    """Mixin of an optimizer: the variables that the policy moves.

    They have the names that Keras' own wrapper gives them. An optimizer with a fixed scale has them
    too, so that one can load what the other saved.
    """

    built: bool
    name: str
    add_variable: Any
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
        # Compiled code sets these only when it is traced, so the first is never taken back.
        self._gradients_have_been_unscaled = False
        self._next_step_unscales = False

    @Wrapper.initial_scale.setter  # type: ignore[attr-defined,untyped-decorator] # inherited
    def initial_scale(self, initial_scale: float) -> None:
        """Set the scale itself, too, if the optimizer is not built yet."""
        self._policy = arguments.with_initial_scale(self._policy, initial_scale)
        if hasattr(self, "dynamic_scale") and not self.built:
            self.dynamic_scale.assign(self.initial_scale)

    @Wrapper.dynamic_growth_steps.setter  # type: ignore[attr-defined,untyped-decorator] # inherited
    def dynamic_growth_steps(self, dynamic_growth_steps: int | None) -> None:
        """Set the policy's growth interval."""
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

    def get_unscaled_gradients(self, grads: Iterable[Tensor | None]) -> list[Tensor | None]:
        """The gradients divided by the scale, each in its own dtype and kind; None stays None.

        From then on ``apply_gradients`` takes gradients as they are. They are divided only in
        ``apply``, and in the step after ``scale_loss``.
        """
        self._gradients_have_been_unscaled = True
        self._next_step_unscales = False
        scale = self._scale
        return [
            None if g is None else ops.cast(on_backend.divide(g, scale), g.dtype) for g in grads
        ]

    @property
    def _scale(self) -> Tensor:
        return ops.convert_to_tensor(
            self.dynamic_scale if self.dynamic else self.initial_scale, "float32"
        )

    def _scaled(self, loss: Tensor) -> Tensor:
        self._loss_has_been_scaled = True
        return on_backend.multiply(loss, self._scale)

    def _unscaled(self, grads: list[Any], variables: list[Variable]) -> list[Any]:
        scale = self._scale
        return [
            grad
            if grad is None or self._overwrite_variable_with_gradient(variable)
            else on_backend.divide(grad, scale)
            for grad, variable in zip(grads, variables, strict=True)
        ]

    def _update(self, found_inf: Tensor) -> None:
        if not self.dynamic:
            return
        kept = [self.dynamic_scale, self.step_counter]
        if hasattr(self, "nonfinite_counter"):
            kept.append(self.nonfinite_counter)
        values = [ops.copy(variable) for variable in kept]
        moved = next_values(self._policy, values, found_inf)
        for variable, value in zip(kept, moved, strict=False):
            variable.assign(value)
