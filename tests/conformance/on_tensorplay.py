"""TensorPlay."""

import tensorplay

from gradscaler.tensorplay import GradScaler
from tests.conformance import rules, torch_like

DIFFERS = {
    "interval lowered": rules.FREEZES,
    "overflow at every scale": rules.SINKS,
    "towards the largest": rules.TO_INF,
}
MODES, TRAIN = torch_like.modes_and_training(tensorplay, GradScaler, rules.tensorplay, DIFFERS)
