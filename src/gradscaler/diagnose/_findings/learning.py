"""Whether a loss falls in a run without a finding, and what may keep it from falling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, median

from gradscaler.diagnose._findings.evidence import Evidence, Way
from gradscaler.diagnose._record.events import Event, Events
from gradscaler.diagnose._record.lines import ParameterSample, Targets
from gradscaler.diagnose._record.thresholds import (
    AT_MARGIN,
    CLIMBED,
    CLIMBED_LOADED,
    CLIPPED_AWAY,
    CRAWLED,
    EARLY,
    EXPLODED,
    FAR_ABOVE_CHANCE,
    FAR_PEAK,
    FAR_TARGETS,
    FELL,
    FELL_FAR,
    FEW_CALLS,
    FEW_SAMPLES,
    HALF,
    HARDLY_MOVED,
    LATE,
    LATE_SAMPLES,
    LONG,
    MANY,
    MOST,
    NEAR_CHANCE,
    NEAR_MARGIN,
    NEAR_VARIANCE,
    PEAKED,
    RAN_AWAY,
    ROSE,
    SAME_LOSS,
    SOLVED,
    SOON,
    STAYED,
    STOOD,
    TINY_NORM,
    TINY_TARGETS,
    VANISHED,
    VANISHED_BEHIND,
)

# No promise beyond what was looked at: a loss may fall that asks for something else than is meant.
ELSE = "Nothing else wrong was seen in numbers and calls"
FINE, MEANING = "Nothing wrong was seen in numbers and calls", ", and what it means was not judged"
_A_BOUND = "a lower bound, look for a term with the wrong sign"


def whether_it_learns(evidence: Evidence) -> str:
    """The first and the latest loss, as finite numbers alone do not make a training good."""
    has_losses = any(step.loss is not None for step in evidence.past)
    if evidence.first is None or evidence.first.loss is None or not has_losses:
        return f"{FINE}."
    if evidence.takes_turns:
        return "Nothing else was judged, as optimizers take turns, each with a loss of its own."
    if not evidence.events.count(Event.CHANGED):
        return _of_one_loss(evidence)
    if (phase := _latest_phase(evidence)) is None:
        return (
            "Nothing else was judged, as losses of several kinds, or several optimizers, follow "
            "one another."
        )
    begun = f"since step {phase.past[0].step}, where it became another one, "
    return _of_one_loss(phase, begun)


def _of_one_loss(evidence: Evidence, begun: str = "") -> str:
    """What is said of a loss that is the same one in all steps, after a clause on their begin."""
    losses = [step.loss for step in evidence.past if step.loss is not None]
    first = (evidence.first and evidence.first.loss) or 0.0
    went = f"{begun}the loss went from {first:g} to {losses[-1]:g}"
    judged = f"Nothing else was judged: {went}"
    scaled = f"{judged}, multiplied by the script's own loss scale."
    if own := _without_own_scales(evidence) or scaled * evidence.is_scaled_by_hand:
        return own
    if _has_risen_from(first, losses) or -losses[-1] > RAN_AWAY * max(abs(first), 1.0):
        if evidence.steps < EARLY and 0 < losses[-1] < EXPLODED * abs(first):
            return f"{judged}, and {evidence.steps} steps are too few to say more."
        should = "fallen, lower the learning rate" if losses[-1] > 0 else _A_BOUND
        should = f". If it should have {should}.{_added_up(evidence)}"
        no_measure = _no_measure(evidence, losses, "lower the learning rate")
        return f"{judged}{no_measure or _grown_targets(evidence) or should}"
    return _since_it_fell(evidence, went)


def _without_own_scales(evidence: Evidence) -> str:
    """What is said of a loss with the script's own loss scale, which changes; empty if none is.

    The scale of a sampled step is known, and that of the first.
    """
    counts = evidence.events.counts
    scales = [float(where) for event, where in counts if event is Event.BY_HAND and where]
    first, losses = evidence.first and evidence.first.loss, []
    for sample in evidence.measured:
        own = Events().after(sample.calls).places(Event.BY_HAND)
        if sample.loss is not None and len(own) == 1:
            losses.append(sample.loss / float(*own))
    if evidence.has_scaler or len(scales) < 2 or first is None or not losses:
        return ""
    first /= scales[0]
    has_fallen = fmean(losses[-SOON:]) < first - FELL * abs(first)
    fall = " If it should have fallen, lower the learning rate." * (not has_fallen)
    return (
        f"Nothing else was judged: the loss went from {first:g} to {losses[-1]:g}, each divided by "
        f"the script's own loss scale of its step.{fall}"
    )


def _has_risen_from(first: float, losses: Sequence[float]) -> bool:
    """Whether the latest loss is above the first by more than batches differ."""
    *before, latest = losses
    if latest <= ROSE * abs(first) or not any(losses[:EARLY]):
        return False  # or one of 0, as where rewards are rare, is nothing to compare with
    if len(losses) < EARLY or latest > ROSE * max(map(abs, before)):
        return True
    late = losses[-min(LATE, len(losses) // 2) :]
    usual = median(losses[:EARLY]) if losses[0] == first else first
    return median(late) > ROSE * abs(usual) or min(late) > ROSE * abs(first)


def _since_it_fell(evidence: Evidence, went: str) -> str:
    """What to say of a loss that does not end above its start."""
    losses = [(step.step, step.loss) for step in evidence.past if step.loss is not None]
    values, judged = [loss for _, loss in losses], f"Nothing else was judged: {went}"
    is_whole = evidence.steps == len(evidence.past)
    first = evidence.first and evidence.first.loss
    usual = fmean(values[:EARLY]) if is_whole or first is None else first
    frozen = () if evidence.optimizers is None else evidence.optimizers.frozen
    late = fmean(values[-LATE:])
    # From a peak back to where it began is no fall: the first step was too large.
    is_back = first is not None and PEAKED * abs(first) < usual and _is_as_at_first(late, first)
    has_fallen = not is_back and late < usual - FELL * abs(usual)
    has_margin = evidence.events.count(Event.MARGIN) >= FEW_SAMPLES
    may_stand = has_fallen and not evidence.way.is_smooth
    stands = _stands(losses, has_margin) if may_stand or has_margin else ""
    rise = _rose_again(losses, usual, evidence) or stands
    if is_whole:
        rise = rise or _climbed(losses, evidence) or _peaked(losses, evidence)
    no_measure = _no_measure(evidence, values, "look at the learning rate, inputs and targets")
    if so := (no_measure or f"; {rise}") if rise else _of_outputs(evidence, values):
        return f"{judged}{so}"
    is_short = evidence.steps < (FEW_CALLS if values[-1] == first else LONG)
    if is_short and (_has_risen(values) or _is_as_at_first(values[-1], first)):
        steps = f"{evidence.steps} step{'s' * (evidence.steps != 1)}"
        return f"{judged}, in {steps}, too few to say whether it falls."
    if (is_short and not is_back) or has_fallen:
        low = usual if first is None else min(usual, first)
        if not is_short and values[-1] > low:  # the latest loss alone is a high one
            went += f", its mean from {usual:g} to {fmean(values[-LATE:]):g}"
        return f"{_praise(evidence)}: {went}{MEANING}."
    if frozen:
        return f"{judged}. If it should have fallen, look at {_listed(frozen)}, {_FROZEN}."
    hint = _ignored(evidence) or _overwritten(evidence) or _unheld(evidence) or _clipped(evidence)
    hint = hint or _tiny(evidence, values)
    latest = fmean(values[-LATE:])
    if not hint and ((hint := _guessed(evidence, latest)) or _knows_nothing(evidence, latest)):
        hint = _crawls(evidence, values) or hint
    hint = hint or _vanished(evidence) or _slow(evidence) or _constant(evidence, values)
    if so := f", {hint}" if hint else no_measure:
        return f"{judged}{so}"
    ends = [rate for _, rate in (*evidence.rates[:1], *evidence.rates[-1:])]
    rates = " to ".join(dict.fromkeys(f"{rate:g}" for rate in ends))
    rate = f", at a learning rate of {rates}" if ends and not evidence.missing else ""
    # The latest loss alone is a low one, or a high one.
    seems_to = values[-1] < usual - FELL * abs(usual) or values[-1] > ROSE * abs(first or usual)
    is_told = seems_to and not evidence.missing  # parameters without a gradient come first then
    mean = f", its mean from {usual:g} to {fmean(values[-LATE:]):g}" if is_told else ""
    return (
        f"{judged}{mean}{rate}. If it should have fallen, look at the learning rate, clipping, "
        f"inputs and targets.{_added_up(evidence)}"
    )


def _latest_phase(evidence: Evidence) -> Evidence | None:
    """The evidence since the loss became another one, as if it were all.

    None if losses take turns, or the latest one is too new.
    """
    step = evidence.changed_at
    past = tuple(each for each in evidence.past if each.step >= step)
    losses = [each.loss for each in past if each.loss is not None]
    if not step or len(losses) < LATE:
        return None
    return replace(
        evidence,
        steps=len(past),
        past=past,
        first=past[0],
        way=Way().after(losses),
        measured=tuple(each for each in evidence.measured if each.step >= step),
        rates=tuple(each for each in evidence.rates if each[0] >= step),
    )


def _no_measure(evidence: Evidence, losses: Sequence[float], otherwise: str) -> str:
    """A clause on a loss whose value does not say whether anything is learned; else empty."""
    if evidence.events.count(Event.WEIGHTED) >= FEW_SAMPLES:
        place = evidence.events.place(Event.WEIGHTED)
        return (
            f", and it weighs what is trained by numbers without a gradient, in {place}. As "
            "rewards or advantages, they make its value no measure of progress; if they are "
            f"targets, weights or a mask, {otherwise}."
        )
    turns = sum(min(each) < 0 < max(each) for each in pairwise(losses))
    if turns < max(FEW_CALLS, MANY * len(losses)):
        return ""
    return (
        f", and it changed its sign {turns} times, as a loss of advantages or of a critic does, "
        "whose value is no measure of progress: look at rewards or a metric."
    )


def _grown_targets(evidence: Evidence) -> str:
    """A clause on a loss that rises as its targets grow, as those of a critic do; else empty."""
    seen = [each.targets.targets for each in evidence.measured if each.targets is not None]
    if len(seen) < FEW_SAMPLES or not ROSE * seen[0] < seen[-1]:
        return ""
    return (
        f", as its targets went from some {seen[0]:.1g} to {seen[-1]:.1g}. If these should not "
        "have grown, as those of a critic do, lower the learning rate."
    )


def _added_up(evidence: Evidence) -> str:
    """A sentence on losses of micro-batches that are not divided; empty if there are none."""
    if evidence.events.count(Event.ADDED_UP) < FEW_SAMPLES:
        return ""
    passes = evidence.events.place(Event.ADDED_UP)
    return (
        f" Each step adds up the gradients of {passes} backward passes: divide each loss by "
        f"{passes}, if their mean is meant."
    )


def _has_risen(losses: Sequence[float]) -> bool:
    """Whether the second half of losses is larger than the first, on average."""
    middle = len(losses) // 2
    return middle > 0 and fmean(losses[middle:]) > fmean(losses[:middle])


def _is_as_at_first(latest: float, first: float | None) -> bool:
    """Whether the two losses that are told are no fall, whatever those between them are."""
    return first is not None and latest > first - FELL * abs(first)


_FROZEN = "which were frozen on the way (requires_grad=False)"


def _praise(evidence: Evidence) -> str:
    """The begin of what is said of a loss that fell, which first names what may not be trained."""
    frozen = () if evidence.optimizers is None else evidence.optimizers.frozen
    if frozen:
        last = f"If {_listed(frozen)} should be trained, look at what froze"
        return f"{last} {'them' if frozen[1:] else 'it'} on the way (requires_grad=False). {ELSE}"
    if unheld := _unheld_in(evidence):
        return f"If {unheld} should be trained, give that to an optimizer: {_UNHELD} it. {ELSE}"
    if sizes := _tiny_targets(evidence):
        return f"If {sizes} are not meant, look at how they are scaled. {ELSE}"
    return FINE


def _tiny_targets(evidence: Evidence) -> str:
    """The sizes of targets and of the first outputs, if all targets are tiny beside those."""
    seen = [each.targets for each in evidence.measured if each.targets is not None]
    if len(seen) < FEW_SAMPLES or any(
        not 0 < each.targets < TINY_TARGETS * seen[0].outputs for each in seen
    ):
        return ""
    sizes = f"{seen[-1].targets:.1g}, beside first outputs of some {seen[0].outputs:.1g},"
    return f"targets of some {sizes}"


def _listed(names: tuple[str, ...]) -> str:
    """The last of some parameters, which may be the head's, and the number of the others."""
    *rest, last = names
    return f"{last} and {len(rest)} more" if rest else last


