"""Loss scaling for MindSpore, on every device and in both modes.

Each name is a drop-in for the same name in ``mindspore``, ``mindspore.amp`` or ``mindspore.nn``.
``LossScaleManager`` and ``LossScaler`` are MindSpore's own base classes.
"""

from gradscaler._frameworks import require

require("mindspore")

from mindspore.amp import LossScaleManager, LossScaler

from gradscaler.mindspore._operations import all_finite, amax
from gradscaler.mindspore.cells import DynamicLossScaleUpdateCell, FixedLossScaleUpdateCell
from gradscaler.mindspore.managers import DynamicLossScaleManager, FixedLossScaleManager
from gradscaler.mindspore.model import Model
from gradscaler.mindspore.scaler import DynamicLossScaler, StaticLossScaler
from gradscaler.mindspore.train import TrainOneStepWithLossScaleCell, build_train_network

__all__ = [
    "DynamicLossScaleManager",
    "DynamicLossScaleUpdateCell",
    "DynamicLossScaler",
    "FixedLossScaleManager",
    "FixedLossScaleUpdateCell",
    "LossScaleManager",
    "LossScaler",
    "Model",
    "StaticLossScaler",
    "TrainOneStepWithLossScaleCell",
    "all_finite",
    "amax",
    "build_train_network",
]
