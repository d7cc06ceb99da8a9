"""A step with a closure: an evaluation that overflows is repeated at a backed-off scale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gradscaler._eager.operations import FoundInf, Operations, Optimizer, Tensor
from gradscaler._eager.record import OptimizerRecord, Stage, owner_of
from gradscaler.errors import CallOrderError
from gradscaler.outcome import Reason
from gradscaler.policies import Policy, State

DEFAULT_MAX_RETRIES = 16
"""From the usual first scale, 2**16, this many halvings reach 1."""


class Closures:
    """What a scaler knows of closures and of loops over ``attempts`` since the last ``update``.

    Attributes:
        backed_off: the state that evaluations use, if one overflowed. The scaler's own state
            waits for ``update``: other optimizers' gradients were made with its scale.
        open_loop: ``backed_off`` from before a loop that runs, or that was left early, in a tuple;
            else None.
        losses: while a closure or the body of such a loop runs, the losses that it scaled, each
            scaled and unscaled; else None.
        in_loop: whether it is the body of a loop that runs.
        attempted: the records of optimizers whose gradients such loops made, by the optimizer's
            id.
    """

    def __init__(self) -> None:
        self.backed_off: State | None = None
        self.open_loop: tuple[State | None] | None = None
        self.losses: list[tuple[Tensor, Tensor]] | None = None
        self.in_loop = False
        self.attempted: dict[int, OptimizerRecord] = {}

    def back_off(
        self,
        operations: Operations,
        policy: Policy | None,
        state: State,
        found_infs: list[FoundInf],
    ) -> bool:
        """Lower the scale that evaluations use; False where the policy will not.

        Args:
            operations: the framework's.
            policy: what backs off; None if the scale does not move.
            state: the scaler's own.
            found_infs: what the evaluation found.
        """
        if policy is None:
            return False
        state = operations.copy(self.backed_off or state)
        before = float(state.scale)
        for _ in range(getattr(policy, "hysteresis", 1)):
            state = operations.move(state, operations.next_state(policy, state, found_infs))
            if float(state.scale) < before:
                self.backed_off = state
                return True
        return False

    def close_loop(self, keeps_scale: bool) -> None:
        """End a loop; what overflows at every scale is not the scale's fault.

        Args:
            keeps_scale: whether the scale that the loop backed off to was low enough.
        """
        if self.open_loop is not None:
            if not keeps_scale:
                self.backed_off = self.open_loop[0]
            self.open_loop = None

    def refusal(self, call: str) -> CallOrderError:
        """The error that ``call`` raises in a closure, or in the body of a loop."""
        if self.in_loop:
            return CallOrderError(
                f"{call}() was called in a loop over attempts(), whose gradients may yet be "
                "repeated: call it after the loop"
            )
        return CallOrderError(
            f"{call}() was called in a closure: call scaler.step(optimizer, closure), "
            "scaler.attempts(optimizer) and scaler.update() outside of it"
        )

    def check_outside(self) -> None:
        """Refuse a loss that is scaled outside of loops, after one that was scaled in a loop.

        It would be scaled by the scaler's own scale, and the gradients that it is added to may
        have been made with a lower one.
        """
        over = (Stage.STEPPED, Stage.INTERRUPTED)
        if self.losses is None and any(
            record.stage not in over for record in self.attempted.values()
        ):
            raise CallOrderError(
                "scale() was called outside of a loop over attempts(), after such a loop and "
                "before step(): scale each loss of the iteration in a loop of its own, `for _ in "
                "scaler.attempts(optimizer):`, or call step(optimizer) first"
            )


class _RetriesExhaustedError(Exception):
    """Carries a skip out of ``optimizer.step``, through whatever called the closure."""

    def __init__(self, record: OptimizerRecord) -> None:
        super().__init__()
        self.record = record


@dataclass
class ClosureRun:
    """One ``optimizer.step(closure)`` whose evaluations are unscaled and finite.

    Attributes:
        optimizer: the optimizer to step.
        closure: the user's; it makes scaled gradients, and returns the loss.
        max_retries: how often an evaluation that overflows is repeated.
        operations: the framework's.
        records: the scaler's, by the optimizer's id.
        closures: the scaler's.
        state: returns the scaler's, once a loss was scaled.
        policy: what backs off; None if the scale does not move.
        unscale: unscales the gradients of an optimizer, and keeps its record.
        apply_pending: multiplies the gradients by what a record says.
        is_anywhere: whether a flag is True on any process that decides with this one.
    """

    optimizer: Optimizer
    closure: Callable[[], Any]
    max_retries: int
    operations: Operations
    records: dict[int, OptimizerRecord]
    closures: Closures
    state: Callable[[], State]
    policy: Policy | None
    unscale: Callable[[Optimizer], None]
    apply_pending: Callable[[OptimizerRecord], None]
    is_anywhere: Callable[[bool], bool]

    def step(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, OptimizerRecord, Reason | None]:
        """Step the optimizer, or skip.

        The first evaluation is made before ``optimizer.step``, so most skips never enter it. It
        serves as the optimizer's first if the optimizer has changed neither parameters nor
        gradients before.
        An optimizer may evaluate repeatedly: if a later evaluation uses up its retries, the step is
        rolled back. If anything else raises, all is as before.

        Returns:
            What ``optimizer.step`` returned, the record of the last evaluation, and the reason of
            a skip that found_inf does not tell.
        """
        backed_off = self.closures.backed_off
        key = id(owner_of(self.optimizer))
        record_before = self.records.get(key)
        restore: Callable[[], None] | None = None
        try:
            loss, record = self._evaluate()
            if not record.found_inf:
                return None, record, None
            restore = self.operations.snapshot(self.optimizer)
            is_untouched = self.operations.watch(self.optimizer)
            first = [loss]

            def evaluate() -> Any:
                nonlocal record
                if first and not self.is_anywhere(not is_untouched()):
                    return first.pop()
                first.clear()  # SAM, for one, has moved the parameters
                loss, record = self._evaluate()
                return loss

            result = self.optimizer.step(evaluate, *args, **kwargs)
            record.stage = Stage.STEPPED  # before this line an interrupt undoes the step
        except _RetriesExhaustedError as exhausted:
            if restore is not None:
                restore()
            return None, exhausted.record, "retries_exhausted"
        except BaseException:
            if restore is not None:
                restore()
            self.records.pop(key, None)
            if record_before is not None:
                self.records[key] = record_before
            self.closures.backed_off = backed_off
            self.closures.losses = None  # an interrupt may have come before it was
            raise
        return result, record, None

    def _evaluate(self) -> tuple[Any, OptimizerRecord]:
        """The unscaled loss of an evaluation that left finite, unscaled gradients.

        What overflows at every scale is not the scale's fault, and ``update`` backs off once.
        """
        backed_off = self.closures.backed_off
        for retries_left in reversed(range(self.max_retries + 1)):
            loss, record = self._evaluate_once()
            if not (record.found_inf and self.operations.any_set(record.found_inf)):
                self.apply_pending(record)
                return loss, record
            if retries_left == 0 or not self.closures.back_off(
                self.operations, self.policy, self.state(), [record.found_inf]
            ):
                break
            self.operations.clear_gradients(self.optimizer)
        self.closures.backed_off = backed_off
        raise _RetriesExhaustedError(record)

    def _evaluate_once(self) -> tuple[Any, OptimizerRecord]:
        """The unscaled loss, and the record of gradients that are unscaled."""
        key = id(owner_of(self.optimizer))
        self.records.pop(key, None)
        try:
            self.closures.losses = []
            with self.operations.enable_grad():
                loss = self.closure()
            if not self.closures.losses:
                raise CallOrderError(
                    "the closure scaled no loss: call scaler.scale(loss).backward() in it"
                )
            if key not in self.records:  # unless the closure unscaled, to clip
                self.unscale(self.optimizer)
        finally:
            losses, self.closures.losses = self.closures.losses, None
        unscaled = [outputs for scaled, outputs in losses or () if scaled is loss]
        return (unscaled[0] if unscaled else loss), self.records[key]