def _rose_again(losses: Sequence[tuple[int, float]], usual: float, evidence: Evidence) -> str:
    """A clause on a loss that has lost much of what it had won; empty if it has not.

    The latest steps are compared with each stretch before, as the first loss says nothing of a
    change in the middle of a run.
    """
    values = [loss for _, loss in losses]
    ends = range(LATE, len(values) - LATE + 1)
    means = {end: fmean(values[end - LATE : end]) for end in ends}
    best, lowest = min(means.items(), key=lambda item: item[1], default=(0, math.nan))
    latest = fmean(values[-LATE:])
    if not 0 <= ROSE * lowest < latest or latest - lowest < MANY * (usual - lowest):
        return ""
    later = range(best, len(values) - SOON + 1)
    rises = {at: fmean(values[at : at + SOON]) - fmean(values[at - SOON : at]) for at in later}
    jump, rise = max(rises.items(), key=lambda item: item[1])
    at, look = f"up to step {losses[best - 1][0]}", "lower the learning rate"
    if rise > HALF * (latest - lowest):
        step = losses[jump][0]
        at += f", and rose at step {step}"
        look = f"look at {_changed_at(step, evidence)}"
    return (
        f"it was {lowest:g} on average in the {LATE} steps {at}. If it should have stayed there, "
        f"{look}."
    )


