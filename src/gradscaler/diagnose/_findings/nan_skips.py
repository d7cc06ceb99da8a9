"""Skips whose gradients hold NaN and no Inf."""

from __future__ import annotations

import math

from gradscaler.diagnose._findings.evidence import Evidence
from gradscaler.diagnose._record.failure import Failure
from gradscaler.diagnose._record.thresholds import CLOSE_TO_OVERFLOW, MOSTLY_NAN


def is_nan(skip: Failure, evidence: Evidence) -> bool:
    """Whether no overflow made an inspected skip's NaN, at the lowest scale, or at 1 or less.

    An overflow also makes NaN, by Inf - Inf and 0 * Inf, and far above the right scale it may leave
    NaN alone. So the loss must not be large and, at a scale above 1, the gradients of other steps
    must be far from overflow.
    """
    if not _is_low(skip, evidence) or not skip.has_nan_alone:
        return False
    is_far = evidence.peaks and not evidence.is_close_to_overflow(skip, CLOSE_TO_OVERFLOW)
    return skip.scale <= 1 or bool(is_far)


def nan_skips(evidence: Evidence) -> list[Failure]:
    """The inspected skips of the run whose NaN no overflow made."""
    return [skip for skip in evidence.failures if is_nan(skip, evidence)]


def uncured(evidence: Evidence) -> list[Failure]:
    """The inspected skips with NaN and no Inf that came after an applied step, at any scale.

    An overflow may have made the NaN, or not: nothing shows that a lower scale cured it.
    """
    first = next((step.step for step in evidence.past if not step.skipped), math.inf)
    later = (skip for skip in evidence.failures if skip.step > first)
    return [s for s in later if s.has_nan_alone and not _is_clipped_overflow(s, evidence)]


def are_mostly_nan(evidence: Evidence) -> bool:
    """Whether most of the inspected skips at such scales hold NaN alone."""
    seen = sum(_is_low(skip, evidence) for skip in evidence.failures)
    return len(nan_skips(evidence)) > MOSTLY_NAN * seen


def _is_clipped_overflow(skip: Failure, evidence: Evidence) -> bool:
    """Whether a skip's NaN was Inf before gradients were clipped, where they are near overflow.

    A norm of Inf multiplies gradients by 0, which makes Inf NaN, and all other numbers 0. A NaN
    before it makes all of them NaN. Recorded gradients are not clipped yet.
    """
    if evidence.framework.is_recorded:
        return False
    rest = [each.largest_finite for each in skip.nonfinite or ()]
    is_clipped = 0 in rest and not any(largest > 0 for largest in rest)
    return is_clipped and evidence.is_close_to_overflow(skip, CLOSE_TO_OVERFLOW)


def _is_low(skip: Failure, evidence: Evidence) -> bool:
    """Whether a skip's scale is 1 or less, or the lowest that its policy allows."""
    return skip.scale <= max(1.0, evidence.min_scale or 0.0)
