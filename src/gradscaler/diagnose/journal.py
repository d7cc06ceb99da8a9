"""What a monitor keeps of the steps it is told of, and when it says that a run is stuck."""

from __future__ import annotations

import logging
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from gradscaler.diagnose.runs import Judgement, Sample, Sink, Skip
from gradscaler.diagnose.verdict import Verdict
from gradscaler.engine import HISTORY_LENGTH
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


class Row:
    """Skips of one optimizer, without a step of its between them.

    Attributes:
        number: how many there are.
        first_scale: the scale of the first.
        skips: the latest.
        judged: the kind of the verdict on them, if there is one.
    """

    def __init__(self, scale: float, length: int) -> None:
        self.number = 0
        self.first_scale = scale
        self.skips: deque[Skip] = deque(maxlen=length)
        self.judged: str | None = None


class Journal:
    """Steps, in their order.

    Args:
        sinks: what lines are written to.
        step: how many steps there were before.
        on_stuck: what to do after ``stuck_after`` skips in a row.
        judge: gives a verdict.

    Attributes:
        history: the latest steps.
        step: the number of the last.
        num_steps: how many were added.
        num_skipped: how many of those were skipped.
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
        self.step = step
        self.num_steps = 0
        self.num_skipped = 0
        self.latest: Sample | None = None
        self._sinks = sinks
        self._on_stuck = on_stuck
        self._stuck_after = stuck_after
        self._judge = judge
        self._rows: dict[int, Row] = {}  # by the optimizer
        self._written = step
        self._scales: list[tuple[int, float]] = []
        self._skips: list[int] = []

    def add(
        self,
        scale: float,
        skipped: bool,
        loss: float | None = None,
        nonfinite: tuple[NonfiniteGradient, ...] | None = None,
        optimizers: Mapping[int, bool] | None = None,
    ) -> None:
        """Take down a step; :meth:`check` says what comes of it.

        Args:
            scale: that it used.
            skipped: whether any optimizer's step was.
            loss: the unscaled one.
            nonfinite: the gradients that were.
            optimizers: by id, whether its step was skipped; None if there is one.
        """
        self.step += 1
        self.num_steps += 1
        self.history.append(Step(self.step, scale, skipped, loss, nonfinite))
        if not self._scales or self._scales[-1][1] != scale:
            self._scales.append((self.step, scale))
        found = nonfinite or ()
        skip = Skip(
            self.step, scale, loss, found[:_MOST_NONFINITE], max(len(found) - _MOST_NONFINITE, 0)
        )
        self._continue_rows(skip, optimizers or {0: skipped})
        if not skipped:
            return
        self.num_skipped += 1
        self._skips.append(self.step)
        if nonfinite is not None:
            logger.info("%s", _in_one_line(skip))
            self._write(skip)

    def sample(self, loss: float | None = None, **measured: Any) -> None:
        """Write what happened since the last sample, and what was measured at the last step."""
        if self.step == self._written:
            return
        sample = Sample(
            step=self.step,
            scale=self.history[-1].scale,
            scales=tuple(self._scales),
            steps=self.step - self._written,
            skips=tuple(self._skips),
            loss=loss,
            **measured,
        )
        if measured:
            self.latest = sample
        self._written = self.step
        self._scales, self._skips = [], []
        self._write(sample)

    def check(self) -> None:
        """Give the verdict if ``stuck_after`` steps in a row were skipped, once in that row.

        As long as a lower scale may cure them nobody is told, and it is judged anew at each skip.

        Raises:
            StuckError: if that was asked for.
        """
        row = self.row
        if row is None or not self.is_to_judge:
            return
        verdict = self._judge(self)
        if verdict.kind == row.judged:
            return
        row.judged = verdict.kind
        self.sample()
        self._write(Judgement(self.step, verdict.kind, verdict.text, verdict.where))
        if verdict.kind == "normal":
            return
        if self._on_stuck == "raise":
            raise StuckError(verdict.text)
        if self._on_stuck == "warn":
            warnings.warn(StuckWarning(verdict.text), stacklevel=4)

    @property
    def row(self) -> Row | None:
        """The longest row of skips, if it is too long."""
        row = max(self._rows.values(), key=lambda row: row.number, default=None)
        return row if row is not None and row.number >= self._stuck_after else None

    @property
    def is_to_judge(self) -> bool:
        """Whether there is such a row, and no verdict on it that is final."""
        row = self.row
        return row is not None and row.judged in (None, "normal")

    @property
    def is_about_to_check(self) -> bool:
        """Whether another skip may bring the verdict."""
        return any(0 < row.number == self._stuck_after - 1 for row in self._rows.values())

    def _continue_rows(self, skip: Skip, optimizers: Mapping[int, bool]) -> None:
        """End the rows of optimizers that stepped, or were left out for long; lengthen others."""
        for optimizer, row in list(self._rows.items()):
            is_old = skip.step - row.skips[-1].step > self._stuck_after
            if is_old or not optimizers.get(optimizer, True):
                del self._rows[optimizer]
        for optimizer in (optimizer for optimizer, skipped in optimizers.items() if skipped):
            row = self._rows.setdefault(optimizer, Row(skip.scale, self._stuck_after))
            row.number += 1
            row.skips.append(skip)

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
