"""Gradients counted by their exponents, and by what a narrow format makes of them."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradscaler.diagnose.gradients._arrays import named_arrays, to_numpy
from gradscaler.diagnose.gradients._formats import Format

_CHUNK = 2**17  # elements, so that intermediate results stay in the cache


def _share(doc: str, *names: str) -> Any:
    """A property: some of a histogram's numbers as a share of all gradients."""

    def share(histogram: Histogram) -> float:
        count = sum(getattr(histogram, name) for name in names)
        return count / histogram.size if histogram.size else 0.0

    return property(share, doc=doc)


@dataclass(frozen=True, eq=False)
class Histogram:
    """Gradients by their exponents, and by what they become when scaled and rounded.

    Attributes:
        size: how many gradients there are.
        num_zero: how many are 0 to begin with.
        num_flushed: how many become 0.
        num_subnormal: how many become subnormal, and lose bits.
        num_normal: how many become normal numbers.
        num_overflow: how many are finite, and become Inf, or NaN in a format without it.
        num_inf: how many are Inf to begin with.
        num_nan: how many are NaN to begin with.
        largest: the largest finite magnitude, before scaling; 0 if there is none.
        smallest: the smallest magnitude that is not 0, before scaling; inf if there is none.
        first: the exponent that ``counts`` begins with.
        counts: int64; ``counts[i]`` gradients have ``floor(log2(abs(g))) == first + i`` before
            scaling.
    """

    size: int
    num_zero: int
    num_flushed: int
    num_subnormal: int
    num_normal: int
    num_overflow: int
    num_inf: int
    num_nan: int
    largest: float
    smallest: float
    first: int
    counts: NDArray[Any]

    zero = _share("The share that is 0 to begin with.", "num_zero")
    flushed = _share("The share that becomes 0.", "num_flushed")
    subnormal = _share("The share that becomes subnormal.", "num_subnormal")
    normal = _share("The share that becomes normal numbers.", "num_normal")
    overflow = _share("The share that is finite, and becomes too large.", "num_overflow")
    nonfinite = _share("The share that is Inf or NaN to begin with.", "num_inf", "num_nan")

    def __add__(self, other: Histogram) -> Histogram:
        """The histogram of both, taken at one scale in one format."""
        first, counts = sum_of_bins([(self.first, self.counts), (other.first, other.counts)])
        return Histogram(
            **{name: getattr(self, name) + getattr(other, name) for name in _NUMBERS},
            largest=max(self.largest, other.largest),
            smallest=min(self.smallest, other.smallest),
            first=first,
            counts=counts,
        )


_NUMBERS = ("size", *(name for name in Histogram.__annotations__ if name.startswith("num_")))

NO_GRADIENTS = Histogram(0, 0, 0, 0, 0, 0, 0, 0, 0.0, math.inf, 0, np.zeros(0, np.int64))


def sum_of_bins(parts: Iterable[tuple[int, NDArray[Any]]]) -> tuple[int, NDArray[Any]]:
    """The sum of several histograms' bins, each given by its first exponent and its counts."""
    used = [(first, counts) for first, counts in parts if counts.size]
    if not used:
        return 0, np.zeros(0, np.int64)
    start = min(first for first, _ in used)
    stop = max(first + counts.size for first, counts in used)
    total = np.zeros(stop - start, used[0][1].dtype)
    for first, counts in used:
        total[first - start :][: counts.size] += counts
    return start, total


def histograms_of(gradients: Any, form: Format, scale: float) -> dict[str, Histogram]:
    """The histogram of each array, by its name, as in :func:`~gradscaler.diagnose.exponents`."""
    return {
        name: _histogram(to_numpy(array), form, scale)
        for name, array in named_arrays(gradients).items()
    }


def _histogram(values: NDArray[Any], form: Format, scale: float) -> Histogram:
    dtype = values.dtype if values.dtype in (np.float16, np.float32) else np.dtype(np.float64)
    limits = _limits(dtype, form, scale)
    flat = values.ravel(order="K")
    chunks = (
        flat[start : start + _CHUNK].astype(dtype, copy=False)
        for start in range(0, flat.size, _CHUNK)
    )
    return sum((_of_chunk(chunk, *limits) for chunk in chunks), start=NO_GRADIENTS)


