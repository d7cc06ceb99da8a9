"""A policy that looks at the largest gradient is handed it, compiled or not, on every backend."""

import importlib

import numpy as np
import pytest

from gradscaler import DynamicScale, FixedScale
from tests.support.amax import TRACE, as_bits, policy
from tests.support.keras_like import (
    BACKEND,
    KERAS_3,
    LossScaleOptimizer,
    keras,
    mirrored,
    numpy,
    scale_of,
    stepper,
    tensor,
)


def state_of(optimizer):
    """The five leaves of the state, as the bits of float32."""
    if KERAS_3:
        leaves = [optimizer.dynamic_scale, optimizer.step_counter]
        leaves += [optimizer.nonfinite_counter, optimizer.peak, optimizer.reach]
    else:
        leaves = optimizer._loss_scale.variables.values()
    return as_bits(map(numpy, leaves))


def gradients(most):
    """Those of the two variables, at most so large."""
    return [np.full((2, 2), most / 4, np.float32), np.float32([0.0, -most])]


def followed(optimizer, variables, trace, expected, compiled=True):
    """Take a trace; after each step the state is that of the policy on the host."""
    step = stepper(optimizer, variables, compiled)
    for most in trace:
        scale = np.float32(scale_of(optimizer) if KERAS_3 else 1)  # which Keras 3 divides by
        step([tensor(grad * scale) for grad in gradients(most)])
        amax = np.float32(abs(most))
        expected = optimizer.policy.update(expected, not np.isfinite(most), amax=amax)
        assert state_of(optimizer) == as_bits(expected)
    return expected


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("interval", [1, 2])
def test_the_state_is_what_the_policy_makes_of_the_gradients(family, variables, interval, compiled):
    rule = policy(amax_interval=interval)
    optimizer = LossScaleOptimizer(family.SGD(), policy=rule)
    assert followed(optimizer, variables, TRACE, rule.init(), compiled).peak > 0


def test_unscaled_gradients_count_as_they_are(family, variables):
    rule = policy()
    optimizer = LossScaleOptimizer(family.SGD(), policy=rule)
    optimizer.get_scaled_loss(tensor(np.float32(1)))
    optimizer.get_unscaled_gradients([])
    pairs = [
        (tensor(grad), variable) for grad, variable in zip(gradients(3.0), variables, strict=True)
    ]
    optimizer.apply_gradients(pairs)
    assert state_of(optimizer) == as_bits(rule.update(rule.init(), False, amax=3.0))


def test_a_config_brings_the_policy_back(family):
    optimizer = LossScaleOptimizer(family.SGD(), policy=policy(margin=5))
    assert LossScaleOptimizer.from_config(optimizer.get_config()).policy == policy(margin=5)


def test_saved_variables_bring_every_leaf_back(family, variables):
    if not hasattr(LossScaleOptimizer(family.SGD()), "save_own_variables"):
        pytest.skip("optimizers of the legacy family are saved by a checkpoint alone")
    rule = policy()
    optimizer, restored = (LossScaleOptimizer(family.SGD(), policy=rule) for _ in range(2))
    expected = followed(optimizer, variables, TRACE[:6], rule.init())
    restored.build(variables)
    store = {}
    optimizer.save_own_variables(store)
    restored.load_own_variables(store)
    followed(restored, variables, TRACE[6:], expected)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="they are TensorFlow's")
def test_a_checkpoint_of_tensorflow_brings_every_leaf_back(family, variables, tmp_path):
    import tensorflow as tf

    rule = policy()
    optimizer, restored = (LossScaleOptimizer(family.SGD(), policy=rule) for _ in range(2))
    expected = followed(optimizer, variables, TRACE[:6], rule.init())
    if KERAS_3:
        restored.build(variables)
    path = tf.train.Checkpoint(optimizer=optimizer).save(tmp_path / "checkpoint")
    tf.train.Checkpoint(optimizer=restored).restore(path).assert_existing_objects_matched()
    followed(restored, variables, TRACE[6:], expected)


