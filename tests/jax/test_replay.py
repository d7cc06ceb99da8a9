"""``Monitor.record(replay=)``: it locates the failing step of a function of JAX."""

import inspect
import math
import os
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gradscaler import DynamicScale, FixedScale
from gradscaler.diagnose import Monitor, read_run
from gradscaler.jax import GradScaler, select_tree


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


def log_of_a_difference(params, batch):
    probabilities = batch @ params["w"]
    return jnp.log(probabilities - 2.0).mean()  # MADE


def exp_in_half(params, batch):
    half = batch.astype(jnp.float16) @ params["w"].astype(jnp.float16)
    return jnp.exp(12 * half).astype(jnp.float32).mean()  # MADE


def root_of_zero(params, batch):
    return jnp.sqrt((batch @ params["w"]) ** 2).mean()  # MADE


def sum_of_products(params, batch):
    half = batch.astype(jnp.float16) * 300
    return ((half @ (300 * params["w"]).astype(jnp.float16)) ** 1.0).mean()  # MADE


def line_in(function, mark="# MADE"):
    """The file and the number of the marked line of a function."""
    lines, first = inspect.getsourcelines(function)
    (place,) = (index for index, line in enumerate(lines) if mark in line)
    path = os.path.relpath(inspect.getsourcefile(function))
    return f"{path}:{first + place}"


GOOD, ONES, ZEROS, BAD = 2.0, 1.0, 0.0, math.nan  # what a batch is full of


def trained(loss_fn, batches, path, *, knows=("loss", "gradients"), replay=None, **options):
    """Trains on batches with donated buffers under a monitor; returns the run and the replays."""
    scaler = GradScaler(options.pop("policy", None) or FixedScale(1.0))
    params, replayed = {"w": jnp.full((4,), 0.5)}, []

    def step(scaler, params, batch):
        scaler, finite, loss, grads = scaler.value_and_grad(loss_fn)(params, batch)
        new = jax.tree.map(lambda p, g: p - 0.0 * g, params, grads)
        return scaler, select_tree(finite, new, params), finite, loss, grads

    step = jax.jit(step, donate_argnums=(0, 1))
    with Monitor(scaler, path=path, on_stuck="continue", **options) as monitor:
        for number, value in enumerate(batches, 1):
            batch = jnp.full((8, 4), value)
            scaler, params, finite, loss, gradients = step(scaler, params, batch)

            def again(number=number, batch=batch, params=params):
                replayed.append(number)
                return jax.value_and_grad(loss_fn), params, batch

            seen = {"loss": loss, "gradients": gradients}
            monitor.record(
                scaler=scaler,
                finite=finite,
                replay=again if replay is None else replay,
                **{name: seen[name] for name in knows},
            )
        return SimpleNamespace(verdict=monitor.verdict, replayed=replayed, monitor=monitor)


EVERY_THIRD = [GOOD, GOOD, ONES] * 8
CASES = {
    "the logarithm of 0, in some batches": (log_of_a_difference, EVERY_THIRD, "data", "log"),
    "an exponential in all batches": (exp_in_half, [GOOD] * 24, "loss", "exp"),
    "a product in half precision": (sum_of_products, [GOOD] * 24, "silent", "matmul"),
}


@pytest.mark.parametrize(("loss_fn", "batches", "kind", "operation"), CASES.values(), ids=CASES)
def test_the_verdict_names_the_operation_and_the_line(loss_fn, batches, kind, operation, path):
    verdict = trained(loss_fn, batches, path).verdict
    assert verdict.kind == kind
    assert f"{operation} at {line_in(loss_fn)}" in verdict.text
    assert verdict.findings[0].line == line_in(loss_fn)
    assert "model" not in verdict.findings[0].cause  # JAX has none


@pytest.mark.parametrize("knows", [("loss", "gradients"), ("loss",), ()], ids=str)
def test_a_gradient_that_is_not_finite_names_the_operation(knows, path):
    verdict = trained(root_of_zero, [ZEROS] * 24, path, knows=knows).verdict
    assert verdict.kind == "nan"
    assert f"the gradient of sqrt at {line_in(root_of_zero)}" in verdict.text


def test_where_nothing_was_recorded_no_cause_is_given(path):
    nothing = lambda: (jnp.mean, jnp.ones(3))  # noqa: E731 # a replay that shows nothing
    verdict = trained(root_of_zero, [ZEROS] * 24, path, knows=(), replay=nothing).verdict
    assert "is not known: give monitor.record() loss= and gradients=" in verdict.text
    seen = trained(root_of_zero, [ZEROS] * 24, path, knows=["loss"], replay=nothing).verdict
    assert "is not known" not in seen.text


@pytest.mark.parametrize("where", ["batch", "params"])
def test_an_argument_that_is_not_finite_is_named_and_nothing_else_is_blamed(where, path):
    path_of = {"batch": "batch", "params": "params['w']"}[where]

    def loss_fn(params, batch):
        return (batch @ params["w"]).mean()

    def replay():
        params = {"w": jnp.full((4,), math.nan if where == "params" else 1.0)}
        return loss_fn, params, jnp.full((8, 4), math.nan if where == "batch" else 1.0)

    verdict = trained(loss_fn, [BAD] * 24, path, replay=replay).verdict
    assert f"In the function loss_fn, the argument {path_of} holds Inf or NaN" in verdict.text


def test_healthy_steps_are_not_replayed_and_a_located_failure_only_once(path):
    result = trained(log_of_a_difference, EVERY_THIRD, path)
    assert result.replayed == [3]
    (seen,) = read_run(path).watched
    assert (seen.step, seen.located.operation, seen.located.line) == (
        3,
        "log",
        line_in(log_of_a_difference),
    )
    assert f"log at {line_in(log_of_a_difference)}" in read_run(path).verdict.text


