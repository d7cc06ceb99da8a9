"""Loops of JAX that lose their new weights under ``gradscaler run``, and healthy ones."""

import io
from dataclasses import dataclass
from unittest import mock

import flax.training.train_state
import jax
import jax.numpy as jnp
import optax
import pytest

import gradscaler
from gradscaler._run_script.voice import voice
from gradscaler.diagnose import read_run
from gradscaler.diagnose._locate.jaxpr import evaluate
from gradscaler.diagnose._seams.jax import JaxSeam

STEPS = 12
INPUTS = jnp.linspace(-1.0, 1.0, 32).reshape(8, 4)


def loss_of(params, x):
    return jnp.mean((x @ params["w"] + params["b"] - x.sum(1)) ** 2)


@dataclass
class Loop:
    """The weights of a loop, its optimizer, and what takes gradients in it."""

    by: optax.GradientTransformation
    is_compiled: bool = True

    def __post_init__(self):
        self.params = {"b": jnp.zeros(()), "w": jnp.array([0.5, -1.0, 2.0, 0.0])}
        self.state = self.by.init(self.params)
        take = jax.value_and_grad(loss_of)
        self.take = jax.jit(take) if self.is_compiled else take

    def update(self):
        _, gradients = self.take(self.params, INPUTS)
        updates, self.state = self.by.update(gradients, self.state, self.params)
        return updates


def stepping(by, step):
    """A loop whose step is one function, as it returns weights and state."""

    @jax.jit
    def compiled(params, state, x):
        loss, gradients = jax.value_and_grad(loss_of)(params, x)
        updates, made = by.update(gradients, state, params)
        return *step(params, optax.apply_updates(params, updates), state, made), loss

    loop = Loop(by)
    for _ in range(STEPS):
        loop.params, loop.state, _ = compiled(loop.params, loop.state, INPUTS)


def returning_old(by):
    stepping(by, lambda params, new, state, made: (params, made))


def a_train_state_that_is_not_assigned():
    @jax.jit
    def step(state, x):
        loss, gradients = jax.value_and_grad(loss_of)(state.params, x)
        state.apply_gradients(grads=gradients)
        return state, loss

    state = flax.training.train_state.TrainState.create(
        apply_fn=None, params=Loop(optax.sgd(0.1)).params, tx=optax.sgd(0.1)
    )
    for _ in range(STEPS):
        state, _ = step(state, INPUTS)


def donated_weights():
    def step(params, state, x):
        _, gradients = jax.value_and_grad(loss_of)(params, x)
        _, state = loop.by.update(gradients, state, params)
        return params, state

    loop = Loop(optax.adam(0.1))
    compiled = jax.jit(step, donate_argnums=(0, 1))
    for _ in range(STEPS):
        loop.params, loop.state = compiled(loop.params, loop.state, INPUTS)


RETURNED = {
    "adam": lambda: returning_old(optax.adam(0.1)),
    "a state without arrays": lambda: returning_old(optax.sgd(0.1)),
    "a train state": a_train_state_that_is_not_assigned,
    "donated": donated_weights,
}


@pytest.mark.parametrize("name", RETURNED)
def test_a_step_that_returns_its_own_weights_is_told(tmp_path, name):
    with gradscaler.watch(tmp_path) as watch:
        RETURNED[name]()
    assert watch.verdict.kind == "misuse"
    told = f"In {STEPS} of {STEPS} steps, the weights that the step returns are those that it was"
    assert watch.verdict.text.startswith(told)


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("is_compiled", [True, False])
def test_weights_that_the_next_gradient_does_not_see_are_told(tmp_path, is_compiled, keeps):
    kept = []
    with gradscaler.watch(tmp_path) as watch:
        loop = Loop(optax.sgd(0.1), is_compiled)
        for _ in range(STEPS):
            new = optax.apply_updates(loop.params, loop.update())
            kept += [new] * keeps
            del new
    assert watch.verdict.kind == "misuse"
    told = f"In {STEPS - 1} of {STEPS} steps, the weights whose gradient is taken are the same"
    assert watch.verdict.text.startswith(told)
    assert "params = optax.apply_updates(params, updates)" in watch.verdict.text


def targets_alone(params, x):
    return jnp.mean(x.sum(1) ** 2) + 0.0 * jnp.round(params["w"]).sum()


