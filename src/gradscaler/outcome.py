"""The outcome of one step of one optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, SupportsFloat

HISTORY_LENGTH = 1000
"""The number of steps in a scaler's ``history``."""

Reason = Literal["finite", "overflow", "retries_exhausted", "no_gradients", "disabled"]


@dataclass(frozen=True)
class NonfiniteGradient:
    """A parameter whose gradient held an Inf or a NaN.

    Attributes:
        name: the parameter's name.
        shape: the gradient's shape.
        dtype: the gradient's dtype, under its framework's name, such as ``"float16"``.
        num_inf: the number of elements that are Inf, of either sign.
        num_nan: the number of elements that are NaN.
        largest_finite: the largest magnitude of the other elements; NaN if there are none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_inf: int
    num_nan: int
    largest_finite: float


class StepOutcome:
    """The record of one ``scaler.step(optimizer)``.

    A fused optimizer decides on the device whether to apply its update, so the decision may not be
    on the host yet when ``step`` returns. A property reads it when it is first asked for, and only
    then may wait for the device.

    >>> outcome = StepOutcome(scale=65536.0, found_inf=True)
    >>> outcome.skipped, outcome.reason
    (True, 'overflow')

    Attributes:
        nonfinite: the gradients that held an Inf or a NaN, if the step was skipped and a
            :class:`gradscaler.diagnose.Monitor` inspected it; else None.
    """

    __slots__ = ("_found_inf", "_reason", "_scale", "nonfinite")

    def __init__(
        self,
        scale: SupportsFloat,
        found_inf: bool | Callable[[], bool],
        reason: Reason | None = None,
    ) -> None:
        self._scale = scale
        self._found_inf = found_inf
        self._reason = reason
        self.nonfinite: tuple[NonfiniteGradient, ...] | None = None

    @property
    def found_inf(self) -> bool:
        """Whether the gradients held an Inf or a NaN."""
        if callable(self._found_inf):
            self._found_inf = self._found_inf()
        return self._found_inf

    @property
    def reason(self) -> Reason:
        """Why the step was applied or skipped.

        Applied: ``"finite"`` gradients, or loss scaling ``"disabled"``. Skipped: ``"overflow"``,
        ``"retries_exhausted"`` (gradients overflowed in every repetition, at ever lower scales), or
        ``"no_gradients"`` (no parameter of the optimizer had a gradient).
        """
        return self._reason or ("overflow" if self.found_inf else "finite")

    @property
    def known_reason(self) -> Reason | None:
        """The reason if it was known when ``step`` returned, else None. Never waits."""
        return self._reason

    @property
    def applied(self) -> bool:
        """Whether the optimizer updated its parameters."""
        return not self.skipped

    @property
    def skipped(self) -> bool:
        """Whether the optimizer left its parameters as they were."""
        return self.reason not in ("finite", "disabled")

    @property
    def scale(self) -> float:
        """The loss scale that the gradients were unscaled by."""
        self._scale = float(self._scale)
        return self._scale

    def __repr__(self) -> str:
        verb = "applied" if self.applied else "skipped"
        return f"StepOutcome({verb}, reason={self.reason!r}, scale={self.scale!r})"


class Observer(Protocol):
    """An object that a scaler tells of its calls. A monitor's observer is one."""

    def scaled(self, outputs: object, /) -> None:
        """``scale`` was called with this tensor."""

    def unscaling(self, optimizer: object, scale: SupportsFloat, /) -> None:
        """``unscale_`` was called; gradients are still multiplied by ``scale``.

        Also called when ``step`` unscales, but not in a closure.
        """

    def stepping(self, optimizer: object, scale: SupportsFloat | None, /) -> None:
        """``step`` was called; gradients are still multiplied by ``scale``, unless it is None."""

    def stepped(self, optimizer: object, outcome: StepOutcome, /) -> None:
        """``step`` is done, and the gradients are still there."""

    def updating(self) -> None:
        """``update`` was called, and nothing has moved yet. An exception here stops it."""

    def updated(self) -> None:
        """``update`` is done. If this raises, calling ``update`` again moves nothing twice."""
