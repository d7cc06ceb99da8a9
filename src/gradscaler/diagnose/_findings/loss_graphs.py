"""Findings from the graphs of losses, which samples read."""

from __future__ import annotations

from gradscaler.diagnose._findings.detector import Detector, Phase, Role, detector
from gradscaler.diagnose._findings.evidence import Evidence
from gradscaler.diagnose._record.events import Event
from gradscaler.diagnose._record.finding import Finding
from gradscaler.diagnose._record.thresholds import FEW_SAMPLES


@detector(Phase.AWAY, at_bad_step=Role.CAUSE)
def unbounded(evidence: Evidence) -> Finding | None:
    """A loss that is negative although its operation never is for targets as they should be."""
    if evidence.events.count(Event.NEGATIVE) < FEW_SAMPLES:
        return None
    return Finding(
        "divergence",
        "A cross entropy is negative, which it never is for targets from 0 to 1 and inputs that "
        "are probabilities (or their logarithms, for nll_loss): the loss has no lower bound.",
        "Bring the targets into 0 to 1 (a mask of 255, labels of -1 and 1, a soft label), and give "
        "nll_loss the output of log_softmax.",
        count=evidence.events.count(Event.NEGATIVE),
    )


def _at_a_place(phase: Phase, event: Event, kind: str, cause: str, action: str) -> Detector:
    """The detector of an event that samples count by its place.

    ``cause`` and ``action`` may name ``{place}``, ``{operation}`` and ``{count}``.
    """

    @detector(phase)
    def detect(evidence: Evidence) -> Finding | None:
        count = evidence.events.count(event)
        if count < FEW_SAMPLES:
            return None
        place = evidence.events.place(event)
        operation, _, rest = place.partition(" at ")
        known = {"place": place, "operation": operation, "count": count}
        line = rest.partition(" makes ")[0] or None
        return Finding(kind, cause.format(**known), action.format(**known), line=line, count=count)

    return detect


absorbed = _at_a_place(
    Phase.ABSORBED,
    Event.ABSORBED,
    "activations",
    "The forward pass divides by an Inf of float16, in {place}, in each of {count} samples: the "
    "quotient and its gradient are exactly 0, though the loss is finite.",
    "Compute that divisor in float32 (x.float()): a sum, a count or a mean of squares beyond 65504 "
    "is Inf in float16.",
)
normalised_twice = _at_a_place(
    Phase.LOSS,
    Event.TWICE,
    "misuse",
    "The loss takes logits and is given probabilities, the output of {place}: it normalises them "
    "once more, so it cannot come near 0, and its gradients are small.",
    "Leave out this {operation}, as cross_entropy and binary_cross_entropy_with_logits apply their "
    "own; or give the logarithm of probabilities to nll_loss.",
)
across = _at_a_place(
    Phase.LOSS,
    Event.ACROSS,
    "misuse",
    "nll_loss takes the classes along dim 1, and {place} is along dim 0: the probabilities of a "
    "class add up to 1 over the batch, not those of a row over the classes.",
    "Call log_softmax with dim=1, or give the logits to cross_entropy.",
)
broadcast = _at_a_place(
    Phase.LOSS,
    Event.BROADCAST,
    "misuse",
    "The loss compares each output with each target of the batch, not with its own: {place}, by "
    "broadcasting.",
    "Unless all pairs are meant, give outputs and targets one shape: squeeze(-1) those of shape "
    "[n, 1], or unsqueeze(-1) the others. Else outputs become the mean of the targets.",
)
unregistered = _at_a_place(
    Phase.MISUSE,
    Event.UNREGISTERED,
    "misuse",
    "The model does not know {place}, in a list or dict, though the loss depends on them: "
    "model.parameters() leaves them out, and nothing moves them.",
    "Keep layers in nn.ModuleList or nn.ModuleDict, parameters in nn.ParameterList, and make the "
    "optimizer after them; or call requires_grad_(False) on those that are meant to stay.",
)
