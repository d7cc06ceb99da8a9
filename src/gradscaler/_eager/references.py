"""Weak references to optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

from gradscaler._eager.operations import Optimizer


def reference(
    optimizer: Optimizer, when_gone: Callable[[Any], object] | None = None
) -> Callable[[], Optimizer | None]:
    """A weak reference to an optimizer, or a strong one if its class has none."""
    try:
        return ref(optimizer, when_gone)
    except TypeError:  # its class has __slots__ without __weakref__
        return lambda: optimizer
