"""A training loop that forgets to scale its loss is warned, once; a loop that scales is not.

Gradients of an unscaled loss become 2**-15 of their size, so hardly any weight moves.
"""

import warnings

import keras
import numpy as np
import pytest

from gradscaler import DynamicScale, FixedScale
from gradscaler.keras import LossScaleOptimizer
from tests.support.keras_like import BACKEND, numpy

SGD = keras.optimizers.SGD
NEVER = "The loss was never scaled"
INPUTS = np.ones((8, 2), "float32")


@pytest.fixture
def warned(recwarn):
    """A function that returns the warnings so far, each as often as it was given."""
    warnings.simplefilter("always")
    texts = NEVER, "get_unscaled_gradients"
    return lambda: [each for each in recwarn.list if str(each.message).startswith(texts)]


def unscaled(value):
    return value


def loop(optimizer, variable, scale=unscaled, compiled=False, steps=3, bad=()):
    """Steps as Keras' guides write them for each backend, for the loss ``sum(variable**2)``."""
    if not optimizer.built:
        optimizer.build([variable])
    step = {"tensorflow": _on_tensorflow, "jax": _on_jax, "torch": _on_torch}[BACKEND](
        optimizer, variable, scale, compiled
    )
    for index in range(steps):
        step(np.float32(np.inf if index in bad else 1.0))


def _on_tensorflow(optimizer, variable, scale, compiled):
    import tensorflow as tf

    def step(factor):
        with tf.GradientTape() as tape:
            loss = scale(tf.reduce_sum(variable.value**2) * factor)
        optimizer.apply(tape.gradient(loss, [variable.value]), [variable])

    return tf.function(step) if compiled else step


def _on_jax(optimizer, variable, scale, compiled):
    import jax

    def pure(values, state, factor):
        def loss(values):
            with keras.StatelessScope(zip(optimizer.variables, state, strict=True)):
                return scale((values[0] ** 2).sum() * factor)

        return optimizer.stateless_apply(state, jax.grad(loss)(values), values)

    pure = jax.jit(pure) if compiled else pure

    def step(factor):
        state = [each.value for each in optimizer.variables]
        values, state = pure([variable.value], state, factor)
        for each, value in zip([variable, *optimizer.variables], [*values, *state], strict=True):
            each.assign(value)

    return step


def _on_torch(optimizer, variable, scale, compiled):
    import torch

    def step(factor):
        variable.value.grad = None
        scale((variable.value**2).sum() * float(factor)).backward()
        with torch.no_grad():
            optimizer.apply([variable.value.grad], [variable])

    return step


@pytest.mark.parametrize("policy", [DynamicScale(2.0**15), FixedScale(2.0**15)], ids=repr)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_loop_that_never_scales_is_warned_once(warned, compiled, policy):
    variable = keras.Variable([1.0])
    optimizer = LossScaleOptimizer(SGD(0.1), policy=policy)
    loop(optimizer, variable, compiled=compiled)
    loop(optimizer, variable, compiled=compiled)
    assert numpy(variable)[0] > 0.999
    assert len(warned()) == 1
    if not (compiled and BACKEND == "tensorflow"):  # AutoGraph runs a translation of the file
        assert warned()[0].filename == __file__
    assert "scale_loss(loss)" in str(warned()[0].message)


def by_hand(read):
    return lambda optimizer: lambda loss: loss * keras.ops.convert_to_tensor(read(optimizer))


SCALED = {
    "scale_loss": lambda optimizer: optimizer.scale_loss,
    "get_scaled_loss": lambda optimizer: optimizer.get_scaled_loss,
    "dynamic_scale": by_hand(lambda optimizer: optimizer.dynamic_scale),
    "loss_scale": by_hand(lambda optimizer: optimizer.loss_scale),
    "initial_scale": by_hand(lambda optimizer: optimizer.initial_scale),
}


@pytest.mark.parametrize("how", SCALED)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_loop_that_scales_is_not_warned(warned, compiled, how):
    variable = keras.Variable([1.0])
    optimizer = LossScaleOptimizer(SGD(0.1))
    loop(optimizer, variable, SCALED[how](optimizer), compiled)
    assert np.isclose(numpy(variable)[0], 0.512)
    assert not warned()


