"""What a monitor sees of a scaler that says nothing by itself: what it is told after each step."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from gradscaler._eager.scaler import HISTORY_LENGTH
from gradscaler.diagnose import arrays, readings
from gradscaler.diagnose.forensics import inspect
from gradscaler.diagnose.journal import Journal
from gradscaler.diagnose.locate import Located
from gradscaler.diagnose.readings import Reading
from gradscaler.diagnose.sampling import fields, measure
from gradscaler.outcome import NonfiniteGradient


class Told(NamedTuple):
    """What the monitor was told after a step."""

    step: int
    reading: Reading
    loss: Any = None


class Recorder:
    """Takes down the steps of a scaler of JAX, Keras, tf-keras or MindSpore.

    A step's scale is the one that was there after the step before it.

    Args:
        scaler: as it stands before the first step.
        model: what gives the parameters their names, or None.
        journal: what the steps are written down in.
        every: steps from one sample to the next.
        forensics: inspect every n-th skipped step; 0 disables.
        dtype: the format for samples.
    """

    def __init__(
        self, scaler: Any, model: Any, journal: Journal, every: int, forensics: int, dtype: str
    ) -> None:
        self._scaler = scaler
        self._model = model
        self._journal = journal
        self._every = every
        self._forensics = forensics
        self._dtype = dtype
        policy = readings.policy_of(scaler)
        self._growth_interval = getattr(policy, "growth_interval", getattr(policy, "period", 1))
        self.located: Located | None = None  # there are no hooks here to locate by
        self._parameters: Any = None  # of the latest step
        # The first is of a step that was taken down, or of the start; the others wait.
        self._told = deque([Told(journal.step, readings.read(scaler))])

    def record(self, scaler: Any, finite: Any, gradients: Any, loss: Any, parameters: Any) -> None:
        """Take down one step; see :meth:`gradscaler.diagnose.Monitor.record`."""
        if self._parameters is None:  # refuse at once, and not when stuck, what cannot be read
            arrays.named(parameters)
        reading = readings.read(self._scaler if scaler is None else scaler)
        if finite is not None:
            reading = reading._replace(finite=finite)
        step = self._told[-1].step + 1
        is_due = step % self._every == 0
        is_to_look = self._forensics > 0 and gradients is not None
        named = None
        if gradients is not None and (is_due or is_to_look):
            named = self._named(gradients)
        self._parameters = parameters
        self._told.append(Told(step, reading, loss))  # it counts now, whatever interrupts the rest
        if not (is_due or is_to_look or len(self._told) > HISTORY_LENGTH):
            return
        scale, latest_loss = self.read(named)
        if is_due:
            measured = [] if named is None else [measure(named, self._dtype, scale, scaled=False)]
            self._journal.sample(latest_loss, **fields(measured))
        self._journal.check()

    def read(self, gradients: dict[str, Any] | None = None) -> tuple[float, float | None]:
        """Take down the steps that wait for it.

        Args:
            gradients: of the last of them, by name.

        Returns:
            The scale and the loss of the last of them.
        """
        before = self._told[0].reading.on_host()
        scale, number = before.scale, None
        while len(self._told) > 1:
            step, reading, loss = self._told[1]
            after = reading.on_host()
            skipped = not after.was_finite(before, self._growth_interval)
            nonfinite = None
            has_gradients = len(self._told) == 2 and gradients is not None
            if skipped and has_gradients and self._looks_into_the_next():
                nonfinite = inspect(gradients)
            number = None if loss is None else readings.number(loss)
            self._journal.add(step, before.scale, skipped, number, nonfinite)
            self._told[1] = Told(step, after)
            self._told.popleft()
            scale, before = before.scale, after
        return scale, number

    def close(self) -> None:
        """Take down the steps that wait for it."""
        self.read()

    def nonfinite_parameters(self) -> tuple[NonfiniteGradient, ...]:
        """The parameters of the latest step, or the model's, that are themselves not finite."""
        given = self._parameters
        parameters = parameters_of(self._model) if given is None else arrays.named(given)
        # A jitted function may have been given JAX's for good since then.
        there = {n: p for n, p in parameters.items() if not getattr(p, "is_deleted", bool)()}
        return inspect(there)

    def _looks_into_the_next(self) -> bool:
        """Whether forensics are for the skip that comes next."""
        number = self._journal.num_skipped + 1
        return self._forensics > 0 and number % self._forensics == 0

    def _named(self, gradients: Any) -> dict[str, Any]:
        """The gradients by name: the model's, for a list of as many as it has parameters."""
        names = list(parameters_of(self._model))
        if isinstance(gradients, (list, tuple)) and len(names) == len(gradients):
            return arrays.named(zip(names, gradients, strict=True))
        return arrays.named(gradients)


def parameters_of(model: Any) -> dict[str, Any]:
    """The parameters that a model of Keras, tf-keras or MindSpore trains, by their names."""
    if model is None:
        return {}
    if hasattr(model, "trainable_params"):  # MindSpore's
        return {parameter.name: parameter for parameter in model.trainable_params()}
    return arrays.named(
        (getattr(variable, "path", None) or variable.name.partition(":")[0], variable)
        for variable in model.trainable_variables
    )
