"""The kinds of findings."""

from __future__ import annotations

from typing import Literal, NamedTuple

Level = Literal["good", "warning", "bad"]


class Kind(NamedTuple):
    """The severity of a kind of finding, and its name in a few words."""

    level: Level
    headline: str


KINDS: dict[str, Kind] = {
    # Causes come before their effects. Lost steps come before lost precision.
    "ranks": Kind("bad", "The ranks do not decide together"),
    "parameter": Kind("bad", "A parameter is NaN or Inf"),
    "divergence": Kind("bad", "The training diverges"),
    "activations": Kind("bad", "A module makes NaN or Inf"),
    "loss": Kind("bad", "The loss itself is NaN or Inf"),
    "nan": Kind("bad", "A gradient is NaN at every scale"),
    "floor": Kind("bad", "Gradients overflow at the smallest scale"),
    "state": Kind("bad", "The optimizer's state is NaN or Inf"),
    "data": Kind("bad", "Steps are skipped, again and again"),
    "silent": Kind("bad", "The loss is NaN or Inf, and no step is skipped"),
    "misuse": Kind("bad", "The scaler is used the wrong way"),
    "restart": Kind("warning", "The run was continued without the scaler's state"),
    "dead": Kind("bad", "Gradients are exactly 0"),
    "stalled": Kind("bad", "Parameters in 16 bits no longer move"),
    "range": Kind("warning", "No scale fits all parameters"),
    "underflow": Kind("warning", "The scale is too small"),
    "elsewhere": Kind("bad", "Another rank's gradients are Inf or NaN"),
    "normal": Kind("good", "Nothing unusual"),
}
"""All kinds of findings by name, from the gravest to the most harmless."""


def kind_of(name: str) -> Kind:
    """A kind by its name. A file from a later version may hold an unknown name."""
    return KINDS.get(name, Kind("bad", name))
