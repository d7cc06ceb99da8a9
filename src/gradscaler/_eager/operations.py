"""The tensor operations that an eager adapter supplies to the engine.

An adapter's ``_operations.py`` satisfies this Protocol, as a module or by an object in it. Tensors,
optimizers and found_inf flags are opaque to the engine: it only hands them back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, SupportsFloat

from gradscaler.policies import Policy, State

Tensor = Any
Optimizer = Any
Device = Any
ProcessGroup = Any

Args = tuple[Any, ...]
"""The positional arguments of an optimizer's ``step``."""

Kwargs = dict[str, Any]
"""The keyword arguments of an optimizer's ``step``."""

Closure = Callable[[], Any]
"""Computes gradients, and returns the loss."""

FoundInf = Mapping[Any, Tensor]
"""A flag on each device, non-zero if a gradient there is not finite; empty without gradients."""


class GradientsRefusedError(Exception):
    """Raised by an adapter that refuses to unscale gradients, before it has changed any.

    The adapter's own error is a subclass of this and of the error that its framework raises. Any
    other error counts as an interrupt, after which some gradients may be unscaled.
    """


class Watched(Protocol):
    """An optimizer's gradients, whose backward passes are watched."""

    optimizer: Optimizer

    def note_mixed(self) -> None:
        """A backward pass has added to them."""


class Operations(Protocol):
    """The tensor operations that the engine is written in."""

    def is_tensor(self, value: object, /) -> bool:
        """Whether ``value`` is one of the framework's tensors."""

    def multiply(self, output: Tensor, scale: Tensor, /) -> Tensor:
        """``output * scale``, differentiable, on the output's device."""

    def place(self, state: State, device: Device, /) -> State:
        """The tensors on a device that hold the values of a host state."""

    def read(self, state: State, /) -> State:
        """A placed state as host scalars."""

    def finite_steps(self, state: State, /) -> int | None:
        """The count of finite steps; None if reading it would wait for a device."""

    def next_state(
        self,
        policy: Policy,
        state: State,
        found_infs: list[FoundInf],
        amaxes: Sequence[Tensor] = (),
        /,
    ) -> State:
        """The state after one step of ``policy``; ``state`` itself does not change.

        The policy gets the largest of ``amaxes``, if there are any.
        """

    def move(self, state: State, values: State, /) -> State:
        """Copy the values of a ``next_state`` into the tensors of ``state``; return the state.

        A state without tensors is replaced by ``values``.
        """

    def copy(self, state: State, /) -> State:
        """A state that moves independently of ``state``."""

    def copy_scale(self, scale: Tensor, /) -> Tensor:
        """A scale that moves independently of ``scale``."""

    def merge(self, found_infs: list[FoundInf], /) -> FoundInf:
        """The flags of several parts of an optimizer's gradients as one."""

    def any_set(self, found_inf: FoundInf, /) -> bool:
        """Whether any flag is set, read on the host."""

    def readable(self, found_inf: FoundInf, /) -> bool | Callable[[], bool]:
        """Whether any flag is set: a bool if free to read, else a callable that reads it."""

    def inverse(self, scale: Tensor, /) -> tuple[SupportsFloat, Tensor]:
        """A copy of the scale for the record, and 1/scale in the form that an ``Unscaler`` takes.

        Paddle's kernel divides, so its ``Unscaler`` takes the scale itself.
        """

    def measure(
        self, optimizer: Optimizer, scale: Tensor, /
    ) -> tuple[Tensor, SupportsFloat, Tensor, FoundInf] | None:
        """Measure the 2-norm that the gradients will have once unscaled, in one pass over them.

        Returns:
            The norm, a copy of the scale, its inverse, and the flags that unscaling would give.
            None if one pass is not enough: the norm overflows its dtype, the scale is below 1, or
            a dtype is unusual.
        """

    def amax(self, optimizer: Optimizer, scale: Tensor | None, /) -> Tensor:
        """The largest magnitude of the optimizer's gradients, times 1/scale if they are scaled.

        A float32 scalar: 0 without gradients, and any number if a gradient is not finite.
        """

    def total_norm(self, optimizer: Optimizer, norm_type: float, /) -> Tensor:
        """The norm of all the optimizer's gradients as one vector, a scalar."""

    def clip_coefficient(self, max_norm: float, total_norm: Tensor, /) -> Tensor:
        """The factor, at most 1, that brings the norm of gradients down to ``max_norm``."""

    def multiply_gradients_(self, optimizer: Optimizer, factor: Tensor, /) -> None:
        """Multiply the optimizer's gradients in place."""

    def current_gradients(self, optimizer: Optimizer, /) -> list[Tensor]:
        """The dense tensors that hold the optimizer's gradients now."""

    def are_new(self, gradients: list[Tensor], stale: list[Tensor], /) -> bool:
        """Whether no gradient of ``stale`` is left, alone or as part of a sum."""

    def clear_gradients(self, optimizer: Optimizer, /) -> None:
        """Leave the optimizer's parameters without gradients."""

    def save_gradients(self, optimizer: Optimizer, /) -> Callable[[], None]:
        """Copy the optimizer's gradients; the callable puts them back, as often as it is called."""

    def save_values(self, tensors: list[Tensor], /) -> Callable[[], None]:
        """Copy tensors; the callable puts their values back, as often as it is called."""

    def save_random_state(self, optimizer: Optimizer, /) -> Callable[[], None]:
        """Copy the state of the framework's own random generators; the callable puts it back.

        The generators are those of the host and of the devices of the optimizer's parameters.
        """

    def snapshot(self, optimizer: Optimizer, /) -> Callable[[], None]:
        """Copy the optimizer's parameters and state; the callable puts them back."""

    def watch(self, optimizer: Optimizer, /) -> Callable[[], bool]:
        """A callable that returns whether parameters and gradients are still unchanged."""

    def can_watch(self, scaled: Tensor, /) -> bool:
        """Whether ``watch_backward`` takes this tensor, which must have a graph."""

    def watch_backward(self, scaled: Tensor, watched: Callable[[], Watched | None], /) -> None:
        """Call ``note_mixed`` if a backward pass of ``scaled`` adds to an optimizer's gradients.

        Passes of other losses, passes that add to other parameters, and changes that the user makes
        between passes do not count. ``watched`` returns None once nobody needs to know.
        """

    def watch_steps(self, optimizer: Optimizer, closely: bool, /) -> Callable[[], bool]:
        """A callable that returns whether the optimizer seems not to have stepped since.

        It compares the values of a few small parameters that have a gradient, of which it takes
        copies; if not ``closely``, the values of one, most often a bias of the last layer. A
        parameter that is NaN never changes.
        """

    def enable_grad(self) -> AbstractContextManager[object]:
        """A context in which a closure can run its backward pass."""
