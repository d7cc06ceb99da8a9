"""FSDP in fp16 over four devices: weights and batches are sharded by jit, and by hand in shard_map.

    python examples/jax_sharded.py

Without accelerators, the four devices are parts of the CPU. Each holds a quarter of each weight, of
the optimizer's state and of the batch. An Inf in one device's gradients skips the step on all
devices and moves the scale on all. Under jit this needs nothing; in shard_map it needs
``finite_axis``.
"""

from __future__ import annotations

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")  # before JAX starts

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from sklearn.datasets import load_digits

from gradscaler import DynamicScale
from gradscaler.jax import check_same, loss_scaled

P: Any = jax.sharding.PartitionSpec  # untyped
lax: Any = jax.lax  # partly untyped

POLICY = DynamicScale()
AXIS = "data"
SPECS = {"hidden": P(AXIS), "output": P(AXIS), "bias": P()}  # a bias of 10 is not worth sharding
IMAGES = 1792  # of 1797, so that each device gets as many

Params = dict[str, jax.Array]
Step = Callable[..., tuple[Params, Any, jax.Array]]


def init(key: jax.Array) -> Params:
    """A network of one hidden layer, in float32."""
    first, second = jax.random.split(key)
    return {
        "hidden": jax.random.normal(first, (64, 64)) / 8,
        "output": jax.random.normal(second, (64, 10)) / 8,
        "bias": jnp.zeros(10),
    }


def half(tree: Any) -> Any:
    """The tree in fp16."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float16), tree)


def mean_loss(params: Params, images: jax.Array, labels: jax.Array) -> Any:
    """The loss of a batch, with the weights and images that it is given in fp16."""
    logits = jax.nn.relu(images @ params["hidden"]) @ params["output"] + params["bias"]
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def stepped(
    optimizer: Any, loss: Callable[..., Any], params: Params, state: Any, *batch: jax.Array
) -> tuple[Params, Any, jax.Array]:
    """Return the parameters and the state after a step or a skip, and the loss."""

    def scaled_loss(params: Params) -> tuple[Any, Any]:
        value = loss(params, *batch)
        return state.scaler.scale(value), value

    grads, value = jax.grad(scaled_loss, has_aux=True)(params)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


def by_jit(mesh: jax.sharding.Mesh, specs: Any) -> Step:
    """A step written as for one device; the compiler splits it by the arrays' shardings."""
    optimizer = loss_scaled(optax.adam(0.01), POLICY)

    def loss(params: Params, images: jax.Array, labels: jax.Array) -> Any:
        return mean_loss(half(params), half(images), labels)

    def step(params: Params, state: Any, *batch: jax.Array) -> tuple[Params, Any, jax.Array]:
        return stepped(optimizer, loss, params, state, *batch)

    return jax.jit(step, out_shardings=placed(mesh, (*specs, P())))


def by_shard_map(mesh: jax.sharding.Mesh, specs: Any) -> Step:
    """A step of one device, which holds a quarter, and gathers the weights that it needs."""
    optimizer = loss_scaled(optax.adam(0.01), POLICY, finite_axis=AXIS)

    def loss(shards: Params, images: jax.Array, labels: jax.Array) -> Any:
        params = {
            name: leaf if SPECS[name] == P() else lax.all_gather(leaf, AXIS, tiled=True)
            for name, leaf in half(shards).items()
        }
        # The gradient of all_gather sums over the devices, and this mean makes it an average.
        return lax.pmean(mean_loss(params, half(images), labels), AXIS)

    def step(params: Params, state: Any, *batch: jax.Array) -> tuple[Params, Any, jax.Array]:
        return stepped(optimizer, loss, params, state, *batch)

    batch = P(AXIS), P(AXIS)
    return jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=(*specs, *batch), out_specs=(*specs, P()))
    )


def placed(mesh: jax.sharding.Mesh, specs: Any) -> Any:
    """The shardings that jit and device_put take, from specs."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def train(make_step: Callable[..., Step], steps: int) -> float:
    """Train on all digits at once, and return the last loss."""
    mesh = jax.make_mesh((jax.device_count(),), (AXIS,))
    pixels, digits = load_digits(return_X_y=True)
    images, labels = jnp.array(pixels[:IMAGES] / 16, jnp.float32), jnp.array(digits[:IMAGES])

    params = init(jax.random.key(0))
    optimizer = loss_scaled(optax.adam(0.01), POLICY)
    state = optimizer.init(params)
    # Adam's averages lie beside their weights; the scale and the counters are on every device.
    state_specs = optax.tree_map_params(
        optimizer, lambda _, spec: spec, state, SPECS, transform_non_params=lambda _: P()
    )
    specs = SPECS, state_specs
    params, state = jax.device_put((params, state), placed(mesh, specs))
    images, labels = jax.device_put((images, labels), NamedSharding(mesh, P(AXIS)))

    step = make_step(mesh, specs)
    skipped = 0
    for _ in range(steps):
        params, state, loss = step(params, state, images, labels)
        skipped += not state.grads_finite
    check_same(state.scaler)
    print(
        f"{make_step.__name__} on {mesh.size} devices: loss {loss:.3f}, "
        f"{skipped} of {steps} steps skipped, scale {state.scaler.loss_scale}"
    )
    return float(loss)


def main(steps: int = 100) -> float:
    """Train in both ways, and return the larger of the last losses."""
    return max(train(make_step, steps) for make_step in (by_jit, by_shard_map))


if __name__ == "__main__":
    main()
