"""An observer of a scaler, which tells of scaled losses, and when a step has ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class ScalerWatch:
    """The first observer of a scaler. A monitor that its first call puts on hears of that loss."""

    def __init__(
        self,
        scaled: Callable[[], None],
        stepped: Callable[[Any], None],
        ended: Callable[[], None],
    ) -> None:
        self._scaled, self._stepped, self._ended = scaled, stepped, ended

    def scaled(self, outputs: object, /) -> None:
        """Make the first call."""
        self._scaled()

    def unscaling(self, optimizer: object, scale: object, /) -> None:
        """Nothing to do."""

    def stepping(self, optimizer: object, scale: object, /) -> None:
        """Nothing to do."""

    def stepped(self, optimizer: object, outcome: object, /) -> None:
        """Make the second call."""
        self._stepped(optimizer)

    def updating(self) -> None:
        """Nothing to do."""

    def updated(self) -> None:
        """Make the third call."""
        self._ended()