def units_that_are_off(params, x):
    return jnp.mean((x.sum(1) - jax.nn.relu(x @ params["w"] - 1e9 + params["b"])) ** 2)


APART = "all gradients are exactly 0, as the loss does not depend on the weights"
ZERO = "all gradients of the weights are exactly 0"


@pytest.mark.parametrize(
    ("loss", "is_compiled", "told"),
    [
        (targets_alone, True, APART),
        (units_that_are_off, True, ZERO),
        (targets_alone, False, ZERO),
    ],
)
def test_gradients_of_exactly_0_are_told(tmp_path, loss, is_compiled, told):
    by = optax.adam(0.1)

    def step(params, state, x):
        value, gradients = take(params, x)
        updates, state = by.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    with gradscaler.watch(tmp_path) as watch:
        take = jax.value_and_grad(loss)
        step = jax.jit(step) if is_compiled else step
        loop = Loop(by)
        for _ in range(5 * STEPS):
            loop.params, loop.state, _ = step(loop.params, loop.state, INPUTS)
    assert watch.verdict.kind == "misuse"
    assert told in watch.verdict.text


def log_of_targets(params, x):
    return jnp.mean(jnp.log(0.0 * x.sum(1))) + 0.0 * jnp.round(params["w"]).sum()


def log_of_outputs(params, x):
    return jnp.mean(jnp.log(jax.nn.relu(x @ params["w"] - 1e9))) + params["w"].sum()


@pytest.mark.parametrize("has_number", [True, False])  # the first loss may be a number of a state
@pytest.mark.parametrize("loss", [log_of_targets, log_of_outputs])
def test_a_bad_loss_of_the_targets_alone_is_told_as_that(tmp_path, monkeypatch, loss, has_number):
    def step(params, x):
        value, gradients = jax.value_and_grad(loss)(params, x)
        return optax.apply_updates(params, jax.tree.map(lambda g: -0.1 * g, gradients)), value

    told = io.StringIO()
    monkeypatch.setattr("gradscaler._run_script.voice._STDERR", told)
    params = {"w": jnp.ones(4)} | ({"b": jnp.zeros(())} if has_number else {})
    with gradscaler.watch(tmp_path) as watch:
        compiled = jax.jit(step)
        for _ in range(60):
            params, _ = compiled(params, INPUTS)
    text, is_apart = watch.verdict.text, loss is log_of_targets
    assert (
        "and it does not depend on the weights, whose gradients are exactly 0" in text
    ) == is_apart
    assert ("Look at whether the loss uses what the model returns" in text) == is_apart
    assert ("clamp" in text) == (not is_apart)
    assert "log at " in text
    said = " ".join(told.getvalue().split())
    assert "of 60 steps, all gradients" not in said
    assert has_number or said.count("The loss is -inf in each step") == 2  # also at the end


def test_gradients_of_exactly_0_are_told_beside_a_callback(tmp_path):
    """A callback of the user's is not called again to see them."""
    called = []

    def loss(params, x):
        jax.debug.callback(lambda: called.append(1))
        return targets_alone(params, x)

    with gradscaler.watch(tmp_path) as watch:
        trained_until(optax.sgd(0.1), 60, take=loss)
    assert APART in watch.verdict.text
    assert len(called) == 60


def trained_until(by, steps, noise=0.1, take=loss_of):
    """A loop of batches that differ."""

    @jax.jit
    def step(state, x):
        loss, gradients = jax.value_and_grad(take)(state.params, x)
        return state.apply_gradients(grads=gradients), loss

    params = Loop(by).params
    state = flax.training.train_state.TrainState.create(apply_fn=None, params=params, tx=by)
    for number in range(steps):
        state, _ = step(state, INPUTS + noise * jnp.sin(number + 17 * INPUTS))


def test_a_schedule_that_has_ended_early_is_told(tmp_path):
    with gradscaler.watch(tmp_path) as watch:
        trained_until(optax.adam(optax.cosine_decay_schedule(0.01, decay_steps=STEPS)), 50)
    assert watch.verdict.kind == "misuse"
    assert f"from step {STEPS + 1} on, in {50 - STEPS} of 50 steps, though gradients are not 0" in (
        watch.verdict.text
    )


