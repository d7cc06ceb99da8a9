"""Loops of JAX under ``gradscaler run``: nothing changes, and a failure has its cause."""

import threading
from pathlib import Path

import flax.training.dynamic_scale
import jax
import jax.numpy as jnp
import jmp
import optax
import pytest

import gradscaler
from gradscaler import DynamicScale
from gradscaler.diagnose import read_run
from gradscaler.jax import GradScaler
from gradscaler.jax import flax as ours_for_flax
from gradscaler.jax import jmp as ours_for_jmp
from tests.support import threads as trainings
from tests.support.marked_lines import lines_marked_in
from tests.support.scripts import fixtures_of, lines_of

SCRIPT = Path(__file__).with_name("loops.py")
marked = lines_marked_in(__file__)
LINE = lines_of(SCRIPT, "sqrt", "log", "norm")
plain, ran, in_step_13 = fixtures_of(SCRIPT)


def test_parameters_and_states_are_the_same_to_the_bit(plain, ran, in_step_13):
    assert plain == ran.printed == in_step_13.printed


def test_each_function_that_takes_a_gradient_has_a_run_file_and_a_verdict(ran):
    runs = [read_run(file) for file in ran.files]
    assert [run.num_steps for run in runs] == [24] * 11
    assert [run.bad_steps[0].step for run in runs if run.bad_steps] == [13] * 9
    healthy, *_ = ran.verdicts
    told = (
        "after 24 steps: None of 24 steps had a gradient of NaN or Inf. Nothing wrong was seen in "
    )
    assert healthy.startswith(f"{told}numbers and calls: the loss went from ")


def test_the_first_bad_step_names_operation_and_line(ran):
    _, root, logarithm, batch, _, eager, *_ = ran.verdicts
    for verdict, name in ((root, "sqrt"), (logarithm, "log"), (eager, "sqrt")):
        assert f"{name} at {SCRIPT}:{LINE[name]}" in verdict
    assert "The function step makes 1 Inf in float32, by log" in logarithm
    assert "In the function step, the argument x holds Inf or NaN" in batch


def test_a_parameter_of_nnx_has_the_name_that_it_has_in_the_model(ran):
    for verdict in ran.verdicts[7:9]:
        assert "The gradient of bias is NaN" in verdict
        assert f"by the gradient of norm at {SCRIPT}:{LINE['norm']}" in verdict


def test_a_bad_loss_alone_loses_no_weights(ran):
    verdict = ran.verdicts[6]
    assert "the loss itself was NaN or Inf in step 13" in verdict
    assert "first seen in log" in verdict


def test_a_step_that_keeps_the_old_weights_by_itself_is_counted_and_its_operation_named(ran):
    for verdict in ran.verdicts[9:]:
        assert verdict.startswith("after 24 steps, of which 1 left the weights as they were")
        assert f"by the gradient of sqrt at {SCRIPT}:{LINE['sqrt']}" in verdict
        assert "the loss is finite: step 13 left the weights as they were" in verdict


def test_donated_arguments_are_gone_and_a_watched_step_has_copies(ran, in_step_13):
    unknown, known = ran.verdicts[4], in_step_13.verdicts[4]
    assert str(SCRIPT) not in unknown
    assert "--watch 13 names what made it" in unknown
    assert f"sqrt at {SCRIPT}:{LINE['sqrt']}" in known


def test_a_watch_from_inside_names_the_line_and_is_undone(tmp_path):
    theirs = jax.jit, jax.grad, jax.value_and_grad
    with gradscaler.watch(tmp_path) as watch:
        step = jax.jit(jax.value_and_grad(lambda w: jnp.sqrt(jnp.sum(w * w))))
        step(jnp.ones(3))
        step(jnp.zeros(3))
    assert "test_run_script.py:" in watch.verdict.findings[0].line
    assert (jax.jit, jax.grad, jax.value_and_grad) == theirs
    step(jnp.ones(3))


def test_an_argument_whose_keys_jax_cannot_sort_ends_no_watch(tmp_path):
    options = {0: 1.0, "factor": 2.0}
    with gradscaler.watch(tmp_path) as watch:
        step = jax.value_and_grad(lambda w, own: jnp.sqrt(jnp.sum(w * w)) * own["factor"])
        step(jnp.ones(3), options)
        step(jnp.zeros(3), options)
    assert "test_run_script.py:" in watch.verdict.findings[0].line


