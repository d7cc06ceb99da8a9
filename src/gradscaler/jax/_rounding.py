"""Rounds float32 values to 16 bits, and computes 16 more bits that restore them."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

lax: ModuleType = jax.lax  # partly untyped

# Below 2**-16, float16's spacing is 2**-24 everywhere, but float32's shrinks. Distances there are
# counted in a fixed unit: float32's spacing from 2**-17 to 2**-16. There are 2**16 units from one
# float16 to the next.
_FIXED_POINT_BELOW = 2.0**-16
_UNIT = 2.0**-40


def is_narrow(leaf: object) -> bool:
    """Whether a leaf has a 16-bit floating dtype."""
    return jnp.result_type(leaf) in (jnp.float16, jnp.bfloat16)


def bits(value: Array) -> Array:
    """The bits of a floating array, as signed integers of the same size."""
    dtype = jnp.int16 if value.dtype.itemsize == 2 else jnp.int32
    return jax.lax.bitcast_convert_type(value, dtype)


def nearest(wide: Array, dtype: DTypeLike) -> Array:
    """Round float32 values to the nearest of a 16-bit dtype, with ties to even."""
    return wide.astype(dtype)


def master(wide: Array, narrow: Array, rounded: Callable[[Array, DTypeLike], Array]) -> Array:
    """`wide` where it is rounded to `narrow`; else `narrow`, which the user has set by hand."""
    wide = wide.astype(jnp.float32)
    return jnp.where(bits(rounded(wide, narrow.dtype)) == bits(narrow), wide, _widened(narrow))


def with_remainder(wide: Array, dtype: DTypeLike) -> Array:
    """Round float32 values to the nearest of a 16-bit dtype, so that 16 more bits restore them.

    With ties to even, an even value would get the ties on both sides: 2**16 + 1 float32 values
    would round to it, one more than 16 bits can tell apart. So every bfloat16 tie, and every
    float16 tie below 2**-16, is rounded away from zero.
    """
    if dtype == jnp.bfloat16:
        upper = ((bits(wide) + 2**15) >> 16).astype(jnp.int16)
        return jnp.where(jnp.isnan(wide), wide.astype(dtype), _from_bits(upper, dtype))
    value = wide.astype(dtype)
    return _from_bits(bits(value) + (_distance(wide, value) == 2**15).astype(jnp.int16), dtype)


def remainder(wide: Array, narrow: Array) -> Array:
    """The 16 bits that :func:`completed` needs to restore `wide` from `narrow`."""
    return jnp.clip(_distance(wide, narrow), -(2**15), 2**15 - 1).astype(jnp.int16)


def completed(narrow: Array, remainder: Array) -> Array:
    """The float32 value that was rounded to `narrow`.

    The remainder is a distance, counted in float32 values. With bfloat16 it is the lower half of
    float32's bits. With float16 below 2**-16, it is counted in steps of 2**-40.
    """
    value = _widened(narrow)
    by_values = _from_bits(bits(value) + remainder, jnp.float32)
    if narrow.dtype == jnp.bfloat16:
        return by_values
    by_units = jnp.copysign(jnp.abs(value) + remainder * jnp.float32(_UNIT), value)
    return jnp.where(_in_units(value), by_units, by_values)


def _distance(wide: Array, narrow: Array) -> Array:
    """The magnitude of `wide` minus that of `narrow`, counted as in :func:`completed`, in int32."""
    value = _widened(narrow)
    values = bits(wide) - bits(value)
    if narrow.dtype == jnp.bfloat16:
        return values
    units = jnp.rint((jnp.abs(wide) - jnp.abs(value)) / jnp.float32(_UNIT)).astype(jnp.int32)
    distance = jnp.where(_in_units(value), units, values)
    return jnp.where(jnp.isfinite(value), distance, 0)  # so that an overflow stays Inf


def _in_units(value: Array) -> Array:
    return jnp.abs(value) < _FIXED_POINT_BELOW


def _widened(narrow: Array) -> Array:
    """Cast a 16-bit value to float32 by integer operations.

    If XLA may keep excess precision, it removes a cast to 16 bits and back. Also, a cast flushes
    subnormals on some devices.
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


def _from_bits(integers: Array, dtype: DTypeLike) -> Array:
    return jax.lax.bitcast_convert_type(integers, dtype)


def stochastic(wide: Array, dtype: DTypeLike, key: Array) -> Array:
    """Round float32 values at random to one of their two neighbours in a 16-bit dtype.

    With ``lower <= |wide| < upper``, ``P(upper) = (|wide| - lower) / (upper - lower)``. So the mean
    is `wide`, up to an error of 2**-23 of ``upper - lower``, the resolution of a uniform float32. A
    finite value stays finite. On a device that flushes subnormals, bfloat16 below 2**-118 is
    rounded towards zero.
    """
    rounded = wide.astype(dtype)
    magnitude = jnp.abs(wide)
    past = (jnp.abs(_widened(rounded)) > magnitude).astype(jnp.int16)
    lower = _from_bits(bits(rounded) - past, dtype)
    upper = _from_bits(bits(lower) + jnp.int16(1), dtype)
    low, high = jnp.abs(_widened(lower)), jnp.abs(_widened(upper))
    drawn = jax.random.uniform(key, wide.shape, jnp.float32)
    return jnp.where(drawn * (high - low) < magnitude - low, upper, lower)
