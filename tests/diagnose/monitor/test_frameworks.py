"""The monitor on the scaler of the framework that GRADSCALER_FRAMEWORK names."""

import importlib
import math
import os
from contextlib import nullcontext
from itertools import accumulate
from types import SimpleNamespace

import numpy as np
import pytest

from gradscaler import DynamicScale, FixedScale, NonfiniteGradient
from gradscaler.diagnose import Monitor, StuckError, read_run
from tests.support.marked_lines import lines_marked_in

FRAMEWORK = os.environ.get("GRADSCALER_FRAMEWORK", "torch").replace("-", "_")
framework = pytest.importorskip(FRAMEWORK)
ours = importlib.import_module(f"gradscaler.{FRAMEWORK}")
EAGER = ("torch", "tensorplay", "paddle")
IS_KERAS = FRAMEWORK in ("keras", "tf_keras")
ZERO = "clear_grad()" if FRAMEWORK == "paddle" else "zero_grad()"

RULE = DynamicScale(init_scale=8.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=3)
FINITE = [True, True, True, True, False, True, False, False, True, True, True, True]
GRADIENT = np.float32([0.0, 2.0**-30, 2.0**-20, 3.0, -4.0])


def by_policy(policy, finite):
    """The scales that steps use."""
    flags = [not flag for flag in finite]
    states = accumulate(flags[:-1], policy.update, initial=policy.init())
    return [float(state.scale) for state in states]


# An eager training whose gradients are never zeroed.


