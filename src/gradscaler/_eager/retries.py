"""A body that runs again at a lower scale while its gradients overflow.

``step`` with a closure and a loop over ``attempts`` are two ways to run one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gradscaler._eager.gradients import Gradients
from gradscaler._eager.iteration import Iteration
from gradscaler._eager.operations import (
    Args,
    Closure,
    FoundInf,
    Kwargs,
    Operations,
    Optimizer,
    Tensor,
)
from gradscaler._eager.processes import Processes
from gradscaler._eager.stages import Stage
from gradscaler.errors import CallOrderError
from gradscaler.outcome import Reason
from gradscaler.policies import Policy, State

DEFAULT_MAX_RETRIES = 16
"""Enough to halve the usual first scale, 2**16, down to 1."""


class RetryState:
    """A scaler's record of closures and loops over ``attempts`` since the last ``update``.

    A body is a closure, or the body of such a loop.

    Attributes:
        backed_off: the state that bodies use, if one overflowed. The scaler's own state moves only
            in ``update``, because other optimizers' gradients were made with its scale.
        before_loop: a tuple of one item, ``backed_off`` from before the loop that runs or was left
            early; None without such a loop.
        losses: the losses that the running body has scaled, as pairs of scaled and unscaled loss;
            None if no body runs.
        in_loop: whether the body that runs is that of a loop.
    """

    def __init__(self) -> None:
        self.backed_off: State | None = None
        self.before_loop: tuple[State | None] | None = None
        self.losses: list[tuple[Tensor, Tensor]] | None = None
        self.in_loop = False

    @property
    def is_running(self) -> bool:
        """Whether a body runs."""
        return self.losses is not None

    def state_in_use(self, state: State) -> State:
        """The state that backward passes use; ``state`` is the scaler's own."""
        return state if self.losses is None else self.backed_off or state

    def close_loop(self, keeps_scale: bool) -> None:
        """End a loop, and keep the scale that it backed off to, or the one from before it.

        Args:
            keeps_scale: whether gradients were finite at the scale that the loop backed off to. If
                they overflow at every scale, the batch is bad, and the scale was not too high.
        """
        if self.before_loop is not None:
            if not keeps_scale:
                self.backed_off = self.before_loop[0]
            self.before_loop = None

    def end_iteration(self) -> None:
        """Forget the scale that bodies used."""
        self.backed_off = self.before_loop = None

    def must_not_run(self, call: str) -> None:
        """Raise CallOrderError for a ``call`` in a closure, or in the body of a loop."""
        if self.losses is None:
            return
        self.must_not_loop(call)
        raise CallOrderError(
            f"{call}() was called in a closure: call scaler.step(optimizer, closure), "
            "scaler.attempts(optimizer) and scaler.update() outside of it"
        )

    def must_not_loop(self, call: str) -> None:
        """Raise CallOrderError for a ``call`` in the body of a loop."""
        if self.in_loop:
            raise CallOrderError(
                f"{call}() was called in a loop over attempts(), which may still compute the "
                "gradients again: call it after the loop"
            )

    def must_scale_in_loop(self, known: list[Gradients]) -> None:
        """Raise CallOrderError if a loss is scaled between a loop and ``step``, outside of a loop.

        The loss would use the scaler's own scale. The gradients of the loop may have a lower one,
        and the backward pass would add both.
        """
        if self.is_running:
            return
        if any(each.is_attempted and not each.is_over for each in known):
            raise CallOrderError(
                "scale() was called outside of a loop over attempts(), after such a loop and "
                "before step(): scale each loss of the iteration in a loop of its own, `for _ in "
                "scaler.attempts(optimizer):`, or call step(optimizer) first"
            )


