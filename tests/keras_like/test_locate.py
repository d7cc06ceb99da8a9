"""``locate`` for models of Keras 3, on each backend, and of Keras 2: which operation it names."""

import inspect
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from gradscaler.diagnose import Monitor, locate
from tests.support.keras_like import BACKEND, KERAS_3, LossScaleOptimizer, keras, numpy

INPUTS = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
WITH_NAN = INPUTS.copy()
WITH_NAN[3, 1] = np.nan
MASK = np.array([[True, False] * 2])
INF, layers = np.inf, keras.layers

if KERAS_3:
    ops = keras.ops
else:
    import tensorflow as tf

    ops = SimpleNamespace(
        **{name: getattr(tf, name) for name in ("where", "sqrt", "exp", "cast", "norm")},
        log=tf.math.log,
        relu=tf.nn.relu,
        softmax=tf.nn.softmax,
        mean=tf.reduce_mean,
        std=tf.math.reduce_std,
        arccos=tf.acos,
        power=tf.pow,
    )


class Log(layers.Layer):
    """A layer of the user's own, in which an operation fails."""

    def call(self, inputs):
        return ops.log(inputs * 0)


class Root(layers.Layer):
    def call(self, inputs):
        return ops.sqrt(inputs * 0)


class Block(layers.Layer):
    """A layer that holds one."""

    def __init__(self):
        super().__init__(name="block")
        self.inner = Log(name="inner")

    def call(self, inputs):
        return self.inner(inputs)


def make(*more):
    keras.utils.set_random_seed(0)
    own = [layers.Dense(8, "relu", name="first"), layers.Dense(4, name="last")]
    first = keras.Input((4,)) if KERAS_3 else layers.InputLayer((4,))
    model = keras.Sequential([first, *own, *more])
    model(INPUTS)
    return model


def make_with_state():
    """A model with statistics and random numbers."""
    return make(layers.BatchNormalization(), layers.Dropout(0.5, seed=0))


