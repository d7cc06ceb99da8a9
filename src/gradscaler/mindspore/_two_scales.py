"""Warns where the optimizer divides gradients by another scale than they are multiplied by."""

from __future__ import annotations

import warnings
from typing import Any

from mindspore import nn

from gradscaler.errors import levels_to_caller


def warn_of_other_scale(optimizer: Any, scale: float) -> None:
    """Warn if an optimizer's own ``loss_scale`` differs from the scale of the gradients it gets.

    Args:
        optimizer: one of MindSpore's, which divide by their ``loss_scale``, or a wrapper.
        scale: the scale that the train step leaves in the gradients; 1 if it unscales them.
    """
    inner = getattr(optimizer, "optimizer", optimizer)  # of a wrapper, such as AdaSum's
    own = getattr(inner, "loss_scale", None)
    if own == scale or not isinstance(own, (int, float)):
        return
    kind = type(inner).__name__
    advice = f"construct it with loss_scale={scale!r}, or use drop_overflow_update=True"
    if scale == 1.0:
        advice = "construct it without loss_scale"
    warnings.warn(
        f"{kind} divides the gradients by its loss_scale, {own!r}, but the train step multiplies "
        f"them by {scale!r}. They are {scale / own:g} times the gradients of the loss: {advice}",
        stacklevel=levels_to_caller("mindspore."),
    )


def left_by(step: nn.Cell) -> float:
    """The scale that a train step leaves in the gradients for the optimizer."""
    return float(step.sens) if getattr(step, "sense_flag", False) else 1.0
