"""Whether a model of PyTorch was left in evaluation mode, and is trained on."""

from __future__ import annotations

import sys
from typing import Any

from gradscaler.diagnose._monitor.models import models_in
from gradscaler.diagnose._monitor.parameters import held_by


class TrainingMode:
    """Finds steps of a model in evaluation mode that follow steps in training mode.

    Only a whole model counts, as layers may be meant to stay in evaluation mode, and only one with
    layers that compute something else in it. A model that began so may be meant to.
    """

    def __init__(self, model: Any) -> None:
        self._models = models_in(model)
        self._trained: set[int] = set()  # indices of models that were stepped in training mode
        self._evaluating: list[int] = []  # at the latest loss

    def note_loss(self) -> None:
        """Note which models are in evaluation mode when a loss is made."""
        self._evaluating = [
            i for i, each in enumerate(self._models) if not getattr(each, "training", True)
        ]

    def is_left(self, optimizer: object) -> bool:
        """Whether an optimizer's step trains a model that was left in evaluation mode."""
        training = {i for i, each in enumerate(self._models) if getattr(each, "training", True)}
        self._trained |= training
        if not self._evaluating:
            return False
        left = [i for i in self._evaluating if i in self._trained and i not in training]
        suspects = [self._models[i] for i in left]
        if not suspects:
            return False
        held = set(map(id, held_by(optimizer)))
        return any(_depends_on_mode(each) and _is_trained(each, held) for each in suspects)


def _is_trained(model: Any, held: set[int]) -> bool:
    return any(p.grad is not None and id(p) in held for p in model.parameters())


def _depends_on_mode(model: Any) -> bool:
    """Whether a layer in evaluation mode drops nothing, or uses statistics that it has kept."""
    nn: Any = sys.modules["torch"].nn
    drop = nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout
    for module in model.modules():
        if isinstance(module, drop):
            changes = module.p > 0
        elif isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
            changes = module.dropout > 0
        else:  # a normalization of any kind
            changes = getattr(module, "running_mean", None) is not None
        if changes and not module.training:
            return True
    return False
