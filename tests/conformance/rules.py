"""How the frameworks' own scalers move, where they differ from the presets."""

from __future__ import annotations

from functools import partial

import numpy as np

from gradscaler import DynamicScale, ScaleState

FREEZES = "growth freezes when the interval is lowered below the count"
SINKS = "the scale sinks towards 0"
TO_INF = "the scale grows to inf"


def torch(
    policy: DynamicScale, state: ScaleState, overflows: list[bool], to_inf: bool = False
) -> ScaleState:
    """PyTorch: it compares counts with ``==``. ``to_inf``: the scale may grow to inf."""
    scale, finite_steps, _ = state
    if any(overflows) or not np.isfinite(scale):
        return ScaleState(scale * np.float32(policy.backoff_factor), 0, 0)
    if finite_steps + 1 != policy.growth_interval:
        return ScaleState(scale, finite_steps + 1, 0)
    grown = scale * np.float32(policy.growth_factor)
    return ScaleState(grown if np.isfinite(grown) or to_inf else scale, 0, 0)


def paddle(policy: DynamicScale, state: ScaleState, overflows: list[bool]) -> ScaleState:
    """Paddle: the optimizer that was unscaled last decides for all."""
    scale, finite_steps, nonfinite_steps = state
    if overflows[-1] or not np.isfinite(scale):
        if nonfinite_steps + 1 == policy.hysteresis:
            return ScaleState(scale * np.float32(policy.backoff_factor), 0, 0)
        return ScaleState(scale, 0, nonfinite_steps + 1)
    if finite_steps + 1 == policy.growth_interval:
        return ScaleState(scale * np.float32(policy.growth_factor), 0, 0)
    return ScaleState(scale, finite_steps + 1, 0)


tensorplay = partial(torch, to_inf=True)
keras = partial(torch, to_inf=True)  # Keras 3 on PyTorch: it has no floor


def keras_by_xla(policy: DynamicScale, state: ScaleState, overflows: list[bool]) -> ScaleState:
    """Keras 3 on TensorFlow and JAX, which have no subnormal numbers."""
    state = keras(policy, state, overflows)
    return state._replace(scale=state.scale if state.scale >= 2.0**-126 else np.float32(0))


def flax(policy: DynamicScale, state: ScaleState, overflows: list[bool]) -> ScaleState:
    """flax: growth is clamped to the largest float32."""
    scale, finite_steps, _ = state
    if any(overflows):
        return ScaleState(max(scale * np.float32(0.5), np.float32(policy.min_scale)), 0, 0)
    if finite_steps + 1 == policy.growth_interval:
        return ScaleState(min(scale * np.float32(2), np.finfo(np.float32).max), 0, 0)
    return ScaleState(scale, finite_steps + 1, 0)


def jmp(
    policy: DynamicScale, state: ScaleState, overflows: list[bool], floor: float | None = None
) -> ScaleState:
    """jmp: the count goes back to 0 at each multiple of the period."""
    scale, finite_steps, _ = state
    if any(overflows):
        lowest = np.float32(policy.min_scale if floor is None else floor)
        return ScaleState(max(scale * np.float32(0.5), lowest), 0, 0)
    if finite_steps + 1 == policy.growth_interval:
        grown = scale * np.float32(2)
        scale = grown if np.isfinite(grown) else scale
    return ScaleState(scale, (finite_steps + 1) % policy.growth_interval, 0)


jmp_under_jit = partial(jmp, floor=1.0)  # it loses its floor wherever a tree is rebuilt


def mindspore_cell(policy: DynamicScale, state: ScaleState, overflows: list[bool]) -> ScaleState:
    """MindSpore's update cell: growth to inf."""
    scale, finite_steps, _ = state
    if any(overflows):
        return ScaleState(max(scale * np.float32(0.5), np.float32(1)), 0, 0)
    if finite_steps + 1 >= policy.growth_interval:
        return ScaleState(scale * np.float32(2), 0, 0)
    return ScaleState(scale, finite_steps + 1, 0)


def mindspore_manager(
    policy: DynamicScale, state: ScaleState, overflows: list[bool], largest: float = np.inf
) -> ScaleState:
    """MindSpore's manager: growth at each multiple of the window, and in float64."""
    scale, finite_steps = float(state.scale), state.finite_steps + 1
    if any(overflows):
        return ScaleState(max(scale / 2, 1.0), 0, 0)
    if finite_steps % policy.growth_interval == 0 and scale * 2 <= largest:
        scale *= 2
    return ScaleState(scale, finite_steps, 0)


# gradscaler's manager, whose window is MindSpore's.
mindspore_manager_in_float32 = partial(mindspore_manager, largest=float(np.finfo(np.float32).max))