class Retrier:
    """A body that runs again, at a lower scale, while its gradients overflow.

    Args:
        retry_state: the scaler's record of repetitions.
        operations: the framework's tensor operations.
        policy: the policy that backs off; None if the scale does not move.
        state: returns the scaler's state; raises CallOrderError if no loss was scaled yet.
        max_retries: the largest number of repetitions.

    Attributes:
        is_exhausted: whether the gradients overflowed in each of the latest runs.
    """

    def __init__(
        self,
        retry_state: RetryState,
        operations: Operations,
        policy: Policy | None,
        state: Callable[[], State],
        max_retries: int,
    ) -> None:
        self.retry_state, self.operations = retry_state, operations
        self.policy, self.state, self.max_retries = policy, state, max_retries
        self.is_exhausted = False

    def runs(
        self, check: Callable[[], list[FoundInf]], put_back: Callable[[], bool]
    ) -> Iterator[int]:
        """Yield the number of each run, from 0. The caller runs the body after each.

        Args:
            check: returns the flags of the gradients that the body made, an item for each
                optimizer.
            put_back: undoes what the body did; returns False if no lower scale will help.
        """
        self.is_exhausted = False
        for number in range(self.max_retries + 1):
            self.retry_state.losses = []
            yield number
            found_infs = check()
            if not self.overflowed(found_infs):
                return
            if number == self.max_retries or not self._back_off(found_infs) or not put_back():
                break
        self.is_exhausted = True

    def overflowed(self, found_infs: list[FoundInf]) -> bool:
        """Whether any flag is set; may wait for the device."""
        return any(map(self.operations.any_set, found_infs))

    def _back_off(self, found_infs: list[FoundInf]) -> bool:
        """Lower the scale that bodies use; return False if the policy does not lower it."""
        if self.policy is None:
            return False
        # A copy: the scaler's own state moves only in update(), and once.
        state = self.operations.copy(self.retry_state.backed_off or self.state())
        before = float(state.scale)
        # Hysteresis waits for several overflows before it backs off; this batch needs a lower scale
        # now, so the policy is told of as many overflows as it waits for.
        for _ in range(getattr(self.policy, "hysteresis", 1)):
            state = self.operations.move(
                state, self.operations.next_state(self.policy, state, found_infs)
            )
            if float(state.scale) < before:
                self.retry_state.backed_off = state
                return True
        return False


class _RetriesExhaustedError(Exception):
    """Raised in a closure, through ``optimizer.step``, when its retries are used up."""

    def __init__(self, gradients: Gradients) -> None:
        super().__init__()
        self.gradients = gradients


