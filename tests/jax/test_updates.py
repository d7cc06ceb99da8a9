"""Updates of an optimizer in JAX that make an Inf or NaN of finite gradients."""

import jax
import jax.numpy as jnp
import optax
import pytest

import gradscaler
from tests.support.marked_lines import lines_marked_in

line = lines_marked_in(__file__)
STEPS = 8
IDS = jnp.array([0, 1, 2])  # the last row is never used, so its gradient is 0


def train(by, dtype, *, divisor=1.0):
    def loss_of(params):
        rows = params["rows"][IDS].astype(jnp.float32)
        return jnp.mean(rows**2 / jnp.where(divisor, rows**2 + 1, rows * 0))  # the division

    @jax.jit
    def step(params, state):
        loss, gradients = jax.value_and_grad(loss_of)(params)
        updates, state = by.update(gradients, state, params)  # the update
        return optax.apply_updates(params, updates), state, loss

    params = {"rows": jnp.ones((4, 2), dtype)}
    state = by.init(params)
    for _ in range(STEPS):
        params, state, _ = step(params, state)


CASES = {
    "adam": (lambda: optax.adam(1e-3), "float16", "scale_by_adam", "or set eps to 1e-4"),
    "rmsprop": (lambda: optax.rmsprop(1e-3), "float16", "scale_by_rms", "or set eps to 1e-4"),
    "masked": (
        lambda: optax.masked(optax.adamw(1e-3), {"rows": True}),
        "float16",
        "scale_by_adam",
        "keep the parameters in float32",
    ),
    "eps": (lambda: optax.adam(1e-3, eps=0.0), "float32", "scale_by_adam", "set eps to 1e-8"),
}


@pytest.mark.parametrize("name", CASES)
def test_an_update_is_told_from_a_gradient(tmp_path, name):
    by, dtype, rule, advice = CASES[name]
    with gradscaler.watch(tmp_path) as watch:
        train(by(), dtype)
    assert watch.verdict.kind == "parameter"
    told = f"optax.{rule} at {line('the update')} makes params['rows'] NaN in {dtype}"
    assert watch.verdict.text.startswith(told)
    assert advice in watch.verdict.text
    assert len(watch.verdict.text.split()) <= 61


@pytest.mark.parametrize(
    ("by", "dtype"),
    [(lambda: optax.adam(1e-3, eps=1e-4), "float16"), (lambda: optax.adam(1e-3), "float32")],
)
def test_an_eps_that_its_weights_can_hold_raises_no_alarm(tmp_path, by, dtype):
    with gradscaler.watch(tmp_path) as watch:
        train(by(), dtype)
    assert watch.verdict.kind == "normal"


def test_a_division_of_the_loss_is_not_the_optimizers(tmp_path):
    with gradscaler.watch(tmp_path) as watch:
        train(optax.adam(1e-3), "float32", divisor=0.0)
    assert "optax.scale_by" not in watch.verdict.text
    assert line("the division") in watch.verdict.text
