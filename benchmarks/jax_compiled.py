"""The size and time of a compiled training step, without loss scaling and with two ways to skip.

For comparison, a third step does not check the gradients, and so never skips.

    python benchmarks/jax_compiled.py

The steps donate their state. For each it prints the instructions of the optimized program, the
memory that it takes for temporary values, and the processor seconds of compiling and of a step,
divided by those of the step without scaling (medians of paired repetitions). For steady seconds,
run it on one core: ``taskset -c 0 python benchmarks/jax_compiled.py``.
"""

from __future__ import annotations

import statistics
from functools import partial
from time import process_time
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax_scaler import OPTIMIZER, WORKLOADS, Workload, init_mlp, mlp_loss, ours, unscaled

import gradscaler.jax

REPETITIONS = 15
DEEP = Workload(
    "MLP of 50 layers of 64", partial(init_mlp, 64, 50), mlp_loss, jnp.ones((16, 64)), 2
)


def by_cond(loss_fn: Any, state: Any) -> Any:
    """A step that skips by ``jax.lax.cond``."""
    params, opt_state, scaler = state
    scaler, finite, _, grads = scaler.value_and_grad(loss_fn)(params)

    def apply(grads: Any, params: Any, opt_state: Any) -> Any:
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def skip(grads: Any, params: Any, opt_state: Any) -> Any:
        return params, opt_state

    return *jax.lax.cond(finite, apply, skip, grads, params, opt_state), scaler


def unchecked(loss_fn: Any, state: Any) -> Any:
    """A step that scales, unscales and chooses, by a flag that is always set."""
    params, opt_state, scaler = state
    grads = scaler.unscale(jax.grad(lambda params: scaler.scale(loss_fn(params)))(params))
    updates, new_opt_state = OPTIMIZER.update(grads, opt_state, params)
    new = optax.apply_updates(params, updates), new_opt_state
    finite = scaler.loss_scale > 0
    chosen = gradscaler.jax.select_tree(finite, new, (params, opt_state))
    return *chosen, scaler.adjust(finite)


STEPS: dict[str, Any] = {
    "unscaled": unscaled,
    "select_tree": ours,
    "cond": by_cond,
    "unchecked": unchecked,
}


def compare(workload: Workload, repetitions: int = REPETITIONS) -> None:
    """Compile and run all steps of a workload by turns, and print a row for each."""
    states, programs = {}, {}
    compiling: dict[str, list[float]] = {name: [] for name in STEPS}
    running: dict[str, list[float]] = {name: [] for name in STEPS}
    for name in STEPS:
        params = workload.init()
        states[name] = params, OPTIMIZER.init(params), gradscaler.jax.GradScaler()
    for repetition in range(repetitions):
        for name in list(STEPS)[:: 1 if repetition % 2 else -1]:
            if repetition < 5:
                jax.clear_caches()  # type: ignore[no-untyped-call] # JAX's is not typed
                start = process_time()
                step = partial(_on_batch, STEPS[name], workload)
                lowered = jax.jit(step, donate_argnums=0).lower(states[name], workload.batch)
                programs[name] = lowered.compile()
                compiling[name].append(process_time() - start)
            start = process_time()
            for _ in range(workload.calls):
                states[name] = programs[name](states[name], workload.batch)
            jax.block_until_ready(states[name])  # type: ignore[no-untyped-call]
            running[name].append(process_time() - start)
    for name, program in programs.items():
        text, memory = program.as_text(), program.memory_analysis()
        assert text is not None  # every backend of XLA has both
        assert memory is not None
        size, temporary = text.count(" = "), memory.temp_size_in_bytes / 2**20
        ratios = [
            statistics.median(
                mine / bare for mine, bare in zip(seconds[name], seconds["unscaled"], strict=True)
            )
            for seconds in (compiling, running)
        ]
        print(
            f"{workload.name:30} {name:12} {size:6} instructions {temporary:6.1f} MiB "
            f"compile {ratios[0]:.2f} run {ratios[1]:.2f}",
            flush=True,
        )


def _on_batch(step: Any, workload: Workload, state: Any, batch: Any) -> Any:
    params, opt_state, scaler = step(lambda params: workload.loss_fn(params, batch), state)
    return params, opt_state, scaler or state[2]  # the step without scaling returns none


if __name__ == "__main__":
    for workload in (*WORKLOADS, DEEP):
        compare(workload)