@pytest.mark.parametrize(
    "train",
    [
        lambda: trained_until(optax.sgd(0.5), 60, noise=0.0),  # it converges to the bit
        lambda: trained_until(optax.MultiSteps(optax.adam(0.01), every_k_schedule=25), 80),
        lambda: trained_until(optax.adam(optax.cosine_decay_schedule(0.01, decay_steps=60)), 80),
    ],
)
def test_weights_that_stand_on_purpose_raise_no_alarm(tmp_path, train):
    with gradscaler.watch(tmp_path) as watch:
        train()
    assert watch.verdict.kind == "normal"


def a_warm_up_at_a_rate_of_0():
    rate = optax.constant_schedule(0.0)
    stepping(optax.adam(rate), lambda params, new, state, made: (new, made))
    loop = Loop(optax.adam(rate))
    for _ in range(STEPS):
        loop.params = optax.apply_updates(loop.params, loop.update())


def frozen_weights_beside_trained_ones():
    @jax.jit
    def step(params, frozen, state, x):
        _, gradients = jax.value_and_grad(loss_of)(params, x + 0 * frozen["w"])
        updates, state = loop.by.update(gradients, state, params)
        return optax.apply_updates(params, updates), frozen, state

    loop = Loop(optax.adam(0.1))
    frozen = loop.params
    for _ in range(STEPS):
        loop.params, frozen, loop.state = step(loop.params, frozen, loop.state, INPUTS)


def saliency_maps():
    """And examples against a model, which an optimizer of their own makes."""
    loop = Loop(optax.sgd(0.1))
    by_inputs = jax.jit(jax.grad(loss_of, argnums=1))
    for _ in range(STEPS):
        by_inputs(loop.params, INPUTS)
        loop.take(loop.params, INPUTS)
    noise, state = jnp.zeros(INPUTS.shape), loop.by.init(jnp.zeros(INPUTS.shape))
    for _ in range(STEPS):
        updates, state = loop.by.update(by_inputs(loop.params, INPUTS + noise), state)
        noise = optax.apply_updates(noise, updates)


def an_evaluation_that_returns_the_weights():
    """And the norm of their gradients, as for a Fisher information."""

    @jax.jit
    def evaluate(params, x):
        return params, jnp.linalg.norm(jax.grad(loss_of)(params, x)["w"])

    loop = Loop(optax.sgd(0.1))
    for _ in range(STEPS):
        loop.params, _ = evaluate(loop.params, INPUTS)


def old_weights_that_are_selected():
    def step(params, new, state, made):
        finite = jnp.isfinite(new["w"]).all() & (new["b"] > 1e9)
        return jax.tree.map(lambda n, old: jnp.where(finite, n, old), new, params), made

    stepping(optax.adam(0.1), step)


def accumulated_gradients():
    several = optax.MultiSteps(optax.adam(0.1), every_k_schedule=6)
    stepping(several, lambda params, new, state, made: (new, made))
    loop = Loop(several)
    for _ in range(STEPS):
        loop.params = optax.apply_updates(loop.params, loop.update())


def gradients_that_are_added_up_by_hand():
    @jax.jit
    def add(params, total, x):
        return params, jax.tree.map(jnp.add, total, jax.grad(loss_of)(params, x))

    loop = Loop(optax.adam(0.1))
    total = jax.tree.map(jnp.zeros_like, loop.params)
    for step in range(1, STEPS + 1):
        loop.params, total = add(loop.params, total, INPUTS)
        loop.take(loop.params, INPUTS)
        if step % 6 == 0:
            updates, loop.state = loop.by.update(total, loop.state, loop.params)
            loop.params = optax.apply_updates(loop.params, updates)


def a_target_network():
    @jax.jit
    def step(params, target, state, x):
        def loss(params):
            return loss_of(params, x) + 0.1 * jnp.mean((x @ (params["w"] - target["w"])) ** 2)

        updates, state = loop.by.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), target, state

    loop = Loop(optax.adam(0.1))
    target = loop.params
    for at in range(STEPS):
        loop.params, target, loop.state = step(loop.params, target, loop.state, INPUTS)
        target = loop.params if at % 6 == 5 else target


def tasks_that_begin_at_the_same_weights():
    loop, inner = Loop(optax.sgd(0.1)), optax.sgd(0.01)
    of_task = jax.jit(jax.grad(loss_of))
    for _ in range(STEPS):
        _, gradients = loop.take(loop.params, INPUTS)
        updates, _ = inner.update(gradients, inner.init(loop.params))
        of_task(optax.apply_updates(loop.params, updates), INPUTS)


