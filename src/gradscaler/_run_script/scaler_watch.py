"""An observer of a scaler, which tells when a loss is scaled."""

from __future__ import annotations

from collections.abc import Callable


class ScalerWatch:
    """The first observer of a scaler. A monitor that its call puts on hears of the same loss."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def scaled(self, outputs: object, /) -> None:
        """Make the call."""
        self._call()

    def unscaling(self, optimizer: object, scale: object, /) -> None:
        """Nothing to do."""

    def stepping(self, optimizer: object, scale: object, /) -> None:
        """Nothing to do."""

    def stepped(self, optimizer: object, outcome: object, /) -> None:
        """Nothing to do."""

    def updating(self) -> None:
        """Nothing to do."""

    def updated(self) -> None:
        """Nothing to do."""
