"""Judge a run: turn its evidence into findings, the gravest first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from gradscaler.diagnose._findings import (
    calls,
    failures,
    gradient_values,
    loss_graphs,
    losses,
    optimizers,
    over_time,
)
from gradscaler.diagnose._findings.advice import of_result, seen_in
from gradscaler.diagnose._findings.detector import Detector, Role
from gradscaler.diagnose._findings.evidence import Evidence
from gradscaler.diagnose._findings.failures import of_a_bad_step, of_skips
from gradscaler.diagnose._findings.learning import ELSE, FINE, MEANING, whether_it_learns
from gradscaler.diagnose._findings.nan_skips import nan_skips, uncured
from gradscaler.diagnose._findings.origins import EXPLAIN_ALL
from gradscaler.diagnose._findings.words import in_words_of
from gradscaler.diagnose._record.events import Event
from gradscaler.diagnose._record.finding import Finding, Verdict, verdict_of
from gradscaler.diagnose._record.kinds import kind_of
from gradscaler.diagnose._record.thresholds import RARE, SHORT

# In a phase, detectors have the order of these modules, and of their definition in a module.
_MODULES = (
    optimizers,
    calls,
    loss_graphs,
    losses,
    over_time,
    failures,
    gradient_values,
)
DETECTORS = sorted(
    (
        each
        for of in _MODULES
        for each in vars(of).values()
        if isinstance(each, Detector) and each.find.__module__ == of.__name__
    ),
    key=lambda each: each.phase,
)
"""All detectors, in the order in which they are asked."""


_FEW = "So few batches do no harm; look at them if more follow."
_OWN_SCALE = "The script's own loss scale may settle so; look at their batches if more follow."
_EVALUATE = (
    "The script's {} is NaN in the end, though no loss that was trained on was: look at what "
    "evaluates it, such as a mean over no elements (every label of a batch is ignore_index)."
)
_LOOK = (
    "Look at these batches, and at what the loss makes of them: an Inf or NaN, an empty mask, a "
    "logarithm or root of 0."
)


def judge(evidence: Evidence) -> Verdict:
    """The verdict on the evidence: all findings, the gravest first, or that nothing is unusual."""
    usual = _normal if evidence.steps else _unseen
    said = list(_findings_in(evidence)) or [usual(evidence)]
    verdict = verdict_of([in_words_of(evidence.framework.name, each) for each in said])
    if evidence.ended is None:
        return verdict
    last = f"saw no step after step {evidence.steps}" if evidence.steps else "ended before step 1"
    seen = f"The watch {last}: {evidence.ended}."
    return replace(verdict, text=f"{verdict.text} {seen}")


def _findings_in(evidence: Evidence) -> Iterator[Finding]:
    """Yield the findings: of steps that fail first the causes, and then what is beside them."""
    if evidence.bad_step is not None:
        roles = {each: each.at_bad_step for each in DETECTORS}
        cause = of_a_bad_step(evidence)
    elif evidence.skips:
        roles = {each: each.in_streak for each in DETECTORS}
        cause = of_skips(evidence)
    else:
        yield from _found(DETECTORS, evidence)
        return
    yield from _found([each for each in DETECTORS if roles[each] is Role.CAUSE], evidence)
    if cause is not None:
        summed = calls.unzeroed(evidence) if cause.kind == "divergence" else None
        yield from [cause] if summed is None else [summed, cause]  # such a sum grows by itself
    yield from _found([each for each in DETECTORS if roles[each] is Role.BESIDE], evidence)


def _found(detectors: Iterable[Detector], evidence: Evidence) -> Iterator[Finding]:
    """Yield the first finding of each phase, unless one before explains it."""
    explained: set[str] = set()
    for _, phase in groupby(detectors, key=lambda each: each.phase):
        finding = next((found for each in phase if (found := each(evidence))), None)
        if finding is not None and finding.kind not in explained:
            explained.update(kind_of(finding.kind).explains)
            yield finding


def _normal(evidence: Evidence) -> Finding:
    were = "were" if evidence.skipped > 1 else "was"
    steps = f"{evidence.steps} {evidence.step_word}s"
    text = f"{evidence.skipped or 'None'} of {steps} {were} skipped"
    if not evidence.has_scaler:
        text = f"None of {steps} had a gradient of NaN or Inf"
        if _is_unread(evidence):
            text = f"No Inf or NaN was seen in {steps}"
        if evidence.skipped:
            text = f"{evidence.are_skipped.capitalize()}{evidence.no_step_since}"
    if evidence.skipped and evidence.is_elsewhere:
        text += ", because another rank's gradients overflowed while this one's were finite."
        is_unusual = evidence.has_many_skips or (evidence.scale is not None and evidence.scale < 1)
        if is_unusual:
            return Finding("elsewhere", text, EXPLAIN_ALL, is_certain=False)
        return Finding("normal", text, _nothing(evidence))
    if finding := _few_failures(text, evidence):
        return finding
    if at_lowest := _at_lowest(evidence):
        nan = nan_skips(evidence)
        text += f" at a scale that cannot fall, the last in step {at_lowest[-1]}"
        text += f", where the gradient of {nan[-1].nan} was NaN" if nan else ""
        action = "So few steps do no harm; look at their batches if more follow."
        return Finding("normal", f"{text}.", action, steps=at_lowest[-2:])
    if evidence.skipped and (finding := _uncured(text, evidence)):
        return finding
    action = _nothing(evidence)
    if evidence.skipped:
        text += " while the loss scale settled"
        is_judged = not action.startswith("Nothing else was judged")  # what is said of losses
        text += ", and a lower scale cured each overflow" * is_judged
    return Finding("normal", f"{text}.", action)


def _few_failures(text: str, evidence: Evidence) -> Finding | None:
    """Losses that are not finite, or steps that a script left out, too few for a finding."""
    bad = [step.step for step in evidence.past if step.has_bad_loss]
    if bad:
        listed = " and ".join(map(str, bad[-2:]))
        numbers = f"step{'s' * (len(bad) > 1)} {listed}"
        repair = of_result(evidence.watched)
        look = _LOOK if repair is None else f"In these batches, {repair}."
        # Where the run ends with one, the script may have ended for it.
        is_rare = len(bad) <= RARE * len(evidence.past) and bad[-1] != evidence.past[-1].step
        return Finding(
            "normal",
            f"{text}, and the loss itself was NaN or Inf in {numbers}{seen_in(evidence.watched)}.",
            _FEW if is_rare else look,
            line=None if evidence.watched is None else evidence.watched.line,
            steps=tuple(bad[-2:]),
        )
    if evidence.skipped and not evidence.has_scaler:
        is_rare = evidence.skipped <= RARE * evidence.steps
        action = _OWN_SCALE if evidence.is_scaled_by_hand else _FEW if is_rare else _LOOK
        return Finding("normal", f"{text}, as gradients were Inf or NaN.", action)
    return None


def _unseen(evidence: Evidence) -> Finding:
    """The finding for a run without a step."""
    if evidence.ended is not None:
        return Finding("normal", "No step was seen.", "So nothing was judged.")
    action = "Call step(optimizer) of the scaler that is watched."
    if evidence.framework.is_recorded:
        action = "Call monitor.record() after each step."
    if not evidence.has_scaler:
        action = (
            "Call loss.backward() and step() of an optimizer of torch.optim that holds the model's "
            "parameters."
        )
    elif evidence.events.count(Event.RAISED):
        action = "A call of the scaler raised an error: do what its message says."
    return Finding("normal", "No step was seen yet.", action)


def _uncured(text: str, evidence: Evidence) -> Finding | None:
    """Skips with NaN and no Inf, too few for a finding."""
    if not (skips := uncured(evidence)):
        return None
    name, step = skips[-1].nan, skips[-1].step
    return Finding(
        "normal",
        f"{text}, in step {step} with NaN and no Inf in the gradient of {name}.",
        "A lower scale cures such a step only if an overflow made the NaN: look at its batch if "
        "more follow.",
        steps=tuple(skip.step for skip in skips[-2:]),
    )


def _at_lowest(evidence: Evidence) -> tuple[int, ...]:
    """The latest skipped steps at the lowest scale, which no lower scale cured."""
    lowest = evidence.min_scale or 0.0
    return tuple(step.step for step in evidence.past if step.skipped and step.scale <= lowest)


def _is_blind(evidence: Evidence) -> bool:
    """Whether neither gradients nor losses were seen, as of a compiled step with other results."""
    has_loss = any(step.loss is not None for step in evidence.past)
    return not evidence.has_scaler and evidence.sample is None and not has_loss


_FINE = f"{FINE}."


def _is_unread(evidence: Evidence) -> bool:
    """Whether no gradient was read, and losses tell nothing either."""
    return evidence.sample is None and whether_it_learns(evidence) == _FINE


def _nothing(evidence: Evidence) -> str:
    """The action if nothing is unusual; it names parameters that never had a gradient."""
    if evidence.ended is not None:
        return "What came later was not judged."
    if _is_blind(evidence):
        return "Neither gradients nor losses were seen, so nothing else was judged."
    learned = whether_it_learns(evidence)
    if learned.startswith(FINE) and (name := evidence.events.place(Event.NAN_LEFT)):
        return _EVALUATE.format(name)
    if evidence.has_scaler and learned.startswith(FINE):
        learned = _FINE
    if evidence.sample is None and learned == _FINE:
        if evidence.steps <= SHORT:
            return f"Too short to judge: {evidence.steps} steps, no gradient read."
        seen = "skips and losses" if evidence.has_scaler else "losses"
        return f"No gradients were read; {seen} show nothing wrong."
    return _with_missing(learned, evidence) if evidence.missing else learned


def _with_missing(learned: str, evidence: Evidence) -> str:
    """What is said of the losses, and the parameters that never had a gradient."""
    missing = evidence.missing or ()
    those, seen = _and_more(missing), "no sample holds a gradient of them"
    if place := evidence.events.place(Event.PASSES_NONE):
        seen += f", and {place} passes none on"
    # A module of which a parameter has a gradient is used, as where a loss takes its derivative.
    known = () if evidence.sample is None else evidence.sample.parameters
    used = {name.rpartition(".")[0] for name in known}
    cut = (name for name in missing if evidence.cut.get(name) == gradient_values.LEFT_OUT)
    modules = (name.rpartition(".")[0] for name in cut)
    unused = [*dict.fromkeys(each for each in modules if each and each not in used)]
    use = f"If {those} should be trained, look for what keeps the loss from them: {seen}."
    if learned.startswith(FINE) and not unused:
        return f"{use} {ELSE}."
    if evidence.takes_turns and not unused:
        return learned  # a sample has one turn, in which the others have no gradient
    learned = learned.replace(FINE, "Nothing else was judged", 1).replace(MEANING, "")
    told, _, rest = learned.partition(". ")
    if unused:
        are, they_make = ("are", "they make") if len(unused) > 1 else ("is", "it makes")
        use = (
            f"{_and_more(unused)} {are} called, and the loss leaves out what {they_make}: if "
            f"{those} should be trained, add that to the loss; what is only logged may stay."
        )
    return " ".join(
        filter(None, [f"{told.rstrip('.')}.", use, rest.replace("If it", "If the loss", 1)])
    )


def _and_more(names: Sequence[str]) -> str:
    first, *rest = names
    return f"{first} and {len(rest)} more" if rest else first
