"""An Inf or a NaN that an operation made, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from gradscaler.diagnose._gradients.arrays import dtype_name, to_numpy
from gradscaler.diagnose._gradients.nonfinite import count_nonfinite
from gradscaler.diagnose._locate.call_site import Site
from gradscaler.diagnose._locate.module_hooks import Located


@dataclass(eq=False)
class Event:
    """An Inf or a NaN that was made of finite numbers, or that no operation made.

    Many do no harm, as ``where`` or a softmax leaves them out.

    Attributes:
        located: what made it.
        counts: whether a backward pass began at it, or it reached the gradient of a leaf.
        unread: the numbers of tensors that it reached and that no operation made finite since.
    """

    located: Located
    counts: bool = False
    unread: set[int] = field(default_factory=set)

    @property
    def does_harm(self) -> bool:
        """Whether it reached a result."""
        return self.counts or bool(self.unread)


def located_at(
    site: Site,
    kind: Literal["forward", "backward", "input"],
    tensor: Any,
    largest_input: float,
    parameter: str | None = None,
) -> Located:
    """What an operation made, or was given: ``tensor``."""
    # FSDP resizes the storage of parameters, which it cannot once NumPy has seen it.
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
        parameter,
        site.operation,
        site.line,
    )
