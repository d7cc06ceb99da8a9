"""The file that a monitor writes: one line of JSON for what it saw, appended and never changed.

A number that JSON has no word for is a text: ``"nan"``, ``"inf"`` or ``"-inf"``. Steps count from
1, those of all the training processes that wrote to the file together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

from gradscaler.diagnose import parsing
from gradscaler.diagnose.verdict import Evidence, Verdict, judge
from gradscaler.outcome import NonfiniteGradient

VERSION = 1
_LONGEST_LINE = 2**26  # bytes; a model of 10,000 parameters takes 2**22


class Bins(NamedTuple):
    """How many gradients there are of each exponent.

    Attributes:
        first: the exponent of the first bin, the floor of the magnitude's binary logarithm.
        counts: of the gradients in each bin, the next one twice as large.
    """

    first: int
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Shares:
    """What the gradients, times the scale, become in the run's dtype: shares of all, from 0 to 1.

    Attributes:
        zero: zero already.
        flushed: too small, and rounded to zero.
        subnormal: below the smallest normal number, and less precise.
        normal: represented in full.
        overflow: finite, and too large.
        nonfinite: Inf or NaN already.
    """

    zero: float
    flushed: float
    subnormal: float
    normal: float
    overflow: float
    nonfinite: float


@dataclass(frozen=True)
class ParameterSample:
    """One parameter's gradient in a sample: shares as in :class:`Shares`, and its histogram."""

    zero: float
    flushed: float
    subnormal: float
    nonfinite: float
    histogram: Bins


@dataclass(frozen=True)
class Start:
    """The first line, and the first of each process that went on with the run.

    Attributes:
        framework: the scaler's, such as ``"torch"``.
        dtype: what the shares and histograms are told for.
        every: steps from one sample to the next.
        step: how many there were before.
        policy: its ``name``, and its parameters by theirs.
        time: of the start, in UTC, as ISO 8601 has it.
    """

    kind: ClassVar[str] = "start"

    framework: str
    dtype: str
    every: int
    step: int
    policy: Mapping[str, Any]
    time: str


@dataclass(frozen=True)
class Sample:
    """What the gradients of one step were like, and what happened since the last sample.

    Attributes:
        step: the step's number.
        scale: the loss scale that it used.
        scales: pairs of a step and the scale it used: the first step since the last sample, and
            each that used another scale than the one before it.
        steps: how many there were since the last sample.
        skips: which of them were skipped.
        loss: the unscaled loss, if it was seen.
        norm: of all the unscaled gradients as one vector, if they were seen.
        shares: of all the gradients, if they were seen.
        histogram: of all of them.
        parameters: the same of each parameter, by name.
        worst: the names of at most 5 parameters, the worst first.
    """

    kind: ClassVar[str] = "sample"

    step: int
    scale: float
    scales: tuple[tuple[int, float], ...]
    steps: int
    skips: tuple[int, ...]
    loss: float | None = None
    norm: float | None = None
    shares: Shares | None = None
    histogram: Bins | None = None
    parameters: Mapping[str, ParameterSample] = field(default_factory=dict)
    worst: tuple[str, ...] = ()


@dataclass(frozen=True)
class Skip:
    """A skipped step that was looked into.

    Attributes:
        step: its number.
        scale: the loss scale that it used.
        loss: the unscaled loss, if it was seen.
        nonfinite: the gradients that held an Inf or a NaN, the first 10.
        more: how many further ones did.
    """

    kind: ClassVar[str] = "skip"

    step: int
    scale: float
    loss: float | None = None
    nonfinite: tuple[NonfiniteGradient, ...] = ()
    more: int = 0


@dataclass(frozen=True)
class Judgement:
    """A verdict, and the step after which it was given; ``verdict`` is its kind."""

    kind: ClassVar[str] = "verdict"

    step: int
    verdict: str
    text: str
    where: str | None


Line = Start | Sample | Skip | Judgement


class Sink(Protocol):
    """What a monitor writes lines to."""

    def write(self, line: Line, /) -> None:
        """Write one."""

    def close(self) -> None:
        """No more are to come."""