@pytest.mark.parametrize("used", [False, True])
def test_a_file_of_another_policy_loads_and_nothing_is_known(family, variables, used):
    saved = LossScaleOptimizer(family.SGD(), initial_scale=8.0)
    if not hasattr(saved, "save_own_variables"):
        pytest.skip("optimizers of the legacy family are saved by a checkpoint alone")
    optimizer = LossScaleOptimizer(family.SGD(), policy=policy())
    for each in (saved, optimizer):
        each.build(variables)
    if used:
        followed(optimizer, variables, TRACE[:3], optimizer.policy.init())
    store = {}
    saved.save_own_variables(store)
    optimizer.load_own_variables(store)
    assert state_of(optimizer) == as_bits((8.0, 0, 0, 0.0, 0.0))


@pytest.mark.skipif(not KERAS_3, reason="Keras 2 saves variables by name")
def test_a_file_of_another_inner_optimizer_brings_the_scale_and_nothing_is_known(family, variables):
    saved = LossScaleOptimizer(keras.optimizers.Adam(), initial_scale=8.0)
    optimizer = LossScaleOptimizer(family.SGD(), policy=policy())
    saved.build(variables)
    followed(optimizer, variables, TRACE[:3], optimizer.policy.init())
    store = {}
    saved.save_own_variables(store)
    with pytest.warns(UserWarning, match="loaded the loss scale and its counter"):
        optimizer.load_own_variables(store)
    assert state_of(optimizer) == as_bits((8.0, 0, 0, 0.0, 0.0))


@pytest.mark.skipif(BACKEND != "tensorflow", reason="IndexedSlices are TensorFlow's")
def test_equal_indices_of_a_sparse_gradient_add_up(family):
    import tensorflow as tf

    rule = policy(init_scale=8.0)
    optimizer = LossScaleOptimizer(family.SGD(), policy=rule)
    variable = (keras if KERAS_3 else tf).Variable(np.ones((4, 2), np.float32))
    if KERAS_3:
        optimizer.build([variable])
    factor = 8.0 if KERAS_3 else 1.0
    values = tf.constant([[1.0, 2.0], [0.5, 3.0], [0.0, -4.0]]) * factor
    stepper(optimizer, [variable])(
        [tf.IndexedSlices(values, tf.constant([1, 1, 3]), tf.constant([4, 2]))]
    )
    assert state_of(optimizer) == as_bits(rule.update(rule.init(), False, amax=5.0))


@pytest.mark.skipif(BACKEND != "tensorflow", reason="strategies are TensorFlow's")
@pytest.mark.parametrize("large", [0, 1])
def test_the_largest_gradient_is_that_of_all_replicas(family, large):
    import tensorflow as tf

    rule = policy(init_scale=8.0)
    strategy = mirrored()
    with strategy.scope():
        variable = (keras if KERAS_3 else tf).Variable(np.ones(2, np.float32))
        optimizer = LossScaleOptimizer(family.SGD(), policy=rule)
        if KERAS_3:
            optimizer.build([variable])
    step = stepper(optimizer, [variable], compiled=False)

    def in_replica():
        index = tf.distribute.get_replica_context().replica_id_in_sync_group
        size = tf.where(index == large, 5.0, 0.25) * (8.0 if KERAS_3 else 1.0)
        step([tf.stack([size, -size / 2])])

    tf.function(lambda: strategy.run(in_replica))()
    # Keras 2 measures the sum of the replicas' gradients.
    amax = 5.0 if KERAS_3 else 5.25
    assert state_of(optimizer) == as_bits(rule.update(rule.init(), False, amax=amax))


@pytest.mark.parametrize("rule", [DynamicScale(), FixedScale(8.0)])
def test_no_other_policy_costs_a_measurement(rule, family, variables, monkeypatch):
    def refuse(gradients):
        raise AssertionError("called for a policy that does not look at it")

    if KERAS_3:
        module = importlib.import_module(f"gradscaler.keras._operations.on_{BACKEND}")
    else:
        module = importlib.import_module("gradscaler.tf_keras.optimizer")
    monkeypatch.setattr(module, "largest", refuse)
    optimizer = LossScaleOptimizer(family.SGD(), policy=rule)
    stepper(optimizer, variables, compiled=False)([tensor(grad) for grad in gradients(1.0)])
    with pytest.raises(AssertionError):
        followed(LossScaleOptimizer(family.SGD(), policy=policy()), variables, [1.0], None)
