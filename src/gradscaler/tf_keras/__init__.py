"""Loss scaling for Keras 2: :class:`LossScaleOptimizer`, in place of tf-keras' own."""

from gradscaler.tf_keras.optimizer import LossScaleOptimizer

__all__ = ["LossScaleOptimizer"]
