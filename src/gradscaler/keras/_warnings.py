"""Warnings about calls that a training loop forgot."""

from __future__ import annotations

import warnings

from gradscaler.errors import levels_to_caller

NEVER_SCALED = (
    "The loss was never scaled, but gradients are divided by the loss scale. Call scale_loss(loss) "
    "or get_scaled_loss(loss) before differentiating; in a step that JAX compiles, "
    "stateless_scale_loss(loss, optimizer_variables)."
)
NEVER_UNSCALED = (
    "get_unscaled_gradients() was never called, so apply_gradients() divides the gradients by the "
    "loss scale. Call it first, or scale the loss by scale_loss()."
)
# A user's line lies outside of these; Keras calls an optimizer through its backend.
_LIBRARIES = "keras.", "tensorflow.", "jax.", "torch."


def warn(text: str) -> None:
    """Warn at the caller's line: the first frame outside gradscaler, Keras and its backend."""
    warnings.warn(text, stacklevel=levels_to_caller(*_LIBRARIES))
