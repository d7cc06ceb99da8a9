"""A run, read from its file."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gradscaler.diagnose._run.checks import loads, shown, value_as
from gradscaler.diagnose._run.lines import VERSION, Line, Sample, Shares, Skip, Start, VerdictLine
from gradscaler.diagnose._verdict import Evidence, Verdict, judge

_LONGEST_LINE = 2**26  # bytes; a model of 10,000 parameters takes 2**22
_KINDS: dict[str, type[Line]] = {kind.kind: kind for kind in (Start, Sample, Skip, VerdictLine)}


@dataclass(frozen=True)
class Run:
    """The lines of a run file, by kind, in their order."""

    starts: tuple[Start, ...]
    samples: tuple[Sample, ...]
    skips: tuple[Skip, ...]
    verdicts: tuple[VerdictLine, ...]

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
    def longest_skips(self) -> tuple[int, int]:
        """The first and the last step of the longest streak of skips, the latest of them.

        (0, -1) if there are no skips.
        """
        longest, first, previous = (0, -1), 0, -1
        for step in self.skipped:
            if step != previous + 1:
                first = step
            if step - first >= longest[1] - longest[0]:
                longest = first, step
            previous = step
        return longest

    @cached_property
    def losses(self) -> dict[int, float]:
        """The unscaled loss by step, where it was seen."""
        lines: tuple[Sample | Skip, ...] = (*self.samples, *self.skips)
        return {line.step: line.loss for line in lines if line.loss is not None}

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
    def verdict(self) -> Verdict:
        """The monitor's last verdict.

        If there is none, or if a later step was not skipped, so that the run recovered, it is what
        the samples say.
        """
        if self.verdicts and not self._has_stepped_since(self.verdicts[-1].step):
            last = self.verdicts[-1]
            return Verdict(last.verdict, last.text, last.where)
        dtype = self.starts[-1].dtype
        latest = next((sample for sample in reversed(self.samples) if sample.shares), None)
        scale = self.samples[-1].scale if self.samples else None
        return judge(Evidence(self.num_steps, len(self.skipped), dtype, scale=scale, sample=latest))

    def _has_stepped_since(self, step: int) -> bool:
        """Whether a sample counts a later step that was not skipped."""
        return any(
            min(sample.steps, sample.step - step) > sum(skip > step for skip in sample.skips)
            for sample in self.samples
        )


def read_run(path: str | Path) -> Run:
    """Read a run file. A last line without its end, whose writer was killed, is left out.

    Raises:
        ValueError: the file is not a valid run. The message is one line, and names the file, the
            line's number and what is wrong there.
        OSError: the file cannot be read.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: is not a file")
    lines: dict[type[Line], list[Any]] = {kind: [] for kind in _KINDS.values()}
    with path.open("rb") as file:
        for number, data in enumerate(iter(lambda: file.readline(_LONGEST_LINE), b""), 1):
            if not data.endswith(b"\n") and len(data) < _LONGEST_LINE:
                break
            try:
                line = _line(loads(data), first=number == 1)
            except (ValueError, RecursionError) as error:
                what = error if isinstance(error, ValueError) else "is nested too deeply"
                raise ValueError(f"{path}: line {number}: {what}") from None
            lines[type(line)].append(line)
    if not lines[Start]:
        raise ValueError(f"{path}: line 1: is empty or incomplete, so the file holds no run")
    return Run(*map(tuple, lines.values()))


def _line(record: dict[str, Any], first: bool) -> Line:
    """The line of a record; ValueError if it is not a line of a run, or cannot be the first."""
    if first and "gradscaler" not in record:
        raise ValueError("is not the first line of a gradscaler run")
    version = record.get("gradscaler", VERSION)
    if version != VERSION:
        raise ValueError(f"the format's version is {shown(version)}, not {VERSION}")
    kind = record.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS or (first and kind != Start.kind):
        raise ValueError(f"kind: {shown(kind)} is not one that belongs here")
    return value_as(_KINDS[kind], record)  # type: ignore[no-any-return]
