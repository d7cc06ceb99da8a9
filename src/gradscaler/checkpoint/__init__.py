"""Reads, writes and converts the state of a loss scale in every framework's format.

A state dict is a flat dict of numbers: those that the framework's scaler saves, and the rule's
parameters, which some frameworks keep in a config or in an object's attributes instead.

=============== ==================================================================================
``torch``       ``torch.amp.GradScaler.state_dict()``
``tensorplay``  ``tensorplay.amp.GradScaler.state_dict()``
``paddle``      ``paddle.amp.GradScaler.state_dict()``
``keras``       Keras 3's ``dynamic_scale`` and ``step_counter``, and its config
``tf_keras``    Keras 2's ``current_loss_scale`` and ``good_steps``, and its config
``mindspore``   the parameters of a train step and its update cell, ``scale_factor``,
                ``scale_window``
``jmp``         the fields of ``jmp.DynamicLossScale``, or of ``jmp.StaticLossScale``
``flax``        the fields of flax's ``DynamicScale``
=============== ==================================================================================
"""

from __future__ import annotations

import warnings
from dataclasses import fields
from typing import Any

from gradscaler._formats import reading
from gradscaler._formats.layouts import (
    COUNTS,
    FORMATS,
    LAYOUTS,
    OF_OWN_STATE,
    Values,
    own_state_of,
)
from gradscaler._formats.reading import layout_of, numbers
from gradscaler._formats.state_dicts import count_in, number_in
from gradscaler.checkpoint._search import find
from gradscaler.policies import (
    DynamicScale,
    FixedScale,
    OwnPolicy,
    Rule,
    ScaleState,
    State,
    _checks,
)
from gradscaler.policies._spelling import check_policy

__all__ = ["FORMATS", "convert", "detect", "read", "write"]

StateDict = dict[str, Any]

_DEFAULTS = {name: getattr(DynamicScale, name)() for name in FORMATS}
_RESETS = {
    "finite_step": "",
    "finite_step_only": " that backing off does not reset",
    "growth": " that only growth resets",
}


def convert(
    state_dict: Values, to: str, *, lossy: bool = False, key: str | None = None
) -> StateDict:
    """Convert a state dict to another format.

    Some values have no place in the new format. If such a value is the default of any framework,
    such as Keras' floor of 1 or Paddle's hysteresis of 2, it is replaced by the default of the new
    format's framework. Otherwise it is an error, unless ``lossy`` is True.

    Args:
        state_dict: a state dict in any format, which is detected by its keys. Or a checkpoint: a
            dict that holds one such state dict at any depth, among other entries.
        to: one of ``FORMATS``.
        lossy: whether to leave out values that have no place in the format, with a warning. For
            example, torch's format has no place for a ceiling, and no format has one for an
            AmaxScale's peak and reach.
        key: the key of the scaler's state in a checkpoint, such as ``"scaler"``, or
            ``"state.scaler"`` if it is in the entry ``"state"``. It is needed if the checkpoint
            holds the states of several scalers.

    Raises:
        TypeError: ``state_dict`` is not a dict, or a value has the wrong type.
        ValueError: the keys match no format, the checkpoint has no such key, it holds several
            scalers' states and ``key`` is None, a value is out of range, or the format cannot hold
            it; the message names the key or the value.

    >>> policy = DynamicScale.paddle(decr_every_n_nan_or_inf=3)
    >>> saved = write(policy, policy.init(), "paddle")
    >>> convert(saved, to="torch")  # doctest: +NORMALIZE_WHITESPACE
    Traceback (most recent call last):
    ValueError: torch's format has no place for a hysteresis of 3 (torch's scaler backs off at
        every overflow); lossy=True leaves that out
    """
    _, state_dict = find(state_dict, key)
    kept, lost = state_dict, []
    own = [policy for key, policy in OF_OWN_STATE.items() if key in state_dict]
    if layout_of(state_dict) and own:
        left_out = *OF_OWN_STATE, *COUNTS
        kept = {key: value for key, value in state_dict.items() if key not in left_out}
        lost = [own_state_of(own[0], to)]
    policy, state = read(kept)
    return _write(policy, state._replace(nonfinite_steps=0) if lost else state, to, lossy, lost)


def read(state_dict: Values, *, key: str | None = None) -> tuple[Rule, ScaleState]:
    """The rule and the state in a state dict of any format, or in a checkpoint that holds one.

    The rule's initial scale is the current scale, unless the format has the initial one. ``key`` is
    that of :func:`convert`.

    Raises:
        TypeError: ``state_dict`` is not a dict, or a value has the wrong type.
        ValueError: the keys match no format, the checkpoint has no such key, it holds several
            scalers' states and ``key`` is None, or a value is out of range.

    >>> saved = {"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5,
    ...          "growth_interval": 2000, "_growth_tracker": 7}
    >>> policy, state = read(saved)
    >>> policy.growth_interval, float(state.scale), state.finite_steps
    (2000, 1024.0, 7)
    >>> read({"epoch": 3, "scaler": saved}) == read({"a": saved, "b": {}}, key="a") == read(saved)
    True
    """
    _, state_dict = find(state_dict, key)
    return reading.read(state_dict)


