"""A run as one process recorded it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import TypeVar

from gradscaler.diagnose._record.lines import (
    BadStep,
    Line,
    LineT,
    Sample,
    Shares,
    Skip,
    Start,
    VerdictLine,
    Watched,
)
from gradscaler.diagnose._record.step import Before
from gradscaler.diagnose._record.thresholds import END_LOSSES

RunT = TypeVar("RunT", bound="RecordedRun")


@dataclass(frozen=True)
class RecordedRun:
    """The lines of a run file, grouped by kind, in the order of the file."""

    starts: tuple[Start, ...]
    samples: tuple[Sample, ...]
    skips: tuple[Skip, ...]
    verdicts: tuple[VerdictLine, ...]
    watched: tuple[Watched, ...] = ()
    bad_steps: tuple[BadStep, ...] = ()
    before: Before | None = None  # how the previous run in the same file ended
    file: str = field(default="", compare=False)  # its name

    @property
    def has_scaler(self) -> bool:
        """Whether losses are scaled."""
        return bool(self.starts[-1].policy)

    @cached_property
    def num_steps(self) -> int:
        """The number of the last step."""
        lines: tuple[Line, ...] = (*self.starts, *self.samples, *self.skips, *self.verdicts)
        lines = *lines, *(bad for bad in self.bad_steps if not bad.is_left_out)
        return max((line.step for line in lines), default=0)

    @cached_property
    def skipped(self) -> tuple[int, ...]:
        """The steps that were skipped."""
        seen = {step for sample in self.samples for step in sample.skips}
        return tuple(sorted(seen | {skip.step for skip in self.skips}))

    @cached_property
    def nonfinite_since(self) -> float:
        """The step since which this rank's own gradients hold an Inf or a NaN.

        Only the latest streak of skips counts, up to its last inspected step. The value is Inf if
        there is no such step, or its gradients are finite.
        """
        since, skipped = math.inf, set(self.skipped)
        first = max(skipped, default=0)
        while first - 1 in skipped:
            first -= 1
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
            losses = sample.losses or (sample.loss,)
            steps = enumerate(losses, sample.step + 1 - len(losses))
            found |= {step: loss for step, loss in steps if loss is not None}
        failed: tuple[Skip | BadStep, ...] = (*self.skips, *self.bad_steps)
        found |= {step.step: step.loss for step in failed if step.loss is not None}
        return {step: found[step] for step in sorted(found)}

    @cached_property
    def num_losses(self) -> int:
        """The most losses that were scaled for one step."""
        return max((sample.num_losses for sample in self.samples), default=1)

    @cached_property
    def norms(self) -> dict[int, float]:
        """The norm of the unscaled gradients by step, where it was seen."""
        return {sample.step: sample.norm for sample in self.samples if sample.norm is not None}

    @cached_property
    def rates(self) -> dict[int, float]:
        """The largest learning rate by step, where it was seen."""
        seen = {each.step: each.optimizers for each in self.samples}
        rates = {step: found.rate for step, found in seen.items() if found is not None}
        return {step: rate for step, rate in rates.items() if rate is not None}

    @cached_property
    def weights(self) -> dict[int, float]:
        """The norm of an optimizer's matrices before the step, where it was taken."""
        seen = {each.step: each.optimizers and each.optimizers.weights for each in self.samples}
        return {step: norms[1] for step, norms in seen.items() if norms}

    @cached_property
    def batches(self) -> dict[int, tuple[int, int]]:
        """The epoch and the batch in it by step, where they were seen."""
        lines: tuple[Sample | Skip | BadStep, ...]
        lines = *self.samples, *self.skips, *self.bad_steps
        return {line.step: line.batch for line in lines if line.batch is not None}

    @cached_property
    def shares(self) -> dict[int, Shares]:
        """The shares of the gradients by step, where they were seen."""
        return {sample.step: sample.shares for sample in self.samples if sample.shares is not None}

    @cached_property
    def scales(self) -> dict[int, float]:
        """The loss scale by step; a step that is not a key used the scale of the key before it.

        It is empty if there is no scaler.
        """
        if not self.has_scaler:
            return {}
        used = {step: scale for sample in self.samples for step, scale in sample.scales}
        used |= {sample.step: sample.scale for sample in self.samples}
        used |= {skip.step: skip.scale for skip in self.skips}
        return {step: used[step] for step in sorted(used)}

    @cached_property
    def ended(self) -> Before | None:
        """The end of the latest run in the file; None if its losses or scales were not seen."""
        latest = self.between(self.starts[-1].step, self.num_steps)
        losses = [loss for loss in latest.losses.values() if math.isfinite(loss)]
        if not losses or not latest.scales:
            return None
        scale = latest.scales[max(latest.scales)]
        return Before(scale, median(losses[:END_LOSSES]), median(losses[-END_LOSSES:]))

    def between(self: RunT, first: int, last: int) -> RunT:
        """The run with only the lines of the steps after ``first``, up to ``last``."""

        def within(lines: tuple[LineT, ...]) -> tuple[LineT, ...]:
            return tuple(line for line in lines if first < line.step <= last)

        return replace(
            self,
            starts=tuple(start for start in self.starts if start.step == first),
            samples=within(self.samples),
            skips=within(self.skips),
            verdicts=within(self.verdicts),
            watched=within(self.watched),
            bad_steps=within(self.bad_steps),
            before=None,
        )
