"""The names of ``torch.amp.GradScaler``: getters, setters, and the private ones.

The private names are those that the frameworks' own code and their users' subclasses reach for.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from enum import Enum
from typing import Any, ClassVar

import numpy as np

from gradscaler._eager.operations import FoundInf, Optimizer, Tensor
from gradscaler._eager.record import FRAMEWORK_STAGES, OptimizerRecord
from gradscaler._eager.scaler import EagerScaler, OptimizerT, TensorT
from gradscaler._torch_like.operations import TorchLikeOperations
from gradscaler.errors import CallOrderError
from gradscaler.policies import DynamicScale, ScaleState


class TorchLikeRecord(OptimizerRecord):
    """A record that also reads and writes like the dict that torch keeps."""

    opt_state: ClassVar[type[Enum]]  # the framework's own

    def __getitem__(self, key: str) -> Any:
        if key == "stage":
            return self.opt_state[self.framework_stage]
        if key == "found_inf_per_device":
            return {} if self.found_inf is None else self.found_inf
        raise KeyError(key)

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "stage":
            self.stage = FRAMEWORK_STAGES[value.name]
        elif key == "found_inf_per_device":
            self.found_inf = value
        else:
            raise KeyError(key)


class TorchSpelling(EagerScaler[TensorT, OptimizerT]):
    """An eager scaler whose state goes by torch's names."""

    _operations: ClassVar[TorchLikeOperations]
    _device: Any  # the type of device that the user named, or None

    # Getters and setters.

    def is_enabled(self) -> bool:
        """Whether loss scaling is on; if not, every call passes through."""
        return self._enabled

    def get_scale(self) -> float:
        """The loss scale, or 1.0 if scaling is disabled. Waits for the device."""
        return float(self._host_state().scale) if self._enabled else 1.0

    def get_growth_factor(self) -> float:
        """What growth multiplies the scale by; 1.0 under a fixed scale."""
        return float(getattr(self._policy, "growth_factor", 1.0))

    def set_growth_factor(self, new_factor: float) -> None:
        """Grow by ``new_factor`` from now on.

        Raises:
            ValueError: it is not above 1.
            TypeError: it is not a number, or the scale is fixed.
        """
        self._change_policy(growth_factor=new_factor)

    def get_backoff_factor(self) -> float:
        """What a backoff multiplies the scale by; 1.0 under a fixed scale."""
        return float(getattr(self._policy, "backoff_factor", 1.0))

    def set_backoff_factor(self, new_factor: float) -> None:
        """Back off by ``new_factor`` from now on.

        Raises:
            ValueError: it is not between 0 and 1.
            TypeError: it is not a number, or the scale is fixed.
        """
        self._change_policy(backoff_factor=new_factor)

    def get_growth_interval(self) -> int:
        """Finite steps in a row before growth; 2000, which does nothing, under a fixed scale."""
        return int(getattr(self._policy, "growth_interval", 2000))

    def set_growth_interval(self, new_interval: int) -> None:
        """Grow after ``new_interval`` finite steps from now on, those already taken included.

        Raises:
            ValueError: it is below 1.
            TypeError: it is not an integer, or the scale is fixed.
        """
        self._change_policy(growth_interval=new_interval)

    # The private names.

    @property
    def _scale(self) -> Tensor | None:
        return self._state and self._state.scale

    @_scale.setter
    def _scale(self, scale: Tensor | None) -> None:
        self._closures.backed_off = None
        if scale is None:
            self._state = None
        else:
            self._state = self._state_on(scale.device)._replace(scale=scale)

    @property
    def _growth_tracker(self) -> Tensor | None:
        return self._state and self._state.finite_steps

    @_growth_tracker.setter
    def _growth_tracker(self, tracker: Tensor | None) -> None:
        if tracker is None:
            self._state = None
        else:
            self._state = self._state_on(tracker.device)._replace(finite_steps=tracker)

    @property
    def _init_scale(self) -> float:
        return float(self._initial_state.scale)

    @_init_scale.setter
    def _init_scale(self, scale: float) -> None:
        self._initial_state = self._initial_state._replace(scale=np.float32(scale))

    @property
    def _init_growth_tracker(self) -> int:
        return int(self._initial_state.finite_steps)

    @_init_growth_tracker.setter
    def _init_growth_tracker(self, tracker: int) -> None:
        self._initial_state = self._initial_state._replace(finite_steps=tracker)

    _growth_factor = property(get_growth_factor, set_growth_factor)
    _backoff_factor = property(get_backoff_factor, set_backoff_factor)
    _growth_interval = property(get_growth_interval, set_growth_interval)

    @property
    def _per_optimizer_states(self) -> Any:
        return self._records

    @_per_optimizer_states.setter
    def _per_optimizer_states(self, states: Any) -> None:
        self._records = defaultdict(self._record_type)
        for key, state in states.items():
            for name in ("stage", "found_inf_per_device"):
                self._per_optimizer_states[key][name] = state[name]

    def _lazy_init_scale_growth_tracker(self, dev: Any) -> None:
        if self._state is not None:
            raise CallOrderError("the scale was placed on a device before")
        self._state = self._operations.place(self._initial_state, dev)

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        state = self._placed_state(funcname)
        return state.scale, state.finite_steps

    def _get_scale_async(self) -> Tensor | None:
        return self._scale

    def _get_growth_tracker(self) -> int:
        return int(self._host_state().finite_steps) if self._enabled else 0

    def _found_inf_per_device(self, optimizer: Optimizer) -> dict[Any, Tensor]:
        return dict(self._record(optimizer).found_inf or {})

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[Any, Tensor]:
        self._placed_state("_check_inf_per_device")
        record = self._record(optimizer)
        record.found_inf = self._check(optimizer)
        self._records[id(optimizer)] = record
        return dict(record.found_inf)

    def _maybe_opt_step(
        self, optimizer: Optimizer, optimizer_state: Any, *args: Any, **kwargs: Any
    ) -> Any:
        return super()._step_if_finite(optimizer, optimizer_state, args, kwargs)

    # Shared.

    def _state_on(self, device: Any) -> ScaleState:
        return self._state or self._operations.place(self._initial_state, device)

    def _change_policy(self, **changes: Any) -> None:
        if not isinstance(self._policy, DynamicScale):
            raise TypeError(f"{self._policy!r} has no {', '.join(changes)} to set")
        self._policy = dataclasses.replace(self._policy, **changes)

    def _check(self, optimizer: Optimizer) -> FoundInf:
        """The flags of gradients that stay scaled."""
        raise NotImplementedError
