"""The monitor on the scaler of the framework that GRADSCALER_FRAMEWORK names."""

import importlib
import math
import os
from types import SimpleNamespace

import numpy as np
import pytest

from gradscaler import DynamicScale, FixedScale
from gradscaler.diagnose import Monitor, StuckError, read_run

FRAMEWORK = os.environ.get("GRADSCALER_FRAMEWORK", "torch").replace("-", "_")
pytest.importorskip(FRAMEWORK)
EAGER = ("torch", "tensorplay", "paddle")

RULE = DynamicScale(init_scale=8.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=3)
FINITE = [True, True, True, True, False, True, False, False, True, True, True, True]
GRADIENT = np.float32([0.0, 2.0**-30, 2.0**-20, 3.0, -4.0])


def by_policy(policy, finite):
    """The scales that steps use."""
    state, scales = policy.init(), []
    for flag in finite:
        scales.append(float(state.scale))
        state = policy.update(state, not flag)
    return scales


# Each is a scaler with one parameter, `weight`, of five elements: `step(finite)` gives it the
# gradient above, or that with an Inf, and tells the monitor of it where the scaler does not.


def torch_like(framework, policy):
    module = importlib.import_module(f"gradscaler.{framework.__name__}")
    model = framework.nn.Module()
    model.weight = framework.nn.Parameter(framework.zeros(5))
    optimizer = framework.optim.SGD(model.parameters(), lr=0.0)
    scaler = module.GradScaler(policy=policy)

    def step(finite, monitor, forensics):
        optimizer.zero_grad()
        scaler.scale(model.weight.sum()).backward()
        grad = model.weight.grad
        grad.copy_(grad * framework.tensor(gradient(finite).tolist()))
        scaler.step(optimizer)
        scaler.update()

    return scaler, model, step


def on_torch(policy):
    return torch_like(importlib.import_module("torch"), policy)


def on_tensorplay(policy):
    return torch_like(importlib.import_module("tensorplay"), policy)


def on_paddle(policy):
    import paddle

    from gradscaler.paddle import GradScaler

    model = paddle.nn.Layer()
    model.weight = model.create_parameter([5])
    optimizer = paddle.optimizer.SGD(0.0, model.parameters())
    scaler = GradScaler(policy=policy)

    def step(finite, monitor, forensics):
        factor = paddle.to_tensor(gradient(finite))
        handle = model.weight.register_hook(lambda grad: grad * factor)
        scaler.scale(model.weight.sum()).backward()
        handle.remove()
        scaler.step(optimizer)
        scaler.update()
        optimizer.clear_grad()

    return scaler, model, step


def on_jax(policy):
    import jax

    from gradscaler.jax import GradScaler

    state = SimpleNamespace(scaler=GradScaler(policy))
    adjust = jax.jit(GradScaler.adjust, donate_argnums=0)

    def step(finite, monitor, forensics):
        state.scaler = adjust(state.scaler, jax.numpy.array(finite))
        grads = {"weight": jax.numpy.array(gradient(finite))} if forensics else None
        told = None if isinstance(policy, DynamicScale) else jax.numpy.array(finite)
        monitor.record(scaler=state.scaler, gradients=grads, finite=told)

    return state.scaler, None, step


def traced(policy, scaler, adjust):
    """A scaler of JAX, and what makes the next one of it, of gradients and whether they are."""
    import jax

    state = SimpleNamespace(scaler=scaler)
    adjust = jax.jit(adjust, donate_argnums=0)

    def step(finite, monitor, forensics):
        grads = {"weight": jax.numpy.array(gradient(finite))}
        flag = jax.numpy.array(finite)
        state.scaler = adjust(state.scaler, grads, flag)
        told = None if hasattr(policy, "growth_interval") or isinstance(scaler, tuple) else flag
        monitor.record(scaler=state.scaler, gradients=grads if forensics else None, finite=told)

    return scaler, None, step


def on_jax_optax(policy):
    import jax
    import optax

    from gradscaler.jax import loss_scaled

    weight = {"weight": jax.numpy.zeros(5)}
    optimizer = optax.chain(optax.identity(), loss_scaled(optax.sgd(0.0), policy))
    return traced(
        policy, optimizer.init(weight), lambda state, grads, _: optimizer.update(grads, state)[1]
    )


def on_jax_jmp(policy):
    import jax

    from gradscaler.jax import jmp

    if isinstance(policy, FixedScale):
        scaler = jmp.StaticLossScale(jax.numpy.float32(policy.scale))
    else:
        scaler = jmp.DynamicLossScale(
            jax.numpy.float32(policy.init_scale),
            period=policy.growth_interval,
            factor=policy.growth_factor,
            min_loss_scale=np.float32(policy.min_scale),
        )
    return traced(policy, scaler, lambda scaler, _, finite: scaler.adjust(finite))


