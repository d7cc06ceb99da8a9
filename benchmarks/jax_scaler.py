"""The time of a compiled training step without loss scaling, with gradscaler.jax, flax and jmp.

    python benchmarks/jax_scaler.py

All take turns to train the same network on the same batch, in a step compiled by XLA: scale,
differentiate, unscale, check, step or skip, and move the scale. They compute in float32 on small
batches, so loss scaling is a large part of the step. A second table shows how long XLA takes to
compile the steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import optax
import paired
from flax.training import dynamic_scale

import gradscaler
import gradscaler.jax

OPTIMIZER = optax.adam(1e-4)
LOSS_SCALED = gradscaler.jax.loss_scaled(OPTIMIZER)
COMPILATIONS = 6  # of each step; fewer give no interval

Params = Any
LossFn = Callable[[Params], Any]
State = tuple[Params, Any, Any]  # parameters, optimizer state, loss scale
Step = Callable[[LossFn, State], State]


@dataclass(frozen=True)
class Workload:
    """A network to train.

    Attributes:
        name: its name in the table.
        init: makes its parameters.
        loss_fn: the loss of a batch.
        batch: the batch that the network trains on.
        calls: the number of steps in one measurement.
    """

    name: str
    init: Callable[[], Params]
    loss_fn: Callable[[Params, Any], Any]
    batch: Any
    calls: int


def init_mlp(width: int, layers: int) -> Params:
    """Square weights, and biases of zero."""
    keys = jax.random.split(jax.random.key(0), layers)
    return [(jax.random.normal(key, (width, width)) / width**0.5, jnp.zeros(width)) for key in keys]


def mlp_loss(params: Params, values: Any) -> Any:
    """The mean square of the network's outputs."""
    for weight, bias in params:
        values = jnp.tanh(values @ weight + bias)
    return (values**2).mean()


