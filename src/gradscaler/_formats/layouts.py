"""The formats in which each framework's scaler saves its state, with functions for both ways."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar, get_args

import numpy as np

from gradscaler._formats.state_dicts import count_in, number_in
from gradscaler._frameworks import FRAMEWORKS
from gradscaler.policies import (
    AmaxState,
    DynamicScale,
    FixedScale,
    OwnPolicy,
    Policy,
    Rule,
    ScaleState,
    State,
    _checks,
    amax_interval,
    is_fixed,
)
from gradscaler.policies._presets import PADDLE
from gradscaler.policies._spelling import changed, spelled

Values = Mapping[str, Any]
Written = tuple[Any, ...]  # values in the order of a layout's keys
Q = TypeVar("Q", bound=Policy)


class Layout(NamedTuple):
    """The keys and values of one kind of state dict. Some formats have a second for fixed scales.

    Attributes:
        format: the name of the format.
        keys: all keys of the dict.
        read: the rule and the state in a dict of Python numbers.
        write: the values of a rule and a state, in the order of ``keys``.
        rules: the classes of rules that ``write`` takes.
    """

    format: str
    keys: tuple[str, ...]
    read: Callable[[Values], tuple[Rule, ScaleState]]
    write: Callable[[Any, ScaleState], Written]
    rules: tuple[type[Rule], ...] = (DynamicScale,)


def _state(values: Values, scale: float, finite: str, nonfinite: str | None = None) -> ScaleState:
    """A state of this scale, with the counts under two keys; a missing non-finite count is 0."""
    count = count_in(nonfinite, values.get(nonfinite, 0)) if nonfinite else 0
    return ScaleState(np.float32(scale), count_in(finite, values[finite]), count)


def policies_with_own_state(kinds: tuple[type[Policy], ...]) -> dict[str, Policy]:
    """A policy of each kind whose state has fields of its own, by their names."""
    made = [kind() for kind in kinds if not issubclass(kind, Rule)]
    return {name: each for each in made for name in each.init()._fields[len(ScaleState._fields) :]}


_OWN_STATE = policies_with_own_state(get_args(OwnPolicy))


def named(policy: Policy) -> str:
    """The name of a policy's class, with its article."""
    name = type(policy).__name__
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def own_state_of(policy: Policy, to: str) -> str:
    """What the format ``to`` has no place for: the fields of a policy's own state."""
    fields = " and ".join(policy.init()._fields[len(ScaleState._fields) :])
    blind = f" ({to}'s scaler does not use the size of gradients)" if amax_interval(policy) else ""
    return f"{named(policy)}'s {fields}{blind}"


def _no_extras(values: Values, prefix: str, *counts: str) -> None:
    """Raise ValueError if there are keys that an adapter adds for a rule outside of the format.

    Args:
        values: the values of a state dict.
        prefix: the beginning of the key of a policy's own state.
        counts: the keys of a count of non-finite steps.
    """
    for key in (*(f"{prefix}{name}" for name in _OWN_STATE), *counts):
        if key in values:
            rule, takes = "a rule with a hysteresis", "the rule itself"
            if key in OF_OWN_STATE:
                rule = named(OF_OWN_STATE[key])
            elif key == "_nonfinite_steps":  # only torch's and TensorPlay's scalers take others
                rule += " or to a policy of your own"
                takes += ", or a DynamicScale in place of your own policy"
            raise ValueError(
                f"{key} belongs to {rule}, which this state dict does not describe: "
                f"write(policy, state, to) takes {takes}"
            )


