"""``locate`` on TensorFlow: what other backends lack, and that TensorFlow stays as it was."""

import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from gradscaler.diagnose import locate
from gradscaler.diagnose._graph.autograph import written_at
from gradscaler.diagnose._monitor.replay import _is_on_host
from tests.support.keras_like import BACKEND, LossScaleOptimizer, keras

if BACKEND != "tensorflow":
    pytest.skip("of TensorFlow", allow_module_level=True)

import tensorflow as tf
from tensorflow.python.eager import context, execute, imperative_grad

INPUTS = np.ones((8, 4), np.float32)


@pytest.fixture(scope="module")
def model():
    own = keras.Sequential([keras.layers.Dense(4), keras.layers.Dropout(0.5, seed=0)])
    own(INPUTS)
    return own


def step_of(model, loss_of, scaled=lambda loss: loss):
    @tf.function(jit_compile=True)
    def step():
        with tf.GradientTape() as tape:
            loss = loss_of(model(INPUTS, training=True))
            scaled_loss = scaled(loss)
        return loss, tape.gradient(scaled_loss, model.trainable_variables)

    return step


def named(found):
    return found and (found.kind, found.operation, found.line)


def line_of(function, offset=1):
    here = Path(__file__).relative_to(Path.cwd())
    return f"{here}:{function.__code__.co_firstlineno + offset}"


def state():
    callbacks = list(context.context().op_callbacks)
    is_eager = tf.config.functions_run_eagerly()
    return execute.execute, imperative_grad.imperative_grad, is_eager, callbacks


def log_of_0(y):
    return tf.reduce_mean(tf.math.log(y * 0))


def root_of_0(y):
    return tf.reduce_mean(tf.sqrt(y * 0))


def log_whose_result_is_finite(y):
    made = tf.math.log(y * 0)
    return tf.reduce_mean(tf.tanh(made @ tf.ones((4, 1)) * y))


def raises(y):
    raise KeyError("closure")


@pytest.mark.parametrize("loss_of", [log_of_0, root_of_0, tf.reduce_mean, raises])
def test_tensorflow_is_left_as_it_was(model, loss_of):
    before = state()
    try:
        locate(model, step_of(model, loss_of))
    except KeyError:
        assert loss_of is raises
    assert state() == before


def test_a_search_in_a_search_and_one_in_another_thread_end_alone(model):
    before, found = state(), []

    def closure():
        found.append(locate(model, step_of(model, log_of_0)))
        thread = threading.Thread(
            target=lambda: found.append(locate(model, step_of(model, root_of_0)))
        )
        thread.start()
        thread.join()
        return step_of(model, root_of_0)()

    assert locate(model, closure).operation == "log"  # the search in it took a gradient of that
    assert [each.operation for each in found] == ["log", "sqrt"]
    assert state() == before


def test_callbacks_of_the_user_s_own_stay(model):
    tf.debugging.enable_check_numerics()
    try:
        before = state()
        assert locate(model, step_of(model, tf.reduce_mean)) is None
        assert state() == before
        with pytest.raises(tf.errors.InvalidArgumentError, match="CheckNumerics"):
            locate(model, step_of(model, log_of_0))
        assert state() == before
    finally:
        tf.debugging.disable_check_numerics()


def test_an_infinity_that_only_a_gradient_reads_is_named_by_what_made_it(model):
    found = locate(model, step_of(model, log_whose_result_is_finite))
    assert named(found) == ("forward", "log", line_of(log_whose_result_is_finite))


@pytest.mark.parametrize("is_located", [False, True])
def test_random_numbers_go_on_as_without(model, is_located):
    tf.random.set_seed(3)
    generator = tf.random.Generator.from_seed(1)
    tf.random.set_global_generator(generator)
    numbers = []
    for number in range(2):
        numbers.append((float(tf.random.normal([])), float(generator.normal([]))))
        if is_located and not number:
            locate(model, lambda: (tf.random.normal([]), generator.normal([])))
    tf.random.set_seed(3)
    generator.reset_from_seed(1)
    assert numbers == [(float(tf.random.normal([])), float(generator.normal([]))) for _ in "12"]


