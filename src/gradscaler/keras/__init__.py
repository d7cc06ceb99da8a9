"""Loss scaling for Keras 3: :class:`LossScaleOptimizer`, in place of Keras' own.

:func:`load_model` loads a model that was saved with Keras' own wrapper, and replaces it.
"""

from gradscaler._frameworks import require

require("keras")

try:
    import keras  # noqa: F401 # imports its backend
except ModuleNotFoundError as error:
    backend = str(error.name).partition(".")[0]
    message = f"Keras' backend is missing: pip install {backend}, or set KERAS_BACKEND"
    raise ModuleNotFoundError(message, name=error.name) from None

from gradscaler.keras.optimizer import LossScaleOptimizer
from gradscaler.keras.saving import load_model

__all__ = ["LossScaleOptimizer", "load_model"]
