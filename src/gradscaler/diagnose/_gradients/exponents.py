"""The exponents of gradients, and their fate in a narrow format at a loss scale."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from gradscaler.diagnose._gradients.histogram import NO_GRADIENTS, Histogram, histograms_of
from gradscaler.diagnose._record.formats import format_named
from gradscaler.policies._checks import loss_scale


@dataclass(frozen=True, eq=False)
class Exponents:
    """The result of :func:`exponents`.

    Attributes:
        dtype: the format's name.
        scale: the factor that multiplies the gradients before they are rounded to the format.
        total: the histogram of all gradients together.
        parameters: the histogram of each array, by the array's name.
    """

    dtype: str
    scale: float
    total: Histogram
    parameters: dict[str, Histogram]

    def __str__(self) -> str:
        columns = ("zero", "flushed", "subnormal", "normal", "overflow", "nonfinite")
        rows = {"all": self.total, **self.parameters}
        width = max(map(len, rows))
        lines = [
            f"{self.total.size} gradients in {self.dtype}, scaled by {self.scale:g}",
            " ".join([" " * width, *(f"{column:>9}" for column in columns)]),
        ]
        for name, histogram in rows.items():
            shares = (f"{getattr(histogram, column):9.2%}" for column in columns)
            lines.append(" ".join([f"{name:<{width}}", *shares]))
        if doubt := self._doubt():
            lines.append(doubt)
        return "\n".join(lines)

    def _doubt(self) -> str:
        """A note on the likely mistake in the call if most gradients overflow; else empty."""
        total = self.total
        finite = total.num_flushed + total.num_subnormal + total.num_normal + total.num_overflow
        if self.scale <= 1 or 2 * total.num_overflow <= finite:
            return ""
        return (
            f"{total.num_overflow / finite:.0%} of the finite nonzero gradients overflow "
            f"{self.dtype} at scale {self.scale:g}. If they are already multiplied by the loss "
            "scale, as after scaler.scale(loss).backward(), pass scale=1.0, or call exponents "
            "after scaler.unscale_(optimizer). If they are not, this scale is too large for them."
        )


def exponents(gradients: object, dtype: str = "float16", scale: float = 1.0) -> Exponents:
    """Count gradients by exponent, and by what ``gradients * scale`` becomes in a format.

    Each product is rounded once, to the nearest number of the format, ties to even.

    Args:
        gradients: arrays of any framework: an array (its name is empty); a mapping, a sequence or
            another iterable of arrays; an iterable of pairs of a name and an array; a pytree, if
            JAX is imported; or any nesting of these. A module that has ``named_parameters`` stands
            for the gradients of its parameters that are not None.
        dtype: ``"float16"``, ``"bfloat16"``, ``"float32"``, ``"float8_e4m3"`` (OCP's, which has no
            infinities: numbers beyond 464 become NaN) or ``"float8_e5m2"``.
        scale: the loss scale. Gradients of a scaled loss are already multiplied by it: pass 1.0
            for them, or unscale them first.

    Returns:
        The histogram of each array, and of all arrays together.

    Warns:
        UserWarning: most of the gradients overflow at this scale, which happens if they are
            multiplied by it twice.

    Raises:
        ValueError: ``dtype`` is not one of the formats above, or ``scale`` cannot be a loss scale.
        TypeError: ``scale`` is not a number, or ``gradients`` holds something that is not an
            array.

    >>> import numpy as np
    >>> found = exponents({"weight": np.float32([0.0, 1e-8, 1e-6, 1.0])})
    >>> found.total.flushed, found.total.subnormal
    (0.25, 0.25)
    >>> print(found)
    4 gradients in float16, scaled by 1
                zero   flushed subnormal    normal  overflow nonfinite
    all       25.00%    25.00%    25.00%    25.00%     0.00%     0.00%
    weight    25.00%    25.00%    25.00%    25.00%     0.00%     0.00%
    """
    form = format_named(dtype)
    scale = loss_scale("scale", scale)
    parameters = histograms_of(gradients, form, scale)
    found = Exponents(form.name, scale, sum(parameters.values(), start=NO_GRADIENTS), parameters)
    if doubt := found._doubt():
        warnings.warn(doubt, stacklevel=2)
    return found
