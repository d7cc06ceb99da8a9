"""What a monitor keeps of the steps it is told of, and when it says that a run is stuck."""

from __future__ import annotations

import logging
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from gradscaler._eager.scaler import HISTORY_LENGTH
from gradscaler.diagnose.runs import Judgement, Sample, Sink, Skip
from gradscaler.diagnose.verdict import Verdict
from gradscaler.outcome import NonfiniteGradient

OnStuck = Literal["warn", "raise", "continue"]

logger = logging.getLogger("gradscaler")

_MOST_NONFINITE = 10  # gradients that a line lists


class StuckWarning(RuntimeWarning):
    """Step after step is skipped; the message is the verdict."""


class StuckError(RuntimeError):
    """Step after step is skipped; the message is the verdict, and how to go on."""


class Step(NamedTuple):
    """One step of the training.

    Attributes:
        step: its number, from 1.
        scale: the loss scale that it used.
        skipped: whether its gradients held an Inf or a NaN.
        loss: the unscaled loss, where it was read.
        nonfinite: the gradients that held one, if it was skipped and looked into; else None.
    """

    step: int
    scale: float
    skipped: bool
    loss: float | None = None
    nonfinite: tuple[NonfiniteGradient, ...] | None = None


class Row(NamedTuple):
    """A streak of consecutive skipped steps of one optimizer.

    Attributes:
        number: how many there are.
        first_scale: the scale of the first.
        skips: the latest.
        judged: the verdict on them, if there is one.
    """

    number: int
    first_scale: float
    skips: tuple[Skip, ...]
    judged: Judgement | None = None


class Tally(NamedTuple):
    """What a journal has counted; one assignment replaces it, so an interrupt leaves it whole.

    Attributes:
        step: the number of the last step.
        num_skipped: how many of the steps were skipped.
        rows: the streaks of skips, by optimizer.
        written: the step of the last sample.
        scales: since then, the steps that used another scale than the one before, with that scale.
        skips: the steps since then that were skipped.
    """

    step: int
    num_skipped: int
    rows: Mapping[int, Row]
    written: int
    scales: tuple[tuple[int, float], ...] = ()
    skips: tuple[int, ...] = ()


