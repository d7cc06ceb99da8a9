"""An eps that outweighs the gradients is told in each framework whose optimizers show theirs."""

import importlib
import os
from types import SimpleNamespace

import numpy as np
import pytest

import gradscaler
from gradscaler import FixedScale
from gradscaler.diagnose import Monitor
from gradscaler.diagnose._monitor.parameters import eps_of

FRAMEWORK = os.environ.get("GRADSCALER_FRAMEWORK", "torch").replace("-", "_")
if FRAMEWORK == "jax":
    pytest.skip("optax keeps an eps in functions", allow_module_level=True)
framework = pytest.importorskip(FRAMEWORK)
ours = importlib.import_module(f"gradscaler.{FRAMEWORK}")
IS_KERAS = FRAMEWORK in ("keras", "tf_keras")
WITH_TAPE = IS_KERAS and framework.backend.backend() == "tensorflow"

NUM_STEPS = 30
INPUTS = np.random.default_rng(0).standard_normal((32, 8)).astype("float32")
TARGETS = INPUTS.sum(1, keepdims=True)
TINY = 1e-10  # times the loss
# The optimizer, its rate, and what the loss is multiplied by, of trainings that learn.
HEALTHY = {"Adam": ("Adam", 0.1, 1e-3), "SGD": ("SGD", 0.05 / TINY, TINY)}
# Of those whose steps have a size of their own.
HAS_MUON = hasattr(getattr(framework, "optim", None), "Muon")
NORMALIZED = "Muon" if HAS_MUON else None if FRAMEWORK == "tf_keras" else "Lamb"


def optimizer_of(name, rate, parameters):
    if FRAMEWORK == "mindspore":
        return getattr(framework.nn, name)(parameters, learning_rate=rate)
    if FRAMEWORK == "paddle":
        return getattr(framework.optimizer, name)(rate, parameters=parameters)
    if IS_KERAS:
        return getattr(framework.optimizers, name)(rate)
    return getattr(framework.optim, name)(parameters, lr=rate)


def by_backward(name, rate, factor, scaler):
    """PyTorch, TensorPlay and Paddle."""
    is_paddle = FRAMEWORK == "paddle"
    (framework.seed if is_paddle else framework.manual_seed)(0)
    tensor = framework.to_tensor if is_paddle else framework.tensor
    model = framework.nn.Linear(8, 1)
    inputs, targets = tensor(INPUTS), tensor(TARGETS)
    optimizer = optimizer_of(name, rate, model.parameters())
    with Monitor(scaler, model) if scaler else SimpleMonitor() as monitor:
        for _ in range(NUM_STEPS):
            loss = (model(inputs) - targets).square().mean() * factor
            (scaler.scale(loss) if scaler else loss).backward()
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            (optimizer.clear_grad if is_paddle else optimizer.zero_grad)()
        return monitor.verdict


def by_record(name, rate, factor):
    """Keras' scaler, whose steps are recorded."""
    if FRAMEWORK == "keras":
        weight = framework.Variable(np.zeros((8, 1), "float32"), name="weight")
        number, tensor = framework.ops.convert_to_numpy, framework.ops.convert_to_tensor
    else:
        tensorflow = importlib.import_module("tensorflow")
        weight = tensorflow.Variable(np.zeros((8, 1), "float32"), name="weight")
        number, tensor = np.asarray, tensorflow.constant
    optimizer = ours.LossScaleOptimizer(optimizer_of(name, rate, ()), policy=FixedScale(1.0))
    optimizer.build([weight])
    with Monitor(optimizer, SimpleNamespace(trainable_variables=[weight])) as monitor:
        for _ in range(NUM_STEPS):
            off = INPUTS @ number(weight) - TARGETS
            gradient = np.float32(factor * 2 / len(off)) * (INPUTS.T @ off)
            if FRAMEWORK == "keras":
                optimizer.scale_loss(1.0)
                optimizer.apply([tensor(gradient)], [weight])
            else:
                optimizer.get_scaled_loss(tensor(1.0))
                optimizer.get_unscaled_gradients([tensor(gradient)])
                optimizer.apply_gradients([(tensor(gradient), weight)])
            monitor.record(gradients=[gradient], loss=factor * (off**2).mean())
        return monitor.verdict


def by_tape(name, rate, factor):
    import tensorflow as tf

    model = framework.Sequential([framework.layers.Dense(1)])
    model.build((None, 8))
    optimizer = optimizer_of(name, rate, ())
    for _ in range(NUM_STEPS):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(INPUTS) - TARGETS) ** 2) * factor
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


def by_function(name, rate, factor):
    """MindSpore."""
    model = framework.nn.Dense(8, 1)
    weights = model.trainable_params()
    inputs, targets = framework.Tensor(INPUTS), framework.Tensor(TARGETS)
    optimizer = optimizer_of(name, rate, weights)
    take = framework.value_and_grad(
        lambda: (model(inputs) - targets).square().mean() * factor, None, weights
    )
    for _ in range(NUM_STEPS):
        optimizer(take()[1])


class SimpleMonitor:
    """In place of a monitor, where the watch of the process has one."""

    verdict = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def verdicts(tmp_path, *training):
    """The verdicts on a training, with a scaler's monitor and under a watch of the process."""
    if not IS_KERAS and FRAMEWORK != "mindspore":
        yield by_backward(*training, ours.GradScaler(policy=FixedScale(1.0)))
    elif IS_KERAS:
        yield by_record(*training)
    with gradscaler.watch(tmp_path) as watch:
        if FRAMEWORK == "mindspore":
            by_function(*training)
        elif WITH_TAPE:
            by_tape(*training)
        elif not IS_KERAS:
            by_backward(*training, None)
        else:
            return
    yield watch.verdict


@pytest.mark.filterwarnings("ignore::gradscaler.diagnose.FindingWarning")
def test_adam_of_a_tiny_loss_is_told(tmp_path):
    eps = {"keras": "1e-07", "tf_keras": "1e-07"}.get(FRAMEWORK, "1e-08")
    for verdict in verdicts(tmp_path, "Adam", 1e-3, TINY):
        assert [each.kind for each in verdict.findings] == ["eps"]
        assert f"below the optimizer's eps of {eps}" in verdict.text


@pytest.mark.filterwarnings("ignore::gradscaler.diagnose.FindingWarning")
@pytest.mark.parametrize("training", HEALTHY)
def test_a_loss_that_falls_has_an_eps_that_fits(training, tmp_path):
    for verdict in verdicts(tmp_path, *HEALTHY[training]):
        assert "eps" not in [each.kind for each in verdict.findings], verdict.text


@pytest.mark.skipif(NORMALIZED is None, reason="Keras 2 has none")
def test_an_eps_does_not_matter_where_a_step_has_a_size_of_its_own():
    held = None
    if FRAMEWORK == "mindspore":
        held = framework.nn.Dense(8, 1).trainable_params()
    elif not IS_KERAS:
        held = [each for each in framework.nn.Linear(8, 1).parameters() if each.ndim == 2]
    assert eps_of(optimizer_of("Adam", 0.1, held)) > 0
    assert eps_of(optimizer_of(NORMALIZED, 0.1, held)) is None