def init_transformer(vocabulary: int, length: int, width: int, blocks: int) -> Params:
    """Embeddings of tokens and positions, and the weights of the blocks."""
    shapes = {
        "token": (vocabulary, width),
        "place": (length, width),
        "blocks": [
            {
                "norm_1": (width,),
                "attention": (width, 3 * width),
                "attention_out": (width, width),
                "norm_2": (width,),
                "hidden": (width, 4 * width),
                "hidden_out": (4 * width, width),
            }
            for _ in range(blocks)
        ],
    }
    leaves, structure = jax.tree.flatten(shapes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    weights = [
        jax.random.normal(key, shape) * 0.05 for key, shape in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, weights)


def transformer_loss(params: Params, tokens: Any, heads: int = 4) -> Any:
    """The cross-entropy of each next token, with causal attention to the earlier tokens."""
    values = params["token"][tokens] + params["place"]
    *batch, width = values.shape
    for block in params["blocks"]:
        mixed = jax.nn.standardize(values) * block["norm_1"] @ block["attention"]
        query, key, value = jnp.split(mixed.reshape(*batch, heads, -1), 3, axis=-1)
        attended = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        values += attended.reshape(*batch, width) @ block["attention_out"]
        hidden = jax.nn.gelu(jax.nn.standardize(values) * block["norm_2"] @ block["hidden"])
        values += hidden @ block["hidden_out"]
    logits = (values @ params["token"].T)[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


WORKLOADS = [
    Workload(
        "MLP, batch of 256",
        partial(init_mlp, 512, 4),
        mlp_loss,
        jnp.ones((256, 512)),
        calls=2,
    ),
    Workload(
        "MLP, batch of 16",
        partial(init_mlp, 1024, 4),
        mlp_loss,
        jnp.ones((16, 1024)),
        calls=2,
    ),
    Workload("one layer of 16", partial(init_mlp, 16, 1), mlp_loss, jnp.ones((16, 16)), calls=200),
    Workload(
        "transformer, 2 blocks of 128",
        partial(init_transformer, vocabulary=256, length=64, width=128, blocks=2),
        transformer_loss,
        jax.random.randint(jax.random.key(1), (4, 64), 0, 256),
        calls=2,
    ),
]


def unscaled(loss_fn: LossFn, state: State) -> State:
    """A step without loss scaling."""
    params, opt_state, _ = state
    grads = jax.grad(loss_fn)(params)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, ()


def ours(loss_fn: LossFn, state: State) -> State:
    """A step with ``gradscaler.jax.GradScaler``."""
    params, opt_state, scaler = state
    scaler, finite, _, grads = scaler.value_and_grad(loss_fn)(params)
    updates, new_opt_state = OPTIMIZER.update(grads, opt_state, params)
    new = optax.apply_updates(params, updates), new_opt_state
    return *gradscaler.jax.select_tree(finite, new, (params, opt_state)), scaler


def wrapped(loss_fn: LossFn, state: State) -> State:
    """A step with ``gradscaler.jax.loss_scaled``."""
    params, opt_state, _ = state
    grads = jax.grad(lambda params: opt_state.scaler.scale(loss_fn(params)))(params)
    updates, opt_state = LOSS_SCALED.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, ()


def flax(loss_fn: LossFn, state: State) -> State:
    """A step with flax's ``DynamicScale``, as its examples use it."""
    params, opt_state, scale = state
    scale, finite, _, grads = scale.value_and_grad(loss_fn)(params)
    updates, new_opt_state = OPTIMIZER.update(grads, opt_state, params)
    new = optax.apply_updates(params, updates), new_opt_state
    select = partial(jnp.where, finite)
    return *jax.tree.map(select, new, (params, opt_state)), scale


def with_jmp(loss_fn: LossFn, state: State) -> State:
    """A step with jmp's ``DynamicLossScale``, as its documentation shows it."""
    params, opt_state, scale = state
    grads = jax.grad(lambda params: scale.scale(loss_fn(params)))(params)
    grads = scale.unscale(grads)
    finite = jmp.all_finite(grads)
    updates, new_opt_state = OPTIMIZER.update(grads, opt_state, params)
    new = optax.apply_updates(params, updates), new_opt_state
    return *jmp.select_tree(finite, new, (params, opt_state)), scale.adjust(finite)


STEPS: dict[str, tuple[Step, Callable[[], Any]]] = {  # with what makes their loss scale
    "GradScaler": (ours, gradscaler.jax.GradScaler),
    "loss_scaled": (wrapped, tuple),
    "unscaled": (unscaled, tuple),
    "flax": (flax, partial(dynamic_scale.DynamicScale, scale=jnp.float32(2.0**16))),
    "jmp": (with_jmp, partial(jmp.DynamicLossScale, jnp.float32(2.0**16))),
}
PAIRS = [
    (mine, rival) for mine in ("GradScaler", "loss_scaled") for rival in ("unscaled", "flax", "jmp")
]


def start(name: str, workload: Workload) -> State:
    """The state for the first step."""
    params = workload.init()
    optimizer = LOSS_SCALED if name == "loss_scaled" else OPTIMIZER
    return params, optimizer.init(params), STEPS[name][1]()


def jitted(name: str, workload: Workload) -> Any:
    """A step of a state and a batch, which XLA compiles at its first call."""
    step, _ = STEPS[name]

    def on_batch(state: State, batch: Any) -> State:
        return step(lambda params: workload.loss_fn(params, batch), state)

    return jax.jit(on_batch)


def time_steps(workload: Workload, repetitions: int) -> list[paired.Comparison]:
    """Time all steps by turns; raise an error if they end with different parameters."""
    states = {name: start(name, workload) for name in STEPS}
    steps = {name: jitted(name, workload) for name in STEPS}

    def step(name: str) -> None:
        states[name] = steps[name](states[name], workload.batch)
        jax.block_until_ready(states[name])  # type: ignore[no-untyped-call] # JAX's is not typed

    calls = {name: partial(step, name) for name in STEPS}
    seconds = paired.interleave(calls, lambda: None, repetitions, workload.calls)
    trained = [jax.tree.leaves(states[name][0]) for name in STEPS]
    for leaves in zip(*trained, strict=True):
        if not all(jnp.allclose(leaf, leaves[0], atol=1e-3) for leaf in leaves):
            raise RuntimeError(f"{workload.name}: the steps end with different parameters")
    return pairs(workload.name, seconds)


def time_compilation(workload: Workload) -> list[paired.Comparison]:
    """Time the first call of each step, which traces it and has XLA compile it."""
    states = {name: start(name, workload) for name in STEPS}

    def compile_step(name: str) -> None:
        jax.clear_caches()  # type: ignore[no-untyped-call] # JAX's is not typed
        jax.block_until_ready(jitted(name, workload)(states[name], workload.batch))  # type: ignore[no-untyped-call]

    calls = {name: partial(compile_step, name) for name in STEPS}
    seconds = paired.interleave(calls, lambda: None, COMPILATIONS, warm_up=1)
    return pairs(f"compile {workload.name}", seconds)


def pairs(what: str, seconds: dict[str, list[float]]) -> list[paired.Comparison]:
    """Compare each of gradscaler's steps with each of the others."""
    return [
        paired.Comparison(f"{what}: {mine} to {rival}", seconds[mine], seconds[rival])
        for mine, rival in PAIRS
    ]


def main() -> None:
    """Time every step of every workload, and its compilation."""
    arguments = paired.parse(
        argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    )
    setting = {name: version(name) for name in ("jax", "flax", "jmp", "optax")}
    steps = [c for workload in WORKLOADS for c in time_steps(workload, arguments.repetitions)]
    paired.report(arguments, setting, steps + [c for w in WORKLOADS for c in time_compilation(w)])


if __name__ == "__main__":
    main()
