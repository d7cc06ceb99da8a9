"""Loss scaling for JAX: pure functions, an optax wrapper, and the classes of jmp and flax."""

from gradscaler._frameworks import require

require("jax")

from gradscaler.jax._operations import all_finite, amax, select_tree
from gradscaler.jax._processes import check_same
from gradscaler.jax.flax import DynamicScale, DynamicScaleResult
from gradscaler.jax.jmp import DynamicLossScale, LossScale, NoOpLossScale, StaticLossScale
from gradscaler.jax.optax import LossScaledState, loss_scaled
from gradscaler.jax.scaler import GradScaler, ScaledGradients
from gradscaler.jax.weights import BitUpdate, MasterWeightsState, master_weights

__all__ = [
    "BitUpdate",
    "DynamicLossScale",
    "DynamicScale",
    "DynamicScaleResult",
    "GradScaler",
    "LossScale",
    "LossScaledState",
    "MasterWeightsState",
    "NoOpLossScale",
    "ScaledGradients",
    "StaticLossScale",
    "all_finite",
    "amax",
    "check_same",
    "loss_scaled",
    "master_weights",
    "select_tree",
]