def test_overflows_that_a_lower_scale_cures_are_not_replayed(path):
    def steep(params, batch):
        return (1e4 * batch.astype(jnp.float16) @ params["w"].astype(jnp.float16)).mean()

    policy = DynamicScale(init_scale=2.0**16)
    result = trained(steep, [0.01] * 30, path, policy=policy)
    skipped = [step.step for step in result.monitor.history if step.skipped]
    assert skipped
    assert result.replayed == []
    assert result.verdict.kind == "normal"


@pytest.mark.parametrize("knows", [("loss",), ()], ids=str)
def test_a_nan_of_unknown_gradients_is_replayed_when_it_comes_again(knows, path):
    batches = [GOOD, GOOD, GOOD, ZEROS] * 3
    result = trained(root_of_zero, batches, path, knows=knows, policy=DynamicScale())
    assert result.replayed == [8]
    assert result.verdict.kind == "nan"
    assert f"by the gradient of sqrt at {line_in(root_of_zero)}" in result.verdict.text


def test_skips_that_growth_explains_are_replayed_once_at_most_though_gradients_are_unknown(path):
    policy = DynamicScale(init_scale=2.0**20, growth_interval=4)
    result = trained(sum_of_products, [0.001] * 40, path, knows=("loss",), policy=policy)
    assert sum(step.skipped for step in result.monitor.history) > 4
    assert result.replayed == [2]  # the scale started too large
    assert result.verdict.kind == "normal"


def test_unknown_gradients_that_are_never_finite_are_told_in_the_second_step(path):
    result = trained(root_of_zero, [ZEROS] * 2, path, knows=["loss"], policy=DynamicScale())
    assert result.replayed == [2]
    assert f"the gradient of sqrt at {line_in(root_of_zero)}" in result.verdict.text


@pytest.mark.parametrize("library", ["equinox", "nnx"])
@pytest.mark.parametrize("is_whole", [False, True], ids=["gradients", "step"])
def test_the_transformations_of_equinox_and_nnx_are_replayed(library, is_whole):
    model, transform = {
        "equinox": (eqx.nn.MLP(4, 1, 4, 1, key=jax.random.key(0)), eqx.filter_value_and_grad),
        "nnx": (nnx.Linear(4, 1, rngs=nnx.Rngs(0)), nnx.value_and_grad),
    }[library]
    apply = jax.vmap if library == "equinox" else lambda model: model

    def loss_of(model, inputs):
        return jnp.sqrt((apply(model)(inputs) * 0) ** 2).mean()  # MADE

    def step(model, inputs):
        loss, gradients = transform(loss_of)(model, inputs)
        if library == "equinox":
            return loss, eqx.apply_updates(model, gradients)
        nnx.update(model, jax.tree.map(jnp.add, nnx.state(model), gradients))
        return loss

    monitor = Monitor(GradScaler(), on_stuck="continue")
    replayed = step if is_whole else transform(loss_of)
    for _ in range(2):
        monitor.record(finite=False, loss=1.0, replay=lambda: (replayed, model, jnp.ones((8, 4))))
    assert f"the gradient of sqrt at {line_in(loss_of)}" in monitor.verdict.text


def test_a_replay_that_shows_nothing_is_tried_three_times_and_blames_nothing(path):
    calls = []

    def replay():
        calls.append(None)
        return log_of_a_difference, {"w": jnp.full((4,), 0.5)}, jnp.full((8, 4), GOOD)

    verdict = trained(log_of_a_difference, EVERY_THIRD, path, replay=replay).verdict
    assert len(calls) == 3
    assert verdict.kind == "data"
    assert verdict.findings[0].line is None


def test_an_error_in_a_replay_is_a_warning_and_the_training_goes_on(path):
    calls = []

    def replay():
        calls.append(None)
        donated = jnp.ones(4)
        donated.delete()  # as JAX does with a buffer that is donated
        return jnp.log, donated

    with pytest.warns(RuntimeWarning, match="replay is called no more.*deleted"):
        result = trained(log_of_a_difference, EVERY_THIRD, path, replay=replay)
    assert len(calls) == 1
    assert len(result.monitor.history) == len(EVERY_THIRD)


class OnDevice:
    """A loss scale on a GPU, as far as the monitor can see."""

    dtype, shape, policy = np.dtype(np.float32), (), SimpleNamespace(growth_interval=2000)
    loss_scale = property(lambda self: self)
    counter = adjust = None

    def __add__(self, other):
        return self

    def devices(self):
        return [SimpleNamespace(platform="gpu")]

    def __array__(self, dtype=None, copy=None):
        return np.float32([1.0])


class Flag:
    """Whether a step was finite; it counts the readings."""

    dtype, shape, num_read = np.dtype(bool), (), 0

    def __init__(self, is_finite):
        self.is_finite = is_finite

    def __array__(self, dtype=None, copy=None):
        self.num_read += 1
        return np.array(self.is_finite)


def test_on_a_device_no_step_is_waited_for_before_a_failure_was_read():
    monitor, calls = Monitor(OnDevice(), every=10, on_stuck="continue"), []

    def replay():
        calls.append(number)
        return log_of_a_difference, {"w": jnp.full((4,), 0.5)}, jnp.full((8, 4), ONES)

    flags = []
    for number in range(1, 31):
        flags.append(Flag(is_finite=number % 3 > 0))
        monitor.record(finite=flags[-1], replay=replay)
        if number == 3:
            assert sum(flag.num_read for flag in flags) == 0
    assert len(calls) == 1
    assert calls[0] % 3 == 0
