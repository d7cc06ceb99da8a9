"""A loop whose body is repeated at a backed-off scale while its gradients overflow."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from gradscaler._eager.closure import Closures
from gradscaler._eager.operations import FoundInf, Operations, Tensor
from gradscaler._eager.record import OptimizerRecord
from gradscaler.errors import CallOrderError
from gradscaler.policies import Policy, State


@dataclass
class AttemptLoop:
    """One loop over ``scaler.attempts(...)``.

    The body adds its gradients to those that are there, which stay scaled. So these are copied
    before, and multiplied by the ratio of the scales when they are put back.

    Attributes:
        records: those of the optimizers whose gradients the body makes, each once.
        buffers: further tensors that a repetition puts back.
        max_retries: how often a body whose gradients overflow is repeated.
        operations: the framework's.
        closures: the scaler's.
        state: returns the scaler's, once a loss was scaled.
        policy: what backs off; None if the scale does not move.
        check: what all that decide about an optimizer together find in its gradients, which stay
            as they are.
    """

    records: list[OptimizerRecord]
    buffers: list[Tensor]
    max_retries: int
    operations: Operations
    closures: Closures
    state: Callable[[], State]
    policy: Policy | None
    check: Callable[[OptimizerRecord], FoundInf]
    _watches: list[Callable[[], bool]] = field(default_factory=list)

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
            if not self.closures.losses or self._is_untouched():
                self.closures.close_loop(keeps_scale=False)
            raise
        finally:
            self._end_body()

    def _attempts(self) -> Iterator[int]:
        closures = self.closures
        if closures.open_loop is not None and self._is_cleared():
            closures.close_loop(keeps_scale=False)  # one that was left early starts over
        was_left = closures.open_loop is not None
        closures.open_loop = closures.open_loop or (closures.backed_off,)
        for record in self.records:
            record.is_exhausted = False
        with self._moving_gradients():
            self._match_scale()
        restore = self._save()
        for attempt in range(self.max_retries + 1):
            closures.losses, closures.in_loop = [], True
            yield attempt
            if not closures.losses:
                raise CallOrderError(
                    "the loop over attempts() scaled no loss: call "
                    "scaler.scale(loss).backward() in it"
                )
            found_infs = self._found_infs()
            self._end_body()
            if not found_infs:
                raise CallOrderError(
                    "the loop over attempts() left no gradients in the optimizers' parameters: "
                    "call scaler.scale(loss).backward() in it. Gradients that are reduced later, "
                    "as after FSDP2's set_requires_gradient_sync(False), cannot be repeated"
                )
            if not self._overflowed(found_infs):
                if attempt or not was_left:  # else nothing shows that the scale had to be lower
                    closures.close_loop(keeps_scale=True)
                return
            if attempt == self.max_retries or not closures.back_off(
                self.operations, self.policy, self.state(), found_infs
            ):
                break
            with self._moving_gradients():
                restore()
                if attempt == 0 and self._overflowed(self._found_infs()):  # no scale helps
                    break
                self._match_scale()
            self._watches = [self.operations.watch(record.optimizer) for record in self.records]
        closures.close_loop(keeps_scale=False)
        for record in self.records:
            record.is_exhausted = True

    def _is_cleared(self) -> bool:
        """Whether all gradients are gone or zero, as frameworks clear them."""
        norms = (self.operations.total_norm(r.optimizer, math.inf) for r in self.records)
        return all(float(norm) == 0 for norm in norms)

    def _is_untouched(self) -> bool:
        """Whether a repetition has left all gradients as it found them."""
        return bool(self._watches) and all(is_untouched() for is_untouched in self._watches)

    def _end_body(self) -> None:
        self.closures.losses, self.closures.in_loop = None, False

    def _gradients(self, record: OptimizerRecord) -> list[Tensor]:
        return self.operations.current_gradients(record.optimizer)

    def _found_infs(self) -> list[FoundInf]:
        """What was found in the gradients of each optimizer that has any."""
        return [found for record in self.records if (found := self.check(record))]

    def _overflowed(self, found_infs: list[FoundInf]) -> bool:
        return any(map(self.operations.any_set, found_infs))

    @contextmanager
    def _moving_gradients(self) -> Iterator[None]:
        """If this is interrupted, only some gradients may have moved."""
        try:
            yield
        except BaseException:
            for record in self.records:
                record.interrupt(self._gradients(record))
            raise

    def _match_scale(self) -> None:
        """Multiply the gradients as if they were made at the scale that comes next."""
        state = self.closures.backed_off
        for record in self.records:
            if record.made_with is not state:
                made_with, target = record.made_with or self.state(), state or self.state()
                ratio = target.scale / made_with.scale
                self.operations.multiply_gradients_(record.optimizer, ratio)
                record.made_with = state

    def _save(self) -> Callable[[], None]:
        """Copy what a repetition starts from; the callable puts it back."""
        made_with = [record.made_with for record in self.records]
        optimizers = [record.optimizer for record in self.records]
        restorers = [
            *map(self.operations.save_gradients, optimizers),
            *map(self.operations.save_random_state, optimizers),
            self.operations.save_values(self.buffers),
        ]

        def restore() -> None:
            for put_back in restorers:
                put_back()
            for record, state in zip(self.records, made_with, strict=True):
                record.made_with = state

        return restore
