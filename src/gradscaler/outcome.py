"""What happened in one step of one optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, SupportsFloat

HISTORY_LENGTH = 1000
"""Steps that a scaler's ``history`` goes back."""

Reason = Literal["finite", "overflow", "retries_exhausted", "no_gradients", "disabled"]


@dataclass(frozen=True)
class NonfiniteGradient:
    """A parameter whose gradient held an Inf or a NaN.

    Attributes:
        name: the parameter's.
        shape: of the gradient.
        dtype: of the gradient, by its framework's name, such as ``"float16"``.
        num_inf: how many elements are Inf, of either sign.
        num_nan: how many are NaN.
        largest_finite: the largest magnitude of the rest; NaN if there is no rest.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_inf: int
    num_nan: int
    largest_finite: float


class StepOutcome:
    """The record of one ``scaler.step(optimizer)``.

    A fused optimizer decides on the device whether to apply its update, so the answer may still
    be there when ``step`` returns. The record reads it when first asked. Only then may a property
    wait for the device.

    >>> outcome = StepOutcome(scale=65536.0, found_inf=True)
    >>> outcome.skipped, outcome.reason
    (True, 'overflow')

    Attributes:
        nonfinite: the gradients that held an Inf or a NaN, for a skipped step that a
            :class:`gradscaler.diagnose.Monitor` inspected; else None.
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
        ``"retries_exhausted"`` (a closure overflowed at each scale that was tried), or
        ``"no_gradients"`` (no parameter of the optimizer had one).
        """
        return self._reason or ("overflow" if self.found_inf else "finite")

    @property
    def known_reason(self) -> Reason | None:
        """The reason if it was known when ``step`` returned, else None. Never waits."""
        return self._reason

    @property
    def applied(self) -> bool:
        """Whether the optimizer updated its parameters."""
        return self.reason in ("finite", "disabled")

    @property
    def skipped(self) -> bool:
        """Whether the optimizer left its parameters as they were."""
        return not self.applied

    @property
    def scale(self) -> float:
        """The loss scale that the gradients were unscaled by."""
        self._scale = float(self._scale)
        return self._scale

    def __repr__(self) -> str:
        verb = "applied" if self.applied else "skipped"
        return f"StepOutcome({verb}, reason={self.reason!r}, scale={self.scale!r})"


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

    def updated(self) -> None:
        """``update`` is done. After an exception, the same call again moves nothing twice."""
