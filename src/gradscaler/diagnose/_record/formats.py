"""The formats that gradients are computed in."""

from __future__ import annotations

from typing import NamedTuple


class Format(NamedTuple):
    """A binary format with subnormals.

    >>> half = format_named("float16")
    >>> half.largest, half.smallest_normal, half.smallest_subnormal
    (65504.0, 6.103515625e-05, 5.960464477539063e-08)
    """

    name: str  # in the frameworks
    min_exponent: int  # of the smallest normal number
    mantissa_bits: int  # without the implicit leading bit
    largest: float  # the largest finite number

    @property
    def smallest_normal(self) -> float:
        """The smallest normal number; smaller ones are subnormal and have fewer bits."""
        return 2.0**self.min_exponent

    @property
    def smallest_subnormal(self) -> float:
        """The smallest subnormal number; numbers of at most half of it are flushed to 0."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)


FORMATS = {
    form.name: form
    for form in (
        Format("float16", -14, 10, 65504.0),
        Format("bfloat16", -126, 7, 2.0**128 - 2.0**120),
        Format("float32", -126, 23, 2.0**128 - 2.0**104),
        Format("float8_e4m3", -6, 3, 448.0),  # OCP's: it has no Inf, and larger numbers instead
        Format("float8_e5m2", -14, 2, 57344.0),
    )
}


def format_named(name: str) -> Format:
    """The format of a name; ``"float8_e4m3fn"``, as in PyTorch and JAX, is ``float8_e4m3``."""
    form = FORMATS.get("float8_e4m3" if name == "float8_e4m3fn" else name)
    if form is None:
        raise ValueError(f"dtype must be one of {', '.join(FORMATS)}, got {name!r}")
    return form
