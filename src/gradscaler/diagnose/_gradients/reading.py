"""Detection of Inf and NaN in arrays, and the largest magnitudes of arrays."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradscaler.diagnose._gradients.arrays import (
    Array,
    dtype_name,
    local,
    named_arrays,
    shape_of,
    to_numpy,
)
from gradscaler.outcome import NonfiniteGradient

Tensor = Any

_MOST_ROWS = 3  # that are listed


def inspect(gradients: object) -> tuple[NonfiniteGradient, ...]:
    """The gradients that hold an Inf or a NaN, in the order given.

    For a sparse gradient, the values are inspected, after rows of the same index are summed. For a
    complex gradient, the real and imaginary parts are inspected.

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
    """The number of Inf, the number of NaN, and the largest magnitude of the rest."""
    num_nan = int(np.count_nonzero(np.isnan(values)))
    rest = np.abs(values[np.isfinite(values)])
    num_inf = values.size - rest.size - num_nan
    return num_inf, num_nan, float(rest.max()) if rest.size else math.nan


class Reading(NamedTuple):
    """Whether a tensor holds an Inf or a NaN, and the largest magnitude if it does not."""

    state: Literal["finite", "mask", "bad"]  # a mask holds -inf and finite numbers
    largest: float = 0.0

    @property
    def bad(self) -> bool:
        """Whether the tensor holds an Inf or a NaN."""
        return self.state != "finite"


def floating(kind: type[Any], value: object) -> Iterator[Tensor]:
    """The floating-point and complex tensors in a structure; ``kind`` is their class."""
    return (each for each in _tensors(kind, value) if _is_floating(each))


def counting(kind: type[Any], value: object) -> Iterator[Tensor]:
    """The other tensors in a structure, of integers or booleans."""
    return (each for each in _tensors(kind, value) if not _is_floating(each))


def _is_floating(tensor: Tensor) -> bool:
    return bool(tensor.is_floating_point() or tensor.is_complex())


def _tensors(kind: type[Any], value: object) -> Iterator[Tensor]:
    if isinstance(value, kind):
        yield value
        return
    if isinstance(value, Mapping):
        value = value.values()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = vars(value).values()
    elif not isinstance(value, (list, tuple)):
        return
    for item in value:
        yield from _tensors(kind, item)


def read(array: Array) -> Reading:
    """The reading of an array; None, and an array that cannot be read, count as finite."""
    with suppress(Exception):
        if math.isfinite(found := largest(array)):
            return Reading("finite", found)
        if math.isfinite(found := largest(array, masks=True)):
            return Reading("mask", found)
        return Reading("bad")
    return Reading("finite")


def are_finite(arrays: Iterable[Array]) -> bool:
    """Whether the sum of squares of each array is finite, in a tenth of the time of a reading.

    False does not say that one holds an Inf or a NaN: squares overflow, too.
    """
    with suppress(Exception), np.errstate(all="ignore"):
        present = (each for each in arrays if each is not None)
        return all(math.isfinite(_sum_of_squares(each)) for each in present)
    return False


def _sum_of_squares(array: Array) -> float:
    """The sum of squares, or its root, which is finite if that is."""
    paddle: Any = sys.modules.get("paddle")
    if paddle is not None and isinstance(array, paddle.Tensor) and array.is_dense():
        wide = array.detach()  # squares of float16 would overflow
        wide = wide if dtype_name(wide) == "float64" else wide.astype("float32")
        return float(paddle._C_ops.squared_l2_norm(wide).item())  # with no copy to the host
    tensorplay: Any = sys.modules.get("tensorplay")
    if tensorplay is not None and isinstance(array, tensorplay.Tensor):
        return float(array.detach().norm().item())  # of a sparse one it raises an error
    values = to_numpy(array).ravel()
    if values.dtype != np.float64:
        values = values.astype(np.float32, copy=False)
    return float(np.dot(values, values))


def largest(array: Array, masks: bool = False) -> float:
    """An array's largest magnitude; Inf or NaN if it holds one. With ``masks``, -inf is ignored."""
    array = local(array)
    if 0 in np.shape(array):
        return 0.0
    # Paddle lacks abs() in float16 on CPU, and TensorPlay takes a hundred times NumPy's time.
    torch: Any = sys.modules.get("torch")
    is_torch = torch is not None and isinstance(array, torch.Tensor)
    is_odd = is_torch and (array.is_complex() or dtype_name(array).startswith("float8"))
    if is_torch and not is_odd and not array.is_sparse:
        found = float(array.detach().abs().max())
    else:
        found = float(np.abs(to_numpy(array)).max(initial=0.0))
    if masks and found == math.inf:
        values = to_numpy(array)
        return float(np.abs(values[values != -math.inf]).max(initial=0.0))
    return found


def nonfinite_numbers(values: Iterable[object]) -> list[NDArray[Any]]:
    """Copies of the numbers of Python or NumPy, and arrays of NumPy, that hold an Inf or NaN.

    >>> nonfinite_numbers([1.0, math.inf, 3, np.float32(math.nan)])
    [array(inf), array(nan, dtype=float32)]
    """
    kinds = float, np.floating, np.ndarray
    arrays = (np.array(each) for each in values if isinstance(each, kinds))
    return [each for each in arrays if each.dtype.kind == "f" and not np.isfinite(each).all()]


def largest_of(values: Iterable[float]) -> float:
    """The largest of some values, but at least 0; NaN if one is NaN."""
    return float(np.max(list(values), initial=0.0))


def largest_finite(tensors: Iterable[Tensor]) -> float:
    """The largest finite magnitude in tensors; 0 if there is none."""
    values = (to_numpy(tensor) for tensor in tensors if tensor is not None)
    return largest_of(float(np.abs(v[np.isfinite(v)]).max(initial=0.0)) for v in values)


def rows_of(tensor: Tensor) -> str | None:
    """The rows of a tensor that hold an Inf or a NaN, if they are few, such as "row 3 of 32".

    The rows of a view are those of the tensor that it shows in another form, such as a batch.
    """
    base = getattr(tensor, "_base", None)  # PyTorch's
    values = to_numpy(tensor if base is None or base.numel() != tensor.numel() else base)
    if values.ndim == 0:
        return None
    bad = np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(axis=1)).tolist()
    if not 0 < 2 * len(bad) <= len(values):
        return None
    more = f" and {len(bad) - _MOST_ROWS} more" if len(bad) > _MOST_ROWS else ""
    listed = ", ".join(map(str, bad[:_MOST_ROWS]))
    return f"row{'s' * (len(bad) > 1)} {listed}{more} of {len(values)}"


def memory_of(tensor: Tensor) -> int:
    """The address of a tensor's memory in PyTorch, which all views of one tensor share."""
    with suppress(Exception):
        return int(local(tensor).untyped_storage().data_ptr())
    return id(tensor)  # a sparse tensor has no storage
