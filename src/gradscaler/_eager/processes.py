"""Protocols for gradients that are spread over processes, and ``Alone`` for a single process.

A decision, whether to step and at which scale, is a maximum over all processes that must act alike.
A norm is a sum over processes that hold different parts. The engine asks for both before any
gradient changes, so that a refusal changes nothing. Parameters and arguments alone determine which
collectives run. Gradients must not, because one process may have some and another none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gradscaler._eager.operations import FoundInf, Optimizer, ProcessGroup, Tensor
from gradscaler.policies import State


class Deciders(Protocol):
    """The processes that decide about an optimizer together."""

    def agree(
        self, state: State, found_inf: FoundInf, amax: Tensor | None, /
    ) -> tuple[FoundInf, Tensor | None]:
        """Combine what each process found.

        Args:
            state: the scaler's state, the same in all processes.
            found_inf: the flags of this process's gradients.
            amax: this process's largest gradient; None if the policy does not need it.

        Returns:
            The flags and the largest gradient over all processes.
        """

    def is_anywhere(self, flag: bool, /) -> bool:
        """Whether the flag is True in any of the processes."""


class Parts(Protocol):
    """The parts of an optimizer's gradients whose norms are taken separately, then combined."""

    @property
    def parts(self) -> Sequence[Optimizer]:
        """The parts; each may be passed to an operation in place of an optimizer."""

    @property
    def can_be_measured(self) -> bool:
        """Whether ``Operations.measure`` can take the norm of each part while it is scaled."""

    def norm(self, norms: list[Tensor], norm_type: float, /) -> Tensor:
        """The p-norm of all gradients, a scalar, from the p-norms of the parts."""


class Processes(Protocol):
    """Which processes decide together, and which hold other parts of the gradients."""

    def deciders_of(self, optimizer: Optimizer, /) -> Deciders:
        """The processes that decide about this optimizer together."""

    def repeaters_of(self, optimizer: Optimizer, /) -> Deciders:
        """Like ``deciders_of``, but raises if it is unknown which processes repeat together.

        Raises:
            ValueError: there are other processes, and neither the parameters nor the user name the
                group that repeats the body of a loop over ``attempts`` together.
        """

    def parts_of(self, optimizer: Optimizer, shards: ProcessGroup | None, /) -> Parts:
        """The parts of this optimizer's norm.

        Args:
            optimizer: the owner of the gradients.
            shards: the process group whose processes hold other parts of the model, or None.
        """


class Alone:
    """A process without others. It implements ``Processes`` and ``Deciders``."""

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

    def parts_of(self, optimizer: Optimizer, shards: ProcessGroup | None) -> Parts:
        if shards is not None:
            raise TypeError("this framework has no process groups: leave out shards")
        return OnePart(optimizer)


class OnePart:
    """The parts of gradients that this process holds whole: one."""

    can_be_measured = True

    def __init__(self, optimizer: Optimizer) -> None:
        self.parts: Sequence[Optimizer] = (optimizer,)

    def norm(self, norms: list[Tensor], norm_type: float) -> Tensor:
        return norms[0]


ALONE = Alone()
