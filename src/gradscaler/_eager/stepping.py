"""How an optimizer is stepped, once it is known whether its gradients are finite."""

from __future__ import annotations

from typing import Any, Protocol

from gradscaler._eager.gradients import Gradients, Scaling
from gradscaler._eager.operations import Optimizer
from gradscaler.errors import CallOrderError


class Stepping(Protocol):
    """One way to step an optimizer; an adapter has one for each kind of its framework's.

    Attributes:
        takes_scaled: whether it takes gradients that are still scaled, and checks them itself.
    """

    takes_scaled: bool

    def step(
        self,
        optimizer: Optimizer,
        gradients: Gradients,
        scaling: Scaling,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        /,
    ) -> Any:
        """Step the optimizer, or skip; what ``optimizer.step`` returned, None for a skip."""


class Plain:
    """How most optimizers are stepped."""

    takes_scaled = False

    def step(
        self,
        optimizer: Optimizer,
        gradients: Gradients,
        scaling: Scaling,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        return step_if_finite(optimizer, gradients, args, kwargs)


def step_if_finite(
    optimizer: Optimizer, gradients: Gradients, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Step an optimizer whose gradients were checked, if it has any and they are finite."""
    if gradients.found_inf is None:  # a subclass or its user set the stage alone
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
