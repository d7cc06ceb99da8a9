"""Gradients and steps on JAX, in a stateless scope or out of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras

where = jnp.where


def all_finite(gradients: list[Any]) -> Any:
    """Whether no gradient holds an Inf or a NaN."""
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(g)) for g in gradients if g is not None]))


def apply_if_finite(
    optimizer: Any,
    gradients: list[Any],
    variables: list[Any] | None,
    unscale: Callable[..., list[Any]],
    update: Callable[..., None],
) -> None:
    """Branch on the host where the flag is known, and in XLA where it is traced."""
    finite = all_finite(gradients)
    changing = [*optimizer._trainable_variables, *optimizer.variables]
    before = [variable.value for variable in changing]

    def applied() -> list[Any]:
        pairs = list(zip(changing, before, strict=True))
        with keras.StatelessScope(state_mapping=pairs) as scope:  # keeps the branch's values in it
            optimizer.inner_optimizer.apply(unscale(gradients, variables), variables)
        return [scope.get_current_value(variable) for variable in changing]

    if isinstance(finite, jax.core.Tracer):
        after = jax.lax.cond(finite, applied, lambda: before)
    else:
        after = applied() if finite else before
    for variable, value in zip(changing, after, strict=True):
        if value is not variable.value:
            variable.assign(value)
    update(~finite)


def gradients(
    loss: Any, scale_loss: Callable[[Any], Any], var_list: Any, tape: Any
) -> tuple[list[Any], list[Any]]:
    """Of a function that reads the variables."""
    if tape is not None or not callable(loss):
        raise ValueError(
            "JAX differentiates functions: pass a loss without arguments to call, and no tape"
        )
    variables = keras.tree.flatten(var_list() if callable(var_list) else var_list)

    def scaled_loss(values: list[Any]) -> Any:
        pairs = list(zip(variables, values, strict=True))
        with keras.StatelessScope(state_mapping=pairs):
            value = loss()
        return jnp.sum(scale_loss(value))

    return jax.grad(scaled_loss)([variable.value for variable in variables]), variables
