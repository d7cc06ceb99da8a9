"""Type checking of a user's code."""

CODE = """
import jax
import jax.numpy as jnp
import optax
from gradscaler import DynamicScale
from gradscaler.jax import GradScaler, LossScale, NoOpLossScale, loss_scaled, master_weights

scaler = GradScaler()
loss: jax.Array = scaler.scale(jnp.float32(1.0))
optimizer = loss_scaled(optax.sgd(0.1), DynamicScale())
optimizer.init(jnp.zeros(3))
loss_scale: LossScale = NoOpLossScale()
loss_scale = loss_scale.adjust(jnp.array(True))
other: LossScale = scaler  # assignment
scaler.adjust()  # call-arg
loss_scaled()  # call-arg
loss_scaled(optax.sgd(0.1), 1024.0)  # arg-type
loss_scaled(1024.0)  # arg-type
master_weights(optax.sgd(0.1), "remainder16").init(jnp.zeros(3))
master_weights(optax.sgd(0.1), store="float16")  # arg-type
master_weights(1024.0)  # arg-type
GradScaler(1024.0)  # arg-type
"""


def test_wrong_calls_are_type_errors_and_right_ones_are_not(check_types):
    check_types(CODE)
