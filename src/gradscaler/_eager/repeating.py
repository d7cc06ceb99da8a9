"""A body that runs again at a lower scale while its gradients overflow.

``step`` with a closure and a loop over ``attempts`` are two ways to run one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gradscaler._eager.gradients import Gradients, Iteration
from gradscaler._eager.operations import FoundInf, Operations, Optimizer, Tensor
from gradscaler._eager.processes import Processes
from gradscaler._eager.stages import Stage
from gradscaler.errors import CallOrderError
from gradscaler.outcome import Reason
from gradscaler.policies import Policy, State

DEFAULT_MAX_RETRIES = 16
"""From the usual first scale, 2**16, this many halvings reach 1."""


class Repeating:
    """What a scaler knows of closures and of loops over ``attempts`` since the last ``update``.

    Attributes:
        backed_off: the state that bodies use, if one overflowed. The scaler's own state waits for
            ``update``: other optimizers' gradients were made with its scale.
        open_loop: ``backed_off`` from before a loop that runs, or that was left early, in a tuple;
            else None.
        losses: while a body runs, the losses that it scaled, each scaled and unscaled; else None.
        in_loop: whether it is the body of a loop.
    """

    def __init__(self) -> None:
        self.backed_off: State | None = None
        self.open_loop: tuple[State | None] | None = None
        self.losses: list[tuple[Tensor, Tensor]] | None = None
        self.in_loop = False

    @property
    def is_running(self) -> bool:
        """Whether a body runs."""
        return self.losses is not None

    @property
    def in_closure(self) -> bool:
        """Whether it is a closure."""
        return self.is_running and not self.in_loop

    def state_in_use(self, state: State) -> State:
        """The state that backward passes use, where ``state`` is the scaler's own."""
        return state if self.losses is None else self.backed_off or state

    def close_loop(self, keeps_scale: bool) -> None:
        """End a loop; what overflows at every scale is not the scale's fault.

        Args:
            keeps_scale: whether the scale that the loop backed off to was low enough.
        """
        if self.open_loop is not None:
            if not keeps_scale:
                self.backed_off = self.open_loop[0]
            self.open_loop = None

    def end_iteration(self) -> None:
        """Forget the scale that bodies used."""
        self.backed_off = self.open_loop = None

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
                f"{call}() was called in a loop over attempts(), whose gradients may yet be "
                "repeated: call it after the loop"
            )

    def must_scale_in_loop(self, known: list[Gradients]) -> None:
        """Raise CallOrderError for a loss that is scaled after a loop, and not in one.

        It would be scaled by the scaler's own scale, and the gradients that it is added to may
        have been made with a lower one.
        """
        if self.is_running:
            return
        if any(each.is_attempted and not each.is_over for each in known):
            raise CallOrderError(
                "scale() was called outside of a loop over attempts(), after such a loop and "
                "before step(): scale each loss of the iteration in a loop of its own, `for _ in "
                "scaler.attempts(optimizer):`, or call step(optimizer) first"
            )


class Repetition:
    """A body that runs again, at a lower scale, while its gradients overflow.

    Args:
        repeating: the scaler's.
        operations: the framework's.
        policy: what backs off; None if the scale does not move.
        state: returns the scaler's state, once a loss was scaled.
        max_retries: how often the body runs again.

    Attributes:
        is_exhausted: whether the gradients overflowed in each of the latest runs.
    """

    def __init__(
        self,
        repeating: Repeating,
        operations: Operations,
        policy: Policy | None,
        state: Callable[[], State],
        max_retries: int,
    ) -> None:
        self.repeating, self.operations = repeating, operations
        self.policy, self.state, self.max_retries = policy, state, max_retries
        self.is_exhausted = False

    def runs(
        self, check: Callable[[], list[FoundInf]], put_back: Callable[[], bool]
    ) -> Iterator[int]:
        """The number of each run, from 0; the body runs between one and the next.

        Args:
            check: what is found in the gradients that the body made, by optimizers.
            put_back: undoes what the body did; False if no lower scale will help.
        """
        self.is_exhausted = False
        for number in range(self.max_retries + 1):
            self.repeating.losses = []
            yield number
            found_infs = check()
            if not self.overflowed(found_infs):
                return
            if number == self.max_retries or not self._back_off(found_infs) or not put_back():
                break
        self.is_exhausted = True

    def overflowed(self, found_infs: list[FoundInf]) -> bool:
        """Whether a flag is set."""
        return any(map(self.operations.any_set, found_infs))

    def _back_off(self, found_infs: list[FoundInf]) -> bool:
        """Lower the scale that bodies use; False where the policy will not."""
        if self.policy is None:
            return False
        # A copy: the scaler's own moves in update(), once, whatever a body tried.
        state = self.operations.copy(self.repeating.backed_off or self.state())
        before = float(state.scale)
        # A hysteresis waits for overflows of several batches; one batch runs until the scale moves.
        for _ in range(getattr(self.policy, "hysteresis", 1)):
            state = self.operations.move(
                state, self.operations.next_state(self.policy, state, found_infs)
            )
            if float(state.scale) < before:
                self.repeating.backed_off = state
                return True
        return False


