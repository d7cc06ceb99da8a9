"""The call site of an operation, and an Inf or NaN that is located there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from gradscaler.diagnose._gradients.arrays import Array, dtype_name, to_numpy
from gradscaler.diagnose._gradients.reading import count_nonfinite
from gradscaler.diagnose._operations.rows import canonical
from gradscaler.diagnose._record.located import Located


class Site(NamedTuple):
    """The call site of an operation of the forward pass; for the fields, see :class:`Located`."""

    operation: str | None = None
    line: str | None = None
    module: str | None = None
    type: str = ""
    optimizer: str | None = None


def exponent_in(operation: str | None, operands: Sequence[Any]) -> float | None:
    """The exponent of a power, its second operand; None if that is not one real number.

    >>> exponent_in("pow", [2.0, -0.5]), exponent_in("mul", [2.0, -0.5])
    (-0.5, None)
    """
    if len(operands) < 2 or canonical(operation or "") != "pow":
        return None
    exponent = operands[1]
    if not isinstance(exponent, (int, float)):
        if math.prod(getattr(exponent, "shape", (0,))) != 1:
            return None
        # A copy, as in located_at. Complex numbers become two each.
        values = to_numpy(exponent.detach().clone() if hasattr(exponent, "detach") else exponent)
        exponent = values.item() if values.size == 1 else None
    return None if exponent is None else float(exponent)


def located_at(
    site: Site,
    kind: Literal["forward", "backward", "input"],
    tensor: Array,
    largest_input: float,
    **fields: Any,
) -> Located:
    """Locate the Inf or NaN in ``tensor`` at ``site``; ``fields`` are further fields of Located."""
    # FSDP could not resize the storage of a parameter that NumPy has seen, so NumPy sees a copy.
    values = to_numpy(tensor.detach().clone() if hasattr(tensor, "detach") else tensor)
    num_inf, num_nan, largest_finite = count_nonfinite(values)
    return Located(
        site.module,
        kind,
        site.type,
        dtype_name(tensor),
        num_inf,
        num_nan,
        values.size,
        largest_finite,
        largest_input,
        operation=site.operation,
        line=site.line,
        optimizer=site.optimizer,
        **fields,
    )
