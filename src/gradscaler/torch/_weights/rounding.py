"""float32 values in 16 bits: rounded with the rest beside it, or rounded at random.

Both work on tensors of any shape, and on whole tensors at once. 16 bits hold a value ``narrow``;
other 16 bits, the remainder, hold the distance from there to the float32 value.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

_EXPONENT = 0x7F800000  # of a float32


class _Format(NamedTuple):
    """A float format of 16 bits: the mantissa's, and the smallest and largest binade."""

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

    ``narrow`` is the nearest value, of float16 below 2**-17 to within 2**-40. Of two that are
    equally near it is the one with an even mantissa, as in a cast, unless only the other's distance
    fits into 16 bits. That is so for a bfloat16 whose mantissa's last bit the cast would leave at
    0, and for some float16 below 2**-15.

    Returns:
        ``narrow``, and the remainder. :func:`join` gives back all bits of a value that ``dtype``
        holds as a finite one, for float16 down to magnitudes of 2**-17. Below that it is off by at
        most 2**-41, where float16 itself is off by 2**-25. A zero comes back from float16 without
        its sign.
    """
    narrow = wide.to(dtype)
    return narrow, split_(wide, narrow, narrow.float()).to(torch.int16)


def split_(wide: torch.Tensor, narrow: torch.Tensor, near: torch.Tensor) -> torch.Tensor:
    """The same, where the values were cast to ``narrow``, and that to ``near``, a float32 tensor.

    Both may change. The distances come back in the memory of ``near``, as numbers to cast to int16:
    float32, or int32 for bfloat16.
    """
    if narrow.dtype is torch.bfloat16:
        # Adjacent floats have adjacent integers, so the distance is one of integers.
        bits = near.view(torch.int32)
        distance = torch.sub(wide.view(torch.int32), bits, out=bits)
        narrow.view(torch.int16).add_(distance == 32768)
        return distance  # as int16, 32768 becomes -32768, from the next float
    unit = _unit(near)
    # An Inf or NaN has no distance, and whatever is stored for it, join() gives it back.
    steps = torch.sub(wide, near, out=near).div_(unit).mul_(2.0**24).round_()
    if not (steps.is_cpu and steps.numel() and steps.amax() <= 32767):
        is_beyond = steps > 32767
        narrow.add_(is_beyond, alpha=2.0**-24)
        steps.add_(is_beyond, alpha=-65536)
    return steps


def join(narrow: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The float32 values that :func:`split` has split."""
    return join_(narrow.float(), remainder, narrow.dtype)


def join_(near: torch.Tensor, remainder: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same in place: ``near`` has the values of ``narrow``, whose dtype is ``dtype``."""
    if dtype is torch.bfloat16:
        near.view(torch.int32).add_(remainder)
        return near
    return near.addcmul_(remainder.float(), _unit(near), value=2.0**-24)


def round_at_random(wide: torch.Tensor, dtype: torch.dtype, random: torch.Tensor) -> torch.Tensor:
    """Round each float32 value to one of the two nearest of 16 bits, unbiased.

    It goes up with a probability of its distance from the lower one, in steps of 2**-13 (float16)
    or 2**-16 (bfloat16), which is exact for normal numbers. A value of ``dtype`` stays.

    Args:
        wide: float32.
        dtype: float16 or bfloat16.
        random: int16, uniform over all 16 bits, of the same shape; it is overwritten.
    """
    mantissa, smallest, largest = _FORMATS[dtype]
    binade = (wide.view(torch.int32) & _EXPONENT).view(torch.float32).clamp_(smallest, largest)
    # With more random bits than a float32 has left, a sum would be rounded, up to the next integer.
    uniform = random.bitwise_and_(-(1 << mantissa - 7)).float().mul_(2.0**-16).add_(0.5)
    units = wide.div(binade).mul_(2.0**mantissa).add_(uniform).floor_()
    return units.mul_(2.0**-mantissa).mul_(binade).to(dtype)


def random_bits(count: int, generator: torch.Generator) -> torch.Tensor:
    """As many int16 numbers, uniform over all 16 bits, on the generator's device."""
    words = torch.empty((count + 3) // 4, dtype=torch.int64, device=generator.device)
    words.random_(-(2**63), None, generator=generator)  # four for each draw
    return words.view(torch.int16)[:count]


def _unit(near: torch.Tensor) -> torch.Tensor:
    """2**24 times the unit of a float16's remainder: the power of two below it, from 2**-16 on.

    So a unit is half of a float32's last place, as it is just below a power of two.
    """
    return (near.view(torch.int32) & _EXPONENT).view(torch.float32).clamp_(2.0**-16, 2.0**15)
