"""Gradients and steps on PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import torch


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
    """The gradient divided by the scale, in its own dtype."""
    gradient = keras.ops.convert_to_tensor(gradient)
    return torch.divide(_widened(gradient), scale).to(gradient.dtype)


def _widened(tensor: Any) -> Any:
    """In 32 bits at least: PyTorch would cast the scale to float16, where it may be inf."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def apply_if_finite(
    optimizer: Any, apply: Callable[..., None], gradients: list[Any], variables: list[Any]
) -> None:
    """Apply or not: the host reads the flag once."""
    finite = all_finite(gradients)
    if finite:
        apply(gradients, variables)
    optimizer._move_scale(~finite)


def gradients(
    loss: Any, scale_loss: Callable[[Any], Any], variables: Callable[[], list[Any]], tape: Any
) -> tuple[list[Any], list[Any]]:
    """The loss is a function or a tensor."""
    if tape is not None:
        raise ValueError("PyTorch records gradients without a tape: leave tape out")
    scaled_loss = scale_loss(loss() if callable(loss) else loss).sum()
    found = variables()
    if not found:
        return [], []
    values = [variable.value for variable in found]
    return list(torch.autograd.grad(scaled_loss, values, allow_unused=True)), found