def _flag(key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{key} must be a bool, got {value!r}")
    return value


# torch and TensorPlay. Both factors are 1.0 for a fixed scale.

_RULE = ("growth_factor", "backoff_factor", "growth_interval")
TORCH_KEYS = ("scale", *_RULE, "_growth_tracker")


def write_leaves(state: State) -> dict[str, float]:
    """The fields of a state beyond those of a ``ScaleState``, under keys such as ``_peak``.

    torch's and Paddle's formats have no keys for these, and both frameworks ignore them.
    """
    names = state._fields[len(ScaleState._fields) :]
    return {f"_{name}": number_in(name, getattr(state, name)) for name in names}


def read_leaves(policy: Policy, state: ScaleState, values: Values) -> State:
    """A state of the policy's type: the fields of ``state``, and further ones from ``values``.

    ``write_leaves`` has put them there. A missing one has its value before the first step.
    """
    first = policy.init()
    leaves = first._asdict()
    for name in first._fields[len(state) :]:
        key, start = f"_{name}", leaves[name]
        value = _checks.number(key, number_in(key, values.get(key, start)))
        least = 0 if isinstance(first, AmaxState) else -_checks.LARGEST_SCALE
        if not least <= value <= _checks.LARGEST_SCALE:
            at_least = "at least 0 and " if least == 0 else ""
            raise ValueError(f"{key} must be {at_least}finite in float32, got {value!r}")
        leaves[name] = type(start)(value)
    return type(first)(**{**leaves, **state._asdict()})


def _with(policy: Q, fields: Mapping[str, str], parameters: Values) -> Q:
    """A policy with those parameters that are fields of it; ``fields`` is that of ``changed``."""
    every = dataclasses.fields(policy)  # type: ignore[arg-type] # each of this package has them
    own = {field.name for field in every if field.init}
    known = {key: value for key, value in parameters.items() if fields.get(key, key) in own}
    return changed(policy, fields, **known)


def read_torch(values: Values, policy: Q) -> tuple[Q | FixedScale, ScaleState]:
    """The rule and the state in ``values``.

    A policy that is not of this package is returned unchanged, and another one keeps what is no
    parameter of it. ``_nonfinite_steps`` may be missing.
    """
    scale = _checks.loss_scale("scale", values["scale"])
    state = _state(values, scale, "_growth_tracker", "_nonfinite_steps")
    if not isinstance(policy, OwnPolicy):
        return policy, state
    lacking: tuple[str, ...] = ()
    if values["growth_factor"] == values["backoff_factor"] == 1.0:
        if "_nonfinite_steps" not in values:  # a fixed scale counts nothing
            return FixedScale(scale), state
        lacking = _RULE[:2]  # early state dicts hold 1.0 for factors that a moving policy lacks
    parameters = {key: values[key] for key in ("scale", *_RULE) if key not in lacking}
    return _with(policy, {"scale": "init_scale"}, parameters), state


def _read_torch(values: Values) -> tuple[Rule, ScaleState]:
    _no_extras(values, "_", "_nonfinite_steps")
    return read_torch(values, DynamicScale())


def _write_torch(policy: Rule, state: ScaleState) -> Written:
    if is_fixed(policy):
        return float(state.scale), 1.0, 1.0, 2000, 0
    rule = (getattr(policy, name) for name in _RULE)
    return float(state.scale), *rule, int(state.finite_steps)


# Paddle. In its state dict, the current scale has another name than the constructor's.

PADDLE_DEFAULTS = DynamicScale.paddle(decr_every_n_nan_or_inf=1)
"""Paddle's values for parameters that a policy lacks. To have no hysteresis is to have one of 1."""

PADDLE_KEYS = ("scale", *list(PADDLE)[1:], "incr_count", "decr_count", "use_dynamic_loss_scaling")


def read_paddle(values: Values, policy: Q) -> tuple[Q, ScaleState, bool]:
    """The rule, the state, and whether the scale moves.

    Parameters that are not in ``values`` are taken from ``policy``. A policy that is not of this
    package is returned unchanged.
    """
    scale = _checks.loss_scale("scale", values["scale"])
    state = _state(values, scale, "incr_count", "decr_count")
    dynamic = _flag("use_dynamic_loss_scaling", values["use_dynamic_loss_scaling"])
    if not isinstance(policy, OwnPolicy):
        return policy, state, dynamic
    fields = {**PADDLE, "scale": "init_scale"}
    parameters = {key: values[key] for key in PADDLE_KEYS if key in fields}
    return _with(policy, fields, parameters), state, dynamic


def _read_paddle(values: Values) -> tuple[Rule, ScaleState]:
    _no_extras(values, "_")
    policy, state, dynamic = read_paddle(values, DynamicScale())
    return policy if dynamic else FixedScale(policy.init_scale), state


def write_paddle(policy: Policy, state: State) -> Written:
    """The values for ``PADDLE_KEYS``; those of ``PADDLE_DEFAULTS`` for what the policy lacks."""
    fixed = is_fixed(policy)
    own, default = (DynamicScale(), DynamicScale()) if fixed else (policy, PADDLE_DEFAULTS)
    rule = (getattr(own, name, getattr(default, name)) for name in list(PADDLE.values())[1:])
    scale = np.array([state.scale], dtype=np.float32)
    return scale, *rule, int(state.finite_steps), int(state.nonfinite_steps), not fixed


# Keras 3, and Keras 2 with other names and a floor of 1. The config of both says whether the scale
# is fixed. If so, Keras 2 saves no variables, but gradscaler's scaler for Keras 3 does.

_KERAS = ("dynamic_scale", "step_counter", "initial_scale", "dynamic_growth_steps")
_TF_KERAS = ("current_loss_scale", "good_steps", *_KERAS[2:])


def _read_keras(
    values: Values,
    keys: tuple[str, ...] = _KERAS,
    nonfinite: str = "nonfinite_counter",
    preset: Callable[..., DynamicScale] = DynamicScale.keras,
) -> tuple[Rule, ScaleState]:
    scale, count, *parameters = keys
    _no_extras(values, "", nonfinite)
    state = _state(values, _checks.loss_scale(scale, values[scale]), count)
    if keys is _KERAS and not _flag("dynamic", values.get("dynamic", True)):
        return FixedScale(float(state.scale)), state
    policy = preset(*(values[key] for key in parameters))
    _checks.loss_scale(scale, float(state.scale), lowest=policy.min_scale)
    return policy, state


def _write_keras(
    policy: DynamicScale,
    state: ScaleState,
    integer: type[np.integer[Any]] = np.int32,
    floor: float = _checks.SMALLEST_SCALE,
) -> Written:
    init_scale = max(policy.init_scale, floor)
    return np.float32(state.scale), integer(state.finite_steps), init_scale, policy.growth_interval


_read_tf_keras = partial(
    _read_keras, keys=_TF_KERAS, nonfinite="bad_steps", preset=DynamicScale.tf_keras
)
_write_tf_keras = partial(_write_keras, integer=np.int64, floor=1.0)


def _write_fixed_keras(policy: FixedScale, state: ScaleState) -> Written:
    return np.float32(state.scale), np.int32(0), False, policy.scale


def _read_fixed_tf_keras(values: Values) -> tuple[Rule, ScaleState]:
    if _flag("dynamic", values["dynamic"]):
        raise ValueError(
            "missing from the state dict for tf_keras's format: current_loss_scale, good_steps"
        )
    return _read_fixed(values, "initial_scale")


def _write_fixed_tf_keras(policy: FixedScale, state: ScaleState) -> Written:
    return False, float(state.scale)


# MindSpore. Its cell saves the number of the step, and of the last step that overflowed.

_MINDSPORE_STEPS = ("current_iterator_step", "last_overflow_iterator_step")
_MINDSPORE_RULE = ("scale_factor", "scale_window")


def _read_mindspore(values: Values) -> tuple[Rule, ScaleState]:
    parameters = {key: values[key] for key in ("scale_sense", *_MINDSPORE_RULE)}
    policy = spelled(DynamicScale.mindspore, {"scale_sense": "init_loss_scale"}, **parameters)
    _no_extras(values, "", "nonfinite_steps")
    step, overflowed = (count_in(key, values[key]) for key in _MINDSPORE_STEPS)
    if overflowed >= step:
        raise ValueError(
            "last_overflow_iterator_step must be below current_iterator_step, "
            f"got {overflowed} and {step}"
        )
    return policy, ScaleState(np.float32(policy.init_scale), step - 1 - overflowed, 0)


def _write_mindspore(policy: DynamicScale, state: ScaleState) -> Written:
    steps = np.int32(count_in("current_iterator_step", state.finite_steps + 1)), np.int32(0)
    return np.float32(state.scale), *steps, policy.growth_factor, policy.growth_interval


# jmp and flax.

_JMP = ("loss_scale", "counter", "period", "factor", "min_loss_scale")


def _read_jmp(values: Values) -> tuple[Rule, ScaleState]:
    policy = DynamicScale.jmp(**{key: values[key] for key in _JMP if key != "counter"})
    return policy, _state(values, policy.init_scale, "counter")


def _write_jmp(policy: DynamicScale, state: ScaleState) -> Written:
    counts = np.int32(state.finite_steps), policy.growth_interval
    return np.float32(state.scale), *counts, policy.growth_factor, np.float32(policy.min_scale)


_FLAX = (*_RULE, "fin_steps", "scale", "minimum_scale")


def _read_flax(values: Values) -> tuple[Rule, ScaleState]:
    policy = DynamicScale.flax(**{key: values[key] for key in _FLAX if key != "fin_steps"})
    return policy, _state(values, policy.init_scale, "fin_steps")


def _write_flax(policy: DynamicScale, state: ScaleState) -> Written:
    factors = policy.growth_factor, policy.backoff_factor
    interval = max(policy.growth_interval - 1, 1)  # flax grows one step later; 2 is its shortest
    state_values = np.int32(state.finite_steps), np.float32(state.scale)
    return *factors, interval, *state_values, policy.min_scale


# A fixed scale, saved as one number.


def _read_fixed(
    values: Values, key: str, lowest: float = _checks.SMALLEST_SCALE
) -> tuple[Rule, ScaleState]:
    policy = FixedScale(_checks.loss_scale(key, values[key], lowest))
    return policy, policy.init()


def _write_fixed(policy: FixedScale, state: ScaleState) -> Written:
    return (np.float32(state.scale),)


FORMATS = tuple(name for formats in FRAMEWORKS.values() for name in formats)
"""The names of the formats."""

_BOTH, _FIXED = (DynamicScale, FixedScale), (FixedScale,)
_FIXED_MINDSPORE = partial(_read_fixed, key="scale_sense", lowest=1.0)
_FIXED_JMP = partial(_read_fixed, key="loss_scale")
_FIXED_KERAS = ("dynamic_scale", "step_counter", "dynamic", "initial_scale")
_MINDSPORE = ("scale_sense", *_MINDSPORE_STEPS, *_MINDSPORE_RULE)
LAYOUTS = (
    Layout("torch", TORCH_KEYS, _read_torch, _write_torch, _BOTH),
    Layout("tensorplay", TORCH_KEYS, _read_torch, _write_torch, _BOTH),
    Layout("paddle", PADDLE_KEYS, _read_paddle, write_paddle, _BOTH),
    Layout("keras", _KERAS, _read_keras, _write_keras),
    Layout("keras", _FIXED_KERAS, _read_keras, _write_fixed_keras, _FIXED),
    Layout("tf_keras", _TF_KERAS, _read_tf_keras, _write_tf_keras),
    Layout("tf_keras", _FIXED_KERAS[2:], _read_fixed_tf_keras, _write_fixed_tf_keras, _FIXED),
    Layout("mindspore", _MINDSPORE, _read_mindspore, _write_mindspore),
    Layout("mindspore", ("scale_sense",), _FIXED_MINDSPORE, _write_fixed, _FIXED),
    Layout("jmp", _JMP, _read_jmp, _write_jmp),
    Layout("jmp", ("loss_scale",), _FIXED_JMP, _write_fixed, _FIXED),
    Layout("flax", _FLAX, _read_flax, _write_flax),
)

COUNTS = ("_nonfinite_steps", "nonfinite_counter", "bad_steps", "nonfinite_steps")
"""Keys that some of gradscaler's adapters add for a count of non-finite steps."""

OF_OWN_STATE = {
    f"{prefix}{name}": policy for name, policy in _OWN_STATE.items() for prefix in ("_", "")
}
"""A policy, by the keys that gradscaler's adapters add for a state of its own."""

OPTIONAL = ("dynamic", *COUNTS, *OF_OWN_STATE)
"""Keys that a state dict may have beside those of its layout."""
