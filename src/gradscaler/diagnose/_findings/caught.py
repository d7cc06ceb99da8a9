"""A failure whose operation was seen in a failing step itself, before such steps are many."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from gradscaler.diagnose._findings.advice import at_line, of_backward
from gradscaler.diagnose._findings.evidence import Evidence
from gradscaler.diagnose._findings.nan_skips import LARGE_LOSS
from gradscaler.diagnose._findings.skips_in_a_row import of_forward_pass
from gradscaler.diagnose._record.finding import Finding
from gradscaler.diagnose._record.lines import Skip
from gradscaler.diagnose._record.located import Located

_FEW = 2  # failed steps: the first alone may be an accident, and the second shows the same place
_RARE = 0.02  # of all steps; rarer failures are bad batches, which `over_time.data` judges
_ORDINARY = 255.0  # an input whose square float16 can hold is no outlier of a bad batch


def caught(evidence: Evidence) -> Finding | None:
    """Skips whose cause is known, though neither a long streak nor a pattern shows it yet.

    One step is enough where an operation makes Inf or NaN from ordinary numbers, or a backward pass
    makes NaN at a scale of at most 1, behind a finite loss: that is no bad batch, and code which
    fails once will fail again.
    """
    if evidence.is_elsewhere:
        return None
    return _of_loss(evidence, evidence.watched) or _of_gradients(evidence, evidence.watched)


def _of_loss(evidence: Evidence, found: Located | None) -> Finding | None:
    """Losses that are not finite, by an operation of a forward pass."""
    if found is None or found.is_likely or found.operation is None or found.kind == "backward":
        return None
    failed = tuple(skip for skip in evidence.inspected if _has_bad_loss(skip))
    is_ordinary = found.kind == "forward" and found.largest_input <= _ORDINARY
    if not failed or not (is_ordinary or _are_enough(failed, evidence)):
        return None
    return of_forward_pass(replace(evidence, skips=failed, located=found), _skipped(evidence))


def _of_gradients(evidence: Evidence, found: Located | None) -> Finding | None:
    """Gradients of NaN behind a finite loss, which no overflow makes."""
    if found is not None and (found.kind != "backward" or found.is_likely):
        found = None
    # Where an operation was seen to turn finite gradients into NaN, another Inf proves nothing.
    failed = [skip for skip in evidence.inspected if _has_nan(skip, beside_inf=found is not None)]
    if len(failed) < _FEW or found is None:
        failed = [skip for skip in failed if skip.scale <= 1]
    if not failed:
        return None
    name = next(each.name for each in failed[-1].nonfinite or () if each.num_nan)
    return Finding(
        "nan",
        f"The gradient of {name} is NaN{at_line(found, 'by the gradient of')}, though the loss "
        f"is finite: {_skipped(evidence)}.",
        f"No loss scale fixes this: {of_backward(found)}.",
        name,
        None if found is None else found.line,
        count=evidence.skipped,
    )


def _are_enough(failed: Sequence[Skip], evidence: Evidence) -> bool:
    return len(failed) >= _FEW and len(failed) > _RARE * evidence.steps


def _skipped(evidence: Evidence) -> str:
    were = "was" if evidence.skipped == 1 else "were"
    return f"{evidence.skipped} of {evidence.steps} steps {were} skipped"


def _has_bad_loss(skip: Skip) -> bool:
    return skip.loss is not None and not math.isfinite(skip.loss)


def _has_nan(skip: Skip, beside_inf: bool) -> bool:
    """Whether gradients hold NaN, and no Inf, which an overflow leaves most often."""
    found = skip.nonfinite or ()
    is_finite = skip.loss is not None and abs(skip.loss) <= LARGE_LOSS  # False for NaN
    has_inf = any(each.num_inf for each in found)
    return is_finite and any(each.num_nan for each in found) and (beside_inf or not has_inf)
