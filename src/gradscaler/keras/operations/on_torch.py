"""Gradients and steps on PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import torch

from gradscaler.keras.operations.variables import variables_of

where = torch.where


def all_finite(gradients: list[Any]) -> Any:
    """Whether no gradient holds an Inf or a NaN."""
    # An extreme is Inf or NaN if anything is, and costs a tenth of looking at each value.
    given = [gradient for gradient in gradients if gradient is not None and gradient.numel()]
    extremes = [extreme for gradient in given for extreme in torch.aminmax(gradient)]
    return torch.stack(extremes or [torch.zeros(())]).isfinite().all()


def multiply(loss: Any, scale: Any) -> Any:
    """The loss times the scale, in float32 at least."""
    return torch.multiply(_widened(keras.ops.convert_to_tensor(loss)), scale)


def divide(gradient: Any, scale: Any) -> Any:
    """The gradient divided by the scale, of the dtype that it was."""
    gradient = keras.ops.convert_to_tensor(gradient)
    return torch.divide(_widened(gradient), scale).to(gradient.dtype)


def _widened(tensor: Any) -> Any:
    """Not in 16 bits, to which PyTorch would cast the scale: in float16 it may be inf."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def apply_if_finite(
    optimizer: Any,
    gradients: list[Any],
    variables: list[Any] | None,
    unscale: Callable[..., list[Any]],
    update: Callable[..., None],
) -> None:
    """Apply or not, by one look at the flag from the host."""
    finite = all_finite(gradients)
    found_inf = ~finite
    if finite:
        optimizer.inner_optimizer.apply(unscale(gradients, variables), variables)
        update(found_inf, False)
    else:
        update(found_inf, True)


def gradients(
    loss: Any, scale_loss: Callable[[Any], Any], var_list: Any, tape: Any
) -> tuple[list[Any], list[Any]]:
    """Of a function or a tensor."""
    if tape is not None:
        raise ValueError("PyTorch records gradients without a tape: leave tape out")
    scaled_loss = scale_loss(loss() if callable(loss) else loss).sum()
    variables = variables_of(var_list)
    values = [variable.value for variable in variables]
    if not values:
        return [], []
    return list(torch.autograd.grad(scaled_loss, values, allow_unused=True)), variables