class _RetriesExhaustedError(Exception):
    """Carries a skip out of ``optimizer.step``, through whatever called the closure."""

    def __init__(self, gradients: Gradients) -> None:
        super().__init__()
        self.gradients = gradients


class ClosureStep:
    """One ``optimizer.step(closure)`` whose evaluations are unscaled and finite.

    Args:
        optimizer: the optimizer to step.
        closure: the user's; it makes scaled gradients, and returns the loss.
        key: of its gradients in the iteration.
        repetition: how an evaluation is repeated.
        iteration: the scaler's.
        processes: the scaler's.
        unscale: the scaler's ``unscale_``.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        key: int,
        repetition: Repetition,
        iteration: Iteration,
        processes: Processes,
        unscale: Callable[[Optimizer], None],
    ) -> None:
        self._optimizer, self._closure, self._unscale = optimizer, closure, unscale
        self._repetition, self._repeating = repetition, repetition.repeating
        self._operations = repetition.operations
        self._iteration, self._processes = iteration, processes
        self._key = key
        self._has_scaled = False

    def step(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Gradients, Reason | None]:
        """Step the optimizer, or skip.

        The first evaluation is made before ``optimizer.step``, so most skips never enter it. It
        serves as the optimizer's first if the optimizer has changed neither parameters nor
        gradients before.
        An optimizer may evaluate repeatedly: if a later evaluation uses up its retries, the step is
        rolled back. If anything else raises, all is as before.

        Returns:
            What ``optimizer.step`` returned, the gradients of the last evaluation, and the reason
            of a skip that found_inf does not tell.
        """
        backed_off = self._repeating.backed_off
        before = self._iteration.get(self._key)
        restore: Callable[[], None] | None = None
        try:
            loss, gradients = self._evaluate()
            if not gradients.found_inf:
                return None, gradients, None
            # After the first evaluation: one that overflows to the end copies nothing.
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
            gradients.stage = Stage.STEPPED  # before this line an interrupt undoes the step
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
            self._repeating.backed_off = backed_off
            self._repeating.losses = None  # an interrupt may have come before it was
            raise
        return result, gradients, None

    def _is_anywhere(self, flag: bool) -> bool:
        return self._processes.deciders_of(self._optimizer).is_anywhere(flag)

    def _evaluate(self) -> tuple[Any, Gradients]:
        """The unscaled loss of an evaluation that left finite, unscaled gradients.

        What overflows at every scale is not the scale's fault, and ``update`` backs off once.
        """
        backed_off, loss = self._repeating.backed_off, None
        for _ in self._repetition.runs(self._found_infs, self._clear_gradients):
            loss = self._run()
        gradients = self._iteration[self._key]
        if self._repetition.is_exhausted:
            self._repeating.backed_off = backed_off
            raise _RetriesExhaustedError(gradients)
        gradients.multiply()
        return loss, gradients

    def _run(self) -> Any:
        """Call the closure, and unscale the gradients that it made; the unscaled loss."""
        self._iteration.pop(self._key, None)  # the closure makes new gradients
        try:
            with self._operations.enable_grad():  # optimizers call closures without gradients
                loss = self._closure()
            if not self._repeating.losses:
                raise CallOrderError(
                    "the closure scaled no loss: call scaler.scale(loss).backward() in it"
                )
            if self._key not in self._iteration:  # unless the closure unscaled, to clip
                self._unscale(self._optimizer)
        finally:
            losses, self._repeating.losses = self._repeating.losses, None
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

    The body adds its gradients to those that are there, which stay scaled. So these are copied
    before, and multiplied by the ratio of the scales when they are put back.

    Args:
        gradients: those that the body makes, each optimizer's once.
        buffers: further tensors that a repetition puts back.
        repetition: how the body is repeated.
        check: what all that decide about an optimizer together find in its gradients, which stay
            as they are.
    """

    def __init__(
        self,
        gradients: list[Gradients],
        buffers: list[Tensor],
        repetition: Repetition,
        check: Callable[[Gradients], FoundInf],
    ) -> None:
        self._all, self._buffers, self._check = gradients, buffers, check
        self._repetition, self._repeating = repetition, repetition.repeating
        self._operations = repetition.operations
        self._watches: list[Callable[[], bool]] = []

    def run(self) -> Iterator[int]:
        """The number of each attempt, from 0; the body runs between one and the next.

        If the loop is left early, the gradients stay as they are, and so does what is known of
        them; ``update`` then keeps the scale that it backed off to only if ``step`` found them
        finite. If all attempts overflowed, ``update`` backs off once.
        """
        try:
            yield from self._attempts()
        except BaseException:
            # An interrupt may have come before the body has made gradients at the latest scale.
            if not self._repeating.losses or self._is_untouched():
                self._repeating.close_loop(keeps_scale=False)
            raise
        finally:
            self._end_body()

    def _attempts(self) -> Iterator[int]:
        repeating = self._repeating
        if repeating.open_loop is not None and self._are_cleared():
            repeating.close_loop(keeps_scale=False)  # one that was left early starts over
        was_left = repeating.open_loop is not None
        repeating.open_loop = repeating.open_loop or (repeating.backed_off,)
        for each in self._all:
            each.is_exhausted = False
        with self._moving_gradients():
            self._match_scale()
        self._restore = self._save()
        attempt = 0
        for attempt in self._repetition.runs(self._check_body, self._put_back):
            repeating.in_loop = True
            yield attempt
        if self._repetition.is_exhausted:
            repeating.close_loop(keeps_scale=False)
            for each in self._all:
                each.is_exhausted = True
        elif attempt or not was_left:  # else nothing shows that the scale had to be lower
            repeating.close_loop(keeps_scale=True)

    def _check_body(self) -> list[FoundInf]:
        """What the body's gradients hold; after this it has ended."""
        if not self._repeating.losses:
            raise CallOrderError(
                "the loop over attempts() scaled no loss: call scaler.scale(loss).backward() in it"
            )
        found_infs = self._found_infs()  # with the state that the body used
        self._end_body()
        if not found_infs:
            raise CallOrderError(
                "the loop over attempts() left no gradients in the optimizers' parameters: "
                "call scaler.scale(loss).backward() in it. Gradients that are reduced later, "
                "as after FSDP2's set_requires_gradient_sync(False), cannot be repeated"
            )
        return found_infs

    def _put_back(self) -> bool:
        """Put back what was before the body, as if it were made at the scale that comes next."""
        is_first = not self._watches  # which a repetition sets
        with self._moving_gradients():
            self._restore()
            if is_first and self._repetition.overflowed(self._found_infs()):
                return False  # they were not finite before
            self._match_scale()
        self._watches = [self._operations.watch(each.optimizer) for each in self._all]
        return True

    def _are_cleared(self) -> bool:
        """Whether all gradients are gone or zero, as frameworks clear them."""
        norms = (self._operations.total_norm(each.optimizer, math.inf) for each in self._all)
        return all(float(norm) == 0 for norm in norms)

    def _is_untouched(self) -> bool:
        """Whether a repetition has left all gradients as it found them."""
        return bool(self._watches) and all(is_untouched() for is_untouched in self._watches)

    def _end_body(self) -> None:
        self._repeating.losses, self._repeating.in_loop = None, False

    def _found_infs(self) -> list[FoundInf]:
        """What was found in the gradients of each optimizer that has any."""
        return [found for each in self._all if (found := self._check(each))]

    @contextmanager
    def _moving_gradients(self) -> Iterator[None]:
        """If this is interrupted, only some gradients may have moved."""
        try:
            yield
        except BaseException:
            for each in self._all:
                each.interrupt()
            raise

    def _match_scale(self) -> None:
        """Multiply the gradients as if they were made at the scale that comes next."""
        state = self._repeating.backed_off
        for each in self._all:
            if each.made_with is not state:
                own = self._repetition.state()
                ratio = (state or own).scale / (each.made_with or own).scale
                self._operations.multiply_gradients_(each.optimizer, ratio)
                each.made_with = state

    def _save(self) -> Callable[[], None]:
        """Copy what a repetition starts from; the callable puts it back."""
        made_with = [each.made_with for each in self._all]
        optimizers = [each.optimizer for each in self._all]
        restorers = [
            *map(self._operations.save_gradients, optimizers),
            *map(self._operations.save_random_state, optimizers),
            self._operations.save_values(self._buffers),
        ]

        def restore() -> None:
            for put_back in restorers:
                put_back()
            for each, state in zip(self._all, made_with, strict=True):
                each.made_with = state

        return restore
