"""Replicas decide together. Keras' wrapper lets the first one's gradients decide for all."""

import keras
import numpy as np
import pytest

from gradscaler.keras import LossScaleOptimizer

tf = pytest.importorskip("tensorflow")
pytestmark = pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="of TensorFlow")


@pytest.fixture(scope="module")
def strategy():
    return tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])


def in_each(strategy, variable):
    return [value.numpy().tolist() for value in strategy.experimental_local_results(variable.value)]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("ill", [0, 1])
@pytest.mark.parametrize("given", ["variables", "nothing"])
def test_one_replica_s_overflow_skips_the_step_of_all(strategy, compiled, ill, given):
    with strategy.scope():
        variable = keras.Variable([1.0, 2.0])
        optimizer = LossScaleOptimizer(
            keras.optimizers.SGD(0.5, momentum=0.9), initial_scale=8.0, dynamic_growth_steps=2
        )
        optimizer.build([variable])

    def step(overflow):
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        bad = tf.where((replica == ill) & overflow, np.inf, 8.0)
        optimizer.apply([tf.stack([8.0, bad])], [variable] if given == "variables" else None)

    def run(overflow):
        strategy.run(step, args=(overflow,))

    run = tf.function(run) if compiled else run
    seen = []
    for overflow in (False, False, True, False):
        run(tf.constant(overflow))
        values, scales, counters, iterations = (
            in_each(strategy, each)
            for each in (
                variable,
                optimizer.dynamic_scale,
                optimizer.step_counter,
                optimizer.iterations,
            )
        )
        assert values[0] == values[1]
        seen.append((values[0][1], scales, counters, iterations))
    (first, *_), (second, *_), (third, *_), (last, *_) = seen
    assert second == third != last
    assert first == 2.0 - 0.5 * 2  # summed over the replicas
    assert [scales for _, scales, _, _ in seen] == [[8.0] * 2, [16.0] * 2, [8.0] * 2, [8.0] * 2]
    assert [counters for *_, counters, _ in seen] == [[1] * 2, [0] * 2, [0] * 2, [1] * 2]
    assert [iterations for *_, iterations in seen] == [[1] * 2, [2] * 2, [2] * 2, [3] * 2]


def test_fit_under_a_strategy_ends_as_with_keras_wrapper(strategy, native):
    images = np.random.default_rng(0).random((32, 4)).astype("float32")
    ends = []
    for wrapper in (LossScaleOptimizer, native):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            optimizer = wrapper(
                keras.optimizers.Adam(0.1), initial_scale=8.0, dynamic_growth_steps=2
            )
            model.compile(optimizer, loss="mse")
        model.fit(images, images.sum(1), batch_size=8, shuffle=False, verbose=0)
        ends.append((model.get_weights()[0].tolist(), in_each(strategy, optimizer.dynamic_scale)))
    assert ends[0] == ends[1]


def test_apply_belongs_into_a_replica(strategy):
    with strategy.scope():
        variable = keras.Variable(1.0)
        optimizer = LossScaleOptimizer(keras.optimizers.SGD())
        optimizer.build([variable])
        with pytest.raises(ValueError, match="replica context"):
            optimizer.apply([tf.constant(1.0)], [variable])
