"""A detector: a function that finds one thing in the evidence, and when it is asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, IntEnum, auto

from gradscaler.diagnose._findings.evidence import Evidence
from gradscaler.diagnose._record.finding import Finding


class Phase(IntEnum):
    """The order of detectors: causes come before their effects, and the most certain come first.

    The detectors of a phase overlap, so only the first finding of each phase is reported.
    """

    WRITES_NAN = auto()  # what writes NaN into parameters
    PARAMETER = auto()  # a parameter that is not finite
    STATE = auto()  # an optimizer's state that is not
    AWAY = auto()  # what leads the weights away
    MISUSE = auto()  # calls that no training needs
    RESTART = auto()
    FAILURE = auto()  # losses and gradients that are not finite, or become so
    ABSORBED = auto()  # an Inf that makes a quotient 0
    LOSS = auto()  # what a loss computes, in place of what is meant
    DEAD = auto()  # gradients of 0
    MODE = auto()  # what may be meant so
    STALLED = auto()
    DTYPE = auto()
    SIZE = auto()  # of gradients
    SCALE = auto()


class Role(Enum):
    """What a detector's finding is to steps that fail."""

    CAUSE = auto()  # told before what the failing steps show
    BESIDE = auto()  # told after it


@dataclass(frozen=True)
class Detector:
    """A function that finds one thing, and when it is asked.

    Attributes:
        find: the function.
        phase: its place in the order, in a run whose steps do not fail in a row.
        needs_scaler: whether it speaks of a scaler, and is not asked where there is none.
        in_streak: its role in a long streak of skips; None if it is not asked there.
        at_bad_step: its role after a step that was applied though it failed; None if not asked.
    """

    find: Callable[[Evidence], Finding | None]
    phase: Phase
    needs_scaler: bool = False
    in_streak: Role | None = None
    at_bad_step: Role | None = None

    def __call__(self, evidence: Evidence) -> Finding | None:
        """What the function finds; None if it is not asked."""
        if self.needs_scaler and not evidence.has_scaler:
            return None
        return self.find(evidence)


def detector(
    phase: Phase,
    *,
    needs_scaler: bool = False,
    in_streak: Role | None = None,
    at_bad_step: Role | None = None,
) -> Callable[[Callable[[Evidence], Finding | None]], Detector]:
    """Make a function a :class:`Detector`."""
    return lambda find: Detector(find, phase, needs_scaler, in_streak, at_bad_step)
