"""Which loss scales fit, in words."""

from __future__ import annotations

import math

from gradscaler.diagnose._fit import FEW, FLUSHED, ROOM, SMALL, Fit
from gradscaler.diagnose.report._texts import number, percent, power, shown

RULE = (
    f"A scale fits if no gradient overflows even when it is {2**ROOM} times as large, and if of "
    f"each parameter's nonzero gradients at most {FLUSHED:.0%} are flushed to zero, and at most "
    f"{SMALL:.0%} that or subnormal"
)


# Verdicts on what no loss scale cures, and that say nothing of the gradients' sizes.
_NO_CURE = "parameter", "activations", "loss", "nan", "divergence", "data", "silent", "dead"


def sentence_of(fit: Fit, verdict: str = "normal") -> str:
    """Which scales fit, and where the run's own is, beside a verdict of this kind."""
    text = _sentence_of(fit)
    if verdict not in _NO_CURE:
        return text
    return f"Only for the finite gradients of sampled steps: {text[0].lower()}{text[1:]}"


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
