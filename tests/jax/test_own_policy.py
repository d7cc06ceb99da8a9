"""A policy that is nobody's moves the scale, compiled or not."""

import jax
import jax.numpy as jnp
import optax
import pytest

from gradscaler.jax import GradScaler, loss_scaled
from tests.support.own_policy import PROVEN, SCALES, TRACE, Proven


@pytest.mark.parametrize("transform", [lambda function: function, jax.jit])
def test_a_scaler_moves_the_scale(transform):
    adjust = transform(lambda scaler, finite: scaler.adjust(finite))
    scaler, scales = GradScaler(Proven()), []
    for letter in TRACE:
        scaler = adjust(scaler, jnp.asarray(letter == "o"))
        scales.append(float(scaler.state.scale))
    assert scales == SCALES
    assert scaler.state.proven == PROVEN[-1]


@pytest.mark.parametrize("transform", [lambda function: function, jax.jit])
def test_an_optax_optimizer_moves_the_scale(transform):
    optimizer = loss_scaled(optax.sgd(0.0), Proven())
    update, weight = transform(optimizer.update), jnp.float32(1.0)
    state, scales = optimizer.init(weight), []
    for letter in TRACE:
        _, state = update(jnp.float32(jnp.inf if letter == "x" else 1.0), state, weight)
        scales.append(float(state.scaler.state.scale))
    assert scales == SCALES
