"""flax NNX in fp16: the step takes the scaler and returns it.

python examples/jax_nnx.py
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from sklearn.datasets import load_digits

from gradscaler.jax import GradScaler, select_tree


class Network(nnx.Module):
    """Two layers that compute in fp16 on float32 parameters."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(64, 64, dtype=jnp.float16, rngs=rngs)
        self.output = nnx.Linear(64, 10, dtype=jnp.float16, rngs=rngs)

    def __call__(self, images: Any) -> Any:
        """Ten numbers for each image, before the softmax."""
        return self.output(nnx.relu(self.hidden(images)))


@nnx.jit
def train_step(
    model: Network, optimizer: nnx.Optimizer[Any], scaler: GradScaler, images: Any, labels: Any
) -> tuple[GradScaler, Any]:
    """Step the model and the optimizer, or neither; return the new scaler and the loss."""
    split: Any = nnx.split
    graph, params, rest = split(model, nnx.Param, ...)

    def loss_fn(params: Any) -> Any:
        logits = nnx.merge(graph, params, rest)(images).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    scaler, finite, loss, grads = scaler.value_and_grad(loss_fn)(params)
    before = jax.tree.map(jnp.copy, nnx.state((model, optimizer)))  # the state refers to variables
    optimizer.update(model, grads)
    nnx.update((model, optimizer), select_tree(finite, nnx.state((model, optimizer)), before))
    return scaler, loss


def main(steps: int = 100) -> float:
    """Train on all digits at once, and return the last loss."""
    pixels, labels = load_digits(return_X_y=True)
    images = jnp.array(pixels / 16, dtype=jnp.float32)
    model = Network(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)
    scaler = GradScaler()
    for _ in range(steps):
        scaler, loss = train_step(model, optimizer, scaler, images, jnp.array(labels))
    taken = optimizer.step.get_value()
    print(f"loss {loss:.3f} after {taken} of {steps} steps, scale {scaler.loss_scale}")
    return float(loss)


if __name__ == "__main__":
    main()
