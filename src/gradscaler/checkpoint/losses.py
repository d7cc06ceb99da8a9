"""What a format has no place for, in words."""

from __future__ import annotations

from typing import Any

from gradscaler.policies import DynamicScale, FixedScale, Rule, checks

_DEFAULTS = {
    "torch": DynamicScale.torch(),
    "tensorplay": DynamicScale.tensorplay(),
    "paddle": DynamicScale.paddle(),
    "keras": DynamicScale.keras(),
    "tf_keras": DynamicScale.keras(),
    "mindspore": DynamicScale.mindspore(),
    "jmp": DynamicScale.jmp(),
    "flax": DynamicScale.flax(),
}

_RESETS = {
    "finite_step": "",
    "finite_step_only": " that backing off does not reset",
    "growth": " that only growth resets",
}


def losses(rule: Rule, kept: Rule, to: str) -> list[str]:
    """What a rule loses in a format.

    A value that is the default of any framework is a convention, and gives way to the default of
    the framework that the format belongs to. A state dict does not say who chose a value, so a
    convention stays one wherever it was kept.

    Args:
        rule: the rule that is written.
        kept: what is read from that.
        to: the format.
    """
    if isinstance(rule, FixedScale) or isinstance(kept, FixedScale):
        return [] if isinstance(kept, FixedScale) else ["a scale that does not move"]
    scaler = f"{to}'s scaler"
    no_floor = kept.min_scale == checks.SMALLEST_SCALE
    floor = "no floor" if no_floor else f"a floor of {kept.min_scale!r}"
    reset = _RESETS[rule.hysteresis_reset]
    other_reset = "resets it at a finite step and at a backoff"
    backoff = "backs off at every overflow" if kept.hysteresis == 1 else other_reset
    words = {
        "growth_factor": f"a growth factor of {rule.growth_factor!r} "
        f"({scaler} has {kept.growth_factor!r})",
        "backoff_factor": f"a backoff factor of {rule.backoff_factor!r} "
        f"({scaler} has {kept.backoff_factor!r})",
        "growth_interval": f"a growth interval of {rule.growth_interval} "
        f"({scaler} has {kept.growth_interval})",
        "hysteresis": f"a hysteresis of {rule.hysteresis}{reset} ({scaler} {backoff})",
        "min_scale": f"a floor of {rule.min_scale!r} ({scaler} has {floor})",
        "max_scale": f"a ceiling of {rule.max_scale!r} ({scaler} has none)",
    }
    return [text for name, text in words.items() if _is_lost(name, rule, kept, to)]


def _is_lost(name: str, rule: DynamicScale, kept: DynamicScale, to: str) -> bool:
    before, after = _value(rule, name), _value(kept, name)
    conventions = [_value(default, name) for default in _DEFAULTS.values()]
    gives_way = before in conventions and after == _value(_DEFAULTS[to], name)
    return before != after and not gives_way


def _value(rule: DynamicScale, name: str) -> Any:
    """A parameter as it works: floats in float32, a hysteresis with what resets it."""
    if name == "hysteresis":
        return rule.hysteresis, rule.hysteresis_reset if rule.hysteresis > 1 else None
    value = getattr(rule, name)
    return checks.in_float32(value) if isinstance(value, float) else value
