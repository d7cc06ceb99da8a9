"""Loops of JAX that fail in step 13, by a cause each; prints digests of the parameters."""

import hashlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

CASES = ["healthy", "root", "logarithm", "batch", "donated", "eager", "constant", "nnx", "nnx.jit"]
CASES += ["where", "apply_if_finite"]


def loss_of(params, x, case):
    outputs = jnp.tanh(x @ params["first"]) @ params["last"]
    loss = jnp.mean(outputs**2)
    if case in ("root", "donated", "eager", "where", "apply_if_finite"):
        return loss + jnp.sqrt(jnp.sum(((outputs - outputs[0]) * x.sum()) ** 2))
    if case == "logarithm":
        return loss - jnp.log(jnp.abs(x).sum() + 0 * outputs.sum())
    if case == "constant":  # no parameter is behind it
        return loss - jnp.log(jnp.abs(x).sum())
    return loss


def loss_of_model(model, x):
    outputs = model(x)
    return jnp.mean(outputs**2) + jnp.linalg.norm(outputs * x.sum())


def batches(case):
    data = np.random.default_rng(0).standard_normal((24, 16, 4)).astype("float32")
    for number, batch in enumerate(data):
        if number == 12 and case != "healthy":
            batch = batch * 0 if case != "batch" else np.where(batch > 2, np.nan, batch)
        yield batch


def train_nnx(case):
    model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    def step(model, optimizer, x):
        loss, gradients = nnx.value_and_grad(loss_of_model)(model, x)
        optimizer.update(model, gradients)
        return loss

    if case == "nnx.jit":
        step = nnx.jit(step)
    for batch in batches(case):
        step(model, optimizer, batch)
    return nnx.state((model, optimizer))


def train(case):
    if case.startswith("nnx"):
        return train_nnx(case)
    first, last = jax.random.split(jax.random.key(0))
    params = {"first": jax.random.normal(first, (4, 8)), "last": jax.random.normal(last, (8, 1))}
    optimizer = optax.adam(1e-2)
    if case == "apply_if_finite":
        optimizer = optax.apply_if_finite(optimizer, 5)
    state = optimizer.init(params)

    take = jax.value_and_grad(loss_of)
    if case == "where":
        take = jax.jit(take, static_argnums=2)

    def step(params, state, x):
        loss, gradients = take(params, x, case)
        updates, new_state = optimizer.update(gradients, state)
        new = optax.apply_updates(params, updates), new_state
        if case == "where":
            is_finite = jnp.isfinite(optax.global_norm(gradients))
            new = jax.tree.map(partial(jnp.where, is_finite), new, (params, state))
        return *new, loss

    if case == "donated":
        step = partial(jax.jit, donate_argnums=(0, 1))(step)
    elif case != "eager":
        step = jax.jit(step)
    for batch in batches(case):
        params, state, _ = step(params, state, batch)
    return params, state


for each in CASES:
    values = (np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(train(each)))
    print(each, hashlib.sha256(b"".join(values)).hexdigest())
