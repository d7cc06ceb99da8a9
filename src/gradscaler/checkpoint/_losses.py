"""Describes the parameters of a rule that a format has no place for."""

from __future__ import annotations

from gradscaler._formats.layouts import FORMATS
from gradscaler.policies import DynamicScale, _checks

_DEFAULTS = {name: getattr(DynamicScale, name)() for name in FORMATS}
_RESETS = {
    "finite_step": "",
    "finite_step_only": " that backing off does not reset",
    "growth": " that only growth resets",
}


def losses(rule: DynamicScale, kept: DynamicScale, to: str) -> list[str]:
    """Describe each parameter of a rule that is lost in the format ``to``.

    A default of any framework is a convention. Such a value may be replaced by the default of the
    format's own framework without being counted as lost, even if a user chose it: a state dict does
    not say who did.

    Args:
        rule: the rule that was written.
        kept: the rule that reading it back gives.
        to: the format.
    """
    has_floor = kept.min_scale != _checks.SMALLEST_SCALE
    floor = f"a floor of {kept.min_scale!r}" if has_floor else "no floor"
    backs_off = "backs off at every overflow"
    resets = "resets it at a finite step and at a backoff"
    words = {  # for each parameter, its name and a description of the format's scaler
        "growth_factor": ("growth factor", f"has {kept.growth_factor!r}"),
        "backoff_factor": ("backoff factor", f"has {kept.backoff_factor!r}"),
        "growth_interval": ("growth interval", f"has {kept.growth_interval}"),
        "hysteresis": ("hysteresis", backs_off if kept.hysteresis == 1 else resets),
        "min_scale": ("floor", f"has {floor}"),
        "max_scale": ("ceiling", "has none"),
        "growth_tiers": ("growth by tiers", "has none"),
    }
    lost = []
    for name, (noun, does) in words.items():
        before, after, own = (_value(each, name) for each in (rule, kept, _DEFAULTS[to]))
        conventions = [_value(default, name) for default in _DEFAULTS.values()]
        if before != after and not (before in conventions and after == own):
            reset = _RESETS[rule.hysteresis_reset] if name == "hysteresis" else ""
            lost.append(f"a {noun} of {getattr(rule, name)!r}{reset} ({to}'s scaler {does})")
    return lost


def _value(rule: DynamicScale, name: str) -> object:
    """A parameter's value for comparison: a float in float32, a hysteresis with its reset."""
    if name == "hysteresis":
        return rule.hysteresis, rule.hysteresis_reset if rule.hysteresis > 1 else None
    value = getattr(rule, name)
    return _checks.in_float32(value) if isinstance(value, float) else value