def test_a_number_that_the_next_step_takes_is_no_loss(tmp_path):
    def step(weights, scale):
        loss, gradients = jax.value_and_grad(lambda w: jnp.sum(w * w) * scale)(weights)
        return weights - 0.1 * gradients / scale, scale * 2, loss / scale

    with gradscaler.watch(tmp_path):
        weights, scale, losses, take = jnp.ones(3), jnp.float32(8), [], jax.jit(step)
        for _ in range(3):
            weights, scale, loss = take(weights, scale)
            losses.append(float(loss))
    (file,) = tmp_path.iterdir()
    # At the first step it is not known yet.
    assert list(read_run(file).losses.values()) == losses[1:]


@pytest.mark.parametrize("is_named", [True, False])
def test_of_several_numbers_the_one_that_is_named_so_is_the_loss(tmp_path, is_named):
    def step(weights):
        loss, gradients = jax.value_and_grad(lambda w: jnp.sum(w * w))(weights)
        numbers = {"accuracy": jnp.float32(0.5), "loss" if is_named else "mse": loss}
        return weights - 0.1 * gradients, numbers

    with gradscaler.watch(tmp_path) as watch:
        weights, take = jnp.ones(3), jax.jit(step)
        for _ in range(3):
            weights, numbers = take(weights)
    (file,) = tmp_path.iterdir()
    losses = list(read_run(file).losses.values())
    assert losses[-1:] == ([float(numbers["loss"])] if is_named else [])
    assert ("Neither gradients nor losses were seen" in watch.verdict.text) != is_named


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64", "float8_e5m2"])
def test_numbers_whose_squares_leave_their_dtype_are_finite(tmp_path, dtype):
    largest = jnp.finfo(dtype).max

    def step(weights, held, by):
        loss, gradients = jax.value_and_grad(lambda w: jnp.sum(w * w) * by)(weights)
        return weights - 0.1 * gradients, held + jnp.asarray(by - 1, held.dtype), loss

    with gradscaler.watch(tmp_path) as watch:
        weights, held, take = jnp.ones(3), jnp.full((2, 3), largest, dtype), jax.jit(step)
        for _ in range(3):
            weights, held, _ = take(weights, held, 1.0)
        assert watch.verdict.kind == "normal"
        take(weights, held, jnp.nan)
    assert "step 4 was applied" in watch.verdict.text


@pytest.mark.parametrize("bad", ["first", "second", "vector"])
def test_a_nan_is_seen_in_any_of_many_numbers(tmp_path, bad):
    shapes = {"first": (1024, 700), "second": (1024, 700), "vector": (3,)}  # more than 2**20

    def step(weights, added):
        value = jax.value_and_grad(lambda w: sum(jnp.mean(each**2) for each in w.values()))
        loss, gradients = value(weights)
        moved = {n: w - 0.1 * gradients[n] for n, w in weights.items()}
        return {n: w + by for (n, w), by in zip(moved.items(), added, strict=True)}, loss

    with gradscaler.watch(tmp_path) as watch:
        weights, take = {name: jnp.ones(shape) for name, shape in shapes.items()}, jax.jit(step)
        for number in range(1, 4):
            added = [jnp.nan if number == 3 and name == bad else 0.0 for name in shapes]
            weights, _ = take(weights, added)
            assert (watch.verdict.kind == "normal") == (number < 3)
    (file,) = tmp_path.iterdir()
    (line,) = read_run(file).bad_steps
    assert (line.step, [each.name for each in line.nonfinite]) == (3, [f"weights['{bad}']"])


SCALERS = {
    "flax": lambda scale: flax.training.dynamic_scale.DynamicScale(scale=scale),
    "jmp": lambda scale: jmp.DynamicLossScale(jnp.float32(scale)),
    "ours": lambda scale: GradScaler(state=DynamicScale().init()._replace(scale=scale)),
    "ours for flax": lambda scale: ours_for_flax.DynamicScale(scale=scale),
    "ours for jmp": lambda scale: ours_for_jmp.DynamicLossScale(jnp.float32(scale)),
}


def gradients_by(scaler, loss_of, weights):
    """The next scaler, whether gradients are finite, the loss, and the gradients."""
    if hasattr(scaler, "value_and_grad"):
        return scaler.value_and_grad(loss_of)(weights)
    taken = jax.value_and_grad(lambda w: scaler.scale(loss_of(w)))(weights)
    loss, gradients = scaler.unscale(taken)
    finite = jnp.isfinite(gradients).all()
    return scaler.adjust(finite), finite, loss, gradients


