"""Whether a loss falls in a run without a finding, and what may keep it from falling."""

from __future__ import annotations

from statistics import fmean

from gradscaler.diagnose._findings.evidence import Evidence
from gradscaler.diagnose._findings.loss_graphs import place_of
from gradscaler.diagnose._record.lines import ParameterSample

_FEW_SAMPLES = 2
_RAN_AWAY = 1e3  # times the first loss
_ROSE = 2.0  # times the first loss; a batch's own loss often is a little larger
_FELL = 0.05  # of the first loss, at least
_EARLY, _LATEST = 10, 20  # steps, whose mean losses are compared, as one batch's own says little
_VANISHED = 20  # powers of 2 from the largest gradient of one parameter to that of another
_A_BOUND = "a lower bound, look for a term with the wrong sign"
_LONG = 100  # steps, in which a loss falls


def whether_it_learns(evidence: Evidence) -> str:
    """The first and the latest loss, as finite numbers alone do not make a training good."""
    losses = [step.loss for step in evidence.past if step.loss is not None]
    first = evidence.first and evidence.first.loss
    if first is None or not losses:
        return "Nothing needs fixing."
    went = f"the loss went from {first:g} to {losses[-1]:g}"
    judged = f"Nothing else was judged: {went}"
    if evidence.is_scaled_by_hand:
        return f"{judged}, multiplied by the script's own loss scale."
    if losses[-1] > _ROSE * abs(first) or -losses[-1] > _RAN_AWAY * max(abs(first), 1.0):
        should = "fallen, lower the learning rate" if losses[-1] > 0 else _A_BOUND
        return f"{judged}. If it should have {should}."
    is_whole = evidence.steps == len(evidence.past)
    usual = fmean(losses[:_EARLY]) if is_whole else first
    if evidence.steps < _LONG or fmean(losses[-_LATEST:]) < usual - _FELL * abs(usual):
        return f"Nothing needs fixing: {went}."
    ends = [rate for _, rate in (*evidence.rates[:1], *evidence.rates[-1:])]
    if hint := _overwritten(evidence) or _unheld(evidence) or _vanished(evidence):
        return f"{judged}, {hint}"
    rates = " to ".join(dict.fromkeys(f"{rate:g}" for rate in ends))
    rate = f", at a learning rate of {rates}" if ends else ""
    return (
        f"{judged}{rate}. If it should have fallen, look at the learning rate, clipping, inputs "
        "and targets."
    )


def _overwritten(evidence: Evidence) -> str | None:
    if evidence.calls.get("overwritten", 0) < _FEW_SAMPLES:
        return None
    return (
        "and weights change between the steps, too. If the loss should have fallen, look for what "
        "writes into them, beside a clipping that is meant: an average of weights with source and "
        "target swapped, or load_state_dict()."
    )


def _unheld(evidence: Evidence) -> str | None:
    if evidence.calls.get("unheld", 0) < _FEW_SAMPLES:
        return None
    return (
        f"and it depends on parameters that neither the model nor an optimizer holds: "
        f"{place_of('unheld', evidence)}. Give them to an optimizer; or call "
        "requires_grad_(False) on those that are meant to stay."
    )


def _vanished(evidence: Evidence) -> str | None:
    """A hint if gradients shrink from layer to layer."""
    sample = evidence.sample
    found = {} if sample is None else sample.parameters
    largest = {name: top for name, each in found.items() if (top := _largest(each)) is not None}
    if not largest:
        return None
    low, high = min(largest, key=lambda n: largest[n]), max(largest, key=lambda n: largest[n])
    if largest[high] - largest[low] < _VANISHED:
        return None
    return (
        f"and gradients vanish on their way: those of {low} are at most 2**{largest[low]}, those "
        f"of {high} 2**{largest[high]}. If the loss should have fallen, take a normalization "
        "layer, residual connections, and ReLU in place of sigmoid or tanh."
    )


def _largest(found: ParameterSample) -> int | None:
    """The exponent above the largest gradient of a parameter; None if all are 0."""
    bins = found.histogram
    return bins.first + len(bins.counts) if bins.counts else None
