"""TensorPlay."""

import rules
import tensorplay
import torch_like

from gradscaler.tensorplay import GradScaler

DIFFERS = {
    "interval lowered": rules.FREEZES,
    "overflow at every scale": rules.SINKS,
    "towards the largest": rules.TO_INF,
}
MODES, TRAIN = torch_like.modes_and_training(tensorplay, GradScaler, rules.tensorplay, DIFFERS)
