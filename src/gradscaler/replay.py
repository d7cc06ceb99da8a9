"""A step with a closure: an evaluation that overflows is repeated at a backed-off scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gradscaler.errors import CallOrderError

if TYPE_CHECKING:
    from gradscaler.engine import EagerScaler, OptimizerRecord
    from gradscaler.operations import Optimizer

DEFAULT_MAX_RETRIES = 16
"""From the usual first scale, 2**16, this many halvings reach 1."""


class _RetriesExhaustedError(Exception):
    """Carries a skip out of ``optimizer.step``, through whatever called the closure."""

    def __init__(self, record: OptimizerRecord) -> None:
        super().__init__()
        self.record = record


def step_with_closure(
    scaler: EagerScaler[Any, Any],
    optimizer: Optimizer,
    closure: Callable[[], Any],
    max_retries: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """``optimizer.step(closure)``, each evaluation unscaled and finite when the optimizer sees it.

    The first evaluation is made before ``optimizer.step``, so most skips never enter it. One that
    overflows for good later, in an optimizer that evaluates repeatedly, rolls the step back.
    """
    closure_state = scaler._closure_state
    record_before = scaler._records.get(id(optimizer))
    restore: Callable[[], None] | None = None
    try:
        loss, record = _evaluate(scaler, optimizer, closure, max_retries)
        if not record.found_inf:
            scaler._conclude(optimizer, record)
            return None
        restore = scaler._operations.snapshot(optimizer)
        first = [loss]

        def evaluate() -> Any:
            nonlocal record
            if first:
                return first.pop()
            loss, record = _evaluate(scaler, optimizer, closure, max_retries)
            return loss

        result = optimizer.step(evaluate, *args, **kwargs)
    except _RetriesExhaustedError as exhausted:
        if restore is not None:
            restore()
        scaler._conclude(optimizer, exhausted.record, "retries_exhausted")
        return None
    except BaseException:
        if restore is not None:
            restore()
        scaler._records.pop(id(optimizer), None)
        if record_before is not None:
            scaler._records[id(optimizer)] = record_before
        scaler._closure_state = closure_state
        raise
    scaler._conclude(optimizer, record)
    return result


def _evaluate(
    scaler: EagerScaler[Any, Any],
    optimizer: Optimizer,
    closure: Callable[[], Any],
    max_retries: int,
) -> tuple[Any, OptimizerRecord]:
    """The unscaled loss of an evaluation that left finite, unscaled gradients."""
    operations = scaler._operations
    for retries_left in reversed(range(max_retries + 1)):
        scaler._records.pop(id(optimizer), None)
        try:
            scaler._scaled_in_closure = []
            scaler._in_closure = True
            with operations.enable_grad():
                loss = closure()
            if not scaler._scaled_in_closure:
                raise CallOrderError(
                    "the closure scaled no loss: call scaler.scale(loss).backward() in it"
                )
            if id(optimizer) not in scaler._records:  # unless the closure unscaled, to clip
                scaler.unscale_(optimizer)
        finally:
            scaler._in_closure = False
            scaled_losses, scaler._scaled_in_closure = scaler._scaled_in_closure, []
        record = scaler._record(optimizer)
        if not (record.found_inf and operations.any_set(record.found_inf)):
            scaler._clip(record)
            unscaled = [outputs for scaled, outputs in scaled_losses if scaled is loss]
            return (unscaled[0] if unscaled else loss), record
        if retries_left == 0 or not _back_off(scaler, record):
            break
        operations.clear_gradients(optimizer)
    raise _RetriesExhaustedError(record)


def _back_off(scaler: EagerScaler[Any, Any], record: OptimizerRecord) -> bool:
    """Lower the scale that closures use until update(); False where the policy will not.

    The scaler's own state waits: other optimizers' gradients were made with its scale.
    """
    if not scaler._scale_moves():
        return False
    state = scaler._operations.copy(scaler._closure_state or scaler._placed_state("step"))
    before = float(state.scale)
    for _ in range(getattr(scaler._policy, "hysteresis", 1)):
        state = scaler._operations.advance(scaler._policy, state, [record.found_inf or {}])
        if float(state.scale) < before:
            scaler._closure_state = state
            return True
    return False
