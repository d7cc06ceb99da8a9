"""A run, and its verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from gradscaler.diagnose._findings import judge
from gradscaler.diagnose._findings.evidence import Evidence, min_scale_of
from gradscaler.diagnose._findings.frameworks import framework_named
from gradscaler.diagnose._gradients.fitting_scales import Fit, fit_of
from gradscaler.diagnose._record.finding import Verdict
from gradscaler.diagnose._record.lines import BadStep, Sample, Skip, VerdictLine, Watched
from gradscaler.diagnose._record.recorded_run import RecordedRun
from gradscaler.outcome import HISTORY_LENGTH


@dataclass(frozen=True)
class Run(RecordedRun):
    """A run, with its verdict.

    Attributes:
        ranks: the runs by rank, the rank at fault first, if the files of several ranks were read.
    """

    ranks: Mapping[int, Run] = field(default_factory=dict)

    @cached_property
    def fit(self) -> Fit | None:
        """The loss scales that fit the latest samples; None if no sample has sizes of gradients."""
        return fit_of(self.samples, self.starts[-1].dtype)

    @cached_property
    def verdict(self) -> Verdict:
        """The monitor's last verdict, or one that is judged from the samples.

        The samples decide if the monitor gave no verdict, or if a later step was not skipped, so
        that the run recovered. If the file holds several runs, the verdict is on the latest run,
        and its text says so.
        """
        start = self.starts[-1]
        if self.latest is not self:
            verdict = self.latest.verdict
            num_runs = len({start.step for start in self.starts})  # a run without steps adds none
            text = (
                f"The file holds {num_runs:,} runs, one after another; this is on the "
                f"latest, from step {start.step + 1:,} on. {verdict.text}"
            )
            return replace(verdict, text=text)
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
            has_scaler=self.has_scaler,
            framework=framework_named(start.framework, start.versions),
        )
        lines: tuple[Sample | Skip | BadStep | VerdictLine | Watched, ...]
        lines = (*self._whole_samples(), *self.skips, *self.verdicts, *self.watched)
        lines = (*lines, *self.bad_steps)
        for line in lines:
            evidence = evidence.after(line)
        return judge(evidence)

    @cached_property
    def latest(self) -> Run:
        """The latest run in the file. Its ``before`` says how the run before it ended."""
        start = self.starts[-1]
        previous = [each.step for each in self.starts if each.step < start.step]
        if not previous:
            return self
        before = self.between(previous[-1], start.step).ended
        return replace(self.between(start.step, self.num_steps), starts=(start,), before=before)

    def _whole_samples(self) -> list[Sample]:
        """The samples, and one made of the skips after the last sample, if there are any.

        Skips without a sample remain where a process was killed.
        """
        last = self.samples[-1].step if self.samples else self.starts[0].step
        late = {skip.step: skip for skip in self.skips if skip.step > last}
        if not late:
            return [*self.samples]
        end = max(late)
        scales = {last + 1: late[min(late)].scale, **{n: skip.scale for n, skip in late.items()}}
        steps = range(max(last, end - HISTORY_LENGTH) + 1, end + 1)
        losses = tuple(late[step].loss if step in late else None for step in steps)
        ending = Sample(end, scales[end], (*scales.items(),), end - last, (*late,), losses=losses)
        return [*self.samples, ending]

    def _has_stepped_since(self, step: int) -> bool:
        """Whether a sample counts a later step that was not skipped."""
        return any(
            min(sample.steps, sample.step - step) > sum(skip > step for skip in sample.skips)
            for sample in self.samples
        )
