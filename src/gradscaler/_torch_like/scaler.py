"""A scaler that is called, saved and loaded as ``torch.amp.GradScaler`` is."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from functools import lru_cache
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

from gradscaler import checkpoint
from gradscaler._eager.operations import FoundInf, Optimizer, Tensor
from gradscaler._eager.record import OptimizerRecord, Stage
from gradscaler._eager.scaler import EagerScaler, OptimizerT, TensorT
from gradscaler._torch_like.spelling import TorchSpelling
from gradscaler.checkpoint.formats import TORCH_KEYS, read_torch
from gradscaler.checkpoint.state_dicts import state_values
from gradscaler.errors import ParameterError
from gradscaler.policies import DynamicScale, Policy, ScaleState, checks
from gradscaler.policies.spelling import check_alone, check_policy

_dynamic_scale = lru_cache(typed=True)(DynamicScale)  # checking takes longest of all in a scaler
_KNOWN_STEPS: WeakKeyDictionary[FunctionType, bool] = WeakKeyDictionary()


class TorchLikeScaler(TorchSpelling[TensorT, OptimizerT]):
    """An eager scaler with the methods and private names of ``torch.amp.GradScaler``."""

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

    # State.

    def state_dict(self) -> dict[str, Any]:
        """The scale, the rule's three parameters and the count of finite steps.

        The keys and types are torch's: ``scale``, ``growth_factor``, ``backoff_factor`` (float),
        ``growth_interval``, ``_growth_tracker`` (int). A policy with a hysteresis adds
        ``_nonfinite_steps``, which torch ignores. Under a fixed scale both factors are 1.0. Empty
        if scaling is disabled. Call it after ``update()``.
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
        if getattr(self._policy, "hysteresis", 1) > 1:
            state_dict["_nonfinite_steps"] = int(state.nonfinite_steps)
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the scale, the rule's parameters and the count from a state dict, torch's own too.

        Bounds and hysteresis stay as the policy has them. The state dict of another framework's
        scaler (see :mod:`gradscaler.checkpoint`) brings its whole rule. Nothing changes if it
        raises; nothing happens if scaling is disabled.

        Raises:
            RuntimeError: the dict is empty, as one saved with scaling disabled is.
            KeyError: a key is missing.
            TypeError, ValueError: a value cannot be what its key says; the message names it.
        """
        if not self._enabled:
            return
        if checkpoint.detect(state_dict) in (None, "torch"):
            values = {**state_dict, **state_values(state_dict, TORCH_KEYS)}
            own = self._policy if isinstance(self._policy, DynamicScale) else DynamicScale()
            policy, state = read_torch(values, own)
        else:
            policy, state = checkpoint.read(state_dict)
        self._policy = policy
        self._initial_state = state
        self._closures.backed_off = None
        if self._state is not None:
            self._operations.assign(self._state, state)

    # How torch does what the engine asks for.

    def _unscale_and_check(self, optimizer: Optimizer, scale: Tensor) -> tuple[Any, FoundInf]:
        used, inv_scale = self._operations.inverse(scale)
        return used, self._unscale_grads_(
            optimizer,
            inv_scale,
            self._operations.scalar(0.0, scale.device),
            self._allow_fp16_gradients,
        )

    def _measure(self, record: OptimizerRecord) -> Tensor | None:
        return super()._measure(record) if self._unscales_plainly() else None

    def _unscales_plainly(self) -> bool:
        """Whether nothing replaces how gradients are unscaled; it may reduce flags, for example."""
        return (
            getattr(self.unscale_, "__func__", None) is EagerScaler.unscale_
            and getattr(self._unscale_grads_, "__func__", None) is TorchLikeScaler._unscale_grads_
        )

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[Any, Tensor]:
        return self._operations.unscale_(optimizer, inv_scale, found_inf, allow_fp16)

    def _check(self, optimizer: Optimizer) -> FoundInf:
        """The flags of gradients that stay scaled."""
        device = self._placed_state("step").scale.device
        one, zero = (self._operations.scalar(value, device) for value in (1.0, 0.0))
        if self._unscales_plainly():
            return self._operations.check(optimizer, one, zero)
        return self._unscale_grads_(optimizer, one, zero, True)

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
        lowest = getattr(self._policy, "min_scale", checks.SMALLEST_SCALE)
        highest = getattr(self._policy, "max_scale", checks.LARGEST_SCALE)
        scale.fill_(checks.loss_scale("new_scale", new_scale, lowest, highest))

    def _place(self, device: Any) -> ScaleState:
        self._lazy_init_scale_growth_tracker(device)
        return self._placed_state("scale")

    def _step_if_finite(
        self,
        optimizer: Optimizer,
        record: OptimizerRecord,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        found_inf = record.found_inf or {}
        if record.clip_coefficient is not None and not self._operations.any_set(found_inf):
            self._apply_pending(record)  # here, for subclasses replace _maybe_opt_step
        return self._maybe_opt_step(optimizer, record, *args, **kwargs)

    def _unscales_by_itself(self, optimizer: Optimizer) -> bool:
        return bool(getattr(optimizer, "_step_supports_amp_scaling", False))

    def _step_on_device(
        self,
        optimizer: Optimizer,
        record: OptimizerRecord,
        state: ScaleState,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if _takes_grad_scaler(optimizer.step):
            warnings.warn(
                "an optimizer whose step() takes grad_scaler= is handed the scaler for now; let it "
                "read its attributes grad_scale and found_inf instead, as torch asks",
                FutureWarning,
                stacklevel=3,
            )
            result = optimizer.step(*args, **kwargs, grad_scaler=self)
            record = self._record(optimizer)
            record.scale = state.scale.clone()
            self._conclude(optimizer, record)
            return result
        is_measured = record.stage is Stage.MEASURED
        if (
            is_measured
            and self._operations.on_host(state.scale)
            and self._operations.any_set(record.found_inf or {})
        ):
            self.unscale_(optimizer)  # for the optimizer will skip, and leave them scaled
            record.clip_coefficient = None
        if record.is_scaled:
            if not is_measured:
                self._check_inf_per_device(optimizer)
                record = self._record(optimizer)
            grad_scale = record.scale = state.scale.clone()
            if record.clip_coefficient is not None:
                grad_scale = grad_scale / record.clip_coefficient
            if hasattr(optimizer, "grad_scale"):
                grad_scale = grad_scale * optimizer.grad_scale
        else:
            grad_scale = getattr(optimizer, "grad_scale", None)
        found_inf = record.found_inf
        if not found_inf or (
            self._operations.first_step_must_be_finite(optimizer)
            and self._operations.any_set(found_inf)
        ):
            if hasattr(optimizer, "grad_scale"):
                del optimizer.grad_scale  # which is for one step alone
            self._conclude(optimizer, record)
            return None
        if not record.is_scaled:
            self._apply_pending(record)
        flag = self._operations.found_inf_for(optimizer, found_inf, state.scale.device)
        try:
            result = _step_with(optimizer, grad_scale, flag, args, kwargs)
            self._conclude(optimizer, record)
        except BaseException as error:
            if not isinstance(error, Exception) or _may_raise_after_its_kernel(optimizer):
                self._note_interrupt(record, error)
            raise
        return result


def _step_with(
    optimizer: Optimizer,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """``optimizer.step`` with the two attributes, which an interrupt does not leave behind."""
    try:
        optimizer.grad_scale = grad_scale
        optimizer.found_inf = found_inf
        result = optimizer.step(*args, **kwargs)
        del optimizer.grad_scale, optimizer.found_inf
    except BaseException:
        for name in ("grad_scale", "found_inf"):
            if hasattr(optimizer, name):
                delattr(optimizer, name)
        raise
    return result


def _may_raise_after_its_kernel(optimizer: Optimizer) -> bool:
    """Whether an Exception of ``step`` may come after a kernel unscaled gradients."""
    hooks = getattr(optimizer, "_optimizer_step_post_hooks", ())
    return bool(hooks) or len(optimizer.param_groups) > 1


def _takes_grad_scaler(step: Callable[..., Any]) -> bool:
    """Whether a step method has a parameter of that name; inspecting takes as long as a step."""
    function = getattr(step, "__func__", step)
    takes = _KNOWN_STEPS.get(function) if isinstance(function, FunctionType) else None
    if takes is None:
        takes = "grad_scaler" in inspect.signature(step).parameters
        if isinstance(function, FunctionType):
            _KNOWN_STEPS[function] = takes
    return takes
