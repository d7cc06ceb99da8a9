"""Features of TensorFlow only: tapes, compiled functions, sparse gradients and replicas."""

import numpy as np
import pytest

from tests.support import keras_like
from tests.support.keras_like import BACKEND, KERAS_3, NATIVE, LossScaleOptimizer, keras, mirrored

if BACKEND != "tensorflow":
    pytest.skip("of TensorFlow", allow_module_level=True)

import tensorflow as tf
from tensorflow.python.autograph.impl import api

from gradscaler import AmaxScale, DynamicScale


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
    assert variable.numpy().tolist() == [0.125, 0.25]
    before = len(traces)
    step()
    assert len(traces) == before <= (1 if KERAS_3 else 2)


def test_minimize_takes_a_loss_with_its_tape():
    variable = tf.Variable(1.0)
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.25))
    with tf.GradientTape() as tape:
        loss = variable**2
    with pytest.raises(ValueError, match="`tape` is required"):
        optimizer.minimize(loss, [variable])
    optimizer.minimize(loss, (lambda: [variable]) if KERAS_3 else [variable], tape)
    assert float(variable) == 0.5


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_sparse_gradients_are_unscaled_as_such(family, dtype):
    optimizer = LossScaleOptimizer(family.SGD(), initial_scale=2.0)
    slices = tf.IndexedSlices(
        tf.constant([[4.0, 2.0], [8.0, 5.0]], dtype), tf.constant([1, 3]), tf.constant([5, 2])
    )
    (sparse,) = optimizer.get_unscaled_gradients([slices])
    assert isinstance(sparse, tf.IndexedSlices)
    assert sparse.values.dtype == dtype
    assert sparse.values.numpy().tolist() == [[2.0, 1.0], [4.0, 2.5]]
    assert sparse.indices.numpy().tolist() == [1, 3]
    assert sparse.dense_shape.numpy().tolist() == [5, 2]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("bad", [1.0, np.nan])
def test_sparse_gradients_are_checked_and_applied(family, bad, compiled):
    optimizer = LossScaleOptimizer(family.SGD(1.0), initial_scale=4.0)
    table = tf.Variable(np.zeros((5, 2), "float32"))
    weights = tf.constant([[1.0, bad], [1.0, 1.0]])

    def step():
        optimizer.minimize(lambda: tf.reduce_sum(tf.gather(table, [1, 3]) * weights), [table])

    (tf.function(step) if compiled else step)()
    assert float(tf.reduce_sum(table)) == (-4.0 if bad == 1.0 else 0.0)
    assert float(optimizer.loss_scale) == (4.0 if bad == 1.0 else 2.0)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_sparse_gradient_with_duplicates_is_checked_whole(family, bad):
    """Keras 3's wrapper loses a flag where indices repeat, and applies the Inf."""
    optimizer = LossScaleOptimizer(family.SGD(1.0), initial_scale=4.0)
    table = tf.Variable(np.zeros((3, 1), "float32"))

    def loss(weights):
        return lambda: tf.reduce_sum(tf.gather(table, [1, 1]) * tf.constant([[1.0], [weights]]))

    optimizer.minimize(loss(2.0), [table])
    assert table.numpy().tolist() == [[0.0], [-3.0], [0.0]]
    optimizer.minimize(loss(bad), [table])
    assert table.numpy().tolist() == [[0.0], [-3.0], [0.0]]
    assert float(optimizer.loss_scale) == 2.0


@pytest.fixture
def strategy():
    return mirrored()


def in_each(strategy, variable):
    variable = variable.value if isinstance(variable, keras_like.Variable) and KERAS_3 else variable
    return [value.numpy().tolist() for value in strategy.experimental_local_results(variable)]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("overflowing", [0, 1])
