"""Gradients and steps on JAX, inside a ``keras.StatelessScope`` or outside."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import keras
from jax.experimental.sparse import BCOO

from gradscaler._keras_like.wrapper import Loss, Optimizer, ScaledOptimizer, Tape, Tensor, Variable
from gradscaler.errors import CallOrderError

multiply, divide = keras.ops.multiply, keras.ops.divide


def all_finite(gradients: list[Tensor | None]) -> Tensor:
    """Whether no gradient holds an Inf or a NaN."""
    values = [g.data if isinstance(g, BCOO) else g for g in gradients if g is not None]
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(value)) for value in values]))


def largest(gradients: list[Tensor | None]) -> Tensor:
    """The largest magnitude of the gradients, a float32 scalar."""
    given = [g for g in gradients if g is not None]
    values = [g.sum_duplicates(nse=g.nse).data if isinstance(g, BCOO) else g for g in given]
    maxima = [jnp.max(jnp.abs(value), initial=0).astype(jnp.float32) for value in values]
    return jnp.max(jnp.array(maxima), initial=0)


def check_compiled(scale: Variable) -> None:
    """Raise CallOrderError if JAX compiles the caller with the scale as a constant.

    A traced function reads a variable only once, unless a stateless scope holds its value.
    """
    is_compiled = isinstance(jnp.zeros(()) + 0, jax.core.Tracer)  # False if it only differentiates
    if is_compiled and not isinstance(scale.value, jax.core.Tracer):
        raise CallOrderError(
            "the loss scale is read in a function that JAX compiles, which would keep its present "
            "value while the optimizer's scale moves: pass it as an argument of the function, by "
            "optimizer.stateless_scale_loss(loss, optimizer_variables) and stateless_apply(...), "
            "or by a keras.StatelessScope that holds optimizer.variables"
        )


def build(optimizer: Optimizer, variables: list[Variable]) -> None:
    """Build the inner optimizer."""
    optimizer.build(variables)


def apply_if_finite(
    optimizer: ScaledOptimizer,
    apply: Callable[..., None],
    gradients: list[Tensor | None],
    variables: list[Variable],
    amax: Tensor | None,
) -> None:
    """Apply if all gradients are finite: branch on the host, or in XLA if the flag is traced."""
    finite = all_finite(gradients)
    if not isinstance(finite, jax.core.Tracer):
        if finite:
            apply(gradients, variables)
        optimizer._move_scale(~finite, amax)
        return
    changing = [*optimizer._trainable_variables, *optimizer.variables]
    before = [variable.value for variable in changing]

    def applied() -> list[Tensor]:
        pairs = list(zip(changing, before, strict=True))
        with keras.StatelessScope(state_mapping=pairs) as scope:  # traced values stay in the branch
            apply(gradients, variables)
        return [scope.get_current_value(variable) for variable in changing]

    after = jax.lax.cond(finite, applied, lambda: before)
    for variable, value in zip(changing, after, strict=True):
        variable.assign(value)
    optimizer._move_scale(~finite, amax)


def gradients(
    loss: Loss,
    scale_loss: Callable[[Tensor], Tensor],
    variables: Callable[[], list[Variable]],
    tape: Tape | None,
) -> tuple[list[Tensor | None], list[Variable]]:
    """The gradients and variables of a loss, which must be a function.

    Variables that the loss changes, such as statistics, are assigned.
    """
    if tape is not None or not callable(loss):
        raise ValueError(
            "JAX differentiates functions: pass a loss without arguments to call, and no tape"
        )
    found = variables()
    changed: list[Variable] = []

    def scaled_loss(values: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        with _LossScope(state_mapping=list(zip(found, values, strict=True))) as scope:
            value = loss()
        changed.extend(scope.changed.values())
        after = [scope.get_current_value(variable) for variable in changed]
        return jnp.sum(scale_loss(value)), after

    values = [variable.value for variable in found]
    gradients, after = jax.grad(scaled_loss, has_aux=True)(values)
    for variable, value in zip(changed, after, strict=True):
        variable.assign(value)
    return gradients, found


class _LossScope(keras.StatelessScope):  # type: ignore[misc] # untyped base
    """Records the variables that change, and reads the current values of all others."""

    def __init__(self, state_mapping: list[tuple[Variable, Tensor]]) -> None:
        super().__init__(state_mapping, collect_losses=True)
        self.changed: dict[int, Variable] = {}

    def add_update(self, update: tuple[Variable, Tensor]) -> None:
        super().add_update(update)
        variable, _ = update
        self.changed[id(variable)] = variable

    def get_current_value(self, variable: Variable) -> Tensor:
        value = super().get_current_value(variable)
        if value is None and self.original_scope is not None:
            value = self.original_scope.get_current_value(variable)
        return variable._value if value is None else value
