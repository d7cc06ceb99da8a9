"""The steps of a loop without a scaler, in a framework whose loop is recorded step by step."""

from __future__ import annotations

from dataclasses import dataclass

from gradscaler.diagnose._gradients.arrays import Array
from gradscaler.diagnose._gradients.reading import inspect, read
from gradscaler.diagnose._monitor.recorder import RecordedStep, Recorder
from gradscaler.diagnose._monitor.replay import Replay
from gradscaler.diagnose._monitor.step_log import MOST_NONFINITE
from gradscaler.diagnose._record.lines import BadStep
from gradscaler.diagnose._record.located import Located


@dataclass(frozen=True)
class Unscaled:
    """Stands for the scaler of a loop that has none.

    Attributes:
        framework: what the loop trains in, such as ``"paddle"``.
        is_before: whether a step is recorded before it is applied, so that the parameters are still
            those of its gradients.
        policy: None.
    """

    framework: str
    is_before: bool = True
    policy: None = None


class RecordedLoop(Recorder):
    """Records the steps of a loop without a scaler, which are all applied.

    A step whose gradients hold an Inf or a NaN is written at once.

    Attributes:
        noted: where a watch has found the failure of the step that is recorded next.
        is_left_out: whether that step left the weights as they were.
    """

    noted: Located | None = None
    is_left_out = False

    def _add(
        self, step: RecordedStep, named: dict[str, Array] | None, replay: Replay | None
    ) -> None:
        """Add a step, and report it if its gradients are not finite."""
        bad = {name: each for name, each in (named or {}).items() if read(each).bad}
        super()._add(step, named, None if bad else replay)
        if bad:
            found = inspect(bad)
            listed, more = found[:MOST_NONFINITE], len(found[MOST_NONFINITE:])
            located = self.noted
            if replay is not None and self.log.counts.bad != step.number - 1:  # else it is known
                located = self._replays.locate(replay)
            given = next(iter(self.parameters.nonfinite()), None) if self.scaler.is_before else None
            parameter = None if given is None else given.name
            loss = self.log.history[-1].loss
            line = BadStep(step.number, loss, listed, more, located, parameter=parameter)
            self.log.add_bad(line)
        elif self.noted is not None and self.is_left_out:
            loss = self.log.history[-1].loss
            self.log.add_bad(BadStep(step.number, loss, located=self.noted, is_left_out=True))
        elif self.noted is not None:  # its loss alone is bad
            self.log.add_made(self.noted)
        self.noted, self.is_left_out = None, False
