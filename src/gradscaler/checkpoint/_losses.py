"""What a rule loses in a format that has no place for it, in words."""

from __future__ import annotations

from typing import Any

from gradscaler._formats.layouts import FORMATS
from gradscaler.policies import DynamicScale, FixedScale, Rule, _checks

_DEFAULTS = {name: getattr(DynamicScale, name)() for name in FORMATS}
_RESETS = {
    "finite_step": "",
    "finite_step_only": " that backing off does not reset",
    "growth": " that only growth resets",
}


def losses(rule: Rule, kept: Rule, to: str) -> list[str]:
    """What a rule loses in the format ``to``; a reader of what is written there gets ``kept``.

    A value that is the default of any framework is a convention. It gives way to the default of
    the framework that the format belongs to. A state dict does not say who chose a value, so this
    holds wherever the value comes from.
    """
    if isinstance(rule, FixedScale) or isinstance(kept, FixedScale):
        return [] if isinstance(kept, FixedScale) else ["a scale that does not move"]
    has_floor = kept.min_scale != _checks.SMALLEST_SCALE
    floor = f"a floor of {kept.min_scale!r}" if has_floor else "no floor"
    backs_off = "backs off at every overflow"
    resets = "resets it at a finite step and at a backoff"
    words = {  # of each parameter: its name, and what the format's scaler does
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


def _value(rule: DynamicScale, name: str) -> Any:
    """What a parameter does: a float in float32, a hysteresis with its reset."""
    if name == "hysteresis":
        return rule.hysteresis, rule.hysteresis_reset if rule.hysteresis > 1 else None
    value = getattr(rule, name)
    return _checks.in_float32(value) if isinstance(value, float) else value