def write(policy: OwnPolicy, state: State, to: str, *, lossy: bool = False) -> StateDict:
    """The state dict of a rule and a state in a format. ``lossy`` is that of :func:`convert`.

    Raises:
        TypeError: ``policy`` is not a policy of this package.
        ValueError: the format is unknown, or cannot hold a value; the message names which.

    >>> policy = DynamicScale(growth_interval=100)
    >>> for key, value in write(policy, policy.init(), "torch").items():
    ...     print(key, value)
    scale 65536.0
    growth_factor 2.0
    backoff_factor 0.5
    growth_interval 100
    _growth_tracker 0
    """
    return _write(policy, state, to, lossy, [])


def _write(policy: OwnPolicy, state: State, to: str, lossy: bool, lost: list[str]) -> StateDict:
    if to not in FORMATS:
        raise ValueError(f"unknown format {to!r}; the formats are {', '.join(FORMATS)}")
    check_policy(policy, OwnPolicy)
    scale, *counts = (number_in(name, getattr(state, name)) for name in ScaleState._fields)
    scale = _checks.loss_scale("scale", scale)
    state = ScaleState(scale, *map(count_in, ScaleState._fields[1:], counts))
    if not isinstance(policy, Rule):
        lost = [own_state_of(policy, to)]
        policy, state = _without_own_state(policy), state._replace(nonfinite_steps=0)
    layouts = [layout for layout in LAYOUTS if layout.format == to]
    layout = next((each for each in layouts if isinstance(policy, each.rules)), layouts[0])
    written = policy if isinstance(policy, layout.rules) else DynamicScale(float(state.scale))
    try:
        state_dict = dict(zip(layout.keys, layout.write(written, state), strict=True))
        kept, _ = layout.read(numbers(layout, state_dict))
    except ValueError as error:
        raise ValueError(f"{to}'s format cannot hold this: {error}") from None
    if isinstance(policy, FixedScale) or isinstance(kept, FixedScale):
        lost = lost if isinstance(kept, FixedScale) else [*lost, "a scale that does not move"]
    else:
        lost = [*lost, *_losses(policy, kept, to)]
    words = " and ".join(lost)
    if words and not lossy:
        raise ValueError(f"{to}'s format has no place for {words}; lossy=True leaves that out")
    if words:
        warnings.warn(f"{to}'s format has no place for {words}", stacklevel=3)
    return state_dict


def _without_own_state(policy: OwnPolicy) -> DynamicScale:
    """A rule without fields of its own: a DynamicScale with the parameters that both have."""
    common = {field.name for field in fields(policy)} & {
        field.name for field in fields(DynamicScale)
    }
    return DynamicScale(**{name: getattr(policy, name) for name in common})


def detect(state_dict: Values) -> str | None:
    """The format of a state dict, by its keys, or None. TensorPlay's also gives ``"torch"``.

    Raises:
        TypeError: ``state_dict`` is not a dict.
    """
    return reading.detect(state_dict)


def _losses(rule: DynamicScale, kept: DynamicScale, to: str) -> list[str]:
    """Describe each parameter of a rule that is lost in the format ``to``.

    A default of any framework is a convention. Such a value may be replaced by the default of the
    format's own framework without being counted as lost, even if a user chose it: a state dict does
    not say who did.

    Args:
        rule: the rule that was written.
        kept: the rule that reading it back gives.
        to: the format.
    """
    has_floor = kept.min_scale != _checks.SMALLEST_SCALE
    floor = f"a floor of {kept.min_scale!r}" if has_floor else "no floor"
    backs_off = "backs off at every overflow"
    resets = "resets it at a finite step and at a backoff"
    words = {  # for each parameter, its name and a description of the format's scaler
        "growth_factor": ("growth factor", f"has {kept.growth_factor!r}"),
        "backoff_factor": ("backoff factor", f"has {kept.backoff_factor!r}"),
        "growth_interval": ("growth interval", f"has {kept.growth_interval}"),
        "hysteresis": ("hysteresis", backs_off if kept.hysteresis == 1 else resets),
        "min_scale": ("floor", f"has {floor}"),
        "max_scale": ("ceiling", "has none"),
        "growth_tiers": ("growth by tiers", "has none"),
    }
    lost = []
    for name, (noun, does) in words.items():
        before, after, own = (_value(each, name) for each in (rule, kept, _DEFAULTS[to]))
        conventions = [_value(default, name) for default in _DEFAULTS.values()]
        if before != after and not (before in conventions and after == own):
            reset = _RESETS[rule.hysteresis_reset] if name == "hysteresis" else ""
            lost.append(f"a {noun} of {getattr(rule, name)!r}{reset} ({to}'s scaler {does})")
    return lost


def _value(rule: DynamicScale, name: str) -> object:
    """A parameter's value for comparison: a float in float32, a hysteresis with its reset."""
    if name == "hysteresis":
        return rule.hysteresis, rule.hysteresis_reset if rule.hysteresis > 1 else None
    value = getattr(rule, name)
    return _checks.in_float32(value) if isinstance(value, float) else value