def on_jax_flax(policy):
    import jax

    from gradscaler.jax.flax import DynamicScale as FlaxScale

    scaler = FlaxScale(
        policy.growth_factor,
        policy.backoff_factor,
        policy.growth_interval - 1,  # it grows a step later
        scale=policy.init_scale,
    )

    def adjust(scaler, grads, finite):
        value = jax.numpy.where(finite, 1.0, jax.numpy.inf)
        return scaler.value_and_grad(lambda x: x * value)(1.0).dynamic_scale

    return traced(policy, scaler, adjust)


def on_keras(policy):
    import keras

    from gradscaler.keras import LossScaleOptimizer

    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.0), policy=policy)
    variable = keras.Variable(np.zeros(5, np.float32), name="weight")
    optimizer.build([variable])

    def step(finite, monitor, forensics):
        grad = keras.ops.convert_to_tensor(gradient(finite))
        optimizer.apply([grad * optimizer.loss_scale], [variable])
        monitor.record(gradients=[grad] if forensics else None)

    return optimizer, SimpleNamespace(trainable_variables=[variable]), step


def on_tf_keras(policy):
    import tensorflow as tf
    import tf_keras

    from gradscaler.tf_keras import LossScaleOptimizer

    optimizer = LossScaleOptimizer(tf_keras.optimizers.SGD(0.0), policy=policy)
    variable = tf.Variable(np.zeros(5, np.float32), name="weight")
    optimizer.build([variable])

    def step(finite, monitor, forensics):
        grad = tf.constant(gradient(finite))
        optimizer.get_scaled_loss(tf.constant(1.0))
        optimizer.get_unscaled_gradients([grad])
        optimizer.apply_gradients([(grad, variable)])
        told = None if isinstance(policy, DynamicScale) else tf.constant(finite)
        monitor.record(gradients=[grad] if forensics else None, finite=told)

    return optimizer, SimpleNamespace(trainable_variables=[variable]), step


def on_mindspore(policy):
    from mindspore import Parameter, Tensor

    from gradscaler.mindspore import DynamicLossScaler, StaticLossScaler

    moves = isinstance(policy, DynamicScale)
    scaler = DynamicLossScaler(policy=policy) if moves else StaticLossScaler(policy.scale)
    weight = Parameter(Tensor(np.zeros(5, np.float32)), name="weight")

    def step(finite, monitor, forensics):
        scaler.adjust(Tensor(finite))
        grads = [Tensor(gradient(finite))] if forensics else None
        monitor.record(gradients=grads, finite=None if moves else Tensor(finite))

    return scaler, SimpleNamespace(trainable_params=lambda: [weight]), step


def on_mindspore_manager(policy):
    from mindspore import Tensor

    from gradscaler.mindspore import DynamicLossScaleManager, FixedLossScaleManager

    moves = isinstance(policy, DynamicScale)
    if moves:
        manager = DynamicLossScaleManager(policy=policy)
    else:
        manager = FixedLossScaleManager(policy.scale)

    def step(finite, monitor, forensics):
        manager.update_loss_scale(not finite)
        grads = {"weight": Tensor(gradient(finite))} if forensics else None
        monitor.record(gradients=grads, finite=None if moves else finite)

    return manager, None, step


def on_mindspore_cell(policy):
    from mindspore import Tensor, nn

    from gradscaler.mindspore import (
        DynamicLossScaleUpdateCell,
        FixedLossScaleUpdateCell,
        TrainOneStepWithLossScaleCell,
    )

    moves = isinstance(policy, DynamicScale)
    network = nn.WithLossCell(nn.Dense(5, 1, has_bias=False), nn.MSELoss())
    optimizer = nn.SGD(network.trainable_params(), learning_rate=1e-9)
    if moves:
        cell = DynamicLossScaleUpdateCell(policy=policy)
    else:
        cell = FixedLossScaleUpdateCell(policy.scale)
    train = TrainOneStepWithLossScaleCell(network, optimizer, cell)

    def step(finite, monitor, forensics):
        inputs = np.full((1, 5), 1.0 if finite else math.inf, np.float32)
        loss, overflow, _ = train(Tensor(inputs), Tensor(np.zeros((1, 1), np.float32)))
        grads = {"weight": Tensor(gradient(finite))} if forensics else None
        monitor.record(gradients=grads, finite=None if moves else not overflow, loss=loss)

    return train, network, step


