"""Rounds float32 values to 16 bits, either with a remainder or at random.

The 16-bit value is called ``narrow``. The remainder is another 16 bits, which hold the distance
from ``narrow`` to the float32 value. All functions work on whole tensors of any shape.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

_EXPONENT = 0x7F800000  # mask of the exponent's bits in a float32


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
    narrow = wide.to(dtype)
    return narrow, split_(wide, narrow, narrow.float()).to(torch.int16)


def split_(wide: torch.Tensor, narrow: torch.Tensor, near: torch.Tensor) -> torch.Tensor:
    """Compute the remainders of :func:`split` in place.

    Args:
        wide: float32 values.
        narrow: ``wide``, cast to 16 bits. Some ties are changed in place.
        near: ``narrow``, cast to float32. It is overwritten.

    Returns:
        The remainders, to be cast to int16. They are float32, or int32 for bfloat16, in the memory
        of ``near``.
    """
    if narrow.dtype is torch.bfloat16:
        # The bits of adjacent floats are adjacent integers, so the distance is a difference of
        # integers.
        bits = near.view(torch.int32)
        distance = torch.sub(wide.view(torch.int32), bits, out=bits)
        narrow.view(torch.int16).add_(distance == 32768)
        return distance  # a cast to int16 turns 32768 into -32768, the distance from the next one
    unit = _unit(near)
    # An Inf or NaN has no distance. join() restores it whatever its remainder is.
    steps = torch.sub(wide, near, out=near).div_(unit).mul_(2.0**24).round_()
    if not (steps.is_cpu and steps.numel() and steps.amax() <= 32767):
        is_beyond = steps > 32767
        narrow.add_(is_beyond, alpha=2.0**-24)
        steps.add_(is_beyond, alpha=-65536)
    return steps


def join(narrow: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Restore the float32 values that :func:`split` was given."""
    return join_(narrow.float(), remainder, narrow.dtype)


def join_(near: torch.Tensor, remainder: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Do the work of :func:`join` in place: ``near`` is a float32 copy of a tensor of ``dtype``."""
    if dtype is torch.bfloat16:
        bits = near.view(torch.int32).add_(remainder)
        if near.is_cpu and not (near.numel() and near.amax().isnan()):
            return near
        # Other code has set a value to zero, and the old remainder is negative. The bits wrapped
        # around, to a NaN that no remainder of a NaN gives.
        return near.masked_fill_((bits | -(2**31)) >= -(2**15), 0)
    return near.addcmul_(remainder.float(), _unit(near), value=2.0**-24)


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
    mantissa, smallest, largest = _FORMATS[dtype]
    binade = (wide.view(torch.int32) & _EXPONENT).view(torch.float32).clamp_(smallest, largest)
    # If there were more random bits than a float32 has left, the sum below would be rounded, and
    # might reach the next integer.
    uniform = random.bitwise_and_(-(1 << mantissa - 7)).float().mul_(2.0**-16).add_(0.5)
    units = wide.div(binade).mul_(2.0**mantissa).add_(uniform).floor_()
    return units.mul_(2.0**-mantissa).mul_(binade).to(dtype)


def random_bits(count: int, generator: torch.Generator) -> torch.Tensor:
    """``count`` int16 numbers, uniform over all 16 bits, on the generator's device."""
    words = torch.empty((count + 3) // 4, dtype=torch.int64, device=generator.device)
    words.random_(-(2**63), None, generator=generator)  # each int64 gives four int16 numbers
    return words.view(torch.int16)[:count]


def _unit(near: torch.Tensor) -> torch.Tensor:
    """2**24 times the unit of a float16's remainder.

    It is the largest power of two that is at most ``abs(near)``, clamped to 2**-16 from below. The
    unit is therefore half of float32's spacing at ``near``. It must be half, because float32's
    spacing is halved just below a power of two.
    """
    return (near.view(torch.int32) & _EXPONENT).view(torch.float32).clamp_(2.0**-16, 2.0**15)