@pytest.mark.parametrize("how", SCALED)
def test_a_loss_scaled_in_another_trace_counts(warned, how):
    """The gradients come from one compiled function, and another one applies them."""
    variable = keras.Variable([1.0])
    optimizer = LossScaleOptimizer(SGD(0.1))
    optimizer.build([variable])
    scale = SCALED[how](optimizer)
    if BACKEND == "tensorflow":
        import tensorflow as tf

        @tf.function
        def gradients():
            with tf.GradientTape() as tape:
                loss = scale(tf.reduce_sum(variable.value**2))
            return tape.gradient(loss, [variable.value])

        apply = tf.function(lambda grads: optimizer.apply(grads, [variable]))
        for _ in range(3):
            apply(gradients())
        found = numpy(variable)
    elif BACKEND == "jax":
        import jax

        def loss(values, state):
            with keras.StatelessScope(zip(optimizer.variables, state, strict=True)):
                return scale((values[0] ** 2).sum())

        gradients, apply = jax.jit(jax.grad(loss)), jax.jit(optimizer.stateless_apply)
        values, state = [variable.value], [each.value for each in optimizer.variables]
        for _ in range(3):
            values, state = apply(state, gradients(values, state), values)
        found = np.array(values[0])
    else:
        pytest.skip("a step of PyTorch runs in Python")
    assert np.isclose(found[0], 0.512)
    assert not warned()


def test_minimize_is_not_warned(warned):
    variable = keras.Variable([1.0])
    LossScaleOptimizer(SGD(0.1)).minimize(lambda: keras.ops.sum(variable**2), [variable])
    assert not warned()


def test_each_of_two_optimizers_is_warned_of_its_own_loss(warned):
    right, wrong, other = (LossScaleOptimizer(SGD(0.1)) for _ in range(3))
    for optimizer in (right, wrong, other):
        scale = right.scale_loss if optimizer is right else unscaled
        loop(optimizer, keras.Variable([1.0]), scale)
    assert len(warned()) == 2


def test_a_step_that_divides_nothing_is_not_warned(warned):
    """A skipped step, and a gradient that is the variable's new value."""
    variable, overwritten = keras.Variable([1.0]), keras.Variable([1.0])
    overwritten.overwrite_with_gradient = True
    optimizer = LossScaleOptimizer(SGD(0.1))
    optimizer.build([variable, overwritten])
    inf, one = keras.ops.convert_to_tensor([np.inf]), keras.ops.ones(1)
    optimizer.apply([inf], [variable])
    optimizer.apply([one], [overwritten])
    optimizer.apply([])
    assert not warned()
    optimizer.apply([one, one], [variable, overwritten])
    assert len(warned()) == 1


def test_a_warning_that_is_an_error_leaves_everything_as_it_was():
    variable = keras.Variable([1.0])
    optimizer = LossScaleOptimizer(SGD(0.1, momentum=0.9))
    optimizer.build([variable])
    before = [numpy(each).tolist() for each in (variable, *optimizer.variables)]
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UserWarning, match=NEVER):
                optimizer.apply([keras.ops.ones(1)], [variable])
    after = [numpy(each).tolist() for each in (variable, *optimizer.variables)]
    assert after == before