def _changed_at(step: int, evidence: Evidence) -> str:
    """What may have changed at a step at which the loss rose."""
    for place in evidence.events.places(Event.RELOADED):
        number, _, line = place.partition(" ")
        if abs(int(number) - step) < SOON:
            call = f"load_state_dict(){line and f' at {line}'}"
            return f"the weights that {call} brought before step {number}, or the data"
    what = "layers or weights, the learning rate, the data"
    if evidence.optimizers is not None and (frozen := evidence.optimizers.frozen):
        what = f"{_listed(frozen)}, {_FROZEN}; or {what}"
    return f"what changes there: {what}"


def _climbed(losses: Sequence[tuple[int, float]], evidence: Evidence) -> str:
    """A clause on a loss that left a low value at once, and came back; empty if it has not."""
    first, *values = [loss for _, loss in losses[: LATE + 1]]
    means = [fmean(values[at : at + SOON]) for at in range(len(values) - SOON + 1)]
    if not means or first <= 0:
        return ""
    rose = f"it was {means[0]:g} on average in the {SOON} steps after the first"
    is_above = (
        min(values[:SOON]) > first
        and fmean([loss for _, loss in losses[-LATE:]]) > FELL_FAR * first
    )
    if evidence.events.count(Event.LOADED) and is_above and CLIMBED_LOADED * first < means[0]:
        line = evidence.events.place(Event.LOADED)
        return (
            f"{rose}. The weights were loaded{f' at {line}' * bool(line)}, and the optimizer began "
            "without a state: if they are of an earlier run, load the states of its optimizer and "
            "schedule, too; else warm the learning rate up."
        )
    # Where it goes on climbing, what it asks for changes: rewards that begin, a harder task.
    if means[0] < max(means) or not CLIMBED * first < means[0]:
        return ""
    return (
        f"{rose}. If weights were loaded, load the states of their optimizer and its schedule, "
        "too; else warm the learning rate up, unless what the loss asks for changes there."
    )


