"""Rounds float32 values to 16 bits, either with a remainder or at random.

The 16-bit value is called ``narrow``. The remainder is another 16 bits, which hold the distance
from ``narrow`` to the float32 value. All functions work on whole tensors of any shape.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

# The mask of the exponent's bits in a float32: a tensor, which int32 tensors take without a cast.
_EXPONENT = torch.tensor(0x7F800000, dtype=torch.int32, device="cpu")
# Around it, float32 numbers are the integers: a sum is rounded to even, and its bits end with it.
_INTEGERS = 1.5 * 2.0**23


class _Format(NamedTuple):
    """A 16-bit float format: the bits of its mantissa, and its smallest and largest binade."""

    mantissa: int
    smallest: float
    largest: float


_FORMATS = {
    torch.float16: _Format(10, 2.0**-14, 2.0**15),
    torch.bfloat16: _Format(7, 2.0**-126, 2.0**127),
}
DTYPES = tuple(_FORMATS)


def split(wide: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Round float32 values to 16 bits, and keep the distance in an int16 tensor.

    ``narrow`` is the nearest value. For float16 below 2**-17, it may be farther than the nearest
    value by at most 2**-40. A tie goes to the even mantissa, as in a cast, unless only the distance
    from the other value fits into 16 bits. So each bfloat16 tie is rounded away from zero, and each
    float16 tie below 2**-15 - 2**-24 is rounded up.

    Returns:
        ``narrow`` and the remainder. If ``narrow`` is finite, :func:`join` restores the float32
        value exactly from bfloat16, and from float16 at magnitudes of 2**-17 or more. Below that,
        the error is at most 2**-41; that of float16 itself is up to 2**-25. A zero loses its sign
        in float16.
    """
    narrow = torch.empty_like(wide, dtype=dtype)
    remainder = torch.empty_like(wide, dtype=torch.int16)
    return narrow, split_(wide.clone(), narrow, torch.empty_like(wide), remainder)


def split_(
    wide: torch.Tensor, narrow: torch.Tensor, near: torch.Tensor, remainder: torch.Tensor
) -> torch.Tensor:
    """Do the work of :func:`split` in given memory.

    Args:
        wide: float32 values. They are overwritten.
        narrow: the memory of the 16-bit values.
        near: float32 memory, which is overwritten.
        remainder: int16 memory of the remainders. It may lie in that of ``near``.

    Returns:
        ``remainder``.
    """
    if narrow.dtype is torch.bfloat16:
        return _split_bits(wide.view(torch.int32), narrow, near.view(torch.int32), remainder)
    near.copy_(narrow.copy_(wide))
    # An Inf or NaN has no distance. join() restores it whatever its remainder is.
    distance, unit = wide.sub_(near), _unit(near, out=near)
    integers = wide.new_full((), _INTEGERS)
    steps = torch.addcdiv(integers, distance, unit, value=2.0**24, out=wide)
    remainder.copy_(steps.view(torch.int32))
    if not (remainder.is_cpu and remainder.numel() and remainder.amin().item() > -32768):
        narrow.add_(steps > _INTEGERS + 32767, alpha=2.0**-24)  # 32768 has wrapped around
    return remainder


def _split_bits(
    wide: torch.Tensor, narrow: torch.Tensor, near: torch.Tensor, remainder: torch.Tensor
) -> torch.Tensor:
    """Do the work of :func:`split_` for bfloat16, whose bits are the upper half of a float32's.

    The bits of adjacent floats are adjacent integers, so the distance is the lower half. ``wide``
    and ``near`` are the bits of float32 values.
    """
    narrow.view(torch.int16).copy_(torch.add(wide, 2**15, out=near).bitwise_right_shift_(16))
    values = wide.view(torch.float32)
    if not (wide.is_cpu and wide.numel() and not values.amax().isnan()):
        # The sum of a NaN's bits may have wrapped around.
        narrow.masked_fill_(values.isnan(), torch.nan)
    return remainder.copy_(wide)


def join(narrow: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Restore the float32 values that :func:`split` was given."""
    near = narrow.float()
    distance = remainder if narrow.dtype is torch.bfloat16 else remainder.float()
    return join_(near, distance, torch.empty_like(near), narrow.dtype)


def join_(
    near: torch.Tensor, remainder: torch.Tensor, unit: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Do the work of :func:`join` in given memory.

    Args:
        near: a float32 copy of a tensor of ``dtype``. It becomes the result.
        remainder: the remainders, cast to float32 if ``dtype`` is float16.
        unit: float32 memory, which is overwritten.
        dtype: float16 or bfloat16.
    """
    if dtype is torch.bfloat16:
        bits = near.view(torch.int32).add_(remainder)
        if near.is_cpu and not (near.numel() and near.amax().isnan()):
            return near
        # Other code has set a value to zero, and the old remainder is negative. The bits wrapped
        # around, to a NaN that no remainder of a NaN gives.
        return near.masked_fill_((bits | -(2**31)) >= -(2**15), 0)
    return near.addcmul_(remainder, _unit(near, out=unit), value=2.0**-24)


def round_at_random(wide: torch.Tensor, dtype: torch.dtype, random: torch.Tensor) -> torch.Tensor:
    """Round each float32 value to one of its two 16-bit neighbours at random, unbiased.

    The probability of rounding up is the distance from the lower neighbour divided by the spacing.
    It has a resolution of 2**-13 (float16) or 2**-16 (bfloat16), which is exact for normal numbers.
    A value that ``dtype`` represents exactly does not change.

    Args:
        wide: float32.
        dtype: float16 or bfloat16.
        random: int16 of the same shape, uniform over all 16 bits; it is overwritten.
    """
    memory = torch.empty_like(wide), torch.empty_like(wide)
    return round_at_random_(wide.clone(), dtype, random, *memory).to(dtype)


def round_at_random_(
    wide: torch.Tensor,
    dtype: torch.dtype,
    random: torch.Tensor,
    binade: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    """Do the work of :func:`round_at_random` in place, but for the cast to ``dtype``.

    ``binade`` and ``uniform`` are float32 memory, which is overwritten.
    """
    mantissa, smallest, largest = _FORMATS[dtype]
    torch.bitwise_and(wide.view(torch.int32), _EXPONENT, out=binade.view(torch.int32))
    binade.clamp_(smallest, largest)
    # If there were more random bits than a float32 has left, the sum below would be rounded, and
    # might reach the next integer.
    uniform.copy_(random.bitwise_and_(-(1 << mantissa - 7))).mul_(2.0**-16).add_(0.5)
    wide.div_(binade).mul_(2.0**mantissa).add_(uniform).floor_()
    return wide.mul_(2.0**-mantissa).mul_(binade)


def random_bits(count: int, generator: torch.Generator) -> torch.Tensor:
    """``count`` int16 numbers, uniform over all 16 bits, on the generator's device."""
    words = torch.empty((count + 3) // 4, dtype=torch.int64, device=generator.device)
    words.random_(-(2**63), None, generator=generator)  # each int64 gives four int16 numbers
    return words.view(torch.int16)[:count]


def _unit(near: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """2**24 times the unit of a float16's remainder.

    It is the largest power of two that is at most ``abs(near)``, clamped to 2**-16 from below. The
    unit is therefore half of float32's spacing at ``near``. It must be half, because float32's
    spacing is halved just below a power of two.
    """
    torch.bitwise_and(near.view(torch.int32), _EXPONENT, out=out.view(torch.int32))
    return out.clamp_(2.0**-16, 2.0**15)
