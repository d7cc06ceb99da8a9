"""What a compiled training step costs: gradscaler.jax beside jmp and flax.

    python benchmarks/jax_scaler.py

Each trains the same network on the same batch by turns, in a step compiled by XLA: scale,
differentiate, unscale, check, step or skip, and move the scale. Batches are small, so that this is
much of the step.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import eager
import jax
import jax.numpy as jnp
import jmp
import optax
import paired
from flax.training import dynamic_scale

import gradscaler
import gradscaler.jax

BATCH = 16
OPTIMIZER = optax.adam(1e-4)

State = tuple[Any, Any, Any]  # parameters, optimizer state, loss scale


@dataclass(frozen=True)
class Workload:
    """A multilayer perceptron to train.

    Attributes:
        name: for the table.
        width: units in a layer, and values in an input.
        layers: how many of them.
        calls: steps to one measurement.
    """

    name: str
    width: int
    layers: int
    calls: int


WORKLOADS = [
    Workload("4 layers of 1024", width=1024, layers=4, calls=2),
    Workload("50 layers of 64", width=64, layers=50, calls=10),
    Workload("one layer of 16", width=16, layers=1, calls=200),
]


def loss_fn(params: Any, inputs: Any) -> Any:
    """The mean square of what the network puts out."""
    for weight, bias in params:
        inputs = jnp.tanh(inputs @ weight + bias)
    return (inputs**2).mean()


def ours_step(state: State, inputs: Any) -> State:
    """With ``gradscaler.jax.GradScaler``."""
    params, opt_state, scaler = state
    scaler, finite, _, grads = scaler.value_and_grad(loss_fn)(params, inputs)
    updates, new_opt_state = OPTIMIZER.update(grads, opt_state, params)
    new = optax.apply_updates(params, updates), new_opt_state
    return *gradscaler.jax.select_tree(finite, new, (params, opt_state)), scaler


def wrapped_step(state: State, inputs: Any) -> State:
    """With ``gradscaler.jax.loss_scaled``."""
    params, opt_state, _ = state
    scaled = lambda params: opt_state.scaler.scale(loss_fn(params, inputs))  # noqa: E731
    grads = jax.grad(scaled)(params)
    updates, opt_state = gradscaler.jax.loss_scaled(OPTIMIZER).update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, ()


def flax_step(state: State, inputs: Any) -> State:
    """With flax's ``DynamicScale``, as its examples use it."""
    params, opt_state, scale = state
    scale, finite, _, grads = scale.value_and_grad(loss_fn)(params, inputs)
    updates, new_opt_state = OPTIMIZER.update(grads, opt_state, params)
    new = optax.apply_updates(params, updates), new_opt_state
    select = partial(jnp.where, finite)
    return *jax.tree.map(select, new, (params, opt_state)), scale


def jmp_step(state: State, inputs: Any) -> State:
    """With jmp's ``DynamicLossScale``, as its documentation has it."""
    params, opt_state, scale = state
    grads = jax.grad(lambda params: scale.scale(loss_fn(params, inputs)))(params)
    grads = scale.unscale(grads)
    finite = jmp.all_finite(grads)
    updates, new_opt_state = OPTIMIZER.update(grads, opt_state, params)
    new = optax.apply_updates(params, updates), new_opt_state
    return *jmp.select_tree(finite, new, (params, opt_state)), scale.adjust(finite)


def compare(
    name: str,
    ours: Callable[[State, Any], State],
    native: Callable[[State, Any], State],
    native_scale: Callable[[], Any],
    workload: Workload,
    repetitions: int,
) -> paired.Comparison:
    """Time two steps; they end with the same parameters, or an error says so."""
    keys = jax.random.split(jax.random.key(0), workload.layers)
    shape = (workload.width, workload.width)
    params = [
        (jax.random.normal(key, shape) / workload.width**0.5, jnp.zeros(workload.width))
        for key in keys
    ]
    inputs = jnp.ones((BATCH, workload.width))
    opt_state = OPTIMIZER.init(params)
    states: dict[str, State] = {
        "ours": (params, opt_state, gradscaler.jax.GradScaler()),
        "native": (params, opt_state, native_scale()),
    }
    if ours is wrapped_step:
        states["ours"] = params, gradscaler.jax.loss_scaled(OPTIMIZER).init(params), ()
    steps = {"ours": jax.jit(ours), "native": jax.jit(native)}

    def step(rival: str) -> None:
        states[rival] = steps[rival](states[rival], inputs)
        jax.tree.leaves(states[rival])[0].block_until_ready()

    seconds = paired.interleave(
        {rival: partial(step, rival) for rival in steps},
        prepare=lambda: None,
        repetitions=repetitions,
        calls=workload.calls,
    )
    trained = (jax.tree.leaves(states[rival][0]) for rival in ("ours", "native"))
    if not all(map(partial(jnp.allclose, atol=1e-6), *trained)):
        raise RuntimeError(f"{workload.name}: {name} end with other parameters")
    return paired.Comparison(f"{workload.name}, {name}", **seconds)


def main() -> None:
    """Time every workload with every pair."""
    arguments = eager.parse(argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]))
    flax_scale = dynamic_scale.DynamicScale
    jmp_scale = partial(jmp.DynamicLossScale, jnp.float32(2.0**16))
    comparisons = [
        partial(compare, "GradScaler to flax", ours_step, flax_step, flax_scale),
        partial(compare, "GradScaler to jmp", ours_step, jmp_step, jmp_scale),
        partial(compare, "loss_scaled to jmp", wrapped_step, jmp_step, jmp_scale),
    ]
    eager.run(arguments, {"jax": jax.__version__}, comparisons, WORKLOADS)


if __name__ == "__main__":
    main()
