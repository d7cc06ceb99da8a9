"""A loss scale's state in every framework's format, and conversions between them.

A format is what that framework's scaler saves, as a flat dict of numbers. Some frameworks keep the
rule's parameters elsewhere, in a config or in an object's attributes; the dict has these too.

=============== ==================================================================================
``torch``       ``torch.amp.GradScaler.state_dict()``
``tensorplay``  the same
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
from gradscaler._formats.layouts import AMAX, COUNTS, FORMATS, LAYOUTS, Values
from gradscaler._formats.reading import layout_of, numbers
from gradscaler._formats.state_dicts import count_in, number_in
from gradscaler.checkpoint._losses import losses
from gradscaler.checkpoint._search import find
from gradscaler.policies import AmaxScale, DynamicScale, OwnPolicy, Rule, ScaleState, State
from gradscaler.policies._spelling import check_policy

__all__ = ["FORMATS", "convert", "detect", "read", "write"]

StateDict = dict[str, Any]


def convert(
    state_dict: Values, to: str, *, lossy: bool = False, key: str | None = None
) -> StateDict:
    """A state dict in another format.

    A value that is some framework's default, such as Keras' floor of 1 or Paddle's hysteresis of 2,
    gives way to the default of the format's own framework if the format has no place for it.

    Args:
        state_dict: a state dict in any format; its keys say in which. Or a checkpoint, a dict that
            holds one such state dict beside others, at any depth.
        to: one of ``FORMATS``.
        lossy: leave out any other value that the format has no place for, such as a ceiling in
            torch's, or an AmaxScale's peak and reach in any, with a warning. Otherwise such a value
            is an error.
        key: where the scaler's state is in a checkpoint, such as ``"scaler"``, or
            ``"state.scaler"`` if it is in the entry ``"state"``. It is needed if the checkpoint
            holds the states of several scalers.

    Raises:
        TypeError: ``state_dict`` is not a dict, or a value is not the kind of number it should be.
        ValueError: its keys do not match a format, there is no such key, several scalers' states
            are there and ``key`` does not say which, a value is out of range, or the format cannot
            hold it; the message names the key or the value.

    >>> policy = DynamicScale.paddle(decr_every_n_nan_or_inf=3)
    >>> saved = write(policy, policy.init(), "paddle")
    >>> convert(saved, to="torch")  # doctest: +NORMALIZE_WHITESPACE
    Traceback (most recent call last):
    ValueError: torch's format has no place for a hysteresis of 3 (torch's scaler backs off at
        every overflow); lossy=True leaves that out
    """
    _, state_dict = find(state_dict, key)
    kept, lost = state_dict, []
    if layout_of(state_dict) and any(key in state_dict for key in AMAX):
        kept = {key: value for key, value in state_dict.items() if key not in (*AMAX, *COUNTS)}
        lost = [_blind(to)]
    policy, state = read(kept)
    return _write(policy, state._replace(nonfinite_steps=0) if lost else state, to, lossy, lost)


def read(state_dict: Values, *, key: str | None = None) -> tuple[Rule, ScaleState]:
    """The rule and the state in a state dict of any format, or in a checkpoint that holds one.

    The rule starts from the current scale, unless the format says where it started. ``key`` is as
    in :func:`convert`.

    Raises:
        TypeError, ValueError: as :func:`convert`.

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
    """The state dict of a rule and a state in one format; ``lossy`` is as in :func:`convert`.

    Raises:
        TypeError: the rule is not one of this package.
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
    state = ScaleState(scale, *map(count_in, ScaleState._fields[1:], counts))
    if isinstance(policy, AmaxScale):
        lost = [_blind(to)]
        policy, state = _without_peak(policy), state._replace(nonfinite_steps=0)
    layouts = [layout for layout in LAYOUTS if layout.format == to]
    layout = next((each for each in layouts if isinstance(policy, each.rules)), layouts[0])
    written = policy if isinstance(policy, layout.rules) else DynamicScale(float(state.scale))
    try:
        state_dict = dict(zip(layout.keys, layout.write(written, state), strict=True))
        kept, _ = layout.read(numbers(layout, state_dict))
    except ValueError as error:
        raise ValueError(f"{to}'s format cannot hold this: {error}") from None
    words = " and ".join([*lost, *losses(policy, kept, to)])
    if words and not lossy:
        raise ValueError(f"{to}'s format has no place for {words}; lossy=True leaves that out")
    if words:
        warnings.warn(f"{to}'s format has no place for {words}", stacklevel=3)
    return state_dict


def _blind(to: str) -> str:
    blind = f"{to}'s scaler does not look at how large gradients are"
    return f"an AmaxScale's peak and reach ({blind})"


def _without_peak(policy: AmaxScale) -> DynamicScale:
    """The rule that an AmaxScale is before it knows a gradient."""
    common = {field.name for field in fields(policy)} & {
        field.name for field in fields(DynamicScale)
    }
    return DynamicScale(**{name: getattr(policy, name) for name in common})


def detect(state_dict: Values) -> str | None:
    """The format of a state dict by its keys, or None; ``"torch"`` for TensorPlay's too.

    Raises:
        TypeError: ``state_dict`` is not a dict.
    """
    return reading.detect(state_dict)