def steps_to_a_worse_place_and_back():
    """As a sharpness-aware optimizer makes them."""
    loop = Loop(optax.sgd(0.1))
    for _ in range(STEPS):
        worse = optax.apply_updates(loop.params, jax.tree.map(jnp.negative, loop.update()))
        _, gradients = loop.take(worse, INPUTS)
        updates, loop.state = loop.by.update(gradients, loop.state)
        loop.params = optax.apply_updates(loop.params, updates)


HEALTHY = [
    a_warm_up_at_a_rate_of_0,
    frozen_weights_beside_trained_ones,
    saliency_maps,
    an_evaluation_that_returns_the_weights,
    old_weights_that_are_selected,
    accumulated_gradients,
    gradients_that_are_added_up_by_hand,
    a_target_network,
    tasks_that_begin_at_the_same_weights,
    steps_to_a_worse_place_and_back,
]


@pytest.mark.parametrize("train", HEALTHY, ids=lambda each: each.__name__)
def test_a_loop_that_gives_the_same_weights_on_purpose_raises_no_alarm(tmp_path, train):
    with gradscaler.watch(tmp_path):
        train()
    runs = [read_run(file) for file in tmp_path.iterdir()]
    assert {run.num_steps for run in runs} <= {STEPS, 2 * STEPS}
    assert {run.verdict.kind for run in runs} == {"normal"}


RATES = {
    "a schedule": lambda: optax.adam(optax.constant_schedule(0.0)),
    "a factor": lambda: optax.chain(optax.scale_by_adam(), optax.scale(0.0)),
}


@pytest.mark.parametrize("name", RATES)
def test_a_rate_that_is_0_throughout_is_told(tmp_path, name):
    with gradscaler.watch(tmp_path) as watch:
        trained_until(RATES[name](), 3 * STEPS)
    assert watch.verdict.kind == "misuse"
    told = f"The weights have not changed in any of {3 * STEPS} steps, though gradients are not 0"
    assert watch.verdict.text.startswith(told)


def train_step(by):
    @jax.jit
    def step(params, state, x):
        loss, gradients = jax.value_and_grad(loss_of)(params, x)
        updates, state = by.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


@pytest.mark.parametrize("is_state_kept", [True, False])
def test_new_weights_that_are_not_assigned_are_told(tmp_path, is_state_kept):
    with gradscaler.watch(tmp_path) as watch:
        loop = Loop(optax.adam(0.1))
        step, state = train_step(loop.by), loop.state
        for number in range(3 * STEPS):
            _, made, _ = step(loop.params, state, INPUTS + number)
            state = made if is_state_kept else state
    assert watch.verdict.kind == "misuse"
    assert "though the step returned new ones, which nothing took" in watch.verdict.text


def test_donated_weights_that_are_not_assigned_are_told_where_the_script_fails(tmp_path):
    with gradscaler.watch(tmp_path), mock.patch.object(voice, "note") as note:
        loop = Loop(optax.adam(0.1))
        step = jax.jit(lambda *args: train_step(loop.by)(*args), donate_argnums=(0, 1))
        step(loop.params, loop.state, INPUTS)
        with pytest.raises((RuntimeError, ValueError), match="deleted or donated"):
            step(loop.params, loop.state, INPUTS)
    assert "arrays that an earlier call has used up, as they are donated" in note.call_args[0][0]


def test_an_error_of_a_step_is_not_blamed_on_arrays_that_it_was_donated(tmp_path):
    def raising(x):
        raise ValueError("bad data")

    def shown(weights):
        return jax.pure_callback(raising, jax.ShapeDtypeStruct((), "float32"), weights.sum())

    with gradscaler.watch(tmp_path), mock.patch.object(voice, "note") as note:
        step = jax.jit(
            lambda w: w - jax.grad(lambda w: (w**2).sum())(w) + shown(w), donate_argnums=0
        )
        with pytest.raises(Exception, match="bad data"):
            jax.block_until_ready(step(jnp.ones(4)))
    assert not any("used up" in str(call) for call in note.call_args_list)


