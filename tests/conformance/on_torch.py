"""PyTorch."""

import rules
import torch
import torch_like

from gradscaler.torch import GradScaler

DIFFERS = {
    "interval lowered": rules.FREEZES,
    "overflow at every scale": rules.SINKS,
}
MODES, TRAIN = torch_like.modes_and_training(torch, GradScaler, rules.torch, DIFFERS)