@pytest.mark.parametrize("outputs", [1.0, 300.0])
@pytest.mark.parametrize("name", SCALERS)
def test_a_scale_is_no_cause_and_an_overflow_beside_it_is(tmp_path, name, outputs):
    def loss_of(weights):
        made = weights.astype(jnp.float16) * outputs
        return jnp.sum(made**2)  # SQUARE

    def step(weights, scaler):
        scaler, finite, loss, gradients = gradients_by(scaler, loss_of, weights)
        return jnp.where(finite, weights - 1e-3 * gradients, weights), scaler, loss

    with gradscaler.watch(tmp_path) as watch:
        weights, scaler, take = jnp.ones(3), SCALERS[name](2.0**24), jax.jit(step)
        for _ in range(12):
            weights, scaler, _ = take(weights, scaler)
    if outputs == 1.0:
        assert watch.verdict.kind == "normal"
        assert "itself" not in watch.verdict.text
    else:
        assert watch.verdict.kind == "silent"
        assert f"pow at {marked('SQUARE')}" in watch.verdict.text
        assert "these steps left the weights as they were" in watch.verdict.text


@pytest.mark.parametrize("padding", ["seen", "masked", "given"])
def test_an_index_out_of_range_is_told_where_its_nan_reaches_the_step(tmp_path, padding):
    """A mean takes the rows of ids; padding is left out before it, or its row is NaN by itself."""

    def loss_of(weights, ids):
        rows = jnp.take(weights, ids, axis=0)  # GATHER
        if padding == "masked":
            rows = jnp.where((ids < len(weights))[:, None], rows, 0.0)
        return jnp.mean(rows**2)

    with gradscaler.watch(tmp_path) as watch:
        weights, take = jnp.ones((4, 2)), jax.jit(jax.value_and_grad(loss_of))
        for step in range(8):
            table = weights.at[3].set(jnp.nan) if padding == "given" and step == 5 else weights
            _, gradients = take(table, jnp.array([0, 1, 3 + (step == 5) * (padding != "given")]))
            weights = weights - 0.1 * jnp.nan_to_num(gradients)
    is_told = "an index is out of range" in watch.verdict.text.lower()
    assert is_told == (padding == "seen")
    if is_told:
        assert f"gather at {marked('GATHER')}" in watch.verdict.text


@pytest.mark.parametrize("is_exponential", [True, False])
def test_squares_of_gradients_that_leave_float32_are_those_of_the_optimizer(
    tmp_path, is_exponential
):
    by = optax.adam(1e-3)

    def loss_of(params, x):
        outputs = x @ params["w"]
        if is_exponential:
            return jnp.exp(outputs).mean()  # ENLARGES
        return 1e30 * outputs.mean()

    def step(params, state, x):
        loss, gradients = jax.value_and_grad(loss_of)(params, x)
        updates, state = by.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = {"w": jnp.full(4, 15.0)}
    state = by.init(params)
    with gradscaler.watch(tmp_path) as watch:
        compiled = jax.jit(step)
        for _ in range(3):
            params, state, _ = compiled(params, state, jnp.ones((2, 4)))
    said = watch.verdict.text
    assert watch.verdict.kind == "state"
    assert "The optimizer's state state[0].nu['w'] is Inf, though the loss is finite" in said
    assert "their squares leave float32" in said
    assert (f"so large after exp at {marked('ENLARGES')}" in said) == is_exponential


def train_in_jax():
    @jax.jit
    def step(weights, batch):
        loss, gradients = jax.value_and_grad(lambda w: jnp.log(jnp.sum((batch @ w) ** 2)))(weights)
        return weights - 0.01 * gradients, loss

    weights = jnp.ones(3)
    for _ in range(30):
        weights, _ = step(weights, jnp.ones((2, 3)))


def test_trainings_in_threads_end_the_watch(tmp_path):
    trainings.check_that_the_watch_ends(train_in_jax, tmp_path)


def test_threads_that_train_nothing_or_in_turn_do_not_end_the_watch(tmp_path):
    evaluate = jax.jit(lambda: jnp.sum(jnp.ones(3)))
    trainings.check_that_others_do_not_end_it(train_in_jax, evaluate, tmp_path)


def test_a_step_counts_while_another_thread_runs_an_evaluation(tmp_path):
    """Of two functions that run at once, neither is within the other."""
    is_begun, may_end = threading.Event(), threading.Event()

    def wait(number):
        is_begun.set()
        may_end.wait(60)
        return number

    with gradscaler.watch(tmp_path) as watch:
        evaluate = jax.jit(lambda x: jax.pure_callback(wait, x, x))
        aside = threading.Thread(target=lambda: evaluate(jnp.ones(3)).block_until_ready())
        aside.start()
        is_begun.wait(60)
        train_in_jax()
        may_end.set()
        aside.join()
    assert watch.verdict.text.startswith("None of 30 steps")
