"""The evidence about a run, from which its verdict is made."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean

from gradscaler.diagnose._findings.frameworks import Framework, framework_named
from gradscaler.diagnose._gradients.fitting_scales import has_sizes
from gradscaler.diagnose._record.events import Event, Events
from gradscaler.diagnose._record.failure import Failure
from gradscaler.diagnose._record.formats import format_named
from gradscaler.diagnose._record.lines import (
    BadStep,
    Optimizers,
    Sample,
    Skip,
    VerdictLine,
    Watched,
)
from gradscaler.diagnose._record.located import BadGradient, Located
from gradscaler.diagnose._record.step import Before, Step
from gradscaler.diagnose._record.thresholds import (
    ALMOST_ALL,
    EARLY,
    EMPTIED_SAMPLES,
    FEW_CALLS,
    LATE,
    LATEST_SAMPLES,
    MANY,
    PHASES,
    SAME_FAILURES,
    SAME_LOSS,
    SETTLING_SKIPS,
    STOOD,
    ZERO_FROM_START,
)
from gradscaler.outcome import HISTORY_LENGTH
from gradscaler.policies import FixedScale, is_fixed

STATISTICS = "running_mean", "running_var", "._mean", "._variance"
"""How the names of buffers end that forward passes write, in PyTorch and TensorPlay, and Paddle."""


@dataclass(frozen=True)
class Way:
    """How losses went from step to step: how often they moved, and turned from a fall to a rise.

    Moves of a rounding are left out.
    """

    latest: float | None = None
    moves: int = 0
    turns: int = 0
    has_risen: bool = False  # at the latest move

    def after(self, losses: Iterable[float]) -> Way:
        """The way extended by losses."""
        latest, moves, turns, has_risen = self.latest, self.moves, self.turns, self.has_risen
        for loss in losses:
            if latest is not None and abs(loss - latest) > SAME_LOSS * abs(latest):
                turns += moves > 0 and has_risen != (loss > latest)
                moves, has_risen = moves + 1, loss > latest
            latest = loss
        return Way(latest, moves, turns, has_risen)

    @property
    def is_smooth(self) -> bool:
        """Whether the losses are those of one batch, as those of others turn every few steps."""
        return self.moves >= LATE and self.turns < MANY * self.moves


@dataclass(frozen=True)
class Evidence:
    """The evidence about a run, from which its verdict is made.

    :meth:`after` collects most of it from the lines of a run file, one by one. So a monitor and
    the file that it writes give the same verdict.
    """

    steps: int
    skipped: int  # how many of the steps were skipped
    dtype: str = "float16"  # the dtype that gradients are computed in
    scale: float | None = None  # of the last step, if known
    skips_in_a_row: int = 0  # the length of an optimizer's current streak, if too long
    first_scale: float | None = None  # at the start of that streak
    skips: tuple[Skip, ...] = ()  # the latest skips of that streak
    inspected: tuple[Skip, ...] = ()  # the latest inspected skips of the run
    min_scale: float | None = None  # the scale's lower limit, if known
    parameter: str | None = None  # the name of a parameter or a buffer that is not finite
    state: str | None = None  # the name of an optimizer's state that is not finite
    statistic: str | None = None  # the name of a buffer of STATISTICS that is not finite
    lost_eps: float | None = None  # an optimizer's eps that is 0, also in its float16
    weights: tuple[float, float] | None = None  # the parameters' norm, first and in that streak
    located: Located | None = None  # the first Inf or NaN of that streak
    watched: Located | None = None  # the latest Inf or NaN found in a watched step
    sample: Sample | None = None  # the latest sample with shares
    sizes: tuple[Sample, ...] = ()  # the latest samples with nonzero gradients
    before: Before | None = None  # the previous run in the same file, if any
    first: Step | None = None  # the first step
    unmoved: tuple[float, ...] = ()  # Sample.unmoved of the latest samples
    world_size: int = 1  # how many processes train together
    is_finite_here: bool = False  # whether all inspected skips had finite gradients here
    past: tuple[Step, ...] = ()  # the latest steps
    way: Way = Way()  # of the losses of all steps
    bad_and_skipped: int = 0  # skipped steps whose loss was not finite
    bad_and_applied: int = 0  # applied steps whose loss was not finite
    measured: tuple[Sample, ...] = ()  # the latest samples with finite gradients
    peaks: tuple[tuple[int, float], ...] = ()  # the largest gradient by sampled step, unscaled
    backward: frozenset[str] = frozenset()  # the dtypes that backward passes compute in, if known
    events: Events = field(default_factory=Events)
    missing: tuple[str, ...] | None = None  # parameters without a gradient in any sample
    cut: Mapping[str, str] = field(default_factory=dict)  # see Sample.cut
    earlier: VerdictLine | None = None  # the verdict on an earlier streak
    optimizers: Optimizers | None = None  # in the latest sample that looked at them
    rates: tuple[tuple[int, float], ...] = ()  # the learning rate by step: first and latest samples
    has_scaler: bool = True  # whether losses are scaled
    framework: Framework = field(default_factory=partial(framework_named, "torch", {}))
    ended: str | None = None  # see Watched
    bad_step: BadStep | None = None  # the first that was applied, else one that was left out

    @property
    def is_elsewhere(self) -> bool:
        """Whether only other ranks had gradients that were not finite."""
        return self.world_size > 1 and self.is_finite_here

    @property
    def failures(self) -> tuple[Failure, ...]:
        """The latest inspected skips of the run."""
        return tuple(skip.failure for skip in self.inspected)

    @property
    def step_word(self) -> str:
        """A word for a step; if optimizers take turns, as in a GAN, the user counts fewer."""
        return "optimizer step" if self.events.count(Event.SWITCHED) else "step"

    @property
    def takes_turns(self) -> bool:
        """Whether optimizers take turns, so that steps have one loss and then another."""
        return self.events.count(Event.SWITCHED) >= max(FEW_CALLS, MANY * self.steps)

    @property
    def astray(self) -> tuple[str, str]:
        """What the loss of steps without a gradient depends on, and what made their optimizer."""
        what, _, line = self.events.place(Event.ASTRAY).partition(" at ")
        return what, line

    @property
    def changed_at(self) -> int:
        """The step at which the loss became another one the last time; 0 if it often does."""
        steps = self.events.places(Event.CHANGED)
        is_often = self.events.count(Event.CHANGED) > PHASES
        return 0 if is_often else max(map(int, steps), default=0)

    def of_one_turn(self, past: Sequence[Step], failed: int | None = None) -> Sequence[Step]:
        """The steps of the latest loss; of the optimizer whose step failed, if two take turns.

        Each has a loss of its own, and one that is usual for the second is large beside the
        first's. If they do not step one after the other, nobody knows whose step is which.
        """
        if not self.takes_turns:
            since = self.changed_at
            return [step for step in past if step.step >= since] if since else past
        if self.events.count(Event.SWITCHED) < ALMOST_ALL * (self.steps - 1):
            return ()
        bad = (step.step for step in reversed(past) if step.has_bad_loss)
        last = failed or next(bad, self.steps)
        return [step for step in past if (last - step.step) % 2 == 0]

    @property
    def has_many_skips(self) -> bool:
        """Whether more steps were skipped than a loss scale needs to settle."""
        return self.are_many_skips(self.skipped)

    def are_many_skips(self, count: int) -> bool:
        """Whether so many skips are more than a loss scale needs to settle."""
        return count > max(SETTLING_SKIPS, self.steps / 10)

    @property
    def no_step_since(self) -> str:
        """A clause that says since when a script takes no step; empty if it took the latest."""
        if not self.past or not self.past[-1].skipped:
            return ""
        last = next((step.step for step in reversed(self.past) if not step.skipped), None)
        clause = ", and no step was taken" + ("" if last is None else f" since step {last}")
        return clause + ", and nothing has zeroed the gradients" * self.are_kept

    @property
    def are_kept(self) -> bool:
        """Whether gradients of Inf or NaN stay, as a script zeroes them only after a step."""
        # Those of a critic may stay until its next backward pass, after the generator's step.
        are_in_a_row = all(step.skipped for step in self.past[-SAME_FAILURES:])
        return self.events.count(Event.KEPT) >= SAME_FAILURES and are_in_a_row

    @property
    def are_skipped(self) -> str:
        """A clause that counts the skipped steps, which a script without a scaler leaves out."""
        count = f"{self.skipped} of {self.steps} steps"
        if not self.has_scaler:
            return f"the script left out {count}"
        return f"{count} {'was' if self.skipped == 1 else 'were'} skipped"

    def line_of(self, call: str) -> str | None:
        """The line of a call that belongs to a step, as in :class:`Optimizers`; None if unknown."""
        return None if self.optimizers is None else self.optimizers.lines.get(call)

    def at(self, call: str) -> str:
        """A clause with that line; empty if it is unknown."""
        line = self.line_of(call)
        return f" at {line}" if line else ""

    @property
    def are_emptied(self) -> bool:
        """Whether gradients that a backward pass made are all set to 0 before the step."""
        shares = None if self.sample is None else self.sample.shares
        is_zero = shares is not None and shares.zero == 1
        return is_zero and self.events.count(Event.EMPTIED) >= EMPTIED_SAMPLES

    @property
    def has_no_loss(self) -> bool:
        """Whether almost all losses are 0, and no gradient was another number in any sample."""
        losses = [step.loss for step in self.past if step.loss is not None]
        is_zero = len(losses) >= ZERO_FROM_START and losses.count(0.0) >= ALMOST_ALL * len(losses)
        return is_zero and not self.measured

    @property
    def has_stood(self) -> bool:
        """Whether the latest losses are on average not below the first ones, which are positive."""
        losses = [step.loss for step in self.past if step.loss is not None]
        if len(losses) < LATE or self.first is None or self.first.loss is None:
            return False
        begin = losses[:EARLY] if self.steps == len(self.past) else [self.first.loss]
        return fmean(losses[-LATE:]) >= STOOD * fmean(begin) > 0

    @property
    def is_in_float16(self) -> bool | None:
        """Whether backward passes compute in float16; None if that was not seen."""
        if not self.backward or "unknown" in self.backward:
            return None
        return "float16" in self.backward

    @property
    def is_scaled_by_hand(self) -> bool:
        """Whether the script multiplies its loss by a scale, which is not known, for float16."""
        is_seen = bool(self.events.count(Event.BY_HAND)) and not self.has_scaler
        return is_seen and self.is_in_float16 is True

    @property
    def range(self) -> str | None:
        """The dtype whose range the backward passes have; None if that was not seen."""
        if self.is_in_float16 is None:
            return None
        return next(name for name in (*_RANGES, *sorted(self.backward)) if name in self.backward)

    def is_close_to_overflow(self, step: Step | Failure, share: float) -> bool:
        """Whether gradients came close to overflow at a step's scale, by the nearest sample.

        They did if the largest reached ``share`` of the dtype's largest number. Before the first
        sample, they may have been of any size, and count as close.
        """
        if not self.peaks or step.step < self.peaks[0][0]:
            return bool(self.peaks)
        place = bisect_right(self.peaks, (step.step, math.inf))
        near = self.peaks[place - 1 : place + 1]
        _, largest = min(near, key=lambda peak: abs(peak[0] - step.step))
        return largest * step.scale >= share * format_named(self.dtype).largest

    def reached_one(self, scale: float) -> bool:
        """Whether the latest nonzero gradients, at this scale, are far above float16's smallest."""
        return bool(self.peaks) and self.peaks[-1][1] * scale >= 1

    def found_before(self, skip: Skip) -> Located | None:
        """The place found earlier in the run, if it may explain a skip, which has none of its own.

        A place in the backward pass explains a finite loss, and one in the forward pass another.
        """
        if self.watched is None or skip.loss is None:
            return None
        is_backward = isinstance(self.watched, BadGradient)
        return self.watched if is_backward == math.isfinite(skip.loss) else None

    def after(self, line: Sample | Skip | BadStep | VerdictLine | Watched) -> Evidence:
        """The evidence extended by one line."""
        if isinstance(line, BadStep):
            first = self.bad_step
            return replace(self, bad_step=line if first is None or first.is_left_out else first)
        if isinstance(line, Skip):
            return replace(self, inspected=(*self.inspected, line)[-HISTORY_LENGTH:])
        if isinstance(line, Watched):
            return replace(
                self,
                watched=_more_telling(self.watched, line.located),
                parameter=line.parameter or self.parameter,
                state=line.state or self.state,
                ended=line.ended or self.ended,
                events=self.events.after(line.calls),
            )
        if isinstance(line, VerdictLine):
            return replace(self, earlier=_better(self.earlier, line))
        last = self.past[-1].step if self.past else 0
        steps = [step for step in _steps_of(line) if step.step > last]
        if not steps:  # after an interrupt, a sample may be written twice
            return self
        measured, peaks = self.measured, self.peaks
        if line.norm is not None and 0 < line.norm < math.inf:
            measured = (*measured, line)[-LATEST_SAMPLES:]
            peaks = (*peaks, (line.step, _largest(line)))[-HISTORY_LENGTH:]
        unmoved = self.unmoved
        # Skipped steps move no parameter, so a sample of mostly skips shows no lost update.
        if line.unmoved is not None and len(line.skips) < line.steps / 2:
            unmoved = (*unmoved, line.unmoved)[-LATEST_SAMPLES:]
        missing, cut = self.missing, self.cut if line.cut is None else line.cut
        if line.shares is not None:
            before = line.missing if missing is None else missing
            missing = tuple(name for name in before if name in line.missing)
            cut = {name: by for name, by in cut.items() if _gets_nothing(name, line)}
        return replace(
            self,
            missing=missing,
            cut=cut,
            first=self.first or steps[0],
            unmoved=unmoved,
            scale=line.scale,
            sample=self.sample if line.shares is None else line,
            sizes=(*self.sizes, line)[-LATEST_SAMPLES:] if has_sizes(line) else self.sizes,
            past=(*self.past, *steps)[-HISTORY_LENGTH:],
            way=self.way.after(step.loss for step in steps if step.loss is not None),
            bad_and_skipped=self.bad_and_skipped + sum(s.has_bad_loss and s.skipped for s in steps),
            bad_and_applied=self.bad_and_applied
            + sum(s.has_bad_loss and not s.skipped for s in steps),
            measured=measured,
            peaks=peaks,
            optimizers=line.optimizers or self.optimizers,
            rates=(*self.rates[:1], *(*self.rates[1:], *_rate_of(line))[-HISTORY_LENGTH:]),
            backward=self.backward.union(line.backward),
            events=self.events.after(line.calls),
        )


