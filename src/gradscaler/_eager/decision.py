"""One decision of many processes: whether to step, and at which scale.

One all-reduce of one integer makes it: more numbers take a backend such as gloo longer. Each
process puts in whether it found an overflow, whether it has gradients, and a digest of its scale
and counters. The sum counts the first two, and is a multiple of the digest if all hold the same.
Otherwise a second all-reduce, a maximum, finds what differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

from gradscaler.errors import ScaleMismatchError
from gradscaler.policies import ScaleState


class Ballot(NamedTuple):
    """What one process puts in, or all of them together.

    Attributes:
        found_inf: how many have found an overflow.
        has_gradients: how many have gradients.
        digest: the sum of their digests of scale and counters.
    """

    found_inf: int
    has_gradients: int
    digest: int

    def packed(self, processes: int) -> int:
        """One int64, with room to add up those of so many processes."""
        bits = processes.bit_length()
        return (self.digest << 2 * bits) | (self.has_gradients << bits) | self.found_inf

    @classmethod
    def unpacked(cls, number: int, processes: int) -> Ballot:
        """The ballot, or the sum of ballots, that is in a number."""
        bits = processes.bit_length()
        ones = (1 << bits) - 1
        return cls(number & ones, number >> bits & ones, number >> 2 * bits)


def digest(state: ScaleState, processes: int) -> int:
    """A hash of host scalars, the same in each process, short enough to be added up in an int64."""
    scale, finite_steps, nonfinite_steps = state
    values = float(scale), int(finite_steps), int(nonfinite_steps)
    return hash(values) & ((1 << 62 - 3 * processes.bit_length()) - 1)


def bounds(state: Any) -> list[Any]:
    """Each value with its negative: their maxima show the range over all processes."""
    return list(chain.from_iterable((value, -value) for value in state))


def check_same(maxima: Sequence[float]) -> None:
    """Compare what processes hold, from the maxima of their ``bounds``.

    Raises:
        ScaleMismatchError: they hold different scales or counters; all of them raise it.
    """
    for name, largest, negated in zip(ScaleState._fields, maxima[::2], maxima[1::2], strict=True):
        smallest = 0.0 - negated  # not -0.0
        if largest != smallest:
            raise ScaleMismatchError(
                f"processes that decide together hold different loss scales or counters: {name} is "
                f"{smallest:g} on one and {largest:g} on another. Construct the scaler with the "
                "same arguments on each, load the same state dict on each, and call step() and "
                "update() as often on each. If it has optimizers that different processes share, "
                "name the group of all of them, group="
            )
