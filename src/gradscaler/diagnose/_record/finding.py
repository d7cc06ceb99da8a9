"""A single finding, and the verdict that holds them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from gradscaler.diagnose._record.kinds import kind_of
from gradscaler.diagnose._record.source import source_of


@dataclass(frozen=True)
class Finding:
    """One thing that a run shows.

    Attributes:
        kind: as in :class:`Verdict`.
        cause: a sentence that says what happened, with the evidence.
        action: a sentence that says what to try.
        where: the name of the parameter or the module that caused it, if one did.
        line: the user's line that called the operation, such as ``"train.py:12"``, if it is known.
        steps: the latest of the steps that show it, if they are few.
        count: how many steps show it; 0 if it does not concern single steps.
        is_certain: whether the evidence leaves no other explanation.
        lasts: for how many steps an uncertain one must be found until a run that goes on is told.
    """

    kind: str
    cause: str
    action: str
    where: str | None = None
    line: str | None = None
    steps: tuple[int, ...] = ()
    count: int = 0
    is_certain: bool = True
    lasts: int = 0

    @property
    def text(self) -> str:
        """The cause and the action."""
        return f"{self.cause} {self.action}"

    @property
    def in_short(self) -> str:
        """The headline and the place; the cause, if the headline could be of many mistakes."""
        if self.kind == "misuse":
            return self.cause.removesuffix(".")
        at = self.where or self.line
        return kind_of(self.kind).headline + (f" ({at})" if at else "")

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Verdict:
    """The verdict on a run: its findings, and what to try.

    Attributes:
        kind: the kind of the gravest finding. ``"normal"``: lower scales cure all overflows, and
            nothing else was found.

            Kinds for steps that are skipped at every scale. ``"parameter"``: a parameter or a
            buffer is itself not finite. ``"activations"``: a module makes Inf or NaN from finite
            inputs. ``"loss"``: the unscaled loss is not finite. ``"nan"``: a gradient is NaN at
            every scale, even at 1 or less. ``"floor"``: the gradients are too large for a scale of
            1, or for the smallest one. ``"divergence"``: the loss exploded before them.

            In a loop without a scaler, these are causes of the first step that was applied although
            its gradients were not finite.

            Kinds for steps that are skipped now and then. ``"data"``: skips go on after the scale
            has settled. ``"restart"``: the run was continued without a part of its
            state, the scaler's or that of a schedule.

            Kinds that need no skip. ``"silent"``: the loss is NaN or Inf while the gradients are
            finite. ``"dead"``: the gradients are exactly 0. ``"underflow"``: the scale is too
            small. ``"range"``: every scale flushes one parameter's gradients or makes another's
            overflow. ``"misuse"``: the scaler is called in a wrong way, is not needed, or
            is missing in float16; or the loop has another mistake.
            ``"state"``: an optimizer's state is not finite. ``"stalled"``: updates are too small
            for the parameters' own dtype. ``"eps"``: gradients are below an optimizer's eps.

            Kinds with several processes. ``"elsewhere"``: another rank's gradients overflow, and
            this rank's are finite. ``"ranks"``: ranks hold different scales, or skipped different
            steps.
        text: the gravest finding in full, and the others in a few words each. For the files of
            several ranks, it also names the rank at fault, and says where ranks differ.
        where: the name of the parameter or the module that caused it, if one did.
        findings: all findings, the gravest first; at most one of each kind.
    """

    kind: str
    text: str
    where: str | None = None
    findings: tuple[Finding, ...] = ()

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        """The headline, the text and the user's line, in a notebook's output."""
        source = source_of(self.findings[0].line) if self.findings else None
        text = f"<p><b>{escape(kind_of(self.kind).headline)}</b></p><p>{escape(self.text)}</p>"
        return text if source is None else f"{text}\n{source.html}"


def verdict_of(findings: Sequence[Finding]) -> Verdict:
    """The verdict of some findings; it keeps the first of each kind, in their order.

    That nothing is unusual is kept only if it is all that was found.
    """
    kept: dict[str, Finding] = {}
    unusual = [each for each in findings if each.kind != "normal"]
    for finding in unusual or findings:
        kept.setdefault(finding.kind, finding)
    first, *others = kept.values()
    text = first.text
    if others:
        text += f" Also: {'; '.join(other.in_short for other in others)}."
    return Verdict(first.kind, text, first.where, tuple(kept.values()))
