"""Findings from the graphs of losses, which samples read."""

from __future__ import annotations

from collections import Counter

from gradscaler.diagnose._findings.detector import Detector, Phase, Role, detector
from gradscaler.diagnose._findings.evidence import Evidence
from gradscaler.diagnose._record.events import Event, Events
from gradscaler.diagnose._record.finding import Finding
from gradscaler.diagnose._record.thresholds import (
    EARLY_SAMPLES,
    FEW_SAMPLES,
    HALF,
    LEAST_CLASSES,
    LISTED,
    LONG,
    SUMMED_FROM,
    SUMMED_SAMPLES,
)


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


_WHY_ENDED = {
    "factor": (
        "it is multiplied by numbers that are all 0",
        "Rewards may be 0 for a while; else look at them: advantages are 0 if the rewards of a "
        "group are equal, and a mask or weights may be 0 everywhere.",
    ),
    "ignored": (
        "each target is its ignore_index",
        "Look at how targets are made: a mask over the whole answer, an answer that is cut off, or "
        "classes that a mapping leaves out.",
    ),
    "margin": (
        "each term is beyond its margin, where the slope is 0",
        "Unless there is nothing to learn, take a larger margin or harder negatives, normalise "
        "embeddings, as distances grow with them, and look at the sign of the difference.",
    ),
    "equal": (
        "each output equals its target",
        "Look at where targets come from: the model itself, or a teacher with the same weights.",
    ),
    "alone": (
        "a softmax over one class alone gives it the probability 1",
        "Outputs of one column take a binary cross entropy; a loss that compares the samples of a "
        "batch with each other takes several of them.",
    ),
    "empty": (
        "it is computed from no elements",
        "Look at the mask, the index or the slice that selects them.",
    ),
}


@detector(Phase.DEAD)
def ended(evidence: Evidence) -> Finding | None:
    """A loss that has been 0 from the start, with gradients that are exactly 0."""
    count, dead = evidence.events.count(Event.ENDED), _dead_in_turns(evidence)
    if evidence.sample is None or not (evidence.has_no_loss or dead) or count < FEW_SAMPLES:
        return None
    cause, _, place = evidence.events.place(Event.ENDED).partition(" ")
    if cause not in _WHY_ENDED:
        return None
    why, action = _WHY_ENDED[cause]
    whose, all_ = (f" of {dead}", "its") if dead else ("", "all")
    return Finding(
        "dead",
        f"The loss{whose} is 0, and {all_} gradients are exactly 0, in each of {count} samples: "
        f"{why}, in {place}.",
        action,
        line=place.partition(" at ")[2] or None,
        count=count,
        is_certain=cause != "factor",
        lasts=LONG if cause == "factor" else 0,
    )


def _dead_in_turns(evidence: Evidence) -> str:
    """The first module whose gradients are 0 in all samples, if optimizers take turns; else empty.

    A sample has those of the others, too, which keep theirs from their own turn.
    """
    samples = evidence.measured
    if not evidence.takes_turns or len(samples) < EARLY_SAMPLES:
        return ""
    zeros = ({n for n, found in each.parameters.items() if found.zero == 1} for each in samples)
    always = set.intersection(*zeros)
    first = next((name for name in samples[-1].parameters if name in always), "")
    return first.partition(".")[0]


