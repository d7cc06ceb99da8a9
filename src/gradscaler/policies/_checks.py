"""Checks of parameters. Each error names the parameter and the value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import c_float
from itertools import pairwise
from numbers import Integral, Real
from typing import Any

import numpy as np

from gradscaler.errors import ParameterError, ParameterTypeError

SMALLEST_SCALE = 2.0**-126
"""The smallest normal float32. Devices may flush a smaller scale to 0, or its reciprocal is Inf."""

LARGEST_SCALE = float(np.finfo(np.float32).max)

LONGEST_COUNT = 2**31 - 1
"""The largest int32, which the counters of every framework can hold."""


def number(name: str, value: object) -> float:
    """``value`` as a Python float; ParameterTypeError if it is a bool or not a real number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ParameterTypeError(f"{name} must be a number, got {value!r} ({type(value).__name__})")
    try:
        return float(value)
    except OverflowError:  # an int that no float can hold
        return math.inf


def in_float32(value: float) -> float:
    """``value`` rounded to float32; inf if it is too large."""
    return c_float(value).value  # np.float32 would warn of an overflow


def loss_scale(
    name: str, value: object, lowest: float = SMALLEST_SCALE, highest: float = LARGEST_SCALE
) -> float:
    """``value`` if it is positive and finite in float32, and ``lowest <= value <= highest``."""
    given = number(name, value)
    scale = in_float32(given)
    if not math.isfinite(scale) or scale <= 0:
        raise ParameterError(f"{name} must be positive and finite in float32, got {value!r}")
    if not in_float32(lowest) <= scale <= in_float32(highest):
        raise ParameterError(f"{name} must lie between {lowest!r} and {highest!r}, got {value!r}")
    return given


def bounds(min_scale: object, max_scale: object) -> tuple[float, float]:
    """Both bounds, if they are loss scales, and the first is not above the second in float32."""
    lowest, highest = loss_scale("min_scale", min_scale), loss_scale("max_scale", max_scale)
    if in_float32(lowest) > in_float32(highest):
        raise ParameterError(
            f"min_scale must not be above max_scale, got {min_scale!r} > {max_scale!r}"
        )
    return lowest, highest


def growth_factor(name: str, value: object) -> float:
    """``value`` if it is finite and above 1 in float32."""
    factor = number(name, value)
    if not 1 < in_float32(factor) < math.inf:
        raise ParameterError(f"{name} must be > 1.0 and finite in float32, got {value!r}")
    return factor


def backoff_factor(name: str, value: object) -> float:
    """``value`` if it lies strictly between 0 and 1 in float32."""
    factor = number(name, value)
    if not 0 < in_float32(factor) < 1:
        raise ParameterError(f"{name} must be > 0.0 and < 1.0 in float32, got {value!r}")
    return factor


def count(name: str, value: object, least: int = 1, most: float = math.inf) -> int:
    """``value`` if it is an integer, ``least <= value <= most``, as a Python int."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ParameterTypeError(
            f"{name} must be an integer, got {value!r} ({type(value).__name__})"
        )
    integer = int(value)
    if not least <= integer <= most:
        bound = f"at least {least}" if integer < least else f"at most {most}"
        raise ParameterError(f"{name} must be {bound}, got {value!r}")
    return integer


def choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise ParameterError if ``value`` is not one of ``choices``."""
    if value not in choices:
        known = ", ".join(map(repr, choices))
        raise ParameterError(f"{name} must be one of {known}, got {value!r}")


def growth_tiers(name: str, value: object) -> tuple[tuple[float, int], ...]:
    """``value`` as a tuple of pairs of a loss scale and a count, if the scales increase."""
    pairs: Sequence[Any] = value if isinstance(value, (tuple, list)) else [()]
    if not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in pairs):
        raise ParameterTypeError(
            f"{name} must be pairs of a scale and an interval, such as ((1.0, 100), (8.0, 400)), "
            f"got {value!r}"
        )
    checked = tuple(
        (loss_scale(f"a scale in {name}", below), count(f"an interval in {name}", interval))
        for below, interval in pairs
    )
    if any(low >= high for (low, _), (high, _) in pairwise(checked)):
        raise ParameterError(f"{name} must have the lowest scale first, got {value!r}")
    return checked
