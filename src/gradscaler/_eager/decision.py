"""One decision of many processes: whether to step, and at which scale.

It takes one all-reduce of one integer, because a backend such as gloo needs longer for more
numbers. Each process encodes whether it found an overflow, whether it has gradients, and a digest
of its scale, its counters and the optimizer. The sum counts the processes with overflow and those
with gradients, and is a multiple of the digest if all processes hold the same one. Otherwise a
second all-reduce, a maximum, finds the value that differs.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple
from weakref import ref

from gradscaler._eager.operations import Optimizer
from gradscaler.errors import ScaleMismatchError
from gradscaler.policies import Scalar, State


class Result(NamedTuple):
    """The result of a vote, read from the sum of all ballots.

    Attributes:
        found_inf: whether any process found an overflow.
        has_gradients: whether any process has gradients.
        is_same: whether all processes hold the same scale and counters, and decide about the same
            optimizer.
    """

    found_inf: bool
    has_gradients: bool
    is_same: bool


class Order:
    """The optimizers that a group decides about, in the order of their first decisions."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[ref[Optimizer], int]] = {}
        self._count = 0

    def identity(self, optimizer: Optimizer, shapes: Iterable[Iterable[int]]) -> int:
        """The number by which all processes of the group know one optimizer.

        A digest of its place in the order, its class, and ``shapes``. It is exact in a float64.

        Args:
            optimizer: the optimizer that the processes decide about.
            shapes: the shapes of its parameters that every process holds whole.
        """
        known = self._known.get(id(optimizer))
        if known is not None and known[0]() is optimizer:
            return known[1]
        name = zlib.crc32(type(optimizer).__qualname__.encode())  # hash() differs in each process
        digest = hash((self._count, name, *map(tuple, shapes))) & (2**48 - 1)
        self._count += 1
        self._known[id(optimizer)] = ref(optimizer), digest
        return digest


def ballot(
    found_inf: bool, has_gradients: bool, state: State, optimizer: int, processes: int
) -> int:
    """One process's vote: an int64, small enough that the sum over all processes fits.

    The digest is a hash of host scalars, which is the same in each process. ``optimizer`` is its
    :meth:`Order.identity`.
    """
    bits = processes.bit_length()
    digest = hash((*state, optimizer)) & ((1 << 62 - 3 * bits) - 1)
    return (digest << 2 * bits) | (has_gradients << bits) | found_inf


def result(total: int, own: int, processes: int) -> Result:
    """Read the sum of all ballots, in the process whose ballot is ``own``."""
    bits = processes.bit_length()
    ones = (1 << bits) - 1
    is_same = total >> 2 * bits == (own >> 2 * bits) * processes
    return Result(bool(total & ones), bool(total >> bits & ones), is_same)


def bounds(state: Iterable[Scalar]) -> list[Scalar]:
    """Each value and its negative: a maximum over processes then gives the largest and smallest."""
    return list(chain.from_iterable((value, -value) for value in state))


def check_same(fields: Iterable[str], maxima: Sequence[float]) -> None:
    """Check that all processes hold the same state and decide about the same optimizer.

    Args:
        fields: the names of the state's fields.
        maxima: the maxima over processes of the ``bounds`` of the state and of the optimizer's
            identity.

    Raises:
        ScaleMismatchError: processes hold different scales or counters, or decide about different
            optimizers. Every process raises it.
    """
    for name, largest, negated in zip((*fields, ""), maxima[::2], maxima[1::2], strict=True):
        smallest = 0.0 - negated  # not -0.0
        if largest == smallest:
            continue
        if not name:
            raise ScaleMismatchError(
                "processes that decide together decide about different optimizers: call "
                "unscale_(), clip_grad_norm_() and step() for the same optimizers in the same "
                "order on each"
            )
        raise ScaleMismatchError(
            f"processes that decide together hold different loss scales or counters: {name} is "
            f"{smallest:g} on one and {largest:g} on another. Construct the scaler with the "
            "same arguments on each, load the same state dict on each, and call step() and "
            "update() as often on each. If different groups of processes share its optimizers, "
            "construct it with group=, the group of all these processes"
        )