def _peaked(losses: Sequence[tuple[int, float]], evidence: Evidence) -> str:
    """A clause on a cross entropy that rose far above a guess, and came back to it; else empty.

    The first batch's own loss is no low one, if it is that of a guess.
    """
    values = [loss for _, loss in losses]
    begin = max(values[0], (evidence.sample and evidence.sample.chance) or math.inf)
    is_far = fmean(values[:EARLY]) > FAR_PEAK * begin
    if not is_far or fmean(values[-LATE:]) < FELL_FAR * begin:
        return ""
    step, most = max(losses, key=lambda each: each[1])
    return (
        f"it rose to {most:g} (step {step}) on the way. If it should have fallen further, lower "
        f"the learning rate or warm it up.{_added_up(evidence)}"
    )


def _stands(losses: Sequence[tuple[int, float]], has_margin: bool) -> str:
    """A clause on a loss that is one number in most of the latest steps; empty if it is not.

    One batch that is taken whole in each step ends so once it is learned. A mean of what is beyond
    a margin is nearly the margin, where all outputs are one point: most margins are numbers of one
    digit. One of 0 says nothing: advantages that are centred make it whatever the outputs are.
    """
    latest = [loss for _, loss in losses[-LONG:]]
    usual = median(latest)
    is_at_margin = has_margin and abs(usual - float(f"{usual:.0e}")) <= AT_MARGIN * abs(usual)
    width = NEAR_MARGIN if is_at_margin else SAME_LOSS
    same = [loss for loss in latest if abs(loss - usual) <= width * abs(usual)]
    is_solved = usual <= SOLVED * losses[0][1]
    if is_solved or not usual or len(latest) < LONG or len(same) < MOST * LONG:
        return ""
    return (
        f"it was {usual:g} in {len(same)} of the latest {LONG} steps"
        f"{', which may be its margin' * is_at_margin}. If batches differ, the outputs do not "
        "depend on them any more (all are one point, or beyond a limit of the loss): lower the "
        "learning rate, and look at what the loss compares."
    )


