"""State dicts of other frameworks, in JAX."""

import dataclasses

import jax
import jax.numpy as jnp
import jmp
import pytest
from flax.training import dynamic_scale as flax

import gradscaler.jax as ours
from gradscaler import checkpoint

TRACE = [True, False, False, False, True, False, False, False, False, False]
TORCH = {
    "scale": 1024.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 3,
    "_growth_tracker": 2,
}


def scales_of_the_host():
    policy, state = checkpoint.read(TORCH)
    scales = []
    for found_inf in TRACE:
        state = policy.update(state, found_inf)
        scales.append(float(state.scale))
    return scales


def test_the_native_scaler_goes_on_from_a_policy_and_a_state():
    scaler = ours.GradScaler(*checkpoint.read(TORCH))
    scales = []
    for found_inf in TRACE:
        scaler = jax.jit(ours.GradScaler.adjust)(scaler, not found_inf)
        scales.append(float(scaler.loss_scale))
    assert scales == scales_of_the_host()


@pytest.mark.parametrize("module", [ours, jmp])
def test_jmp_s_classes_go_on_from_its_format(module):
    scale = module.DynamicLossScale(**checkpoint.convert(TORCH, "jmp"))
    scales = []
    for found_inf in TRACE:
        scale = scale.adjust(jnp.bool_(not found_inf))
        scales.append(float(scale.loss_scale))
    assert scales == scales_of_the_host()


@pytest.mark.parametrize("module", [ours, flax])
def test_flax_s_classes_go_on_from_its_format(module):
    scale = module.DynamicScale(**checkpoint.convert(TORCH, "flax"))
    scales = []
    for found_inf in TRACE:
        value = jnp.float32("inf" if found_inf else 1)
        scale = scale.value_and_grad(lambda weight, x: weight * x)(1.0, value).dynamic_scale
        scales.append(float(scale.scale))
    assert scales == scales_of_the_host()


def test_their_fields_are_read():
    scale = ours.GradScaler(*checkpoint.read(TORCH))
    as_flax = ours.DynamicScale(growth_interval=2, fin_steps=2, scale=1024.0)
    as_jmp = ours.DynamicLossScale(jnp.float32(1024), jnp.int32(2), 3, 2, jnp.float32(2.0**-126))
    for each in (as_flax, as_jmp):
        assert checkpoint.read(dataclasses.asdict(each)) == (
            scale.policy,
            checkpoint.read(TORCH)[1],
        )
