"""Numbers, names and sentences as all reports show them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from gradscaler.diagnose._fitting_scales import FEW, FLUSHED, ROOM, SMALL, Fit
from gradscaler.diagnose._run.lines import Shares
from gradscaler.diagnose._run.run import Run

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def number(value: float) -> str:
    """A number in short: a power of two as such if its digits are hard to read."""
    fraction, exponent = math.frexp(value)
    if fraction == 0.5 and not -2 <= exponent <= 24:
        return power(2, exponent - 1)
    if not math.isfinite(value):
        return {math.inf: "Inf", -math.inf: "-Inf"}.get(value, "NaN")
    return f"{value:,.0f}" if value.is_integer() and abs(value) < 1e9 else f"{value:.4g}"


def power(base: int, exponent: float) -> str:
    """A power, such as 2⁻²⁴, with its exponent rounded."""
    return f"{base}{str(round(exponent)).translate(_SUPERSCRIPTS)}"


def percent(share: float) -> str:
    """A share of 1 in percent. Only 0 is shown as 0%."""
    return "0%" if share == 0 else "<0.1%" if share < 0.001 else f"{share:.1%}"


def shown(name: str, longest: int = 200) -> str:
    """A name of unknown origin on one line, without its middle if it is too long."""
    plain = "".join(letter if letter.isprintable() else "�" for letter in name)
    if len(plain) <= longest:
        return plain
    return f"{plain[: longest // 3]}…{plain[-(longest - 1 - longest // 3) :]}"


def no_points(name: str, points: Mapping[int, float]) -> str:
    """Why a curve has no point; empty if it has one."""
    if not points:
        return f"No {name} was recorded."
    if any(map(math.isfinite, points.values())):
        return ""
    where = f"all {len(points):,} steps" if len(points) > 1 else "the one step"
    return f"The {name} is NaN or Inf at {where} where it was seen."


CLASSES: dict[str, Callable[[Shares], float]] = {
    "flushed": lambda share: share.flushed,
    "subnormal": lambda share: share.subnormal,
    "overflow, Inf, NaN": lambda share: share.overflow + share.nonfinite,
    "zero": lambda share: share.zero,
    "normal": lambda share: share.normal,
}
"""What a format makes of gradients, and the share of each."""


def no_gradients(run: Run) -> str:
    """Why no share of the gradients is known; empty if one is."""
    return "" if run.shares else f"No gradients were sampled in {run.num_steps:,} steps."


RULE = (
    f"A scale fits if no gradient overflows even when it is {2**ROOM} times as large, and if of "
    f"each parameter's nonzero gradients at most {FLUSHED:.0%} are flushed to zero, and at most "
    f"{SMALL:.0%} that or subnormal"
)


def fit_to_show(run: Run) -> Fit | None:
    """Which scales fit a run; None if none can be told, or if no scale cures what is wrong."""
    return None if run.verdict.kind in _NO_CURE else run.fit


_NO_CURE = "parameter", "activations", "loss", "nan", "divergence", "data", "silent", "dead"


def sentence_of(fit: Fit, lowest_overflow: float | None = None) -> str:
    """Which scales fit, where the run's own is, and whether a skip shows that they do not."""
    text = _sentence_of(fit)
    if lowest_overflow is None or not 0 < lowest_overflow <= 2.0**fit.common.high:
        return text
    return (
        f"{text} But gradients overflowed at {number(lowest_overflow)}: those of some steps are "
        "larger than the samples show."
    )


def _sentence_of(fit: Fit) -> str:
    low, high, own = power(2, fit.common.low), power(2, fit.common.high), number(fit.own)
    lowest, highest = (shown(name, 60) or "one" for name in (fit.lowest, fit.highest))
    if fit.gone:
        gone = _listed(fit.gone)
        return (
            f"No loss scale fits every parameter: {gone} had no gradient but zero at {own}, the "
            f"run's own, and are flushed at any scale up to {high}, the largest that fits "
            f"{highest}."
        ).replace("are flushed", "is flushed" if len(fit.gone) == 1 else "are flushed")
    fits = f"Loss scales from {low} to {high} fit {_which(fit)}. The {_place(fit)}."
    if fit.is_empty:
        limits = f"{lowest} needs at least {low}, and {highest} at most {high}"
        if fit.lowest == fit.highest:
            limits = f"{lowest} needs at least {low}, and at most {high}"
        which = "No loss scale fits every parameter"
        if not fit.is_hopeless:
            which = f"{high} fits best"
        fits = (
            f"{which}: {limits}. At {high}, {percent(fit.lost)} of "
            f"the nonzero gradients of {lowest} are flushed to zero or subnormal. "
            f"The run's own is {own}."
        )
    nonfinite = len(fit.nonfinite)
    zero = list(fit.parameters.values()).count(None) - nonfinite
    if nonfinite:
        fits += f" {nonfinite:,} parameters had gradients of NaN or Inf, and no others but zero."
    if zero:
        fits += f" {zero:,} parameters had no gradient but zero: unused, or flushed already."
    return fits.replace(" 1 parameters ", " 1 parameter ")


def _which(fit: Fit) -> str:
    if not fit.left_out:
        return "every parameter"
    return f"all but {_listed(fit.left_out)}, with less than {FEW:.0%} of the gradients"


def _listed(names: tuple[str, ...]) -> str:
    return shown(names[0], 60) + f" and {len(names) - 1:,} more" * (len(names) > 1)


def _place(fit: Fit) -> str:
    """Where the run's own scale is, if some scales fit."""
    exponent = math.log2(fit.own) if 0 < fit.own < math.inf else math.nan
    where = "is one of them"
    if exponent < fit.common.low:
        where = "is smaller"
    elif exponent > fit.common.edge:
        where = "is larger"
    elif exponent > fit.common.high:
        where = "leaves less room"
    return f"run's own, {number(fit.own)}, {where}"
