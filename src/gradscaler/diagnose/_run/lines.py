"""The lines of a run file: JSON objects that a monitor appends and never changes.

A number that JSON has no word for is a text: ``"nan"``, ``"inf"`` or ``"-inf"``. Steps count from
1, across all training processes that wrote to the file one after another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, NamedTuple

from gradscaler.diagnose._findings.finding import Finding, Verdict
from gradscaler.diagnose._locate.located import Located
from gradscaler.diagnose._run.checks import (
    PackedMapping,
    bin_counts,
    check_steps,
    dtype,
    exponent,
    finite_magnitude,
    magnitude,
    num_steps,
    scale,
    share,
    step,
)
from gradscaler.outcome import NonfiniteGradient

VERSION = 1

Share = Annotated[float, share]
"""From 0 to 1."""

Scale = Annotated[float, scale]
"""Positive, and finite in float32."""

Step = Annotated[int, step]
"""The number of a step, from 1."""

NumSteps = Annotated[int, num_steps]


class Bins(NamedTuple):
    """How many gradients there are of each exponent.

    Attributes:
        first: the exponent of the first bin, the floor of the magnitude's binary logarithm.
        counts: of the gradients in each bin, the next one twice as large.
    """

    first: Annotated[int, exponent]
    counts: Annotated[tuple[int, ...], bin_counts]


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

    zero: Share
    flushed: Share
    subnormal: Share
    normal: Share
    overflow: Share
    nonfinite: Share


@dataclass(frozen=True)
class ParameterSample:
    """One parameter's gradient in a sample: shares as in :class:`Shares`, and its histogram."""

    zero: Share
    flushed: Share
    subnormal: Share
    nonfinite: Share
    histogram: Bins


@dataclass(frozen=True)
class Start:
    """The first line, and the first of each process that continued the run.

    Attributes:
        framework: the scaler's, such as ``"torch"``.
        dtype: the format that shares and histograms refer to.
        every: steps from one sample to the next, on average.
        step: how many steps there were before.
        policy: the policy's ``name``, and its parameters by their names.
        time: when it started, in UTC, in ISO 8601.
        rank: of the process; left out where there is one process.
        world_size: how many processes train together; left out where there is one.
    """

    kind: ClassVar[str] = "start"

    framework: str
    dtype: Annotated[str, dtype]
    every: int
    step: NumSteps
    policy: Mapping[str, Any]
    time: str
    rank: int = 0
    world_size: int = 1


@dataclass(frozen=True)
class Sample:
    """What the gradients of one step were like, and what happened since the last sample.

    Attributes:
        step: the step's number.
        scale: the loss scale that it used.
        scales: pairs of a step and the scale it used: the first step since the last sample, and
            each that used another scale than the one before it.
        steps: how many steps there were since the last sample.
        skips: which of them were skipped.
        loss: the unscaled loss, if it was seen.
        norm: the norm of all unscaled gradients as one vector, if they were seen.
        shares: the shares of all gradients, if they were seen.
        histogram: the exponents of all gradients, if they were seen.
        parameters: the same of each parameter, by name.
        worst: the names of at most 5 parameters, the worst first.
        losses: the unscaled loss of each of ``steps``, the sample's own last; null where it was
            not seen, and empty where none was.
        largest: the largest finite magnitude of the unscaled gradients in the shares.
        backward: the dtypes that backward passes computed in since the last sample, such as
            ``"float16"``, and ``"unknown"`` for what does not say; empty where none was looked at.
        calls: how often since the last sample a call suggests misuse. ``"unstepped"``: gradients
            were unscaled, and ``update`` came without a step. ``"switched"``: a step of one
            optimizer followed, after an ``update``, a step of another. ``"unscaled"``: that, and no
            loss was scaled in between. ``"unzeroed"``: a backward pass added to gradients that a
            step had used. ``"resumed"``: before the first step, an optimizer had the state of an
            earlier run, and the scaler was as new. ``"lossless"``: a step of an eager scaler for
            which no loss was scaled. Before any step, ``"idle"``: ``step`` found no
            gradient; ``"raised"``: ``step`` or ``unscale_`` raised an error.
        missing: parameters that require a gradient, are an optimizer's, and have none.
        cut: if that was looked for since the last sample: what lets no gradient through to
            parameters, by their names. It is an operation, such as ``"round"``, where the gradient
            is 0; and empty where there is none, as behind ``detach()``.
        unmoved: of the elements of 16-bit parameters that have a gradient, the share that has not
            moved since the last such sample; None where there are none.
    """

    kind: ClassVar[str] = "sample"

    step: Step
    scale: Scale
    scales: tuple[tuple[Step, Scale], ...]
    steps: NumSteps
    skips: tuple[Step, ...]
    loss: float | None = None
    norm: Annotated[float, magnitude] | None = None
    shares: Shares | None = None
    histogram: Bins | None = None
    parameters: Annotated[
        Mapping[str, ParameterSample], partial(PackedMapping, ParameterSample)
    ] = field(default_factory=dict)
    worst: tuple[str, ...] = ()
    losses: tuple[float | None, ...] = ()
    largest: Annotated[float, finite_magnitude] | None = None
    backward: tuple[str, ...] = ()
    calls: Mapping[str, int] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    cut: Mapping[str, str] | None = None
    unmoved: Share | None = None

    def check(self) -> None:
        """Check what a file says of the steps since the last sample."""
        first = self.step - self.steps + 1
        check_steps("skips", self.skips, first, self.step)
        check_steps("scales", [step for step, _ in self.scales], first, self.step)
        if self.steps > self.step or len(self.losses) > self.steps:
            raise ValueError("steps: must be at most the step, and at least as many as the losses")


@dataclass(frozen=True)
class Skip:
    """A skipped step; a file holds those that were inspected.

    Attributes:
        step: the step's number.
        scale: the loss scale that it used.
        loss: the unscaled loss, if it was seen.
        nonfinite: the gradients of this process that held an Inf or a NaN, the first 10; None if
            the step was not inspected, and is not in the file. With several processes there may be
            none: the step is skipped on all of them if it overflows on one.
        more: how many other gradients did.
    """

    kind: ClassVar[str] = "skip"

    step: Step
    scale: Scale
    loss: float | None = None
    nonfinite: tuple[NonfiniteGradient, ...] | None = None
    more: int = 0


@dataclass(frozen=True)
class VerdictLine:
    """A verdict, and the step after which the monitor gave it; ``verdict`` is its kind."""

    kind: ClassVar[str] = "verdict"

    step: NumSteps
    verdict: str
    text: str
    where: str | None
    findings: tuple[Finding, ...] = ()

    @property
    def in_full(self) -> Verdict:
        """The verdict itself."""
        return Verdict(self.verdict, self.text, self.where, self.findings)


@dataclass(frozen=True)
class Watched:
    """What a monitor saw in a step whose operations or modules it watched.

    Attributes:
        step: the step's number.
        located: where the first Inf or NaN was made; None if that was not seen.
        dtypes: the dtype of each module's output, by the module's name; autocast chooses it.
        parameter: the name of a parameter or a buffer that was not finite; None if none was seen.
        state: the name of an optimizer's state that was not finite; None if none was seen.
        calls: in a run without a step, its calls: see :class:`Sample`.
    """

    kind: ClassVar[str] = "watched"

    step: NumSteps
    located: Located | None = None
    dtypes: Mapping[str, str] = field(default_factory=dict)
    parameter: str | None = None
    state: str | None = None
    calls: Mapping[str, int] = field(default_factory=dict)


Line = Start | Sample | Skip | VerdictLine | Watched
