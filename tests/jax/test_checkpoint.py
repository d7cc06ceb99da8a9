"""State dicts of other frameworks, in JAX."""

import dataclasses

import jax
import jax.numpy as jnp
import jmp
import pytest
from flax.training import dynamic_scale as flax

import gradscaler.jax as ours
from gradscaler import checkpoint

FOUND_INF = [True, False, False, False, True, False, False, False, False, False]
TORCH = {
    "scale": 1024.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 3,
    "_growth_tracker": 2,
}
AS_JMP, AS_FLAX = (checkpoint.convert(TORCH, framework) for framework in ("jmp", "flax"))


def adjusted(scaler, found_inf):
    return jax.jit(lambda scaler, finite: scaler.adjust(finite))(scaler, jnp.bool_(not found_inf))


def adjusted_outside_jit(scale, found_inf):
    return scale.adjust(jnp.bool_(not found_inf))


def differentiated(scale, found_inf):
    value = jnp.float32("inf" if found_inf else 1)
    return scale.value_and_grad(lambda weight, x: weight * x)(1.0, value).dynamic_scale


@pytest.mark.parametrize(
    ("make", "step", "name"),
    [
        (lambda: ours.GradScaler(*checkpoint.read(TORCH)), adjusted, "loss_scale"),
        (lambda: ours.DynamicLossScale(**AS_JMP), adjusted_outside_jit, "loss_scale"),
        (lambda: jmp.DynamicLossScale(**AS_JMP), adjusted_outside_jit, "loss_scale"),
        (lambda: ours.DynamicScale(**AS_FLAX), differentiated, "scale"),
        (lambda: flax.DynamicScale(**AS_FLAX), differentiated, "scale"),
    ],
    ids=["GradScaler", "ours as jmp", "jmp", "ours as flax", "flax"],
)
def test_it_goes_on_from_another_frameworks_state(make, step, name):
    scaler = make()
    policy, state = checkpoint.read(TORCH)
    for found_inf in FOUND_INF:
        state = policy.update(state, found_inf)
        scaler = step(scaler, found_inf)
        assert getattr(scaler, name) == state.scale


@pytest.mark.parametrize(
    "scale",
    [
        ours.DynamicScale(growth_interval=2, fin_steps=2, scale=1024.0),
        ours.DynamicLossScale(jnp.float32(1024), jnp.int32(2), 3, 2, jnp.float32(2.0**-126)),
    ],
)
def test_the_fields_of_flax_s_and_jmp_s_classes_are_read(scale):
    assert checkpoint.read(dataclasses.asdict(scale)) == checkpoint.read(TORCH)