@pytest.mark.parametrize("how", ["variables", "no variables"] if KERAS_3 else ["summed", "single"])
def test_an_overflow_in_one_replica_skips_the_step_of_all(
    strategy, family, compiled, dynamic, overflowing, how
):
    """In Keras' wrappers the first replica's gradients decide for all."""
    with strategy.scope():
        variable = keras_like.Variable([1.0, 2.0])
        arguments = {"dynamic_growth_steps": 2} if dynamic else {"dynamic": False}
        inner = family.SGD(0.5, momentum=0.9)
        optimizer = LossScaleOptimizer(inner, initial_scale=8.0, **arguments)
        if KERAS_3:
            optimizer.build([variable])
        else:
            optimizer.get_scaled_loss(tf.constant(1.0))
            optimizer.get_unscaled_gradients([])

    def step(overflow):
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        bad = tf.where((replica == overflowing) & overflow, np.inf, 1.0)
        grad = tf.stack([1.0, bad])
        if KERAS_3:
            grad = grad * tf.convert_to_tensor(optimizer.loss_scale)
            optimizer.apply([grad], [variable] if how == "variables" else None)
        elif how == "summed":
            optimizer.apply_gradients([(grad, variable)])
        else:
            skip = {"skip_gradients_aggregation": True}
            legacy = {"experimental_aggregate_gradients": False}
            arguments = skip if family is keras.optimizers else legacy
            optimizer.apply_gradients([(grad, variable)], **arguments)

    def run(overflow):
        strategy.run(step, args=(overflow,))

    run = tf.function(run) if compiled else run
    seen = []
    for overflow in (False, False, True, False):
        run(tf.constant(overflow))
        counts = [optimizer.iterations, *([optimizer.dynamic_counter] if dynamic else [])]
        if KERAS_3:
            counts.append(optimizer.dynamic_scale)
        values, *others = (in_each(strategy, each) for each in (variable, *counts))
        assert values[0] == values[1]
        assert all(first == second for first, second in others)
        seen.append((values[0][1], float(optimizer.loss_scale), *(first for first, _ in others)))
    values, scales, iterations, *counters = zip(*seen, strict=True)
    assert np.allclose(
        values, [1.5, 0.55, 0.55, -0.805] if how == "single" else [1.0, -0.9, -0.9, -3.61]
    )
    assert values[1] == values[2]
    assert scales == ((8.0, 16.0, 8.0, 8.0) if dynamic else (8.0,) * 4)
    assert iterations == ((1, 2, 2, 3) if KERAS_3 else (1, 2, 3, 4))  # Keras 2 counts skipped steps
    assert not dynamic or counters[0] == (1, 0, 0, 1)
    assert not KERAS_3 or counters[-1] == scales


def test_fit_under_a_strategy_ends_as_with_the_framework_s_wrapper(strategy, family):
    images = np.random.default_rng(0).random((32, 4)).astype("float32")
    ends = []
    for wrapper in (LossScaleOptimizer, NATIVE):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            optimizer = wrapper(family.Adam(0.1), initial_scale=8.0, dynamic_growth_steps=2)
            model.compile(optimizer, loss="mse")
        model.fit(images, images.sum(1), batch_size=8, shuffle=False, verbose=0)
        scale = optimizer.dynamic_scale if KERAS_3 else optimizer.loss_scale
        ends.append((model.get_weights()[0].tolist(), in_each(strategy, scale)))
    assert ends[0] == ends[1]
    assert ends[0][1][0] == 32.0


def prepare(optimizer, variable):
    """Let it create its variables, which it may not in a function."""
    if KERAS_3:
        optimizer.build([variable])
    else:
        assert optimizer.iterations is not None


@pytest.mark.parametrize("policy", [DynamicScale(), AmaxScale()])
@pytest.mark.parametrize("replicas", [1, 2])
def test_autograph_translates_none_of_our_code(strategy, family, replicas, policy, monkeypatch):
    """Translating it would take a second, and warn of a function without statements."""
    translated = []
    translate = api._convert_actual

    def note(entity, context):
        translated.append(entity.__module__)
        return translate(entity, context)

    monkeypatch.setattr(api, "_convert_actual", note)
    used = strategy if replicas == 2 else tf.distribute.get_strategy()
    with used.scope():
        variable = keras_like.Variable(1.0)
        optimizer = LossScaleOptimizer(family.SGD(0.5), policy=policy)
        prepare(optimizer, variable)

    def step():
        with tf.GradientTape() as tape:
            scaled = optimizer.get_scaled_loss(tf.convert_to_tensor(variable) ** 2)
        grads = tape.gradient(scaled, [variable.value if KERAS_3 else variable])
        optimizer.apply_gradients([(optimizer.get_unscaled_gradients(grads)[0], variable)])

    def run():
        used.run(step)

    tf.function(run)()
    assert __name__ in translated
    assert [module for module in translated if module.startswith("gradscaler")] == []
    assert in_each(used, variable) == [0.0 if replicas == 1 else -1.0] * replicas


@pytest.mark.parametrize("within", [True, False] if KERAS_3 else [True])
def test_autograph_translates_a_loss_that_branches_on_a_tensor(family, within):
    """Keras 2's own wrapper has it translated only if it is defined in the function."""
    variable = keras_like.Variable(1.0)
    optimizer = LossScaleOptimizer(family.SGD(0.5))
    prepare(optimizer, variable)

    def loss():
        value = tf.convert_to_tensor(variable)
        if tf.reduce_sum(value) > 0.0:
            return value * 1.0
        return -value

    @tf.function
    def step():
        optimizer.minimize((lambda: loss()) if within else loss, [variable])

    seen = []
    for _ in range(4):
        step()
        seen.append(float(variable))
    assert seen == [0.5, 0.0, 0.5, 0.0]


def test_a_step_belongs_in_a_replica(strategy, family):
    with strategy.scope():
        variable = keras_like.Variable(1.0)
        optimizer = LossScaleOptimizer(family.SGD())
        optimizer.get_scaled_loss(tf.constant(1.0))
        optimizer.get_unscaled_gradients([])
        with pytest.raises(ValueError, match="replica context"):
            optimizer.apply_gradients([(tf.constant(1.0), variable)])
