"""The scale and its counters, read from a scaler of a traced framework."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from typing import Any

from gradscaler.diagnose._gradients.arrays import to_numpy
from gradscaler.policies import DynamicScale, FixedScale, Scalar


@dataclass(frozen=True)
class ScalerState:
    """The state of a scaler, in scalars that may be on a device and will not change."""

    scale: Scalar
    finite_steps: Scalar | None = None  # in a row; None if the scale is fixed
    finite: Scalar | None = None  # whether the latest gradients were finite, if the scaler knows
    applied: Scalar | None = None  # how many steps its optimizer took, if the scaler knows

    def was_finite(self, before: ScalerState, policy: Any) -> bool:
        """Whether the step since ``before`` had finite gradients; waits for the device.

        A fixed scale gives no evidence; the step is assumed to be finite. So is one in which the
        optimizer was not called, as with micro-batches.
        """
        if self.finite is not None:
            return bool(number_of(self.finite))
        if self.applied is not None and before.applied is not None:
            is_applied = number_of(self.applied) != number_of(before.applied)
            return is_applied or not self._was_called(before, policy)
        if self.finite_steps is None or before.finite_steps is None:
            return True
        scale, scale_before = number_of(self.scale), number_of(before.scale)
        growth_interval = getattr(policy, "growth_interval", getattr(policy, "period", 1))
        is_full = number_of(before.finite_steps) + 1 >= growth_interval
        is_at_largest = scale == scale_before and is_full
        return number_of(self.finite_steps) > 0 or scale > scale_before or is_at_largest

    def _was_called(self, before: ScalerState, policy: Any) -> bool:
        """Whether the optimizer was called in a step that it did not take: a skip leaves traces."""
        scale, count = number_of(self.scale), self.finite_steps
        if count is None or before.finite_steps is None or not hasattr(policy, "hysteresis"):
            return True
        if scale != number_of(before.scale) or number_of(count) != number_of(before.finite_steps):
            return True
        leaves_none = policy.hysteresis > 1 or scale <= policy.min_scale
        return number_of(count) == 0 and leaves_none

    def each_of(
        self, num_steps: int, after: ScalerState, backoff: float = 0.5
    ) -> list[ScalerState]:
        """The state after each of the steps since this one, of which only the last is known.

        The last skip is as long ago as the counter says. Others are taken to come right before it,
        and to lower the scale by the same factor, as while a scale settles. Waits for the device.
        """
        scale, last = number_of(self.scale), number_of(after.scale)
        ratio = last / scale if scale else 1.0
        counter = 0.0 if after.finite_steps is None else number_of(after.finite_steps)
        if after.applied is not None and self.applied is not None:
            skips = num_steps - int(number_of(after.applied) - number_of(self.applied))
        elif after.finite_steps is None or counter >= num_steps or last > scale:
            skips = 0
        else:
            skips = max(1, round(math.log(ratio, backoff))) if ratio else 1  # a scale of 1 stays
        skips = min(max(skips, 0), num_steps)
        end = num_steps - min(int(counter), num_steps - skips)
        found = []
        for step in range(1, num_steps + 1):
            skipped = min(max(step - (end - skips), 0), skips)
            own = scale * ratio ** (skipped / skips) if skips else scale
            is_last, is_finite = step == num_steps, not end - skips < step <= end
            found.append(replace(after, scale=last if is_last else own, finite=is_finite))
        return found


def state_of(scaler: object) -> ScalerState:
    """The state of a scaler for JAX, Keras, tf-keras or MindSpore; TypeError for anything else."""
    if isinstance(scaler, ScalerState):
        return scaler
    for part in _parts(scaler):
        for attribute, reader in _READERS.items():
            if hasattr(part, attribute):
                return reader(part)
    is_update_cell = hasattr(scaler, "get_loss_scale")
    advice = "; pass the train step that calls this update cell" if is_update_cell else ""
    raise TypeError(
        f"scaler must be one of gradscaler's, or an optax state that holds one, got {scaler!r} "
        f"({type(scaler).__name__}){advice}"
    )


def policy_of(scaler: object) -> Any:
    """The policy of a scaler; the scaler itself if it holds no policy."""
    for part in _parts(scaler):
        part = getattr(part, "scaler", part)
        part = getattr(part, "loss_scaling_manager", None) or part
        part = getattr(part, "observed", part)  # an eager scaler's
        if hasattr(part, "dynamic_growth_steps") and not hasattr(part, "policy"):  # Keras' own
            if not getattr(part, "dynamic", True):
                return FixedScale(part.initial_scale)
            rule = DynamicScale.keras if _is_of_keras_itself(part) else DynamicScale.tf_keras
            return rule(part.initial_scale, part.dynamic_growth_steps)
        return getattr(part, "policy", part)
    return scaler


def is_of_jax(part: object) -> bool:
    """Whether a part of a function's arguments is a scaler of flax's, of jmp's or of ours."""
    names = next((names for names in _SCALES if all(hasattr(part, name) for name in names)), None)
    return names is not None and is_dataclass(part)


