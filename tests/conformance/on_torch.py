"""PyTorch."""

import torch

from gradscaler.torch import GradScaler
from tests.conformance import rules, torch_like

DIFFERS = {
    "interval lowered": rules.FREEZES,
    "overflow at every scale": rules.SINKS,
}
MODES, TRAIN = torch_like.modes_and_training(torch, GradScaler, rules.torch, DIFFERS)
