"""Where a monitor learns of steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from gradscaler.diagnose.gradients.module_hooks import Located
from gradscaler.diagnose.monitor.steps import StepLog
from gradscaler.outcome import NonfiniteGradient


@dataclass(eq=False, repr=False)
class StepSource(ABC):
    """Learns of a scaler's steps, and adds them to a log.

    Attributes:
        scaler: the scaler to watch, as it is before the first step.
        model: gives the parameters their names, or None.
        log: where steps are added.
        every: steps from one sample to the next.
        forensics: inspect every n-th skipped step; 0 disables.
        dtype: the format for samples.
    """

    scaler: Any
    model: Any
    log: StepLog
    every: int
    forensics: int
    dtype: str

    @abstractmethod
    def __post_init__(self) -> None:
        """Note where the scaler stands."""

    @abstractmethod
    def read(self) -> object:
        """Add the steps that wait to be added; waits for the device."""

    def close(self) -> None:
        """Learn of no more steps, and add those that wait."""
        self.read()

    @abstractmethod
    def nonfinite_parameters(self) -> tuple[NonfiniteGradient, ...]:
        """The parameters that are themselves not finite."""

    @property
    def located(self) -> Located | None:
        """The module that made the first Inf or NaN in the latest iteration that was watched."""
        return None

    @property
    def _inspects_next_skip(self) -> bool:
        return self.forensics > 0 and (self.log.num_skipped + 1) % self.forensics == 0
