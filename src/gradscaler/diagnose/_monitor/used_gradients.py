"""Gradients that a step has used, and that were not zeroed after it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from gradscaler.diagnose._gradients.arrays import local
from gradscaler.diagnose._gradients.reading import Tensor
from gradscaler.diagnose._monitor.iterations import Iteration
from gradscaler.diagnose._monitor.parameters import held_by
from gradscaler.diagnose._record.events import Event


class _Used(NamedTuple):
    """A gradient before the backward pass."""

    alive: Callable[[], Tensor | None]
    version: int  # the number of its changes, if that is counted
    largest: Tensor  # magnitude


class UsedGradients:
    """Detects a backward pass that adds to gradients that a step has used.

    It compares one gradient of each optimizer before and after the backward pass. PyTorch counts
    the changes of a tensor. A backward pass that adds to a gradient makes one change,
    ``zero_grad(set_to_none=False)`` makes another, and ``zero_grad()`` leaves no tensor. In other
    frameworks, and with several processes, which change a gradient more often, only an Inf or a NaN
    shows that a gradient was kept. The comparison waits for no device, except after ``unscale_``
    and ``update`` without a step.

    Args:
        counts_changes: whether a backward pass makes one change of a gradient.
    """

    def __init__(self, counts_changes: bool) -> None:
        self._counts_changes = counts_changes
        self._parameters: dict[int, Callable[[], Tensor]] = {}  # one of each optimizer that stepped
        self._used: dict[int, _Used] = {}

    def before_backward(self) -> None:
        """Note the gradients that earlier steps left."""
        self._used = {}
        for key, alive in self._parameters.items():
            gradient = getattr(alive(), "grad", None)
            if gradient is None:
                continue
            with suppress(Exception):  # a sparse gradient has no amax; it is left out
                part = local(gradient).detach()
                version = part._version if self._counts_changes else 0
                same = weakref.ref(gradient) if self._counts_changes else _always
                self._used[key] = _Used(same, version, part.abs().max())

    def before_step(self, optimizer: object, iteration: Iteration, name: str) -> None:
        """Note in an iteration what the gradient held before a backward pass added to it.

        ``name`` is the optimizer's.
        """
        held = self._held(optimizer)
        if held is not None:
            iteration.added_to[name] = held if self._counts_changes else held * 0
        if iteration.follows_unstepped and (held is None or not float(held)):
            iteration.note(Event.LEFT_OUT)
            iteration.follows_unstepped = False

    def _held(self, optimizer: object) -> Tensor | None:
        """The largest magnitude that was in the gradient before the backward pass; None if gone.

        A magnitude of 0 means that the gradient was zeroed in place before the backward pass.
        """
        key = id(optimizer)
        parameter, used = self._parameters.pop(key, lambda: None)(), self._used.pop(key, None)
        gradient: Any = None if parameter is None else parameter.grad
        if gradient is None:
            parameter = _one_with_gradient(optimizer)
        if parameter is not None:
            self._parameters[key] = weakref.ref(parameter)
        if used is None or gradient is None:
            return None
        if not self._counts_changes:
            return used.largest
        is_same = gradient._version == used.version + 1 and gradient is used.alive()
        return used.largest if is_same else None


def _always() -> None:
    return None


def _one_with_gradient(optimizer: object) -> Tensor | None:
    with suppress(Exception):
        held = (p for p in held_by(optimizer) if p.grad is not None)
        return next((p for p in held if local(p.grad).numel()), None)
    return None
