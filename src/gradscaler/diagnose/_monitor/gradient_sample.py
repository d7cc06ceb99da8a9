"""Samples of gradients: their norm, and histograms of a part of them at the loss scale."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradscaler.diagnose._gradients.arrays import Array, sample_of, shape_of, to_numpy
from gradscaler.diagnose._gradients.histogram import Histogram, histograms_of, sum_of_bins
from gradscaler.diagnose._gradients.reading import largest
from gradscaler.diagnose._record.formats import format_named
from gradscaler.diagnose._record.lines import Bins, ParameterSample, Shares
from gradscaler.diagnose._record.thresholds import UNUSED

EARLY = 2, 5, 10, 20, 50  # steps of a run that are sampled, about equally far apart in logarithm
_MOST_WORST = 5  # parameters; each has a histogram in the line
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, which fractions approximate worst of all
_WHOLE = 2**64


def is_sampled(step: int, every: int, before: int = 0) -> bool:
    """Whether a step, counted from 1, is sampled, of a run with ``before`` steps before it.

    One of ``every`` steps is. So that a short run can be judged too, steps 2, 5, 10, 20 and 50 of
    the run are sampled as well. If ``every`` is 50 or less, they are not: its own first sample
    comes soon enough, and the caller has said how many samples to take.

    >>> [step for step in range(1, 401) if is_sampled(step, every=100)]
    [2, 5, 10, 20, 50, 100, 139, 277, 315]
    >>> [step for step in range(1, 31) if is_sampled(step, every=10)]
    [10, 14, 28]
    """
    is_early = every > EARLY[-1] and step - before in EARLY
    return is_early or is_in_window(step, every)


def is_in_window(step: int, every: int) -> bool:
    """Whether a step, counted from 1, is the sample of its window of ``every`` steps.

    The sample of window ``k``, the steps from ``k * every + 1`` to ``(k + 1) * every``, is
    ``floor(every * frac(k * golden_ratio))`` steps before the window's last step. So the first
    window's sample is its last step, and later samples are spread evenly over their windows. If
    batches repeat with a period that divides a fixed stride, that stride sees only one batch. This
    sequence sees each batch equally often, whatever the period. The sequence is the same in every
    run and draws no random numbers.

    >>> [step for step in range(1, 51) if is_in_window(step, every=10)]
    [10, 14, 28, 32, 46]
    """
    window, place = divmod(step - 1, every)
    before_last = window * _GOLDEN % _WHOLE * every // _WHOLE
    return place == every - 1 - before_last


@dataclass(frozen=True)
class GradientSample:
    """The measurements of one optimizer's gradients in one step, by the parameters' names."""

    norm: float  # of all gradients, unscaled
    sizes: Mapping[str, int]  # the number of elements of each gradient
    histograms: Mapping[str, Histogram]  # of a part of each gradient
    unseen: frozenset[str] = frozenset()  # gradients that are not all 0, though this part is
    missing: tuple[str, ...] = ()  # parameters that require a gradient and have none
    unmoved: float | None = None  # share of 16-bit elements unchanged since the sample before

    @property
    def lacks_gradient(self) -> bool:
        """Whether a parameter's gradient is all 0, or missing."""
        zeros = {name for name, h in self.histograms.items() if h.num_zero == h.size > 0}
        return bool(zeros - self.unseen or self.missing)


def measure(
    gradients: Mapping[str, Array],
    dtype: str,
    scale: float,
    scaled: bool,
    norm: float | None = None,
) -> GradientSample:
    """Measure gradients, given by the parameters' names.

    The histograms refer to the range of ``dtype``. ``scaled`` says whether the gradients are still
    multiplied by the loss scale. ``norm`` is the norm of all gradients as given, if it is known.
    """
    divisor = scale if scaled else 1.0
    if norm is None:
        norm = math.hypot(*map(_norm_of, gradients.values()))
    parts = {name: sample_of(array) for name, array in gradients.items()}
    parts = {
        n: part.astype(np.result_type(part, np.float32)) / np.float32(divisor)
        for n, part in parts.items()
    }
    sizes = {name: math.prod(shape_of(array)) for name, array in gradients.items()}
    histograms = histograms_of(parts, format_named(dtype), scale)
    # A part that is all 0 proves nothing: in an embedding, few rows have a gradient.
    zeros = {name for name, h in histograms.items() if h.num_zero == h.size < sizes[name]}
    unseen = frozenset(name for name in zeros if largest(gradients[name]))
    return GradientSample(norm / divisor, sizes, histograms, unseen)


def fields_of(measured: Iterable[GradientSample]) -> dict[str, Any]:
    """The fields of a :class:`~gradscaler.diagnose._record.lines.Sample` over all optimizers."""
    norm, sizes, histograms = 0.0, dict[str, int](), dict[str, Histogram]()
    unseen, missing, unmoved = set[str](), list[str](), list[float]()
    for one in measured:
        unmoved += [] if one.unmoved is None else [one.unmoved]
        missing += one.missing
        norm = math.hypot(norm, one.norm)
        unseen |= one.unseen
        sizes |= one.sizes
        histograms |= one.histograms
    if not histograms:
        return {}
    parameters = {
        name: ParameterSample(
            1 - 1 / sizes[name] if name in unseen else h.zero,
            *(h.flushed, h.subnormal, h.nonfinite),
            Bins(h.first, tuple(h.counts.tolist())),
        )
        for name, h in histograms.items()
    }
    used = {name: h for name, h in histograms.items() if h.size}
    size = sum(sizes[name] for name in used) or 1
    shares = {
        share: sum(getattr(h, share) * sizes[name] for name, h in used.items()) / size
        for share in (field.name for field in dataclasses.fields(Shares))
    }
    # Each histogram is weighted to count all gradients that it was sampled from.
    first, counts = sum_of_bins(
        (h.first, h.counts * (sizes[name] / h.size)) for name, h in used.items()
    )
    return {
        "norm": norm,
        "largest": max((h.largest for h in used.values()), default=None),
        "shares": Shares(**{name: min(share, 1.0) for name, share in shares.items()}),
        "histogram": Bins(first, tuple(np.rint(counts).astype(np.int64).tolist())),
        "parameters": parameters,
        "missing": tuple(missing),
        "unmoved": max(unmoved, default=None),
        "worst": _worst(parameters, shares["flushed"] + shares["subnormal"]),
    }


def _worst(parameters: Mapping[str, ParameterSample], small: float) -> tuple[str, ...]:
    """The names of the worst parameters, the worst first.

    ``small`` is the share of all gradients that are flushed or subnormal. If it is low, a parameter
    whose gradient is all 0 counts as unused and comes last; else its zeros count as flushed.
    """

    def badness(name: str) -> tuple[bool, float, float]:
        found = parameters[name]
        is_unused = found.zero == 1 and small < UNUSED
        return is_unused, -found.nonfinite, -(found.zero + found.flushed + found.subnormal)

    return tuple(sorted(parameters, key=badness)[:_MOST_WORST])


def _norm_of(array: Array) -> float:
    """The 2-norm of one array; JAX computes it on the array's device."""
    jax: Any = sys.modules.get("jax")
    if jax is not None and isinstance(array, jax.Array):
        return float(jax.numpy.linalg.norm(array.astype("float32").ravel()))
    return float(np.linalg.norm(to_numpy(array).ravel().astype(np.float64)))