def _ignored(evidence: Evidence) -> str | None:
    """A hint if an optimizer has the learning rates of another one that has the same groups."""
    if not (rate := evidence.events.place(Event.IGNORED)):
        return None
    now = f" of {evidence.rates[-1][1]:g}" if evidence.rates else ""
    return (
        f"and the {rate} has no effect: its groups are the dicts that another optimizer was made "
        f"with before, which wrote its own rate{now} into them. If the loss should have fallen, "
        "give each optimizer dicts of its own."
    )


def _overwritten(evidence: Evidence) -> str | None:
    if evidence.events.count(Event.OVERWRITTEN) < FEW_SAMPLES:
        return None
    return (
        "and weights change between the steps, too. If the loss should have fallen, look for what "
        "writes into them, beside a clipping that is meant: an average of weights with source and "
        "target swapped, or load_state_dict()."
    )


_UNHELD = "neither the model nor an optimizer holds"


def _clipped(evidence: Evidence) -> str | None:
    """A hint if clipping leaves so little of the gradients that the weights stay as they are."""
    weights = evidence.optimizers and evidence.optimizers.weights
    seen = [(each.optimizers, each.norm) for each in evidence.measured]
    norms = [(each.used, norm) for each, norm in seen if each and each.used and norm]
    has_moved = not weights or abs(weights[1] - weights[0]) > STAYED * weights[0]
    if has_moved or len(norms) < FEW_SAMPLES:
        return None
    limit, least = max(used for used, _ in norms), min(norm for _, norm in norms)
    if not CLIPPED_AWAY * limit < least:
        return None
    return (
        f"and gradients are clipped from a norm of {least:.2g} or more to {limit:.2g}, so that the "
        "weights hardly move. If the loss should have fallen, raise that limit."
    )


def _tiny(evidence: Evidence, losses: Sequence[float]) -> str | None:
    """A hint if gradients are so small that the loss stays the same, whatever the batch."""
    norms = [each.norm for each in evidence.measured if each.norm]
    is_same = max(losses) - min(losses) <= SAME_LOSS * abs(losses[0])
    if not is_same or len(norms) < FEW_SAMPLES or max(norms) > TINY_NORM:
        return None
    return (
        f"and the gradients are so small, a norm of at most {max(norms):.1g}, that the loss stays "
        "the same. If it should have fallen, look at how the weights begin: several layers in a "
        "row with weights near 0 (an initialization with a small deviation) pass nothing on; and "
        "at a loss that is divided by too large a number."
    )


def _constant(evidence: Evidence, losses: Sequence[float]) -> str | None:
    """A hint if a loss is one number, though its gradients are not 0 and the weights move."""
    first, weights = evidence.first and evidence.first.loss, evidence.optimizers
    moved = weights and weights.weights
    norms = [each.norm for each in evidence.measured if each.norm]
    is_same = max(losses) - min(losses) <= SAME_LOSS * abs(losses[0]) and losses[0] == first
    if not is_same or len(norms) < FEW_SAMPLES or min(norms) < TINY_NORM or not moved:
        return None
    if abs(moved[1] - moved[0]) <= HARDLY_MOVED * moved[0]:
        return None
    return (
        "and it is the same in each step, though gradients are not 0 and the weights move: it may "
        "be constant by construction, as loss / loss.detach() is, and says nothing then. Look at "
        "the loss before that."
    )


