"""A scaler that is called, saved and loaded as ``torch.amp.GradScaler`` is."""

from __future__ import annotations

import dataclasses
import warnings
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from gradscaler import checkpoint
from gradscaler._eager.operations import FoundInf, Optimizer, Tensor
from gradscaler._eager.record import OptimizerRecord, Records, Stage, owner_of
from gradscaler._eager.scaler import EagerScaler, OptimizerT, TensorT
from gradscaler._torch_like.fused import (
    may_raise_after_its_kernel,
    step_with,
    takes_grad_scaler,
)
from gradscaler._torch_like.operations import TorchLikeOperations
from gradscaler.checkpoint._formats import TORCH_KEYS, read_leaves, read_torch, write_leaves
from gradscaler.checkpoint._state_dicts import state_values
from gradscaler.errors import CallOrderError, ParameterError
from gradscaler.policies import AmaxScale, DynamicScale, FixedScale, Policy, Rule, State, _checks
from gradscaler.policies._spelling import check_alone, check_policy

_dynamic_scale = lru_cache(typed=True)(DynamicScale)  # checking takes longest of all in a scaler


class TorchLikeScaler(EagerScaler[TensorT, OptimizerT]):
    """An eager scaler with the methods and private names of ``torch.amp.GradScaler``.

    The private names are those that the frameworks' own code and their users' subclasses reach
    for.
    """

    _operations: ClassVar[TorchLikeOperations]
    _device: Any  # the type of device that the user named, or None

    def __init__(
        self,
        init_scale: float,
        growth_factor: float,
        backoff_factor: float,
        growth_interval: int,
        enabled: bool,
        policy: Policy | None,
        allow_fp16_gradients: bool,
        max_retries: int,
    ) -> None:
        self._allow_fp16_gradients = allow_fp16_gradients
        given = (init_scale, growth_factor, backoff_factor, growth_interval)
        if policy is None:
            plain = all(isinstance(value, (int, float)) for value in given)
            policy = (_dynamic_scale if plain else DynamicScale)(*given)
        else:
            check_alone(
                policy,
                (2.0**16, 2.0, 0.5, 2000),
                init_scale=init_scale,
                growth_factor=growth_factor,
                backoff_factor=backoff_factor,
                growth_interval=growth_interval,
            )
            check_policy(policy)
        super().__init__(policy, enabled, max_retries)

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

    # State.

    def state_dict(self) -> dict[str, Any]:
        """The scale, the rule's three parameters and the count of finite steps.

        The keys and types are torch's: ``scale``, ``growth_factor``, ``backoff_factor`` (float),
        ``growth_interval``, ``_growth_tracker`` (int). A policy with a hysteresis adds
        ``_nonfinite_steps``. An ``AmaxScale`` adds that, ``_peak`` and ``_reach``, and a policy of
        your own adds it and the fields of its state after the third in the same way; torch ignores
        them. Under a fixed scale both factors are 1.0. Empty if scaling is disabled. Call it after
        ``update()``.
        """
        if not self._enabled:
            return {}
        state = self._host_state()
        values = (
            float(state.scale),
            self.get_growth_factor(),
            self.get_backoff_factor(),
            self.get_growth_interval(),
            int(state.finite_steps),
        )
        state_dict: dict[str, Any] = dict(zip(TORCH_KEYS, values, strict=True))
        if not isinstance(self._policy, Rule) or getattr(self._policy, "hysteresis", 1) > 1:
            state_dict["_nonfinite_steps"] = int(state.nonfinite_steps)
        return {**state_dict, **write_leaves(state)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the scale, the rule's parameters and the count from a state dict, torch's own too.

        All else stays as the policy has it, such as bounds and hysteresis. A policy of your own
        stays as it is. The state dict of another framework's scaler (see
        :mod:`gradscaler.checkpoint`) brings its whole rule. Nothing changes if it raises; nothing
        happens if scaling is disabled.

        Raises:
            RuntimeError: the dict is empty, as one saved with scaling disabled is.
            KeyError: a key is missing.
            TypeError, ValueError: a value cannot be what its key says; the message names it.
        """
        if not self._enabled:
            return
        if checkpoint.detect(state_dict) in (None, "torch"):
            values = {**state_dict, **state_values(state_dict, TORCH_KEYS)}
            fixed = isinstance(self._policy, FixedScale)
            policy, counts = read_torch(values, DynamicScale() if fixed else self._policy)
            state = read_leaves(policy, counts, values)
        else:
            policy, state = checkpoint.read(state_dict)
        self._policy = policy
        self._initial_state = state
        self._forget_next_state()
        if self._state is not None:
            self._state = self._operations.assign(self._state, state)

    # The private names.

    @property
    def _scale(self) -> Tensor | None:
        return self._state and self._state.scale

    @_scale.setter
    def _scale(self, scale: Tensor | None) -> None:
        self._forget_next_state()
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
        self._records = Records(self._record_type)
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
        deciders = self._deciders(optimizer)
        scale = self._in_use(self._placed_state("step")).scale if record.is_scaled else None
        self._settle(record, deciders, self._check(optimizer), scale)
        self._keep(record)
        return dict(record.found_inf or {})

    def _maybe_opt_step(
        self, optimizer: Optimizer, optimizer_state: Any, *args: Any, **kwargs: Any
    ) -> Any:
        return super()._step_if_finite(optimizer, optimizer_state, args, kwargs)

    # How torch does what the engine asks for.

    def _unscale_gradients(self, optimizer: Optimizer, inv_scale: Tensor) -> FoundInf:
        allow_fp16 = self._allow_fp16_gradients
        if getattr(self._unscale_grads_, "__func__", None) is TorchLikeScaler._unscale_grads_:
            return self._operations.unscale_(optimizer, inv_scale, None, allow_fp16)
        zero = self._operations.scalar(0.0, inv_scale.device)
        return self._unscale_grads_(optimizer, inv_scale.clone(), zero, allow_fp16)

    def _measure(self, record: OptimizerRecord, parts: Any, deciders: Any = None) -> Tensor | None:
        return super()._measure(record, parts, deciders) if self._unscales_plainly() else None

    def _unscales_plainly(self) -> bool:
        """Whether nothing replaces how gradients are unscaled; it may reduce flags, for example."""
        return (
            self._unscale_is_own()
            and getattr(self._unscale_grads_, "__func__", None) is TorchLikeScaler._unscale_grads_
        )

    def _unscale_grads_(
        self,
        optimizer: Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool | None = None,
    ) -> dict[Any, Tensor]:
        if allow_fp16 is None:
            allow_fp16 = self._allow_fp16_gradients
        return self._operations.unscale_(optimizer, inv_scale, found_inf, allow_fp16)

    def _check(self, optimizer: Optimizer) -> FoundInf:
        """The flags of gradients that stay scaled."""
        device = self._placed_state("step").scale.device
        one = self._operations.scalar(1.0, device)
        if self._unscales_plainly():
            return self._operations.check(optimizer, one)
        return self._unscale_grads_(optimizer, one, self._operations.scalar(0.0, device), True)

    def _set_scale(self, new_scale: Any) -> None:
        scale = self._placed_state("update").scale
        if self._operations.is_tensor(new_scale):
            device = self._device or scale.device.type
            if new_scale.device.type != device or new_scale.numel() != 1 or new_scale.requires_grad:
                raise ParameterError(
                    f"new_scale must be a number, or a tensor of one element on {device} with "
                    f"requires_grad=False, got {new_scale!r}"
                )
            new_scale = new_scale.item()
        lowest = getattr(self._policy, "min_scale", _checks.SMALLEST_SCALE)
        highest = getattr(self._policy, "max_scale", _checks.LARGEST_SCALE)
        scale.fill_(_checks.loss_scale("new_scale", new_scale, lowest, highest))

    def _place(self, device: Any) -> State:
        self._lazy_init_scale_growth_tracker(device)
        return self._placed_state("scale")

    def _step_if_finite(
        self,
        optimizer: Optimizer,
        record: OptimizerRecord,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if record.clip_coefficient is not None and not self._operations.any_set(
            record.found_inf or {}
        ):
            self._apply_pending(record)  # here, because subclasses replace _maybe_opt_step
        return self._maybe_opt_step(optimizer, record, *args, **kwargs)

    def _step_or_skip(
        self,
        optimizer: Optimizer,
        record: OptimizerRecord,
        state: State,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            return super()._step_or_skip(optimizer, record, state, args, kwargs)
        if takes_grad_scaler(optimizer.step):
            warnings.warn(
                "GradScaler is going to stop passing itself as a keyword argument, grad_scaler=: "
                "let the optimizer read its attributes grad_scale and found_inf",
                FutureWarning,
                stacklevel=3,
            )
            in_force, self._state = self._state, state  # which it asks for the scale
            try:
                result = record.apply(optimizer.step, *args, **kwargs, grad_scaler=self)
            finally:
                self._state = in_force
            record = self._record(optimizer)
            record.scale = state.scale.clone()
            self._conclude(optimizer, record)
            return result
        if owner_of(optimizer) is not optimizer:  # its attributes may not be those that are read
            return super()._step_or_skip(optimizer, record, state, args, kwargs)
        if record.stage is Stage.SCALED:
            self._check_inf_per_device(optimizer)
            record = self._record(optimizer)
        if self._operations.on_host(state.scale):
            record.overflowed = self._operations.any_set(record.found_inf or {})
        if record.overflowed and record.stage is Stage.MEASURED:
            self.unscale_(optimizer)  # for the optimizer will skip, and leave them scaled
            record.clip_coefficient = None
        if record.is_scaled:
            grad_scale = record.scale = state.scale.clone()
            if record.clip_coefficient is not None:
                grad_scale = grad_scale / record.clip_coefficient
            if hasattr(optimizer, "grad_scale"):
                grad_scale = grad_scale * optimizer.grad_scale
        else:
            grad_scale = getattr(optimizer, "grad_scale", None)
        found_inf = record.found_inf
        is_finite = record.overflowed is False
        if not found_inf or (
            not is_finite
            and self._operations.first_step_must_be_finite(optimizer)
            and self._operations.any_set(found_inf)
        ):
            if hasattr(optimizer, "grad_scale"):
                del optimizer.grad_scale  # which is for one step alone
            self._conclude(optimizer, record)
            return None
        if not record.is_scaled:
            self._apply_pending(record)
        flag = None
        if not (is_finite and self._operations.needs_no_unset_flag(optimizer)):
            flag = self._operations.combine([found_inf], state.scale.device)
        try:
            result = step_with(optimizer, grad_scale, flag, record, args, kwargs)
            self._conclude(optimizer, record)
        except BaseException as error:
            if record.result:
                record.stage = Stage.STEPPED
            elif not isinstance(error, Exception) or may_raise_after_its_kernel(optimizer):
                self._note_interrupt(record, error)
            raise
        return result

    # Shared.

    def _state_on(self, device: Any) -> State:
        return self._state or self._operations.place(self._initial_state, device)

    def _change_policy(self, **changes: Any) -> None:
        if not isinstance(self._policy, (DynamicScale, AmaxScale)):
            raise TypeError(f"{self._policy!r} has no {', '.join(changes)} to set")
        self._policy = dataclasses.replace(self._policy, **changes)
