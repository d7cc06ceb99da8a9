"""The lines of a run file: JSON objects that a monitor appends and never changes.

JSON cannot represent NaN and Inf, so they are the texts ``"nan"``, ``"inf"`` and ``"-inf"``. Steps
are numbered from 1. If several training processes wrote to the file one after another, the numbers
continue from one process to the next.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

from gradscaler.diagnose._record.checks import (
    BinCounts,
    Exponent,
    FiniteMagnitude,
    Magnitude,
    NumSteps,
    PackedMapping,
    Scale,
    Share,
    Step,
    check_steps,
    one_of,
)
from gradscaler.diagnose._record.failure import Failure
from gradscaler.diagnose._record.finding import Finding, Verdict
from gradscaler.diagnose._record.formats import FORMATS
from gradscaler.diagnose._record.located import Located
from gradscaler.outcome import NonfiniteGradient

VERSION = 1


class Bins(NamedTuple):
    """A histogram of gradients by exponent, ``floor(log2(abs(gradient)))``.

    Attributes:
        first: the exponent of the first bin.
        counts: the number of gradients in each bin; ``counts[i]`` has the exponent ``first + i``.
    """

    first: Exponent
    counts: BinCounts

    def share_below(self, number: float | None) -> float:
        """The share of gradients in bins that end at a number or below; 0 if there is none."""
        most = math.log2(number) if number else -math.inf
        below = [count for end, count in enumerate(self.counts, self.first + 1) if end <= most]
        return sum(below) / max(sum(self.counts), 1)


@dataclass(frozen=True)
class Shares:
    """The share of gradients in each class, after the product with the scale is cast to the dtype.

    Each is a share of all gradients, from 0 to 1. The dtype is the run's.

    Attributes:
        zero: gradients that were 0 before the cast.
        flushed: nonzero gradients that the cast rounds to 0.
        subnormal: gradients below the smallest normal number, which lose precision.
        normal: gradients in the normal range, at full precision.
        overflow: finite gradients that are too large for the dtype.
        nonfinite: gradients that were Inf or NaN before the cast.
    """

    zero: Share
    flushed: Share
    subnormal: Share
    normal: Share
    overflow: Share
    nonfinite: Share


@dataclass(frozen=True)
class ParameterSample:
    """One parameter's gradient in a sample: its shares, as in :class:`Shares`, and histogram."""

    zero: Share
    flushed: Share
    subnormal: Share
    nonfinite: Share
    histogram: Bins


@dataclass(frozen=True)
class Start:
    """The first line of a file, and the first line of each process that continued the run.

    Attributes:
        framework: the training's framework, such as ``"torch"``.
        dtype: the format that shares and histograms refer to.
        every: the average number of steps from one sample to the next.
        step: the number of steps in the file before this line.
        policy: the policy's ``name``, and its parameters by their names; empty if there is no
            scaler. Then samples have no ``scale`` and ``scales`` in the file, and ``skips`` only if
            the script left out steps that failed.
        time: the time of the start, in UTC, in ISO 8601.
        rank: the rank of the process; omitted from the file if one process trains alone.
        world_size: the number of processes that train together; omitted if it is 1.
        script: the path of the Python file that was started; empty if it is not known.
        versions: the versions of Python, gradscaler and the framework, by their names.
    """

    kind: ClassVar[str] = "start"

    framework: str
    dtype: Annotated[str, one_of(tuple(FORMATS))]
    every: int
    step: NumSteps
    policy: Mapping[str, Any]
    time: str
    rank: int = 0
    world_size: int = 1
    script: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)


UNOWNED = "parameters outside of the model"  # in place of a module's name