def _slow(evidence: Evidence) -> str | None:
    """A hint if the learning rate is so small that the weights stay as they are."""
    weights = evidence.optimizers and evidence.optimizers.weights
    rate = evidence.rates[-1][1] if evidence.rates else 0.0
    if not weights or weights[0] == 0 or rate <= 0 or not evidence.measured:
        return None
    change = abs(weights[1] - weights[0]) / weights[0]
    if change > HARDLY_MOVED:
        return None
    return (
        f"and the weights hardly move at a learning rate of {rate:g}: their norm has changed by "
        f"{change:.1g} of itself in {evidence.steps} steps. If the loss should have fallen, raise "
        "that rate."
    )


def _knows_nothing(evidence: Evidence, latest: float) -> bool:
    """Whether a loss is above that of a guess, or of a model that gives the mean of its targets."""
    seen = [(each.error, each.variance) for each in _late_targets(evidence) if each.variance]
    is_above = bool(seen) and all(error > variance for error, variance in seen)
    return is_above or 0 < _chance(evidence) < latest


def _crawls(evidence: Evidence, losses: Sequence[float]) -> str | None:
    """A hint if a loss falls in a straight line, as slowly as the weights move at a small rate.

    Where that of a sound rate has come to a mean or a guess, it fell faster at first.
    """
    weights, rates = evidence.optimizers and evidence.optimizers.weights, evidence.rates
    is_known = weights and weights[0] and rates and len(losses) == evidence.steps >= LONG
    if not weights or not is_known or not 0 < rates[-1][1] <= rates[0][1]:  # no warm-up
        return None
    size = len(losses) // EARLY  # in as many parts, as losses of single batches differ
    means = [fmean(losses[at : at + size]) for at in range(0, size * EARLY, size)]
    first, middle, last = means[0], median(means), means[-1]
    is_straight = middle - last >= HALF * (first - middle)
    falls = all(after < before for before, after in pairwise(means)) and last > STOOD * first
    change = abs(weights[1] - weights[0]) / weights[0]
    if not falls or not is_straight or change > CRAWLED or evidence.events.count(Event.LOADED):
        return None
    if _clipped(evidence) or _vanished(evidence):
        return None
    return (
        f"and it falls steadily, but the norm of the weights has changed by {100 * change:.2g}% "
        f"in {evidence.steps} steps at a learning rate of {rates[-1][1]:g}. If it should fall "
        "faster, raise that rate; if it diverges then, normalize the inputs."
    )


def _guessed(evidence: Evidence, latest: float) -> str | None:
    """A hint if a cross entropy stays where a guess is."""
    chance = _chance(evidence)
    if not chance or abs(latest - chance) > NEAR_CHANCE * chance:
        return None
    return (
        f"and it stays at {chance:.3g}, that of a guess among {math.exp(chance):.0f} classes. If "
        "it should have fallen, look for labels of other rows (one of both was shuffled), inputs "
        "that are all alike, a softmax before the loss, and too small a learning rate."
    )


def _chance(evidence: Evidence) -> float:
    """The loss of a guess; 0 if it is not known.

    That of two classes is left out: the networks of a GAN in balance guess.
    """
    chance = (evidence.sample and evidence.sample.chance) or 0.0
    return chance if chance > math.log(2) else 0.0


