"""The formats: what each framework's scaler saves, read and written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from gradscaler.checkpoint.state_dicts import count_in
from gradscaler.policies import DynamicScale, FixedScale, Rule, ScaleState, checks
from gradscaler.policies.presets import PADDLE
from gradscaler.policies.spelling import changed, spelled

Values = Mapping[str, Any]


class Layout(NamedTuple):
    """One way to lay a state out in a dict.

    Attributes:
        format: the format that this belongs to; some have one layout for scales that move and
            another for those that do not.
        keys: what the dict holds, all of it.
        read: the rule and the state in such a dict, whose values are Python numbers.
        write: the values for a rule of one of ``rules`` and a state, in the order of ``keys``.
        rules: the classes of rules that it can describe.
    """

    format: str
    keys: tuple[str, ...]
    read: Callable[[Values], tuple[Rule, ScaleState]]
    write: Callable[[Any, ScaleState], tuple[Any, ...]]
    rules: tuple[type[Rule], ...] = (DynamicScale,)


def _state(scale: float, *counts: tuple[str, Any]) -> ScaleState:
    """The scale and the counts, each with its key; those left out are 0."""
    checked = [count_in(key, count) for key, count in counts]
    return ScaleState(np.float32(scale), *checked, *[0] * (2 - len(checked)))


def _no_hysteresis(values: Values, key: str) -> None:
    """Refuse a count that gradscaler adds to a format which has no place for what it counts to."""
    if key in values:
        raise ValueError(
            f"{key} belongs to a rule with a hysteresis, which this state dict does not describe: "
            "write(policy, state, to) takes the rule itself"
        )


def _flag(key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{key} must be a bool, got {value!r}")
    return value


# torch and TensorPlay. Both factors are 1.0 where the scale does not move.

TORCH_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


def read_torch(values: Values, policy: DynamicScale) -> tuple[Rule, ScaleState]:
    """The rule and the state in ``values``; the bounds and the hysteresis are those of ``policy``.

    ``_nonfinite_steps`` may be missing.
    """
    scale = checks.loss_scale("scale", values["scale"])
    state = _state(
        scale,
        ("_growth_tracker", values["_growth_tracker"]),
        ("_nonfinite_steps", values.get("_nonfinite_steps", 0)),
    )
    if values["growth_factor"] == values["backoff_factor"] == 1.0:
        return FixedScale(scale), state
    parameters = {key: values[key] for key in TORCH_KEYS[:4]}
    return changed(policy, {"scale": "init_scale"}, **parameters), state


def _read_torch(values: Values) -> tuple[Rule, ScaleState]:
    _no_hysteresis(values, "_nonfinite_steps")
    return read_torch(values, DynamicScale())


def _write_torch(policy: Rule, state: ScaleState) -> tuple[Any, ...]:
    if isinstance(policy, FixedScale):
        return float(state.scale), 1.0, 1.0, 2000, 0
    factors = policy.growth_factor, policy.backoff_factor
    return float(state.scale), *factors, policy.growth_interval, int(state.finite_steps)


# Paddle.

PADDLE_KEYS = (
    "scale",
    "incr_ratio",
    "decr_ratio",
    "incr_every_n_steps",
    "decr_every_n_nan_or_inf",
    "incr_count",
    "decr_count",
    "use_dynamic_loss_scaling",
)


def read_paddle(values: Values, policy: DynamicScale) -> tuple[DynamicScale, ScaleState, bool]:
    """The rule, with the bounds of ``policy``; the state; and whether the scale moves."""
    scale = checks.loss_scale("scale", values["scale"])
    state = _state(scale, *((key, values[key]) for key in ("incr_count", "decr_count")))
    fields = {**PADDLE, "scale": "init_scale"}
    parameters = {key: values[key] for key in PADDLE_KEYS if key in fields}
    dynamic = _flag("use_dynamic_loss_scaling", values["use_dynamic_loss_scaling"])
    return changed(policy, fields, **parameters), state, dynamic


def _read_paddle(values: Values) -> tuple[Rule, ScaleState]:
    policy, state, dynamic = read_paddle(values, DynamicScale())
    return policy if dynamic else FixedScale(policy.init_scale), state


def write_paddle(policy: Rule, state: ScaleState) -> tuple[Any, ...]:
    """The values of ``PADDLE_KEYS``."""
    dynamic = policy if isinstance(policy, DynamicScale) else DynamicScale()
    return (
        np.array([state.scale], dtype=np.float32),
        dynamic.growth_factor,
        dynamic.backoff_factor,
        dynamic.growth_interval,
        dynamic.hysteresis,
        int(state.finite_steps),
        int(state.nonfinite_steps),
        dynamic is policy,
    )


# Keras 3, and gradscaler's own for it, which may be static: then its config says so.

_KERAS = ("dynamic_scale", "step_counter", "initial_scale", "dynamic_growth_steps")


def _read_keras(values: Values) -> tuple[Rule, ScaleState]:
    _no_hysteresis(values, "nonfinite_counter")
    state = _state(
        checks.loss_scale("dynamic_scale", values["dynamic_scale"]),
        ("step_counter", values["step_counter"]),
    )
    if not _flag("dynamic", values.get("dynamic", True)):
        return FixedScale(float(state.scale)), state
    return _keras_rule(values), _above_one("dynamic_scale", state)


def _keras_rule(values: Values) -> DynamicScale:
    return DynamicScale.keras(values["initial_scale"], values["dynamic_growth_steps"])


def _above_one(key: str, state: ScaleState) -> ScaleState:
    checks.loss_scale(key, float(state.scale), lowest=1.0)
    return state


def _write_keras(policy: DynamicScale, state: ScaleState) -> tuple[Any, ...]:
    return (
        np.float32(state.scale),
        np.int32(state.finite_steps),
        max(policy.init_scale, 1.0),  # the floor
        policy.growth_interval,
    )


_STATIC_KERAS = ("dynamic_scale", "step_counter", "dynamic", "initial_scale")


def _write_static_keras(policy: FixedScale, state: ScaleState) -> tuple[Any, ...]:
    return np.float32(state.scale), np.int32(0), False, policy.scale


# Keras 2.

_TF_KERAS = ("current_loss_scale", "good_steps", "initial_scale", "dynamic_growth_steps")


def _read_tf_keras(values: Values) -> tuple[Rule, ScaleState]:
    _no_hysteresis(values, "bad_steps")
    state = _state(
        checks.loss_scale("current_loss_scale", values["current_loss_scale"]),
        ("good_steps", values["good_steps"]),
    )
    return _keras_rule(values), _above_one("current_loss_scale", state)


def _write_tf_keras(policy: DynamicScale, state: ScaleState) -> tuple[Any, ...]:
    return (
        np.float32(state.scale),
        np.int64(state.finite_steps),
        max(policy.init_scale, 1.0),
        policy.growth_interval,
    )


_STATIC_TF_KERAS = ("dynamic", "initial_scale")


def _read_static_tf_keras(values: Values) -> tuple[Rule, ScaleState]:
    if _flag("dynamic", values["dynamic"]):
        raise ValueError(
            "missing from the state dict for tf_keras's format: current_loss_scale, good_steps"
        )
    policy = FixedScale(checks.loss_scale("initial_scale", values["initial_scale"]))
    return policy, policy.init()


def _write_static_tf_keras(policy: FixedScale, state: ScaleState) -> tuple[Any, ...]:
    return False, float(state.scale)


# MindSpore. Its cell counts steps, and remembers which overflowed last.

_MINDSPORE = (
    "scale_sense",
    "current_iterator_step",
    "last_overflow_iterator_step",
    "scale_factor",
    "scale_window",
)


def _read_mindspore(values: Values) -> tuple[Rule, ScaleState]:
    policy = spelled(
        DynamicScale.mindspore,
        {"scale_sense": "init_loss_scale"},
        **{key: values[key] for key in ("scale_sense", "scale_factor", "scale_window")},
    )
    _no_hysteresis(values, "nonfinite_steps")
    step, overflowed = (
        count_in(key, values[key])
        for key in ("current_iterator_step", "last_overflow_iterator_step")
    )
    if overflowed >= step:
        raise ValueError(
            "last_overflow_iterator_step must be below current_iterator_step, "
            f"got {overflowed} and {step}"
        )
    return policy, ScaleState(np.float32(policy.init_scale), step - 1 - overflowed, 0)


def _write_mindspore(policy: DynamicScale, state: ScaleState) -> tuple[Any, ...]:
    return (
        np.float32(state.scale),
        np.int32(count_in("current_iterator_step", state.finite_steps + 1)),
        np.int32(0),
        policy.growth_factor,
        policy.growth_interval,
    )


def _read_static_mindspore(values: Values) -> tuple[Rule, ScaleState]:
    policy = FixedScale(checks.loss_scale("scale_sense", values["scale_sense"], lowest=1.0))
    return policy, policy.init()


def _write_static_mindspore(policy: FixedScale, state: ScaleState) -> tuple[Any, ...]:
    return (np.float32(state.scale),)


# jmp and flax.

_JMP = ("loss_scale", "counter", "period", "factor", "min_loss_scale")


def _read_jmp(values: Values) -> tuple[Rule, ScaleState]:
    policy = DynamicScale.jmp(
        values["loss_scale"], values["period"], values["factor"], values["min_loss_scale"]
    )
    return policy, _state(policy.init_scale, ("counter", values["counter"]))


def _write_jmp(policy: DynamicScale, state: ScaleState) -> tuple[Any, ...]:
    return (
        np.float32(state.scale),
        np.int32(state.finite_steps),
        policy.growth_interval,
        policy.growth_factor,
        np.float32(policy.min_scale),
    )


def _read_static_jmp(values: Values) -> tuple[Rule, ScaleState]:
    policy = FixedScale(checks.loss_scale("loss_scale", values["loss_scale"]))
    return policy, policy.init()


def _write_static_jmp(policy: FixedScale, state: ScaleState) -> tuple[Any, ...]:
    return (np.float32(state.scale),)


_FLAX = (
    "growth_factor",
    "backoff_factor",
    "growth_interval",
    "fin_steps",
    "scale",
    "minimum_scale",
)


def _read_flax(values: Values) -> tuple[Rule, ScaleState]:
    policy = DynamicScale.flax(
        values["growth_factor"],
        values["backoff_factor"],
        values["growth_interval"],
        values["scale"],
        values["minimum_scale"],
    )
    return policy, _state(policy.init_scale, ("fin_steps", values["fin_steps"]))


def _write_flax(policy: DynamicScale, state: ScaleState) -> tuple[Any, ...]:
    return (
        policy.growth_factor,
        policy.backoff_factor,
        max(policy.growth_interval - 1, 1),  # flax grows one step later, and so never at each
        np.int32(state.finite_steps),
        np.float32(state.scale),
        policy.min_scale,
    )


_BOTH = (DynamicScale, FixedScale)
LAYOUTS = (
    Layout("torch", TORCH_KEYS, _read_torch, _write_torch, _BOTH),
    Layout("tensorplay", TORCH_KEYS, _read_torch, _write_torch, _BOTH),
    Layout("paddle", PADDLE_KEYS, _read_paddle, write_paddle, _BOTH),
    Layout("keras", _KERAS, _read_keras, _write_keras),
    Layout("keras", _STATIC_KERAS, _read_keras, _write_static_keras, (FixedScale,)),
    Layout("tf_keras", _TF_KERAS, _read_tf_keras, _write_tf_keras),
    Layout(
        "tf_keras", _STATIC_TF_KERAS, _read_static_tf_keras, _write_static_tf_keras, (FixedScale,)
    ),
    Layout("mindspore", _MINDSPORE, _read_mindspore, _write_mindspore),
    Layout(
        "mindspore",
        ("scale_sense",),
        _read_static_mindspore,
        _write_static_mindspore,
        (FixedScale,),
    ),
    Layout("jmp", _JMP, _read_jmp, _write_jmp),
    Layout("jmp", ("loss_scale",), _read_static_jmp, _write_static_jmp, (FixedScale,)),
    Layout("flax", _FLAX, _read_flax, _write_flax),
)

OPTIONAL = ("dynamic", "_nonfinite_steps", "nonfinite_counter", "bad_steps", "nonfinite_steps")
"""Keys that some adapters of gradscaler add, or a config has."""
