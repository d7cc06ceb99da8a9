"""A located Inf or NaN, and the operation or the module that made it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

OPAQUE = "CompiledFunction", "CheckpointFunction"  # operations that hide others, or their lines


@dataclass(frozen=True)
class Located:
    """The first Inf or NaN, and where it was made from finite numbers.

    It is a ``MadeInModule``, a ``MadeOutside``, a ``Given`` or a ``BadGradient``, by its kind and
    its module.

    Attributes:
        module: the module's name in the model; empty for the model itself; None outside of all its
            modules, such as in a loss function or in another model.
        kind: ``"forward"`` if an output is not finite; ``"backward"`` if the gradient of an input
            or of a parameter is not; ``"input"`` if no watched operation made it, as a batch or
            another tensor that is not a parameter already held it.
        type: the name of the module's class. Outside of the model's modules, it is the class of the
            outermost running module, such as a teacher, or empty if no module was running.
        dtype: the dtype of the output, the gradient or the tensor, such as ``"float16"``.
        num_inf: how many of its elements are Inf, of either sign.
        num_nan: how many of its elements are NaN.
        size: how many elements it has.
        largest_finite: the largest magnitude of its finite elements; NaN if it has none.
        largest_input: in a forward pass, the largest finite magnitude of the inputs; in a backward
            pass, that of the gradients of the outputs.
        parameter: in a forward pass, the name within the module of a parameter that is itself not
            finite; in a backward pass, the name of the parameter whose gradient this is; else None.
        operation: the operation that made it, such as ``"exp"``. In a backward pass, the operation
            of the forward pass whose gradient this is, or ``"hook"`` if a tensor's hook made it.
            For an ``"input"``, the first operation that read it. None if the operation is not
            known, or if a parameter is itself not finite.
        line: the line that called the operation in the forward pass, such as ``"train.py:12"``. It
            is the innermost line that is neither the framework's nor gradscaler's. Without an
            operation, it is the line that called the module. None if it is not known.
        smallest_divisor: the smallest magnitude of the divisor of a division in a forward pass;
            None if the operation is not a division, or overwrote its divisor.
        exponent: the exponent of a power in a forward pass, if it is one number and known.
        is_likely: whether this is a conclusion from which gradients were bad, and not yet seen. No
            numbers are known then. They are not known either, and the size is 0, if a gradient was
            Inf or NaN because the operation read a number at which its slope is Inf.
        summand: which of the losses that the loss adds up it is in, and where that is computed,
            such as ``"2 of 3 (mean at train.py:31)"``; None if it adds up none, or if it is in
            several.
        rows: where along the first dimension an ``"input"`` holds it, counted from 0, such as
            ``"row 3 of 32"``; None for another kind, or if more than half of the rows do.
        way: the largest magnitudes of the operations up to this one, as far as they are known,
            such as ``"matmul 3.1e+03 → mul 4.2e+04 → pow Inf"``; None if none is.
        enlarged_by: the exponential before it that made its inputs so large, such as ``"exp at
            train.py:12"``; None if there was none, or it is not known.
        zeroed_by: the product or exponential before a logarithm that underflows to the 0 that it
            takes, such as ``"prod at train.py:7"``; None if there is none, or it is unknown.
        function: in JAX, the name of the function that was run, such as ``"loss_fn"``; else None.
        is_auxiliary: whether it reaches, in JAX, only what a loss function returns beside the loss.
        is_number: whether it is in a number of Python, or a number or an array of NumPy, that the
            operation was given. Its kind is ``"forward"`` in PyTorch, and else ``"input"``.
        warned: for an ``"input"``, what NumPy warned of before it, and where, such as ``"divide by
            zero encountered in log at data.py:12"``; None if that is not known.
        optimizer: in JAX, the rule whose update the operation belongs to, such as
            ``"optax.scale_by_adam"``; None if it belongs to none.
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
    smallest_divisor: float | None = None
    exponent: float | None = None
    is_likely: bool = False
    summand: str | None = None
    way: str | None = None
    rows: str | None = None
    enlarged_by: str | None = None
    zeroed_by: str | None = None
    function: str | None = None
    is_auxiliary: bool = False
    is_number: bool = False
    optimizer: str | None = None
    warned: str | None = None

    def __post_init__(self) -> None:
        """Become of the class of its kind and module; so does a copy with another kind."""
        made = MadeOutside if self.module is None else MadeInModule
        of_kind = {"backward": BadGradient, "input": Given}.get(self.kind, made)
        object.__setattr__(self, "__class__", of_kind)  # frozen

    @property
    def bad_parameter(self) -> str | None:
        """The whole name of the parameter that is itself not finite; None if none is known."""
        return None

    @property
    def spoken_module(self) -> str:
        """The module's name; beside a mere number, as in a Sequential, its class.

        Empty for the model itself and outside of all its modules.
        """
        module = self.module or ""
        is_number = module.rpartition(".")[2].isdecimal()
        return f"{module} ({self.type})" if is_number and self.type else module

    def is_at(self, other: Located) -> bool:
        """Whether this is the place of another Inf or NaN."""
        fields = "module", "kind", "parameter", "operation", "line", "is_likely"
        return all(getattr(self, name) == getattr(other, name) for name in fields)

    def __str__(self) -> str:
        in_ = f", {self.operation}" if self.operation else ""
        at = f" at {self.line}" if self.line else ""
        where = f"{self.module or 'the model'} ({self.type}, {self.dtype})"
        if self.module is None:
            inside = f"another module ({self.type}, " if self.type else "a function ("
            where = f"{inside}{self.dtype})"
        if self.is_likely or not self.size:
            return f"{self.kind} of {where}{in_}{at}{': probably' * self.is_likely}"
        counts = {"inf": self.num_inf, "nan": self.num_nan}
        found = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        of, read = self._of_and_read()
        text = (
            f"{self.kind} of {where}{of}{in_}{at}: {found} of {self.size}; "
            f"largest {read} {self.largest_input:g}"
        )
        return "; ".join([text, *self._details()])

    def _of_and_read(self) -> tuple[str, str]:
        """Whose numbers these are, and what ``largest_input`` is the largest of."""
        return "", "input"

    def _details(self) -> Iterator[str]:
        """What else is known."""
        if self.smallest_divisor is not None:
            yield f"smallest divisor {self.smallest_divisor:g}"
        if self.exponent is not None:
            yield f"exponent {self.exponent:g}"
        if self.way is not None:
            yield self.way
        if self.enlarged_by is not None:
            yield f"enlarged by {self.enlarged_by}"
        if self.zeroed_by is not None:
            yield f"0 by an underflow in {self.zeroed_by}"
        of_loss = self.summand and f"summand {self.summand} of the loss"
        of_warning = self.warned and f"what NumPy warned of: {self.warned}"
        of_update = self.optimizer and f"the update of {self.optimizer}"
        for each in filter(None, (of_loss, self.rows, of_warning, of_update)):
            yield f"in {each}"
        if self.parameter and not isinstance(self, BadGradient):
            yield f"its {self.parameter} is not finite"
        if self.is_number:
            yield "a number from outside of the framework holds it already"
        if self.is_auxiliary:
            yield "only in what the loss function returns beside the loss"


class Made(Located):
    """An Inf or NaN that a forward pass made, or that a parameter holds."""

    @property
    def bad_parameter(self) -> str | None:
        """The whole name of the parameter that is itself not finite; None if none is known."""
        return f"{self.module or ''}.{self.parameter}".lstrip(".") if self.parameter else None


class MadeInModule(Made):
    """One that a module of the model made, or the model itself (``module`` is empty)."""


class MadeOutside(Made):
    """One that was made outside of the model: in a loss function, or in another module."""


class Given(Located):
    """One that no watched operation made, as in a batch; the operation is the first to read it."""


class BadGradient(Located):
    """One in the gradient of an operation's input, or of a parameter.

    If it is likely, or its size is 0, its numbers were not seen.
    """

    def _of_and_read(self) -> tuple[str, str]:
        return f", gradient of {self.parameter}" if self.parameter else "", "gradient"


def is_exact(located: Located | None) -> bool:
    """Whether a place in a graph is that of the operation that made an Inf or NaN.

    A tensor that no node made may come from an operation that records no graph. A compiled or
    checkpointed function hides its operations or their lines.
    """
    if located is None or isinstance(located, Given) or not located.line or located.is_likely:
        return False
    return not (located.operation or "").startswith(OPAQUE)