def gradient(finite):
    return GRADIENT if finite else np.concatenate([GRADIENT[:-1], np.float32([math.inf])])


@pytest.fixture
def train():
    """Trains under a monitor, and returns that."""

    def run(policy, finite, driver=FRAMEWORK, **options):
        scaler, model, step = globals()[f"on_{driver}"](policy)
        monitor = Monitor(scaler, model, **options)
        for flag in finite:
            step(flag, monitor, options.get("forensics", 1))
        return monitor

    return run


DRIVERS = {
    "jax": ["jax", "jax_optax", "jax_jmp", "jax_flax"],
    "mindspore": ["mindspore", "mindspore_manager", "mindspore_cell"],
}.get(FRAMEWORK, [FRAMEWORK])


@pytest.mark.parametrize("forensics", [0, 1])
@pytest.mark.parametrize("policy", [RULE, FixedScale(64.0)], ids=["dynamic", "fixed"])
@pytest.mark.parametrize("driver", DRIVERS)
def test_the_history_is_what_the_policy_says(train, driver, policy, forensics):
    if driver == "jax_flax" and policy is not RULE:
        pytest.skip("flax's always moves")
    history = train(policy, FINITE, driver, every=5, forensics=forensics).history
    assert [step.step for step in history] == list(range(1, len(FINITE) + 1))
    assert [not step.skipped for step in history] == FINITE
    assert [step.scale for step in history] == by_policy(policy, FINITE)


def test_a_growth_that_the_largest_scale_forbids_is_no_skip(train):
    policy = DynamicScale(init_scale=8.0, growth_interval=1, max_scale=8.0)
    history = train(policy, [True, True, False, True, True, True], every=3, forensics=0).history
    assert [step.skipped for step in history] == [False, False, True, False, False, False]


def test_a_skip_names_the_parameter(train):
    first, second = train(RULE, [True, False]).history
    assert first.nonfinite is None
    (found,) = second.nonfinite
    assert (found.name, found.shape, found.num_inf, found.num_nan) == ("weight", (5,), 1, 0)
    assert found.dtype == "float32"


@pytest.mark.skipif(FRAMEWORK in EAGER, reason="the scaler tells of the steps")
def test_variables_of_one_name_are_told_apart():
    variables = [SimpleNamespace(name="kernel:0", dtype="float32") for _ in range(2)]
    scaler, _, _ = globals()[f"on_{FRAMEWORK}"](RULE)
    monitor = Monitor(scaler, SimpleNamespace(trainable_variables=variables))
    monitor.record(gradients=[gradient(finite=False)] * 2, finite=False)
    assert [found.name for found in monitor.history[0].nonfinite] == ["kernel", "kernel (2)"]


def test_each_second_skip_is_looked_into_where_that_is_asked_for(train):
    history = train(RULE, [False] * 4, forensics=2).history
    assert [step.nonfinite is None for step in history] == [True, False, True, False]


def test_a_sample_tells_of_the_true_gradients_at_the_scale_in_use(train, tmp_path):
    path = tmp_path / "run.jsonl"
    train(RULE, FINITE[:4], every=4, path=path).close()
    run = read_run(path)
    (sample,) = run.samples
    assert run.starts[0].framework == FRAMEWORK
    assert (sample.step, sample.steps, sample.skips) == (4, 4, ())
    assert sample.scales == ((1, 8.0), (4, 32.0))
    assert sample.norm == pytest.approx(5.0)
    # 2**-30 * 2**5 is half of float16's smallest number, and 2**-20 * 2**5 one of its subnormals.
    shares = sample.shares
    assert (shares.zero, shares.flushed, shares.subnormal, shares.normal) == (0.2, 0.2, 0.2, 0.4)
    assert sample.histogram.first == -30
    assert sample.histogram.counts[0] == sample.histogram.counts[10] == 1
    assert list(sample.parameters) == list(sample.worst) == ["weight"]


def test_a_file_says_that_a_scale_does_not_move(train, tmp_path):
    path = tmp_path / "run.jsonl"
    train(FixedScale(64.0), [], path=path).close()
    expected = {"name": "FixedScale", "scale": 64.0}
    if FRAMEWORK == "mindspore":  # whose static scaler has no policy
        expected = {"name": "StaticLossScaler"}
    assert read_run(path).starts[0].policy == expected


