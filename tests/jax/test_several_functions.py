"""Scripts of JAX with several functions that take gradients, of which one trains."""

import jax
import jax.numpy as jnp
import optax
import pytest

import gradscaler
from gradscaler.diagnose import read_run

STEPS = 12
INPUTS = jnp.linspace(-1.0, 1.0, 8)


def outputs_at(params, x):
    return jnp.tanh(x * params["first"]) @ params["last"]


def slopes(params, inputs):
    """The derivatives of the outputs by the inputs, as those of an equation are."""
    return jax.vmap(jax.grad(outputs_at, argnums=1), (None, 0))(params, inputs)


def loss_of(params, inputs):
    return jnp.mean((slopes(params, inputs) - jnp.cos(inputs)) ** 2)


def by_optax(params, state, inputs):
    loss, gradients = jax.value_and_grad(loss_of)(params, inputs)
    updates, state = optax.adam(0.05).update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss


def by_hand(params, state, inputs):
    loss, gradients = jax.value_and_grad(loss_of)(params, inputs)
    return jax.tree.map(lambda w, each: w - 0.05 * each, params, gradients), state, loss


EVALUATIONS = {
    "a loss of derivatives": loss_of,
    "derivatives": slopes,
    "numbers": lambda params, inputs: {
        "mse": loss_of(params, inputs),
        "norm": optax.tree.norm(jax.grad(loss_of)(params, inputs)),
    },
}


def compiled(function):
    """A function that JAX traces anew, though another test has had it."""
    return jax.jit(lambda *args: function(*args))


def run(folder, step, evaluation, *, is_compiled=True, is_first=False, bad_at=0):
    """What is said at the end, and the runs on file."""
    with gradscaler.watch(folder) as watch:
        evaluate = compiled(evaluation)
        step = compiled(step) if is_compiled else step
        params = {"first": jnp.linspace(-1.0, 1.0, 4), "last": jnp.linspace(0.5, 1.0, 4)}
        state = optax.adam(0.05).init(params)
        for number in range(1, STEPS + 1):
            if is_first:
                evaluate(params, INPUTS)
            params, state, _ = step(params, state, INPUTS)
            evaluate(params, INPUTS * (jnp.nan if number == bad_at else 1.0))
        verdict = watch.verdict
    return verdict, [read_run(file) for file in folder.iterdir()]


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(
    ("step", "is_compiled"), [(by_optax, True), (by_hand, True), (by_optax, False)]
)
@pytest.mark.parametrize("evaluation", EVALUATIONS)
def test_what_trains_alone_has_a_verdict(tmp_path, evaluation, step, is_compiled, is_first):
    verdict, runs = run(
        tmp_path, step, EVALUATIONS[evaluation], is_compiled=is_compiled, is_first=is_first
    )
    assert [each.num_steps for each in runs] == [STEPS]
    assert verdict.text == runs[0].verdict.text


def test_an_evaluation_that_is_nan_is_told_beside_the_training(tmp_path):
    _, runs = run(tmp_path, by_optax, loss_of, bad_at=5)
    assert sorted(each.verdict.kind for each in runs) == ["loss", "normal"]


def test_two_networks_that_train_have_a_verdict_each(tmp_path):
    with gradscaler.watch(tmp_path):
        steps = [compiled(by_optax), compiled(by_hand)]
        params = {"first": jnp.linspace(-1.0, 1.0, 4), "last": jnp.linspace(0.5, 1.0, 4)}
        states = [(params, optax.adam(0.05).init(params))] * 2
        for _ in range(STEPS):
            states = [take(*own, INPUTS)[:2] for take, own in zip(steps, states, strict=True)]
    assert len(list(tmp_path.iterdir())) == 2


def test_an_evaluation_alone_has_its_verdict(tmp_path):
    with gradscaler.watch(tmp_path) as watch:
        evaluate = compiled(loss_of)
        evaluate({"first": jnp.ones(4), "last": jnp.ones(4)}, INPUTS)
    assert watch.verdict.kind == "normal"
    assert len(list(tmp_path.iterdir())) == 1
