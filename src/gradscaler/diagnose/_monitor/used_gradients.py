"""Gradients that a backward pass adds to those that a step has used."""

from __future__ import annotations

import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import Any


@dataclass
class _Mark:
    """One parameter of an optimizer, and its gradient before a backward pass."""

    parameter: Any  # a weak reference
    gradient: Any = None  # a weak reference, if there is one
    version: int = 0
    largest: Any = None  # its largest magnitude, which may be on a device


class UsedGradients:
    """Compares one gradient of each optimizer before the backward pass and after.

    PyTorch counts the changes of a tensor: a backward pass that adds to a gradient is one,
    ``zero_grad(set_to_none=False)`` another, and ``zero_grad()`` leaves no tensor. Elsewhere there
    is no such count, and nothing is found. It waits for no device.
    """

    def __init__(self) -> None:
        self._marks: dict[int, _Mark] = {}

    def before_backward(self) -> None:
        """Note the gradients that steps have left."""
        for mark in self._marks.values():
            parameter = mark.parameter()
            gradient = None if parameter is None else parameter.grad
            mark.gradient = None
            if gradient is None or gradient.layout != parameter.layout:  # it is sparse
                continue
            mark.gradient = weakref.ref(gradient)
            mark.version, mark.largest = gradient._version, gradient.detach().abs().amax()

    def before_step(self, optimizer: Any) -> Any:
        """What the gradient held if a backward pass has only added to it, else None.

        That is its largest magnitude: where it is 0, someone set it to 0.
        """
        mark = self._marks.pop(id(optimizer), None)
        gradient = None if mark is None or mark.gradient is None else mark.gradient()
        groups = getattr(optimizer, "param_groups", ())
        with suppress(Exception):
            used = (p for g in groups for p in g["params"] if hasattr(p.grad, "_version"))
            if (parameter := next(used, None)) is not None and parameter.grad.numel():
                self._marks[id(optimizer)] = _Mark(weakref.ref(parameter))
        if mark is None or gradient is None or mark.parameter().grad is not gradient:
            return None
        return mark.largest if gradient._version == mark.version + 1 else None
