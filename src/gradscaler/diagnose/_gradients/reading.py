"""Whether tensors of PyTorch and TensorPlay are finite, read in one number."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Literal, NamedTuple

import numpy as np

from gradscaler.diagnose._gradients.arrays import dtype_name, local, to_numpy

Tensor = Any


class Reading(NamedTuple):
    """Whether a tensor holds an Inf or a NaN, and its largest magnitude if it does not."""

    state: Literal["finite", "mask", "bad"]  # a mask holds -inf, and else finite numbers
    largest: float = 0.0

    @property
    def bad(self) -> bool:
        """Whether it holds an Inf or a NaN."""
        return self.state != "finite"


def floating(kind: type[Any], value: Any) -> Iterator[Tensor]:
    """The floating-point and complex tensors in a structure; ``kind`` is their class."""
    if isinstance(value, kind):
        if value.is_floating_point() or value.is_complex():
            yield value
        return
    if isinstance(value, Mapping):
        value = value.values()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = vars(value).values()
    elif not isinstance(value, (list, tuple)):
        return
    for item in value:
        yield from floating(kind, item)


def read(tensor: Tensor) -> Reading:
    """What a tensor holds; one that cannot be read, and None, count as finite."""
    if tensor is not None:
        with suppress(Exception):
            if math.isfinite(found := largest(tensor)):
                return Reading("finite", found)
            if math.isfinite(found := largest(tensor, masks=True)):
                return Reading("mask", found)
            return Reading("bad")
    return Reading("finite")


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no tensor holds an Inf or a NaN."""
    return not any(read(tensor).bad for tensor in tensors)


def largest(tensor: Tensor, masks: bool = False) -> float:
    """The largest magnitude; Inf or NaN if there is one. In masks -inf does not count."""
    tensor = local(tensor).detach()
    if 0 in tensor.shape:
        return 0.0
    is_sparse = tensor.is_sparse() if callable(tensor.is_sparse) else tensor.is_sparse
    is_paddle = hasattr(tensor, "is_selected_rows")  # it lacks abs() in float16 on CPU
    if dtype_name(tensor).startswith(("float8", "complex")) or is_sparse or is_paddle:
        found = float(np.abs(to_numpy(tensor)).max(initial=0.0))
    else:
        found = float(tensor.abs().max())
    if masks and found == math.inf:
        values = to_numpy(tensor)
        return float(np.abs(values[values != -math.inf]).max(initial=0.0))
    return found


def largest_of(values: Iterable[float]) -> float:
    """The largest value, 0 at least; NaN if there is one."""
    return float(np.max(list(values), initial=0.0))


def largest_finite(tensors: Iterable[Tensor]) -> float:
    """The largest finite magnitude in tensors; 0 if there is none."""
    values = (to_numpy(tensor) for tensor in tensors if tensor is not None)
    return largest_of(float(np.abs(v[np.isfinite(v)]).max(initial=0.0)) for v in values)


def memory_of(tensor: Tensor) -> int:
    """Where PyTorch keeps a tensor's elements; views of one tensor share it."""
    with suppress(Exception):
        return int(local(tensor).untyped_storage().data_ptr())
    return id(tensor)  # a sparse one has no storage
