"""The outcome of the latest step of each optimizer."""

from __future__ import annotations

from collections.abc import Callable

from gradscaler._eager.gradients import owner_of
from gradscaler._eager.operations import Optimizer
from gradscaler._eager.references import reference
from gradscaler.outcome import StepOutcome


class Outcomes:
    """The latest outcome of each optimizer that is still alive, whether hashable or not."""

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[Callable[[], Optimizer | None], StepOutcome]] = {}

    def put(self, optimizer: Optimizer, outcome: StepOutcome) -> None:
        """Keep an outcome as long as the owner of the optimizer's parameters lives."""
        optimizer = owner_of(optimizer)
        key = id(optimizer)
        kept = self._by_id.get(key)
        alive = kept[0] if kept and kept[0]() is optimizer else self._reference(optimizer)
        self._by_id[key] = alive, outcome

    def get(self, optimizer: Optimizer) -> StepOutcome | None:
        """The optimizer's outcome, if there is one."""
        optimizer = owner_of(optimizer)
        alive, outcome = self._by_id.get(id(optimizer), (lambda: None, None))
        return outcome if alive() is optimizer else None

    def all(self) -> list[tuple[Optimizer, StepOutcome]]:
        """Each optimizer that is still alive, with its outcome."""
        kept = [(alive(), outcome) for alive, outcome in dict(self._by_id).values()]
        return [(optimizer, outcome) for optimizer, outcome in kept if optimizer is not None]

    def _reference(self, optimizer: Optimizer) -> Callable[[], Optimizer | None]:
        key, outcomes = id(optimizer), self._by_id  # not self: no optimizer keeps a scaler alive
        return reference(optimizer, lambda _: outcomes.pop(key, None))
