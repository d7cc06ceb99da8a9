"""Values of float32 in 16 bits, and 16 more bits that complete them again."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Array = Any

lax: Any = jax.lax  # partly untyped

_FIXED_POINT_BELOW = 2.0**-16  # below, float16's spacing stays 2**-24, and float32's shrinks
_UNIT = 2.0**-40  # float32's spacing from 2**-17 to 2**-16: 2**16 units are float16's spacing


def is_narrow(leaf: Any) -> bool:
    """Whether a leaf is of a 16-bit floating dtype."""
    return jnp.result_type(leaf) in (jnp.float16, jnp.bfloat16)


def bits(value: Array) -> Array:
    """The bits of a floating array, as signed integers of its size."""
    return lax.bitcast_convert_type(value, jnp.int16 if value.dtype.itemsize == 2 else jnp.int32)


def nearest(wide: Array, dtype: Any) -> Array:
    """float32 rounded to a 16-bit dtype, to nearest even."""
    return wide.astype(dtype)


def with_remainder(wide: Array, dtype: Any) -> Array:
    """float32 rounded to a 16-bit dtype, to nearest, so that 16 bits complete it.

    An even value has a tie on either side, so 2**16 + 1 values of float32 may round to it: one too
    many. Ties that 16 bits do not reach are rounded away from zero: with bfloat16 every tie, with
    float16 those below 2**-16.
    """
    if dtype == jnp.bfloat16:
        upper = ((bits(wide) + 2**15) >> 16).astype(jnp.int16)
        return jnp.where(jnp.isnan(wide), wide.astype(dtype), _from_bits(upper, dtype))
    value = wide.astype(dtype)
    return _from_bits(bits(value) + (_distance(wide, value) == 2**15).astype(jnp.int16), dtype)


def remainder(wide: Array, narrow: Array) -> Array:
    """What :func:`completed` needs beside `narrow` to return `wide`, in 16 bits."""
    return jnp.clip(_distance(wide, narrow), -(2**15), 2**15 - 1).astype(jnp.int16)


def completed(narrow: Array, remainder: Array) -> Array:
    """The float32 value that was rounded to `narrow`.

    The distance counts float32's values. With bfloat16 it is the lower half of float32's bits. With
    float16, it counts steps of 2**-40 below 2**-16.
    """
    value = _widened(narrow)
    by_values = _from_bits(bits(value) + remainder, jnp.float32)
    if narrow.dtype == jnp.bfloat16:
        return by_values
    by_units = jnp.copysign(jnp.abs(value) + remainder * jnp.float32(_UNIT), value)
    return jnp.where(_in_units(value), by_units, by_values)


def _distance(wide: Array, narrow: Array) -> Array:
    """How much larger the magnitude of `wide` is than that of `narrow`, as an int32."""
    value = _widened(narrow)
    values = bits(wide) - bits(value)
    if narrow.dtype == jnp.bfloat16:
        return values
    units = jnp.rint((jnp.abs(wide) - jnp.abs(value)) / jnp.float32(_UNIT)).astype(jnp.int32)
    distance = jnp.where(_in_units(value), units, values)
    return jnp.where(jnp.isfinite(value), distance, 0)  # what overflows stays an Inf


def _in_units(value: Array) -> Array:
    return jnp.abs(value) < _FIXED_POINT_BELOW


def _widened(narrow: Array) -> Array:
    """A 16-bit value in float32, by integers.

    XLA takes a cast to 16 bits and back for no cast at all, where it may keep excess precision. On
    some devices, a cast flushes subnormals, too.
    """
    whole = bits(narrow).astype(jnp.int32)
    if narrow.dtype == jnp.bfloat16:
        return _from_bits(whole << 16, jnp.float32)
    magnitude = whole & 0x7FFF
    bias = jnp.where(magnitude < 0x7C00, 127 - 15, 255 - 31)  # Inf and NaN have the last exponent
    normal = _from_bits((magnitude << 13) + (bias << 23), jnp.float32)
    subnormal = magnitude.astype(jnp.float32) * jnp.float32(2.0**-24)
    value = jnp.where(magnitude < 0x400, subnormal, normal)
    return jnp.where(whole < 0, -value, value)


def _from_bits(integers: Array, dtype: Any) -> Array:
    return lax.bitcast_convert_type(integers, dtype)


def stochastic(wide: Array, dtype: Any, key: Array) -> Array:
    """float32 rounded to one of its two neighbours in a 16-bit dtype, the nearer one more often.

    With ``lower <= |wide| < upper``, ``P(upper) = (|wide| - lower) / (upper - lower)``, so the mean
    is `wide`; to 2**-23 of ``upper - lower``, the resolution of a uniform float32. What is finite
    stays finite. Where a device flushes subnormals, bfloat16 below 2**-118 is rounded towards zero.
    """
    rounded = wide.astype(dtype)
    magnitude = jnp.abs(wide)
    past = (jnp.abs(_widened(rounded)) > magnitude).astype(jnp.int16)
    lower = _from_bits(bits(rounded) - past, dtype)
    upper = _from_bits(bits(lower) + jnp.int16(1), dtype)
    low, high = jnp.abs(_widened(lower)), jnp.abs(_widened(upper))
    drawn = jax.random.uniform(key, wide.shape, jnp.float32)
    return jnp.where(drawn * (high - low) < magnitude - low, upper, lower)
