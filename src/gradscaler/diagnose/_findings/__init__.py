"""What the evidence says about a run: why steps are skipped, or what is lost without a skip."""

from __future__ import annotations

from gradscaler.diagnose._findings.course import data, diverged, lowered, silent
from gradscaler.diagnose._findings.evidence import Evidence, Verdict
from gradscaler.diagnose._findings.misuse import full_precision, unzeroed, wrong_calls
from gradscaler.diagnose._findings.streak import EXPLAIN_ALL, of_streak
from gradscaler.diagnose._findings.values import cut_off, dead, too_small

__all__ = ["Evidence", "Verdict", "judge"]

# The surest first, and causes before what they lead to.
_RULES = (
    wrong_calls,
    silent,
    diverged,
    data,
    cut_off,
    dead,
    full_precision,
    too_small,
    lowered,
)


def judge(evidence: Evidence) -> Verdict:
    """The verdict on too many skips in a row, if there are; else on the run as a whole."""
    if evidence.skips:
        return unzeroed(evidence) or of_streak(evidence)
    found = (rule(evidence) for rule in _RULES)
    return next((verdict for verdict in found if verdict is not None), _normal(evidence))


def _normal(evidence: Evidence) -> Verdict:
    if not evidence.steps:
        return Verdict(
            "normal",
            "No step was seen yet. If the training runs: in JAX, Keras and MindSpore, call "
            "monitor.record() after each step; elsewhere, step(optimizer) finds no gradients, so "
            "look for zero_grad() after the backward pass, and for an optimizer of other "
            "parameters than the model's.",
        )
    if not evidence.skipped:
        return Verdict(
            "normal", f"None of {evidence.steps} steps was skipped. {_nothing(evidence)}"
        )
    were = "was" if evidence.skipped == 1 else "were"
    text = f"{evidence.skipped} of {evidence.steps} steps {were} skipped"
    if evidence.world_size > 1 and evidence.is_finite_here:
        text += ", because another rank's gradients overflowed while this one's were finite"
        is_unusual = evidence.has_many_skips or (evidence.scale is not None and evidence.scale < 1)
        if is_unusual:
            return Verdict("elsewhere", f"{text}. {EXPLAIN_ALL}")
        return Verdict("normal", f"{text}. {_nothing(evidence)}")
    return Verdict(
        "normal",
        f"{text} while the loss scale settled, and a lower scale cured each overflow. "
        f"{_nothing(evidence)}",
    )


def _nothing(evidence: Evidence) -> str:
    """What to do, and which parameters are not trained, as those of a head that is not used."""
    if evidence.sample is None:
        return "No gradients were read; skips and losses show nothing that needs fixing."
    if not evidence.missing:
        return "Nothing needs fixing."
    first, *rest = evidence.missing
    those = f"{first} and {len(rest)} more" if rest else first
    return (
        f"Nothing needs fixing, unless {those} should be trained: no sample holds a gradient of "
        "them."
    )
