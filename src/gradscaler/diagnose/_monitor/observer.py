"""The observer of an eager scaler, which announces its calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from inspect import currentframe
from threading import Lock
from typing import SupportsFloat, TypeVar

from gradscaler.diagnose._gradients.arrays import alone, has_numbers, local
from gradscaler.diagnose._gradients.reading import Tensor, inspect
from gradscaler.diagnose._graph.call_site import Node
from gradscaler.diagnose._graph.guard import guard, guarded, passing
from gradscaler.diagnose._graph.hooks import OneCallHooks, weakly
from gradscaler.diagnose._graph.lines import Line
from gradscaler.diagnose._graph.summands import adds_a_constant
from gradscaler.diagnose._graph.watch import GraphWatch
from gradscaler.diagnose._locate.locate import is_locating
from gradscaler.diagnose._monitor import (
    loaders,
    new_optimizers,
    start_statistics,
    unfit_states,
)
from gradscaler.diagnose._monitor.backward_graph import CutOff, listen
from gradscaler.diagnose._monitor.by_identity import ByIdentity
from gradscaler.diagnose._monitor.engine_scaler import EngineScaler
from gradscaler.diagnose._monitor.failure_watch import FailureWatch
from gradscaler.diagnose._monitor.gradient_sample import measure
from gradscaler.diagnose._monitor.held_parameters import HeldParameters
from gradscaler.diagnose._monitor.hook_memories import bad_memory
from gradscaler.diagnose._monitor.iterations import Iteration, Iterations
from gradscaler.diagnose._monitor.learning_rates import LearningRates
from gradscaler.diagnose._monitor.looks import Looks
from gradscaler.diagnose._monitor.made_gradients import MadeGradient, first_nodes, leaves_among
from gradscaler.diagnose._monitor.models import uncalled_in
from gradscaler.diagnose._monitor.parameters import OptimizersParameters, has_stepped, held_by
from gradscaler.diagnose._monitor.raw_passes import RawPasses
from gradscaler.diagnose._monitor.step_source import StepSource
from gradscaler.diagnose._monitor.teller import StuckError
from gradscaler.diagnose._monitor.training_mode import TrainingMode
from gradscaler.diagnose._record.events import Counted, Event
from gradscaler.diagnose._record.lines import BadStep
from gradscaler.diagnose._record.step import Step
from gradscaler.diagnose._record.thresholds import (
    EXACT,
    FEW_CALLS,
    FEW_EVENTS,
    LEAST_OWN_SCALE,
    LEAST_ZEROED,
    MANY_CALLS,
    PHASES,
)
from gradscaler.outcome import HISTORY_LENGTH, StepOutcome

MethodT = TypeVar("MethodT", bound=Callable[..., None])


def closes_if_asked(method: MethodT) -> MethodT:
    """Guard an observer's method, and close the observer at its end if it was asked to close."""

    @guarded
    def close_if_asked(self: EagerObserver) -> None:
        self._close_if_asked()

    @wraps(method)
    def safe(self: EagerObserver, *args: object) -> None:
        try:
            # The first lock comes first, as all that is guarded holds it. The outermost call of an
            # observer holds the second, and closes it.
            with guard.lock, guard.lock if self._running.locked() else self._running:
                try:
                    method(self, *args)
                except Exception as error:
                    guard.handle(error)
        finally:
            if self._finish is not None and not self._running.locked():
                close_if_asked(self)

    return safe  # type: ignore[return-value]


