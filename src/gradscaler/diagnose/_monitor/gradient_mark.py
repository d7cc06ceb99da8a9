"""A mark by which a gradient of PyTorch is known again, if nothing has changed it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from gradscaler.diagnose._gradients.reading import Tensor


class GradientMark(NamedTuple):
    """A gradient, which is not kept alive, and the number of its changes that PyTorch counts.

    A backward pass and ``zero_grad(set_to_none=False)`` change a gradient, and ``zero_grad()``
    leaves none. A write to its ``.data`` is not counted.
    """

    alive: Callable[[], Tensor | None]
    version: int

    @classmethod
    def of(cls, gradient: Tensor) -> GradientMark | None:
        """The mark of a gradient; None in a framework that counts no changes."""
        with suppress(AttributeError, TypeError):
            return cls(weakref.ref(gradient), gradient._version)
        return None

    def is_of(self, gradient: Any) -> bool:
        """Whether this is the mark of a gradient as it is now."""
        alive = self.alive()
        return alive is not None and alive is gradient and bool(alive._version == self.version)
