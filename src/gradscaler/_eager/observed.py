"""The interface of an eager scaler for its observers."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from gradscaler.outcome import StepOutcome
from gradscaler.policies import FixedScale, Policy, State

TensorT = TypeVar("TensorT")
OptimizerT = TypeVar("OptimizerT", bound=Any)


class ObservedScaler(Generic[TensorT, OptimizerT]):
    """A scaler as its observers see it.

    It is an object of its own, so that a subclass of the scaler may use any of these names. Each
    property is read at the moment it is asked for. Those that may wait for the device say so.
    """

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler

    @property
    def is_enabled(self) -> bool:
        """Whether losses are scaled at all."""
        return bool(self._scaler._enabled)

    @property
    def policy(self) -> Policy:
        """The rule by which the scale moves; a ``FixedScale`` if the scale does not move."""
        policy: Policy = self._scaler._policy
        return policy if self._scaler._scale_moves() else FixedScale(float(self.state.scale))

    @property
    def state(self) -> State:
        """The scale and its counters as host scalars; waits for the device."""
        state: State = self._scaler._host_state()
        return state

    def last_steps(self) -> list[tuple[OptimizerT, StepOutcome]]:
        """Each optimizer that has stepped through the scaler, with its latest step."""
        found: list[tuple[OptimizerT, StepOutcome]] = self._scaler._outcomes.all()
        return found

    def is_mixed(self, optimizer: OptimizerT) -> bool:
        """Whether a scaled loss has added to the optimizer's unscaled gradients."""
        return bool(self._scaler._iteration.find_or_make(optimizer).is_mixed)

    def total_norm(self, optimizer: OptimizerT) -> float:
        """The 2-norm of an optimizer's gradients as they are; waits for the device."""
        return float(self._scaler._operations.total_norm(optimizer, 2.0))