def test_the_numbers_are_those_without(model):
    seen = []

    def closure():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(INPUTS) ** 2)
        seen.append([loss, *tape.gradient(loss, model.trainable_variables)])

    closure()
    assert locate(model, closure) is None
    assert all(map(np.array_equal, *seen))


@tf.custom_gradient
def divides_backward(y):
    def gradient(upstream):
        return upstream / (y * 0)

    return y * 2, gradient


def test_an_own_gradient_is_named_with_its_line(model):
    found = locate(model, step_of(model, lambda y: tf.reduce_mean(divides_backward(y))))
    function = divides_backward.__wrapped__ if hasattr(divides_backward, "__wrapped__") else None
    assert (found.kind, found.operation) == ("backward", "div")
    assert function is None or found.line == line_of(function, 3)


def test_what_is_computed_again_in_the_backward_pass_is_named(model):
    def again(y):
        return tf.sqrt(y * 0)

    found = locate(model, step_of(model, lambda y: tf.reduce_mean(tf.recompute_grad(again)(y))))
    assert named(found) == ("backward", "sqrt", line_of(again))


def test_a_gradient_of_a_gradient_is_named(model):
    inputs = tf.constant(INPUTS)

    def penalty():
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(inputs)
                output = tf.reduce_sum(model(inputs) * 0)
            gradient = inner.gradient(output, inputs)
            loss = tf.norm(gradient)
        return outer.gradient(loss, model.trainable_variables)

    assert named(locate(model, penalty)) == ("backward", "norm", line_of(penalty, 6))


def test_an_inf_is_followed_through_a_variable(model):
    kept = tf.Variable(1.0)

    def through(y):
        kept.assign(log_of_0(y))
        return kept * tf.reduce_mean(y)

    assert named(locate(model, step_of(model, through)))[1:] == ("log", line_of(log_of_0))


def test_an_embedding_that_is_nan_is_named():
    own = keras.Sequential([keras.layers.Embedding(5, 2, name="table"), keras.layers.LSTM(2)])
    own(np.array([[1, 2]]))
    (table, *_) = own.trainable_variables
    table.assign(np.where(np.arange(10).reshape(5, 2) == 4, np.nan, 1.0))
    found = locate(own, lambda: own(np.array([[1, 2]])))
    assert found.bad_parameter == "table.embeddings"


def test_a_batch_of_a_dataset_is_read_by_its_first_operation(model):
    data = tf.data.Dataset.from_tensors(np.where(np.eye(4) > 0, np.nan, 1.0).astype("float32"))
    found = locate(model, lambda: [model(batch) for batch in data])
    assert (found.kind, found.operation) == ("input", "matmul")


@pytest.mark.filterwarnings("ignore:Even though the `tf.config.experimental_run_functions")
def test_a_graph_that_is_built_meanwhile_is_no_run(model):
    def closure():
        data = tf.data.Dataset.from_tensors(INPUTS).map(lambda batch: tf.math.log(batch * 0))
        logs = tf.vectorized_map(lambda row: row * tf.constant(2.0), INPUTS)
        return tf.reduce_mean(logs), [tf.reduce_mean(tf.exp(batch)) for batch in data]

    assert locate(model, closure) is None


@pytest.mark.parametrize("name", ["get_scaled_loss", "scale_loss"])
def test_a_scaled_loss_that_overflows_is_not_named(model, name):
    """A lower scale cures it. What its gradients make in the model is named."""
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=2.0**120)
    if not hasattr(optimizer, name):
        pytest.skip("of the other Keras")
    scaled = getattr(optimizer, name)
    assert locate(model, step_of(model, lambda y: tf.reduce_mean(y) * 0 + 1e30, scaled)) is None

    def enlarges(y):
        return tf.reduce_mean(y * 1e10)

    found = locate(model, step_of(model, enlarges, scaled))
    assert named(found) == ("backward", "mul", line_of(enlarges))


