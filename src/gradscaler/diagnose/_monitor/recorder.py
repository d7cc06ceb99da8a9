"""Steps that the user records, of a scaler that announces nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from gradscaler.diagnose._gradients.arrays import named_arrays
from gradscaler.diagnose._gradients.reading import inspect
from gradscaler.diagnose._monitor.gradient_sample import fields_of, is_sampled, measure
from gradscaler.diagnose._monitor.parameters import Parameters
from gradscaler.diagnose._monitor.step_log import Step, StepLog, StepSource
from gradscaler.diagnose._monitor.traced_scalers import Reading, number, policy_of, read
from gradscaler.outcome import HISTORY_LENGTH, NonfiniteGradient


class RecordedStep(NamedTuple):
    """A step, and the scaler after it."""

    step: int
    reading: Reading
    loss: Any = None


class Recorder(StepSource):
    """Records the steps of a scaler of JAX, Keras, tf-keras or MindSpore.

    A step's scale is the one that the scaler had after the step before it.
    """

    parameters: RecordedParameters

    def __post_init__(self) -> None:
        policy = policy_of(self.scaler)
        self._growth_interval = getattr(policy, "growth_interval", getattr(policy, "period", 1))
        self.parameters = RecordedParameters(self.model)
        # The first was added to the log, or is the start; the others wait.
        # Each change is a new list, which other threads may read.
        self._recorded = [RecordedStep(self.log.counts.step, read(self.scaler))]

    def record(self, scaler: Any, finite: Any, gradients: Any, loss: Any, parameters: Any) -> None:
        """Record one step; see :meth:`gradscaler.diagnose.Monitor.record`."""
        if self.parameters.latest is None:  # refuse what cannot be read at once, not when needed
            named_arrays(parameters)
        reading = read(self.scaler if scaler is None else scaler)
        if finite is not None:
            reading = reading._replace(finite=finite)
        step = self._recorded[-1].step + 1
        is_due = is_sampled(step, self.every)
        inspects = self.forensics > 0 and gradients is not None
        named = None
        if gradients is not None and (is_due or inspects):
            named = self._named(gradients)
        self.parameters.latest = parameters
        # The step counts from here on, whatever interrupts the rest.
        self._recorded = [*self._recorded, RecordedStep(step, reading, loss)]
        is_late = self.log.is_write_due or len(self._recorded) > HISTORY_LENGTH
        if not (is_due or inspects or is_late):
            return
        scale, latest_loss = self.read(named)
        if is_due:
            measured = [] if named is None else [measure(named, self.dtype, scale, scaled=False)]
            self.log.add_sample(latest_loss, **fields_of(measured))
        elif is_late:
            self.log.add_sample()
        self.log.check()

    def read(self, gradients: dict[str, Any] | None = None) -> tuple[float, float | None]:
        """Add the steps that wait to the log; waits for the device.

        ``gradients`` are of the last of them, by name. Returns its scale and its loss.
        """
        last, scale, loss = self._read_into(self.log, self._recorded, gradients)
        later = (each for each in self._recorded if each.step > last.step)
        self._recorded = [last, *later]
        return scale, loss

    def seen(self) -> StepLog:
        """The log with all steps so far; any thread may ask, and nothing changes."""
        recorded = self._recorded  # before the log, which may add some meanwhile
        log = self.log.copy()
        self._read_into(log, recorded)
        return log

    def _read_into(
        self, log: StepLog, recorded: list[RecordedStep], gradients: dict[str, Any] | None = None
    ) -> tuple[RecordedStep, float, float | None]:
        """Add steps to a log; the last of them on the host, its scale and its loss."""
        number_before, before = recorded[0].step, recorded[0].reading.on_host()
        scale, loss_on_host = before.scale, None
        for step, reading, loss in recorded[1:]:
            after = reading.on_host()
            skipped = not after.was_finite(before, self._growth_interval)
            nonfinite = None
            has_gradients = step == recorded[-1].step and gradients is not None
            if skipped and has_gradients and self._inspects_next_skip:
                nonfinite = inspect(gradients)
            loss_on_host = None if loss is None else number(loss)
            log.add(Step(step, before.scale, skipped, loss_on_host, nonfinite))
            scale, number_before, before = before.scale, step, after
        return RecordedStep(number_before, before), scale, loss_on_host

    def close(self, finish: Callable[[], None]) -> None:
        """Add the steps that wait, and call ``finish``."""
        self.read()
        finish()

    def _named(self, gradients: Any) -> dict[str, Any]:
        """The gradients by name: the model's names, for a list as long as its parameters."""
        names = list(parameters_of(self.model))
        if isinstance(gradients, (list, tuple)) and len(names) == len(gradients):
            return named_arrays(zip(names, gradients, strict=True))
        return named_arrays(gradients)


@dataclass
class RecordedParameters(Parameters):
    """The parameters of the latest step, if they are recorded, or else the model's."""

    model: Any
    latest: Any = None

    def nonfinite(self) -> tuple[NonfiniteGradient, ...]:
        """The parameters that hold an Inf or a NaN."""
        given = self.latest
        parameters = parameters_of(self.model) if given is None else named_arrays(given)
        # JAX deletes an array that is donated to a jitted function.
        present = {n: p for n, p in parameters.items() if not getattr(p, "is_deleted", bool)()}
        return inspect(present)


def parameters_of(model: Any) -> dict[str, Any]:
    """The parameters that a model of Keras, tf-keras or MindSpore trains, by their names."""
    if model is None:
        return {}
    if hasattr(model, "trainable_params"):  # MindSpore's
        return {parameter.name: parameter for parameter in model.trainable_params()}
    return named_arrays(
        (getattr(variable, "path", None) or variable.name.partition(":")[0], variable)
        for variable in model.trainable_variables
    )
