"""Loops of TensorFlow whose targets are broadcast, or whose variables are changed by hand."""

import io

import numpy as np
import pytest

import gradscaler
from gradscaler._run_script import tape_steps, voice
from tests.support.keras_like import FRAMEWORK, mirrored

pytestmark = pytest.mark.skipif(FRAMEWORK != "tf_keras", reason="TensorFlow's own")

if FRAMEWORK == "tf_keras":
    import tensorflow as tf
    import tf_keras

INPUTS = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")


@pytest.fixture
def said(monkeypatch, tmp_path):
    def of(train):
        told = io.StringIO()
        monkeypatch.setattr(voice, "_STDERR", told)
        tape_steps.optimizers_stepped.clear()
        with gradscaler.watch(tmp_path):
            train()
        return " ".join(told.getvalue().split())

    return of


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("kind", ["mistake", "column", "meant"])
def test_a_column_of_outputs_minus_a_row_of_targets_is_named(said, is_compiled, kind):
    def train():
        model = tf_keras.Sequential([tf_keras.layers.Dense(1)])
        optimizer = tf_keras.optimizers.SGD(0.01)
        model.build((None, 4))

        def step(x, y):
            with tf.GradientTape() as tape:
                outputs = model(x)
                if kind == "column":
                    y = y[:, None]
                if kind == "meant":
                    outputs = outputs[:, 0][:, None]
                loss = tf.reduce_mean(tf.square(y - outputs))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        run = tf.function(step) if is_compiled else step
        for _ in range(6):
            run(tf.constant(INPUTS), tf.constant(INPUTS[:, 0]))

    text = said(train)
    assert ("compares each output with each target" in text) is (kind == "mistake")
    if kind == "mistake":
        assert "makes [8, 8] of [8, 1]" in text
        assert "test_step_shapes.py:" in text


@pytest.mark.parametrize("cuts", [True, False])
def test_variables_that_are_changed_by_hand_are_steps(said, cuts):
    def train():
        first, last = tf.Variable(tf.ones((4, 3)), name="first"), tf.Variable(tf.ones((3, 1)))
        for _ in range(30):
            with tf.GradientTape() as tape:
                hidden = INPUTS @ first
                hidden = tf.stop_gradient(hidden) if cuts else hidden
                loss = tf.reduce_mean((hidden @ last) ** 2)
            gradients = tape.gradient(loss, [first, last])
            for each, gradient in zip([first, last], gradients, strict=True):
                if gradient is not None:
                    each.assign_sub(0.01 * gradient)

    text = said(train)
    assert "after 30 steps" in text
    assert ("If first should be trained" in text) is cuts
    assert ("and stop_gradient at" in text) is cuts


def test_gradients_that_change_nothing_are_no_steps(said):
    def train():
        variable = tf.Variable([1.0])
        for _ in range(9):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variable**2)
            tape.gradient(loss, [variable])

    assert "after" not in said(train)


@pytest.mark.parametrize("comes", ["eagerly", "in a graph", "never"])
def test_operations_are_seen_no_more_after_a_step_that_may_be_the_only_one(said, comes):
    from tensorflow.python.eager import execute

    before, seen = execute.execute, []
    variable = tf.Variable(1.0)

    def take():
        with tf.GradientTape() as tape:
            loss = variable * variable
        tape.gradient(loss, [variable])

    def train():
        take()
        seen.append(execute.execute is before)
        if comes == "never":
            for _ in range(3_000):
                tf.add(1.0, 1.0)
        else:
            (tf.function(take) if comes == "in a graph" else take)()
        seen.append(execute.execute is before)

    said(train)
    assert (seen[0], execute.execute is before) == (False, True)
    assert seen[1] is (comes != "in a graph")


@pytest.mark.parametrize("kind", ["mistake", "column", "nan"])
def test_variables_that_a_compiled_function_changes_by_hand_are_steps(said, kind):
    def train():
        weights, bias = tf.Variable(tf.zeros((4, 1)), name="w"), tf.Variable(0.0, name="b")

        @tf.function
        def step(x, y):
            with tf.GradientTape() as tape:
                y = y if kind == "mistake" else y[:, None]
                loss = tf.reduce_mean((x @ weights + bias - y) ** 2)
            gradients = tape.gradient(loss, [weights, bias])
            for each, gradient in zip([weights, bias], gradients, strict=True):
                each.assign_sub(0.1 * gradient)
            return loss

        for number in range(20):
            targets = INPUTS[:, 0] * (np.nan if (kind, number) == ("nan", 12) else 1.0)
            step(tf.constant(INPUTS), tf.constant(targets.astype("float32")))

    text = said(train)
    assert "after 20 steps" in text
    assert ("compares each output with each target" in text) is (kind == "mistake")
    assert ("makes [8, 8] of [8, 1]" in text) is (kind == "mistake")
    assert ("The loss is itself nan, so step 13 was applied" in text) is (kind == "nan")


def test_a_compiled_function_that_changes_nothing_makes_no_step(said):
    def train():
        variable = tf.Variable([1.0])

        @tf.function
        def norm():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variable**2)
            return tf.norm(tape.gradient(loss, [variable])[0])

        for _ in range(9):
            norm()

    assert "after" not in said(train)