def _of_chunk(values: NDArray[Any], kept: int, normal: int, overflow: int) -> Histogram:
    """The histogram of float16, float32 or float64 numbers.

    A larger magnitude has larger bits, read as an integer. So the bits are compared with limits:
    those of the smallest numbers that are not flushed, that become normal, and that overflow.
    """
    info, unsigned = np.finfo(values.dtype), _unsigned(values.dtype)
    bits = values.view(unsigned) & unsigned.type(np.iinfo(unsigned).max >> 1)
    fields = _exponent_fields(bits, info)
    num_nonfinite = int(fields[-1])
    num_nan = 0
    if num_nonfinite:
        infinity = _bits_of_infinity(values.dtype)
        num_nan = int(np.count_nonzero(bits > infinity))
        bits = bits[bits < infinity]
    num_nonzero = int(np.count_nonzero(bits))
    num_zero = bits.size - num_nonzero
    counts = np.concatenate([np.zeros(info.nmant, np.int64), fields[1:-1]])
    if fields[0] > num_zero:  # of subnormal numbers: their bits count the last place
        integers = (bits * (bits < 1 << info.nmant)).astype(np.float64)
        wide = _exponent_fields(integers.view(np.uint64), np.finfo(np.float64))
        counts[: info.nmant] = wide[1023:][: info.nmant]
    (used,) = counts.nonzero()
    counts = counts[used[0] : used[-1] + 1] if used.size else counts[:0]
    num_kept, num_normal, num_overflow = (
        int(np.count_nonzero(bits >= unsigned.type(limit))) for limit in (kept, normal, overflow)
    )
    one = unsigned.type(1)
    largest = smallest = unsigned.type(0)
    if num_nonzero:
        largest = bits.max()
        smallest = bits.min() if not num_zero else (bits - one).min() + one
    return Histogram(
        values.size,
        num_zero,
        num_nonzero - num_kept,
        num_kept - num_normal,
        num_normal - num_overflow,
        num_overflow,
        num_nonfinite - num_nan,
        num_nan,
        float(largest.view(values.dtype)),
        float(smallest.view(values.dtype)) if num_nonzero else math.inf,
        int(used[0]) + info.minexp - info.nmant if used.size else 0,
        counts,
    )


def _exponent_fields(bits: NDArray[Any], info: Any) -> NDArray[Any]:
    """How many magnitudes have each value of the exponent's bits; subnormal ones have 0."""
    return np.bincount((bits >> info.nmant).astype(np.intp), minlength=2**info.iexp)


@lru_cache
def _limits(dtype: np.dtype[Any], form: Format, scale: float) -> tuple[int, int, int]:
    """The bits of the smallest numbers that, times ``scale``, are kept, are normal, or overflow.

    Found by bisection over all bits in exact arithmetic, which rounds no product and no limit.
    """
    unsigned = _unsigned(dtype)
    all_finite = range(_bits_of_infinity(dtype))

    def scaled(bits: int) -> Fraction:
        return Fraction(float(unsigned.type(bits).view(dtype))) * Fraction(scale)

    _, exponent = math.frexp(form.largest)
    last_place = Fraction(2) ** (exponent - 1 - form.mantissa_bits)
    largest = Fraction(form.largest)
    # A tie goes to the even one of two neighbours: to 0, not to the smallest subnormal number; to
    # the smallest normal number; and out of range unless the largest number is even.
    half = Fraction(form.smallest_subnormal) / 2
    is_even = largest / last_place % 2 == 0
    return (
        bisect_right(all_finite, half, key=scaled),
        bisect_left(all_finite, Fraction(form.smallest_normal) - half, key=scaled),
        (bisect_right if is_even else bisect_left)(
            all_finite, largest + last_place / 2, key=scaled
        ),
    )


def _unsigned(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(f"u{dtype.itemsize}")


def _bits_of_infinity(dtype: np.dtype[Any]) -> int:
    return int(dtype.type(math.inf).view(_unsigned(dtype)))