def _at_a_place(
    phase: Phase, event: Event, kind: str, cause: str, action: str, *, is_certain: bool = True
) -> Detector:
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
        told = cause.format(**known), action.format(**known)
        return Finding(kind, *told, line=line, count=count, is_certain=is_certain)

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
cut = _at_a_place(
    Phase.LOSS,
    Event.CUT,
    "misuse",
    "The loss takes logits and is given the output of {place}, which is never negative: a class "
    "whose logits are 0 in each row gets no gradient any more, and none becomes improbable.",
    "Leave out this {operation}: the logits are the output of the last linear layer.",
)
across = _at_a_place(
    Phase.LOSS,
    Event.ACROSS,
    "misuse",
    "The loss takes one class of each row, and {place} is not along the classes: the "
    "probabilities of a class add up to 1 over the batch (or time), not those of a row.",
    "Call it along the classes: with dim=1 for the shape [batch, classes], with dim=-1 before "
    "view(-1, classes); or give the logits to cross_entropy.",
)
over_queries = _at_a_place(
    Phase.LOSS,
    Event.OVER_QUERIES,
    "misuse",
    "The attention of {place} is not along its keys: the weights with which a query takes the "
    "values do not add up to 1, as those of a key do over the queries (or over the batch).",
    "Call it with dim=-1 on scores of shape [..., queries, keys], unless queries are meant to "
    "compete for keys.",
    is_certain=False,
)
zero_masked = _at_a_place(
    Phase.MODE,
    Event.ZERO_MASKED,
    "misuse",
    "Masked scores become 0 and not -Inf before a softmax, in {place}, as the mask of 0 and 1 "
    "multiplies them: exp(0) is 1, so each place that is masked keeps a weight.",
    "Unless that is meant, fill masked places with -Inf before the softmax, by masked_fill() or "
    "where().",
    is_certain=False,
)
pooled_batch = _at_a_place(
    Phase.MODE,
    Event.POOLED_BATCH,
    "misuse",
    "The output of a recurrent layer or an attention is reduced over what it reads as the batch, "
    "not over time: {place}.",
    "Unless that axis is meant, set batch_first to the order of the inputs (True for [batch, time, "
    "features]), and reduce over time: over dim 1 then, else over dim 0.",
    is_certain=False,
)
whole_norm = _at_a_place(
    Phase.MODE,
    Event.WHOLE_NORM,
    "misuse",
    "Rows that the loss compares by their products are divided by the norm of the whole batch, not "
    "each by its own: {place}. Their products are no cosines, and shrink as batches grow.",
    "Normalise each row: x / x.norm(dim=-1, keepdim=True), or F.normalize(x, dim=-1).",
    is_certain=False,
)
of_probabilities = _at_a_place(
    Phase.LOSS,
    Event.LINEAR,
    "misuse",
    "{place} takes log-probabilities as its input and is given probabilities: it is least where "
    "the likeliest class gets all, not where they equal the targets, and may be negative.",
    "Give it the output of log_softmax in place of softmax, or the logarithm of what it is given; "
    "targets stay probabilities, unless log_target=True.",
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
paired = _at_a_place(
    Phase.LOSS,
    Event.PAIRED,
    "misuse",
    "The loss multiplies or divides the number of each row by those of all rows, not by its own: "
    "{place}, by broadcasting.",
    "Unless all pairs are meant, give both factors one shape: squeeze(-1) the one of shape [n, 1], "
    "or unsqueeze(-1) the other. Else only the mean of one factor counts.",
)
graphless = _at_a_place(
    Phase.LOSS,
    Event.GRAPHLESS,
    "misuse",
    "The result of {place} has no graph, as create_graph is False, though the loss is computed "
    "from it: to the optimizer it is a constant, and no gradient passes it.",
    "Set create_graph=True in that call; or detach() the result, if a constant is meant.",
    is_certain=False,
)
constant = _at_a_place(
    Phase.LOSS,
    Event.CONSTANT,
    "misuse",
    "The loss adds {place}, and none of its inputs has a gradient: that term changes no weight, "
    "whatever its value.",
    "Give it the output of the model that is trained, without detach(), and not that of a teacher "
    "twice; if its inputs are frozen on purpose, leave it out.",
    is_certain=False,
)
detached = _at_a_place(
    Phase.LOSS,
    Event.DETACHED,
    "misuse",
    "A term of the loss gives no gradient: {place} cuts it off from weights that the loss trains, "
    "so they do not learn from it.",
    "If they should, leave out that call: a critic on the way does not move, as another "
    "optimizer holds it and zeroes its gradients first. If not, leave the term out.",
    is_certain=False,
)
counted = _at_a_place(
    Phase.LOSS,
    Event.COUNTED,
    "misuse",
    "The loss adds a term that is computed from the result of {place}, and no gradient passes a "
    "comparison, an argmax or a cast to integers: that term changes no weight, whatever its value.",
    "Compute it from the probabilities themselves (a soft Dice or count), without the threshold; "
    "if it is only to be shown, leave it out of the loss.",
    is_certain=False,
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


@detector(Phase.MODE)
def summed_beside_mean(evidence: Evidence) -> Finding | None:
    """A sum over the batch beside a mean, in a training whose outputs stay one for all rows."""
    late = evidence.measured[-SUMMED_SAMPLES:]
    seen = [Events().after(each.calls).count(Event.SUMMED_TERM) for each in late]
    if len(seen) < SUMMED_SAMPLES or not all(seen) or evidence.steps < SUMMED_FROM:
        return None
    place = evidence.events.place(Event.SUMMED_TERM)
    return Finding(
        "misuse",
        f"The loss adds a sum over all numbers of a batch to a mean: {place}. The sum may outweigh "
        "the mean, whose outputs hardly differ from row to row, though its targets do (a collapsed "
        "posterior).",
        "Reduce both alike, as by sum(1).mean() and by reduction='sum' divided by the number of "
        "rows; or weigh the sum by a small factor.",
        line=place.partition(" at ")[2].partition(" makes ")[0] or None,
        count=len(seen),
        is_certain=False,
    )


@detector(Phase.MODE)
def by_class(evidence: Evidence) -> Finding | None:
    """Batches of labels of one class or two, of others from sample to sample."""
    seen = [each.classes for each in evidence.measured if each.classes is not None]
    counts = Counter(label for classes in seen for label in classes)
    if len(seen) < EARLY_SAMPLES or not all(seen) or len(counts) < LEAST_CLASSES:
        return None
    if max(counts.values()) > HALF * len(seen):
        return None
    listed = ", then ".join(" and ".join(map(str, classes)) for classes in seen[-LISTED:])
    return Finding(
        "misuse",
        f"Each batch that was sampled holds labels of one class or two, in order (class {listed}): "
        "the data is sorted by class, so each step unlearns what others have taught.",
        "Shuffle the data, as by shuffle=True of the DataLoader, unless classes are meant to come "
        "one after another.",
        steps=tuple(each.step for each in evidence.measured if each.classes)[-LISTED:],
        count=len(seen),
        is_certain=False,
    )
