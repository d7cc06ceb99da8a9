"""Steps of an eager scaler, which announces its calls."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import wraps
from itertools import chain
from types import FrameType
from typing import Any, TypeVar

import numpy as np

from gradscaler.diagnose._gradients.arrays import dtype_name, local
from gradscaler.diagnose._gradients.reading import inspect
from gradscaler.diagnose._locate.locate import is_locating
from gradscaler.diagnose._locate.located import Located
from gradscaler.diagnose._locate.module_hooks import ModuleHooks
from gradscaler.diagnose._locate.operation_watch import OperationWatch
from gradscaler.diagnose._monitor.backward_dtypes import listen
from gradscaler.diagnose._monitor.cut_off import CutOff
from gradscaler.diagnose._monitor.gradient_sample import GradientSample, fields_of, measure
from gradscaler.diagnose._monitor.ranks import rank_and_world_size
from gradscaler.diagnose._monitor.sampling import is_sampled
from gradscaler.diagnose._monitor.steps import Step, StepLog, StepSource, StuckError
from gradscaler.diagnose._monitor.used_gradients import UsedGradients
from gradscaler.diagnose._monitor.watch_budget import WatchBudget
from gradscaler.diagnose._monitor.weights import UnmovedWeights, nonfinite_state
from gradscaler.outcome import HISTORY_LENGTH, NonfiniteGradient, StepOutcome

MethodT = TypeVar("MethodT", bound=Callable[..., None])


def _call(method: MethodT) -> MethodT:
    """A call of an observer, which may be asked to close while it is on its way."""

    @wraps(method)
    def call(self: EagerObserver, *args: Any) -> None:
        try:
            method(self, *args)
        finally:
            if self._finish is not None:
                self._close_if_asked()

    return call  # type: ignore[return-value]


@dataclass
class Iteration:
    """What is known of an iteration; optimizers are given by their ids."""

    number: int  # of its step, if an optimizer has gradients
    optimizers: dict[int, Any] = field(default_factory=dict)  # those that stepped
    outcomes: dict[int, StepOutcome] = field(default_factory=dict)
    losses: list[Any] = field(default_factory=list)  # those that were scaled, without their graphs
    measured: dict[int, GradientSample] = field(default_factory=dict)
    backward: set[str] = field(default_factory=set)  # dtypes, in the first iteration and samples
    is_unscaled: bool = False  # whether gradients were
    added_to: list[Any] = field(default_factory=list)  # what used gradients held; see UsedGradients


class EagerObserver(StepSource):
    """Satisfies :class:`gradscaler.outcome.Observer`; the caller adds it to the scaler.

    An iteration ends with ``update``, or when an optimizer steps again without one. Flags, scales
    and losses that may be on a device are read at once only if skips are inspected; else when a
    sample is due, or at :meth:`read`.

    An interrupt may come anywhere, and the user may repeat the call that it stopped. So each
    change is one assignment that can be made twice: an iteration ends when the next one is
    appended, the log adds each number once, and a step that was not announced is found in the
    scaler.
    """

    def __post_init__(self) -> None:
        self._finish: Callable[[], None] | None = None  # what a close that waits will call
        self._optimizers: list[Any] = []  # of the latest iteration that ended
        self._hooks: ModuleHooks | None = None
        with suppress(TypeError):  # there may be no model
            self._hooks = ModuleHooks(self.model)
        bases = type(self.scaler).__mro__
        is_torch = any(base.__module__.startswith("gradscaler.torch") for base in bases)
        # Operations of many processes are on parts of tensors, and may be collectives.
        is_alone = rank_and_world_size()[1] == 1
        self._watch = OperationWatch(self._hooks) if is_torch and is_alone else None
        model = None if self._hooks is None else self.model
        self._cut_off = CutOff(model) if is_torch and is_alone else None
        self._used = UsedGradients() if is_torch and is_alone else None
        self._budget = WatchBudget()
        self._located: Located | None = None  # in the latest streak of skips
        self._inspected = 0  # the latest iteration that is inspected whatever `forensics` says
        self._inspects_next = False  # as the latest `updating` found
        # The last one is not over. Each change is a new list, which other threads may read.
        self._iterations = [Iteration(self.log.counts.step + 1)]
        self._first = self._iterations[-1].number
        self._weights: dict[int, UnmovedWeights] = {}  # by optimizer
        self._first_weights: dict[int, list[Any]] = {}  # norms, by optimizer; may be on a device
        self._updated = self.log.counts.step  # the last step whose `updating` ended
        latest = self.scaler.observed.last_steps()
        self._noted = {id(optimizer): outcome for optimizer, outcome in latest}

    # The calls of an observer.

    @_call
    def scaled(self, outputs: Any, /) -> None:
        """Remember the loss, without its graph."""
        if is_locating.get():
            return
        number = self._iterations[-1].number
        if number == self._first or is_sampled(number, self.every):
            listen(outputs, self._iterations[-1].backward)
        if self._cut_off is not None:
            self._cut_off.see(outputs)
        if self._used is not None and not self._iterations[-1].losses:
            self._used.before_backward()
        loss = local(outputs).detach()
        if 0 in loss.shape:  # as this process' part may be
            return
        iteration = self._iterations[-1]
        is_repeated = iteration.losses and self.scaler.observed.is_in_closure
        if is_repeated and self._inspected != iteration.number:
            # Its gradients were read already; if they overflow again, the same batch follows.
            self._inspect_next(not math.isfinite(iteration.losses[-1].item()))
        iteration.losses.append(loss if loss.ndim == 0 else loss.mean())

    @_call
    def unscaling(self, optimizer: Any, scale: Any, /) -> None:
        """Measure the gradients if a sample is due, before anything clips them."""
        self.stepping(optimizer, scale)
        self._iterations[-1].is_unscaled = True

    @_call
    def stepping(self, optimizer: Any, scale: Any, /) -> None:
        """Measure the gradients if a sample is due and ``unscaling`` has not measured them."""
        if self._watch is not None and self._inspected == self._iterations[-1].number:
            self._watch.stop()  # the forward and the backward pass are over
        self._note_missed_steps()
        if id(optimizer) in self._iterations[-1].outcomes:
            self.updating()
        if self._iterations[-1].number == self._first and id(optimizer) not in self._first_weights:
            self._first_weights[id(optimizer)] = self._norms(optimizer)
        if self._used is not None:
            held = self._used.before_step(optimizer)
            self._iterations[-1].added_to += [] if held is None else [held]
        if self._cut_off is not None:
            self._cut_off.note(self._named_now(optimizer))
        self._measure_if_due(optimizer, scale)

    @_call
    def stepped(self, optimizer: Any, outcome: StepOutcome, /) -> None:
        """Inspect the gradients if they are not finite."""
        if outcome.known_reason == "no_gradients":
            return
        self._note(optimizer, outcome)
        self._measure_if_due(optimizer)  # a closure made the gradients
        inspects = self._inspected == self._iterations[-1].number
        is_skip = (self.forensics or inspects) and outcome.skipped  # may wait for the device
        if is_skip and (inspects or self._inspects_next_skip):
            outcome.nonfinite = inspect(self._gradients(optimizer))

    @_call
    def updating(self) -> None:
        """End the iteration, and give the verdict if there were too many skips."""
        self._inspect_next(False)  # an interrupt of an operation may not move the scale by half
        self._note_missed_steps()
        self._end()
        ended = self._iterations[-1].number - 1
        if ended == self._updated:
            return
        was_inspected = self._inspected == ended
        try:
            waiting = len(self._iterations) - 1
            is_due = waiting >= HISTORY_LENGTH or (waiting > 0 and self._iterations[-2].measured)
            is_write_due = self.log.is_write_due
            if self.forensics or was_inspected or is_due or is_write_due:
                self.read()
            if is_write_due:
                self.log.add_sample()
            self._keep_located()
            streak = self.log.stuck_streak
            is_unseen = streak is not None and streak.skips[-1].nonfinite is None
            is_unseen = is_unseen and not was_inspected
            is_late = is_unseen and self.log.needs_verdict  # flags were read after the step
            self._budget.step_ended(ended, was_inspected, self._has_failed(ended))
            self._inspects_next = self.log.is_nearly_stuck or is_late or self._may_locate(ended + 1)
            if not is_late:
                self.log.check()
        except Exception as error:  # the next call continues; after an interrupt it tries again
            self._updated = ended
            if isinstance(error, StuckError):
                raise StuckError(f"{error} To go on all the same, call update() again.") from None
            raise
        self._updated = ended

    @_call
    def updated(self) -> None:
        """Begin to watch the next iteration, if that is wanted: the scale has moved."""
        if self._cut_off is not None:
            self._cut_off.begin()
        if self._inspects_next and self._updated == self._iterations[-1].number - 1:
            self._inspect_next(True)

    def close(self, finish: Callable[[], None]) -> None:
        """Observe no more, add the iterations that wait, and call ``finish``.

        A signal handler, or another thread, may ask for it while a call of this observer, or an
        operation that it watches, is on its way. Then it comes at the end of the call or of the
        next one.
        """
        self._finish = finish
        if not self._is_busy():
            self._close_if_asked()

    def _close_if_asked(self) -> None:
        finish, self._finish = self._finish, None
        if finish is None:
            return
        self.scaler.remove_observer(self)
        self._inspect_next(False)
        if self._cut_off is not None:
            self._cut_off.stop()
        self._note_missed_steps()
        self._end()
        self.read()
        finish()

    def _is_busy(self) -> bool:
        """Whether any thread is in a call. An interrupt could leave a flag wrong, but no frame.

        A mode that sees an operation is off PyTorch's stack meanwhile, and cannot be left.
        """
        own = self, self._watch, None if self._watch is None else self._watch.mode
        for frame in sys._current_frames().values():
            each: FrameType | None = frame
            while each is not None:
                if each.f_code in _CALLS or each.f_code.co_name == "__torch_dispatch__":
                    owner = each.f_locals.get("self")
                    if owner is not None and any(owner is one for one in own):
                        return True
                each = each.f_back
        return False

    # Steps that were taken.

    def _note(self, optimizer: Any, outcome: StepOutcome) -> None:
        iteration = self._iterations[-1]
        iteration.optimizers[id(optimizer)] = optimizer
        iteration.outcomes[id(optimizer)] = outcome

    def _note_missed_steps(self) -> None:
        """Note each step that an interrupt kept from :meth:`stepped`."""
        latest = self.scaler.observed.last_steps()
        for optimizer, outcome in latest:
            is_new = outcome is not self._noted.get(id(optimizer))
            if is_new and outcome.known_reason not in ("no_gradients", "disabled"):
                self._note(optimizer, outcome)
        self._noted = {id(optimizer): outcome for optimizer, outcome in latest}

    def _end(self) -> None:
        """End the iteration if there were steps in it; else forget it."""
        iteration = self._iterations[-1]
        if not iteration.outcomes:
            self._iterations = [*self._iterations[:-1], Iteration(iteration.number)]
            if iteration.is_unscaled:
                self.log.note_unstepped()
            return
        self._optimizers = list(iteration.optimizers.values())
        if iteration.backward:
            self.log.note_backward(frozenset(iteration.backward))
        unread = [each for each in self._iterations if each.number > self.log.counts.step]
        self._iterations = [*unread, Iteration(iteration.number + 1)]
        if self._cut_off is not None:
            has_gone = any(measured.has_gone for measured in iteration.measured.values())
            if (cut := self._cut_off.end(has_gone)) is not None:
                self.log.note_cut(cut)
        iteration.optimizers = {}  # they need not live until the iteration is read

    # Reading late.

    def read(self) -> None:
        """Add the iterations that ended to the log."""
        self._read_into(self.log, self._iterations)

    def seen(self) -> StepLog:
        """The log as :meth:`read` would leave it; any thread may ask, and nothing changes."""
        iterations = self._iterations  # before the log, which may add some meanwhile
        log = self.log.copy()
        self._read_into(log, iterations)
        return log

    def _read_into(self, log: StepLog, iterations: list[Iteration]) -> None:
        for iteration in iterations[:-1]:
            if iteration.number <= log.counts.step:
                continue
            skipped = {key: outcome.skipped for key, outcome in iteration.outcomes.items()}
            is_skip = any(skipped.values())
            loss = _loss(iteration.losses)
            *_, last = iteration.outcomes.values()
            found = [o.nonfinite for o in iteration.outcomes.values() if o.nonfinite is not None]
            nonfinite = tuple(chain(*found)) if found else None
            is_unzeroed = any(float(held) != 0 for held in iteration.added_to)
            step = Step(iteration.number, last.scale, is_skip, loss, nonfinite)
            log.add(step, skipped, ["unzeroed"] * is_unzeroed)
            if iteration.measured:
                log.add_sample(loss, **fields_of(iteration.measured.values()))

    # Evidence.

    def nonfinite_parameters(self) -> tuple[NonfiniteGradient, ...]:
        """The parameters of the latest optimizers, and of the model, that are not finite.

        In a buffer, or in what is not trained, NaN counts but Inf does not: a mask may hold it.
        """
        each = (self._named(optimizer, o) for o, optimizer in enumerate(self._optimizers))
        trained = dict(chain.from_iterable(named.items() for named in each))
        if self.model is None:
            return inspect(trained)
        buffers: Any = getattr(self.model, "named_buffers", tuple)()
        rest = dict(chain(self.model.named_parameters(), buffers))
        found = inspect({name: array for name, array in rest.items() if name not in trained})
        return inspect(trained) + tuple(array for array in found if array.num_nan)

    def bad_state(self) -> str | None:
        """The first state of the latest optimizers that is not finite."""
        for place, optimizer in enumerate(self._optimizers):
            names = {id(p): name for name, p in self._named(optimizer, place).items()}
            if (found := nonfinite_state(optimizer, names)) is not None:
                return found
        return None

    def weights(self) -> tuple[float, float] | None:
        """The norm of the parameters before the first step, and now; None if it is not known."""
        now = [norm for optimizer in self._optimizers for norm in self._norms(optimizer)]
        before = [self._first_weights.get(id(optimizer)) for optimizer in self._optimizers]
        if None in before or not now:
            return None
        first = [norm for norms in before for norm in norms or ()]
        return math.hypot(*map(float, first)), math.hypot(*map(float, now))

    def _norms(self, optimizer: Any) -> list[Any]:
        """The norm of each parameter, which may be on a device; empty if they have none."""
        with suppress(Exception):
            return [local(p).detach().norm() for p in self._named(optimizer, 0).values()]
        return []

    @property
    def lost_eps(self) -> float | None:
        """The eps of one of the latest optimizers that is 0 in its parameters' float16, or None."""
        for optimizer in self._optimizers:
            for group in getattr(optimizer, "param_groups", ()):
                eps = group.get("eps")
                if not isinstance(eps, float) or not eps or np.float16(eps):
                    continue
                if any(dtype_name(p) == "float16" for p in group["params"]):
                    return eps
        return None

    def _inspect_next(self, is_wanted: bool) -> None:
        """Inspect and watch the next iteration, which may say what is wrong, or do not."""
        for each in (self._hooks, self._watch):
            if each is not None:
                each.start() if is_wanted else each.stop()
        if is_wanted:
            self._inspected = self._iterations[-1].number

    def _has_failed(self, number: int) -> bool:
        """Whether a step failed as no scale cures, if that was read already.

        Its loss is not finite, or its gradients hold NaN and no Inf, as an overflow makes.
        """
        latest = next(reversed(self.log.history), None)
        if latest is None or latest.step != number:
            return False
        found, counts = latest.nonfinite or (), self.log.counts
        was_applied = self.log.num_steps > counts.num_skipped  # else the scale may be far too large
        is_nan = bool(found) and not any(each.num_inf for each in found)
        return latest.has_bad_loss or (is_nan and was_applied)

    def _may_locate(self, number: int) -> bool:
        """Whether there is time to watch a step for a failure that no watch has located."""
        is_unseen = self._watch is not None and self.log.counts.evidence.watched is None
        return is_unseen and self._budget.allows(number)

    def _keep_located(self) -> None:
        """Keep what was located in the latest step, if it failed and was watched."""
        latest = self.log.history[-1] if self.log.history else None
        if latest is None or not (latest.skipped or latest.has_bad_loss):
            self._located = None
        elif self._inspected == self.log.history[-1].step:
            source = self._hooks if self._watch is None else self._watch
            found = None if source is None else source.located
            self._located = found or self._located
            self.log.add_watched(found, {} if self._hooks is None else self._hooks.dtypes)

    @property
    def located(self) -> Located | None:
        """What made the first Inf or NaN in the latest streak of skips, if that was watched."""
        return self._located

    def _named(self, optimizer: Any, place: int) -> dict[str, Any]:
        """The parameters of an iteration's first, second... optimizer, by name or by place."""
        groups = getattr(optimizer, "param_groups", None) or getattr(
            optimizer, "_param_groups", None
        )
        if not groups or not isinstance(groups[0], dict):  # Paddle's without groups
            groups = [{"params": optimizer._parameter_list or ()}]
        names = {}
        if self.model is not None:
            names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        which = f"optimizer {place}, " if place else ""
        return {
            names.get(id(parameter), f"{which}group {g}, parameter {p}"): parameter
            for g, group in enumerate(groups)
            for p, parameter in enumerate(group["params"])
        }

    def _named_now(self, optimizer: Any) -> dict[str, Any]:
        """The parameters of an optimizer of this iteration."""
        others = self._iterations[-1].optimizers.keys() - {id(optimizer)}
        return self._named(optimizer, len(others))

    def _gradients(self, optimizer: Any) -> dict[str, Any]:
        named = self._named_now(optimizer)
        return {name: grad for name, p in named.items() if (grad := p.grad) is not None}

    def _measure_if_due(self, optimizer: Any, scaled_by: Any = None) -> None:
        """Measure the gradients if a sample is due and they were not measured yet.

        ``scaled_by`` is the scale that they are still multiplied by, if they are.
        """
        iteration = self._iterations[-1]
        is_due = is_sampled(iteration.number, self.every)
        if not is_due or id(optimizer) in iteration.measured:
            return
        gradients = self._gradients(optimizer)
        if not gradients:
            return
        known = None
        if not any(hasattr(gradient, "to_local") for gradient in gradients.values()):
            norm = self.scaler.observed.total_norm(optimizer)
            known = norm if math.isfinite(norm) else None
        is_scaled = scaled_by is not None
        scale = float(scaled_by if is_scaled else self.scaler.observed.state.scale)
        measured = measure(gradients, self.dtype, scale, is_scaled, known)
        named = self._named_now(optimizer)
        missing = tuple(name for name, p in named.items() if p.grad is None and _is_trained(p))
        unmoved = self._weights.setdefault(id(optimizer), UnmovedWeights()).share(named, optimizer)
        iteration.measured[id(optimizer)] = replace(measured, missing=missing, unmoved=unmoved)


_CALLS = EagerObserver.updated.__code__, OperationWatch.call.__code__  # one of all @_call


def _is_trained(parameter: Any) -> bool:
    """Whether a parameter requires a gradient; ``stop_gradient`` is Paddle's."""
    if hasattr(parameter, "stop_gradient"):
        return not parameter.stop_gradient
    return bool(parameter.requires_grad)


def _loss(losses: list[Any]) -> float | None:
    """The latest loss, or the first that is not finite."""
    values = [float(loss.item()) for loss in losses]
    nonfinite = (value for value in values if not math.isfinite(value))
    return next(nonfinite, values[-1] if values else None)
