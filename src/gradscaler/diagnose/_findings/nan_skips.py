"""Skips whose gradients hold NaN and no Inf, at a scale at which no overflow leaves that."""

from __future__ import annotations

from gradscaler.diagnose._findings.evidence import Evidence
from gradscaler.diagnose._record.lines import Skip

LARGE_LOSS = 65504.0  # gradients of a larger loss overflow anyway, and may become NaN
# Of the largest number. Gradients may grow by the rest in one step: those of healthy batches can be
# ten times apart (`noisy_gradients_at_the_edge` in the tests' trainings).
CLOSE = 2.0**-5
_MOST = 0.5  # of the inspected skips


def is_nan(skip: Skip, evidence: Evidence) -> bool:
    """Whether an inspected skip's gradients hold NaN alone, at the lowest scale, or at 1 or less.

    An overflow also makes NaN, by Inf - Inf and 0 * Inf, and far above the right scale it may leave
    NaN alone. So the loss must not be large and, at a scale above 1, the gradients of other steps
    must be far from overflow.
    """
    found = skip.nonfinite or ()
    if not _is_low(skip, evidence) or not found or any(each.num_inf for each in found):
        return False
    is_far = evidence.peaks and not evidence.is_close_to_overflow(skip, CLOSE)
    return abs(skip.loss or 0.0) <= LARGE_LOSS and (skip.scale <= 1 or bool(is_far))


def nan_skips(evidence: Evidence) -> list[Skip]:
    """The inspected skips of the run that hold NaN alone."""
    return [skip for skip in evidence.inspected if is_nan(skip, evidence)]


def are_mostly_nan(evidence: Evidence) -> bool:
    """Whether most of the inspected skips at such scales hold NaN alone."""
    seen = sum(_is_low(skip, evidence) for skip in evidence.inspected)
    return len(nan_skips(evidence)) > _MOST * seen


def nan_gradient(evidence: Evidence) -> str:
    """The name of a gradient that was NaN in the latest such skip."""
    return next(g.name for g in nan_skips(evidence)[-1].nonfinite or () if g.num_nan)


def _is_low(skip: Skip, evidence: Evidence) -> bool:
    """Whether a skip's scale is 1 or less, or the lowest that its policy allows."""
    return skip.scale <= max(1.0, evidence.min_scale or 0.0)