def step_of(model, loss_of, inputs=INPUTS):
    """A step in the way of the backend: it returns the loss and the gradients."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        @tf.function
        def step():
            with tf.GradientTape() as tape:
                loss = loss_of(model(inputs, training=True))
            return loss, tape.gradient(loss, model.trainable_variables)

        return step
    if BACKEND == "jax":
        import jax

        def of_variables(trainable, others):
            return loss_of(model.stateless_call(trainable, others, inputs, training=True)[0])

        def step():
            variables = model.trainable_variables, model.non_trainable_variables
            values = ([variable.value for variable in each] for each in variables)
            return jax.jit(jax.value_and_grad(of_variables))(*values)

        return step

    def step():
        loss = loss_of(model(inputs, training=True))
        loss.backward()
        return loss

    return step


def line_of(function):
    """The line on which a function of one expression begins to compute."""
    lines, first = inspect.getsourcelines(function)
    number = next(n for n, line in enumerate(lines) if "ops." in line)
    return f"{Path(__file__).relative_to(Path.cwd())}:{first + number}"


def named(found):
    return found and (found.kind, found.module, found.operation, found.line)


def log_of_0(y):
    return ops.mean(ops.log(y * 0))


def exp_of_much(y):
    return ops.mean(ops.exp(y * 0 + 1000))


def exp_in_float16(y):
    return ops.mean(ops.exp(ops.cast(y * 0 + 12, "float16")))


def division_by_0(y):
    return ops.mean(1 / (ops.relu(y) * 0))


def power_of_negative(y):
    return ops.mean(ops.power(y * 0 - 1, 0.5))


def std_of_one(y):
    return ops.mean(y) + ops.std(y[:1, :1])


def norm_of_0(y):
    return ops.mean(y) + ops.norm(y * 0)


def root_of_0(y):
    return ops.mean(y) + ops.mean(ops.sqrt(y * 0))


def arccos_of_1(y):
    return ops.mean(ops.arccos(y * 0 + 1))


def unselected_log(y):
    return ops.mean(ops.where(y > 1e9, ops.log(y * 0), y))


FORWARD = {
    log_of_0: "log",
    exp_of_much: "exp",
    exp_in_float16: "exp",
    division_by_0: "div",
    power_of_negative: "pow",
}
# What a function of the framework computes of simpler operations has its name or theirs.
BACKWARD = {
    root_of_0: {"sqrt"},
    norm_of_0: {"sqrt", "norm"},
    std_of_one: {"sqrt", "std"},
    unselected_log: {"log"},
    arccos_of_1: {"acos"},
}


@pytest.mark.parametrize("loss_of", FORWARD)
def test_an_operation_of_the_loss_is_named_with_its_line(loss_of):
    model = make()
    found = locate(model, step_of(model, loss_of))
    assert named(found) == ("forward", None, FORWARD[loss_of], line_of(loss_of))
    assert (found.smallest_divisor == 0) == (loss_of is division_by_0)


@pytest.mark.parametrize(("exponent", "shift"), [(-0.7, 0.0), (20.0, 100.0)])
def test_a_power_tells_its_exponent(exponent, shift):
    model = make()
    found = locate(model, step_of(model, lambda y: ops.mean((y * 0 + shift) ** exponent)))
    assert (found.kind, found.operation) == ("forward", "pow")
    assert found.exponent == pytest.approx(exponent)


@pytest.mark.parametrize("loss_of", BACKWARD)
def test_an_operation_whose_gradient_fails_has_the_line_of_the_forward_pass(loss_of):
    if BACKEND == "torch" and loss_of in (norm_of_0, std_of_one):
        pytest.skip("PyTorch gives a slope of 0 there")
    model = make()
    found = locate(model, step_of(model, loss_of))
    assert (found.kind, found.module, found.line) == ("backward", None, line_of(loss_of))
    assert found.operation in BACKWARD[loss_of]


IN_LAYERS = {
    "forward": (Log, ("forward", "log", "log", "Log")),
    "backward": (Root, ("backward", "root", "sqrt", "Root")),
    "in another": (Block, ("forward", "block.inner", "log", "Log")),
}


@pytest.mark.parametrize("which", IN_LAYERS)
def test_a_layer_of_the_user_s_own_is_named(which):
    layer, expected = IN_LAYERS[which]
    keras.backend.clear_session()  # else a name has a number, as layers of other tests have it
    model = make(layer())
    found = locate(model, step_of(model, ops.mean))
    assert found.line == line_of(Log if layer is Block else layer)
    assert (found.kind, found.module, found.operation, found.type) == expected


def test_an_operation_in_a_layer_of_keras_has_the_line_of_the_call():
    model = make()
    model.get_layer("last").kernel.assign(np.full((8, 4), 1e38))
    found = locate(model, step_of(model, ops.mean))
    assert found.operation == "matmul"
    assert found.line.startswith(str(Path(__file__).relative_to(Path.cwd())))
    assert (found.module, found.type) == ("last", "Dense")


def test_the_rows_of_a_batch_that_hold_a_nan_are_named():
    model = make()
    found = locate(model, step_of(model, ops.mean, WITH_NAN))
    assert (found.kind, found.rows, found.operation) == ("input", "row 3 of 16", "matmul")


def test_a_parameter_that_is_nan_is_named():
    model = make()
    model.get_layer("last").bias.assign([0, np.nan, 0, 0])
    found = locate(model, step_of(model, ops.mean))
    assert (found.bad_parameter, found.type, found.operation) == ("last.bias", "Dense", None)


HEALTHY = {
    "a masked softmax": lambda y: ops.mean(ops.softmax(ops.where(y[:, :1] < INF, y, -INF)) * y),
    "a mask": lambda y: ops.mean(ops.softmax(ops.where(MASK, y, -INF)) ** 2),
    "what reaches no result": lambda y: (ops.log(y * 0), ops.mean(y))[1],
    "integers and booleans": lambda y: ops.mean(ops.cast(ops.cast(y > 0, "int32"), y.dtype) * y),
}


@pytest.mark.parametrize("which", HEALTHY)
def test_what_is_healthy_is_not_named(which):
    model = make()
    assert locate(model, step_of(model, HEALTHY[which])) is None


def test_a_step_with_state_is_healthy():
    model = make_with_state()
    assert locate(model, step_of(model, ops.mean)) is None


def everything(model):
    return [numpy(each) for each in model.variables]


@pytest.mark.parametrize("loss_of", [log_of_0, root_of_0, ops.mean])
def test_the_model_is_left_as_it_was(loss_of):
    model = make_with_state()
    before = everything(model)
    locate(model, step_of(model, loss_of))
    assert all(map(np.array_equal, before, everything(model)))


def test_statistics_and_seeds_are_left_as_they_were():
    """A model that is called as it is changes them; one that ``stateless_call`` calls does not."""
    model = make_with_state()
    before = everything(model)
    assert locate(model, lambda: model(INPUTS, training=True)) is None
    assert all(map(np.array_equal, before, everything(model)))
    model(INPUTS, training=True)
    assert not all(map(np.array_equal, before, everything(model)))


def test_an_error_of_the_closure_passes_through():
    model = make_with_state()
    before = everything(model)

    def closure():
        model(INPUTS, training=True)
        raise KeyError("closure")

    with pytest.raises(KeyError, match="closure"):
        locate(model, closure)
    assert all(map(np.array_equal, before, everything(model)))
    assert locate(model, step_of(model, log_of_0)) is not None


def test_a_model_without_variables_is_refused():
    model = keras.Sequential([layers.Dense(3)])
    with pytest.raises(ValueError, match="call it once before"):
        locate(model, pytest.fail)


@pytest.mark.skipif(BACKEND != "jax", reason="has_aux is JAX's")
def test_what_reaches_no_more_than_an_auxiliary_result_is_said_as_that():
    import jax

    model = make()
    values = [variable.value for variable in model.trainable_variables]

    def loss(trainable):
        y = model.stateless_call(trainable, [], INPUTS)[0]
        return ops.mean(y), ops.log(y * 0 - 1)

    found = locate(model, lambda: jax.value_and_grad(loss, has_aux=True)(values))
    assert (found.operation, found.is_auxiliary) == ("log", True)


def test_the_verdict_names_the_operation_and_the_line():
    model = make()
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1))
    monitor = Monitor(optimizer, model, on_stuck="continue")
    step = step_of(model, log_of_0)
    for _ in range(20):
        monitor.record(finite=False, loss=-INF, replay=lambda: (model, step))
    assert f"makes 64 Inf in float32, by log at {line_of(log_of_0)}" in monitor.verdict.text


def test_an_eps_that_float16_rounds_to_0_is_told():
    layer = layers.Dense(1, use_bias=False, kernel_initializer="ones", dtype="float16")
    model = keras.Sequential([layer])
    model(INPUTS)
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(1e-3, epsilon=1e-8))
    scale = optimizer.scale_loss if KERAS_3 else optimizer.get_scaled_loss
    scale(ops.cast(1.0, "float32"))  # without this call, it would warn
    gradient = ops.cast(np.zeros((4, 1)), "float16")
    optimizer.apply_gradients([(gradient, layer.kernel)])
    assert np.isnan(numpy(layer.kernel)).all()
    monitor = Monitor(optimizer, model, on_stuck="continue")
    for _ in range(20):
        monitor.record(finite=False, loss=np.nan)
    assert "an eps of 1e-08, which is 0 in the float16 of its parameters" in monitor.verdict.text