def test_a_scale_on_a_device_is_waited_for():
    """So a step is read at once, for a replay, only where that costs nothing."""
    place = "/job:localhost/replica:0/task:0/device:"
    assert place in tf.constant(1.0).device
    assert _is_on_host(tf.constant(1.0))
    assert not _is_on_host(SimpleNamespace(device=f"{place}GPU:0"))


@pytest.mark.parametrize("training", [True, False])
def test_two_variables_that_are_alike_and_nan_are_compared_once(training):
    """To read a variable is an operation, which must not be judged in its turn."""
    normalization = keras.layers.BatchNormalization()
    model = keras.Sequential([normalization])
    model(INPUTS)
    for statistic in (normalization.moving_mean, normalization.moving_variance):
        statistic.assign(np.full(4, np.nan))
    found = locate(model, lambda: tf.reduce_mean(model(INPUTS, training=training)))
    assert (found is None) == training
    assert training or found.bad_parameter.endswith((".moving_mean", ".moving_variance"))


READS = {
    "float": lambda x: float(tf.reduce_mean(x)),
    "item": lambda x: tf.reduce_mean(x).numpy().item(),
    "numpy": lambda x: x.numpy(),
    "asarray": lambda x: np.asarray(x),
}


@pytest.mark.parametrize("name", READS)
def test_a_number_that_numpy_has_read_is_followed(model, name):
    def loss_of(y):
        read = READS[name](tf.math.log(y * 0))
        return tf.reduce_mean(y * tf.constant(read))

    found = locate(model, lambda: loss_of(model(INPUTS)))
    assert named(found) == ("forward", "log", line_of(loss_of))


def test_numbers_that_no_operation_made_are_those_of_the_batch(model):
    def loss_of(y):
        tf.math.log(y * 0)
        return tf.reduce_mean(y * tf.constant([np.inf, 1.0, np.nan, 2.0]))

    found = locate(model, lambda: loss_of(model(INPUTS)))
    assert (found.kind, found.operation) == ("input", "mul")


class Converted:
    """Its methods are converted by AutoGraph, as `tf.function` binds one of them."""

    def __init__(self, model):
        self.model = model

    def loss(self, y):
        if tf.reduce_sum(y) > -1e9:  # which AutoGraph makes a function of
            y = y * 0
            y = tf.math.log(y)
        return tf.reduce_mean(y)

    @tf.function
    def step(self):
        with tf.GradientTape() as tape:
            loss = self.loss(self.model(INPUTS, training=True))
        return loss, tape.gradient(loss, self.model.trainable_variables)


def test_a_line_of_converted_code_is_that_of_the_user_s_file(model):
    converted = Converted(model)  # its bound method does not keep it
    found = locate(model, converted.step)
    assert named(found) == ("forward", "log", line_of(Converted.loss, 3))
    assert written_at(__file__, 7) == (__file__, 7)
    assert written_at("/tmp/__autograph_generated_file1.py", 7)[1] == 7


@pytest.mark.parametrize("row", [1, None])
def test_a_nan_that_a_max_pool_hides_is_that_of_the_batch(row):
    images = np.ones((4, 4, 4, 1), np.float32)
    if row is not None:
        images[row] = np.nan
    kernel, last = tf.Variable(tf.ones((1, 1, 1, 1))), tf.Variable(tf.ones((1, 1, 1, 2)))
    pooling = keras.Sequential([keras.Input((4, 4, 1)), keras.layers.MaxPooling2D()])

    def closure():
        with tf.GradientTape() as tape:
            pooled = pooling(tf.nn.conv2d(images, kernel, 1, "SAME"))
            loss = tf.reduce_mean(tf.nn.conv2d(pooled, last, 1, "SAME") * -4.0)
        return loss, tape.gradient(loss, [kernel, last])

    found = locate(pooling, closure)
    assert (found and (found.kind, found.rows)) == (row and ("input", "row 1 of 4"))
