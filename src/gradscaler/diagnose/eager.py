"""What a monitor sees of an eager scaler, whose calls it is told of."""

from __future__ import annotations

import math
from contextlib import suppress
from itertools import chain
from typing import Any

from gradscaler.diagnose.forensics import inspect
from gradscaler.diagnose.journal import Journal, StuckError
from gradscaler.diagnose.locate import Located, Watch, is_locating, watching
from gradscaler.diagnose.sampling import Measured
from gradscaler.engine import HISTORY_LENGTH, EagerScaler
from gradscaler.outcome import NonfiniteGradient, StepOutcome


class EagerObserver:
    """Satisfies :class:`gradscaler.outcome.Observer`.

    An iteration ends with ``update``, or where an optimizer steps again without one. Flags, scales
    and losses that may be on a device are read at once only if skips are looked into; else when
    there is a sample to take, or at :meth:`read`.

    Args:
        scaler: whose calls these are.
        model: what gives the parameters their names, or None.
        journal: what the steps are written down in.
        every: steps from one sample to the next.
        forensics: look into each skip of which this is the number, or its multiple; 0: into none.
        dtype: the format for samples.
    """

    def __init__(
        self,
        scaler: EagerScaler,
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
        self._optimizers: list[Any] = []  # of the latest iteration
        self._watch: Watch | None = None
        with suppress(TypeError):  # Paddle's layers cannot be watched, and None cannot
            self._watch = watching(model)
        self._is_looking = False  # into this iteration, whatever `forensics` says
        self._unread: list[tuple[dict[int, StepOutcome], list[Any]]] = []
        self._start()
        scaler._observers.append(self)

    def _start(self) -> None:
        """Begin an iteration."""
        self._outcomes: dict[int, tuple[Any, StepOutcome]] = {}  # by the optimizer's id
        self._losses: list[Any] = []
        self._measured: Measured | None = None
        self._measured_of: set[int] = set()  # the optimizers' ids

    # The observer.

    def scaled(self, outputs: Any, /) -> None:
        """Remember the loss, without its graph."""
        if is_locating.get():
            return
        loss = outputs.detach()
        self._losses.append(loss if loss.ndim == 0 else loss.mean())

    def unscaling(self, optimizer: Any, scale: Any, /) -> None:
        """Look at the gradients if it is time to, before anything clips them."""
        self.stepping(optimizer, scale)

    def stepping(self, optimizer: Any, scale: Any, /) -> None:
        """Look at the gradients if it is time to, and that was not done in ``unscale_``."""
        if id(optimizer) in self._outcomes:
            self.updating()
        if self._is_due() and id(optimizer) not in self._measured_of:
            self._measure(optimizer, scaled=scale is not None)

    def stepped(self, optimizer: Any, outcome: StepOutcome, /) -> None:
        """Look into the gradients if they are not finite."""
        if outcome._reason == "no_gradients":  # asking `reason` may wait for the device
            return
        if (
            self._is_due() and id(optimizer) not in self._measured_of
        ):  # a closure made the gradients
            self._measure(optimizer, scaled=False)
        if (self._forensics or self._is_looking) and outcome.skipped:
            number = self._journal.num_skipped + 1
            if self._is_looking or number % self._forensics == 0:
                outcome.nonfinite = inspect(self._gradients(optimizer))
        self._outcomes[id(optimizer)] = optimizer, outcome

    def updating(self) -> None:
        """End the iteration, and say so if there were too many skips."""
        was_looking = self._is_looking
        if self._end():
            row = self._journal.row
            is_unseen = row is not None and not row.skips[-1].nonfinite and not was_looking
            is_late = is_unseen and self._journal.is_to_judge  # flags were read after the step
            self._look(self._journal.is_about_to_check or is_late)
            if is_late:
                return
            try:
                self._journal.check()
            except StuckError as error:
                raise StuckError(f"{error} To go on all the same, call update() again.") from None

    def close(self) -> None:
        """See no more, and take down the iterations that wait for it."""
        if self in self._scaler._observers:  # unless the scaler was unpickled into
            self._scaler._observers.remove(self)
        if self._watch is not None:
            self._watch.stop()
        self._end()
        self.read()

    # Reading late.

    def _end(self) -> bool:
        """End the iteration; whether there were steps in it."""
        outcomes, losses, measured = self._outcomes, self._losses, self._measured
        self._start()
        if not outcomes:
            return False
        self._optimizers = [optimizer for optimizer, _ in outcomes.values()]
        self._unread.append(({key: outcome for key, (_, outcome) in outcomes.items()}, losses))
        is_due = self._forensics or self._is_looking or measured is not None
        if is_due or len(self._unread) == HISTORY_LENGTH:
            loss = self.read()
            if measured is not None:
                self._journal.sample(loss, **measured.fields())
        return True

    def read(self) -> float | None:
        """Take down the iterations that wait for it; the latest loss."""
        unread, self._unread = self._unread, []
        loss = None
        for outcomes, losses in unread:
            skipped = {optimizer: outcome.skipped for optimizer, outcome in outcomes.items()}
            is_skip = any(skipped.values())
            loss = _loss(losses) if is_skip or losses is unread[-1][1] else None
            *_, last = outcomes.values()
            found = [o.nonfinite for o in outcomes.values() if o.nonfinite is not None]
            nonfinite = tuple(chain(*found)) if found else None
            self._journal.add(last.scale, is_skip, loss, nonfinite, skipped)
        return loss

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
        if self._watch is not None and is_to_look != self._is_looking:
            self._watch.start() if is_to_look else self._watch.stop()
        self._is_looking = is_to_look

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
        named = self._named(optimizer, len(self._outcomes))
        return {name: grad for name, p in named.items() if (grad := p.grad) is not None}

    # Samples.

    def _is_due(self) -> bool:
        return (self._journal.step + len(self._unread) + 1) % self._every == 0

    def _measure(self, optimizer: Any, scaled: bool) -> None:
        gradients = self._gradients(optimizer)
        if not gradients:
            return
        self._measured_of.add(id(optimizer))
        if self._measured is None:
            self._measured = Measured(self._dtype)
        norm = float(self._scaler._operations.total_norm(optimizer, 2.0))
        scale = float(self._scaler._host_state().scale)
        self._measured.add(gradients, scale, scaled, norm if math.isfinite(norm) else None)


def _loss(losses: list[Any]) -> float | None:
    """The latest loss, or the first that is not finite."""
    values = [float(loss.item()) for loss in losses]
    nonfinite = (value for value in values if not math.isfinite(value))
    return next(nonfinite, values[-1] if values else None)
