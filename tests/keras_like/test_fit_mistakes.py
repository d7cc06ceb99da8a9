"""What ``gradscaler run`` says of ``fit`` though its losses are finite, or of its loss function."""

import io
from pathlib import Path

import numpy as np
import pytest

import gradscaler
from gradscaler._run_script import voice
from tests.support.keras_like import BACKEND, KERAS_3, keras

INPUTS = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
TARGETS = (INPUTS[:, :1] > 0).astype("float32")
WITH_NAN = INPUTS.copy()
WITH_NAN[:, 2] = np.nan
layers = keras.layers

if KERAS_3:
    nan_to_0, log, mean = keras.ops.nan_to_num, keras.ops.log, keras.ops.mean
else:
    import tensorflow as tf

    log, mean = tf.math.log, tf.reduce_mean

    def nan_to_0(x):
        return tf.where(tf.math.is_nan(x), tf.zeros_like(x), x)


class Hide(layers.Layer):
    def call(self, x):
        return nan_to_0(x)


def swapped(y_pred, y_true):
    return -mean(log(y_pred) * y_true)


def unnamed(p, t):
    return -mean(log(p) * t)


def fit(model, inputs=INPUTS, epochs=2):
    model.fit(inputs, TARGETS, batch_size=8, epochs=epochs, verbose=0, shuffle=False)


def small(*inner, activation=None):
    return keras.Sequential([layers.Dense(8), *inner, layers.Dense(1, activation=activation)])


@pytest.fixture
def said(monkeypatch, tmp_path):
    """A function that trains under a watch, and returns what was said."""

    def of(train, **options):
        told = io.StringIO()
        monkeypatch.setattr(voice, "_STDERR", told)
        keras.utils.set_random_seed(0)
        with gradscaler.watch(tmp_path, **options):
            train()
        return " ".join(told.getvalue().split())

    return of


def test_a_nan_that_the_losses_do_not_show_is_told_with_the_column_of_the_batch(said):
    def train():
        model = small(Hide())
        model.compile("sgd", "mse")
        fit(model, WITH_NAN)

    text = said(train)
    assert "kernel is NaN since epoch 1, though the losses are finite" in text
    assert "Column 2 of the first batch is NaN in each row: look at the data" in text
    assert text.count("since epoch 1") == 2  # on the way, and at the end


def test_a_nan_in_the_first_batch_is_told_with_a_loss_of_nan_and_not_without(said):
    def train(*inner):
        model = small(*inner)
        model.compile("sgd", "mse")
        fit(model, WITH_NAN)

    text = said(train)
    assert "The loss is nan at batch" in text
    assert "of epoch 1. Column 2 of the first batch" in text

    def train_beside():
        model = keras.Sequential([Hide(), layers.Dense(1)])
        model.compile("sgd", "mse")
        fit(model, WITH_NAN)

    assert "Column" not in said(train_beside)


