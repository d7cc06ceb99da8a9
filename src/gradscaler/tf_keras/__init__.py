"""Loss scaling for Keras 2: :class:`LossScaleOptimizer`, in place of tf-keras' own.

It makes a ``LossScaleOptimizerV2`` for ``tf_keras.optimizers.legacy``, and a
``LossScaleOptimizerV3`` for ``tf_keras.optimizers``.
"""

from gradscaler._frameworks import require

require("tf_keras")

from gradscaler.tf_keras.optimizer import (
    LossScaleOptimizer,
    LossScaleOptimizerV2,
    LossScaleOptimizerV3,
)

__all__ = ["LossScaleOptimizer", "LossScaleOptimizerV2", "LossScaleOptimizerV3"]