class Journal:
    """Steps, in their order.

    An interrupt may stop any method. The same call again goes on from there, and counts nothing
    twice.

    Args:
        sinks: what lines are written to.
        step: how many steps there were before.
        on_stuck: what to do after ``stuck_after`` skips in a row.
        judge: gives a verdict.

    Attributes:
        history: the latest steps.
        latest: the latest sample with shares.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        step: int,
        on_stuck: OnStuck,
        stuck_after: int,
        judge: Callable[[Journal], Verdict],
    ) -> None:
        self.history: deque[Step] = deque(maxlen=HISTORY_LENGTH)
        self.latest: Sample | None = None
        self._sinks = sinks
        self._step_before = step
        self._on_stuck = on_stuck
        self._stuck_after = stuck_after
        self._judge = judge
        self._tally = Tally(step, 0, {}, step)

    @property
    def step(self) -> int:
        """The number of the last step."""
        return self._tally.step

    @property
    def num_steps(self) -> int:
        """How many steps were added."""
        return self._tally.step - self._step_before

    @property
    def num_skipped(self) -> int:
        """How many of those were skipped."""
        return self._tally.num_skipped

    def add(
        self,
        step: int,
        scale: float,
        skipped: bool,
        loss: float | None = None,
        nonfinite: tuple[NonfiniteGradient, ...] | None = None,
        optimizers: Mapping[int, bool] | None = None,
    ) -> None:
        """Add a step; :meth:`check` gives the verdict.

        Args:
            step: its number, one more than the last; it is added once.
            scale: the loss scale that it used.
            skipped: whether any optimizer's step was.
            loss: the unscaled one.
            nonfinite: the gradients that were.
            optimizers: by id, whether its step was skipped; None if there is one.
        """
        tally = self._tally
        if step <= tally.step:
            return
        found = nonfinite or ()
        skip = Skip(
            step, scale, loss, found[:_MOST_NONFINITE], max(len(found) - _MOST_NONFINITE, 0)
        )
        has_moved = not tally.scales or tally.scales[-1][1] != scale
        after = tally._replace(
            step=step,
            num_skipped=tally.num_skipped + skipped,
            rows=self._continued(tally.rows, skip, optimizers or {0: skipped}),
            scales=(*tally.scales, (step, scale)) if has_moved else tally.scales,
            skips=(*tally.skips, step) if skipped else tally.skips,
        )
        if not self.history or self.history[-1].step < step:
            self.history.append(Step(step, scale, skipped, loss, nonfinite))
        self._tally = after
        if skipped and nonfinite is not None:
            logger.info("%s", _in_one_line(skip))
            self._write(skip)

    def sample(self, loss: float | None = None, **measured: Any) -> None:
        """Write what happened since the last sample, and what was measured at the last step."""
        tally = self._tally
        if tally.step == tally.written:
            return
        sample = Sample(
            step=tally.step,
            scale=self.history[-1].scale,
            scales=tally.scales,
            steps=tally.step - tally.written,
            skips=tally.skips,
            loss=loss,
            **measured,
        )
        if measured:
            self.latest = sample
        self._write(sample)
        self._tally = tally._replace(written=tally.step, scales=(), skips=())

    def check(self) -> None:
        """Give the verdict if ``stuck_after`` steps in a row were skipped, once in that row.

        While a lower scale may cure them, nothing is said, and each further skip is judged again.
        A second call after the same step repeats what an interrupt may have kept from the user.

        Raises:
            StuckError: if that was asked for.
        """
        row = self.row
        if row is None or not self.is_to_judge:
            return
        judged = row.judged
        if judged is None or judged.step < self.step:
            verdict = self._judge(self)
            if judged is not None and judged.verdict == verdict.kind:
                return
            judged = Judgement(self.step, verdict.kind, verdict.text, verdict.where)
            self.sample()
            self._write(judged)
            rows = {
                optimizer: row._replace(judged=judged) if other is row else other
                for optimizer, other in self._tally.rows.items()
            }
            self._tally = self._tally._replace(rows=rows)
        if judged.verdict == "normal":
            return
        if self._on_stuck == "raise":
            raise StuckError(judged.text)
        if self._on_stuck == "warn":
            warnings.warn(StuckWarning(judged.text), stacklevel=4)

    @property
    def row(self) -> Row | None:
        """The longest row of skips, if it is too long."""
        row = max(self._tally.rows.values(), key=lambda row: row.number, default=None)
        return row if row is not None and row.number >= self._stuck_after else None

    @property
    def is_to_judge(self) -> bool:
        """Whether there is such a row, and no earlier verdict on it that is final."""
        row = self.row
        judged = None if row is None else row.judged
        is_final = judged is not None and judged.verdict != "normal" and judged.step < self.step
        return row is not None and not is_final

    @property
    def is_about_to_check(self) -> bool:
        """Whether another skip may bring the verdict."""
        return any(0 < row.number == self._stuck_after - 1 for row in self._tally.rows.values())

    def _continued(
        self, rows: Mapping[int, Row], skip: Skip, optimizers: Mapping[int, bool]
    ) -> dict[int, Row]:
        """End the rows of optimizers that stepped, or were left out for long; lengthen others."""
        kept = {
            optimizer: row
            for optimizer, row in rows.items()
            if skip.step - row.skips[-1].step <= self._stuck_after
            and optimizers.get(optimizer, True)
        }
        for optimizer in (optimizer for optimizer, skipped in optimizers.items() if skipped):
            row = kept.get(optimizer, Row(0, skip.scale, ()))
            skips = (*row.skips, skip)[-self._stuck_after :]
            kept[optimizer] = row._replace(number=row.number + 1, skips=skips)
        return kept

    def close(self) -> None:
        """Write what is left to write."""
        self.sample()
        for sink in self._sinks:
            sink.close()

    def _write(self, line: Sample | Skip | Judgement) -> None:
        for sink in self._sinks:
            sink.write(line)


def _in_one_line(skip: Skip) -> str:
    """A skipped step, for the log."""
    listed = "; ".join(
        f"{g.name} ({'x'.join(map(str, g.shape)) or 'scalar'} {g.dtype}): {g.num_inf} Inf, "
        f"{g.num_nan} NaN, largest of the rest {g.largest_finite:g}"
        for g in skip.nonfinite
    )
    more = f"; and {skip.more} more" if skip.more else ""
    line = f"step {skip.step} skipped at loss scale {skip.scale:g}: {listed}{more}"
    return "".join(letter if letter.isprintable() else " " for letter in line)
