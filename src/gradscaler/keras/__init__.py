"""Loss scaling for Keras 3: :class:`LossScaleOptimizer`, in place of Keras' own."""

from gradscaler.keras.optimizer import LossScaleOptimizer

__all__ = ["LossScaleOptimizer"]
