"""Loss scaling for Keras 3: :class:`LossScaleOptimizer`, in place of Keras' own.

:func:`load_model` loads a model that was saved with Keras' own.
"""

from gradscaler.keras.optimizer import LossScaleOptimizer
from gradscaler.keras.saving import load_model

__all__ = ["LossScaleOptimizer", "load_model"]
