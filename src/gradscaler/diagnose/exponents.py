"""How large gradients are, and what a narrow format makes of them at a loss scale."""

from __future__ import annotations

import math
import warnings
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradscaler.diagnose import arrays, formats
from gradscaler.policies import checks

_CHUNK = 2**17  # elements: what is made of them on the way stays in the cache
_LARGEST_POWER = 127  # of 2, that a float32 loss scale can be


@dataclass(frozen=True, eq=False)
class Histogram:
    """Gradients by their exponents, and by what becomes of them once scaled and rounded.

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

    @property
    def zero(self) -> float:
        """The share that is 0 to begin with."""
        return self._share(self.num_zero)

    @property
    def flushed(self) -> float:
        """The share that becomes 0."""
        return self._share(self.num_flushed)

    @property
    def subnormal(self) -> float:
        """The share that becomes subnormal."""
        return self._share(self.num_subnormal)

    @property
    def normal(self) -> float:
        """The share that becomes normal numbers."""
        return self._share(self.num_normal)

    @property
    def overflow(self) -> float:
        """The share that is finite, and becomes too large."""
        return self._share(self.num_overflow)

    @property
    def nonfinite(self) -> float:
        """The share that is Inf or NaN to begin with."""
        return self._share(self.num_inf + self.num_nan)

    def _share(self, count: int) -> float:
        return count / self.size if self.size else 0.0

    def __add__(self, other: Histogram) -> Histogram:
        """The histogram of both, taken at one scale in one format."""
        parts = [part for part in (self, other) if part.counts.size]
        first = min((part.first for part in parts), default=0)
        end = max((part.first + part.counts.size for part in parts), default=0)
        counts = np.zeros(end - first, np.int64)
        for part in parts:
            counts[part.first - first :][: part.counts.size] += part.counts
        return Histogram(
            self.size + other.size,
            self.num_zero + other.num_zero,
            self.num_flushed + other.num_flushed,
            self.num_subnormal + other.num_subnormal,
            self.num_normal + other.num_normal,
            self.num_overflow + other.num_overflow,
            self.num_inf + other.num_inf,
            self.num_nan + other.num_nan,
            max(self.largest, other.largest),
            min(self.smallest, other.smallest),
            first,
            counts,
        )


@dataclass(frozen=True, eq=False)
class Exponents:
    """What :func:`exponents` found.

    Attributes:
        dtype: the format's name.
        scale: what the gradients are multiplied by before they are rounded to it.
        total: all gradients together.
        parameters: each array by itself, by its name.
    """

    dtype: str
    scale: float
    total: Histogram
    parameters: dict[str, Histogram]

    def largest_scale(self, headroom: int = 1) -> float:
        """The largest power of two that the finite gradients can be multiplied by.

        Such an s that ``largest * s * 2**headroom`` is at most the format's largest number, and
        no more than a float32 holds: ``2**127``. Inf if no finite gradient is other than 0.

        Args:
            headroom: how many times gradients are to be able to double.
        """
        if not self.total.largest:
            return math.inf
        mantissa, exponent = math.frexp(self.total.largest)
        limit, power = math.frexp(formats.named(self.dtype).largest)
        power -= exponent + headroom + (mantissa > limit)
        return math.ldexp(1.0, min(power, _LARGEST_POWER))

    def __str__(self) -> str:
        columns = ("zero", "flushed", "subnormal", "normal", "overflow", "nonfinite")
        rows = {"all": self.total, **self.parameters}
        width = max(map(len, rows))
        lines = [
            f"{self.total.size} gradients in {self.dtype}, scaled by {self.scale:g}",
            " ".join([" " * width, *(f"{column:>9}" for column in columns)]),
        ]
        for name, histogram in rows.items():
            shares = (f"{getattr(histogram, column):9.2%}" for column in columns)
            lines.append(" ".join([f"{name:<{width}}", *shares]))
        if doubt := self._doubt():
            lines.append(doubt)
        return "\n".join(lines)

    def _doubt(self) -> str:
        """What may be wrong with the call if most gradients overflow; else nothing."""
        total = self.total
        finite = total.num_flushed + total.num_subnormal + total.num_normal + total.num_overflow
        if self.scale <= 1 or 2 * total.num_overflow <= finite:
            return ""
        return (
            f"{total.num_overflow / finite:.0%} of the finite nonzero gradients overflow "
            f"{self.dtype} at scale {self.scale:g}. If they are already multiplied by the loss "
            "scale, as after scaler.scale(loss).backward(), pass scale=1.0, or call exponents "
            "after scaler.unscale_(optimizer). If they are not, this scale is too large for them."
        )


def exponents(gradients: Any, dtype: str = "float16", scale: float = 1.0) -> Exponents:
    """The exponents of gradients, and what ``gradients * scale`` becomes in a format.

    The products are rounded to nearest, ties to even, and once: no product is rounded on the way.

    Args:
        gradients: arrays of any framework, in any structure that :func:`~.arrays.named` takes.
        dtype: ``"float16"``, ``"bfloat16"``, ``"float8_e4m3"`` (the OCP one without infinities,
            where what is beyond 464 becomes NaN) or ``"float8_e5m2"``.
        scale: a loss scale. Gradients of a scaled loss are already multiplied by theirs: pass 1.0
            for them, or unscale them first.

    Returns:
        The histograms, of each array and of all.

    Warns:
        UserWarning: most of the gradients overflow at this scale, as they do where they are
            multiplied by it twice.

    Raises:
        ValueError: ``dtype`` is another, or ``scale`` cannot be a loss scale.
        TypeError: ``scale`` is no number, or ``gradients`` holds something else than arrays.

    >>> import numpy as np
    >>> found = exponents({"weight": np.float32([0.0, 1e-8, 1e-6, 1.0])})
    >>> found.total.flushed, found.total.subnormal, found.largest_scale()
    (0.25, 0.25, 16384.0)
    >>> print(found)
    4 gradients in float16, scaled by 1
                zero   flushed subnormal    normal  overflow nonfinite
    all       25.00%    25.00%    25.00%    25.00%     0.00%     0.00%
    weight    25.00%    25.00%    25.00%    25.00%     0.00%     0.00%
    """
    form = formats.named(dtype)
    scale = checks.loss_scale("scale", scale)
    parameters = histograms_of(gradients, form, scale)
    found = Exponents(form.name, scale, sum(parameters.values(), start=_EMPTY), parameters)
    if doubt := found._doubt():
        warnings.warn(doubt, stacklevel=2)
    return found


def histograms_of(gradients: Any, form: formats.Format, scale: float) -> dict[str, Histogram]:
    """The histogram of each array, by its name, as in :func:`exponents`."""
    return {
        name: _histogram(arrays.to_numpy(array), form, scale)
        for name, array in arrays.named(gradients).items()
    }


_EMPTY = Histogram(0, 0, 0, 0, 0, 0, 0, 0, 0.0, math.inf, 0, np.zeros(0, np.int64))


def _histogram(values: NDArray[Any], form: formats.Format, scale: float) -> Histogram:
    dtype = values.dtype if values.dtype in (np.float16, np.float32) else np.dtype(np.float64)
    limits = _limits(dtype, form, scale)
    flat = values.ravel(order="K")
    chunks = (
        flat[start : start + _CHUNK].astype(dtype, copy=False)
        for start in range(0, flat.size, _CHUNK)
    )
    return sum((_of_chunk(chunk, *limits) for chunk in chunks), start=_EMPTY)


def _of_chunk(values: NDArray[Any], kept: int, normal: int, overflow: int) -> Histogram:
    """The histogram of float16, float32 or float64 numbers.

    Of magnitudes the larger has the larger bits, taken as an integer. So they are compared with
    bits: the least of those that are not flushed, that become normal, and that overflow.
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
    if fields[0] > num_zero:  # subnormal numbers: their bits are integers, to be made normal
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
    """How many of magnitudes have each value of the exponent's bits; 0 if they are subnormal."""
    return np.bincount((bits >> info.nmant).astype(np.intp), minlength=2**info.iexp)


@lru_cache
def _limits(dtype: np.dtype[Any], form: formats.Format, scale: float) -> tuple[int, int, int]:
    """The bits of the least numbers that times ``scale`` are kept, become normal, and overflow.

    Found by bisection over all bits, in exact arithmetic: neither products nor limits are rounded.
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