@pytest.mark.parametrize("is_compiled", [True, False])
def test_steps_of_replicas_are_seen_or_said_to_be_unknown(said, is_compiled):
    def train():
        strategy = mirrored()
        with strategy.scope():
            model = tf_keras.Sequential([tf_keras.layers.Dense(1)])
            model.build((None, 4))
            optimizer = tf_keras.optimizers.SGD(0.01)
            optimizer.build(model.trainable_variables)

        def on_each(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.sqrt(tf.abs(model(x) - 1.0)))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        def step(x):
            return strategy.reduce("mean", strategy.run(on_each, args=(x,)), axis=None)

        run = tf.function(step) if is_compiled else step
        for number in range(9):
            run(tf.constant(INPUTS * np.float32(np.nan if number == 5 else 1.0)))

    text = said(train)
    assert ("The loss is itself nan, so step 6 was applied" in text) is is_compiled
    assert ("of several replicas, losses and weights are watched" in text) is is_compiled
    assert ("the steps of several replicas are not watched eagerly" in text) is not is_compiled
    assert "train on one, with all of the batch" in text


def test_an_error_in_a_compiled_function_names_no_frame_of_ours(said):
    texts = []

    def train():
        @tf.function
        def step(x):
            return tf.reshape(x, (3, 5))

        with pytest.raises(ValueError, match="reshape") as caught:
            step(tf.constant(INPUTS))
        texts.append(str(caught.value))

    train()
    said(train)
    assert texts[0] == texts[1]


def by_numpy(outputs):
    return tf.convert_to_tensor(np.square(np.array(outputs)).mean())


def by_argmax(outputs):
    return tf.reduce_mean(tf.cast(tf.argmax(outputs), tf.float32))


def by_method(outputs):
    return tf.constant(float(outputs.numpy().mean()))


def without_cut(outputs):
    return tf.reduce_mean(outputs**2) * np.float32(0.5) * np.prod((2, 3))


CUTS = {by_numpy: "np.array at", by_argmax: "tf.argmax at", by_method: "outputs.numpy at"}


class Trainer:
    def __init__(self, loss_of, optimizer):
        self.loss_of, self.optimizer = loss_of, optimizer
        self.weight = tf.Variable(tf.ones((4, 1)), name="weight")

    def loss(self, x):
        return self.loss_of(x @ self.weight)

    def step(self):
        with tf.GradientTape() as tape:
            loss = self.loss(tf.constant(INPUTS))
        gradients = tape.gradient(loss, [self.weight])
        self.optimizer.apply_gradients([(gradients[0], self.weight)])


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("loss_of", [*CUTS, without_cut])
def test_the_call_that_cuts_all_gradients_off_is_named_before_the_error(said, loss_of, is_compiled):
    if is_compiled and loss_of in (by_numpy, by_method):
        return  # TensorFlow's own error comes first

    def train():
        trainer = Trainer(loss_of, tf_keras.optimizers.SGD(0.01))
        step = tf.function(trainer.step) if is_compiled else trainer.step
        if loss_of is without_cut:
            step()
            return
        with pytest.raises(ValueError, match="No gradients provided"):
            step()

    text = said(train)
    if loss_of is without_cut:
        assert "No gradient of" not in text
        return
    assert "No gradient of weight exists, so the optimizer cannot step" in text
    line = loss_of.__code__.co_firstlineno + 1
    assert f"{CUTS[loss_of]} " in text
    assert f"test_step_shapes.py:{line} passes no gradient on" in text


def test_gradients_that_are_none_outside_of_the_tape_are_told(said):
    def train():
        weight, optimizer = tf.Variable(1.0), tf_keras.optimizers.SGD(0.01)
        with tf.GradientTape() as tape:
            pass
        loss = weight * 2
        with pytest.raises(ValueError, match="No gradients provided"):
            optimizer.apply_gradients([(tape.gradient(loss, weight), weight)])

    assert "Compute the loss under the tape, by operations of TensorFlow alone." in said(train)


@pytest.mark.parametrize("is_returned", [True, False])
def test_two_optimizers_of_a_compiled_step_have_a_loss_each(said, is_returned):
    def train():
        weights = [tf.Variable(tf.ones((4, 1)) * n, name=f"w{n}") for n in (1.0, 2.0)]
        optimizers = [tf_keras.optimizers.SGD(0.01) for _ in weights]

        @tf.function
        def step(x):
            with tf.GradientTape(persistent=True) as tape:
                losses = [tf.reduce_mean((x @ each) ** 2) for each in weights]
            for loss, each, optimizer in zip(losses, weights, optimizers):  # noqa: B905 # traced
                optimizer.apply_gradients([(tape.gradient(loss, each), each)])
            return (losses[1], losses[0]) if is_returned else tf.constant(0)

        for _ in range(30):
            step(tf.constant(INPUTS))

    text = said(train)
    first = [float(np.mean((INPUTS @ np.full((4, 1), n, "float32")) ** 2)) for n in (1, 2)]
    for loss in first:
        assert (f"the loss went from {loss:.4g}"[:-1] in text) is is_returned