def _rate_of(sample: Sample) -> list[tuple[int, float]]:
    """The sample's step and learning rate, if it is known."""
    rate = None if sample.optimizers is None else sample.optimizers.rate
    return [] if rate is None else [(sample.step, rate)]


def _largest(sample: Sample) -> float:
    """The largest magnitude in a sample, or the norm where that is unknown."""
    return (sample.norm if sample.largest is None else sample.largest) or 0.0


def min_scale_of(policy: object) -> float | None:
    """The lower limit of the scale, from a policy or its parameters; None if there is none.

    A fixed scale is its own limit.
    """
    fixed = is_fixed(policy) or (
        isinstance(policy, Mapping) and policy.get("name") == FixedScale.__name__
    )
    limits = "min_scale", "minimum_scale", "min_loss_scale"  # gradscaler's, flax's, jmp's
    for name in ("scale",) if fixed else limits:
        found = policy.get(name) if isinstance(policy, Mapping) else getattr(policy, name, None)
        if isinstance(found, (int, float)):
            return float(found)
    return None


_RANGES = "float16", "bfloat16", "float32"  # the narrowest first, as numbers leave it first


def _more_telling(before: Located | None, located: Located | None) -> Located | None:
    """The later of two places, unless it only reads what the earlier one made."""
    if located is None or (
        before is not None and (before.kind, located.kind) == ("forward", "input")
    ):
        return before
    return located


