"""The findings of steps that failed: the origin of the first Inf or NaN, by what became of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gradscaler.diagnose._findings import origins
from gradscaler.diagnose._findings.case import Case, Outcome, in_a_row, now_and_then, of_bad_step
from gradscaler.diagnose._findings.detector import Phase, detector
from gradscaler.diagnose._findings.evidence import Evidence
from gradscaler.diagnose._findings.losses import divergence
from gradscaler.diagnose._record.failure import Failure
from gradscaler.diagnose._record.finding import Finding
from gradscaler.diagnose._record.located import BadGradient, Given, Located, Made
from gradscaler.diagnose._record.thresholds import LARGE_LOSS, ORDINARY, RARE, SAME_FAILURES

_GO_BACK = "Its weights are lost: go back to a checkpoint from before it."


def of_skips(evidence: Evidence) -> Finding:
    """The finding that explains a long streak of skips."""
    case = in_a_row(evidence)
    finding = _origin(case) or origins.overflow(case)
    return replace(finding, count=evidence.skips_in_a_row)


def of_a_bad_step(evidence: Evidence) -> Finding | None:
    """The cause of the first bad step, which destroyed the weights if it was applied to them."""
    bad = evidence.bad_step
    if bad is None:
        return None
    case = of_bad_step(bad, evidence)
    if (finding := _origin(case)) is None:
        return None
    is_said = case.outcome is not Outcome.APPLIED or "checkpoint" in finding.action
    action = finding.action if is_said else f"{finding.action} {_GO_BACK}"
    return replace(finding, action=action, steps=(bad.step,), count=1, is_certain=True)


def _origin(case: Case) -> Finding | None:
    """Where the first Inf or NaN began; None if gradients overflow, as far as is known.

    A parameter that is not finite may be the effect of a loss that exploded before, unless the step
    that failed was seen to read it.
    """
    is_given = isinstance(case.located, Given)
    return (
        origins.squared(case)
        or origins.update(case)
        or origins.within(case)
        or (None if case.is_skipped or case.parameter else origins.parameter(case))
        or (None if is_given or case.lost_eps is not None else divergence(case))
        or origins.parameter(case)
        or (None if is_given else _by_eps(case))
        or origins.large_numbers(case)
        or origins.forward(case)
        or origins.loss(case)
        or origins.gradient(case)
    )


def _by_eps(case: Case) -> Finding | None:
    """A loss that explodes as the optimizer's eps is 0, so that its steps have any size."""
    if case.lost_eps is None or (made := divergence(case)) is None:
        return None
    by, action = origins.of_eps(case.lost_eps)
    return replace(made, cause=f"{made.cause.removesuffix('.')}{by}.", action=action)


@detector(Phase.PARAMETER)
def parameter(evidence: Evidence) -> Finding | None:
    """A parameter or a buffer that is not finite, in a run with losses that are not."""
    has_bad_losses = evidence.bad_and_applied or evidence.bad_and_skipped
    return origins.parameter(now_and_then(evidence)) if has_bad_losses else None


@detector(Phase.FAILURE)
def caught(evidence: Evidence) -> Finding | None:
    """Skips whose cause is known, though neither a long streak nor a pattern shows it yet.

    One step is enough where an operation makes Inf or NaN from ordinary numbers, or a backward pass
    makes NaN at a scale of at most 1, behind a finite loss: that is no bad batch, and code which
    fails once will fail again.
    """
    if evidence.is_elsewhere:
        return None
    return _of_loss(evidence, evidence.watched) or _of_gradients(evidence, evidence.watched)


def _of_loss(evidence: Evidence, located: Located | None) -> Finding | None:
    """Losses that are not finite, by an operation of a forward pass."""
    if located is None or located.is_likely or located.operation is None:
        return None
    is_replayed = evidence.framework.is_recorded and isinstance(located, Made)  # Keras tells none
    failed = [each for each in evidence.failures if each.has_bad_loss] or [
        Failure(step.step, step.scale, step.loss, None)  # its gradients were not recorded
        for step in evidence.past
        if step.skipped and (step.has_bad_loss or (is_replayed and step.loss is None))
    ]
    # A script without a scaler that leaves out such a step may do so on purpose.
    is_ordinary = isinstance(located, Made) and located.largest_input <= ORDINARY
    is_ordinary = is_ordinary and (evidence.has_scaler or evidence.are_kept)
    if not failed or not (is_ordinary or _are_enough(failed, evidence)):
        return None
    return origins.forward(now_and_then(evidence, failed, located))


def _of_gradients(evidence: Evidence, watched: Located | None) -> Finding | None:
    """Gradients of NaN behind a finite loss, which no overflow makes."""
    found = watched
    if not isinstance(found, BadGradient) or found.is_likely:
        found = None
    # Where an operation was seen to turn finite gradients into NaN, another Inf proves nothing.
    failed = [each for each in evidence.failures if _has_nan(each, beside_inf=found is not None)]
    is_replayed = found is not None and evidence.framework.is_recorded  # of the unscaled loss
    if (len(failed) < SAME_FAILURES or found is None) and not is_replayed:
        failed = [each for each in failed if each.scale <= 1]
    if not failed and not is_replayed:
        return None
    is_handled = not (evidence.has_scaler or is_replayed)
    if is_handled and (evidence.are_kept or not _are_enough(failed, evidence)):
        return None
    if isinstance(watched, Given) and not evidence.has_scaler:
        return origins.forward(now_and_then(evidence, failed, watched))
    finding = origins.gradient(now_and_then(evidence, failed, found))
    return finding and replace(finding, count=evidence.skipped)


def _are_enough(failed: Sequence[Failure], evidence: Evidence) -> bool:
    return len(failed) >= SAME_FAILURES and len(failed) > RARE * evidence.steps


def _has_nan(failure: Failure, beside_inf: bool) -> bool:
    """Whether gradients hold NaN, and no Inf, which an overflow leaves most often."""
    is_finite = failure.loss is not None and abs(failure.loss) <= LARGE_LOSS  # False for NaN
    return is_finite and failure.nan is not None and (beside_inf or not failure.has_inf)
