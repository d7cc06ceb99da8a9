"""What a monitor sees of an eager scaler, whose calls it is told of."""

from __future__ import annotations

import math
from collections import deque
from contextlib import suppress
from itertools import chain
from typing import Any

from gradscaler._eager.scaler import HISTORY_LENGTH, EagerScaler
from gradscaler.diagnose.forensics import inspect
from gradscaler.diagnose.journal import Journal, StuckError
from gradscaler.diagnose.locate import Located, Watch, is_locating, watching
from gradscaler.diagnose.sampling import Measured, fields, measure
from gradscaler.outcome import NonfiniteGradient, StepOutcome


class Iteration:
    """What is known of an iteration.

    Attributes:
        number: of the step that it makes, if an optimizer had gradients.
        optimizers: those that stepped, by id.
        outcomes: of their steps, by the same ids.
        losses: those that were scaled, without their graphs.
        measured: what was found of each optimizer's gradients, by its id.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.optimizers: dict[int, Any] = {}
        self.outcomes: dict[int, StepOutcome] = {}
        self.losses: list[Any] = []
        self.measured: dict[int, Measured] = {}


class EagerObserver:
    """Satisfies :class:`gradscaler.outcome.Observer`.

    An iteration ends with ``update``, or where an optimizer steps again without one. Flags, scales
    and losses that may be on a device are read at once only if skips are looked into; else when
    there is a sample to take, or at :meth:`read`.

    An interrupt may come anywhere, and the call that it stopped may be made again. So each change
    is one assignment, and can be made twice: an iteration ends where the next one is appended,
    the journal adds each number once, and a step that was not observed is found in the scaler.

    Args:
        scaler: the one to observe; the caller appends this to its observers.
        model: what gives the parameters their names, or None.
        journal: what the steps are written down in.
        every: steps from one sample to the next.
        forensics: inspect every n-th skipped step; 0 disables.
        dtype: the format for samples.
    """

    def __init__(
        self,
        scaler: EagerScaler[Any, Any],
        model: Any,
        journal: Journal,
        every: int,
        forensics: int,
        dtype: str,
    ) -> None:
        self._scaler = scaler
        self._model = model
        self._journal = journal
        self._every = every
        self._forensics = forensics
        self._dtype = dtype
        self._optimizers: list[Any] = []  # of the latest iteration that ended
        self._watch: Watch | None = None
        with suppress(TypeError):  # Paddle's layers cannot be watched, and None cannot
            self._watch = watching(model)
        self._looked_into = 0  # the latest iteration that was, whatever `forensics` says
        self._iterations = deque([Iteration(journal.step + 1)])  # the last one goes on
        self._concluded = journal.step  # the last step whose `updating` came to its end
        self._noted = dict(scaler._outcomes._by_id)  # the latest step of each optimizer

    # The observer.

    def scaled(self, outputs: Any, /) -> None:
        """Remember the loss, without its graph."""
        if is_locating.get():
            return
        loss = outputs.detach()
        self._iterations[-1].losses.append(loss if loss.ndim == 0 else loss.mean())

    def unscaling(self, optimizer: Any, scale: Any, /) -> None:
        """Look at the gradients if it is time to, before anything clips them."""
        self.stepping(optimizer, scale)

    def stepping(self, optimizer: Any, scale: Any, /) -> None:
        """Look at the gradients if it is time to, and that was not done in ``unscale_``."""
        self._note_steps()
        if id(optimizer) in self._iterations[-1].outcomes:
            self.updating()
        self._measure_if_due(optimizer, scaled=scale is not None)

    def stepped(self, optimizer: Any, outcome: StepOutcome, /) -> None:
        """Look into the gradients if they are not finite."""
        if outcome._reason == "no_gradients":  # asking `reason` may wait for the device
            return
        self._note(optimizer, outcome)
        self._measure_if_due(optimizer, scaled=False)  # a closure made the gradients
        is_looking = self._looked_into == self._iterations[-1].number
        if (self._forensics or is_looking) and outcome.skipped:
            number = self._journal.num_skipped + 1
            if is_looking or number % self._forensics == 0:
                outcome.nonfinite = inspect(self._gradients(optimizer))

    def updating(self) -> None:
        """End the iteration, and say so if there were too many skips."""
        self._note_steps()
        self._end()
        ended = self._iterations[-1].number - 1
        if ended == self._concluded:
            return
        was_looking = self._looked_into == ended
        try:
            if self._forensics or was_looking or self._is_to_read():
                self.read()
            row = self._journal.row
            is_unseen = row is not None and not row.skips[-1].nonfinite and not was_looking
            is_late = is_unseen and self._journal.is_to_judge  # flags were read after the step
            self._look(self._journal.is_about_to_check or is_late)
            if not is_late:
                self._journal.check()
        except StuckError as error:
            self._concluded = ended
            raise StuckError(f"{error} To go on all the same, call update() again.") from None
        except Exception:  # the next call goes on; after an interrupt it tries again
            self._concluded = ended
            raise
        self._concluded = ended

    def close(self) -> None:
        """See no more, and take down the iterations that wait for it."""
        if self in self._scaler._observers:  # unless the scaler was unpickled into
            self._scaler._observers.remove(self)
        if self._watch is not None:
            self._watch.stop()
        self._note_steps()
        self._end()
        self.read()

    # Steps that were taken.

    def _note(self, optimizer: Any, outcome: StepOutcome) -> None:
        iteration = self._iterations[-1]
        iteration.optimizers[id(optimizer)] = optimizer
        iteration.outcomes[id(optimizer)] = outcome

    def _note_steps(self) -> None:
        """Note each step that an interrupt kept from :meth:`stepped`."""
        latest = dict(self._scaler._outcomes._by_id)
        for key, step in latest.items():
            alive, outcome = step
            optimizer = alive()
            is_new = step is not self._noted.get(key) and optimizer is not None
            if is_new and outcome._reason not in ("no_gradients", "disabled"):
                self._note(optimizer, outcome)
        self._noted = latest

    def _end(self) -> None:
        """End the iteration if there were steps in it; else forget it."""
        iteration = self._iterations[-1]
        if not iteration.outcomes:
            self._iterations[-1] = Iteration(iteration.number)
            return
        self._optimizers = list(iteration.optimizers.values())
        self._iterations.append(Iteration(iteration.number + 1))
        iteration.optimizers = {}  # which need not live until it is read

    # Reading late.

    def _is_to_read(self) -> bool:
        """Whether the iteration that ended is a sample, or too many wait."""
        waiting = len(self._iterations) - 1
        return waiting >= HISTORY_LENGTH or (waiting > 0 and bool(self._iterations[-2].measured))

    def read(self) -> None:
        """Take down the iterations that ended."""
        while len(self._iterations) > 1:
            iteration = self._iterations[0]
            skipped = {key: outcome.skipped for key, outcome in iteration.outcomes.items()}
            is_skip = any(skipped.values())
            loss = _loss(iteration.losses) if is_skip or len(self._iterations) == 2 else None
            *_, last = iteration.outcomes.values()
            found = [o.nonfinite for o in iteration.outcomes.values() if o.nonfinite is not None]
            nonfinite = tuple(chain(*found)) if found else None
            self._journal.add(iteration.number, last.scale, is_skip, loss, nonfinite, skipped)
            self._iterations.popleft()
            if iteration.measured:
                self._journal.sample(loss, **fields(iteration.measured.values()))

    # Evidence.

    def nonfinite_parameters(self) -> tuple[NonfiniteGradient, ...]:
        """The parameters of the latest optimizers, and of the model, that are not finite.

        Of a buffer, or what is not trained, Inf may be meant, as in a mask; NaN is not.
        """
        each = (self._named(optimizer, o) for o, optimizer in enumerate(self._optimizers))
        trained = dict(chain.from_iterable(named.items() for named in each))
        if self._model is None:
            return inspect(trained)
        buffers: Any = getattr(self._model, "named_buffers", tuple)()
        rest = dict(chain(self._model.named_parameters(), buffers))
        found = inspect({name: array for name, array in rest.items() if name not in trained})
        return inspect(trained) + tuple(array for array in found if array.num_nan)

    def _look(self, is_to_look: bool) -> None:
        """Look into the next iteration, which may make the skips in a row too many, or do not."""
        if self._watch is not None:
            self._watch.start() if is_to_look else self._watch.stop()
        if is_to_look:
            self._looked_into = self._iterations[-1].number

    @property
    def located(self) -> Located | None:
        """The module that was found in the latest watched iteration."""
        return None if self._watch is None else self._watch.located

    def _named(self, optimizer: Any, place: int) -> dict[str, Any]:
        """The parameters of an iteration's first, second... optimizer by name or by their place."""
        groups = getattr(optimizer, "param_groups", None) or getattr(
            optimizer, "_param_groups", None
        )
        if not groups or not isinstance(groups[0], dict):  # Paddle's without groups
            groups = [{"params": optimizer._parameter_list or ()}]
        names = {}
        if self._model is not None:
            names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        which = f"optimizer {place}, " if place else ""
        return {
            names.get(id(parameter), f"{which}group {g}, parameter {p}"): parameter
            for g, group in enumerate(groups)
            for p, parameter in enumerate(group["params"])
        }

    def _gradients(self, optimizer: Any) -> dict[str, Any]:
        others = self._iterations[-1].optimizers.keys() - {id(optimizer)}
        named = self._named(optimizer, len(others))
        return {name: grad for name, p in named.items() if (grad := p.grad) is not None}

    def _measure_if_due(self, optimizer: Any, scaled: bool) -> None:
        """Measure the gradients for a sample, unless that was done."""
        iteration = self._iterations[-1]
        if iteration.number % self._every or id(optimizer) in iteration.measured:
            return
        gradients = self._gradients(optimizer)
        if not gradients:
            return
        norm = float(self._scaler._operations.total_norm(optimizer, 2.0))
        known = norm if math.isfinite(norm) else None
        scale = float(self._scaler._host_state().scale)
        iteration.measured[id(optimizer)] = measure(gradients, self._dtype, scale, scaled, known)


def _loss(losses: list[Any]) -> float | None:
    """The latest loss, or the first that is not finite."""
    values = [float(loss.item()) for loss in losses]
    nonfinite = (value for value in values if not math.isfinite(value))
    return next(nonfinite, values[-1] if values else None)
