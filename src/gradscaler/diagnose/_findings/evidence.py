"""What is known about a run when it is judged, and what the verdict on it is."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from gradscaler.diagnose._fitting_scales import MOST_SAMPLES, has_sizes
from gradscaler.diagnose._gradients.module_hooks import Located
from gradscaler.diagnose._run.lines import Sample, Skip, VerdictLine, Watched
from gradscaler.outcome import HISTORY_LENGTH


@dataclass(frozen=True)
class Verdict:
    """What happened, and what to try.

    Attributes:
        kind: ``"normal"``: overflows that lower scales cure.

            All steps are skipped, and no lower scale cures it: ``"parameter"``: a parameter or a
            buffer is itself not finite. ``"activations"``: a module makes Inf or NaN from finite
            inputs. ``"loss"``: the unscaled loss is not finite. ``"nan"``: a gradient is NaN at
            every scale, even at 1 or less. ``"floor"``: the gradients are too large for a scale of
            1, or for the smallest one. ``"divergence"``: the loss had exploded before.

            Some are: ``"data"``: steps are skipped now and then, also after the scale has settled.

            None is: ``"silent"``: the loss is NaN or Inf while the gradients are finite.
            ``"dead"``: the gradients are exactly 0. ``"underflow"``: the scale is too small.
            ``"range"``: one parameter's gradients are flushed at any scale at which another's
            overflow. ``"misuse"``: the scaler is called in a wrong way, or needs no scaler.

            With several processes also ``"elsewhere"``: another rank's gradients overflow, and this
            rank's are finite; and ``"ranks"``: ranks hold different scales, or skipped different
            steps.
        text: two sentences: what happened, with the evidence, and what to try. From the files of
            several ranks, it also names the rank at fault, and where ranks differ.
        where: the name of the parameter or the module that caused it, if one did.
    """

    kind: str
    text: str
    where: str | None = None

    def __str__(self) -> str:
        return self.text


class Past(NamedTuple):
    """A step that is over."""

    step: int
    scale: float
    skipped: bool
    loss: float | None = None

    @property
    def is_bad(self) -> bool:
        """Whether the loss is known, and is NaN or Inf."""
        return self.loss is not None and not math.isfinite(self.loss)


class Measured(NamedTuple):
    """Of the scaled gradients of a sample: their norm, and their largest finite magnitude."""

    scale: float
    norm: float
    largest: float | None


@dataclass(frozen=True)
class Evidence:
    """What is known about a run when it is judged.

    Most of it is put together line by line, as a run file holds them: see :meth:`after`. So a
    monitor and the file that it writes give the same verdict.
    """

    steps: int
    skipped: int  # of the steps
    dtype: str = "float16"  # what the gradients are computed in
    scale: float | None = None  # the last step's, if known
    skips_in_a_row: int = 0  # the last steps of an optimizer, if too many
    first_scale: float | None = None  # of those
    skips: tuple[Skip, ...] = ()  # the latest of those
    min_scale: float | None = None  # the scale's lower limit, if known
    parameter: str | None = None  # the name of a parameter or a buffer that is not finite
    lost_eps: float | None = None  # an optimizer's, that is 0 in its parameters' float16
    weights: tuple[float, float] | None = None  # their norm at first and now, if too many skips
    located: Located | None = None  # where the first Inf or NaN was made, if too many skips
    watched: Watched | None = None  # the latest step in which an operation was found
    sample: Sample | None = None  # the latest with shares
    sizes: tuple[Sample, ...] = ()  # the latest that show how large gradients are
    world_size: int = 1  # how many processes train together
    is_finite_here: bool = False  # this rank's gradients, in all skipped steps that were inspected
    past: tuple[Past, ...] = ()  # the latest steps
    bad_and_skipped: int = 0  # steps whose loss was not finite, and that were skipped
    bad_and_applied: int = 0  # and that were not
    measured: tuple[Measured, ...] = ()  # the latest samples with finite gradients
    backward: frozenset[str] = frozenset()  # the dtypes that backward passes compute in, if known
    calls: Mapping[str, int] = field(default_factory=dict)  # see Sample
    missing: tuple[str, ...] | None = None  # parameters without a gradient in any sample
    cut: Mapping[str, str] = field(default_factory=dict)  # see Sample
    earlier: VerdictLine | None = None  # on too many skips in a row; others were taken since

    @property
    def has_many_skips(self) -> bool:
        """Whether more steps were skipped than a loss scale needs to settle."""
        return self.skipped > max(_FEW, self.steps / 10)

    def after(self, line: Sample | VerdictLine | Watched) -> Evidence:
        """The evidence with one more line."""
        if isinstance(line, Watched):
            return self if line.operation is None else replace(self, watched=line)
        if isinstance(line, VerdictLine):
            return self if line.verdict == "normal" else replace(self, earlier=line)
        last = self.past[-1].step if self.past else 0
        steps = [step for step in _steps_of(line) if step.step > last]
        if not steps:  # an interrupt may have let a sample be written twice
            return self
        measured = self.measured
        if line.norm is not None and 0 < line.norm < math.inf:
            largest = None if line.largest is None else line.largest * line.scale
            measured = (*measured, Measured(line.scale, line.norm * line.scale, largest))[-_LATEST:]
        missing, cut = self.missing, self.cut if line.cut is None else line.cut
        if line.shares is not None:
            before = line.missing if missing is None else missing
            missing = tuple(name for name in before if name in line.missing)
            cut = {name: by for name, by in cut.items() if _gets_nothing(name, line)}
        return replace(
            self,
            missing=missing,
            cut=cut,
            scale=line.scale,
            sample=self.sample if line.shares is None else line,
            sizes=(*self.sizes, line)[-MOST_SAMPLES:] if has_sizes(line) else self.sizes,
            past=(*self.past, *steps)[-HISTORY_LENGTH:],
            bad_and_skipped=self.bad_and_skipped + sum(s.is_bad and s.skipped for s in steps),
            bad_and_applied=self.bad_and_applied + sum(s.is_bad and not s.skipped for s in steps),
            measured=measured,
            backward=self.backward.union(line.backward),
            calls=Counter(self.calls) + Counter(line.calls),
        )


_LATEST = 10  # samples
_FEW = 20  # skips that any loss scale may need to settle


def _gets_nothing(name: str, sample: Sample) -> bool:
    """Whether a parameter's gradient is missing or 0 in a sample."""
    found = sample.parameters.get(name)
    return found is None or found.zero == 1


def _steps_of(sample: Sample) -> list[Past]:
    """The steps since the sample before, or the latest of them."""
    skipped, since = set(sample.skips), [step for step, _ in sample.scales]
    first = max(sample.step - sample.steps, sample.step - HISTORY_LENGTH) + 1
    losses = dict(enumerate(sample.losses, sample.step + 1 - len(sample.losses)))
    if sample.loss is not None:
        losses[sample.step] = sample.loss
    found = []
    for step in range(first, sample.step + 1):
        place = bisect_right(since, step) - 1
        scale = sample.scales[place][1] if place >= 0 else sample.scale
        found.append(Past(step, scale, step in skipped, losses.get(step)))
    return found
