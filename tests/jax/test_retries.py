"""value_and_grad(retries=): the same call again, at the lower scale."""

import functools

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from gradscaler import DynamicScale, FixedScale
from gradscaler.jax import GradScaler
from tests.support.chosen import examples

LIMIT = 15  # 2.0**15 is the largest power of two in float16


def fun(weight, x):
    """x * weight, whose gradient passes through float16."""
    return (weight.astype(jnp.float16) * x.astype(jnp.float16)).astype(jnp.float32)


@functools.partial(jax.jit, static_argnums=2)
def step(scaler, x, retries):
    return scaler.value_and_grad(fun, retries=retries)(jnp.float32(1), x)


def scaler_at(exponent, **options):
    return GradScaler(DynamicScale(init_scale=2.0**exponent, growth_interval=3, **options))


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@settings(max_examples=examples(15))
@given(start=st.integers(10, 24), retries=st.integers(0, 5), magnitude=st.integers(0, 3))
def test_it_is_the_steps_of_a_loop_on_the_host(jit, start, retries, magnitude, exact):
    scaler, x = scaler_at(start), jnp.float32(2.0**magnitude)
    plain = scaler.value_and_grad(fun)
    first = expected = plain(jnp.float32(1), x)
    for _ in range(retries):
        if not expected.grads_finite:
            expected = expected.scaler.value_and_grad(fun)(jnp.float32(1), x)
    if not expected.grads_finite:
        expected = expected._replace(scaler=first.scaler)
    result = (step if jit else step.__wrapped__)(scaler, x, retries)
    assert exact(result) == exact(expected)
    assert result.grads_finite == (start + magnitude - retries <= LIMIT)


def test_a_finite_retry_counts_as_one_finite_step():
    result = step(scaler_at(18), jnp.float32(1), 5)
    assert result.scaler.loss_scale == 2.0**15
    assert result.scaler.state.finite_steps == 1
    assert (result.value, result.grads) == (1, 1)


def test_what_no_scale_can_help_backs_off_once():
    result = step(scaler_at(16), jnp.float32(jnp.nan), 9)
    assert not result.grads_finite
    assert result.scaler.loss_scale == 2.0**15


@pytest.mark.parametrize(
    "scaler",
    [
        GradScaler(FixedScale(2.0**20)),
        scaler_at(20, hysteresis=2),
        scaler_at(20, min_scale=2.0**20),
    ],
    ids=["fixed", "tolerated", "at the floor"],
)
def test_a_scale_that_stays_makes_no_retry(scaler):
    calls = []

    def counted(weight, x):
        jax.debug.callback(lambda: calls.append(1))
        return fun(weight, x)

    result = scaler.value_and_grad(counted, retries=4)(jnp.float32(1), jnp.float32(1))
    jax.effects_barrier()
    assert not result.grads_finite
    assert len(calls) == 1


def test_it_evaluates_no_more_than_it_must():
    calls = []

    def counted(weight, x):
        jax.debug.callback(lambda: calls.append(1))
        return fun(weight, x)

    run = jax.jit(lambda s: s.value_and_grad(counted, retries=4)(jnp.float32(1), jnp.float32(1)))
    for exponent, evaluations in ((15, 1), (17, 3), (24, 5)):
        calls.clear()
        run(scaler_at(exponent))
        jax.effects_barrier()
        assert len(calls) == evaluations


def test_aux_comes_from_the_last_evaluation():
    def with_aux(weight):
        return fun(weight, weight), {"weight": weight, "number": 3}

    result = scaler_at(18).value_and_grad(with_aux, has_aux=True, retries=9)(jnp.float32(1))
    assert result.value == (1.0, {"weight": 1.0, "number": 3})
    assert result.grads == 2


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axis", ["axis_name", "finite_axis"])
def test_devices_try_again_together(axis, check_vma):
    everywhere, split = PartitionSpec(), PartitionSpec("batch")
    weight_spec = everywhere if axis == "axis_name" else split

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=Mesh(jax.devices(), ("batch",)),
        in_specs=(everywhere, weight_spec, split),
        out_specs=(everywhere, weight_spec),
        check_vma=check_vma,
    )
    def step(scaler, weight, x):
        def loss(weight, x):
            return fun(weight, x).sum()

        result = scaler.value_and_grad(loss, retries=8, **{axis: "batch"})(weight, x)
        return result.scaler.loss_scale, result.grads

    x = jnp.ones(8).at[3].set(8.0)  # finite from 2.0**12 on, on this device
    weight = jnp.ones(1 if axis == "axis_name" else 8)
    scale, grads = step(scaler_at(16), weight, x)
    assert scale == 2.0**12
    assert grads.tolist() == ([15 / 8] if axis == "axis_name" else x.tolist())


def test_vmap_gives_each_its_own_retries():
    scalers = jax.vmap(lambda _: scaler_at(15))(jnp.arange(3))
    x = jnp.array([0.5, 4.0, jnp.nan])
    result = jax.vmap(lambda s, x: step(s, x, 5))(scalers, x)
    assert result.grads_finite.tolist() == [True, True, False]
    assert result.scaler.loss_scale.tolist() == [2.0**15, 2.0**13, 2.0**14]


@pytest.mark.parametrize(("retries", "error"), [(-1, ValueError), (1.5, TypeError)])
def test_retries_that_are_no_count_are_refused(retries, error):
    with pytest.raises(error, match="retries must be"):
        GradScaler().value_and_grad(fun, retries=retries)
