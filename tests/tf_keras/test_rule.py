import numpy as np
import pytest
import tensorflow as tf

from gradscaler import DynamicScale, FixedScale
from gradscaler.tf_keras import LossScaleOptimizer

FINITE = [np.ones((2, 2), "float32"), np.ones(2, "float32")]
OVERFLOW = [np.full((2, 2), np.inf, "float32"), np.ones(2, "float32")]


@pytest.mark.parametrize("policy", [None, FixedScale(8.0)])
def test_a_static_scale_skips_and_never_moves(family, policy, drive, variables):
    """tf-keras' wrapper applies what overflowed."""
    arguments = {"policy": policy} if policy else {"dynamic": False, "initial_scale": 8.0}
    optimizer = LossScaleOptimizer(family.SGD(1.0), **arguments)
    before = [variable.numpy() for variable in variables]
    assert drive(optimizer, variables, [OVERFLOW] * 2) == [8.0, 8.0]
    assert all(map(np.array_equal, [variable.numpy() for variable in variables], before))
    assert drive(optimizer, variables, [FINITE]) == [8.0]
    assert np.array_equal(variables[1].numpy(), before[1] - 1)
    assert int(optimizer.iterations) == 3  # skipped ones count, as in tf-keras


def test_the_scale_stays_between_its_bounds(family, drive, variables):
    """Traps 5 and 9."""
    policy = DynamicScale(init_scale=64.0, min_scale=16.0, max_scale=128.0, growth_interval=1)
    optimizer = LossScaleOptimizer(family.SGD(), policy=policy)
    scales = drive(optimizer, variables, [OVERFLOW] * 3 + [FINITE] * 4)
    assert scales == [32.0, 16.0, 16.0, 32.0, 64.0, 128.0, 128.0]


def test_the_default_bounds_are_one_and_the_largest_float32(family, drive, variables):
    low, high = (
        LossScaleOptimizer(family.SGD(), initial_scale=initial, dynamic_growth_steps=1)
        for initial in (2.0, 2.0**126)
    )
    assert drive(low, variables, [OVERFLOW] * 3) == [1.0] * 3
    assert drive(high, variables, [FINITE] * 3) == [2.0**127] * 3


def test_a_counter_past_the_growth_steps_does_not_freeze_growth(family, drive, variables):
    """Trap 3."""
    optimizer = LossScaleOptimizer(family.SGD(), initial_scale=8.0, dynamic_growth_steps=3)
    drive(optimizer, variables, [FINITE])
    optimizer.dynamic_counter.assign(10)
    assert drive(optimizer, variables, [FINITE]) == [16.0]


@pytest.mark.parametrize("reset", ["finite_step", "finite_step_only", "growth"])
def test_any_policy_moves_as_on_the_host(family, reset, drive, variables, tmp_path):
    policy = DynamicScale(
        init_scale=1000.0,
        growth_factor=1.7,
        backoff_factor=0.3,
        growth_interval=3,
        hysteresis=2,
        hysteresis_reset=reset,
    )
    pattern = np.random.default_rng(0).random(30) < 0.4
    state, expected = policy.init(), []
    for found_inf in pattern:
        state = policy.update(state, bool(found_inf))
        expected.append(float(state.scale))
    optimizer = LossScaleOptimizer(family.SGD(), policy=policy)
    steps = [OVERFLOW if found_inf else FINITE for found_inf in pattern]
    assert drive(optimizer, variables, steps) == expected
    assert len(set(expected)) > 5

    restored = LossScaleOptimizer(family.SGD(), policy=policy)
    path = tf.train.Checkpoint(optimizer=optimizer).save(tmp_path / "checkpoint")
    tf.train.Checkpoint(optimizer=restored).restore(path).assert_existing_objects_matched()
    found = drive(restored, variables, [OVERFLOW])
    assert found == [float(policy.update(state, True).scale)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_low_precision_loss_is_scaled_in_float32(family, dtype):
    """Trap 10: 3 * 2**16 is no float16."""
    optimizer = LossScaleOptimizer(family.SGD(), initial_scale=2.0**16)
    loss = tf.constant(3.0, dtype)
    for scaled in (optimizer.get_scaled_loss(loss), optimizer.get_scaled_loss(lambda: loss)()):
        assert scaled.dtype == tf.float32
        assert float(scaled) == 3 * 2.0**16
    assert optimizer.get_scaled_loss(tf.constant(1.0, "float64")).dtype == tf.float64


def test_gradients_are_unscaled_in_float32(family):
    """2**-30 is no float16, and tf-keras makes every gradient 0."""
    optimizer = LossScaleOptimizer(family.SGD(), initial_scale=2.0**30)
    (grad,) = optimizer.get_unscaled_gradients([tf.constant(2.0**15, "float16")])
    assert grad.dtype == tf.float16
    assert float(grad) == 2.0**-15


def test_a_compiled_step_is_traced_once_though_the_scale_moves(family):
    variable = tf.Variable([1.0, 2.0])
    optimizer = LossScaleOptimizer(family.SGD(0.25), initial_scale=8.0, dynamic_growth_steps=1)
    _ = optimizer.iterations, optimizer.learning_rate  # legacy optimizers create these when asked
    traces = []

    @tf.function
    def step():
        traces.append(0)
        with tf.GradientTape() as tape:
            scaled = optimizer.get_scaled_loss(tf.reduce_sum(variable**2))
        grads = optimizer.get_unscaled_gradients(tape.gradient(scaled, [variable]))
        optimizer.apply_gradients(zip(grads, [variable], strict=True))
        return scaled

    assert [float(step()) for _ in range(3)] == [8 * 5, 16 * 1.25, 32 * 0.3125]
    before = len(traces)
    step()
    assert len(traces) == before <= 2


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dynamic", [True, False])
def test_one_replica_s_overflow_skips_the_step_of_all(family, compiled, dynamic):
    strategy = tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        variable = tf.Variable([1.0, 2.0])
        arguments = {"dynamic_growth_steps": 2} if dynamic else {"dynamic": False}
        optimizer = LossScaleOptimizer(family.SGD(0.5), initial_scale=8.0, **arguments)
        optimizer.get_scaled_loss(tf.constant(1.0))
        optimizer.get_unscaled_gradients([])

    def step(overflow):
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        bad = tf.where((replica == 1) & overflow, np.inf, 1.0)
        optimizer.apply_gradients([(tf.stack([1.0, bad]), variable)])

    def run(overflow):
        strategy.run(step, args=(overflow,))

    run = tf.function(run) if compiled else run
    seen = []
    for overflow in (False, False, True, False):
        run(tf.constant(overflow))
        values = [each.numpy().tolist() for each in strategy.experimental_local_results(variable)]
        assert values[0] == values[1]
        seen.append((values[0][1], float(optimizer.loss_scale)))
    expected = [8.0, 16.0, 8.0, 8.0] if dynamic else [8.0] * 4
    assert seen == list(zip([1.0, 0.0, 0.0, -1.0], expected, strict=True))
