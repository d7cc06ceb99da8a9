"""What was located: an Inf or a NaN, and the operation or the module that made it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from gradscaler.diagnose._gradients.arrays import dtype_name, to_numpy
from gradscaler.diagnose._gradients.reading import count_nonfinite


@dataclass(frozen=True)
class Located:
    """Where the first Inf or NaN was made out of finite numbers.

    Attributes:
        module: the module's name in the model; empty if that is the model itself, None if it
            happened outside of all its modules, as in a loss function or in another model.
        kind: ``"forward"`` if an output is not finite; ``"backward"`` if the gradient of an input
            or of a parameter is not; ``"input"`` if nothing that was watched made it: a batch, or
            another tensor that is not a parameter, held it before.
        type: the name of the module's class; outside of the model's modules, of the outermost
            module that ran, such as a teacher; empty if none did.
        dtype: of the output, the gradient or the tensor, such as ``"float16"``.
        num_inf: how many of its elements are Inf, of either sign.
        num_nan: how many are NaN.
        size: how many elements there are.
        largest_finite: the largest magnitude of the rest; NaN if there is no rest.
        largest_input: the largest finite magnitude that went in: in a forward pass, of its inputs;
            in a backward pass, of its outputs' gradients.
        parameter: in a forward pass, the name within the module of a parameter that is itself not
            finite; in a backward pass, of the parameter whose gradient this is; else None.
        operation: the operation that made it, such as ``"exp"``; in a backward pass, the operation
            of the forward pass whose gradient this is, or ``"hook"`` if a tensor's hook made it;
            for an ``"input"``, the first that read it. None if it is not known, or if a parameter
            is itself not finite.
        line: the line that called the operation in the forward pass, such as ``"train.py:12"``:
            the innermost that is neither the framework's nor gradscaler's. Without an operation,
            the line that called the module. None if it is not known.
        made_by: for an ``"input"`` that was computed, and so is not the batch itself, the operation
            that it is the result of. That ran unwatched, as in another thread, and may have passed
            the Inf or NaN on. None if nothing says that it was computed.
        smallest_divisor: the smallest magnitude that a division of a forward pass divided by; None
            if it is another operation, or replaced its divisor.
    """

    module: str | None
    kind: Literal["forward", "backward", "input"]
    type: str
    dtype: str
    num_inf: int
    num_nan: int
    size: int
    largest_finite: float
    largest_input: float
    parameter: str | None = None
    operation: str | None = None
    line: str | None = None
    made_by: str | None = None
    smallest_divisor: float | None = None

    def __str__(self) -> str:
        counts = {"inf": self.num_inf, "nan": self.num_nan}
        found = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        backward = self.kind == "backward"
        of = f", gradient of {self.parameter}" if backward and self.parameter else ""
        in_ = f", {self.operation}" if self.operation else ""
        at = f" at {self.line}" if self.line else ""
        where = f"{self.module or 'the model'} ({self.type}, {self.dtype})"
        if self.module is None:
            inside = f"another module ({self.type}, " if self.type else "a function ("
            where = f"{inside}{self.dtype})"
        text = (
            f"{self.kind} of {where}{of}{in_}{at}: {found} of {self.size}; "
            f"largest {'gradient' if backward else 'input'} {self.largest_input:g}"
        )
        if self.smallest_divisor is not None:
            text += f"; smallest divisor {self.smallest_divisor:g}"
        if self.made_by is not None:
            text += f"; computed by {self.made_by}"
        if not backward and self.parameter:
            text += f"; its {self.parameter} is not finite"
        return text


class Site(NamedTuple):
    """An operation of the forward pass, and where it was called; the fields are Located's."""

    operation: str | None = None
    line: str | None = None
    module: str | None = None
    type: str = ""


def located_at(
    site: Site,
    kind: Literal["forward", "backward", "input"],
    tensor: Any,
    largest_input: float,
    **fields: Any,
) -> Located:
    """What an operation made, or was given: ``tensor``; ``fields`` are more of Located's."""
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
        operation=site.operation,
        line=site.line,
        **fields,
    )
