"""Weights in float16 that Keras' Adam steps, whose squares of gradients are 0 there."""

from __future__ import annotations

from typing import Any

Model = Any

# Squares of gradients below 5e-3 are 0 in Adam's mean, which makes steps of 1,500 learning rates at
# the default of 1e-7, and of 17 at this.
LEAST_EPS = 1e-5

_DIVIDING = {"Adam", "Nadam", "Lamb"}  # by the root of mean squares, and then eps is added to it


def of_narrow_weights(model: Model) -> str:
    """What says that an optimizer divides by an eps too small for float16; empty if it does not."""
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    names = {each.__name__ for each in type(optimizer).__mro__}
    eps = getattr(optimizer, "epsilon", None)
    if names.isdisjoint(_DIVIDING) or not isinstance(eps, (int, float)) or eps >= LEAST_EPS:
        return ""
    weights = model.trainable_variables if model.built else []
    dtypes = {getattr(each.dtype, "name", each.dtype) for each in weights}
    if "float16" not in dtypes:
        return ""
    return (
        "The weights are float16, in which squares of small gradients are 0, so that "
        f"{type(optimizer).__name__} divides by its epsilon of {eps:g} and makes large steps: set "
        'it to 1e-4, or keep the weights in float32 (the policy "mixed_float16").'
    )
