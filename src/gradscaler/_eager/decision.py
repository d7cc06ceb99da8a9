"""One decision of many processes: whether to step, and at which scale.

An all-reduce by MAX of one vector makes it: [found_inf, has gradients, +scale, -scale, +counters,
-counters]. The maxima of a value and of its negative show whether all processes hold the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TypeVar

from gradscaler.errors import ScaleMismatchError
from gradscaler.policies import ScaleState

T = TypeVar("T")


def ballot(found_inf: T, has_gradients: T, state: ScaleState) -> list[T]:
    """What one process puts in: eight scalars of any framework, to be reduced in float64."""
    return [found_inf, has_gradients, *chain.from_iterable((value, -value) for value in state)]


def check_same(bounds: Sequence[float]) -> None:
    """Compare what processes hold, from the reduced vector after its first two elements.

    Raises:
        ScaleMismatchError: they hold different scales or counters; all of them raise it.
    """
    for name, largest, negated in zip(ScaleState._fields, bounds[::2], bounds[1::2], strict=True):
        smallest = 0.0 - negated  # not -0.0
        if largest != smallest:
            raise ScaleMismatchError(
                f"processes that decide together hold different loss scales or counters: {name} is "
                f"{smallest:g} on one and {largest:g} on another. Construct the scaler with the "
                "same arguments on each, load the same state dict on each, and call step() and "
                "update() as often on each"
            )
