"""Ways to step an optimizer other than by a plain ``optimizer.step()``."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from gradscaler._eager.gradients import Gradients, GradientScale
from gradscaler._eager.operations import Args, Kwargs, Optimizer


class StepCall(NamedTuple):
    """One call of ``scaler.step``.

    Attributes:
        optimizer: the optimizer to step.
        gradients: its gradients.
        gradient_scale: their scale.
        args: positional arguments for its ``step``.
        kwargs: keyword arguments for its ``step``.
    """

    optimizer: Optimizer
    gradients: Gradients
    gradient_scale: GradientScale
    args: Args
    kwargs: Kwargs


class Stepping(Protocol):
    """A way to step an optimizer. An adapter has one for each kind of optimizer.

    Attributes:
        takes_scaled: whether ``step`` takes gradients that are still scaled, and checks them.
    """

    takes_scaled: bool

    def step(self, call: StepCall, /) -> Any:
        """Step the optimizer, or skip.

        Returns:
            What ``optimizer.step`` returned; None after a skip.
        """
