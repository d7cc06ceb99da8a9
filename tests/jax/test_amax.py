"""A policy that looks at the largest gradient is handed it, compiled or not, wherever it lies."""

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from gradscaler import AmaxState, DynamicScale, ScaleState
from gradscaler.errors import ParameterError
from gradscaler.jax import GradScaler, all_finite, amax, loss_scaled
from tests.support.amax import INF, NAN, TRACE, as_bits, policy
from tests.support.chosen import examples


def weights():
    return {"a": jnp.ones((2, 3)), "b": [jnp.ones(4, jnp.float32)]}


def loss(weights, most):
    """A loss whose largest gradient is ``most``."""
    return (weights["a"] * most / 4).sum() - weights["b"][0][-1] * most


def by_value_and_grad(scaler, weights, most):
    return scaler.value_and_grad(loss)(weights, most).scaler


JITTED = jax.jit(by_value_and_grad)


def by_retries(scaler, weights, most):
    return scaler.value_and_grad(loss, retries=1)(weights, most).scaler


def by_hand(scaler, weights, most):
    grads = scaler.unscale(jax.grad(lambda *args: scaler.scale(loss(*args)))(weights, most))
    return scaler.adjust(all_finite(grads), amax(grads))


def by_optax(scaler, weights, most):
    optimizer = loss_scaled(optax.sgd(0.1), scaler.policy)
    state = optimizer.init(weights)._replace(scaler=scaler)
    grads = jax.grad(lambda *args: scaler.scale(loss(*args)))(weights, most)
    return optimizer.update(grads, state, weights)[1].scaler


def followed(step, rule, trace):
    """Take a trace with a step; after each the state is that of the policy on the host."""
    scaler, expected = GradScaler(rule), rule.init()
    for most in trace:
        scaler = step(scaler, weights(), jnp.float32(most))
        expected = rule.update(expected, not np.isfinite(most), amax=np.float32(abs(most)))
        assert as_bits(scaler.state) == as_bits(expected)
        dtypes = [leaf.dtype for leaf in scaler.state]
        assert dtypes == [jnp.float32, *[jnp.int32] * 2, *[jnp.float32] * 2]
    return scaler


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("step", [by_value_and_grad, by_hand, by_optax])
def test_the_state_is_what_the_policy_makes_of_the_gradients(step, interval, jit):
    rule = policy(amax_interval=interval)
    assert followed(jax.jit(step) if jit else step, rule, TRACE).state.peak > 0


@settings(max_examples=examples(25))
@given(
    rule=st.sampled_from([policy(), policy(margin=3, patience=3), policy(amax_interval=3)]),
    trace=st.lists(
        st.floats(2.0**-30, 2.0**30, width=32) | st.sampled_from([INF, NAN, 0.0]),
        min_size=1,
        max_size=8,
    ),
)
def test_any_trace_gives_the_same_bits_under_jit(rule, trace):
    followed(JITTED, rule, trace)


def test_a_compiled_step_is_traced_once(counted_jit):
    step, traces = counted_jit(by_value_and_grad)
    followed(step, policy(), TRACE)
    assert len(traces) == 1


def test_a_finite_step_with_retries_counts_its_gradients():
    followed(jax.jit(by_retries), policy(), [0.1, 7.0, 2.0**-9])


def test_a_scan_carries_every_leaf():
    rule = policy()
    trace = jnp.float32(jnp.array(TRACE))

    def step(scaler, most):
        return by_value_and_grad(scaler, weights(), most), None

    scaler, _ = jax.jit(lambda scaler: jax.lax.scan(step, scaler, trace))(GradScaler(rule))
    assert as_bits(scaler.state) == as_bits(followed(by_value_and_grad, rule, TRACE).state)


@pytest.mark.parametrize("wrapped", [False, True], ids=["value_and_grad", "loss_scaled"])
def test_devices_that_shard_the_weights_find_the_largest_of_all(wrapped, devices):
    rule, sizes = policy(), jnp.array([0.5, 2.0**-9, 3.0, 0.0])
    axes = {"finite_axis": "tp"}

    def step(scaler, weight, size):
        if not wrapped:
            return scaler.value_and_grad(lambda w: (w * size).sum(), **axes)(weight).scaler
        optimizer = loss_scaled(optax.sgd(0.1), rule, **axes)
        state = optimizer.init(weight)._replace(scaler=scaler)
        return optimizer.update(scaler.scale(size), state, weight)[1].scaler

    mesh = Mesh(np.array(devices[:4]), ("tp",))
    together = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("tp"), P("tp")), out_specs=P())
    scaler = jax.jit(together)(GradScaler(rule), jnp.ones(4), sizes)
    assert as_bits(scaler.state) == as_bits(rule.update(rule.init(), False, amax=3.0))


