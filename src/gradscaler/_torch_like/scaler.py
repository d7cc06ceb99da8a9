"""A scaler with the calls, the state dict and the private names of ``torch.amp.GradScaler``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from gradscaler._eager.iteration import Iteration, owner_of
from gradscaler._eager.operations import Device, FoundInf, Optimizer, Tensor
from gradscaler._eager.scaler import EagerScaler, OptimizerT, TensorT
from gradscaler._eager.stepping import Stepping
from gradscaler._formats import reading
from gradscaler._formats.layouts import TORCH_KEYS, read_leaves, read_torch, write_leaves
from gradscaler._formats.state_dicts import number_in, state_values
from gradscaler._torch_like.operations import TorchLikeOperations
from gradscaler._torch_like.stepping import (
    ByArgument,
    ByAttributes,
    ByReplacement,
    takes_grad_scaler,
)
from gradscaler.errors import ParameterError
from gradscaler.policies import (
    DynamicScale,
    Policy,
    State,
    _checks,
    counts_nonfinite_steps,
    is_fixed,
)
from gradscaler.policies._spelling import check_alone, check_policy, defaults_of, replaced

# Cached, because checking its arguments takes most of the time of constructing a scaler.
_dynamic_scale = lru_cache(typed=True)(DynamicScale)


class TorchLikeScaler(EagerScaler[TensorT, OptimizerT]):
    """An eager scaler with the methods and private names of ``torch.amp.GradScaler``.

    Its private names are those that the frameworks' own code and users' subclasses use.
    """

    _operations: ClassVar[TorchLikeOperations]
    _device: Device  # the type of device that the user named, or None

    def __init__(  # noqa: PLR0913, PLR0917 # PyTorch's, with ours
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
        # Only numbers go through the cache: a tensor among them would stay in it.
        if policy is None:
            plain = all(isinstance(value, (int, float)) for value in given)
            policy = (_dynamic_scale if plain else DynamicScale)(*given)
        else:
            check_alone(
                policy,
                defaults_of(DynamicScale.torch),
                init_scale=init_scale,
                growth_factor=growth_factor,
                backoff_factor=backoff_factor,
                growth_interval=growth_interval,
            )
            check_policy(policy)
            scale = number_in("scale", policy.init().scale)
            _checks.loss_scale("the scale of policy.init()", scale)
        super().__init__(policy, enabled, max_retries)

    # Getters and setters.

    def is_enabled(self) -> bool:
        """Whether loss scaling is on. If not, every call passes its arguments through."""
        return self._enabled

    def get_scale(self) -> float:
        """The loss scale, or 1.0 if scaling is disabled. Waits for the device.

        In a closure, and in a loop over ``attempts``, it is the scale that ``scale`` uses there.
        """
        return float(self._scale_in_use()) if self._enabled else 1.0

    def get_growth_factor(self) -> float:
        """The factor by which the scale grows; 1.0 under a fixed scale.

        Under a policy that lacks this parameter, it is torch's default, without effect.
        """
        return float(self._parameter("growth_factor", 1.0))

    def set_growth_factor(self, new_factor: float) -> None:
        """Grow by ``new_factor`` from now on.

        Raises:
            ValueError: ``new_factor`` is not above 1.
            TypeError: ``new_factor`` is not a number, or the policy has no such field to set.
        """
        self._change_policy(growth_factor=new_factor)

    def get_backoff_factor(self) -> float:
        """The factor by which the scale backs off; 1.0 under a fixed scale.

        Under a policy that lacks this parameter, it is torch's default, without effect.
        """
        return float(self._parameter("backoff_factor", 1.0))

    def set_backoff_factor(self, new_factor: float) -> None:
        """Back off by ``new_factor`` from now on.

        Raises:
            ValueError: ``new_factor`` is not between 0 and 1.
            TypeError: ``new_factor`` is not a number, or the policy has no such field to set.
        """
        self._change_policy(backoff_factor=new_factor)

    def get_growth_interval(self) -> int:
        """Finite steps in a row before growth; 2000, without effect, under a fixed scale.

        Under a policy that lacks this parameter, too, it is torch's default, without effect.
        """
        return int(self._parameter("growth_interval", 2000))

    def set_growth_interval(self, new_interval: int) -> None:
        """Grow after ``new_interval`` finite steps from now on. Those already taken count.

        Raises:
            ValueError: ``new_interval`` is below 1.
            TypeError: ``new_interval`` is not an integer, or the policy has no such field to set.
        """
        self._change_policy(growth_interval=new_interval)

    # State.

    def state_dict(self) -> dict[str, object]:
        """The scale, the rule's three parameters and the count of finite steps.

        The keys and types are torch's: ``scale``, ``growth_factor``, ``backoff_factor`` (float),
        ``growth_interval``, ``_growth_tracker`` (int). A policy with a hysteresis adds
        ``_nonfinite_steps``. An ``AmaxScale`` adds ``_nonfinite_steps``, ``_peak`` and ``_reach``.
        A policy of your own adds ``_nonfinite_steps``, and each field of its state after the third
        under its name with an underscore before it. torch ignores these additions.

        Under a fixed scale both factors are 1.0. A parameter that a policy of your own lacks has
        torch's default, so that a scaler which loads the dict without the policy goes on by torch's
        rule. The dict is empty if scaling is disabled. Call this after ``update()``.
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
        state_dict: dict[str, object] = dict(zip(TORCH_KEYS, values, strict=True))
        if counts_nonfinite_steps(self._policy):
            state_dict["_nonfinite_steps"] = int(state.nonfinite_steps)
        return {**state_dict, **write_leaves(state)}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Load the scale, the rule's parameters and the counts, also from torch's own state dict.

        The policy keeps its other parameters, such as bounds and hysteresis. A policy of your own
        keeps all its parameters. The state dict of another framework's scaler replaces the policy
        by that framework's rule (see :mod:`gradscaler.checkpoint`). If this raises, nothing
        changes. If scaling is disabled, it does nothing.

        Raises:
            RuntimeError: the dict is empty: it was saved with scaling disabled.
            KeyError: a key is missing.
            TypeError, ValueError: a value has the wrong type or is out of range; the message names
                its key.
        """
        if not self._enabled:
            return
        if reading.detect(state_dict) in (None, "torch"):
            values = {**state_dict, **state_values(state_dict, TORCH_KEYS)}
            fixed = is_fixed(self._policy)
            policy, counts = read_torch(values, DynamicScale() if fixed else self._policy)
            state = read_leaves(policy, counts, values)
        else:
            policy, state = reading.read(state_dict)
        self._policy = policy
        self._initial_state = state
        self._forget_next_state()
        if self._state is not None:
            self._state = self._operations.assign(self._state, state)

    # The private names.

    @property
    def _scale(self) -> Tensor | None:
        return None if self._state is None else self._scale_in_use()

    @_scale.setter
    def _scale(self, scale: Tensor | None) -> None:
        self._forget_next_state()  # an interrupted update() has decided it from another scale
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
        return self._iteration

    @_per_optimizer_states.setter
    def _per_optimizer_states(self, states: Any) -> None:
        loss = self._iteration.loss
        self._iteration = Iteration(self._new_gradients)
        self._iteration.loss = loss
        for key, state in states.items():
            for name in ("stage", "found_inf_per_device"):
                self._per_optimizer_states[key][name] = state[name]

    def _lazy_init_scale_growth_tracker(self, dev: Device) -> None:
        # Accelerate calls this when it loads a checkpoint, also in the middle of a training.
        if self._state is None:
            self._state = self._operations.place(self._initial_state, dev)

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        return self._scale_in_use(), self._state_in_force(funcname).finite_steps

    def _get_scale_async(self) -> Tensor | None:
        return self._scale

    def _get_growth_tracker(self) -> int:
        return int(self._host_state().finite_steps) if self._enabled else 0

    def _found_inf_per_device(self, optimizer: Optimizer) -> dict[Device, Tensor]:
        return dict(self._iteration.find_or_make(optimizer).found_inf or {})

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[Device, Tensor]:
        self._state_in_force("_check_inf_per_device")
        gradients = self._iteration.find_or_make(optimizer)
        gradient_scale = self._gradient_scale(gradients, "step")
        deciders = self._processes.deciders_of(optimizer)
        gradients.check(gradient_scale, self._unscaler(optimizer), deciders)
        self._iteration.record(gradients)
        return dict(gradients.found_inf or {})

    def _unscale_grads_(
        self,
        optimizer: Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool | None = None,
    ) -> dict[Device, Tensor]:
        if allow_fp16 is None:  # subclasses call this with torch's first three arguments
            allow_fp16 = self._allow_fp16_gradients
        return self._operations.unscale_(optimizer, inv_scale, found_inf, allow_fp16)

    def _maybe_opt_step(
        self, optimizer: Optimizer, optimizer_state: Any, *args: Any, **kwargs: Any
    ) -> Any:
        return optimizer_state.apply_if_finite(optimizer.step, args, kwargs)

    # Objects for the engine. Users replace three methods, in a subclass or by assigning to a
    # scaler. Only these functions look for that.

    def _unscaler(self, optimizer: Optimizer) -> OwnUnscaler | ReplacedUnscaler:
        if _is_own(self._unscale_grads_, TorchLikeScaler._unscale_grads_):
            allow_fp16 = self._allow_fp16_gradients
            return OwnUnscaler(self._operations, optimizer, allow_fp16, self.unscale_)
        return ReplacedUnscaler(
            self._unscale_grads_,
            self._operations,
            optimizer,
            self._allow_fp16_gradients,
            self._state_in_force("unscale_").scale.device,
        )

    def _stepping_of(self, optimizer: Optimizer) -> Stepping | None:
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            if takes_grad_scaler(optimizer.step):
                return ByArgument(self)
            if owner_of(optimizer) is optimizer:  # the kernel may not read a wrapper's attributes
                return ByAttributes(self, self._operations)
        if _is_own(self._maybe_opt_step, TorchLikeScaler._maybe_opt_step):
            return None
        return ByReplacement(self._maybe_opt_step)

    def _set_scale(self, new_scale: float | Tensor) -> None:
        scale = self._state_in_force("update").scale
        if self._operations.is_tensor(new_scale):
            device = self._device or scale.device.type
            if new_scale.device.type != device or new_scale.numel() != 1 or new_scale.requires_grad:
                raise ParameterError(
                    f"new_scale must be a number, or a tensor of one element on {device} with "
                    f"requires_grad=False, got {new_scale!r}"
                )
            new_scale = new_scale.item()
        # Between the policy's bounds: outside of them its next move would jump back.
        lowest = getattr(self._policy, "min_scale", _checks.SMALLEST_SCALE)
        highest = getattr(self._policy, "max_scale", _checks.LARGEST_SCALE)
        scale.fill_(_checks.loss_scale("new_scale", new_scale, lowest, highest))

    def _place(self, device: Device) -> State:
        self._lazy_init_scale_growth_tracker(device)
        return self._state_in_force("scale")

    # Helpers of the above.

    def _state_on(self, device: Device) -> State:
        return self._state or self._operations.place(self._initial_state, device)

    def _change_policy(self, **changes: Any) -> None:
        self._policy = replaced(self._policy, **changes)

    def _parameter(self, name: str, if_fixed: float) -> Any:
        """A parameter of the rule; torch's default if a moving policy lacks it."""
        default = if_fixed if is_fixed(self._policy) else getattr(DynamicScale, name)
        return getattr(self._policy, name, default)


