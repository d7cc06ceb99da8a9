"""What a scaler announces to its observers."""

from __future__ import annotations

from typing import Any, Protocol

from gradscaler.outcome import StepOutcome


class Observer(Protocol):
    """Hears of a scaler's calls, as a :class:`gradscaler.diagnose.Monitor` does."""

    def scaled(self, outputs: Any, /) -> None:
        """``scale`` was given this tensor."""

    def unscaling(self, optimizer: Any, scale: Any, /) -> None:
        """``unscale_`` was called; gradients are still multiplied by ``scale``.

        The scaler's own call in ``step`` is announced too, but no call in a closure.
        """

    def stepping(self, optimizer: Any, scale: Any, /) -> None:
        """``step`` was called; gradients are still multiplied by ``scale``, unless it is None."""

    def stepped(self, optimizer: Any, outcome: StepOutcome, /) -> None:
        """``step`` is done, and the gradients are still there."""

    def updating(self) -> None:
        """``update`` was called, and nothing has moved yet. An exception stops it."""
