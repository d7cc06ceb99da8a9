"""Ways to step an optimizer."""

from __future__ import annotations

from typing import Any, Protocol

from gradscaler._eager.gradients import Gradients, Scaling
from gradscaler._eager.operations import Args, Kwargs, Optimizer
from gradscaler.errors import CallOrderError


class Stepping(Protocol):
    """A way to step an optimizer. An adapter has one for each kind of optimizer.

    Attributes:
        takes_scaled: whether ``step`` takes gradients that are still scaled, and checks them.
    """

    takes_scaled: bool

    def step(
        self,
        optimizer: Optimizer,
        gradients: Gradients,
        scaling: Scaling,
        args: Args,
        kwargs: Kwargs,
        /,
    ) -> Any:
        """Step the optimizer, or skip.

        Returns:
            What ``optimizer.step`` returned; None after a skip.
        """


class Plain:
    """The way to step most optimizers: call their ``step`` if their gradients are finite."""

    takes_scaled = False

    def step(
        self,
        optimizer: Optimizer,
        gradients: Gradients,
        scaling: Scaling,
        args: Args,
        kwargs: Kwargs,
    ) -> Any:
        return step_if_finite(optimizer, gradients, args, kwargs)


def step_if_finite(optimizer: Optimizer, gradients: Gradients, args: Args, kwargs: Kwargs) -> Any:
    """Step an optimizer if it has gradients and the check found all of them finite."""
    if gradients.found_inf is None:  # a subclass or its user has set the stage only
        raise CallOrderError(
            "No inf checks were recorded for this optimizer: set its found_inf_per_device with "
            "its stage, or call unscale_(optimizer)"
        )
    if not gradients.found_inf:
        return None
    if gradients.overflowed is None:
        gradients.overflowed = gradients.have_overflowed
    if gradients.overflowed:
        return None
    gradients.multiply()
    return gradients.apply(optimizer.step, args, kwargs)


PLAIN = Plain()
