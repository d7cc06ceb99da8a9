"""A mark by which a gradient of PyTorch is known again, if nothing has changed it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from gradscaler.diagnose._gradients.reading import Tensor

# A gradient, which is not kept alive, and the number of its changes that PyTorch counts. A backward
# pass and `zero_grad(set_to_none=False)` change a gradient, and `zero_grad()` leaves none. A write
# to its `.data` is not counted.
Mark = tuple[Callable[[], Any], int]


def mark_of(gradient: Tensor | None) -> Mark | None:
    """The mark of a gradient; None without one, or in a framework that counts no changes."""
    try:
        return weakref.ref(gradient), gradient._version  # type: ignore[union-attr]
    except (AttributeError, TypeError):
        return None


def is_unchanged(mark: Mark | None, gradient: Tensor | None) -> bool:
    """Whether a mark is that of a gradient as it is now."""
    if mark is None or gradient is None:
        return False
    alive, version = mark
    return alive() is gradient and bool(version == gradient._version)
