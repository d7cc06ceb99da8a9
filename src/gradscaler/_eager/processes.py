"""What an eager adapter supplies where gradients are spread over processes, and who has none.

A decision is a maximum over all who must act alike: whether to step, and at which scale. A norm is
a sum over those who hold different parts. Each is asked for before any gradient changes, so it may
refuse; and which collectives run follows from parameters and arguments alone, never from gradients,
which one process may have and another not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from gradscaler._eager.operations import FoundInf, Optimizer, Tensor
from gradscaler.policies import State


class Deciders(Protocol):
    """The processes that decide about an optimizer together."""

    def agree(
        self, state: State, found_inf: FoundInf, amax: Tensor | None, /
    ) -> tuple[FoundInf, Tensor | None]:
        """What all of them found, from what this process found.

        Args:
            state: the scaler's, which all hold alike.
            found_inf: the flags of this process' gradients.
            amax: its largest gradient; None where the policy does not look at it.
        """

    def is_anywhere(self, flag: bool, /) -> bool:
        """Whether a flag is True on any of them."""


class Parts(Protocol):
    """An optimizer's gradients in parts, whose norms make up the norm of them all."""

    @property
    def parts(self) -> Sequence[Any]:
        """For operations that take an optimizer."""

    @property
    def can_be_measured(self) -> bool:
        """Whether one reading of each part, still scaled, tells its norm."""

    def norm(self, norms: list[Tensor], norm_type: float, /) -> Tensor:
        """The p-norm of all, a scalar, from those of the parts."""


class Processes(Protocol):
    """Who decides together, and who holds other parts of the gradients."""

    def deciders_of(self, optimizer: Optimizer, /) -> Deciders:
        """Those that decide about this optimizer."""

    def repeaters_of(self, optimizer: Optimizer, /) -> Deciders:
        """The same, where all that repeat a loop's body together are known to be among them."""

    def parts_of(self, optimizer: Optimizer, shards: Any, /) -> Parts:
        """The parts of this optimizer's norm.

        Args:
            optimizer: the owner of the gradients.
            shards: a process group of those who hold others, or None.
        """


class Alone:
    """A process that has no others: all of the protocols' answers at once."""

    def deciders_of(self, optimizer: Optimizer) -> Deciders:
        return self

    def repeaters_of(self, optimizer: Optimizer) -> Deciders:
        return self

    def agree(
        self, state: State, found_inf: FoundInf, amax: Tensor | None
    ) -> tuple[FoundInf, Tensor | None]:
        return found_inf, amax

    def is_anywhere(self, flag: bool) -> bool:
        return flag

    def parts_of(self, optimizer: Optimizer, shards: Any) -> Parts:
        if shards is not None:
            raise TypeError("this framework has no process groups: leave out shards")
        return OnePart(optimizer)


class OnePart:
    """Gradients that are all here."""

    can_be_measured = True

    def __init__(self, optimizer: Optimizer) -> None:
        self.parts: Sequence[Any] = (optimizer,)

    def norm(self, norms: list[Tensor], norm_type: float) -> Tensor:
        return norms[0]


ALONE = Alone()
