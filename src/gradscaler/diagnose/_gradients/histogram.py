"""Histograms of gradients that are rounded to a narrow format."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradscaler.diagnose._gradients.arrays import named_arrays, to_numpy
from gradscaler.diagnose._record.formats import Format

_CHUNK = 2**17  # elements, so that intermediate results stay in the cache


def _share(doc: str, *names: str) -> property:
    """A property: the sum of some of a histogram's counts, as a share of all gradients."""

    def share(histogram: Histogram) -> float:
        count = sum(getattr(histogram, name) for name in names)
        return count / histogram.size if histogram.size else 0.0

    return property(share, doc=doc)


@dataclass(frozen=True, eq=False)
class Histogram:
    """Counts of gradients by their exponents, and by what they become when scaled and rounded.

    Attributes:
        size: how many gradients there are.
        num_zero: how many are 0 to begin with.
        num_flushed: how many become 0.
        num_subnormal: how many become subnormal, and lose bits.
        num_normal: how many become normal numbers.
        num_overflow: how many are finite and become Inf, or NaN in a format without Inf.
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
        """The histogram of both together; both must have the same scale and format."""
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
    """The sum of several histograms' bins; each part is a first exponent and counts."""
    used = [(first, counts) for first, counts in parts if counts.size]
    if not used:
        return 0, np.zeros(0, np.int64)
    start = min(first for first, _ in used)
    stop = max(first + counts.size for first, counts in used)
    total = np.zeros(stop - start, used[0][1].dtype)
    for first, counts in used:
        total[first - start :][: counts.size] += counts
    return start, total


def histograms_of(gradients: object, form: Format, scale: float) -> dict[str, Histogram]:
    """The histogram of each array by name, for :func:`~gradscaler.diagnose.exponents`."""
    return {
        name: _histogram(to_numpy(array), form, scale)
        for name, array in named_arrays(gradients).items()
    }


def _histogram(values: NDArray[Any], form: Format, scale: float) -> Histogram:
    flat, limits = values.ravel(order="K"), _limits(form, scale)
    starts = range(0, flat.size, _CHUNK)
    with np.errstate(invalid="ignore"):  # a NaN is a valid value here
        chunks = (flat[start : start + _CHUNK].astype(np.float64) for start in starts)
        return sum((_of_chunk(chunk, limits) for chunk in chunks), start=NO_GRADIENTS)


def _of_chunk(values: NDArray[Any], limits: tuple[float, float, float]) -> Histogram:
    magnitudes = np.abs(values)
    nonzero = magnitudes[(magnitudes > 0) & (magnitudes < math.inf)]
    num_zero = int(np.count_nonzero(magnitudes == 0))
    num_inf = int(np.count_nonzero(magnitudes == math.inf))
    num_kept, num_normal, num_overflow = (
        int(np.count_nonzero(nonzero >= limit)) for limit in limits
    )
    exponents = np.frexp(nonzero)[1] - 1  # frexp's mantissas are below 1
    first = int(exponents.min()) if exponents.size else 0
    return Histogram(
        values.size,
        num_zero,
        nonzero.size - num_kept,
        num_kept - num_normal,
        num_normal - num_overflow,
        num_overflow,
        num_inf,
        values.size - num_zero - nonzero.size - num_inf,
        float(nonzero.max(initial=0.0)),
        float(nonzero.min(initial=math.inf)),
        first,
        np.bincount(exponents - first),
    )


@lru_cache
def _limits(form: Format, scale: float) -> tuple[float, float, float]:
    """The smallest magnitudes in float64 that, times ``scale``, are kept, are normal, and overflow.

    They are computed in exact arithmetic, so that no product and no limit is rounded.
    """
    _, exponent = math.frexp(form.largest)
    last_place = Fraction(2) ** (exponent - 1 - form.mantissa_bits)
    largest = Fraction(form.largest)
    # A tie rounds to the even neighbour. Half the smallest subnormal number rounds to 0. The tie
    # below the smallest normal number rounds up to it. The tie above the largest number overflows,
    # unless the largest number is even.
    half = Fraction(form.smallest_subnormal) / 2
    is_even = largest / last_place % 2 == 0
    return (
        _smallest_float(half / Fraction(scale), above=True),
        _smallest_float((Fraction(form.smallest_normal) - half) / Fraction(scale), above=False),
        _smallest_float((largest + last_place / 2) / Fraction(scale), above=is_even),
    )


def _smallest_float(limit: Fraction, above: bool) -> float:
    """The smallest float64 that is at least ``limit``, or greater than it if ``above``."""
    nearest = float(limit)
    is_enough = nearest > limit if above else nearest >= limit
    return nearest if is_enough else math.nextafter(nearest, math.inf)