def unzeroed(zeroes, path, steps=30):
    """The verdict on a training of an eager framework with one loss of Inf."""
    model = framework.nn.Linear(4, 1)
    is_paddle = FRAMEWORK == "paddle"
    kind = framework.optimizer.SGD if is_paddle else framework.optim.SGD
    rate = {"learning_rate" if is_paddle else "lr": 1e-3}
    optimizer = kind(**{"parameters" if is_paddle else "params": model.parameters()}, **rate)
    scaler = ours.GradScaler(policy=DynamicScale(2.0**10))
    with Monitor(scaler, model, path=path, on_stuck="continue") as monitor:
        for number in range(steps):
            outputs = model(framework.ones([8, 4]))
            loss = (outputs * outputs).mean() * (math.inf if number == 3 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if zeroes:
                (optimizer.clear_grad if is_paddle else optimizer.zero_grad)()
        return monitor.verdict


@pytest.mark.skipif(FRAMEWORK not in EAGER, reason="a traced step has no gradients to zero")
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_inf_that_stays_in_a_gradient_shows_that_it_is_not_zeroed(path, monkeypatch, world_size):
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    monkeypatch.setenv("RANK", "0")
    found = unzeroed(zeroes=False, path=path)
    assert found.kind == "misuse"
    assert f"{ZERO} after each step" in found.text
    assert f"{ZERO} after each step" not in unzeroed(zeroes=True, path=None).text


# A training of Paddle or TensorPlay, whose failures are watched: FAILURES has their batches.

SEES_OPERATIONS = pytest.mark.skipif(
    FRAMEWORK not in ("tensorplay", "paddle"), reason="PyTorch's loss has a graph to read"
)
line_of = lines_marked_in(__file__)


@pytest.mark.filterwarnings("ignore:When training, we now always track:UserWarning")  # Paddle's
@pytest.mark.skipif(FRAMEWORK not in EAGER, reason="its buffers are not at hand")
@pytest.mark.parametrize("trains", [True, False])
def test_a_statistic_that_a_batch_left_out_made_nan_is_named(trains):
    normalization = framework.nn.BatchNorm1D if FRAMEWORK == "paddle" else framework.nn.BatchNorm1d
    model = framework.nn.Sequential(framework.nn.Linear(4, 3), normalization(3))
    parameters = model.parameters()
    if FRAMEWORK == "paddle":
        optimizer = framework.optimizer.SGD(1e-3, parameters=parameters)
    else:
        optimizer = framework.optim.SGD(parameters, lr=1e-3)
    scaler = ours.GradScaler(policy=FixedScale(1.0))
    with Monitor(scaler, model, on_stuck="continue") as monitor:
        for number in range(20):
            model.train() if number != 3 or trains else model.eval()
            inputs = framework.ones([8, 4]) * (math.nan if number == 3 else 1.0)
            loss = (model(inputs) * model(inputs)).mean()
            if number == 3:  # the script leaves it out
                continue
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.clear_gradients() if FRAMEWORK == "paddle" else optimizer.zero_grad()
    found = monitor.verdict
    assert (found.kind == "parameter") == trains
    name = "1._mean" if FRAMEWORK == "paddle" else "1.running_mean"
    assert (f"The model's {name} is itself Inf or NaN, though" in found.text) == trains


def logarithm_of_0(model, inputs):
    return (model(inputs) * 0).log().mean()  # logarithm_of_0


def root_of_0(model, inputs):
    roots = (model(inputs) * 0).sqrt()  # root_of_0
    return roots.mean() + inputs.mean()


def bad_batch(model, inputs):
    values = inputs.numpy().copy()
    values[3] = math.nan
    make = framework.to_tensor if FRAMEWORK == "paddle" else framework.tensor
    return model(make(values)).mean()  # bad_batch


FAILURES = {"log": logarithm_of_0, "gradient of sqrt": root_of_0, "matmul": bad_batch}


def trained(fails, failure, watches=True, steps=20):
    """Train, and fail in some steps.

    Returns:
        What was told, by the step, and the weights as they were in the end.
    """
    is_paddle = FRAMEWORK == "paddle"
    (framework.seed if is_paddle else framework.manual_seed)(0)
    model = framework.nn.Linear(4, 2)
    kind = framework.optimizer.SGD if is_paddle else framework.optim.SGD
    rate = {"learning_rate" if is_paddle else "lr": 1e-3}
    optimizer = kind(**{"parameters" if is_paddle else "params": model.parameters()}, **rate)
    scaler, told = ours.GradScaler(policy=DynamicScale(2.0**10, growth_interval=5)), {}
    number = 0
    tell = SimpleNamespace(call=lambda finding: told.setdefault(number, []).append(finding))
    monitor = Monitor(scaler, model, tell=tell.call) if watches else nullcontext()
    with monitor:
        for number in range(1, steps + 1):
            inputs = framework.ones([8, 4])
            loss = failure(model, inputs) if fails(number) else model(inputs).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            (optimizer.clear_grad if is_paddle else optimizer.zero_grad)()
            with framework.no_grad():
                model.eval()
                model(inputs)  # an evaluation ends no watch, as it begins after the step
                model.train()
    return told, [parameter.detach().numpy().tolist() for parameter in model.parameters()]


def after_3(number):
    return number > 3


def now_and_then(number):
    return number in (4, 9, 10, 15)


@SEES_OPERATIONS
@pytest.mark.parametrize("fails", [after_3, now_and_then])
@pytest.mark.parametrize("operation", FAILURES)
def test_the_next_failing_step_shows_the_operation_and_the_line(operation, fails):
    failure = FAILURES[operation]
    told, weights = trained(fails, failure)
    second = [number for number in range(1, 21) if fails(number)][1]
    text = " ".join(finding.text for finding in told[second])
    assert f"{operation} at {line_of(failure.__name__)}" in text
    assert weights == trained(fails, failure, watches=False)[1]


@SEES_OPERATIONS
def test_a_step_that_is_not_watched_calls_the_functions_of_the_framework_itself():
    owner = framework._C if FRAMEWORK == "tensorplay" else framework._C_ops
    functions = dict(vars(owner)), dict(vars(framework.Tensor))
    seen = []

    def look(model, inputs):
        seen.append((dict(vars(owner)), dict(vars(framework.Tensor))) == functions)
        return logarithm_of_0(model, inputs)

    trained(now_and_then, look)
    assert seen[:2] == [True, False]  # the second failing step is watched, and shows the operation
    assert seen[3:] == [True]
    assert (dict(vars(owner)), dict(vars(framework.Tensor))) == functions


# Each driver makes a scaler, a model of one parameter, `weight`, of five elements, and a step.
# `step(finite)` gives the weight the gradient above, or that with an Inf. It returns what `record`
# needs to know, or None where the scaler announces its steps.


def on_torch(policy):
    if FRAMEWORK == "paddle":
        model = framework.nn.Layer()
        model.weight = model.create_parameter([5])
        optimizer = framework.optimizer.SGD(0.0, model.parameters())
        tensor, clear, put = framework.to_tensor, optimizer.clear_grad, framework.Tensor.set_value
    else:
        model = framework.nn.Module()
        model.weight = framework.nn.Parameter(framework.zeros(5))
        optimizer = framework.optim.SGD(model.parameters(), lr=0.0)
        tensor, clear, put = framework.tensor, optimizer.zero_grad, framework.Tensor.copy_
    scaler = ours.GradScaler(policy=policy)

    def step(finite):
        scaler.scale(model.weight.sum()).backward()
        put(model.weight.grad, model.weight.grad * tensor(gradient(finite)))
        scaler.step(optimizer)
        scaler.update()
        clear()

    return scaler, model, step


on_tensorplay = on_paddle = on_torch


def traced(scaler, adjust):
    """Drives a scaler of JAX; ``adjust(scaler, gradients, finite)`` makes the next one."""
    state = SimpleNamespace(scaler=scaler)
    adjust = framework.jit(adjust, donate_argnums=0)

    def step(finite):
        grads = {"weight": framework.numpy.array(gradient(finite))}
        flag = framework.numpy.array(finite)
        state.scaler = adjust(state.scaler, grads, flag)
        knows = {} if isinstance(scaler, tuple) else {"finite": flag}
        return {"scaler": state.scaler, "gradients": grads, **knows}

    return scaler, None, step


def on_jax(policy):
    return traced(ours.GradScaler(policy), lambda scaler, _, finite: scaler.adjust(finite))


def on_jax_optax(policy):
    import optax

    optimizer = ours.loss_scaled(optax.chain(optax.identity(), optax.sgd(0.0)), policy)
    state = optimizer.init({"weight": framework.numpy.zeros(5)})
    return traced(state, lambda state, grads, _: optimizer.update(grads, state)[1])


def on_jax_jmp(policy):
    from gradscaler.jax import jmp

    float32 = framework.numpy.float32
    if isinstance(policy, FixedScale):
        scaler = jmp.StaticLossScale(float32(policy.scale))
    else:
        scaler = jmp.DynamicLossScale(
            float32(policy.init_scale),
            period=policy.growth_interval,
            factor=policy.growth_factor,
            min_loss_scale=np.float32(policy.min_scale),
        )
    return traced(scaler, lambda scaler, _, finite: scaler.adjust(finite))


def on_jax_flax(policy):
    from gradscaler.jax.flax import DynamicScale as FlaxScale

    interval = policy.growth_interval - 1  # it grows a step later
    scaler = FlaxScale(
        policy.growth_factor, policy.backoff_factor, interval, scale=policy.init_scale
    )

    def adjust(scaler, grads, finite):
        value = framework.numpy.where(finite, 1.0, math.inf)
        return scaler.value_and_grad(lambda x: x * value)(1.0).dynamic_scale

    return traced(scaler, adjust)


def on_keras(policy):
    optimizer = ours.LossScaleOptimizer(framework.optimizers.SGD(0.0), policy=policy)
    variable = framework.Variable(np.zeros(5, np.float32), name="weight")
    optimizer.build([variable])

    def step(finite):
        grad = framework.ops.convert_to_tensor(gradient(finite))
        optimizer.apply([grad * optimizer.loss_scale], [variable])
        return {"gradients": [grad]}

    return optimizer, SimpleNamespace(trainable_variables=[variable]), step


def on_tf_keras(policy):
    import tensorflow as tf

    optimizer = ours.LossScaleOptimizer(framework.optimizers.SGD(0.0), policy=policy)
    variable = tf.Variable(np.zeros(5, np.float32), name="weight")
    optimizer.build([variable])

    def step(finite):
        grad = tf.constant(gradient(finite))
        optimizer.get_scaled_loss(tf.constant(1.0))
        optimizer.get_unscaled_gradients([grad])
        optimizer.apply_gradients([(grad, variable)])
        return {"gradients": [grad], "finite": tf.constant(finite)}

    return optimizer, SimpleNamespace(trainable_variables=[variable]), step


def mindspore_scaler(policy, dynamic, fixed):
    """A scaler of the class that takes such a policy."""
    if isinstance(policy, DynamicScale):
        return getattr(ours, dynamic)(policy=policy)
    return getattr(ours, fixed)(policy.scale)


def on_mindspore(policy):
    scaler = mindspore_scaler(policy, "DynamicLossScaler", "StaticLossScaler")
    tensor = framework.Tensor
    weight = framework.Parameter(tensor(np.zeros(5, np.float32)), name="weight")

    def step(finite):
        scaler.adjust(tensor(finite))
        return {"gradients": [tensor(gradient(finite))], "finite": tensor(finite)}

    return scaler, SimpleNamespace(trainable_params=lambda: [weight]), step


def on_mindspore_manager(policy):
    manager = mindspore_scaler(policy, "DynamicLossScaleManager", "FixedLossScaleManager")

    def step(finite):
        manager.update_loss_scale(not finite)
        return {"gradients": {"weight": framework.Tensor(gradient(finite))}, "finite": finite}

    return manager, None, step


def on_mindspore_cell(policy):
    nn, tensor = framework.nn, framework.Tensor
    network = nn.WithLossCell(nn.Dense(5, 1, has_bias=False), nn.MSELoss())
    optimizer = nn.SGD(network.trainable_params(), learning_rate=1e-9)
    cell = mindspore_scaler(policy, "DynamicLossScaleUpdateCell", "FixedLossScaleUpdateCell")
    train = ours.TrainOneStepWithLossScaleCell(network, optimizer, cell)

    def step(finite):
        inputs = np.full((1, 5), 1.0 if finite else math.inf, np.float32)
        loss, overflow, _ = train(tensor(inputs), tensor(np.zeros((1, 1), np.float32)))
        grads = {"weight": tensor(gradient(finite))}
        return {"gradients": grads, "finite": not overflow, "loss": loss}

    return train, network, step


def gradient(finite):
    return GRADIENT if finite else np.concatenate([GRADIENT[:-1], np.float32([math.inf])])


def scaler_of(policy, driver=FRAMEWORK):
    """The driver's scaler, model and step."""
    return globals()[f"on_{driver}"](policy)


def train(policy, finite, driver=FRAMEWORK, forensics=1, **options):
    """Trains under a monitor, which records no more than it needs, and returns the monitor."""
    scaler, model, step = scaler_of(policy, driver)
    monitor = Monitor(scaler, model, forensics=forensics, **options)
    for flag in finite:
        arguments = step(flag)
        if arguments is not None:
            if isinstance(policy, DynamicScale):
                arguments.pop("finite", None)
            if not forensics:
                arguments.pop("gradients")
            monitor.record(**arguments)
    return monitor


DRIVERS = {
    "jax": ["jax", "jax_optax", "jax_jmp", "jax_flax"],
    "mindspore": ["mindspore", "mindspore_manager", "mindspore_cell"],
}.get(FRAMEWORK, [FRAMEWORK])


# Three of twelve losses are NaN, which the monitor says where it knows losses.
@pytest.mark.filterwarnings("ignore::gradscaler.diagnose.FindingWarning")
@pytest.mark.parametrize("forensics", [0, 1])
@pytest.mark.parametrize("policy", [RULE, FixedScale(64.0)], ids=["dynamic", "fixed"])
@pytest.mark.parametrize("driver", DRIVERS)
def test_the_history_is_what_the_policy_says(driver, policy, forensics):
    if driver == "jax_flax" and policy is not RULE:
        pytest.skip("flax's always moves")
    history = train(policy, FINITE, driver, every=5, forensics=forensics).history
    assert [step.step for step in history] == list(range(1, len(FINITE) + 1))
    assert [not step.skipped for step in history] == FINITE
    assert [step.scale for step in history] == by_policy(policy, FINITE)


@pytest.mark.filterwarnings("ignore::gradscaler.diagnose.FindingWarning")  # a scale of 8 is small
def test_a_growth_that_the_largest_scale_forbids_is_not_a_skip():
    policy = DynamicScale(init_scale=8.0, growth_interval=1, max_scale=8.0)
    history = train(policy, [True, True, False, True, True, True], every=3, forensics=0).history
    assert [step.skipped for step in history] == [False, False, True, False, False, False]


def test_a_skip_names_the_parameter():
    first, second = train(RULE, [True, False]).history
    assert first.nonfinite is None
    assert second.nonfinite == (NonfiniteGradient("weight", (5,), "float32", 1, 0, 3.0),)


@pytest.mark.skipif(FRAMEWORK in EAGER, reason="the scaler announces its steps")
def test_variables_of_one_name_get_numbers():
    variables = [SimpleNamespace(name="kernel:0", dtype="float32") for _ in range(2)]
    scaler, _, _ = scaler_of(RULE)
    monitor = Monitor(scaler, SimpleNamespace(trainable_variables=variables))
    monitor.record(gradients=[gradient(finite=False)] * 2, finite=False)
    assert [found.name for found in monitor.history[0].nonfinite] == ["kernel", "kernel (2)"]


def test_forensics_2_inspects_every_second_skip():
    history = train(RULE, [False] * 4, forensics=2).history
    assert [step.nonfinite is None for step in history] == [True, False, True, False]


def test_a_sample_is_of_the_true_gradients_at_the_scale_in_use(path):
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


def test_a_file_says_that_a_scale_does_not_move(path):
    train(FixedScale(64.0), [], path=path).close()
    expected = {"name": "FixedScale", "scale": 64.0}
    if FRAMEWORK == "mindspore":  # whose static scaler has no policy
        expected = {"name": "StaticLossScaler"}
    assert read_run(path).starts[0].policy == expected


@pytest.mark.skipif(FRAMEWORK != "paddle", reason="only Paddle has use_dynamic_loss_scaling")
def test_a_policy_that_is_not_used_is_a_fixed_scale(path):
    scaler = ours.GradScaler(init_loss_scaling=64.0, use_dynamic_loss_scaling=False)
    Monitor(scaler, path=path).close()
    assert read_run(path).starts[0].policy == {"name": "FixedScale", "scale": 64.0}


@pytest.mark.parametrize("forensics", [0, 1])
def test_a_stuck_run_raises_and_its_file_says_so(path, forensics):
    options = {"stuck_after": 4, "on_stuck": "raise", "every": 6, "path": path}
    is_eager = FRAMEWORK in EAGER
    with pytest.raises(StuckError, match="overflow" if is_eager or forensics else "are Inf or NaN"):
        train(RULE, [True, True, *[False] * 9], forensics=forensics, **options)
    (verdict,) = read_run(path).verdicts
    assert verdict.verdict == "floor"
    assert verdict.step == (7 if is_eager and not forensics else 6)  # it inspects one more step


class Parameter:
    """An array that counts how often it is read."""

    dtype, shape = np.dtype(np.float32), (2,)
    num_read = 0

    def __array__(self, dtype=None, copy=None):
        self.num_read += 1
        return np.float32([1.0, math.nan])


@pytest.fixture
def recording():
    """A monitor that takes records, for which two skips in a row are too many."""
    if FRAMEWORK in EAGER:
        pytest.skip("the scaler announces its steps")
    scaler, model, _ = scaler_of(RULE)
    return Monitor(scaler, model, stuck_after=2, on_stuck="continue", every=1)


def test_parameters_are_inspected_only_when_it_is_stuck(recording):
    parameter = Parameter()
    for finite in (True, False, True, False):
        recording.record(finite=finite, parameters={"dense": {"kernel": parameter}})
    assert parameter.num_read == 0
    recording.record(finite=False, parameters={"dense": {"kernel": parameter}})
    assert parameter.num_read == 1
    verdict = recording.verdict
    assert (verdict.kind, verdict.where) == ("parameter", "dense.kernel")


@pytest.mark.parametrize("what", ["parameters", "gradients"])
def test_what_is_not_an_array_is_refused_and_nothing_is_recorded(recording, what):
    with pytest.raises(TypeError, match="kernel is 'w'"):
        recording.record(finite=True, **{what: {"kernel": "w"}})
    assert recording.history == ()


@pytest.mark.skipif(FRAMEWORK != "jax", reason="only JAX deletes what is donated")
@pytest.mark.parametrize("deleted", [False, True])
def test_deleted_parameters_are_not_inspected(recording, deleted):
    parameters = framework.numpy.array([math.nan])
    recording.record(finite=False, parameters=parameters)
    if deleted:
        parameters.delete()
    recording.record(finite=False, parameters=parameters)
    assert (recording.verdict.kind == "parameter") != deleted


def test_a_scaler_that_announces_its_steps_refuses_record():
    monitor = train(RULE, [True])
    if FRAMEWORK in EAGER:
        with pytest.raises(TypeError, match="by itself"):
            monitor.record()
    else:
        monitor.close()
        monitor.record(finite=True)  # closed, it takes no more
        assert len(monitor.history) == 1


@pytest.mark.skipif(FRAMEWORK != "paddle", reason="the others need update()")
def test_steps_without_update_are_counted_one_by_one():
    scaler, model, step = on_paddle(FixedScale(64.0))
    scaler.update = lambda: None
    monitor = Monitor(scaler, model)
    for finite in FINITE:
        step(finite)
    monitor.close()
    assert [not step.skipped for step in monitor.history] == FINITE


@pytest.mark.skipif(IS_KERAS, reason="it is Keras' own")
def test_a_callback_is_only_for_keras():
    with pytest.raises(TypeError, match=f"a scaler for {FRAMEWORK}"):
        train(RULE, []).callback()


@pytest.mark.skipif(FRAMEWORK == "torch", reason="it is for PyTorch")
def test_a_loss_is_left_out_only_in_pytorch():
    with pytest.raises(TypeError, match="for PyTorch, but this scaler is"):
        train(RULE, []).leave_out(0.0)


@pytest.mark.skipif(not IS_KERAS, reason="it is Keras'")
@pytest.mark.parametrize("policy", [RULE, FixedScale(64.0)], ids=["dynamic", "fixed"])
def test_the_callback_records_each_step_of_fit(policy):
    if FRAMEWORK == "tf_keras" and policy is not RULE:
        pytest.skip("a fixed scale gives no evidence of a skip")
    optimizer = ours.LossScaleOptimizer(framework.optimizers.SGD(0.01), policy=policy)
    model = framework.Sequential([framework.layers.Dense(1)])
    model.compile(optimizer, "mse")
    inputs = np.float32([[1.0] if finite else [math.inf] for finite in FINITE])
    monitor = Monitor(optimizer, every=5)
    options = {"batch_size": 1, "shuffle": False, "verbose": 0}
    model.fit(inputs, np.zeros((len(FINITE), 1)), callbacks=[monitor.callback()], **options)
    assert [not step.skipped for step in monitor.history] == FINITE
    assert [step.scale for step in monitor.history] == by_policy(policy, FINITE)


@pytest.mark.skipif(not IS_KERAS, reason="it is Keras'")
def test_the_callback_counts_each_step_of_a_call_that_takes_several():
    if framework.backend.backend() == "torch":
        pytest.skip("Keras takes one step in a call there")
    finite = [True, False, True, True, False, False]  # the last skips of a call end it, or not
    optimizer = ours.LossScaleOptimizer(framework.optimizers.SGD(0.01), policy=RULE)
    model = framework.Sequential([framework.layers.Dense(1)])
    model.compile(optimizer, "mse", steps_per_execution=3)
    inputs = np.float32([[1.0] if each else [math.inf] for each in finite])
    monitor = Monitor(optimizer, every=5)
    options = {"batch_size": 1, "shuffle": False, "verbose": 0}
    model.fit(inputs, np.zeros((len(finite), 1)), callbacks=[monitor.callback()], **options)
    assert [not step.skipped for step in monitor.history] == finite
    assert [step.scale for step in monitor.history] == by_policy(RULE, finite)


@pytest.mark.skipif(FRAMEWORK != "keras", reason="it is of Keras 3")
def test_accumulated_gradients_are_no_skips():
    optimizer = framework.optimizers.LossScaleOptimizer(
        framework.optimizers.SGD(0.01, gradient_accumulation_steps=3)
    )
    model = framework.Sequential([framework.layers.Dense(1)])
    model.compile(optimizer, "mse")
    monitor = Monitor(optimizer, every=5)
    model.fit(np.ones((6, 1)), np.zeros(6), 1, callbacks=[monitor.callback()], verbose=0)
    assert [step.skipped for step in monitor.history] == [False] * 6