def at_scale_1(scaler: Any) -> Any:
    """A scaler of JAX whose scale is 1, in its own dtype, so that a large scale is no cause."""
    if hasattr(scaler, "policy"):
        return replace(scaler, state=scaler.state._replace(scale=scaler.state.scale**0))
    name = "scale" if hasattr(scaler, "fin_steps") else "loss_scale"
    return replace(scaler, **{name: getattr(scaler, name) ** 0})


def number_of(scalar: Scalar) -> float:
    """A scalar of any framework, or the mean of an array, as a Python number."""
    if isinstance(scalar, (bool, int, float)):
        return float(scalar)
    values = to_numpy(scalar)
    return float(values.item() if values.size == 1 else values.mean())


def _parts(scaler: object) -> Iterator[Any]:
    """The scaler itself, or each part of an optax state that may hold one."""
    if isinstance(scaler, (tuple, list, Mapping)) and not hasattr(scaler, "grads_finite"):
        for item in scaler.values() if isinstance(scaler, Mapping) else scaler:
            yield from _parts(item)
    else:
        yield scaler


# The attributes by which scalers of JAX are known: ours, flax's, and jmp's.
_SCALES = ("policy", "state", "loss_scale"), ("scale", "fin_steps"), ("loss_scale", "adjust")


# Adding 0 copies a value that may change later, or that JAX may delete when it is donated.


def _of_optax(state: Any) -> ScalerState:
    return replace(state_of(state.scaler), finite=state.grads_finite + 0)


def _of_jax(scaler: Any) -> ScalerState:
    scale, finite_steps = scaler.state[:2]
    moves = hasattr(scaler.policy, "growth_interval")
    return ScalerState(scale + 0, finite_steps + 0 if moves else None)


def _of_keras(optimizer: Any) -> ScalerState:
    if _is_of_keras_itself(optimizer):
        scale = optimizer.dynamic_scale + 0 if optimizer.built else optimizer.initial_scale
        counter = optimizer.step_counter + 0 if optimizer.built else None
        return ScalerState(scale, counter, applied=_num_applied(optimizer))
    counter = optimizer.dynamic_counter
    is_keras_3 = hasattr(optimizer, "dynamic_scale")  # tf-keras counts skipped steps too
    applied = _num_applied(optimizer) if is_keras_3 else None
    return ScalerState(
        optimizer.loss_scale, None if counter is None else counter + 0, None, applied
    )


def _num_applied(optimizer: Any) -> Scalar:
    """How many steps Keras' inner optimizer took; its own number leaves accumulated ones out."""
    inner = optimizer.inner_optimizer
    return getattr(inner, "_iterations", inner.iterations) + 0


def _is_of_keras_itself(part: object) -> bool:
    """Whether a part is the wrapper of Keras 3, which ``gradscaler run`` leaves in place."""
    return hasattr(part, "dynamic_growth_steps") and not hasattr(part, "dynamic_counter")


def _of_mindspore(scaler: Any) -> ScalerState:
    """The state of a manager, or of a train step that may hold one."""
    manager = getattr(scaler, "loss_scaling_manager", scaler)
    last = getattr(manager, "last_overflow_iter", None)
    scale = scaler.scale_sense + 0 if hasattr(scaler, "scale_sense") else scaler.get_loss_scale()
    return ScalerState(scale, None if last is None else manager.cur_iter - 1 - last)


def _of_counter(scale: str, counter: str, scaler: object) -> ScalerState:
    """The state of a scaler with these attributes; a fixed scaler has no counter."""
    steps = getattr(scaler, counter, None)
    return ScalerState(getattr(scaler, scale) + 0, None if steps is None else steps + 0)


_READERS: dict[str, Callable[[Any], ScalerState]] = {
    "is_before": lambda _: ScalerState(1.0, finite=True),  # a loop without a scaler
    "grads_finite": _of_optax,
    "state": _of_jax,
    "fin_steps": partial(_of_counter, "scale", "fin_steps"),  # flax's
    "inner_optimizer": _of_keras,
    "scale_sense": _of_mindspore,
    "scale_value": partial(_of_counter, "scale_value", "counter"),
    "update_loss_scale": _of_mindspore,
    "adjust": partial(_of_counter, "loss_scale", "counter"),
}
"""A reader for each kind of scaler, by an attribute that no later kind has."""
