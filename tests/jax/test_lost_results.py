"""Steps of JAX that lose what they compute beside the weights, under ``gradscaler run``."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import gradscaler
from gradscaler.diagnose import read_run

STEPS = 12
INPUTS = jnp.sin(jnp.arange(32.0)).reshape(8, 4)


class Model(nn.Module):
    is_trained: bool = True

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=not self.is_trained)(nn.Dense(4)(x))
        return nn.Dense(1)(nn.relu(x))


class State(TrainState):
    batch_stats: dict


BY = optax.adam(0.01)


def variables_of(model):
    return model.init(jax.random.key(0), INPUTS)


def loss_of(model, params, batch_stats, x):
    variables = {"params": params, "batch_stats": batch_stats}
    outputs, new = model.apply(variables, x, mutable=["batch_stats"])
    return jnp.mean((outputs[:, 0] - x.sum(1)) ** 2), new["batch_stats"]


def of_parts(returned, model=None, *, with_loss=True, **options):
    """A step with parts as arguments, which returns what is picked of the old and the new ones."""
    model = model or Model()

    def step(params, stats, state, x):
        take = jax.value_and_grad(partial(loss_of, model), has_aux=True)
        (loss, new), gradients = take(params, stats, x)
        updates, state = BY.update(gradients, state)
        params = optax.apply_updates(params, updates)
        return (params, returned(stats, new), state, *([loss] * with_loss))

    compiled = jax.jit(step, **options)
    variables = variables_of(model)
    params, stats = variables["params"], variables["batch_stats"]
    state = BY.init(params)
    for number in range(STEPS):
        params, stats, state, *_ = compiled(params, stats, state, INPUTS + number)


def old(stats, new):
    return stats


def new(stats, new):
    return new


def a_train_state(*, keeps):
    @jax.jit
    def step(state, x):
        take = jax.value_and_grad(partial(loss_of, Model()), has_aux=True)
        (loss, stats), gradients = take(state.params, state.batch_stats, x)
        state = state.apply_gradients(grads=gradients)
        return (state.replace(batch_stats=stats) if keeps else state), loss

    state = State.create(apply_fn=None, tx=BY, **variables_of(Model()))
    for number in range(STEPS):
        state, _ = step(state, INPUTS + number)


def an_average_of_the_weights(*, keeps):
    """And a scan over the steps of an epoch."""

    def step(carried, x):
        params, average = carried
        loss, gradients = jax.value_and_grad(lambda w: jnp.mean((x @ w - 1) ** 2))(params)
        params = params - 0.01 * gradients
        new = optax.incremental_update(params, average, 0.1)
        return (params, new if keeps else average), loss

    epoch = jax.jit(lambda *carried: jax.lax.scan(step, carried, jnp.stack([INPUTS] * 4)))
    carried = jnp.ones(4), jnp.ones(4)
    for _ in range(STEPS):
        carried, _ = epoch(*carried)


MEAN = "['BatchNorm_0']['mean']"
LOST = {
    "parts": (lambda: of_parts(old), f"stats{MEAN} and 1 more"),
    "donated": (lambda: of_parts(old, donate_argnums=(0, 1, 2)), f"stats{MEAN} and 1 more"),
    "a train state": (partial(a_train_state, keeps=False), f"state.batch_stats{MEAN} and 1 more"),
    "an average": (partial(an_average_of_the_weights, keeps=False), "result[0][1]"),
}


@pytest.mark.parametrize("name", LOST)
def test_a_part_that_is_returned_as_given_is_named(tmp_path, name):
    train, part = LOST[name]
    with gradscaler.watch(tmp_path) as watch:
        train()
    assert watch.verdict.kind == "misuse"
    assert f"In {STEPS} of {STEPS} steps, the step returns {part} as given" in watch.verdict.text


def frozen_weights():
    """Also of a last layer, on which no gradient depends."""

    @jax.jit
    def step(params, frozen, key, scale, x):
        noise = jax.random.normal(jax.random.split(key)[0], x.shape)

        def loss(params):
            return jnp.mean((x + 0.1 * noise) * scale @ (params * frozen["first"]) + frozen["last"])

        loss, gradient = jax.value_and_grad(loss)(params)
        new = optax.apply_updates(frozen, jax.tree.map(jnp.zeros_like, frozen))
        return params - 0.01 * gradient, frozen, key, scale, loss, new["first"]

    args = jnp.ones(4), {"first": jnp.ones(4), "last": jnp.ones(8)}, jax.random.key(0), jnp.ones(4)
    for _ in range(STEPS):
        *args, _, _ = step(*args, INPUTS)


def a_probe():
    """A function that takes gradients, and moves nothing."""

    @jax.jit
    def probe(state, x):
        take = jax.value_and_grad(partial(loss_of, Model()), has_aux=True)
        (loss, _), gradients = take(state.params, state.batch_stats, x)
        return state, optax.tree.norm(gradients), loss

    state = State.create(apply_fn=None, tx=BY, **variables_of(Model()))
    for _ in range(STEPS):
        probe(state, INPUTS)


HEALTHY = {
    "parts": lambda: of_parts(new),
    "statistics that are frozen": lambda: of_parts(old, Model(is_trained=False)),
    "no loss": lambda: of_parts(old, Model(is_trained=False), with_loss=False),
    "a train state": partial(a_train_state, keeps=True),
    "an average": partial(an_average_of_the_weights, keeps=True),
    "frozen weights": frozen_weights,
    "a probe": a_probe,
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_part_that_stays_on_purpose_raises_no_alarm(tmp_path, name):
    with gradscaler.watch(tmp_path):
        HEALTHY[name]()
    (run,) = [read_run(file) for file in tmp_path.iterdir()]
    assert (run.num_steps, run.verdict.kind) == (STEPS, "normal")


def of_nnx(compiled, returned=lambda loss, *models: loss, *, is_split=False):
    """A loop whose step is given a model and its optimizer, and another model that stays."""
    model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)

    teacher = nnx.Linear(4, 1, rngs=nnx.Rngs(1))

    def step(model, optimizer, teacher, x):
        def loss_of(model):
            outputs = model(x)
            return jnp.mean((outputs - teacher(x)) ** 2), outputs

        (loss, outputs), gradients = nnx.value_and_grad(loss_of, has_aux=True)(model)
        optimizer.update(model, gradients)
        return returned((loss, outputs), model, optimizer)

    if is_split:
        definition, state = nnx.split((model, optimizer))

        @compiled
        def train(state, x):
            models = nnx.merge(definition, state)
            step(*models, teacher, x)
            return nnx.state(models)

        for number in range(STEPS):
            state = train(state, INPUTS + number)
        return
    train = compiled(step)
    for number in range(STEPS):
        made = train(model, optimizer, teacher, INPUTS + number)
        if len(made) == 3:
            _, model, optimizer = made


def test_a_model_of_nnx_that_jax_jit_copies_is_told(tmp_path):
    with gradscaler.watch(tmp_path) as watch:
        of_nnx(jax.jit)
    assert watch.verdict.kind == "misuse"
    assert f"In {STEPS} of {STEPS} steps, what changes is a copy" in watch.verdict.text
    assert "nnx.jit in place of jax.jit" in watch.verdict.text


@pytest.mark.parametrize(
    "train",
    [
        lambda: of_nnx(nnx.jit),
        lambda: of_nnx(jax.jit, lambda *made: made),
        lambda: of_nnx(jax.jit, is_split=True),
    ],
)
def test_a_model_of_nnx_that_is_kept_raises_no_alarm(tmp_path, train):
    with gradscaler.watch(tmp_path):
        train()
    (run,) = [read_run(file) for file in tmp_path.iterdir()]
    assert (run.num_steps, run.verdict.kind) == (STEPS, "normal")
