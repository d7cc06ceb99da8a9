"""flax linen in fp16: the scaler is a field of the TrainState.

python examples/jax_linen.py
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits

from gradscaler.jax import GradScaler, select_tree


class ScaledTrainState(TrainState):  # type: ignore[no-untyped-call] # flax's
    """A train state with a loss scale."""

    scaler: GradScaler


class Network(nn.Module):
    """Two layers that compute in fp16 on float32 parameters."""

    @nn.compact
    def __call__(self, images: Any) -> Any:
        """Ten numbers for each image, before the softmax."""
        hidden = nn.relu(nn.Dense(64, dtype=jnp.float16)(images))
        return nn.Dense(10, dtype=jnp.float16)(hidden)


@jax.jit
def train_step(state: Any, images: Any, labels: Any) -> tuple[Any, Any]:
    """Return the state after a step or a skip, and the loss."""

    def loss_fn(params: Any) -> Any:
        logits = state.apply_fn({"params": params}, images).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    scaler, finite, loss, grads = state.scaler.value_and_grad(loss_fn)(state.params)
    state = select_tree(finite, state.apply_gradients(grads=grads), state)
    return state.replace(scaler=scaler), loss


def main(steps: int = 100) -> float:
    """Train on all digits at once, and return the last loss."""
    pixels, labels = load_digits(return_X_y=True)
    images = jnp.array(pixels / 16, dtype=jnp.float32)
    network = Network()
    params = network.init(jax.random.key(0), images)["params"]
    create: Any = ScaledTrainState.create
    state = create(apply_fn=network.apply, params=params, tx=optax.adam(0.01), scaler=GradScaler())
    for _ in range(steps):
        state, loss = train_step(state, images, jnp.array(labels))
    print(f"loss {loss:.3f} after {state.step} of {steps} steps, scale {state.scaler.loss_scale}")
    return float(loss)


if __name__ == "__main__":
    main()