def _better(before: VerdictLine | None, line: VerdictLine) -> VerdictLine | None:
    """The later of two verdicts on streaks, unless only the earlier one knows the line."""
    if line.verdict == "normal":
        return before
    is_same = before is not None and line.verdict in (before.verdict, "floor")
    is_worse = is_same and before is not None and before.has_line and not line.has_line
    return before if is_worse else line


def _gets_nothing(name: str, sample: Sample) -> bool:
    """Whether a parameter's gradient is missing or 0 in a sample."""
    found = sample.parameters.get(name)
    return found is None or found.zero == 1


def _steps_of(sample: Sample) -> list[Step]:
    """The latest steps since the previous sample, at most ``HISTORY_LENGTH``."""
    skipped, since = set(sample.skips), [step for step, _ in sample.scales]
    first = max(sample.step - sample.steps, sample.step - HISTORY_LENGTH) + 1
    losses = dict(enumerate(sample.losses, sample.step + 1 - len(sample.losses)))
    if sample.loss is not None:
        losses[sample.step] = sample.loss
    found = []
    for step in range(first, sample.step + 1):
        place = bisect_right(since, step) - 1
        scale = sample.scales[place][1] if place >= 0 else sample.scale
        found.append(Step(step, scale, step in skipped, losses.get(step)))
    return found