class EagerObserver(StepSource):
    """Records an eager scaler's steps, as its :class:`gradscaler.outcome.Observer`.

    The caller adds the observer to the scaler. An iteration ends with ``update``, or when an
    optimizer steps again without one. Flags, scales and losses that may be on a device are read at
    once only if skips are inspected. Else they are read when a sample or a write to a file is due,
    or by :meth:`read`.

    An interrupt may come anywhere, and the user may repeat the interrupted call: see
    :class:`Iterations`.
    """

    _steps_by_scaler = True  # whether an optimizer's own step is another one

    def __post_init__(self) -> None:
        """Note the scaler's present state."""
        self._running = Lock()  # held by the outermost call; no interrupt can leave it held
        self._finish: Callable[[], None] | None = None  # to call when a delayed close happens
        self.at_sample: Callable[[], None] | None = None  # called in each sampled step
        self._is_in_step = False  # whether unscale_() or step() began, and no step has ended since
        is_torch = self.framework == "torch"
        # With several processes, operations see parts of tensors, and may be collectives.
        sees_operations = is_torch and self.world_size == 1
        self._observed = self.scaler.observed
        self._iterations = Iterations(self.scaler, self.log, self.every)
        self._graphs = GraphWatch(self.model, sees_operations) if is_torch else None
        self._watch = FailureWatch(self.model, self.log, finds_operations=not is_torch)
        self._cut_off = CutOff(self._watch, sees_operations)
        self._hooks = OneCallHooks()  # of the present iteration's losses
        self._raw = RawPasses()  # likewise
        self._looks = Looks(self.model, sees_operations, weakly(self.note_repeated))
        self._sees_own_steps = is_torch and self._steps_by_scaler
        self.parameters = OptimizersParameters(self.model)
        self._held = HeldParameters(self.model, self.parameters)
        self._rates = LearningRates()
        self._sees_graph = sees_operations
        self._began_anew = ByIdentity[None]()  # optimizers that had no state before a step
        self._mode = TrainingMode(self.model if is_torch else None)
        self._num_losses = 0  # of the latest step
        self._updated = self.log.counts.step  # the last step whose `updating` ended
        # Of the latest step: the operation that its loss ends in, and the ids of its optimizers.
        self._kind: tuple[type, set[int]] | None = None
        self._num_kinds = 0  # changes of these
        self._num_loads = 0  # of weights, between steps
        # Failed steps after which to look at hooks' memories, and what the latest look has found.
        self._memories_left, self._memory = MANY_CALLS, ""

    @property
    def waiting(self) -> list[Iteration]:
        """The iterations that ended and may not be in the log yet."""
        return self._iterations.waiting

    @closes_if_asked
    def scaled(self, outputs: Tensor, /) -> None:
        """Remember the loss, without its graph."""
        if is_locating.get() or not has_numbers(outputs):
            return
        iteration = self._iterations.latest
        iteration.batch = loaders.fed()
        if (iteration.is_first or iteration.is_sampled) and not iteration.is_long:
            listen(outputs, iteration.backward, self._hooks)
        if self._sees_graph:
            self._see_graph(iteration, outputs)
        iteration.kind = type(getattr(outputs, "grad_fn", None))
        self._see_terms(iteration, outputs)
        if iteration.is_first and not iteration.begun and self._held.has_moved():
            self._iterations.note_call(Event.STEPLESS)
        if self._cut_off.is_looking and not iteration.is_long:
            self._cut_off.see(outputs)
        self._mode.note_loss()
        # A scaler is given several losses before their passes; without one, each comes in its pass.
        if not iteration.losses or not (self._steps_by_scaler or iteration.is_long):
            self._looks.before_backward()
        if self._graphs is not None:
            self._graphs.see(outputs, may_hook=not iteration.is_long)
        loss = local(outputs).detach()
        loss = loss.abs() if "complex" in str(loss.dtype).lower() else loss
        if 0 not in loss.shape:  # this process' part may be empty
            iteration.add_loss(alone(loss) if loss.ndim == 0 else loss.mean())

    def _see_graph(self, iteration: Iteration, loss: Tensor) -> None:
        """Note what a loss depends on, its scale, and what a sampled one shows."""
        is_first = iteration.is_first and not iteration.is_long
        if is_first or (self._held.is_newly_idle and not iteration.is_long):
            self._held.see_leaves(loss)
        if is_first or iteration.is_sampled:
            iteration.scaled.note_scale(loss)
        if iteration.is_sampled:
            iteration.scaled.add(loss, self._line_of)
            self._see_pass(iteration, loss)
            if self._steps_by_scaler:
                self._see_made(iteration, loss)

    def _see_made(self, iteration: Iteration, loss: Tensor) -> None:
        """See which losses backward passes take, and a gradient that this one's pass makes."""
        self._raw.begin(loss)
        with suppress(Exception):
            leaves, held = leaves_among(first_nodes(loss)), self._held.by_optimizers()
            if iteration.made is None:
                known = [leaf for key, leaf in leaves.items() if key in held]
                iteration.made = MadeGradient(known) if known else None
            if iteration.made is not None:
                iteration.made.note_after(leaves, self._hooks)

    def _see_pass(self, iteration: Iteration, loss: Tensor) -> None:
        """Look at a backward pass if steps have many."""
        if self._num_losses < LEAST_ZEROED or self._is_in_step:
            return
        with suppress(Exception):
            iteration.passes.before(loss, self._held.by_optimizers(), self._hooks)

    def _see_terms(self, iteration: Iteration, loss: Tensor) -> None:
        """Note a term of a loss that no gradient passes, or look for it in the next step."""
        if self._graphs is None:
            return
        calls = self._graphs.ungraphed
        if calls.gradients.readers and (place := calls.gradients.found_in(loss)):
            self._note_term(iteration, Event.GRAPHLESS, place)
        elif calls.cuts.added and (place := calls.cuts.found_in(loss)):
            self._note_term(iteration, Event.DETACHED, place)
        elif calls.terms.added and (term := calls.terms.found_in(loss)):
            event = Event.COUNTED if term.is_counted else Event.CONSTANT
            self._note_term(iteration, event, term.place)
        elif iteration.scaled.adds_a_constant or iteration.scaled.has_inputs:
            calls.seek_term()
        elif calls.is_on and not adds_a_constant(loss.grad_fn):
            calls.note_other()
        if calls.is_on:
            calls.cuts.note_loss(loss)

    def _note_term(self, iteration: Iteration, event: Event, place: str) -> None:
        iteration.note(event)
        iteration.note(event, place)
        if self._graphs is not None:
            self._graphs.ungraphed.note_term()

    def leave_out(self, loss: Tensor) -> None:
        """Report a loss that is not finite, and that no backward pass takes."""
        value, number = float(local(loss).detach()), self._iterations.latest.number
        graphs = self._graphs
        if graphs is not None and not (math.isfinite(value) or graphs.has_seen(loss)):
            self.read()
            found, batch = graphs.origin_in(loss), loaders.fed()
            self.log.add_bad(BadStep(number, value, located=found, is_left_out=True, batch=batch))

    def _line_of(self, loss: Tensor, node: Node) -> Line:
        return Line() if self._graphs is None else self._graphs.line_of(loss, node)

    @closes_if_asked
    def unscaling(self, optimizer: object, scale: SupportsFloat, /) -> None:
        """Measure the gradients if a sample is due, before anything clips them."""
        self._before_step(optimizer, scale)
        self._iterations.latest.is_unscaled = True

    @closes_if_asked
    def stepping(self, optimizer: object, scale: SupportsFloat | None, /) -> None:
        """Measure the gradients if a sample is due and ``unscaling`` has not measured them."""
        if id(optimizer) not in self._held.names:  # else it has stepped
            self._held.see_calls(optimizer, currentframe())
        self._before_step(optimizer, scale)
        if self._steps_by_scaler and self._observed.is_mixed(optimizer):
            self._iterations.latest.note(Event.MIXED)
        if self._sees_own_steps:
            self._looks.begin_scaled(optimizer)
        if self._iterations.latest.is_sampled:
            self._see_lost(self._iterations.latest, optimizer)

    def _see_lost(self, iteration: Iteration, optimizer: object) -> None:
        """Note backward passes before a step that have lost their gradients."""
        with suppress(Exception):
            if lost := iteration.passes.lost_before({id(p) for p in held_by(optimizer)}):
                iteration.note(Event.ZEROED)
                iteration.note(Event.ZEROED, f"{lost} of {lost + 1}")

    def _before_step(self, optimizer: object, scale: SupportsFloat | None) -> None:
        iteration = self._iterations.latest
        if id(optimizer) in iteration.outcomes:
            self._update()
            iteration = self._iterations.latest
        self._is_in_step = True
        if id(optimizer) not in iteration.begun:
            if self._graphs is not None:
                self._graphs.ungraphed.end_passes()
                if id(optimizer) not in self._held.names:
                    self._graphs.note_new_optimizer()
            self._see_before_step(iteration, optimizer)
            iteration.begun.add(id(optimizer))
        if iteration.is_sampled:
            if self.at_sample is not None:
                self.at_sample()
            if self._graphs is not None:
                self._looks.note_shared(optimizer, iteration)
                if scale is not None and id(optimizer) not in iteration.measured:
                    self._note_misscaled(iteration, optimizer, float(scale))
                with suppress(Exception):
                    self._held.see_frozen(optimizer, self._named(optimizer))
            self._measure(optimizer, scale)

    def _note_misscaled(self, iteration: Iteration, optimizer: object, scale: float) -> None:
        """Note gradients that are not multiplied by the scale by which the scaler divides them."""
        if scale < LEAST_OWN_SCALE:
            return
        with suppress(Exception):
            held = {id(p) for p in held_by(optimizer)}
            factor = None if iteration.made is None else iteration.made.factor(held)
            if self._raw.are_all() and not held.isdisjoint(iteration.scaled.reached):
                iteration.note(Event.BYPASSED)
            elif factor is not None and abs(factor * scale - 1) <= EXACT:
                iteration.note(Event.SHRUNK)

    @closes_if_asked
    def note(self, events: Iterable[Counted]) -> None:
        """Note events of the step that is not over."""
        self._iterations.latest.events += events

    @closes_if_asked
    def note_repeated(self) -> None:
        """Note a step that an optimizer makes beside that of its scaler."""
        self._iterations.latest.note(Event.REPEATED)

    def _see_before_step(self, iteration: Iteration, optimizer: object) -> None:
        """Note what an optimizer's parameters and gradients show before its step."""
        self.parameters.note_norms(optimizer)
        is_new = iteration.is_first and Counted(Event.RESUMED) not in iteration.events
        if is_new and self._is_resumed(optimizer):
            iteration.note(Event.RESUMED)
        if iteration.is_first and not iteration.optimizers and self._graphs is not None:
            for place in uncalled_in(self.model):
                iteration.note(Event.UNCALLED, place)
        self._looks.before_step(optimizer, iteration, self._held.names.get(id(optimizer), ""))
        if self._mode.is_left(optimizer):
            iteration.note(Event.EVALUATING)
        self._rates.see(optimizer, iteration, is_new=id(optimizer) not in self._held.names)
        self._see_loads(iteration, optimizer)
        if self._cut_off.is_looking:
            missing = self._cut_off.note(self._named(optimizer))
            if self._graphs is not None and missing:
                self._note_cut(iteration, self._graphs.ungraphed.cuts.used_before(missing))
        if not getattr(optimizer, "state", True):
            iteration.new.add(id(optimizer))

    def _note_cut(self, iteration: Iteration, place: str) -> None:
        """Note the call that keeps parameters from a gradient, if it is known."""
        if place:
            iteration.note(Event.PASSES_NONE, place)

    def _see_loads(self, iteration: Iteration, optimizer: object) -> None:
        """Note calls that loaded nothing, or all, since the step before."""
        while unfit_states.places:
            iteration.note(Event.UNFIT, unfit_states.places.pop())
        while unfit_states.copies:
            line = unfit_states.copies.pop()
            if not iteration.is_first:  # before training, a copy of nothing new does no harm
                iteration.note(Event.ONTO_ITSELF)
                iteration.note(Event.ONTO_ITSELF, line)
        if unfit_states.loaded.ids and self._num_loads < PHASES:  # some scripts load all the time
            at = unfit_states.loaded_among(held_by(optimizer), unfit_states.loaded)
            unfit_states.loaded.clear()
            if at is not None and not iteration.is_first:
                self._num_loads += 1
                iteration.note(Event.RELOADED)
                iteration.note(Event.RELOADED, f"{iteration.number} {at}".rstrip())

    @closes_if_asked
    def stepped(self, optimizer: object, outcome: StepOutcome, /) -> None:
        """Inspect the gradients if they are not finite."""
        self._is_in_step = False
        if self._sees_own_steps:
            self._looks.end_scaled(optimizer)
        has_gradients = outcome.known_reason != "no_gradients"
        count = self._held.note(optimizer, has_gradients)
        if not has_gradients:
            self._note_idle(optimizer, count)
            return
        iteration = self._iterations.latest
        self._iterations.note(optimizer, outcome)
        if id(optimizer) in iteration.new and optimizer.state:  # type: ignore[attr-defined]
            iteration.note(Event.RENEWED)
            self._note_loaded(iteration, optimizer)
        if self._graphs is not None and self._graphs.ungraphed.is_sought:
            self._graphs.ungraphed.begin_early(iteration.number)
        if iteration.is_sampled:
            if self._graphs is not None:
                self._looks.after_step(optimizer, iteration.number)
                with suppress(Exception):
                    if moved := self._held.moved_frozen(self._named(optimizer)):
                        iteration.note(Event.MOVED_FROZEN)
                        iteration.note(Event.MOVED_FROZEN, moved)
            self._measure(optimizer)  # if a closure made the gradients
        is_watched = self._watch.step == iteration.number
        can_read = self._steps_by_scaler and not isinstance(self.scaler, EngineScaler)
        may_read = can_read and (self.forensics or is_watched)
        is_skip = may_read and outcome.skipped  # may wait for the device
        if is_skip and (is_watched or self._inspects_next_skip):
            named = self._named(optimizer)
            outcome.nonfinite = inspect(_gradients_of(named))
            if self._graphs is not None and outcome.nonfinite:
                bad = {id(named[each.name]) for each in outcome.nonfinite}
                self._graphs.gradients.note(bad, {id(p) for p in named.values()} - bad)

    def _note_loaded(self, iteration: Iteration, optimizer: object) -> None:
        """Note what was loaded, in the first step of an optimizer, which has a state only now."""
        if optimizer in new_optimizers.rates or optimizer in self._began_anew:
            return
        self._began_anew[optimizer] = None
        if optimizer in new_optimizers.continued:
            iteration.note(Event.FORGOTTEN)
            iteration.note(Event.FORGOTTEN, new_optimizers.continued.get(optimizer, ""))
        line = unfit_states.loaded_among(held_by(optimizer), unfit_states.whole)
        if line is not None:
            iteration.note(Event.LOADED)
            iteration.note(Event.LOADED, line)

    def _note_idle(self, optimizer: object, count: int) -> None:
        """Note a step without a gradient, the optimizer's latest of so many from the start."""
        self._iterations.note_call(Event.IDLE)
        what = self._held.what_else(optimizer) if self._sees_graph else None
        # They may be another optimizer's, as a critic's, which may not have stepped yet.
        may_be_held = count == 1 or not self._held.is_of_none
        if what and not (may_be_held and what.startswith("parameters")):
            self._iterations.note_call(Event.ASTRAY, what)
        why = self._held.why_stopped(optimizer)
        if why is None:
            self._see_idle(optimizer, count)
            astray = what if self._held.is_of_none else None
            self.log.note_idle(self._held.names[id(optimizer)], count, astray)
        else:
            self.read()
            self.log.note_stopped(self._iterations.ended, why)

    def _see_idle(self, optimizer: object, count: int) -> None:
        """Note what cuts an optimizer's parameters off from the losses, or seek it in a step."""
        if self._graphs is None or count > FEW_CALLS:
            return
        calls = self._graphs.ungraphed
        if places := calls.cuts.used_of({id(p) for p in held_by(optimizer)}):
            self._iterations.latest.note(Event.CUTS_OFF, " and ".join(places[:FEW_EVENTS]))
        else:
            calls.seek_term()

    @closes_if_asked
    def updating(self) -> None:
        """End the iteration, and report what is wrong, such as too many skips."""
        self._is_in_step = False
        self._update()

    def _update(self) -> None:
        if self._watch.is_on or self._watch.step == self._iterations.latest.number:
            self._watch.stop()  # else an interrupt could leave the scale half moved
        if self._graphs is not None:
            self._graphs.ungraphed.end_passes()
        self._end()
        ended = self._iterations.ended
        if ended == self._updated:
            return
        try:
            self._judge(ended)
        except Exception as error:  # the next call goes on; after an interrupt, it judges again
            self._updated = ended
            if isinstance(error, StuckError) and self._steps_by_scaler:
                with passing():
                    raise StuckError(
                        f"{error} To go on all the same, call update() again."
                    ) from None
            raise
        self._updated = ended

    def _judge(self, ended: int) -> None:
        """Read the iterations that ended, if a reading is due, and report what is wrong."""
        was_watched = self._watch.step == ended
        is_write_due = self.log.is_write_due
        self._read_if_due(was_watched or is_write_due)
        if is_write_due:
            self.log.add_sample()
        self._keep_located(ended)
        self.located = self._watch.located
        streak = self.log.stuck_streak
        is_unseen = streak is not None and streak.skips[-1].nonfinite is None and not was_watched
        is_unseen = is_unseen and self.located is None
        is_late = is_unseen and self.log.needs_verdict  # the flag was read too late to inspect
        self._watch.step_ended(ended, is_late)
        if not is_late:
            self.log.check()

    def _read_if_due(self, is_due: bool) -> None:
        """Read the iterations that ended if that is due, for this reason or for another one."""
        if is_due or self.forensics or self._must_read or (self._graphs and self._graphs.located):
            self.read()

    @property
    def _must_read(self) -> bool:
        """Whether the latest iteration was measured, or too many wait to be read."""
        waiting = self._iterations.waiting
        return len(waiting) >= HISTORY_LENGTH or bool(waiting and waiting[-1].measured)

    def _keep_located(self, ended: int) -> None:
        """Keep what the watches of the latest step located, and prepare those of the next."""
        if self._graphs is None:
            self._watch.keep_located(None)
            return
        latest = self.log.history[-1] if self.log.history else None
        if latest is None or latest.step != ended:
            latest = Step(ended, 1.0, skipped=False)  # it is not read yet
        has_failed, is_hopeless = self.log.has_failed(latest), latest.is_hopeless
        bad = latest.nonfinite
        has_nan = bad is not None and any(each.num_nan for each in bad)
        self._watch.keep_located(self._graphs.found(has_failed))
        if has_failed and self._memories_left:
            self._see_memories()
        else:
            self._memory = ""
        self._graphs.step_ended(ended, has_failed, is_hopeless, has_nan)

    def _see_memories(self) -> None:
        """Note what a communication hook keeps, if it does so after two failed steps in a row."""
        self._memories_left -= 1
        with suppress(Exception):
            before, self._memory = self._memory, bad_memory()
            if before and self._memory:
                self._memories_left = 0
                self._iterations.latest.note(Event.KEPT_BY_HOOK, self._memory)

    @closes_if_asked
    def updated(self) -> None:
        """Begin to watch the next iteration if that is wanted, now that the scale has moved."""
        if self._updated == self._iterations.ended:
            self._watch.start_if_wanted(self._updated + 1)
            if self._graphs is not None:
                if self._cut_off.is_due:
                    self._graphs.ungraphed.seek_term()
                self._graphs.begin(self._updated + 1)
        self._cut_off.begin(self._updated)

    def close(self, finish: Callable[[], None]) -> None:
        """Stop observing, add the waiting iterations to the log, and call ``finish``.

        A signal handler or another thread may call this while a method of this observer is running.
        Then the observer closes at the end of that method or of the next one.
        """
        self._finish = finish
        if not self._running.locked():
            self._close_if_asked()

    def _close_if_asked(self) -> None:
        finish, self._finish = self._finish, None
        if finish is None:
            return
        self.scaler.remove_observer(self)
        for end in self._endings():
            end()
        self._end()
        if self._is_in_step:
            self._iterations.note_call(Event.RAISED)
        self.read()
        with suppress(Exception):
            if self._graphs is not None and (what := start_statistics.left_in(self.model)):
                self.log.note_at_start(what)
            if self._held.is_held_late():
                self.log.note_held_late()
        finish()

    def _endings(self) -> list[Callable[[], None]]:
        """What removes each kind of hook."""
        own = [self._watch.stop, self._cut_off.stop, self._hooks.remove, self._looks.stop]
        return own + ([] if self._graphs is None else [self._graphs.stop])

    def break_off(self) -> None:
        """Stop observing after an error, whatever state this is in."""
        self._finish = None
        with suppress(Exception):
            self.scaler.remove_observer(self)
        for end in (*self._endings(), self._end, self.read):
            with suppress(Exception):
                end()

    def _end(self) -> None:
        """End the latest iteration."""
        self._hooks.remove()
        self._raw.end()
        if self._steps_by_scaler:
            self._iterations.note_missed()
        iteration = self._iterations.latest
        if iteration.optimizers:  # none, if a script leaves out the step
            self._num_losses = iteration.num_losses
            self.parameters.optimizers = list(iteration.optimizers.values())
            measured = iteration.measured.values()
            lacks_gradient = bool(measured) and any(each.lacks_gradient for each in measured)
            iteration.cut = self._cut_off.end(lacks_gradient)
            if iteration.kind is not None and self._num_kinds < 2 * PHASES:
                before, self._kind = self._kind, (iteration.kind, {*iteration.optimizers})
                is_same = before is None or before[0] is iteration.kind
                if not is_same or (before and before[1].isdisjoint(iteration.optimizers)):
                    self._note_changed(iteration)
            if iteration.is_sampled and self._sees_graph:
                unheld = iteration.scaled.unheld(self._held.known())
                if self._held.has_stood(unheld):
                    iteration.scaled.note_unheld(unheld, self.model)
        self._iterations.end()
        iteration.optimizers = {}  # the iteration, if unread, must not keep them alive

    def _note_changed(self, iteration: Iteration) -> None:
        """Note that a loss is another one than in the step before, of the first with its number."""
        self._num_kinds += 1
        iteration.note(Event.CHANGED)
        if self._num_kinds <= PHASES:
            iteration.note(Event.CHANGED, str(iteration.number))

    def _is_resumed(self, optimizer: object) -> bool:
        """Whether an optimizer has an earlier run's state, but the scaler has its initial one."""
        observed = self._observed
        is_new = not observed.last_steps() and observed.state == observed.policy.init()
        return is_new and has_stepped(optimizer)

    def _named(self, optimizer: object) -> dict[str, Tensor]:
        place = self._iterations.latest.place_of(optimizer)
        return self.parameters.named(optimizer, place)

    def _measure(self, optimizer: object, scaled_by: SupportsFloat | None = None) -> None:
        """Measure an optimizer's gradients, once in an iteration.

        ``scaled_by`` is the scale that they are still multiplied by; None if they are unscaled.
        """
        iteration = self._iterations.latest
        named = {} if id(optimizer) in iteration.measured else self._named(optimizer)
        gradients = _gradients_of(named)
        if not gradients:
            return
        known = None
        if not any(hasattr(gradient, "to_local") for gradient in gradients.values()):
            norm = self._observed.total_norm(optimizer)
            known = norm if math.isfinite(norm) else None
        is_scaled = scaled_by is not None
        scale = float(self._observed.state.scale if scaled_by is None else scaled_by)
        found = measure(gradients, self.dtype, scale, is_scaled, known)
        missing = tuple(name for name, p in named.items() if p.grad is None and _is_trained(p))
        iteration.seen = iteration.seen or self._held.at_sample(optimizer, named, iteration.number)
        # The loss of a parameter that is not the model's may be scaled by another scaler.
        if self._sees_graph and iteration.losses and self._held.holds_any(optimizer):
            iteration.unscaled += iteration.scaled.unscaled(named)
        unmoved = self.parameters.unmoved(optimizer, named, iteration.number)
        iteration.measured[id(optimizer)] = replace(found, missing=missing, unmoved=unmoved)


def _gradients_of(named: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: p.grad for name, p in named.items() if p.grad is not None}


def _is_trained(parameter: Tensor) -> bool:
    """Whether a parameter requires a gradient; ``stop_gradient`` is Paddle's."""
    if hasattr(parameter, "stop_gradient"):
        return not parameter.stop_gradient
    return bool(parameter.requires_grad)