def test_an_amax_that_differs_between_devices_is_refused(devices):
    def step(scaler, size):
        return scaler.adjust(jnp.array(True), amax(size))

    mesh = Mesh(np.array(devices[:4]), ("tp",))
    together = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("tp")), out_specs=P())
    with pytest.raises(ParameterError, match="amax varies over 'tp'"):
        together(GradScaler(policy()), jnp.ones(4))


@pytest.mark.parametrize("rule", [DynamicScale(growth_interval=2), policy()])
def test_flax_saves_and_restores_every_leaf(rule, exact):
    scaler = GradScaler(rule)
    for most in (0.5, 3.0, NAN):
        scaler = by_value_and_grad(scaler, weights(), jnp.float32(most))
    saved = flax.serialization.to_bytes(scaler)
    assert exact(flax.serialization.from_bytes(GradScaler(rule), saved)) == exact(scaler)


def test_a_state_of_another_policy_is_refused():
    with pytest.raises(TypeError, match="state must be of type AmaxState, got ScaleState"):
        GradScaler(policy(), ScaleState(8.0, 0, 0))
    with pytest.raises(TypeError, match="state must be of type ScaleState, got AmaxState"):
        GradScaler(DynamicScale(), AmaxState(8.0, 0, 0, 0.0, 0.0))


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("interval", [1, 2])
def test_an_amax_that_is_left_out_is_refused(interval, jit):
    """Without it the ordinary rule would apply, and nobody would notice."""
    adjust = jax.jit(GradScaler.adjust) if jit else GradScaler.adjust
    message = r"AmaxScale\(.* needs the .*: write adjust\(all_finite\(grads\), amax\(grads\)\)"
    with pytest.raises(TypeError, match=message):
        adjust(GradScaler(policy(amax_interval=interval)), True)
    assert adjust(GradScaler(DynamicScale(8.0, growth_interval=1)), True).loss_scale == 16.0


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_0_saves_the_measurement_of_a_step_that_needs_none(jit):
    rule, measured = policy(amax_interval=2), []

    def note(grads):
        jax.debug.callback(lambda: measured.append(True))
        return amax(grads)

    def sparing(scaler, weights, most):
        grads = scaler.unscale(jax.grad(lambda *args: scaler.scale(loss(*args)))(weights, most))
        needed = scaler.state.finite_steps % rule.amax_interval == 0
        largest = jax.lax.cond(needed, note, lambda _: 0.0, grads)
        return scaler.adjust(all_finite(grads), largest)

    followed(jax.jit(sparing) if jit else sparing, rule, TRACE)
    jax.effects_barrier()
    assert 0 < len(measured) < len(TRACE)


def test_an_amax_that_is_not_a_scalar_is_refused():
    with pytest.raises(ValueError, match=r"amax: expected a scalar, got the shape \(2,\)"):
        GradScaler(policy()).adjust(True, jnp.ones(2))


@pytest.mark.parametrize(
    ("tree", "largest"),
    [
        ({}, 0.0),
        ([jnp.zeros((0, 2)), jnp.array([3, -9])], 0.0),
        ([jnp.array([1.0, -2.5]), 0.5], 2.5),
        (jnp.array([-3.0, 2.0], jnp.bfloat16), 3.0),
        (jnp.array([3.0 - 4.0j]), 5.0),
        ({"w": 1.0, "_overwrite_with_gradient": {"scale": 8.0}}, 1.0),
    ],
)
def test_the_largest_magnitude_is_that_of_the_gradients(tree, largest):
    assert (amax(tree).dtype, amax(tree)) == (jnp.float32, largest)


@pytest.mark.parametrize(
    ("step", "evaluations"), [(by_value_and_grad, 1), (by_optax, 1), (by_retries, 2)]
)
def test_no_other_policy_costs_an_operation(step, evaluations):
    """Without amax, a step takes no maximum but those of all_finite, one for each gradient."""
    checks = str(jax.make_jaxpr(all_finite)(weights())).count("reduce_max[")
    without, with_amax = (
        str(jax.make_jaxpr(step)(GradScaler(rule), weights(), jnp.float32(1))).count("reduce_max[")
        for rule in (DynamicScale(), policy())
    )
    assert without == checks * evaluations > 0
    assert with_amax == 2 * without
