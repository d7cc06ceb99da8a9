"""Equinox in fp16: filtered transformations, and an optimizer that holds the scaler.

python examples/jax_equinox.py
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits

from gradscaler.jax import loss_scaled

OPTIMIZER = loss_scaled(optax.adam(0.01))


def half(tree: Any) -> Any:
    """The tree with its float arrays in fp16."""
    return jax.tree.map(
        lambda leaf: leaf.astype(jnp.float16) if eqx.is_inexact_array(leaf) else leaf, tree
    )


@eqx.filter_jit
def train_step(model: eqx.nn.MLP, state: Any, images: Any, labels: Any) -> tuple[Any, Any, Any]:
    """Return the model and the state after a step or a skip, and the loss."""

    @eqx.filter_grad(has_aux=True)
    def gradients(model: eqx.nn.MLP) -> tuple[Any, Any]:
        logits = jax.vmap(half(model))(half(images)).astype(jnp.float32)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return state.scaler.scale(loss), loss

    grads, loss = gradients(model)
    updates, state = OPTIMIZER.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), state, loss


def main(steps: int = 100) -> float:
    """Train on all digits at once, and return the last loss."""
    pixels, labels = load_digits(return_X_y=True)
    images = jnp.array(pixels / 16, dtype=jnp.float32)
    model = eqx.nn.MLP(64, 10, width_size=64, depth=1, key=jax.random.key(0))
    state = OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))
    skipped = 0
    for _ in range(steps):
        model, state, loss = train_step(model, state, images, jnp.array(labels))
        skipped += not state.grads_finite
    print(f"loss {loss:.3f}, {skipped} of {steps} steps skipped, scale {state.scaler.loss_scale}")
    return float(loss)


if __name__ == "__main__":
    main()
