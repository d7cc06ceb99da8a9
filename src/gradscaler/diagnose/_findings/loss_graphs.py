"""Findings from the graphs of losses, which samples read."""

from __future__ import annotations

from gradscaler.diagnose._findings.evidence import Evidence
from gradscaler.diagnose._record.finding import Finding

_FEW_SAMPLES = 2


def unbounded(evidence: Evidence) -> Finding | None:
    """A loss that is negative although its operation never is for targets as they should be."""
    if evidence.calls.get("negative", 0) < _FEW_SAMPLES:
        return None
    return Finding(
        "divergence",
        "A cross entropy is negative, which it never is for targets from 0 to 1 and inputs that "
        "are probabilities (or their logarithms, for nll_loss): the loss has no lower bound.",
        "Bring the targets into 0 to 1 (a mask of 255, labels of -1 and 1, a soft label), and give "
        "nll_loss the output of log_softmax.",
        count=evidence.calls["negative"],
    )


def absorbed(evidence: Evidence) -> Finding | None:
    """An Inf in the forward pass that a division makes 0, so that no loss or gradient shows it."""
    count = evidence.calls.get("absorbed", 0)
    if count < _FEW_SAMPLES:
        return None
    by = place_of("absorbed", evidence)
    return Finding(
        "activations",
        f"The forward pass divides by an Inf of float16, in {by}, in each of {count} samples: the "
        "quotient and its gradient are exactly 0, though the loss is finite.",
        "Compute that divisor in float32 (x.float()): a sum, a count or a mean of squares beyond "
        "65504 is Inf in float16.",
        line=_line_in(by),
        count=count,
    )


def normalised_twice(evidence: Evidence) -> Finding | None:
    """A loss that takes probabilities where it expects logits."""
    count = evidence.calls.get("twice", 0)
    if count < _FEW_SAMPLES:
        return None
    by = place_of("twice", evidence)
    return Finding(
        "misuse",
        f"The loss takes logits and is given probabilities, the output of {by}: it normalises "
        "them once more, so it cannot come near 0, and its gradients are small.",
        f"Leave out this {by.partition(' ')[0]}, as cross_entropy and "
        "binary_cross_entropy_with_logits apply their own; or give the logarithm of probabilities "
        "to nll_loss.",
        line=_line_in(by),
        count=count,
    )


def across(evidence: Evidence) -> Finding | None:
    """Probabilities that add up to 1 over the batch, in place of the classes."""
    count = evidence.calls.get("across", 0)
    if count < _FEW_SAMPLES:
        return None
    by = place_of("across", evidence)
    return Finding(
        "misuse",
        f"nll_loss takes the classes along dim 1, and {by} is along dim 0: the probabilities of a "
        "class add up to 1 over the batch, not those of a row over the classes.",
        "Call log_softmax with dim=1, or give the logits to cross_entropy.",
        line=_line_in(by),
        count=count,
    )


def broadcast(evidence: Evidence) -> Finding | None:
    """A loss that compares each output with all targets of its batch."""
    count = evidence.calls.get("broadcast", 0)
    if count < _FEW_SAMPLES:
        return None
    by = place_of("broadcast", evidence)
    return Finding(
        "misuse",
        f"The loss compares each output with each target of the batch, not with its own: {by}, by "
        "broadcasting.",
        "Unless all pairs are meant, give outputs and targets one shape: outputs.squeeze(-1), or "
        "targets.unsqueeze(-1). Else outputs become the mean of the targets.",
        line=_line_in(by),
        count=count,
    )


def place_of(kind: str, evidence: Evidence) -> str:
    """The place that most samples show for calls of a kind, such as ``"sub at train.py:7"``."""
    places = {name: n for name, n in evidence.calls.items() if name.startswith(f"{kind} ")}
    return max(places, key=lambda name: places[name]).partition(" ")[2]


def _line_in(place: str) -> str | None:
    """The line in a place; None if it is unknown."""
    return place.partition(" at ")[2].partition(" makes ")[0] or None