@dataclass(frozen=True)
class Run:
    """All that a run file holds, line by line in its order."""

    starts: tuple[Start, ...]
    samples: tuple[Sample, ...]
    skips: tuple[Skip, ...]
    verdicts: tuple[Judgement, ...]

    @cached_property
    def num_steps(self) -> int:
        """The number of the last step that is known of."""
        lines: tuple[Line, ...] = (*self.starts, *self.samples, *self.skips, *self.verdicts)
        return max((line.step for line in lines), default=0)

    @cached_property
    def skipped(self) -> tuple[int, ...]:
        """The steps that were skipped."""
        seen = {step for sample in self.samples for step in sample.skips}
        return tuple(sorted(seen | {skip.step for skip in self.skips}))

    @cached_property
    def scales(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Steps, and the scale that was used at each and until the next of them."""
        used = {step: scale for sample in self.samples for step, scale in sample.scales}
        used |= {sample.step: sample.scale for sample in self.samples}
        used |= {skip.step: skip.scale for skip in self.skips}
        steps = sorted(used)
        return tuple(steps), tuple(used[step] for step in steps)

    @cached_property
    def verdict(self) -> Verdict:
        """The last one that the monitor gave, or what the samples say.

        That is where it gave none, or where the run recovered: a later step was not skipped.
        """
        if self.verdicts and not self._has_stepped_since(self.verdicts[-1].step):
            last = self.verdicts[-1]
            return Verdict(last.verdict, last.text, last.where)
        sampled = [sample for sample in self.samples if sample.shares is not None]
        dtype = self.starts[-1].dtype if self.starts else "float16"
        latest = sampled[-1] if sampled else None
        scale = self.samples[-1].scale if self.samples else None
        return judge(Evidence(self.num_steps, len(self.skipped), dtype, scale=scale, sample=latest))

    def _has_stepped_since(self, step: int) -> bool:
        """Whether a sample tells of a later step that was not skipped."""
        return any(
            min(sample.steps, sample.step - step) > sum(skip > step for skip in sample.skips)
            for sample in self.samples
        )


def read_run(path: str | Path) -> Run:
    """Read a run file. A last line without its end, whose writer was killed, is left out.

    Raises:
        ValueError: anything else is wrong with it; the message is one line, and names the file,
            the number of the line and what is wrong there.
        OSError: it cannot be read.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: is not a file")
    lines: dict[type[Line], list[Any]] = {Start: [], Sample: [], Skip: [], Judgement: []}
    with path.open("rb") as file:
        for number, data in enumerate(iter(lambda: file.readline(_LONGEST_LINE), b""), 1):
            if not data.endswith(b"\n") and len(data) < _LONGEST_LINE:
                break
            try:
                line = _line(parsing.loads(data), first=number == 1)
            except (ValueError, RecursionError) as error:
                what = error if isinstance(error, ValueError) else "is nested too deeply"
                raise ValueError(f"{path}: line {number}: {what}") from None
            lines[type(line)].append(line)
    if not lines[Start]:
        raise ValueError(f"{path}: line 1: holds no run: it is empty, or torn")
    return Run(*map(tuple, lines.values()))


def _line(record: dict[str, Any], first: bool) -> Line:
    """The line of a record.

    Raises:
        ValueError: it is none, or should have been the first.
    """
    if first and "gradscaler" not in record:
        raise ValueError("is not the first line of a gradscaler run")
    version = record.get("gradscaler", VERSION)
    if version != VERSION:
        raise ValueError(f"the format's version is {parsing.shown(version)}, not {VERSION}")
    kind = record.get("kind")
    if not isinstance(kind, str) or kind not in _LINES or (first and kind != Start.kind):
        raise ValueError(f"kind: {parsing.shown(kind)} is not one that belongs here")
    return _LINES[kind](record)


def _pair(step: int, scale: float) -> tuple[int, float]:
    return step, scale


_bins = parsing.together(Bins, parsing.exponent, parsing.bin_counts)
_parameter = {
    **dict.fromkeys(("zero", "flushed", "subnormal", "nonfinite"), parsing.share),
    "histogram": _bins,
}
_shares = dict.fromkeys([field.name for field in fields(Shares)], parsing.share)
_gradient = {
    "name": parsing.text,
    "shape": parsing.sequence(parsing.count),
    "dtype": parsing.text,
    "num_inf": parsing.count,
    "num_nan": parsing.count,
    "largest_finite": parsing.number,
}
_LINES: dict[str, parsing.Check[Line]] = {
    Start.kind: parsing.record(
        Start,
        framework=parsing.text,
        dtype=parsing.text,
        every=parsing.count,
        step=parsing.count,
        policy=parsing.mapping(parsing.plain),
        time=parsing.text,
    ),
    Sample.kind: parsing.record(
        Sample,
        step=parsing.count,
        scale=parsing.number,
        scales=parsing.sequence(parsing.together(_pair, parsing.count, parsing.number)),
        steps=parsing.count,
        skips=parsing.sequence(parsing.count),
        loss=parsing.optional(parsing.number),
        norm=parsing.optional(parsing.number),
        shares=parsing.optional(parsing.record(Shares, **_shares)),
        histogram=parsing.optional(_bins),
        parameters=parsing.mapping(parsing.record(ParameterSample, **_parameter)),
        worst=parsing.sequence(parsing.text),
    ),
    Skip.kind: parsing.record(
        Skip,
        step=parsing.count,
        scale=parsing.number,
        loss=parsing.optional(parsing.number),
        nonfinite=parsing.sequence(parsing.record(NonfiniteGradient, **_gradient)),
        more=parsing.count,
    ),
    Judgement.kind: parsing.record(
        Judgement,
        step=parsing.count,
        verdict=parsing.text,
        text=parsing.text,
        where=parsing.optional(parsing.text),
    ),
}
