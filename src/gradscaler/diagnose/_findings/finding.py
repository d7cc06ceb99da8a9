"""The kinds of findings, one thing that a run shows, and the verdict: all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Level = Literal["good", "warning", "bad"]


class Kind(NamedTuple):
    """What a kind of finding is called in a few words, and how bad it is."""

    level: Level
    headline: str


KINDS: dict[str, Kind] = {
    # Causes come before what they lead to, and what loses steps before what loses precision.
    "ranks": Kind("bad", "The ranks do not decide together"),
    "parameter": Kind("bad", "A parameter is NaN or Inf"),
    "divergence": Kind("bad", "The training diverges"),
    "activations": Kind("bad", "A module makes NaN or Inf"),
    "loss": Kind("bad", "The loss itself is NaN or Inf"),
    "nan": Kind("bad", "A gradient is NaN at every scale"),
    "floor": Kind("bad", "Gradients overflow at the smallest scale"),
    "state": Kind("bad", "The optimizer's state is NaN or Inf"),
    "data": Kind("bad", "Steps are skipped, again and again"),
    "silent": Kind("bad", "The loss is NaN or Inf, and no step is skipped"),
    "misuse": Kind("bad", "The scaler is used the wrong way"),
    "restart": Kind("warning", "The run was continued without the scaler's state"),
    "dead": Kind("bad", "Gradients are exactly 0"),
    "stalled": Kind("bad", "Parameters in 16 bits no longer move"),
    "range": Kind("warning", "No scale fits all parameters"),
    "underflow": Kind("warning", "The scale is too small"),
    "elsewhere": Kind("bad", "Another rank's gradients are Inf or NaN"),
    "normal": Kind("good", "Nothing unusual"),
}
"""From the gravest to the most harmless."""


def kind_of(name: str) -> Kind:
    """A kind by its name, which a file may have from a later version."""
    return KINDS.get(name, Kind("bad", name))


@dataclass(frozen=True)
class Finding:
    """One thing that a run shows.

    Attributes:
        kind: as in :class:`Verdict`.
        cause: what happened, with the evidence; a sentence.
        action: what to try; a sentence.
        where: the name of the parameter or the module that caused it, if one did.
        line: the user's line that called the operation, such as ``"train.py:12"``, if it is known.
        steps: the latest of the steps that show it, if they are few.
        count: how many steps show it; 0 if it is not of single steps.
        is_certain: whether the evidence leaves no other explanation.
    """

    kind: str
    cause: str
    action: str
    where: str | None = None
    line: str | None = None
    steps: tuple[int, ...] = ()
    count: int = 0
    is_certain: bool = True

    @property
    def text(self) -> str:
        """The cause, and what to try."""
        return f"{self.cause} {self.action}"

    @property
    def in_short(self) -> str:
        """The headline, and where."""
        at = self.where or self.line
        return kind_of(self.kind).headline + (f" ({at})" if at else "")

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Verdict:
    """What a run shows, and what to try.

    Attributes:
        kind: the gravest finding's. ``"normal"``: overflows that lower scales cure, and nothing
            else.

            All steps are skipped, and no lower scale cures it: ``"parameter"``: a parameter or a
            buffer is itself not finite. ``"activations"``: a module makes Inf or NaN from finite
            inputs. ``"loss"``: the unscaled loss is not finite. ``"nan"``: a gradient is NaN at
            every scale, even at 1 or less. ``"floor"``: the gradients are too large for a scale of
            1, or for the smallest one. ``"divergence"``: the loss had exploded before.

            Some are: ``"data"``: steps are skipped now and then, also after the scale has settled.
            ``"restart"``: the run was continued without the scaler's state.

            None is: ``"silent"``: the loss is NaN or Inf while the gradients are finite.
            ``"dead"``: the gradients are exactly 0. ``"underflow"``: the scale is too small.
            ``"range"``: one parameter's gradients are flushed at any scale at which another's
            overflow. ``"misuse"``: the scaler is called in a wrong way, or needs no scaler.
            ``"state"``: an optimizer's state is not finite. ``"stalled"``: updates are too small
            for the parameters' own dtype.

            With several processes also ``"elsewhere"``: another rank's gradients overflow, and this
            rank's are finite; and ``"ranks"``: ranks hold different scales, or skipped different
            steps.
        text: the gravest finding in full, and the others in a few words each. From the files of
            several ranks, it also names the rank at fault, and where ranks differ.
        where: the name of the parameter or the module that caused it, if one did.
        findings: everything that was found, the gravest first; one of each kind.
    """

    kind: str
    text: str
    where: str | None = None
    findings: tuple[Finding, ...] = ()

    def __str__(self) -> str:
        return self.text


def verdict_of(findings: Sequence[Finding]) -> Verdict:
    """The verdict that findings make, the first of each kind, in their order."""
    kept: dict[str, Finding] = {}
    for finding in findings:
        kept.setdefault(finding.kind, finding)
    first, *others = kept.values()
    text = first.text
    if others:
        text += f" Also: {'; '.join(other.in_short for other in others)}."
    return Verdict(first.kind, text, first.where, tuple(kept.values()))