@dataclass(frozen=True)
class Optimizers:
    """What a sampled step shows of the optimizers and of the parameters that they hold.

    Attributes:
        idle: the number of calls of ``step`` that found no gradient, for each optimizer that has
            made no step, by the module of its parameters.
        outside: the names of parameters that have a gradient, that no optimizer holds, and that
            have not moved since the sample before. It leaves out those before the first that one
            holds.
        rate: the largest learning rate; None if it is not known.
        unscaled: the names of parameters with a gradient that no scaled loss reaches.
        weights: the norm of an optimizer's matrices before its first step, and now; None if it was
            not taken.
        blank: the names of its matrices that are all 0, as their gradients are.
        alike: the names of its matrices whose units have the same weights and the same gradients.
        frozen: the names of its parameters without a gradient that were frozen
            (``requires_grad=False``) after its first step.
        used: the norm of the gradients that the latest step used, such as clipped ones; None if
            it was not taken.
        eps: the largest eps of its groups; None if it is not known.
        stood: for how many steps nothing has written to any of an optimizer's parameters, as far as
            samples show.
        lines: the lines of the calls that belong to a step, as far as the script's code shows
            them: ``"step"``, ``"backward"``, ``"clip"``, ``"eval"``, ``"zero"`` and
            ``"schedule"``; and ``"optimizer"``, that which made the latest optimizer.
    """

    idle: Mapping[str, int] = field(default_factory=dict)
    outside: tuple[str, ...] = ()
    rate: float | None = None
    unscaled: tuple[str, ...] = ()
    weights: tuple[Magnitude, Magnitude] | None = None
    blank: tuple[str, ...] = ()
    alike: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    used: Magnitude | None = None
    eps: Magnitude | None = None
    stood: NumSteps = 0
    lines: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Targets:
    """What a loss compares in a sampled step, as ``mse_loss`` does.

    Attributes:
        error: the mean square of the differences of outputs and targets.
        variance: that of targets from their mean over the batch, which a model that gives this mean
            has as its error; None if the loss is no mean square error.
        targets: the root of the mean square of the targets.
        outputs: that of the outputs.
    """

    error: Magnitude
    variance: Magnitude | None
    targets: Magnitude
    outputs: Magnitude