def _late_targets(evidence: Evidence) -> list[Targets]:
    """What the loss compares in the later half of the latest samples; empty if they are few."""
    seen = [each.targets for each in evidence.measured]
    late = [each for each in seen[len(seen) // 2 :] if each is not None]
    return late if len(late) >= LATE_SAMPLES and evidence.steps >= LONG else []


def _of_outputs(evidence: Evidence, losses: Sequence[float]) -> str:
    """A clause if a loss is that of outputs that know nothing yet, whether it fell or not."""
    far = _far_below_targets(evidence)
    if far or not (mean := _gives_mean(evidence)):
        return far or _began_high(evidence, losses)
    return f", {crawls}" if (crawls := _crawls(evidence, losses)) else mean


def _far_below_targets(evidence: Evidence) -> str:
    """A clause if outputs are small beside targets, which are large."""
    late = _late_targets(evidence)
    if not late or any(each.targets < FAR_TARGETS * max(each.outputs, 1.0) for each in late):
        return ""
    return (
        f", and its targets are some {late[-1].targets:.1g}, its outputs some "
        f"{late[-1].outputs:.1g}. If it should have fallen, train on targets less their mean, "
        "divided by their deviation; or begin with a bias of that mean and a higher learning rate."
    )


def _gives_mean(evidence: Evidence) -> str:
    """A clause if a mean square error stays where a model is that gives the mean of its targets.

    It may have fallen to there, from that of the first outputs.
    """
    seen = [(each.error, each.variance) for each in _late_targets(evidence) if each.variance]
    errors, spread = sum(error for error, _ in seen), sum(variance for _, variance in seen)
    has_left = any(error < STOOD * variance for error, variance in seen)
    if not seen or has_left or not abs(errors - spread) <= NEAR_VARIANCE * spread < math.inf:
        return ""
    return (
        f", and its mean square error stays near {spread / len(seen):.3g}, the variance of its "
        "targets, as of a model that gives their mean. If it should fall, look for exchanged axes "
        "(batch_first), shuffled targets, unnormalized inputs, a small learning rate."
    )


def _began_high(evidence: Evidence, losses: Sequence[float]) -> str:
    """A clause if a cross entropy begins far above a guess, and takes half of the run to reach it.

    Where no graph shows the loss, it may be another one.
    """
    chance, first = _chance(evidence), (evidence.first and evidence.first.loss) or 0.0
    is_known = chance > 0 and evidence.framework.name == "torch"
    if not is_known or first < FAR_ABOVE_CHANCE * chance or evidence.steps < LATE:
        return ""
    below = next((n for n, loss in enumerate(losses) if loss < chance), len(losses))
    is_soon = below < HALF * len(losses) or len(losses) < evidence.steps
    if below < len(losses) and is_soon:
        return ""
    last = "" if below == len(losses) else f", which it took {below} steps to reach"
    return (
        f", and its first was far above {chance:.3g}, that of a guess among "
        f"{math.exp(chance):.0f} classes{last}: the first outputs are large. If it should fall "
        "faster, let the weights begin smaller, as an embedding that is also the output layer with "
        "a deviation of 0.02, and normalize the inputs."
    )


def _unheld_in(evidence: Evidence) -> str:
    """What a loss depends on that neither the model nor an optimizer holds; empty if few show."""
    is_seen = evidence.events.count(Event.UNHELD) >= FEW_SAMPLES
    is_seen = is_seen and not evidence.events.count(Event.HELD_LATE)
    return evidence.events.place(Event.UNHELD) * is_seen


def _unheld(evidence: Evidence) -> str | None:
    if not (unheld := _unheld_in(evidence)):
        return None
    return (
        f"and it depends on parameters that {_UNHELD}: {unheld}. Give them to an "
        "optimizer; or call requires_grad_(False) on those that are meant to stay."
    )


def _vanished(evidence: Evidence) -> str | None:
    """A hint if gradients shrink from layer to layer."""
    # Where gradients are largest: once the last layer has found the mean of the targets, its own
    # are as small as all others.
    measured = (each for each in evidence.measured if each.parameters)
    sample = max(measured, key=lambda each: each.norm or 0.0, default=evidence.sample)
    found = {} if sample is None else sample.parameters
    tops = {name: top for name, each in found.items() if (top := _largest(each)) is not None}
    # Layer by layer, by its largest: the gradient of a bias before a normalization, or of the keys
    # in attention, is 0 but for rounding, while that of the layer's matrix is as large as others.
    largest: dict[str, int] = {}
    for name in sorted(tops, key=lambda n: tops[n], reverse=True):
        if all(_layer(name) != _layer(other) for other in largest):
            largest[name] = tops[name]
    if not largest:
        return None
    low, high = min(largest, key=lambda n: largest[n]), max(largest, key=lambda n: largest[n])
    lost, names, passed = largest[high] - largest[low], list(found), ""
    if evidence.events.count(Event.FLAT) and names.index(low) < names.index(high):
        passed = f" through {evidence.events.place(Event.FLAT)}"
    if lost < (VANISHED_BEHIND if passed else VANISHED):
        return None
    return (
        f"and gradients vanish on their way{passed}: those of {low} are at most "
        f"2**{largest[low]}, those of {high} 2**{largest[high]}. If the loss should have fallen, "
        "take a normalization layer, residual connections, and ReLU in place of sigmoid or tanh."
    )


def _layer(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _largest(found: ParameterSample) -> int | None:
    """The exponent above the largest gradient of a parameter; None if all are 0."""
    bins = found.histogram
    return bins.first + len(bins.counts) if bins.counts else None
