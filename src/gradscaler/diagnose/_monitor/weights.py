"""What a monitor reads of parameters and of an optimizer's state, beside their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradscaler.diagnose._gradients.arrays import dtype_name, local, strided_sample, to_numpy

_MOST_ELEMENTS = 2**12  # of one parameter
_IN_16_BITS = "float16", "bfloat16"


class UnmovedWeights:
    """Compares parameters of 16 bits at one sample with what they were at the sample before.

    An update of less than half of the distance to the next number is lost in rounding, at each step
    anew. Elements without a gradient do not count.
    """

    def __init__(self) -> None:
        self._before: dict[str, NDArray[Any]] = {}

    def share(self, parameters: Mapping[str, Any], optimizer: Any) -> float | None:
        """The share of their elements that have not moved since; None if it is not known."""
        before, self._before = self._before, {}
        rates = [group.get("lr") for group in getattr(optimizer, "param_groups", ())]
        if not any(rates):
            return None
        num_unmoved = num_seen = 0
        for name, parameter in parameters.items():
            if parameter.grad is None or dtype_name(parameter) not in _IN_16_BITS:
                continue
            now = self._before[name] = _part(parameter)
            if name in before and before[name].size == now.size:
                has_gradient = _part(parameter.grad) != 0
                num_seen += int(has_gradient.sum())
                num_unmoved += int((has_gradient & (now == before[name])).sum())
        return num_unmoved / num_seen if num_seen else None


def nonfinite_state(optimizer: Any, names: Mapping[int, str]) -> str | None:
    """The first state of an optimizer that holds an Inf or a NaN, such as ``"exp_avg of fc.bias"``.

    ``names`` are those of the parameters, by their ids.
    """
    for parameter, values in _items(getattr(optimizer, "state", None)):
        for key, value in _items(values):
            with suppress(Exception):  # no tensor, or one without numbers
                if not np.isfinite(to_numpy(local(value))).all():
                    name = names.get(id(parameter))
                    return f"{key} of {name}" if name else str(key)
    return None


def _items(mapping: Any) -> Iterable[tuple[Any, Any]]:
    return mapping.items() if isinstance(mapping, Mapping) else ()


def _part(array: Any) -> NDArray[Any]:
    return np.array(to_numpy(strided_sample(array, _MOST_ELEMENTS)))
