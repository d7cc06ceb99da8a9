"""A failure whose operation was seen in a failing step itself, before such steps are many."""

from __future__ import annotations

import math
from dataclasses import replace

from gradscaler.diagnose._findings.advice import at_line, of_gradient
from gradscaler.diagnose._findings.evidence import Evidence
from gradscaler.diagnose._findings.skips_in_a_row import of_forward_pass
from gradscaler.diagnose._record.finding import Finding
from gradscaler.diagnose._record.lines import Skip

_FEW = 2  # failed steps: the first alone may be an accident, and the second shows the same place
_RARE = 0.02  # of all steps; rarer failures are bad batches, which `over_time.data` judges


def caught(evidence: Evidence) -> Finding | None:
    """Skips whose cause is known, though neither a long streak nor a pattern shows it yet."""
    found = evidence.watched
    if found is None or found.is_likely or found.operation is None or evidence.is_elsewhere:
        return None
    is_of_loss = found.kind != "backward"
    failed = tuple(skip for skip in evidence.inspected if _fails(skip, is_of_loss))
    if len(failed) < _FEW or len(failed) <= _RARE * evidence.steps:
        return None
    skipped = f"{evidence.skipped} of {evidence.steps} steps were skipped"
    if is_of_loss:
        return of_forward_pass(replace(evidence, skips=failed, located=found), skipped)
    name = next(each.name for each in failed[-1].nonfinite or () if each.num_nan)
    if (advice := of_gradient(found)) is None:
        return None
    return Finding(
        "nan",
        f"The gradient of {name} is NaN{at_line(found, ', by the gradient of')}, though the loss "
        f"is finite: {skipped}.",
        f"No loss scale fixes this: {advice}.",
        name,
        found.line,
        count=evidence.skipped,
    )


def _fails(skip: Skip, is_of_loss: bool) -> bool:
    """Whether a skip's loss is not finite, or else its gradients hold NaN and no Inf.

    An overflow leaves an Inf in the gradients, most often.
    """
    if skip.loss is not None and not math.isfinite(skip.loss):
        return is_of_loss
    found = skip.nonfinite or ()
    has_nan_alone = any(each.num_nan for each in found) and not any(each.num_inf for each in found)
    return not is_of_loss and has_nan_alone
