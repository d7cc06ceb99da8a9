"""Which gradients are not finite, and how."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradscaler.diagnose._gradients.arrays import dtype_name, named_arrays, shape_of, to_numpy
from gradscaler.outcome import NonfiniteGradient


def inspect(gradients: Any) -> tuple[NonfiniteGradient, ...]:
    """The gradients that hold an Inf or a NaN, in the order given.

    A sparse gradient counts by its values, with the rows of one index summed; a complex one by its
    real and imaginary parts.

    Args:
        gradients: arrays of any framework, in any structure that
            :func:`~gradscaler.diagnose.exponents` takes.

    Raises:
        TypeError: ``gradients`` holds something that is not an array.

    >>> import numpy as np
    >>> inspect({"weight": np.float16([1, np.inf, -np.inf, np.nan]), "bias": np.float16([1])})
    (NonfiniteGradient(name='weight', shape=(4,), dtype='float16', num_inf=2, num_nan=1, \
largest_finite=1.0),)
    """
    return tuple(
        NonfiniteGradient(name, shape_of(array), dtype_name(array), *count_nonfinite(values))
        for name, array in named_arrays(gradients).items()
        if not np.isfinite(values := to_numpy(array)).all()
    )


def count_nonfinite(values: NDArray[Any]) -> tuple[int, int, float]:
    """How many are Inf, how many NaN, and the largest magnitude of the rest."""
    num_nan = int(np.count_nonzero(np.isnan(values)))
    rest = np.abs(values[np.isfinite(values)])
    num_inf = values.size - rest.size - num_nan
    return num_inf, num_nan, float(rest.max()) if rest.size else math.nan
