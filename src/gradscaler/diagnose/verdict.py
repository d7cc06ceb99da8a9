"""What the evidence says about a run: why steps are skipped, or what too small a scale loses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from gradscaler.diagnose.runs import Sample, Skip

Kind = Literal["normal", "loss", "parameter", "activations", "nan", "floor", "underflow"]


@dataclass(frozen=True)
class Verdict:
    """What happened, and what to try.

    Attributes:
        kind: ``"normal"``: overflows that lower scales cured. ``"underflow"``: the scale is too
            small. The rest no lower scale cures: ``"loss"``: the unscaled loss is itself
            non-finite. ``"parameter"``: a parameter is. ``"activations"``: a module makes Inf or
            NaN of finite inputs. ``"nan"``: a gradient is NaN at every scale. ``"floor"``: the
            scale cannot fall any further, and still overflows.
        text: two sentences: what happened, with the evidence, and what to try.
        where: the name of the parameter or the module, if one is to blame.
    """

    kind: str
    text: str
    where: str | None = None

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Evidence:
    """What is known of a run when it is judged.

    Attributes:
        steps: how many there were.
        skipped: how many of them were skipped.
        dtype: of the gradients' range.
        stuck: the skips in a row that the run ends with, if there are too many.
        sample: the latest sample with shares.
    """

    steps: int
    skipped: int
    dtype: str = "float16"
    stuck: tuple[Skip, ...] = ()
    sample: Sample | None = None


def judge(evidence: Evidence) -> Verdict:
    """The verdict, from the evidence alone."""
    steps, skipped = evidence.steps, evidence.skipped
    return Verdict("normal", f"{skipped} of {steps} steps were skipped.")
