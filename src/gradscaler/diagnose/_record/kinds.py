"""The kinds of findings."""

from __future__ import annotations

from typing import Literal, NamedTuple

Level = Literal["good", "warning", "bad"]


class Kind(NamedTuple):
    """A kind of finding.

    Attributes:
        level: how bad it is.
        headline: its name in a few words.
        explains_skips: whether it names a cause of skipped steps. Of several ranks, the one at
            fault has a finding that does.
        is_of_sample: whether the latest sample shows it, so that a later one may disprove it.
        shows_fit: whether its report shows which loss scales fit.
        explains: the kinds of findings that are its effects, and are not reported beside it. Bad
            batches lower the scale, so it is too small or below 1. Gradients behind a slope of 0
            are 0, which is not underflow.
    """

    level: Level
    headline: str
    explains_skips: bool = False
    is_of_sample: bool = False
    shows_fit: bool = False
    explains: tuple[str, ...] = ()


KINDS: dict[str, Kind] = {
    # Causes come before their effects. Lost steps come before lost precision.
    "ranks": Kind("bad", "The ranks do not decide together", explains_skips=True),
    "parameter": Kind("bad", "A parameter is NaN or Inf", explains_skips=True),
    "divergence": Kind("bad", "The training diverges", explains_skips=True, explains=("dead",)),
    "activations": Kind(
        "bad", "A module makes NaN or Inf", explains_skips=True, explains=("dead",)
    ),
    "loss": Kind("bad", "The loss itself is NaN or Inf", explains_skips=True),
    "nan": Kind("bad", "A gradient is NaN or Inf", explains_skips=True),
    "floor": Kind(
        "bad", "Gradients overflow at the smallest scale", explains_skips=True, shows_fit=True
    ),
    "state": Kind("bad", "The optimizer's state is NaN or Inf", explains_skips=True),
    "data": Kind(
        "bad", "Some batches are bad", explains_skips=True, explains=("underflow", "floor")
    ),
    "silent": Kind("bad", "The loss is NaN or Inf, and the gradients are finite"),
    "misuse": Kind("bad", "The training loop has a mistake", is_of_sample=True),
    "restart": Kind("warning", "The run was continued without a part of its state"),
    "dead": Kind("bad", "Gradients are exactly 0", is_of_sample=True, explains=("underflow",)),
    "stalled": Kind("bad", "Parameters in 16 bits no longer move", is_of_sample=True),
    "eps": Kind("warning", "The optimizer's eps outweighs the gradients", is_of_sample=True),
    "range": Kind("warning", "No scale fits all parameters", is_of_sample=True, shows_fit=True),
    "underflow": Kind("warning", "The scale is too small", is_of_sample=True, shows_fit=True),
    "elsewhere": Kind("bad", "Another rank's gradients are Inf or NaN"),
    "normal": Kind("good", "Nothing unusual"),
}
"""All kinds of findings by name, from the gravest to the most harmless."""


def kind_of(name: str) -> Kind:
    """A kind by its name. An unknown one, from a later version's file, may explain skips."""
    return KINDS.get(name, Kind("bad", name, explains_skips=True))
