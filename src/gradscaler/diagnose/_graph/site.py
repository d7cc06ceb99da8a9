"""The call site of an operation, and an Inf or NaN that is located there."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from gradscaler.diagnose._gradients.arrays import Array, dtype_name, to_numpy
from gradscaler.diagnose._gradients.reading import count_nonfinite
from gradscaler.diagnose._record.located import Located


class Site(NamedTuple):
    """The call site of an operation of the forward pass; for the fields, see :class:`Located`."""

    operation: str | None = None
    line: str | None = None
    module: str | None = None
    type: str = ""


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
        **fields,
    )
