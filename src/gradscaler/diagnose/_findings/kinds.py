"""The kinds of findings: their headlines, how bad they are, and which of two comes first."""

from __future__ import annotations

from typing import Literal, NamedTuple

Level = Literal["good", "warning", "bad"]


class Kind(NamedTuple):
    """What a kind of finding is called in a few words, and how bad it is."""

    level: Level
    headline: str


KINDS: dict[str, Kind] = {
    # Causes come before what they lead to, and what loses steps before what loses precision.
    "ranks": Kind("bad", "The ranks do not decide together"),
    "parameter": Kind("bad", "A parameter is NaN or Inf"),
    "divergence": Kind("bad", "The training diverges"),
    "activations": Kind("bad", "Activations are too large"),
    "loss": Kind("bad", "The loss itself is NaN or Inf"),
    "nan": Kind("bad", "A gradient is NaN at every scale"),
    "floor": Kind("bad", "Gradients overflow at the smallest scale"),
    "state": Kind("bad", "The optimizer's state is NaN or Inf"),
    "data": Kind("bad", "Some batches are skipped, again and again"),
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
"""From the gravest to the most harmless."""


def kind_of(name: str) -> Kind:
    """A kind by its name, which a file may have from a later version."""
    return KINDS.get(name, Kind("bad", name))