@dataclass(frozen=True)
class Sample:
    """The gradients of one step, and the events since the previous sample.

    Attributes:
        step: the step's number.
        scale: the loss scale that the step used.
        scales: pairs of a step and the scale it used. They hold the first step since the previous
            sample, and each step whose scale differs from the scale of the step before it.
        steps: the number of steps since the previous sample, this one included.
        skips: the numbers of the skipped steps among them.
        loss: the unscaled loss; None if it was not seen.
        norm: the norm of all unscaled gradients as one vector; None if they were not seen.
        shares: the shares of all gradients; None if they were not seen.
        histogram: the exponents of all gradients; None if they were not seen.
        parameters: the shares and the histogram of each parameter, by name.
        worst: the names of at most 5 parameters, the worst first.
        losses: the unscaled loss of each of these steps, the sample's own last. A loss that was not
            seen is null; ``losses`` is empty if none was seen.
        largest: the largest finite magnitude of the unscaled gradients in the shares.
        backward: the dtypes of the backward passes since the previous sample, such as
            ``"float16"``, and ``"unknown"`` if a part of a graph could not be inspected. It is
            empty if no backward pass was inspected.
        calls: how often each event was seen since the previous sample, by its text, and by its text
            and a place, such as ``"unzeroed"`` and ``"unzeroed head"``; see
            :class:`~gradscaler.diagnose._record.events.Event`.
        missing: names of an optimizer's parameters that require a gradient and have none.
        cut: the operations that block the gradient, by the names of the parameters behind them.
            The operation is one whose gradient is 0, such as ``"round"``. The text is empty if the
            graph does not connect the parameter to the loss, as behind ``detach()``, and ``"left
            out"`` if the loss does not reach what its module makes. None if no search ended since
            the previous sample.
        num_losses: the most losses that were scaled for one of these steps, such as micro-batches.
        optimizers: what the step shows of the optimizers; None if that was not looked at.
        chance: the loss of a guess, which is the logarithm of the number of classes; None if the
            loss is no cross entropy. Where no graph shows the loss, it is that of as many outputs
            as the last bias has.
        classes: the one class of the labels of ``nll_loss``, or two that follow each other and that
            the batch is sorted by; empty for other labels, None if they were not seen.
        unmoved: the share of elements of 16-bit parameters that have not changed since the previous
            sample with this share. Only elements with a gradient count; None if there are none.
        batch: the epoch and the batch in it, both from 1; see :class:`BadStep`.
    """

    kind: ClassVar[str] = "sample"

    step: Step
    scale: Scale
    scales: tuple[tuple[Step, Scale], ...]
    steps: NumSteps
    skips: tuple[Step, ...]
    loss: float | None = None
    norm: Magnitude | None = None
    shares: Shares | None = None
    histogram: Bins | None = None
    parameters: Annotated[
        Mapping[str, ParameterSample], partial(PackedMapping, ParameterSample)
    ] = field(default_factory=dict)
    worst: tuple[str, ...] = ()
    losses: tuple[float | None, ...] = ()
    largest: FiniteMagnitude | None = None
    backward: tuple[str, ...] = ()
    calls: Mapping[str, int] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    cut: Mapping[str, str] | None = None
    unmoved: Share | None = None
    num_losses: int = 1
    optimizers: Optimizers | None = None
    chance: Magnitude | None = None
    targets: Targets | None = None
    classes: tuple[int, ...] | None = None
    batch: tuple[Step, Step] | None = None

    def check(self) -> None:
        """Check that the numbers of steps agree with each other."""
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
        scale: the loss scale that the step used.
        loss: the unscaled loss; None if it was not seen.
        nonfinite: the first 10 gradients of this process that held an Inf or a NaN. If only a later
            one holds an Inf, it takes the tenth place. It may be empty with several processes, as
            all skip a step that overflows on one of them. None if the step was not inspected; such
            a step is not in the file.
        more: the number of further gradients that held an Inf or a NaN.
        batch: the epoch and the batch in it, both from 1; see :class:`BadStep`.
    """

    kind: ClassVar[str] = "skip"

    step: Step
    scale: Scale
    loss: float | None = None
    nonfinite: tuple[NonfiniteGradient, ...] | None = None
    more: int = 0
    batch: tuple[Step, Step] | None = None

    @property
    def failure(self) -> Failure:
        """The step as one that failed."""
        return Failure(self.step, self.scale, self.loss, self.nonfinite)


@dataclass(frozen=True)
class BadStep:
    """A step that an optimizer applied although its gradients held an Inf or a NaN.

    Only a loop without a scaler has such steps. A file holds the first of each streak of them. It
    also holds the failure with which a script ended: a loss that was Inf or NaN and that no
    backward pass took, or a backward pass that failed and that no step followed.

    Attributes:
        step: the step's number.
        loss: the loss; None if it was not seen.
        nonfinite: the first 10 gradients that held an Inf or a NaN, as in :class:`Skip`.
        more: the number of further gradients that held one.
        located: the place where the first Inf or NaN was made; None if that was not seen.
        is_left_out: whether the step was not applied: no backward pass took its loss, no step
            followed it, or it has left the weights as they were by itself.
        is_from_start: whether the parameter that `located` names was Inf or NaN before the first
            step.
        lost_eps: an optimizer's eps that is 0, or rounds to 0 in its parameters' float16; None if
            none does.
        evaluated: the first and the largest finite loss that the step itself evaluated, as that of
            LBFGS does; None if it evaluated none.
        parameter: a parameter that was Inf or NaN before the step, if `located` is unknown.
        batch: the epoch, and the batch in it, both from 1, of PyTorch's DataLoader that fed the
            step; None if that is unknown. Only the epochs of this process count.
    """

    kind: ClassVar[str] = "bad_step"

    step: Step
    loss: float | None = None
    nonfinite: tuple[NonfiniteGradient, ...] = ()
    more: int = 0
    located: Located | None = None
    is_left_out: bool = False
    is_from_start: bool = False
    lost_eps: float | None = None
    evaluated: tuple[float, float] | None = None
    parameter: str | None = None
    batch: tuple[Step, Step] | None = None

    @property
    def failure(self) -> Failure:
        """The step as one that failed; no scaler scaled its loss."""
        return Failure(self.step, 1.0, self.loss, self.nonfinite)

    def check(self) -> None:
        """Check that what the step was left out for is known."""
        has_failed = self.nonfinite or self.failure.has_bad_loss or self.located is not None
        if self.is_left_out and not has_failed:
            raise ValueError(
                "is_left_out: must be false, as neither loss nor gradient is Inf or NaN"
            )


@dataclass(frozen=True)
class VerdictLine:
    """A verdict, and the step after which the monitor gave it.

    ``verdict`` is the verdict's kind.
    """

    kind: ClassVar[str] = "verdict"

    step: NumSteps
    verdict: str
    text: str
    where: str | None
    findings: tuple[Finding, ...] = ()

    @property
    def has_line(self) -> bool:
        """Whether the gravest finding names a line of the user's code."""
        return bool(self.findings) and self.findings[0].line is not None

    @property
    def in_full(self) -> Verdict:
        """The line's verdict, without the step."""
        return Verdict(self.verdict, self.text, self.where, self.findings)


@dataclass(frozen=True)
class Watched:
    """The observations in a step whose operations or modules the monitor watched.

    Attributes:
        step: the step's number.
        located: the place where the first Inf or NaN was made; None if that was not seen.
        parameter: the name of a parameter or a buffer that was not finite; None if none was seen.
        state: the name of an optimizer's state that was not finite; None if none was seen.
        calls: the events of a run without a step, as in :class:`Sample`; or ``"idle NAME"``, the
            steps without a gradient of an optimizer that has made no other.
        ended: why the monitor saw no later step; None if it did not end before the training.
    """

    kind: ClassVar[str] = "watched"

    step: NumSteps
    located: Located | None = None
    parameter: str | None = None
    state: str | None = None
    calls: Mapping[str, int] = field(default_factory=dict)
    ended: str | None = None


Line = Start | Sample | Skip | BadStep | VerdictLine | Watched
LineT = TypeVar("LineT", bound=Line)