def several_tasks_from_the_same_weights():
    """What their steps return is kept, and added up for the next weights."""
    loop = Loop(optax.sgd(0.1))
    step = train_step(loop.by)
    for _ in range(2):
        made = [step(loop.params, loop.state, INPUTS + task)[0] for task in range(3 * STEPS)]
        mean = jax.tree.map(lambda *own: sum(own) / len(own), *made)
        loop.params = jax.tree.map(lambda old, new: old + 0.5 * (new - old), loop.params, mean)


def what_the_next_function_takes():
    loop = Loop(optax.sgd(0.1))
    step, evaluate = train_step(loop.by), jax.jit(lambda *args: loss_of(*args))
    for rate in range(3 * STEPS):
        evaluate(step(loop.params, loop.state, INPUTS * rate)[0], INPUTS)


@pytest.mark.parametrize("factor", [1.3, 10.0])
def test_a_search_for_a_rate_raises_no_alarm(tmp_path, factor):
    """It looks at the loss of what each rate makes of the same weights; no function takes these."""
    with gradscaler.watch(tmp_path) as watch:
        loop = Loop(optax.sgd(1e-4))
        for number in range(STEPS):
            rate = optax.sgd(1e-4 * factor**number)
            _, gradients = loop.take(loop.params, INPUTS)
            updates, _ = rate.update(gradients, rate.init(loop.params))
            loss_of(optax.apply_updates(loop.params, updates), INPUTS)
    assert watch.verdict.kind == "normal"


def test_a_warm_up_whose_weights_are_lost_is_told(tmp_path):
    with gradscaler.watch(tmp_path) as watch:
        loop = Loop(optax.sgd(optax.linear_schedule(0.0, 0.1, 100)))
        for _ in range(STEPS):
            optax.apply_updates(loop.params, loop.update())
    assert watch.verdict.kind == "misuse"


@pytest.mark.parametrize(
    "train", [several_tasks_from_the_same_weights, what_the_next_function_takes]
)
def test_new_weights_that_are_used_elsewhere_raise_no_alarm(tmp_path, train):
    with gradscaler.watch(tmp_path):
        train()
    assert {read_run(file).verdict.kind for file in tmp_path.iterdir()} == {"normal"}


@pytest.mark.parametrize(("loss", "told"), [(units_that_are_off, ZERO), (targets_alone, APART)])
def test_gradients_of_exactly_0_in_a_scan_are_told(tmp_path, loss, told):
    by = optax.adam(0.1)

    def step(carried, x):
        params, state = carried
        value, gradients = jax.value_and_grad(loss)(params, x)
        updates, state = by.update(gradients, state, params)
        return (optax.apply_updates(params, updates), state), value

    with gradscaler.watch(tmp_path) as watch:
        epoch = jax.jit(lambda *carried: jax.lax.scan(step, carried, jnp.stack([INPUTS] * 8)))
        loop = Loop(by)
        for _ in range(STEPS):
            (loop.params, loop.state), _ = epoch(loop.params, loop.state)
    assert watch.verdict.kind == "misuse"
    assert told in watch.verdict.text


def test_weights_that_a_scan_moves_raise_no_alarm(tmp_path):
    by = optax.adam(0.1)

    def step(carried, x):
        params, state = carried
        updates, state = by.update(jax.grad(loss_of)(params, x), state, params)
        return (optax.apply_updates(params, updates), state), loss_of(params, x)

    with gradscaler.watch(tmp_path) as watch:
        epoch = jax.jit(lambda *carried: jax.lax.scan(step, carried, jnp.stack([INPUTS] * 8)))
        loop = Loop(by)
        for _ in range(STEPS):
            (loop.params, loop.state), _ = epoch(loop.params, loop.state)
    assert watch.verdict.kind == "normal"


@pytest.mark.parametrize("has_callback", [False, True])
def test_a_step_that_is_run_again_for_its_gradients_is_one_program(has_callback):
    """One for each primitive takes ten times the time to compile."""

    def gradients(params, x):
        if has_callback:
            jax.debug.callback(lambda: None)
        return list(jax.grad(loss_of)(params, x).values())

    params = Loop(optax.sgd(0.1)).params
    with mock.patch.object(JaxSeam, "run", autospec=True, side_effect=JaxSeam.run) as by_primitive:
        found, depend = evaluate(gradients, params, INPUTS)
    assert by_primitive.called == has_callback
    assert depend
    for one, other in zip(found, gradients(params, INPUTS), strict=True):
        assert jnp.allclose(one, other)
