"""A look at the gradients of one step: their norm, and what the scale makes of a part of them."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradscaler.diagnose import arrays, formats
from gradscaler.diagnose.exponents import Histogram, histograms_of
from gradscaler.diagnose.runs import Bins, ParameterSample, Shares

_MOST_ELEMENTS = 2**14  # of one parameter
_MOST_WORST = 5
_SMALL = 0.05  # of the gradients


@dataclass(frozen=True)
class Measured:
    """What is found of a step's gradients, of one optimizer.

    Attributes:
        norm: of them all, unscaled.
        sizes: how many elements each has, by the parameters' names.
        histograms: of a part of each.
    """

    norm: float
    sizes: Mapping[str, int]
    histograms: Mapping[str, Histogram]


def measure(
    gradients: Mapping[str, Any],
    dtype: str,
    scale: float,
    scaled: bool,
    norm: float | None = None,
) -> Measured:
    """Look at gradients.

    Args:
        gradients: by the parameters' names.
        dtype: the format whose range the shares are told for.
        scale: the loss scale in use.
        scaled: whether they are still multiplied by it.
        norm: of them all, if it is known.
    """
    divisor = scale if scaled else 1.0
    if norm is None:
        norm = math.hypot(*map(_norm_of, gradients.values()))
    parts = {name: _part(array) / np.float32(divisor) for name, array in gradients.items()}
    sizes = {name: math.prod(arrays.shape_of(array)) for name, array in gradients.items()}
    return Measured(norm / divisor, sizes, histograms_of(parts, formats.named(dtype), scale))


def fields(measured: Iterable[Measured]) -> dict[str, Any]:
    """What a :class:`~gradscaler.diagnose.runs.Sample` says of the gradients of all optimizers."""
    norm, sizes, histograms = 0.0, dict[str, int](), dict[str, Histogram]()
    for one in measured:
        norm = math.hypot(norm, one.norm)
        sizes |= one.sizes
        histograms |= one.histograms
    parameters = {
        name: ParameterSample(
            found.zero, found.flushed, found.subnormal, found.nonfinite, _bins(found)
        )
        for name, found in histograms.items()
    }
    if not parameters:
        return {}
    weights = {name: sizes[name] / found.size for name, found in histograms.items() if found.size}
    size = sum(sizes[name] for name in weights) or 1
    shares = {
        share: sum(getattr(histograms[name], share) * sizes[name] for name in weights) / size
        for share in (field.name for field in dataclasses.fields(Shares))
    }
    return {
        "norm": norm,
        "shares": Shares(**{name: min(share, 1.0) for name, share in shares.items()}),
        "histogram": _total(histograms, weights),
        "parameters": parameters,
        "worst": _worst(parameters, shares["flushed"] + shares["subnormal"]),
    }


def _part(array: Any) -> np.ndarray[Any, Any]:
    """A sample of an array, in float32 at least."""
    values = arrays.to_numpy(arrays.sample(array, _MOST_ELEMENTS))
    return values.astype(np.result_type(values, np.float32), copy=False)


def _worst(parameters: Mapping[str, ParameterSample], small: float) -> tuple[str, ...]:
    """The worst parameters first.

    Args:
        parameters: what was found of each.
        small: the share of all gradients that are flushed or subnormal. With some, those that are
            zero throughout pass for flushed; without, for unused, and come last.
    """

    def badness(name: str) -> tuple[bool, float, float]:
        found = parameters[name]
        is_unused = found.zero == 1 and small < _SMALL
        return is_unused, -found.nonfinite, -(found.zero + found.flushed + found.subnormal)

    return tuple(sorted(parameters, key=badness)[:_MOST_WORST])


def _bins(found: Histogram) -> Bins:
    return Bins(found.first, tuple(found.counts.tolist()))


def _total(histograms: Mapping[str, Histogram], weights: Mapping[str, float]) -> Bins:
    """All histograms together, each counting for as many gradients as it was drawn from."""
    used = [(h, weights[name]) for name, h in histograms.items() if h.counts.size]
    if not used:
        return Bins(0, ())
    first = min(h.first for h, _ in used)
    total = np.zeros(max(h.first + h.counts.size for h, _ in used) - first)
    for histogram, weight in used:
        start = histogram.first - first
        total[start : start + histogram.counts.size] += histogram.counts * weight
    return Bins(first, tuple(np.rint(total).astype(np.int64).tolist()))


def _norm_of(array: Any) -> float:
    """The 2-norm of one array."""
    jax: Any = sys.modules.get("jax")
    if jax is not None and isinstance(array, jax.Array):  # found where the array is
        return float(jax.numpy.linalg.norm(array.astype("float32").ravel()))
    flat = arrays.to_numpy(array).ravel()
    with np.errstate(over="ignore"):  # finite numbers may have squares that are not
        norm = float(np.linalg.norm(flat if flat.dtype.itemsize > 2 else flat.astype(np.float32)))
    return norm if math.isfinite(norm) else float(np.linalg.norm(flat.astype(np.float64)))