@pytest.mark.parametrize("forensics", [0, 1])
def test_stuck_it_raises_and_a_file_says_so(train, tmp_path, forensics):
    path = tmp_path / "run.jsonl"
    options = {"stuck_after": 4, "on_stuck": "raise", "every": 6, "path": path}
    tells = FRAMEWORK in ("torch", "tensorplay", "paddle")
    with pytest.raises(StuckError, match="overflow" if tells or forensics else "are Inf or NaN"):
        train(RULE, [True, True, *[False] * 9], forensics=forensics, **options)
    (verdict,) = read_run(path).verdicts
    assert verdict.verdict == "floor"
    assert verdict.step == (7 if tells and not forensics else 6)  # it looks into one step more


class Parameter:
    """An array that counts how often it is read."""

    dtype, shape = np.dtype(np.float32), (2,)
    num_read = 0

    def __array__(self, dtype=None, copy=None):
        self.num_read += 1
        return np.float32([1.0, math.nan])


@pytest.fixture
def record():
    """A monitor for which two skips in a row are too many, and what tells it of a step."""
    if FRAMEWORK in EAGER:
        pytest.skip("the scaler tells of the steps")
    scaler, model, _ = globals()[f"on_{FRAMEWORK}"](RULE)
    monitor = Monitor(scaler, model, stuck_after=2, on_stuck="continue", every=1)
    return monitor, monitor.record


def test_parameters_are_looked_at_when_it_is_stuck_alone(record):
    monitor, record = record
    parameter = Parameter()
    for finite in (True, False, True, False):
        record(finite=finite, parameters={"dense": {"kernel": parameter}})
    assert parameter.num_read == 0
    record(finite=False, parameters={"dense": {"kernel": parameter}})
    assert parameter.num_read == 1
    assert (monitor.verdict.kind, monitor.verdict.where) == ("parameter", "dense.kernel")


@pytest.mark.parametrize("what", ["parameters", "gradients"])
def test_what_is_no_array_is_refused_and_nothing_is_recorded(record, what):
    monitor, record = record
    with pytest.raises(TypeError, match="kernel is 'w'"):
        record(finite=True, **{what: {"kernel": "w"}})
    assert monitor.history == ()


@pytest.mark.skipif(FRAMEWORK != "jax", reason="JAX alone deletes what it is given for good")
def test_parameters_that_are_deleted_are_not_looked_at(record):
    import jax

    monitor, record = record
    parameters = jax.numpy.array([math.nan])
    for _ in range(2):
        record(finite=False, parameters=parameters)
    assert monitor.verdict.kind == "parameter"
    parameters.delete()
    assert monitor.verdict.kind != "parameter"


def test_a_scaler_that_tells_by_itself_needs_no_record(train):
    monitor = train(RULE, [True])
    if FRAMEWORK in EAGER:
        with pytest.raises(TypeError, match="by itself"):
            monitor.record()
    else:
        monitor.close()
        monitor.record(finite=True)  # closed, it takes no more
        assert len(monitor.history) == 1


@pytest.mark.skipif(FRAMEWORK != "paddle", reason="the others need update()")
def test_steps_without_update_are_told_apart(train):
    scaler, model, step = on_paddle(FixedScale(64.0))
    scaler.update = lambda: None
    monitor = Monitor(scaler, model)
    for finite in FINITE:
        step(finite, monitor, forensics=1)
    monitor.close()
    assert [not step.skipped for step in monitor.history] == FINITE


def test_a_callback_is_for_keras_alone(train):
    if FRAMEWORK not in ("keras", "tf_keras"):
        with pytest.raises(TypeError, match=f"a scaler for {FRAMEWORK}"):
            train(RULE, []).callback()


@pytest.mark.skipif(FRAMEWORK not in ("keras", "tf_keras"), reason="it is Keras'")
@pytest.mark.parametrize("policy", [RULE, FixedScale(64.0)], ids=["dynamic", "fixed"])
def test_the_callback_records_each_step_of_fit(policy):
    keras = importlib.import_module(FRAMEWORK)
    module = importlib.import_module(f"gradscaler.{FRAMEWORK}")
    if FRAMEWORK == "tf_keras" and policy is not RULE:
        pytest.skip("nothing tells of a skip where the scale does not move")
    optimizer = module.LossScaleOptimizer(keras.optimizers.SGD(0.01), policy=policy)
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    inputs = np.float32([[1.0] if finite else [math.inf] for finite in FINITE])
    monitor = Monitor(optimizer, every=5)
    model.fit(
        inputs,
        np.zeros((len(FINITE), 1)),
        batch_size=1,
        shuffle=False,
        verbose=0,
        callbacks=[monitor.callback()],
    )
    assert [not step.skipped for step in monitor.history] == FINITE
    assert [step.scale for step in monitor.history] == by_policy(policy, FINITE)