class ClosureStep:
    """One ``optimizer.step(closure)``, in which the optimizer sees only unscaled, finite gradients.

    Args:
        optimizer: the optimizer to step.
        closure: the user's closure, which computes scaled gradients and returns the loss.
        key: the id of the optimizer, by which the iteration finds its gradients.
        retrier: repeats an evaluation that overflows.
        iteration: the scaler's gradients in this iteration.
        processes: the scaler's processes.
        unscale: the scaler's ``unscale_``.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        closure: Closure,
        key: int,
        retrier: Retrier,
        iteration: Iteration,
        processes: Processes,
        unscale: Callable[[Optimizer], None],
    ) -> None:
        self._optimizer, self._closure, self._unscale = optimizer, closure, unscale
        self._retrier, self._retry_state = retrier, retrier.retry_state
        self._operations = retrier.operations
        self._iteration, self._processes = iteration, processes
        self._key = key
        self._has_scaled = False

    def step(self, args: Args, kwargs: Kwargs) -> tuple[Any, Gradients, Reason | None]:
        """Step the optimizer, or skip.

        The first evaluation is made before ``optimizer.step`` is called, so most skips never call
        it. The optimizer gets this evaluation when it first calls the closure, unless it has
        changed parameters or gradients by then. If a later evaluation uses up its retries, the step
        is rolled back. If anything else raises, parameters, optimizer state and scale are put back.

        Returns:
            What ``optimizer.step`` returned, the gradients of the last evaluation, and the reason
            of a skip for which found_inf is not set.
        """
        backed_off = self._retry_state.backed_off
        before = self._iteration.get(self._key)
        restore: Callable[[], None] | None = None
        try:
            loss, gradients = self._evaluate()
            if not gradients.found_inf:
                return None, gradients, None
            # After the first evaluation, so that nothing is copied if all its retries overflow.
            restore = self._operations.snapshot(self._optimizer)
            is_untouched = self._operations.watch(self._optimizer)
            first = [loss]

            def evaluate() -> Any:
                nonlocal gradients
                if first and not self._is_anywhere(not is_untouched()):
                    return first.pop()
                first.clear()  # SAM, for one, has moved the parameters
                loss, gradients = self._evaluate()
                return loss

            result = self._optimizer.step(evaluate, *args, **kwargs)
            gradients.stage = Stage.STEPPED  # an interrupt before this line undoes the step
        except _RetriesExhaustedError as exhausted:
            if restore is not None:
                restore()
            return None, exhausted.gradients, "retries_exhausted"
        except BaseException:
            if restore is not None:
                restore()
            self._iteration.pop(self._key, None)
            if before is not None:
                self._iteration[self._key] = before
                if self._has_scaled:
                    before.note_others()
            self._retry_state.backed_off = backed_off
            self._retry_state.losses = None  # an interrupt may have come before _run() has reset it
            raise
        return result, gradients, None

    def _is_anywhere(self, flag: bool) -> bool:
        return self._processes.deciders_of(self._optimizer).is_anywhere(flag)

    def _evaluate(self) -> tuple[Any, Gradients]:
        """Evaluate until the gradients are finite; return the unscaled loss, and the gradients.

        If they overflow at every scale, the scale from before is put back: the batch is bad, the
        scale was not too high, and ``update`` counts one overflow.

        Raises:
            _RetriesExhaustedError: the gradients overflowed in every evaluation.
        """
        backed_off, loss = self._retry_state.backed_off, None
        for _ in self._retrier.runs(self._found_infs, self._clear_gradients):
            loss = self._run()
        gradients = self._iteration[self._key]
        if self._retrier.is_exhausted:
            self._retry_state.backed_off = backed_off
            raise _RetriesExhaustedError(gradients)
        gradients.multiply()
        return loss, gradients

    def _run(self) -> Any:
        """Call the closure, and unscale its gradients; return the unscaled loss."""
        self._iteration.renew(self._key)  # the closure makes new gradients
        try:
            with self._operations.enable_grad():  # optimizers call closures without gradients
                loss = self._closure()
            if not self._retry_state.losses:
                raise CallOrderError(
                    "the closure scaled no loss: call scaler.scale(loss).backward() in it"
                )
            if self._key not in self._iteration:  # the closure may have unscaled them, to clip
                self._unscale(self._optimizer)
        finally:
            losses, self._retry_state.losses = self._retry_state.losses, None
            self._has_scaled = self._has_scaled or bool(losses)
        unscaled = [outputs for scaled, outputs in losses or () if scaled is loss]
        return unscaled[0] if unscaled else loss

    def _found_infs(self) -> list[FoundInf]:
        return [self._iteration[self._key].found_inf or {}]

    def _clear_gradients(self) -> bool:
        self._operations.clear_gradients(self._optimizer)
        return True


class AttemptLoop:
    """One loop over ``scaler.attempts(...)``.

    The body adds to gradients that were accumulated before it, which stay scaled. So these are
    copied first; when they are put back, they are multiplied by the ratio of the new scale to the
    old one.

    Args:
        gradients: the gradients of each optimizer that the body adds to.
        buffers: further tensors that a repetition puts back.
        retrier: repeats the body.
        check: returns the found_inf of gradients over all processes that repeat together, and
            changes none.
    """

    def __init__(
        self,
        gradients: list[Gradients],
        buffers: list[Tensor],
        retrier: Retrier,
        check: Callable[[Gradients], FoundInf],
    ) -> None:
        self._all, self._buffers, self._check = gradients, buffers, check
        self._retrier, self._retry_state = retrier, retrier.retry_state
        self._operations = retrier.operations
        self._watches: list[Callable[[], bool]] = []

    def run(self) -> Iterator[int]:
        """Yield the number of each attempt, from 0. The caller runs the body after each.

        If the loop is left early, the gradients and their record stay as they are; ``update`` then
        keeps the scale that the loop backed off to only if ``step`` found the gradients finite. If
        all attempts overflowed, ``update`` counts one overflow.
        """
        try:
            yield from self._attempts()
        except BaseException:
            # The body may have been interrupted before it made gradients at the latest scale.
            if not self._retry_state.losses or self._is_untouched():
                self._retry_state.close_loop(keeps_scale=False)
            raise
        finally:
            self._end_body()

    def _attempts(self) -> Iterator[int]:
        retry_state = self._retry_state
        if retry_state.before_loop is not None and self._are_cleared():
            retry_state.close_loop(keeps_scale=False)  # a loop that was left early starts over
        was_left = retry_state.before_loop is not None
        retry_state.before_loop = retry_state.before_loop or (retry_state.backed_off,)
        for each in self._all:
            each.is_exhausted = False
        with self._moving_gradients():
            self._match_scale()
        self._restore = self._save()
        attempt = 0
        for attempt in self._retrier.runs(self._check_body, self._put_back):
            retry_state.in_loop = True
            yield attempt
        if self._retrier.is_exhausted:
            retry_state.close_loop(keeps_scale=False)
            for each in self._all:
                each.is_exhausted = True
        elif attempt or not was_left:  # else the lower scale is that of a loop that was left early
            retry_state.close_loop(keeps_scale=True)

    def _check_body(self) -> list[FoundInf]:
        """The flags of each optimizer's gradients, once the body has run."""
        if not self._retry_state.losses:
            raise CallOrderError(
                "the loop over attempts() scaled no loss: call scaler.scale(loss).backward() in it"
            )
        found_infs = self._found_infs()  # before _end_body(), which changes the state in use
        self._end_body()
        if not found_infs:
            raise CallOrderError(
                "the loop over attempts() left no gradients in the optimizers' parameters: "
                "call scaler.scale(loss).backward() in it. Gradients that are reduced only after "
                "the loop, as with FSDP2's set_requires_gradient_sync(False), cannot be repeated"
            )
        return found_infs

    def _put_back(self) -> bool:
        """Put back the gradients from before the body, multiplied up or down to the next scale.

        Returns False if these were not finite themselves.
        """
        is_first = not self._watches  # set below, by the first repetition
        with self._moving_gradients():
            self._restore()
            if is_first and self._retrier.overflowed(self._found_infs()):
                return False
            self._match_scale()
        self._watches = [self._operations.watch(each.optimizer) for each in self._all]
        return True

    def _are_cleared(self) -> bool:
        """Whether the user has cleared all gradients: each is None or zero."""
        norms = (self._operations.total_norm(each.optimizer, math.inf) for each in self._all)
        return all(float(norm) == 0 for norm in norms)

    def _is_untouched(self) -> bool:
        """Whether the body has changed no gradient since the latest ``_put_back``."""
        return bool(self._watches) and all(is_untouched() for is_untouched in self._watches)

    def _end_body(self) -> None:
        self._retry_state.losses, self._retry_state.in_loop = None, False

    def _found_infs(self) -> list[FoundInf]:
        """The flags of each optimizer that has gradients."""
        return [found for each in self._all if (found := self._check(each))]

    @contextmanager
    def _moving_gradients(self) -> Iterator[None]:
        """A context in which an interrupt leaves the gradients' state unknown."""
        try:
            yield
        except BaseException:
            for each in self._all:
                each.interrupt()
            raise

    def _match_scale(self) -> None:
        """Multiply the gradients by the ratio of the next scale to the one they were made with."""
        state = self._retry_state.backed_off
        for each in self._all:
            if each.attempt_state is not state:
                own = self._retrier.state()
                ratio = (state or own).scale / (each.attempt_state or own).scale
                self._operations.multiply_gradients_(each.optimizer, ratio)
                each.attempt_state = state

    def _save(self) -> Callable[[], None]:
        """Copy gradients, buffers and random states; the callable puts them back."""
        attempt_state = [each.attempt_state for each in self._all]
        optimizers = [each.optimizer for each in self._all]
        restorers = [
            *map(self._operations.save_gradients, optimizers),
            *map(self._operations.save_random_state, optimizers),
            self._operations.save_values(self._buffers),
        ]

        def restore() -> None:
            for put_back in restorers:
                put_back()
            for each, state in zip(self._all, attempt_state, strict=True):
                each.attempt_state = state

        return restore
