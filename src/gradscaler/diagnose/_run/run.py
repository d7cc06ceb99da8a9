"""What one process recorded of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import TypeVar

from gradscaler.diagnose._findings import Evidence, Verdict, judge
from gradscaler.diagnose._findings.evidence import Before, min_scale_of
from gradscaler.diagnose._fitting_scales import Fit, fit_of
from gradscaler.diagnose._run.lines import (
    Line,
    Sample,
    Shares,
    Skip,
    Start,
    VerdictLine,
    Watched,
)
from gradscaler.outcome import HISTORY_LENGTH

LineT = TypeVar("LineT", bound=Line)

_FEW = 5  # losses, of which the median counts


@dataclass(frozen=True)
class Run:
    """The lines of a run file, by kind, in their order.

    Attributes:
        ranks: if several ranks' files were read, their runs by rank, the rank at fault first.
    """

    starts: tuple[Start, ...]
    samples: tuple[Sample, ...]
    skips: tuple[Skip, ...]
    verdicts: tuple[VerdictLine, ...]
    ranks: Mapping[int, Run] = field(default_factory=dict)
    watched: tuple[Watched, ...] = ()
    before: Before | None = None  # the end of what the same file held before

    @cached_property
    def num_steps(self) -> int:
        """The number of the last step."""
        lines: tuple[Line, ...] = (*self.starts, *self.samples, *self.skips, *self.verdicts)
        return max((line.step for line in lines), default=0)

    @cached_property
    def skipped(self) -> tuple[int, ...]:
        """The steps that were skipped."""
        seen = {step for sample in self.samples for step in sample.skips}
        return tuple(sorted(seen | {skip.step for skip in self.skips}))

    @cached_property
    def streaks(self) -> tuple[tuple[int, int], ...]:
        """The first and the last step of each streak of skips."""
        found: list[tuple[int, int]] = []
        for step in self.skipped:
            if found and step == found[-1][1] + 1:
                found[-1] = found[-1][0], step
            else:
                found.append((step, step))
        return tuple(found)

    @cached_property
    def longest_skips(self) -> tuple[int, int]:
        """The first and the last step of the longest streak of skips, the latest of them.

        (0, -1) if there are no skips.
        """
        longest = max(self.streaks, key=lambda s: (s[1] - s[0], s[1]), default=None)
        return (0, -1) if longest is None else longest

    @cached_property
    def nonfinite_since(self) -> float:
        """The step since which this rank's own gradients hold an Inf or a NaN.

        In the latest streak of skips, up to its last step that was inspected; Inf if they do not.
        """
        first, _ = self.streaks[-1] if self.streaks else (0, 0)
        since = math.inf
        for skip in reversed(self.skips):
            if skip.step < first or not skip.nonfinite:
                break
            since = skip.step
        return since

    @cached_property
    def losses(self) -> dict[int, float]:
        """The unscaled loss by step, where it was seen."""
        found: dict[int, float] = {}
        for sample in self.samples:
            first = sample.step + 1 - len(sample.losses)
            losses = enumerate(sample.losses, first)
            found |= {step: loss for step, loss in losses if loss is not None}
            if sample.loss is not None:
                found[sample.step] = sample.loss
        found |= {skip.step: skip.loss for skip in self.skips if skip.loss is not None}
        if all(before < after for before, after in pairwise(found)):  # as in most files
            return found
        return dict(sorted(found.items()))

    @cached_property
    def norms(self) -> dict[int, float]:
        """The norm of the unscaled gradients by step, where they were seen."""
        return {sample.step: sample.norm for sample in self.samples if sample.norm is not None}

    @cached_property
    def shares(self) -> dict[int, Shares]:
        """What became of the gradients by step, where they were seen."""
        return {sample.step: sample.shares for sample in self.samples if sample.shares is not None}

    @cached_property
    def scales(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Steps, and the scale that was used at each of them and until the next."""
        used = {step: scale for sample in self.samples for step, scale in sample.scales}
        used |= {sample.step: sample.scale for sample in self.samples}
        used |= {skip.step: skip.scale for skip in self.skips}
        steps = sorted(used)
        return tuple(steps), tuple(used[step] for step in steps)

    @cached_property
    def lowest_overflow(self) -> float | None:
        """The lowest scale at which a gradient was Inf though its loss was finite, if any was."""
        found = [
            skip.scale
            for skip in self.skips
            if any(gradient.num_inf for gradient in skip.nonfinite or ())
            and (skip.loss is None or math.isfinite(skip.loss))
        ]
        return min(found, default=None)

    @cached_property
    def fit(self) -> Fit | None:
        """The loss scales that fit the latest samples; None if no gradient is placed by size."""
        return fit_of(self.samples, self.starts[-1].dtype)

    @cached_property
    def verdict(self) -> Verdict:
        """The monitor's last verdict.

        If there is none, or if a later step was not skipped, so that the run recovered, it is what
        the samples say. In a file that was continued, it is on the steps since then, and says so.
        """
        start = self.starts[-1]
        num_runs = len({start.step for start in self.starts})  # one without a step is none
        if num_runs > 1:
            latest = self._since(start).verdict
            text = (
                f"The file holds {num_runs:,} runs, one after another; this is on the "
                f"latest, from step {start.step + 1:,} on. {latest.text}"
            )
            return replace(latest, text=text)
        if self.verdicts and not self._has_stepped_since(self.verdicts[-1].step):
            return self.verdicts[-1].in_full
        evidence = Evidence(
            self.num_steps - start.step,
            len(self.skipped),
            start.dtype,
            min_scale=min_scale_of(start.policy),
            before=self.before,
            world_size=start.world_size,
            is_finite_here=bool(self.skips) and not any(skip.nonfinite for skip in self.skips),
        )
        lines: tuple[Sample | VerdictLine | Watched, ...]
        lines = (*self._whole_samples(), *self.verdicts, *self.watched)
        for line in lines:
            evidence = evidence.after(line)
        return judge(evidence)

    @cached_property
    def ended(self) -> Before | None:
        """How the latest of the runs in the file ended; None if its losses were not seen."""
        latest = self._from(self.starts[-1].step, self.num_steps)
        losses = [loss for loss in latest.losses.values() if math.isfinite(loss)]
        _, scales = latest.scales
        if not losses or not scales:
            return None
        return Before(scales[-1], median(losses[:_FEW]), median(losses[-_FEW:]))

    def _since(self, start: Start) -> Run:
        """The run without what came before one of its starts, but for how that ended."""
        previous = [each.step for each in self.starts if each.step < start.step]
        before = self._from(previous[-1], start.step).ended if previous else None
        return replace(self._from(start.step, self.num_steps), starts=(start,), before=before)

    def _from(self, first: int, last: int) -> Run:
        """The lines of the steps after ``first``, up to ``last``."""

        def within(lines: tuple[LineT, ...]) -> tuple[LineT, ...]:
            return tuple(line for line in lines if first < line.step <= last)

        starts = tuple(start for start in self.starts if start.step == first)
        lines = within(self.samples), within(self.skips), within(self.verdicts)
        return Run(starts, *lines, {}, within(self.watched))

    def _whole_samples(self) -> list[Sample]:
        """The samples, with the losses and steps that only the lines of skips tell of.

        These are the losses in an older file, and the skips since the last sample of a process that
        was killed.
        """
        samples = list(self.samples)
        last = samples[-1].step if samples else self.starts[0].step
        if late := [skip for skip in self.skips if skip.step > last]:
            scales = (last + 1, late[0].scale), *((skip.step, skip.scale) for skip in late)
            step, scale = late[-1].step, late[-1].scale
            samples.append(Sample(step, scale, scales, step - last, ()))
        skips = {skip.step: skip.loss for skip in self.skips}
        for place, sample in enumerate(samples):
            first = sample.step + 1 - min(sample.steps, HISTORY_LENGTH)
            if own := [step for step in range(first, sample.step + 1) if step in skips]:
                losses = dict(enumerate(sample.losses, sample.step + 1 - len(sample.losses)))
                losses |= {step: skips[step] for step in own if skips[step] is not None}
                samples[place] = replace(
                    sample,
                    skips=tuple(sorted({*sample.skips, *own})),
                    losses=tuple(losses.get(step) for step in range(first, sample.step + 1)),
                )
        return samples

    def _has_stepped_since(self, step: int) -> bool:
        """Whether a sample counts a later step that was not skipped."""
        return any(
            min(sample.steps, sample.step - step) > sum(skip > step for skip in sample.skips)
            for sample in self.samples
        )
