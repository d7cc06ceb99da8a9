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
        meaning: what it is, for who sees it for the first time; empty if it is not known.
    """

    level: Level
    headline: str
    explains_skips: bool = False
    is_of_sample: bool = False
    shows_fit: bool = False
    explains: tuple[str, ...] = ()
    meaning: str = ""


_KINDS: dict[str, Kind] = {
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
_MEANINGS = {
    "ranks": (
        "Each process decides alone whether a step is skipped, so one skips a step that "
        "another one takes, and their weights are no longer the same."
    ),
    "parameter": (
        "A weight holds an Inf or a NaN, and with it each loss and each gradient. More "
        "training does not make it finite; a checkpoint from before it does."
    ),
    "divergence": (
        "The loss and the weights grow from step to step, until numbers leave the range of "
        "the format. Another loss scale does not stop that; a lower learning rate may."
    ),
    "activations": (
        "An operation of the forward pass makes an Inf or a NaN from finite numbers, such as "
        "a product above 65504 in float16. A loss scale changes the backward pass alone."
    ),
    "loss": (
        "The loss is NaN or Inf before it is scaled, and so are the gradients behind it. The "
        "cause is in the loss, or in what it is given."
    ),
    "nan": (
        "The loss is finite, and a gradient is not: an operation on the way back has a slope "
        "of Inf or NaN, such as a root at 0. That is so at any loss scale."
    ),
    "floor": (
        "The gradients are too large for the format at the smallest loss scale, too. The loss "
        "may be a sum in place of a mean, or have large numbers as targets."
    ),
    "state": (
        "An optimizer keeps averages of the gradients, and one of them is Inf or NaN. Each "
        "later step writes it into a weight, or leaves that where it is."
    ),
    "data": (
        "Steps fail now and then, and not those between them: some batches hold bad or very "
        "large numbers. Each one costs a step, and lowers the loss scale."
    ),
    "silent": (
        "The loss is NaN or Inf, and no gradient shows it: the part of the loss that makes it "
        "has none. So no step is skipped, and the numbers of the loss say nothing."
    ),
    "misuse": (
        "The calls of the loop work, and in this order or with these arguments they train "
        "something else than is meant."
    ),
    "restart": (
        "The run goes on from a checkpoint, without the state of its scaler or its schedule. "
        "A scaler finds its scale again after some skips; a schedule starts again."
    ),
    "dead": (
        "Gradients are exactly 0, not only small: nothing of the loss reaches these "
        "parameters. No loss scale changes a 0."
    ),
    "stalled": (
        "A number in 16 bits has 8 or 11 significant bits. An update that is smaller than "
        "half of the last one is rounded away, in each step."
    ),
    "eps": (
        "Adam divides a gradient by its usual size plus eps. Where gradients are below eps, "
        "the steps are tiny. A loss scale is divided out before, so it does not help."
    ),
    "range": (
        "The largest and the smallest gradients differ by more than the format can hold. Each "
        "loss scale loses one or the other."
    ),
    "underflow": (
        "Gradients are too small for the format: they become 0, or lose digits. A higher loss "
        "scale keeps them."
    ),
    "elsewhere": (
        "All processes skip a step together, and this one's gradients are finite. The file of "
        "the process at fault shows the cause."
    ),
    "normal": (
        "No sign was found of what the other findings are. A few skipped steps are usual, "
        "while the loss scale settles."
    ),
}
KINDS = {name: kind._replace(meaning=_MEANINGS[name]) for name, kind in _KINDS.items()}
"""All kinds of findings by name, from the gravest to the most harmless."""


def kind_of(name: str) -> Kind:
    """A kind by its name. An unknown one, from a later version's file, may explain skips."""
    return KINDS.get(name, Kind("bad", name, explains_skips=True))
