"""The observer of a loop of PyTorch without a scaler."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from typing import NamedTuple

from gradscaler.diagnose._gradients.arrays import has_numbers
from gradscaler.diagnose._gradients.reading import Tensor, inspect
from gradscaler.diagnose._graph.call_site import Node
from gradscaler.diagnose._graph.nodes import in_order, is_leaf, nodes_from
from gradscaler.diagnose._graph.watch import GraphWatch
from gradscaler.diagnose._monitor import new_optimizers
from gradscaler.diagnose._monitor.gradient_check import (
    Glance,
    GradientCheck,
    HostCopy,
    LateCheck,
    elements_of,
    nonfinite,
)
from gradscaler.diagnose._monitor.iterations import Iteration
from gradscaler.diagnose._monitor.looks import part_of
from gradscaler.diagnose._monitor.observer import EagerObserver, closes_if_asked
from gradscaler.diagnose._monitor.parameters import any_gradient
from gradscaler.diagnose._monitor.step_log import StepLog
from gradscaler.diagnose._monitor.streaks import MOST_NONFINITE
from gradscaler.diagnose._record.events import Counted, Event
from gradscaler.diagnose._record.lines import BadStep
from gradscaler.diagnose._record.located import Located
from gradscaler.diagnose._record.thresholds import MANY_CALLS, UNSTEPPED_LOSSES
from gradscaler.outcome import NonfiniteGradient, StepOutcome

_ALL = 0  # stands for the ids of all optimizers, in a step that the script leaves out
_RANGES = "float16", "bfloat16", "float32"  # the narrowest first


class Failure(NamedTuple):
    """Gradients that were not finite after a backward pass, its loss, and where it began.

    If no operation shows where, it may be a parameter that was not finite before.
    """

    loss: float | None
    nonfinite: tuple[NonfiniteGradient, ...]
    located: Located | None
    parameter: str | None = None


class LoopObserver(EagerObserver):
    """Records the steps of a loop without a scaler.

    Gradients are checked after each backward pass, before anything clips them. On a CPU, a step
    that is applied although they are not finite is reported at once. On a device, losses and norms
    are read when they have arrived on the host, and nothing waits for them. If a backward pass
    fails and the script takes no step, the step counts as skipped.

    Attributes:
        dtype_seen: called with the narrowest dtype of the first backward passes; None if the dtype
            of the samples was given.
    """

    dtype_seen: Callable[[str], None] | None = None
    _steps_by_scaler = False
    _graphs: GraphWatch

    def __post_init__(self) -> None:
        """Note the loop's present state."""
        super().__post_init__()
        self._trained: dict[str, Tensor] = {}
        self._loose: dict[str, Tensor] = {}  # in an optimizer, and not the model's
        self._failure: Failure | None = None  # in this iteration
        self._reported: Failure | None = None  # in the present streak of bad steps
        self._left_out: Failure | None = None  # in the present streak of steps left out
        self._bad_loss: Failure | None = None  # of a backward pass with finite gradients
        self._are_zeros = False  # whether all of these were 0, as where a mask leaves nothing
        self._reached: set[int] = set()  # ids of what losses before a step depend on
        self._root: Node = None  # of the latest loss
        self._num_roots = 0  # losses of the backward pass
        self._glance: tuple[Mapping[int, int], Glance] | None = None  # with what it was made for
        self._is_checked = False  # whether gradients were checked since the step before
        # The last parameter with a gradient in the first backward pass, and some of its elements.
        self._begun_with: list[tuple[Tensor, Tensor]] | None = None
        self._most_passes = 0  # the most backward passes before a step
        self._num_unstepped = 0  # backward passes after the last one
        self._changes: int | None = None  # of the parameters, up to a backward pass that failed
        self._evaluated: list[Tensor] = []  # losses of the running step of an optimizer
        self._has_gradients = False  # whether the running step has seen any; it may zero them
        self._in_float16: list[Counted] = []  # losses, though the scaler is disabled

    @closes_if_asked
    def scaled(self, outputs: Tensor, /) -> None:
        """Remember a loss, before its backward pass."""
        super().scaled(outputs)
        losses, self._root = self._iterations.latest.losses, outputs.grad_fn
        self._num_roots += 1
        if self.scaler.has_scaler:
            self._see_disabled(outputs)
        if self._is_in_step:
            self._evaluated += losses[-1:]
        if outputs.device.type == "cpu":
            self._graphs.retain(outputs)
        elif losses and not isinstance(losses[-1], HostCopy):
            losses[-1] = HostCopy(losses[-1])

    def _see_disabled(self, loss: Tensor) -> None:
        """Note one of the first losses if it was computed in float16, without a loss scale.

        The graph of a loss shows what autocast chose, so the model needs no hook, which would be
        saved and scripted with it.
        """
        iteration = self._iterations.latest
        if iteration.is_first and iteration.num_losses <= MANY_CALLS and _has_float16(loss):
            self._in_float16.append(Counted(Event.DISABLED))
            self.log.note_early(self._in_float16)

    @closes_if_asked
    def backward_ended(self) -> None:
        """Check all gradients, and measure them if a sample is due."""
        iteration = self._iterations.latest
        self._check(iteration)
        if self._begun_with is None:
            used = [p for p in self._trained.values() if p.grad is not None][-1:]
            self._begun_with = [(p, part_of(p).clone()) for p in used]
        self._changes = None if self._failure is None else self._num_changes()
        if self._is_in_step and any(p.grad is not None for p in self._trained.values()):
            self._has_gradients = True
        if iteration.is_sampled:
            iteration.measured.clear()
            for optimizer in self.parameters.optimizers:
                self._measure(optimizer)

    def _check(self, iteration: Iteration) -> None:
        if iteration.is_sampled or not self._trained:
            every = {**dict(self.model.named_parameters()), **self._loose}
            # A lazy parameter may get its numbers before the next sample.
            self._trained = {n: p for n, p in every.items() if has_numbers(p) or p.grad is None}
            self._glance = None
        is_clean, self._is_checked = not iteration.is_sampled and self._looks_clean(), True
        check = GradientCheck({} if is_clean else self._trained)
        loss = iteration.losses[-1] if iteration.losses else None
        is_on_host = is_clean or check.is_on_host
        if not is_on_host:
            late = LateCheck(check, loss, self._root)
            iteration.checks = [*(each for each in iteration.checks if not each.is_clean), late]
        elif is_clean or not (suspects := check.suspects()):
            # An earlier failure was left out, or is over.
            self._failure = self._reported = self._left_out = None
        elif self._failure is None:
            known = self._reported or self._left_out
            self._failure = known or self._failed_in(suspects, loss)
        self._bad_loss = self._failed_loss(loss) if is_on_host else None
        if self._bad_loss is not None:
            self._are_zeros = not any(_has_any(p.grad) for p in self._trained.values())
        self._graphs.release()
        self._root, self._num_roots = None, 0

    def _failed_loss(self, loss: Tensor | HostCopy | None) -> Failure | None:
        """The failure of a backward pass by its loss alone, if that is the model's.

        An optimizer may hold copies of what the loss depends on, as float32 values.
        """
        if loss is None or isinstance(loss, HostCopy) or math.isfinite(value := float(loss.item())):
            return None
        trained = self._reached.union(map(id, self._trained.values()))
        leaves = (node.variable for node in nodes_from([self._root]) if is_leaf(node))
        is_own = any(id(leaf) in trained for leaf in leaves)
        return Failure(value, (), self._graphs.located) if is_own else None

    def _looks_clean(self) -> bool:
        """Whether the gradients that show whether the others are finite are so themselves."""
        shown = self._graphs.shown if self._num_roots == 1 else {}
        if not shown:
            return False
        if self._glance is None or self._glance[0] is not shown:
            self._glance = shown, Glance(self._trained.values(), shown)
        return self._glance[1].is_clean()

    def _failed_in(self, suspects: Iterable[str], loss: Tensor | None) -> Failure | None:
        """The failure of a backward pass, if gradients that are suspected hold an Inf or a NaN."""
        found = nonfinite({name: self._trained[name] for name in suspects})
        failure = self._failed(loss, found, self._root) if found else None
        if failure is None or failure.located is not None:
            return failure
        bad = next(iter(inspect(_with_numbers(self._trained))), None)
        return failure._replace(parameter=None if bad is None else bad.name)

    def _failed(
        self,
        loss: Tensor | HostCopy | None,
        found: tuple[NonfiniteGradient, ...],
        root: Node,
    ) -> Failure:
        located = self._located({each.name for each in found}, root)
        return Failure(None if loss is None else float(loss.item()), found, located)

    def _located(self, names: set[str], root: Node) -> Located | None:
        """Where the first Inf or NaN began, of a backward pass with these bad gradients."""
        bad = {id(self._trained[name]) for name in names}
        good = {id(p) for p in self._trained.values() if p.grad is not None} - bad
        return self._graphs.located or self._graphs.of_backward(bad, good, root)

    @closes_if_asked
    def stepping(self, optimizer: object, scale: object, /) -> None:
        """Check the gradients if no backward pass was seen to make them."""
        is_new = self._has_new(optimizer)
        super().stepping(optimizer, None)
        self._has_gradients = any_gradient(optimizer)
        iteration = self._iterations.latest
        if is_new or not self._is_checked:
            self._check(iteration)
        elif self._bad_loss is not None and self._failure is None:
            # What made the loss NaN may be what the script divides the gradients by.
            found = nonfinite(self._trained)
            self._failure = self._bad_loss._replace(nonfinite=found) if found else None
        used = self.scaler.total_norm(optimizer) if iteration.measured else None
        if used == 0:  # they were zeroed after the backward pass, or it made zeros
            made = iteration.measured.pop(id(optimizer), None)
            if made is not None and 0 < made.norm < math.inf:
                iteration.note(Event.EMPTIED)
            self._measure(optimizer)
        elif used is not None and iteration.seen is not None:
            iteration.seen = replace(iteration.seen, used=used)

    def _has_new(self, optimizer: object) -> bool:
        """Whether an optimizer that was not seen before holds what is not the model's."""
        if id(optimizer) in self._held.names:
            return False
        self._loose |= {n: p for n, p in self._named(optimizer).items() if n not in self._trained}
        is_new = not self._loose.keys() <= self._trained.keys()
        self._trained |= self._loose
        self._glance = None
        return is_new

    def is_left_out(self) -> bool:
        """Whether the latest backward passes failed, and the script goes on without a step.

        It has zeroed the gradients, or made as many backward passes as before any step. If it has
        changed the parameters, this is a part of a step, as the first of sharpness-aware ones is.
        """
        iteration = self._iterations.latest
        if self._is_in_step or (failure := self._unstepped(iteration)) is None:
            return False
        if self._changes not in (None, self._num_changes()):
            return False
        if self._are_zeroed(failure):
            return True
        is_over = 0 < self._most_passes <= iteration.num_losses
        if is_over and failure.nonfinite:
            iteration.note(Event.KEPT)
        return is_over

    def _are_zeroed(self, failure: Failure) -> bool:
        """Whether the gradients of a failure are gone."""
        names = {each.name for each in failure.nonfinite} or self._trained.keys()
        held = [p.grad for name, p in self._trained.items() if name in names]  # one may be gone
        if self._are_zeros and not failure.nonfinite:  # by the backward pass itself
            return all(gradient is None for gradient in held)
        return not any(map(_has_any, held))

    def _num_changes(self) -> int:
        """How often PyTorch has changed the trained parameters."""
        return sum(parameter._version for parameter in self._trained.values())

    def _unstepped(self, iteration: Iteration) -> Failure | None:
        """The failure of an iteration in which no optimizer has stepped; None if it has not."""
        if iteration.outcomes or not iteration.losses:
            return None
        if (failure := self._failure or self._bad_loss) is not None:
            return failure
        late = (each for each in iteration.checks if each.check.has_arrived)
        bad = next((each for each in late if each.check.suspects()), None)
        if bad is None:
            return None
        return self._failed(bad.loss, bad.check.nonfinite(self._trained), bad.root)

    def _with_skip(self, iteration: Iteration) -> Iteration:
        """An iteration, with a skip in place of a step that the script leaves out."""
        if (failure := self._unstepped(iteration)) is None:
            return iteration
        skip = StepOutcome(1.0, True)
        skip.nonfinite = failure.nonfinite or None  # else another rank seems to have failed
        return replace(iteration, outcomes={_ALL: skip})

    def outcome_of(self, optimizer: object) -> StepOutcome:
        """The outcome of a step that is done."""
        if not (self._has_gradients or any_gradient(optimizer)):
            return StepOutcome(1.0, False, "no_gradients")
        outcome = StepOutcome(1.0, False, "disabled")  # loss scaling is
        if self._failure is not None and self._is_applied(self._named(optimizer)):
            outcome.nonfinite = self._failure.nonfinite
        return outcome

    def _is_applied(self, named: dict[str, Tensor]) -> bool:
        """Whether a failure was applied to parameters: their gradients may have been cleaned."""
        in_a_row = self._failure is self._reported  # need no reading of all gradients
        return in_a_row or bool(nonfinite(named) or inspect(named))

    @closes_if_asked
    def stepped(self, optimizer: object, outcome: StepOutcome, /) -> None:
        """Report a step that was applied although its gradients were not finite."""
        super().stepped(optimizer, outcome)
        failure, self._is_checked = self._failure, False
        if failure is not None and outcome.nonfinite:
            self._reported = failure
            self._report(self._iterations.latest, failure)
        self._evaluated.clear()

    def _report(self, iteration: Iteration, failure: Failure) -> None:
        """Write a bad step, before its iteration ends and the next forward pass begins."""
        if iteration.is_first and (scales := iteration.scaled.own_scales()):
            early = [*iteration.events, *scales]
            self.log.note_early(early, frozenset(iteration.backward))
        found, located = failure.nonfinite, failure.located
        listed, more = found[:MOST_NONFINITE], len(found[MOST_NONFINITE:])
        parameter = None if located is None else located.bad_parameter
        # The first step may have begun before the observer.
        evaluated = self._evaluated or (iteration.losses if iteration.is_first else [])
        line = BadStep(
            *(iteration.number, failure.loss, listed, more, located),
            is_from_start=parameter is not None and self.parameters.was_bad(parameter),
            lost_eps=self.parameters.lost_eps(),
            evaluated=_first_and_largest(evaluated),
            parameter=failure.parameter,
            batch=iteration.batch,
        )
        self.log.add_bad(line)

    def _end(self) -> None:
        iteration = self._iterations.latest
        if iteration.is_first and iteration.outcomes and self.dtype_seen is not None:
            dtype = next((each for each in _RANGES if each in iteration.backward), self.dtype)
            if dtype != self.dtype:
                self.dtype = dtype
                self.dtype_seen(dtype)
        if not iteration.outcomes and (failure := self._unstepped(iteration)) is not None:
            iteration.outcomes = self._with_skip(iteration).outcomes
            self._left_out, iteration.checks = self._failure, []
            self._graphs.located = self._graphs.located or failure.located
        self._num_unstepped = 0 if iteration.outcomes else iteration.num_losses
        if iteration.optimizers:
            self._most_passes = max(self._most_passes, iteration.num_losses)
            self._reached.update(iteration.scaled.reached)
        if iteration.outcomes:
            self._failure = self._bad_loss = None
        super()._end()

    def _read_if_due(self, is_due: bool) -> None:
        """Add the iterations whose values have arrived, and wait for the others only if must be."""
        waiting = self._iterations.waiting
        self._read(waiting if self._must_read else takewhile(_has_arrived, waiting))

    def _read(self, iterations: Iterable[Iteration]) -> None:
        for iteration in iterations:
            if iteration.checks:
                self._read_checks(iteration)
            self._add_to(self.log, [iteration])

    def _read_checks(self, iteration: Iteration) -> None:
        """Report an iteration on a device, if its gradients and now its weights are not finite."""
        late, iteration.checks = iteration.checks, []
        bad = next((each for each in late if each.check.suspects()), None)
        if bad is not None and inspect(_with_numbers(self._trained)):
            failure = self._failed(bad.loss, bad.check.nonfinite(self._trained), bad.root)
            for outcome in iteration.outcomes.values():
                outcome.nonfinite = failure.nonfinite
            self._report(iteration, failure)

    def read(self) -> None:
        """Add the waiting iterations to the log; waits for the device."""
        self._read(self.waiting)

    def snapshot(self) -> StepLog:
        """A copy of the log with all steps so far; any thread may call this."""
        log, latest = super().snapshot(), self._with_skip(self._iterations.latest)
        if latest.outcomes and not self._is_in_step:
            self._add_to(log, [latest])
        return log

    def close(self, finish: Callable[[], None]) -> None:
        """Stop observing, report a failure that no step has followed, and call ``finish``."""

        def report_and_finish() -> None:
            self._report_last()
            finish()

        super().close(report_and_finish)

    def _report_last(self) -> None:
        """Report the end of the run, if the script has taken no step in it."""
        if not self.log.num_steps and self._num_unstepped >= UNSTEPPED_LOSSES:
            self._note_untaken()
        is_long = self._num_unstepped >= UNSTEPPED_LOSSES * self._most_passes > 0
        if is_long and not (self._held.has_idle or self.log.has_stopped):  # whose steps were seen
            followed = f"{self._num_unstepped} calls of backward() followed without a step"
            self.log.break_off(f"{followed}; those of a copied optimizer are not seen")
        last = self.log.history[-1] if self.log.history else None
        if last is not None and last.skipped and self.log.stuck_streak is None:
            bad, located = last.nonfinite or (), self._graphs.located or self.located
            listed, more = bad[:MOST_NONFINITE], len(bad[MOST_NONFINITE:])
            given = last.step, last.loss, listed, more, located
            self.log.add_bad(BadStep(*given, is_left_out=True, batch=last.batch))

    def _note_untaken(self) -> None:
        """Note that no step of any optimizer came, unless something else has moved the weights."""
        events = self._iterations.latest.events
        if self._held.names or not self._begun_with:  # an optimizer has stepped without a gradient
            return
        for parameter, part in self._begun_with:
            if not bool((part == part_of(parameter)).all()):
                return
            place = new_optimizers.of_parameter(parameter)
        events += [Counted(Event.UNTAKEN, at, self._num_unstepped) for at in ("", place)]
        self.log.note_early(events)

    def _is_resumed(self, optimizer: object) -> bool:
        return False  # there is no scaler whose state could be missing


def _has_any(gradient: Tensor | None) -> bool:
    """Whether a gradient has an element other than 0."""
    return gradient is not None and bool(elements_of(gradient).any())


def _has_float16(loss: Tensor) -> bool:
    """Whether an operation in the graph of a loss made float16."""
    with suppress(Exception):
        made = (each for node in in_order(loss) for each in node._input_metadata)
        return any(str(each.dtype) == "torch.float16" for each in made)
    return False


def _with_numbers(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: p for name, p in parameters.items() if has_numbers(p)}


def _first_and_largest(losses: Iterable[Tensor]) -> tuple[float, float] | None:
    """The first loss and the largest, of those that are finite; None if there are none."""
    finite = [loss for loss in (float(each.item()) for each in losses) if math.isfinite(loss)]
    return (finite[0], max(finite, key=abs)) if finite else None


def _has_arrived(iteration: Iteration) -> bool:
    for loss in iteration.losses:  # each step comes here, and a generator makes calls
        if isinstance(loss, HostCopy) and not loss.has_arrived:
            return False
    return not iteration.checks or all(late.check.has_arrived for late in iteration.checks)
