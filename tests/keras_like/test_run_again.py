"""What a watch of TensorFlow leaves alone, as it runs a step again, and which run proposes one."""

import io
import random

import numpy as np
import pytest
import tensorflow as tf

import gradscaler
from gradscaler._run_script import voice
from tests.support.injected import wrong_after_errors
from tests.support.keras_like import BACKEND, keras

pytestmark = pytest.mark.skipif(BACKEND != "tensorflow", reason="it watches loops of TensorFlow")


def trained(note=lambda loss: None):
    """The bits of a compiled training whose fourth batch is bad; ``note`` is called in a step."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Dense(1)])
    model.build((None, 4))
    optimizer = keras.optimizers.SGD(0.01)

    @tf.function
    def gradients_of(x):
        with tf.GradientTape() as tape:
            loss = tf.sqrt(tf.reduce_sum(model(x) ** 2))
        note(loss)
        return loss, tape.gradient(loss, model.trainable_variables)

    losses = []
    for step in range(5):
        x = np.full((3, 4), np.inf if step == 3 else step + 1, np.float32)
        loss, gradients = gradients_of(tf.constant(x))
        finite = [tf.where(tf.math.is_finite(each), each, 0.0) for each in gradients]
        optimizer.apply_gradients(zip(finite, model.trainable_variables, strict=True))
        losses.append(loss)
    return [np.asarray(each).tobytes() for each in (*losses, *model.get_weights())]


@pytest.mark.rare("the guard is the same one, which PyTorch's test of each function tries")
def test_an_error_wherever_we_are_called_changes_no_bit(tmp_path):
    assert wrong_after_errors(trained, tmp_path) == {}


def error_in_a_step():
    """The frames in the text of an error in a compiled step: a gradient has a wrong shape."""
    model = keras.Sequential([keras.layers.Dense(1, name="layer")])
    model.build((None, 4))
    optimizer = keras.optimizers.SGD(0.01)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x) ** 2)
        kernel, _ = tape.gradient(loss, model.trainable_variables)
        wrong = [kernel, tf.zeros((7, 7))]
        optimizer.apply_gradients(zip(wrong, model.trainable_variables, strict=True))

    with pytest.raises(ValueError, match="in user code:") as caught:
        step(tf.ones((3, 4)))
    return [line for line in str(caught.value).splitlines() if line.startswith("    File")]


def test_an_error_in_a_compiled_step_lists_the_same_frames(tmp_path):
    plain = error_in_a_step()
    with gradscaler.watch(tmp_path):
        assert error_in_a_step() == plain != []


@pytest.mark.parametrize("calls_python", [False, True])
def test_a_step_that_is_run_again_prints_nothing_and_uses_up_no_random_number(
    calls_python, tmp_path, capfd
):
    called = []

    def note(loss):
        print("Python runs")
        random.random()
        np.random.rand()  # noqa: NPY002 # the state that all share
        tf.print("the loss is", loss)
        if calls_python:  # so nothing is run again
            tf.py_function(lambda value: called.append(float(value)), [loss], [])

    def run():
        called.clear()
        bits = trained(note)
        numbers = random.random(), np.random.rand()  # noqa: NPY002
        out, err = capfd.readouterr()
        return bits, str(called), numbers, out, err.count("the loss is")

    native = run()
    with gradscaler.watch(tmp_path) as watch:
        assert run() == native
    assert (watch.verdict.findings[0].line is None) == calls_python


def test_of_two_optimizers_the_first_to_fail_alone_proposes_a_watch(tmp_path, monkeypatch):
    monkeypatch.setattr(voice, "_STDERR", io.StringIO())
    first, second = tf.Variable([1.0]), tf.Variable([1.0])
    with gradscaler.watch(tmp_path):
        optimizers = keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1)
        for factor in (1.0, 1.0, 0.0, 1.0):
            for variable, optimizer in zip((first, second), optimizers, strict=True):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(tf.sqrt(tf.abs(first * second) * factor))
                optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])
    assert voice._STDERR.getvalue().count("names what made it") == 1


@pytest.mark.parametrize(("bad", "is_known"), [(100.0, True), (np.nan, False)])
def test_a_watch_is_proposed_unless_the_operation_is_known(bad, is_known, tmp_path, monkeypatch):
    monkeypatch.setattr(voice, "_STDERR", io.StringIO())
    model = keras.Sequential([keras.layers.Dense(1, kernel_initializer="ones")])
    model.build((None, 4))
    optimizer = keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(1e-6))

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            powers = tf.exp(tf.cast(model(x), tf.float16))
            loss = tf.reduce_mean(tf.math.log1p(tf.cast(powers, tf.float32)))
            scaled = getattr(optimizer, "scale_loss", None) or optimizer.get_scaled_loss
            scaled_loss = scaled(loss)
        gradients = tape.gradient(scaled_loss, model.trainable_variables)
        if not hasattr(optimizer, "scale_loss"):
            gradients = optimizer.get_unscaled_gradients(gradients)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    with gradscaler.watch(tmp_path) as watch:
        for number in range(1, 41):
            is_bad = number in (7, 12, 19, 23, 30, 37)
            step(np.full((3, 4), bad if is_bad else 0.1, np.float32))
    assert watch.verdict.kind == "data"
    assert ("names what made it" in voice._STDERR.getvalue()) != is_known


@pytest.mark.parametrize(
    ("take", "seen"),
    [
        (lambda gram: tf.linalg.slogdet(gram)[1], "step watched: forward of a function (float32)"),
        (
            lambda gram: tf.reduce_sum(tf.linalg.inv(gram)),
            "the step is not watched: Input is not invertible.",
        ),
    ],
    ids=["after an Inf", "at once"],
)
def test_a_watched_step_that_raises_an_error_is_told_once(take, seen, tmp_path, monkeypatch):
    monkeypatch.setattr(voice, "_STDERR", io.StringIO())
    weights, optimizer = tf.Variable(tf.eye(2)), keras.optimizers.SGD(1e-3)

    @tf.function
    def gradients_of(factor):
        with tf.GradientTape() as tape:
            loss = -take(weights * factor)
        return loss, tape.gradient(loss, [weights])

    with gradscaler.watch(tmp_path, step=2):
        for factor in (1.0, 0.0):
            try:
                _, gradients = gradients_of(tf.constant(factor))
            except tf.errors.InvalidArgumentError:
                break
            optimizer.apply_gradients(zip(gradients, [weights], strict=True))
    told = " ".join(voice._STDERR.getvalue().split())
    assert seen in told
    assert told.count("step watched") + told.count("not watched") == 1
    assert "{{" not in told