class OwnStep(keras.Model):
    """A model with a train_step of its own, as Keras' guides write it for each backend."""

    scales = False

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.dense = keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)

    def call(self, inputs):
        return self.dense(inputs)

    def get_config(self):
        return {}

    def _scaled(self, loss):
        return self.optimizer.scale_loss(loss) if self.scales else loss

    def _loss(self, data):
        inputs, labels = data
        return self._scaled(keras.ops.mean((self(inputs) - labels) ** 2))

    def train_step(self, *arguments):
        return getattr(self, f"_{BACKEND}_step")(*arguments)

    def _tensorflow_step(self, data):
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = self._loss(data)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}

    def _torch_step(self, data):
        import torch

        self.zero_grad()
        loss = self._loss(data)
        loss.backward()
        weights = list(self.trainable_weights)
        with torch.no_grad():
            self.optimizer.apply([weight.value.grad for weight in weights], weights)
        return {"loss": loss}

    def _jax_step(self, state, data):
        import jax

        trainable, others, optimizer_variables, metrics = state
        inputs, labels = data

        def loss(trainable):
            outputs, _ = self.stateless_call(trainable, others, inputs)
            value = keras.ops.mean((outputs - labels) ** 2)
            if self.scales:
                value = self.optimizer.stateless_scale_loss(value, optimizer_variables)
            return value

        value, grads = jax.value_and_grad(loss)(trainable)
        trainable, optimizer_variables = self.optimizer.stateless_apply(
            optimizer_variables, grads, trainable
        )
        return {"loss": value}, (trainable, others, optimizer_variables, metrics)


def fitted(model, **mode):
    model.compile(LossScaleOptimizer(SGD(0.1)), "mse", **mode)
    return fit(model)


def fit(model):
    labels = np.zeros((8, 1), "float32")
    model.fit(INPUTS, labels, batch_size=4, epochs=2, shuffle=False, verbose=0)
    return model


MODES = [{"run_eagerly": True}, *([] if BACKEND == "torch" else [{"jit_compile": False}])]
if BACKEND != "torch":
    MODES.append({"jit_compile": True})


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_fit_warns_of_a_train_step_of_one_s_own_once(warned, mode):
    model = fit(fitted(OwnStep(), **mode))
    assert np.allclose(model.get_weights()[0], 1.0, atol=1e-3)
    assert len(warned()) == 1
    assert warned()[0].filename == __file__


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_fit_warns_of_no_train_step_that_scales(warned, mode):
    model = OwnStep()
    model.scales = True
    fitted(model, **mode)
    expected = OwnStep()
    expected.compile(SGD(0.1), "mse", run_eagerly=True)
    assert np.allclose(model.get_weights()[0], fit(expected).get_weights()[0], rtol=1e-5)
    assert not warned()
    assert len(fitted(keras.Sequential([keras.layers.Dense(1)]), **mode).get_weights()) == 2
    assert not warned()


@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize("file", ["model.keras", "model.weights.h5"])
def test_a_loaded_file_changes_none_of_this(warned, scales, file, tmp_path):
    """Keras' saving reads every attribute, the scale too."""
    saved = OwnStep()
    saved.scales = True
    fitted(saved)
    if file.endswith(".keras"):
        saved.save(tmp_path / file)
        names = {"OwnStep": OwnStep}
        model = keras.models.load_model(tmp_path / file, custom_objects=names)
    else:
        saved.save_weights(tmp_path / file)
        model = OwnStep()
        model.compile(LossScaleOptimizer(SGD(0.1)), "mse")
        model(INPUTS)
        model.optimizer.build(model.trainable_variables)
        model.load_weights(tmp_path / file)
    assert int(model.optimizer.iterations) == 4
    model.scales = scales
    fit(model)
    assert len(warned()) == (not scales)


@pytest.mark.parametrize("name", ["dynamic_scale", "initial_scale"])
def test_apply_gradients_knows_a_loss_scaled_by_hand(warned, name):
    """As with Keras' own wrapper, it divides."""
    variable = keras.Variable(1.0)
    optimizer = LossScaleOptimizer(SGD(0.5))
    scale = keras.ops.convert_to_tensor(getattr(optimizer, name))
    optimizer.apply_gradients([(keras.ops.ones(()) * scale, variable)])
    assert numpy(variable) == 0.5
    assert not warned()


def test_apply_gradients_warns_of_gradients_unscaled_by_hand(warned):
    """Keras 2's wrapper would not divide them again."""
    optimizer = LossScaleOptimizer(SGD(0.5))
    grad = keras.ops.ones(()) * optimizer.loss_scale / optimizer.loss_scale
    optimizer.apply_gradients([(grad, keras.Variable(1.0))])
    optimizer.apply([grad])
    (warning,) = warned()
    assert str(warning.message).startswith("get_unscaled_gradients() was never called")
