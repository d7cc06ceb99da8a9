"""Running statistics of PyTorch that are those of their start, though the weights are trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradscaler._in_memory import in_memory
from gradscaler.diagnose._monitor.models import models_in
from gradscaler.diagnose._record.thresholds import FEW_CALLS


def left_in(model: Any) -> str:
    """What normalizes by the statistics of its start when a run ends; empty if nothing does.

    It is ``"momentum Net 3 bn1"`` for three layers of a model, of which bn1 is the first, and
    ``"copy Net 3 bn1"`` for those of another model with the same parameters. Only layers in
    evaluation mode count, and another model only if its parameters are frozen, and weights and
    biases of these layers were trained: one that learns may do so in evaluation mode.
    """
    for own in models_in(model):
        norms = _norms_in(own)
        known = {n: each for n, each in norms.items() if each.num_batches_tracked >= FEW_CALLS}
        is_still = [name for name, each in known.items() if _is_at_start(each)]
        kept = [n for n in is_still if known[n].momentum == 0 and not known[n].training]
        if kept:
            return f"momentum {_told(own, kept)}"
        moved = known.keys() - {*is_still}
        for other in in_memory(type(own)) if moved else ():
            if type(other) is not type(own) or _shapes(other) != _shapes(own) or _may_learn(other):
                continue
            copied = {name: each for name, each in _norms_in(other).items() if name in moved}
            is_left = all(map(_is_left, copied.values()))
            if is_left and any(map(_is_trained, copied.values())):
                return f"copy {_told(own, list(copied))}"
    return ""


def _norms_in(model: Any) -> Mapping[str, Any]:
    """The modules that keep running statistics and a count of the batches in them, by name."""
    named: Any = getattr(model, "named_modules", tuple)()
    return {
        name: each
        for name, each in named
        if getattr(each, "running_mean", None) is not None
        and getattr(each, "running_var", None) is not None
        and getattr(each, "num_batches_tracked", None) is not None
    }


def _is_at_start(norm: Any) -> bool:
    return not bool(norm.running_mean.any()) and bool((norm.running_var == 1).all())


def _is_left(norm: Any) -> bool:
    """Whether no batch has passed a layer in training mode, which it is not in any more."""
    return not norm.training and not norm.num_batches_tracked and _is_at_start(norm)


def _is_trained(norm: Any) -> bool:
    """Whether the weight and the bias of a layer have left what they begin with."""
    weight, bias = norm.weight, norm.bias
    return weight is not None and bool((weight != weight[0]).any()) and bool(bias.any())


def _may_learn(model: Any) -> bool:
    return any(parameter.requires_grad for parameter in model.parameters())


def _shapes(model: Any) -> list[tuple[str, Any]]:
    return [(name, parameter.shape) for name, parameter in model.named_parameters()]


def _told(model: Any, names: Sequence[str]) -> str:
    kind = type(model).__name__
    return f"{kind} {len(names)} {names[0] or kind}"
