"""What an eager adapter supplies to the engine: its framework's tensor operations.

An adapter's ``_operations.py`` satisfies this Protocol, as a module or by an object in it. Tensors,
optimizers and found_inf flags are opaque to the engine: it only hands them back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from gradscaler.policies import Policy, State

Tensor = Any
Optimizer = Any

FoundInf = Mapping[Any, Tensor]
"""Device to a flag on it, non-zero for non-finite gradients; empty where there are no gradients."""


class GradientsRefusedError(Exception):
    """An adapter cannot unscale gradients, and has changed none.

    What it raises is of this type, and of the type that its framework raises. Anything else that
    is raised on the way is an interrupt, after which some may be unscaled.
    """


class Operations(Protocol):
    """The tensor operations that the engine is written in."""

    def is_tensor(self, value: object, /) -> bool:
        """Whether ``value`` is one of the framework's tensors."""

    def multiply(self, output: Tensor, scale: Tensor, /) -> Tensor:
        """``output * scale``, differentiable, on the output's device."""

    def place(self, state: State, device: Any, /) -> State:
        """A host state in the form that this framework keeps it in, on a device."""

    def read(self, state: State, /) -> State:
        """A placed state as host scalars."""

    def finite_steps(self, state: State, /) -> int | None:
        """The count of finite steps; None where reading it would wait for a device."""

    def next_state(
        self,
        policy: Policy,
        state: State,
        found_infs: list[FoundInf],
        amaxes: Sequence[Tensor] = (),
        /,
    ) -> State:
        """What a step of ``policy`` makes of ``state``, which stays as it is.

        The policy is handed the largest of ``amaxes``, if there are any.
        """

    def move(self, state: State, values: State, /) -> State:
        """A placed state of the values of ``next_state``, in ``state``'s place if it has one."""

    def copy(self, state: State, /) -> State:
        """A state that moves independently of ``state``."""

    def merge(self, found_infs: list[FoundInf], /) -> FoundInf:
        """The flags of several parts of an optimizer's gradients as one."""

    def any_set(self, found_inf: FoundInf, /) -> bool:
        """Whether any flag is set, read on the host."""

    def readable(self, found_inf: FoundInf, /) -> bool | Callable[[], bool]:
        """Whether any flag is set; where reading it would wait for a device, what reads it."""

    def inverse(self, scale: Tensor, /) -> tuple[Any, Any]:
        """A copy of the scale for the record, and 1/scale in the form that an ``Unscaler`` takes.

        Paddle's kernel divides, so its ``Unscaler`` takes the scale itself.
        """

    def measure(
        self, optimizer: Optimizer, scale: Tensor, /
    ) -> tuple[Tensor, Any, Tensor, FoundInf] | None:
        """The 2-norm that gradients will have once unscaled, from reading them once.

        Also a copy of the scale, its inverse, and the flags that unscaling would give. None where
        one reading cannot tell: a norm too large for its dtype, a scale below 1, an unusual dtype.
        """

    def amax(self, optimizer: Optimizer, scale: Tensor | None, /) -> Tensor:
        """The largest magnitude of the optimizer's gradients, times 1/scale if they are scaled.

        A float32 scalar, 0 where there are no gradients; of non-finite gradients it is any number.
        """

    def total_norm(self, optimizer: Optimizer, norm_type: float, /) -> Tensor:
        """The norm of all the optimizer's gradients taken as one vector, a scalar."""

    def clip_coefficient(self, max_norm: float, total_norm: Tensor, /) -> Tensor:
        """What to multiply gradients by so that their norm is at most ``max_norm``; at most 1."""

    def multiply_gradients_(self, optimizer: Optimizer, factor: Tensor, /) -> None:
        """Multiply the optimizer's gradients in place."""

    def current_gradients(self, optimizer: Optimizer, /) -> list[Tensor]:
        """The dense tensors that hold the optimizer's gradients now."""

    def are_new(self, gradients: list[Tensor], stale: list[Tensor], /) -> bool:
        """Whether no gradient can be a sum with one of ``stale``, which were there before."""

    def clear_gradients(self, optimizer: Optimizer, /) -> None:
        """Leave the optimizer's parameters without gradients."""

    def save_gradients(self, optimizer: Optimizer, /) -> Callable[[], None]:
        """Copy the optimizer's gradients; the callable puts them back, as often as it is called."""

    def save_values(self, tensors: list[Tensor], /) -> Callable[[], None]:
        """Copy tensors; the callable puts their values back, as often as it is called."""

    def save_random_state(self, optimizer: Optimizer, /) -> Callable[[], None]:
        """Copy the state of the framework's own random generators; the callable puts it back.

        Those of the host and of the devices that the optimizer's parameters are on.
        """

    def snapshot(self, optimizer: Optimizer, /) -> Callable[[], None]:
        """Copy the optimizer's parameters and state; the callable puts them back."""

    def watch(self, optimizer: Optimizer, /) -> Callable[[], bool]:
        """A callable that says whether parameters and gradients are still what they are now."""

    def enable_grad(self) -> AbstractContextManager[object]:
        """A context in which a closure can run its backward pass."""