class OwnUnscaler:
    """Unscales by the framework's operations.

    Args:
        operations: the framework's tensor operations.
        optimizer: the optimizer that owns the gradients.
        allow_fp16: whether to unscale float16 gradients; if False, they raise.
        unscale: the scaler's ``unscale_``, which a subclass may have replaced.
    """

    def __init__(
        self,
        operations: TorchLikeOperations,
        optimizer: Optimizer,
        allow_fp16: bool,
        unscale: Callable[[OptimizerT], None],
    ) -> None:
        self._operations, self._optimizer = operations, optimizer
        self._allow_fp16, self._unscale = allow_fp16, unscale

    @property
    def is_plain(self) -> bool:
        return _is_own(self._unscale, EagerScaler.unscale_)

    def unscale_(self, inverse: Tensor) -> FoundInf:
        return self._operations.unscale_(self._optimizer, inverse, None, self._allow_fp16)

    def check(self) -> FoundInf:
        return self._operations.check(self._optimizer)


class ReplacedUnscaler:
    """Unscales by the ``_unscale_grads_`` of a subclass or a user.

    Args:
        unscale_grads: that method.
        operations: the framework's tensor operations.
        optimizer: the optimizer that owns the gradients.
        allow_fp16: whether to unscale float16 gradients; if False, they raise.
        device: the device of the scale.
    """

    is_plain = False

    def __init__(
        self,
        unscale_grads: Callable[..., Mapping[Device, Tensor]],
        operations: TorchLikeOperations,
        optimizer: Optimizer,
        allow_fp16: bool,
        device: Device,
    ) -> None:
        self._unscale_grads, self._optimizer = unscale_grads, optimizer
        self._scalar, self._device = operations.scalar, device
        self._allow_fp16 = allow_fp16

    def unscale_(self, inverse: Tensor) -> FoundInf:
        zero = self._scalar(0.0, inverse.device)
        # A copy: the method may change it, and the next step uses the cached inverse.
        return self._unscale_grads(self._optimizer, inverse.clone(), zero, self._allow_fp16)

    def check(self) -> FoundInf:
        # Unscaling by 1 is the only way to check with a replaced method, and changes no gradient.
        one, zero = (self._scalar(value, self._device) for value in (1.0, 0.0))
        return self._unscale_grads(self._optimizer, one, zero, True)


def _is_own(method: object, own: object) -> bool:
    """Whether a scaler's method is ours: replaced neither in its class nor on the object."""
    return getattr(method, "__func__", None) is own
