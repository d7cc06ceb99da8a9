"""``fit`` of Keras 2 under a watch: nothing changes, and the operation is named."""

import io

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import gradscaler
from gradscaler._run_script import voice
from gradscaler.tf_keras import LossScaleOptimizer
from tests.support.marked_lines import lines_marked_in

LINE = lines_marked_in(__file__)("the root")
QUOTIENT = lines_marked_in(__file__)("the quotient")
BAD = 3  # the first batch whose root has a slope of Inf


class Root(tf_keras.layers.Layer):
    """The norm of each row."""

    def call(self, x):
        return tf.sqrt(tf.reduce_sum(x * x, -1, keepdims=True))  # the root


class Own(tf_keras.Sequential):
    """With a step of its own, as in the guide of Keras 2."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
        return {"loss": loss}


def trained(kind, optimizer, steps_per_execution=1, by_batch=False):
    """What a model and its optimizer hold after two rounds of four batches, and the losses."""
    tf_keras.utils.set_random_seed(0)
    layers = tf_keras.layers.Dense(4, use_bias=False), Root(), tf_keras.layers.Dense(1)
    model = kind([tf_keras.Input((4,)), *layers])
    optimizer = optimizer()
    model.compile(optimizer, "mse", steps_per_execution=steps_per_execution)
    x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
    x[8 * BAD - 4] = 0
    y = x.sum(1, keepdims=True)
    if by_batch:
        parts = [slice(first, first + 8) for first in (*range(0, 32, 8), *range(0, 32, 8))]
        losses = [model.train_on_batch(x[part], y[part]) for part in parts]
    else:
        losses = model.fit(x, y, 8, 2, shuffle=False, verbose=0).history["loss"]
    own = optimizer.variables
    numbers = *model.variables, *(own() if callable(own) else own)
    return [*[each.numpy().tobytes() for each in numbers], str(losses)]


def scaled():
    return LossScaleOptimizer(tf_keras.optimizers.SGD(1e-3))


def legacy():
    return tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.legacy.SGD(1e-3))


def plain():
    return tf_keras.optimizers.SGD(1e-3)


def said(monkeypatch, folder, *case, step=None):
    """What is said of a training, whose bits stay the same."""
    native = trained(*case)
    monkeypatch.setattr(voice, "_STDERR", io.StringIO())
    with gradscaler.watch(folder, step=step):
        assert trained(*case) == native
    return " ".join(voice._STDERR.getvalue().split())


@pytest.mark.parametrize(
    ("case", "step"),
    [((tf_keras.Sequential, legacy, 1, True), None), ((Own, scaled, 2, False), BAD)],
    ids=["train_on_batch", "two steps in a call, and watched"],
)
def test_a_skipped_step_is_run_again_at_once(case, step, monkeypatch, tmp_path):
    told = said(monkeypatch, tmp_path, *case, step=step).rpartition("gradscaler: ")[2]
    assert "2 of 8 steps were skipped" in told
    assert "the gradient of sqrt in root" in told
    assert f"{LINE}, though the loss is finite" in told
    assert "not seen" not in told


@pytest.mark.parametrize(("kind", "steps"), [(tf_keras.Sequential, 2), (Own, 1)])
def test_a_watched_step_names_the_operation(kind, steps, monkeypatch, tmp_path):
    told = said(monkeypatch, tmp_path, kind, plain, steps, step=BAD + 1)
    assert "dense" in told
    assert "kernel is NaN, by the gradient of sqrt in root" in told
    assert f"{LINE}, though the loss is finite, and step" in told
    at = f"one of batches {BAD} to {BAD + 1}" if steps > 1 else f"batch {BAD + 1}"
    assert f"The loss is nan at {at} of epoch 1" in told


def likelihood(y, outputs):
    return tf.reduce_mean((y - outputs) ** 2 / tf.nn.relu(outputs))  # the quotient


def without_input(x):
    tf_keras.utils.set_random_seed(0)
    model = tf_keras.Sequential([tf_keras.layers.Dense(4, "tanh"), tf_keras.layers.Dense(1)])
    model.compile(tf_keras.optimizers.SGD(1e-3), likelihood)
    model.fit(x, x[:, :1], 8, shuffle=False, verbose=0)
    return [each.numpy().tobytes() for each in model.variables]


def test_a_first_step_is_watched_in_a_model_without_an_input_shape(monkeypatch, tmp_path):
    x = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")
    native = without_input(x)
    monkeypatch.setattr(voice, "_STDERR", io.StringIO())
    with gradscaler.watch(tmp_path, step=2):
        assert without_input(x) == native
    told = " ".join(voice._STDERR.getvalue().split())
    assert f"by div at {QUOTIENT}" in told
    assert "so step 1 was applied" in told


class Scaled(tf_keras.Sequential):
    """With a step that scales its loss, and divides the gradients by the scale or does not."""

    divide = None

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            scaled_loss = self.optimizer.get_scaled_loss(loss)
        gradients = tape.gradient(scaled_loss, self.trainable_variables)
        if self.divide is not None:
            gradients = self.divide(self.optimizer, gradients)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def by_optimizer(optimizer, gradients):
    return optimizer.get_unscaled_gradients(gradients)


def by_hand(optimizer, gradients):
    return [each / optimizer.loss_scale for each in gradients]


@pytest.mark.parametrize("package", ["native", "ours"])
@pytest.mark.parametrize("divide", [None, by_optimizer, by_hand])
def test_gradients_that_are_not_unscaled_are_told(package, divide, monkeypatch, tmp_path):
    kind = LossScaleOptimizer if package == "ours" else tf_keras.mixed_precision.LossScaleOptimizer
    monkeypatch.setattr(Scaled, "divide", staticmethod(divide) if divide else None)
    monkeypatch.setattr(voice, "_STDERR", io.StringIO())
    case = Scaled, lambda: kind(tf_keras.optimizers.SGD(1e-3), initial_scale=8.0)
    native = trained(*case)
    with gradscaler.watch(tmp_path) as watch:
        assert trained(*case) == native
    is_told = watch.verdict.kind == "misuse"
    assert is_told == (divide is None)
    assert ("optimizer.get_unscaled_gradients(gradients)" in watch.verdict.text) == is_told


@pytest.mark.parametrize("is_eager", [False, True])
def test_a_model_that_gets_its_weights_from_its_first_batch_is_watched(
    is_eager, tmp_path, monkeypatch
):
    said = io.StringIO()
    monkeypatch.setattr(voice, "_STDERR", said)
    x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
    x[8 * BAD - 4] = 0
    with gradscaler.watch(tmp_path):
        layers = tf_keras.layers.Dense(4, use_bias=False), Root(), tf_keras.layers.Dense(1)
        model = tf_keras.Sequential(layers)
        model.compile(scaled(), "mse", run_eagerly=is_eager)
        model.fit(x, x.sum(1, keepdims=True), 8, 2, shuffle=False, verbose=0)
    words = " ".join(said.getvalue().split())
    assert "cannot watch" not in words
    assert f" at {LINE}, though the loss is finite" in words