class Unfreeze(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            self.model.layers[0].trainable = True


def frozen():
    model = small()
    model.build((None, 4))
    model.layers[0].trainable = False
    model.compile("sgd", "mse")
    return model


@pytest.mark.skipif(BACKEND != "tensorflow", reason="other backends raise an error")
def test_layers_that_became_trainable_in_a_callback_are_named(said):
    def train():
        model = frozen()
        model.fit(INPUTS, TARGETS, 8, 4, verbose=0, callbacks=[Unfreeze()])

    assert "1 more weight became trainable after compile()" in said(train)


# Keras 2 hides it from a fit that a layer became trainable before it.
@pytest.mark.skipif(not (KERAS_3 and BACKEND == "tensorflow"), reason="others raise an error")
@pytest.mark.parametrize("is_compiled", [True, False])
def test_layers_that_became_trainable_between_two_fits_are_named(said, is_compiled):
    def train():
        model = frozen()
        fit(model)
        model.layers[0].trainable = True
        if is_compiled:
            model.compile("sgd", "mse")
        fit(model)

    assert ("call compile() again" in said(train)) is not is_compiled


@pytest.mark.parametrize("rate", [0.0, 0.01])
def test_weights_that_all_stay_are_told_and_a_loss_that_stands(said, rate):
    def train():
        model = small()
        model.build((None, 4))
        model.compile(keras.optimizers.SGD(rate), "mse")
        fit(model, epochs=1)

    text = said(train)
    assert ("The learning rate is 0 from step 1 on (epoch 1), so nothing" in text) is (rate == 0)


@pytest.mark.parametrize("activation", ["relu", "ReLU", None])
@pytest.mark.parametrize("bias", [-9.0, 9.0])
def test_a_last_layer_whose_relu_gives_nothing_but_0_is_named(said, activation, bias):
    def train():
        bias_of = keras.initializers.Constant(bias)
        last = layers.Dense(
            1, activation if activation == "relu" else None, bias_initializer=bias_of
        )
        own = [keras.Input((4,)), last, *([layers.ReLU()] * (activation == "ReLU"))]
        model = keras.Sequential(own)
        model.compile(keras.optimizers.SGD(0.01), "mse")
        fit(model)

    text = said(train)
    is_dead = activation is not None and bias < 0
    assert ("the last layer, gives 0 for all inputs" in text) is is_dead
    assert ("No weight has changed" in text) is is_dead


ONE_OUTPUT = "The softmax of last is taken over one output, so it is 1 whatever the weights are"


class OwnStep(keras.Sequential):
    def train_step(self, *args, **kwargs):
        return super().train_step(*args, **kwargs)


@pytest.mark.filterwarnings("ignore:.*softmax over axis")  # Keras 3 warns of it, too
@pytest.mark.parametrize(
    "case", ["activation", "layer", "two outputs", "over the row", "sigmoid", "own step"]
)
def test_a_last_softmax_over_one_output_is_named(said, case):
    one = [layers.Dense(1, activation="softmax", name="last")]
    ends = {
        "layer": [layers.Dense(1), layers.Softmax(name="last")],
        "two outputs": [layers.Dense(2, activation="softmax", name="last")],
        "over the row": [layers.Reshape((4, 1)), layers.Softmax(axis=1, name="last")],
        "sigmoid": [layers.Dense(1, activation="sigmoid", name="last")],
    }

    def train():
        kind = OwnStep if case == "own step" else keras.Sequential
        model = kind([keras.Input((4,)), layers.Dense(4), *ends.get(case, one)])
        model.compile("adam", "mse")
        targets = INPUTS[..., None] if case == "over the row" else TARGETS
        model.fit(INPUTS, targets, batch_size=8, epochs=2, verbose=0, shuffle=False)

    text = said(train)
    assert text.count(ONE_OUTPUT) == 2 * (case in ("activation", "layer"))  # also at the end
    # On some processors, rounding leaves a gradient there, which moves the biases from 0.
    assert "No weight has changed" not in text or case == "own step"


def test_weights_that_stand_at_a_known_rate_do_not_blame_it(said):
    def train():
        cut = [layers.Dense(8), layers.Lambda(lambda x: 0.0 * x)]
        model = keras.Sequential([keras.Input((4,)), *cut, layers.Lambda(lambda x: x[:, :1])])
        model.compile("adam", "mse")
        fit(model)

    text = said(train)
    assert "No weight has changed at a learning rate of 0.001: look at what keeps the loss" in text
    assert "the mean of an epoch went from" in text


def until(epochs):
    def rate(epoch, rate):
        return 0.01 if epoch < epochs else 0.0

    return keras.callbacks.LearningRateScheduler(rate)


@pytest.mark.parametrize("epochs", [1, 7])
def test_a_schedule_that_makes_the_rate_0_is_named_unless_it_ends_there(said, epochs):
    def train():
        model = small()
        model.compile(keras.optimizers.SGD(0.01), "mse")
        model.fit(INPUTS, TARGETS, 16, 8, verbose=0, callbacks=[until(epochs)])

    text = said(train)
    if epochs == 7:  # the last epoch of eight
        assert "learning rate" not in text
        return
    told = "is 0 from step 5 on (epoch 2), so nothing moves in 28 of 32 steps:"
    assert told in text
    line = f"{Path(__file__).name}:{until.__code__.co_firstlineno + 1}"
    assert "LearningRateScheduler, by rate() at " in text
    assert f"{line}, makes it 0." in text


@pytest.mark.parametrize("steps", [5, 20])
def test_a_rate_that_falls_to_0_before_the_last_epochs_is_told_and_not_one_that_ends_there(
    said, steps
):
    def train():
        model = small()
        rate = keras.optimizers.schedules.PolynomialDecay(0.01, steps, 0.0)
        model.compile(keras.optimizers.SGD(rate), "mse")
        model.fit(INPUTS, TARGETS, 16, 5, verbose=0)

    text = said(train)
    assert ("The learning rate is 0 from step 9 on (epoch 3)" in text) is (steps == 5)
    assert ("PolynomialDecay makes it 0." in text) is (steps == 5)


@pytest.mark.parametrize("rate", [0.0, 0.01])
def test_calls_at_a_rate_of_0_are_told(said, rate):
    def train():
        model = small()
        model.compile(keras.optimizers.SGD(0.01), "mse")
        for each in range(8):
            model.optimizer.learning_rate = 0.01 if each < 2 else rate
            model.train_on_batch(INPUTS, TARGETS)

    assert ("The learning rate is 0 from step" in said(train)) is (rate == 0)


def test_a_loss_that_stands_is_told(said):
    def train():
        model = small()
        model.compile(keras.optimizers.SGD(1e-9), "mse")
        model.fit(INPUTS[:8], TARGETS[:8], epochs=101, verbose=0)

    assert "If they should have fallen, look at the learning rate" in said(train)


@pytest.mark.filterwarnings("ignore:.*received .from_logits=True:UserWarning")
@pytest.mark.parametrize("activation", ["sigmoid", None])
@pytest.mark.parametrize("from_logits", [True, False])
def test_probabilities_for_logits_and_logits_for_probabilities(said, activation, from_logits):
    def train():
        model = small(activation=activation)
        model.compile("sgd", keras.losses.BinaryCrossentropy(from_logits=from_logits))
        fit(model, epochs=1)

    text = said(train)
    # TensorFlow's backend takes what the sigmoid was given.
    is_twice = bool(from_logits and activation and BACKEND != "tensorflow")
    assert ("are normalised once more" in text) is is_twice
    assert ("takes probabilities, as from_logits is False" in text) is (
        not from_logits and activation is None
    )


class Squares(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return mean((y_true - y_pred) ** 2)


class Column(Squares):
    def call(self, y_true, y_pred):
        return super().call(y_true, y_pred[:, 0] if len(y_true.shape) == 1 else y_pred)


# Keras 2 gives each loss outputs and labels of one shape.
@pytest.mark.skipif(not KERAS_3, reason="Keras 2 makes one shape of both")
@pytest.mark.parametrize("loss", [Squares, Column, keras.losses.MeanSquaredError])
def test_a_loss_of_the_user_s_that_broadcasts_labels_is_named(said, loss):
    def train():
        model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
        model.compile("sgd", loss())
        model.fit(INPUTS, TARGETS[:, 0], 8, 2, verbose=0)

    text = said(train)  # on TensorFlow, its graph may have told the operation
    assert ("compares each output with each label" in text) is (loss is Squares)


def test_a_loss_with_swapped_arguments_is_told_if_it_fails(said):
    def train(loss):
        model = small(activation="sigmoid")
        model.compile("sgd", loss)
        fit(model, epochs=1)

    text = said(lambda: train(swapped))
    assert "takes (y_pred, y_true): y_pred is the labels." in text
    text = said(lambda: train(unnamed), step=2)
    assert "It is the logarithm of the labels" in text
    assert "or clamp it to a small number if the logarithm of the labels is meant." in text
    assert "The input of the logarithm is 0" not in text


def of_each_pair(y_true, y_pred):
    import tensorflow as tf

    return tf.reduce_mean((tf.reshape(y_true, [-1]) - y_pred) ** 2)


def of_pairs(y_true, y_pred):
    import tensorflow as tf

    return tf.reduce_mean((tf.reshape(y_true, [-1]) - y_pred[:, 0]) ** 2)


class Stepping(keras.Model):
    """A model whose own step takes labels as they are."""

    def __init__(self, takes_column):
        super().__init__()
        self.last, self.takes_column = layers.Dense(1), takes_column

    def call(self, x):
        return self.last(x)

    def train_step(self, data):
        import tensorflow as tf

        x, y = data
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = tf.reduce_mean(((outputs[:, 0] if self.takes_column else outputs) - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


@pytest.mark.skipif(BACKEND != "tensorflow", reason="its graph shows the step")
@pytest.mark.parametrize("is_mistake", [True, False])
@pytest.mark.parametrize("is_own_step", [True, False])
def test_a_broadcast_in_a_step_or_a_loss_function_is_named(said, is_own_step, is_mistake):
    def train():
        model = Stepping(takes_column=not is_mistake) if is_own_step else small()
        model.compile("sgd", None if is_own_step else of_each_pair if is_mistake else of_pairs)
        model.fit(INPUTS, TARGETS[:, 0], batch_size=8, epochs=2, verbose=0)

    text = said(train)
    assert ("compares each output with each label of the batch" in text) is is_mistake
    assert ("test_fit_mistakes.py:" in text) is is_mistake
