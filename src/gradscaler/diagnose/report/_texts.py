"""Numbers and names as the reports show them."""

from __future__ import annotations

import math

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
