"""Gradients that a step has used and that nobody zeroed, where a framework counts no changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from weakref import ref

from gradscaler.diagnose._gradients.arrays import shape_of
from gradscaler.diagnose._gradients.reading import largest

Optimizer = Any
Parameter = Any


@dataclass
class _Used:
    """A gradient that an optimizer's step has used.

    Attributes:
        parameter: its parameter, which is not kept alive.
        largest: its largest magnitude after the step.
        is_untouched: whether no backward pass came since.
        is_kept: whether the latest backward pass has added to it.
    """

    parameter: Callable[[], Parameter]
    largest: float
    is_untouched: bool = True
    is_kept: bool = False


class KeptGradients:
    """Tells a step whose backward pass has added to gradients that the step before it has used.

    One gradient of each optimizer is read: the smallest, as each reading costs time. Another
    network's loss may add to it, too, as in a GAN, if it is zeroed before its own backward pass.
    """

    def __init__(self) -> None:
        self._used: dict[int, _Used] = {}  # by the ids of optimizers
        self._read: dict[int, Callable[[], Parameter]] = {}  # whose gradient is read, by the same

    def clear(self) -> None:
        """Forget all steps."""
        self._used.clear()
        self._read.clear()

    def before_backward(self) -> None:
        """See which gradients are not zeroed before a backward pass."""
        for used in self._used.values():
            now = _largest_of(used.parameter())
            if used.is_untouched:  # a script that changes it after the step keeps it on purpose
                used.is_kept = now == used.largest
            elif not now:
                used.is_kept = False
            used.is_untouched = False

    def take(self, optimizer: Optimizer) -> bool:
        """Whether the step of an optimizer that begins uses kept gradients."""
        used = self._used.pop(id(optimizer), None)
        return used is not None and used.is_kept

    def note_step(self, optimizer: Optimizer, parameters: Iterable[Parameter]) -> None:
        """Note the gradients that a step has used."""
        held, key = list(parameters), id(optimizer)
        read = self._read.get(key, lambda: None)()
        if read is None or read.grad is None or not any(each is read for each in held):
            held = [each for each in held if each.grad is not None]
            read = min(held, key=lambda p: math.prod(shape_of(p)), default=None)
        if read is not None:
            self._read[key] = ref(read)
            if (found := _largest_of(read)) and math.isfinite(found):
                self._used[key] = _Used(self._read[key], found)


def _largest_of(parameter: Parameter | None) -> float:
    """The largest magnitude in a parameter's gradient; 0 without one."""
    gradient = None if parameter is None else parameter.grad
    return 0.0 if gradient is None else float(largest(gradient) or 0.0)
