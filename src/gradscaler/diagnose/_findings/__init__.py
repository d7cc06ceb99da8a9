"""Judge a run: turn its evidence into findings, the gravest first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from gradscaler.diagnose._findings import (
    calls,
    gradient_values,
    loss_graphs,
    losses,
    optimizers,
    over_time,
)
from gradscaler.diagnose._findings.advice import seen_in
from gradscaler.diagnose._findings.bad_steps import applied
from gradscaler.diagnose._findings.caught import caught
from gradscaler.diagnose._findings.evidence import Evidence
from gradscaler.diagnose._findings.learning import whether_it_learns
from gradscaler.diagnose._findings.nan_skips import nan_gradient, nan_skips
from gradscaler.diagnose._findings.skips_in_a_row import (
    EXPLAIN_ALL,
    bad_parameter,
    bad_state,
    of_skips,
)
from gradscaler.diagnose._record.finding import Finding, Verdict, verdict_of

_Detector = Callable[[Evidence], Finding | None]

# The most certain findings come first, and causes come before their effects. The detectors of a
# group overlap, so only the first finding of each group is reported.
_GROUPS: tuple[tuple[_Detector, ...], ...] = (
    (bad_state,),
    (calls.unused, calls.disabled, optimizers.stepless),
    (optimizers.uphill, loss_graphs.unbounded, optimizers.decayed),
    (optimizers.still, optimizers.renewed, optimizers.faded),
    (optimizers.idle,),
    (optimizers.outside, loss_graphs.unregistered),
    (optimizers.unscaled,),
    (calls.unzeroed,),
    (calls.scaled_in_loss,),
    (calls.clipped_while_scaled,),
    (calls.updated_too_often, calls.unscaled_loss),
    (calls.restarted,),
    (losses.silent, losses.diverged, losses.ran_away, losses.died, over_time.data, caught),
    (loss_graphs.absorbed,),
    (loss_graphs.normalised_twice, loss_graphs.across, loss_graphs.broadcast),
    (gradient_values.cut_off, gradient_values.dead, gradient_values.unfed),
    (calls.stalled,),
    (calls.full_precision, calls.without_scaling),
    (gradient_values.too_small,),
    (over_time.lowered, over_time.earlier),
)
# A finding of the first kind explains findings of the others. Bad batches lower the scale, so it
# is too small or below 1. Gradients behind a slope of 0 are 0, which is not underflow.
_SAID_BY = {
    "data": ("underflow", "floor"),
    "dead": ("underflow",),
    "activations": ("dead",),
    "divergence": ("dead",),
}
_BESIDE_SKIPS: tuple[_Detector, ...] = (
    bad_state,
    calls.restarted,
    calls.clipped_while_scaled,
    calls.updated_too_often,
    calls.stalled,
)
# They speak of a scaler, and are not asked where there is none.
_OF_SCALERS: frozenset[_Detector] = frozenset(
    {
        calls.full_precision,
        calls.restarted,
        calls.scaled_in_loss,
        calls.unscaled_loss,
        calls.updated_too_often,
        calls.clipped_while_scaled,
        gradient_values.too_small,
        optimizers.stepless,
        optimizers.unscaled,
        over_time.lowered,
    }
)
# Mistakes that a bad step does not explain; these may explain it.
_CAUSES_OF_BAD_STEPS = optimizers.nonfinite, optimizers.uphill, loss_graphs.unbounded
_BESIDE_BAD_STEPS: tuple[_Detector, ...] = (
    optimizers.idle,
    optimizers.outside,
    calls.unzeroed,
    calls.without_scaling,
)

_SHORT = 50  # steps; the last one that a monitor samples early


def judge(evidence: Evidence) -> Verdict:
    """The verdict on the evidence: all findings, the gravest first, or that nothing is unusual."""
    if evidence.bad_step is not None:
        findings = _found((*_CAUSES_OF_BAD_STEPS, applied, *_BESIDE_BAD_STEPS), evidence)
    else:
        findings = _in_a_streak(evidence) if evidence.skips else _over_a_run(evidence)
    return verdict_of(list(findings) or [_normal(evidence)])


def _in_a_streak(evidence: Evidence) -> Iterator[Finding]:
    """Yield the findings for a long streak of skips: first its cause, then all others."""
    yield from _found((optimizers.nonfinite, optimizers.uphill, calls.repeated), evidence)
    yield from _found((calls.unzeroed, calls.scaled_in_loss), evidence)
    yield of_skips(evidence)
    yield from _found(_BESIDE_SKIPS, evidence)


def _over_a_run(evidence: Evidence) -> Iterator[Finding]:
    yield from _found((optimizers.nonfinite, calls.repeated), evidence)
    count = evidence.bad_and_applied + evidence.bad_and_skipped
    if evidence.parameter is not None and count:
        so = f"and the loss was NaN or Inf in {count} of {evidence.steps} steps"
        finding = bad_parameter(evidence, so)
        if finding is not None:
            yield finding
    kinds: set[str] = set()
    for group in _GROUPS:
        finding = next(_found(group, evidence), None)
        said = {kind for before in kinds for kind in _SAID_BY.get(before, ())}
        if finding is not None and finding.kind not in said:
            kinds.add(finding.kind)
            yield finding


def _found(detectors: Iterable[_Detector], evidence: Evidence) -> Iterator[Finding]:
    asked = (each for each in detectors if evidence.has_scaler or each not in _OF_SCALERS)
    found = (detector(evidence) for detector in asked)
    return (finding for finding in found if finding is not None)


def _normal(evidence: Evidence) -> Finding:
    if not evidence.steps:
        action = (
            "In JAX, Keras and MindSpore, call monitor.record() after each step; elsewhere, call "
            "step(optimizer) of the scaler that is watched."
        )
        if not evidence.has_scaler:
            action = (
                "Call loss.backward() and step() of an optimizer of torch.optim that holds the "
                "model's parameters."
            )
        elif evidence.calls.get("raised"):
            action = "A call of the scaler raised an error: do what its message says."
        return Finding("normal", "No step was seen yet.", action)
    were = "were" if evidence.skipped > 1 else "was"
    steps = f"{evidence.steps} {evidence.step_word}s"
    text = f"{evidence.skipped or 'None'} of {steps} {were} skipped"
    if not evidence.has_scaler:
        text = f"None of {steps} had a gradient of NaN or Inf"
    if evidence.skipped and evidence.is_elsewhere:
        text += ", because another rank's gradients overflowed while this one's were finite."
        is_unusual = evidence.has_many_skips or (evidence.scale is not None and evidence.scale < 1)
        if is_unusual:
            return Finding("elsewhere", text, EXPLAIN_ALL, is_certain=False)
        return Finding("normal", text, _nothing(evidence))
    if bad := [step.step for step in evidence.past if step.has_bad_loss]:
        listed = " and ".join(map(str, bad[-2:]))
        numbers = f"step{'s' * (len(bad) > 1)} {listed}"
        return Finding(
            "normal",
            f"{text}, and the loss itself was NaN or Inf in {numbers}{seen_in(evidence.watched)}.",
            "So few batches do no harm; look at them if more follow.",
            steps=tuple(bad[-2:]),
        )
    if at_lowest := _at_lowest(evidence):
        bad = [skip.step for skip in nan_skips(evidence)]
        text += f" at a scale that cannot fall, the last in step {at_lowest[-1]}"
        text += f", where the gradient of {nan_gradient(evidence)} was NaN" if bad else ""
        action = "So few steps do no harm; look at their batches if more follow."
        return Finding("normal", f"{text}.", action, steps=at_lowest[-2:])
    if evidence.skipped:
        text += " while the loss scale settled, and a lower scale cured each overflow"
    return Finding("normal", f"{text}.", _nothing(evidence))


def _at_lowest(evidence: Evidence) -> tuple[int, ...]:
    """The latest skipped steps at the lowest scale, which no lower scale cured."""
    lowest = evidence.min_scale or 0.0
    return tuple(step.step for step in evidence.past if step.skipped and step.scale <= lowest)


def _nothing(evidence: Evidence) -> str:
    """The action if nothing is unusual; it names parameters that never had a gradient."""
    if evidence.sample is None and evidence.steps <= _SHORT:
        return f"Too short to judge: {evidence.steps} steps, no gradient read."
    if evidence.sample is None:
        seen = "skips and losses" if evidence.has_scaler else "losses"
        return f"No gradients were read; {seen} show nothing that needs fixing."
    if not evidence.missing:
        return "Nothing needs fixing." if evidence.has_scaler else whether_it_learns(evidence)
    first, *rest = evidence.missing
    those = f"{first} and {len(rest)} more" if rest else first
    return (
        f"Nothing needs fixing, unless {those} should be trained: no sample holds a gradient of "
        "them."
    )
