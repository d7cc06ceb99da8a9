"""Formats numbers, names and sentences for all reports."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from gradscaler.diagnose._gradients.fitting_scales import Fit
from gradscaler.diagnose._record.thresholds import MOST_FLUSHED, MOST_SMALL, ROOM

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

RULE = (
    f"A scale fits if no gradient overflows even when it is {2**ROOM} times as large, and if at "
    f"most {MOST_FLUSHED:.0%} of each parameter's nonzero gradients are flushed to zero, and at "
    f"most {MOST_SMALL:.0%} are flushed or subnormal"
)


def number(value: float) -> str:
    """A number in short form. A large or small power of two is written as a power."""
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
    """A share from 0 to 1, in percent. Only an exact 0 is shown as 0%."""
    return "0%" if share == 0 else "<0.1%" if share < 0.001 else f"{share:.1%}"


def shown(name: str, longest: int = 200) -> str:
    """A name of unknown origin on one line; if it is too long, its middle is left out."""
    plain = "".join(letter if letter.isprintable() else "�" for letter in name)
    if len(plain) <= longest:
        return plain
    return f"{plain[: longest // 3]}…{plain[-(longest - 1 - longest // 3) :]}"


def named(step: int, batches: Mapping[int, tuple[int, int] | None]) -> str:
    """The number of a step, with its epoch and batch if they are known."""
    epoch, batch = batches.get(step) or (0, 0)
    return f"{step:,}" + (f" (epoch {epoch:,}, batch {batch:,})" if epoch else "")


def ends(texts: Sequence[str]) -> str:
    """The first and the last text, or one text if they are the same; empty if there are none."""
    return " → ".join(dict.fromkeys([texts[0], texts[-1]])) if texts else ""


def sentence_of(fit: Fit) -> str:
    """A sentence on which scales fit, and on the run's own scale."""
    low, high, own = power(2, fit.common.low), power(2, fit.common.high), number(fit.own)
    lowest, highest = (shown(name, 60) or "one" for name in (fit.lowest, fit.highest))
    if fit.gone:
        return (
            f"No loss scale fits every parameter: at the run's own, {own}, {_listed(fit.gone)} had "
            f"no gradient but zero, and {highest} needs one of at most {high}."
        )
    if not fit.is_empty:
        which = f"all but {_listed(fit.left_out)}" if fit.left_out else "every parameter"
        return f"Loss scales from {low} to {high} fit {which}. The run's own is {own}."
    needs = f"{lowest} needs at least {low}, and {highest} at most {high}"
    verdict = "No loss scale fits every parameter" if fit.is_hopeless else f"{high} fits best"
    return f"{verdict}: {needs}. The run's own is {own}."


def _listed(names: Sequence[str]) -> str:
    return shown(names[0], 60) + f" and {len(names) - 1:,} more" * (len(names) > 1)
