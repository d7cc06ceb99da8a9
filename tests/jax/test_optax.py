"""The optax wrapper against the bare optimizer on unscaled gradients."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradscaler import DynamicScale, FixedScale
from gradscaler.jax import GradScaler, loss_scaled, master_weights
from tests.support.chosen import examples

POLICY = DynamicScale(init_scale=2.0**10, growth_interval=3)
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(0.1),
    "adamw": lambda: optax.adamw(0.1),
    "lamb": lambda: optax.lamb(0.1),
    "adafactor": lambda: optax.adafactor(0.1),
    "lion": lambda: optax.lion(0.1),
    "schedule": lambda: optax.sgd(optax.cosine_decay_schedule(0.1, 10)),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(
        learning_rate=optax.linear_schedule(0.1, 0.01, 10)
    ),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "multi_transform": lambda: optax.multi_transform(
        {"a": optax.adam(0.1), "b": optax.set_to_zero()}, {"w": "a", "b": "b", "none": "a"}
    ),
    "masked": lambda: optax.masked(optax.adam(0.1), {"w": True, "b": False, "none": True}),
    "clip": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1)),
}


def params():
    return {"w": jnp.linspace(-1, 1, 6).reshape(2, 3), "b": jnp.array([0.5, -0.5]), "none": None}


def gradients(step):
    return jax.tree.map(lambda p: jnp.sin(p * (step + 1)), params())


def start(optimizer):
    """An optimizer, parameters, and its state for them."""
    weights = params()
    return optimizer, weights, optimizer.init(weights)


def pairs(*trees):
    return zip(*map(jax.tree.leaves, trees), strict=True)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.some(5, "the wrapper calls each in one way")
@settings(max_examples=examples(4))
@given(overflows=st.lists(st.booleans(), min_size=6, max_size=6))
def test_it_steps_like_the_bare_optimizer_and_skips_what_overflows(name, overflows, exact):
    bare, theirs, inner = start(OPTIMIZERS[name]())
    scaled, mine, state = start(loss_scaled(OPTIMIZERS[name](), POLICY))
    update, bare_update = jax.jit(scaled.update), jax.jit(bare.update)
    host = POLICY.init()
    for step, overflow in enumerate(overflows):
        grads = state.scaler.scale(gradients(step))
        if overflow:
            grads["b"] = grads["b"].at[1].set(jnp.nan)
        before = exact((mine, state.inner_state))
        updates, state = update(grads, state, mine)
        mine = optax.apply_updates(mine, updates)
        host = POLICY.update(host, overflow)
        assert state.scaler.loss_scale == host.scale
        assert bool(state.grads_finite) is not overflow
        if overflow:
            assert exact((mine, state.inner_state)) == before
            assert not any(update.any() for update in jax.tree.leaves(updates))
        else:
            updates, inner = bare_update(gradients(step), inner, theirs)
            theirs = optax.apply_updates(theirs, updates)
        for ours, other in pairs(mine, theirs):
            np.testing.assert_allclose(ours, other, rtol=1e-6, atol=1e-7)
    assert exact(state.inner_state)[0] == exact(inner)[0]


def test_a_run_scaled_by_a_power_of_two_has_the_bits_of_the_bare_optimizer_s(exact):
    bare, theirs, inner = start(optax.adam(0.1))
    scaled, mine, state = start(loss_scaled(optax.adam(0.1), POLICY))
    for step in range(8):  # grows twice
        updates, state = scaled.update(state.scaler.scale(gradients(step)), state, mine)
        mine = optax.apply_updates(mine, updates)
        updates, inner = bare.update(gradients(step), inner, theirs)
        theirs = optax.apply_updates(theirs, updates)
    assert exact(mine) == exact(theirs)
    assert exact(state.inner_state) == exact(inner)
    assert state.scaler.loss_scale == 2.0**12


NESTINGS = {
    "chain": lambda: loss_scaled(optax.chain(optax.identity(), optax.adam(0.1)), POLICY),
    "MultiSteps": lambda: loss_scaled(
        optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(), POLICY
    ),
    "inject_hyperparams": lambda: loss_scaled(optax.inject_hyperparams(optax.sgd)(0.1), POLICY),
    "multi_transform": lambda: loss_scaled(
        optax.multi_transform({"a": optax.adam(0.1)}, {"w": "a", "b": "a", "none": "a"}), POLICY
    ),
}


@pytest.mark.parametrize("name", NESTINGS)
def test_optax_s_tree_functions_find_the_scaler_and_map_the_parameters(name):
    optimizer, _, state = start(NESTINGS[name]())
    scaler = optax.tree_utils.tree_get({"state": state}, "scaler")
    assert isinstance(scaler, GradScaler)
    assert scaler.scale(1.0) == 2.0**10
    doubled = optax.tree_utils.tree_map_params(optimizer, lambda leaf: leaf * 2, state)
    assert doubled.scaler.loss_scale == 2.0**10


LABELS = {"w": "a", "b": "b", "none": "a"}
OUTSIDE = {
    "chain after a clip": lambda scaled: optax.chain(optax.clip_by_global_norm(1.0), scaled),
    "chain before anything": lambda scaled: optax.chain(scaled, optax.add_noise(0.1, 0.5, 0)),
    "chain around inject_hyperparams": lambda scaled: optax.chain(
        optax.clip_by_global_norm(1.0), optax.inject_hyperparams(lambda lr: scaled)(0.1)
    ),
    "chain in inject_hyperparams": lambda scaled: optax.inject_hyperparams(
        lambda lr: optax.chain(optax.clip_by_global_norm(1.0), scaled)
    )(0.1),
    "named_chain": lambda scaled: optax.named_chain(("first", scaled)),
    "multi_transform": lambda scaled: optax.multi_transform(
        {"a": scaled, "b": optax.sgd(0.1)}, LABELS
    ),
    "masked": lambda scaled: optax.masked(scaled, {"w": True, "b": False, "none": True}),
    "MultiSteps": lambda scaled: optax.MultiSteps(scaled, 2),
    "apply_if_finite": lambda scaled: optax.apply_if_finite(scaled, 3),
    "loss_scaled": lambda scaled: loss_scaled(optax.chain(optax.clip_by_global_norm(1.0), scaled)),
}


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", OUTSIDE)
def test_a_transformation_around_it_is_refused_with_what_to_write(name, jit):
    init = OUTSIDE[name](loss_scaled(optax.sgd(0.1))).init
    with pytest.raises(ValueError, match=r"inside another .*outermost: loss_scaled\(optax.chain"):
        (jax.jit(init) if jit else init)(params())


TWICE = {
    "itself": lambda scaled: scaled,
    "master_weights": master_weights,
    "a package that is not optax": lambda scaled: optax.GradientTransformation(
        lambda params: (scaled.init(params),), scaled.update
    ),
}


@pytest.mark.parametrize("between", TWICE.values(), ids=TWICE)
def test_loss_scaled_twice_is_refused(between):
    optimizer = loss_scaled(between(loss_scaled(optax.sgd(0.1))))
    with pytest.raises(ValueError, match=r"divided by both scales\. Write it once, outermost"):
        optimizer.init(params())


def test_without_frames_nothing_is_refused(monkeypatch):
    monkeypatch.setattr("inspect.currentframe", lambda: None)
    for name in ("chain after a clip", "chain around inject_hyperparams"):
        OUTSIDE[name](loss_scaled(optax.sgd(0.1))).init(params())


def test_outermost_a_clip_cuts_the_true_gradients():
    optimizer = loss_scaled(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)))
    weight = jnp.array([3.0, 4.0])
    state = jax.eval_shape(optimizer.init, weight)  # JAX may call it
    state = jax.jit(optimizer.init)(weight)
    updates, _ = optimizer.update(state.scaler.scale(weight), state, weight)
    np.testing.assert_allclose(updates, [-0.06, -0.08], rtol=1e-6)


def test_flax_s_train_state_may_call_it():
    from flax.training.train_state import TrainState

    made = TrainState.create(apply_fn=None, params=params(), tx=loss_scaled(optax.sgd(0.1)))
    assert made.opt_state.scaler.loss_scale == 2.0**16


def test_an_overflow_discards_its_own_gradients_and_keeps_the_accumulated_ones():
    optimizer, weights, state = start(NESTINGS["MultiSteps"]())
    bare, _, inner = start(optax.MultiSteps(optax.adam(0.1), 2))
    for step, overflow in enumerate([False, True, False, False, False]):
        grads = state.scaler.scale(gradients(step))
        if overflow:
            grads["b"] = grads["b"] * jnp.inf
        updates, state = optimizer.update(grads, state, weights)
        if overflow:
            assert not any(update.any() for update in jax.tree.leaves(updates))
        else:
            expected, inner = bare.update(gradients(step), inner, weights)
            for mine, theirs in pairs(updates, expected):
                np.testing.assert_array_equal(mine, theirs)
    assert state.scaler.loss_scale == 2.0**10  # down, and up again after three finite ones


def test_half_gradients_of_single_parameters_do_not_underflow_again():
    weights = {"w": jnp.ones(3)}
    optimizer, bare = loss_scaled(optax.adam(0.01)), optax.adam(0.01)
    state = optimizer.init(weights)

    def loss(weights):
        return (weights["w"] * jnp.float16(1)).astype(jnp.float32).sum() * 1e-9

    halves = jax.tree.map(lambda w: w.astype(jnp.float16), weights)
    grads = jax.grad(lambda halves: state.scaler.scale(loss(halves)))(halves)
    assert grads["w"].dtype == jnp.float16
    updates, state = optimizer.update(grads, state, weights)
    expected, _ = bare.update(jax.grad(loss)(weights), bare.init(weights), weights)
    np.testing.assert_allclose(updates["w"], expected["w"], rtol=1e-2)
    assert updates["w"].dtype == jnp.float32


def test_single_gradients_of_half_parameters_leave_the_state_its_dtypes():
    weights = jnp.ones(3, jnp.float16)
    optimizer = loss_scaled(optax.adam(0.01), FixedScale(8.0))
    state = optimizer.init(weights)
    for _ in range(2):
        updates, state = optimizer.update(jnp.ones(3, jnp.float32), state, weights)
        assert state.inner_state[0].mu.dtype == jnp.float16
        weights = optax.apply_updates(weights, updates)
    assert weights.dtype == jnp.float16


def test_a_gradient_may_be_a_number():
    optimizer = loss_scaled(optax.sgd(0.5), FixedScale(8.0))
    updates, _ = optimizer.update({"w": 8.0, "n": 0}, optimizer.init({"w": 1.0, "n": 0}))
    assert updates["w"] == -0.5


def test_extra_arguments_reach_the_optimizer():
    plateau = optax.contrib.reduce_on_plateau(patience=1)
    optimizer, weights, state = start(loss_scaled(plateau, POLICY))
    _, state = optimizer.update(gradients(0), state, weights, value=jnp.float32(3.0))
    assert state.inner_state.best_value == 3.0


def test_gradients_keep_their_dtypes():
    weights = {"half": jnp.ones(2, jnp.float16), "brain": jnp.ones(2, jnp.bfloat16)}
    optimizer = loss_scaled(optax.adam(0.1), FixedScale(8.0))
    before = optimizer.init(weights)
    updates, state = optimizer.update(jax.tree.map(lambda w: w * 8, weights), before, weights)
    for mine, theirs in pairs((updates, state), (weights, before)):
        assert jnp.result_type(mine) == jnp.result_type(theirs)


def test_a_whole_run_can_be_scanned():
    optimizer = loss_scaled(optax.sgd(0.5), DynamicScale(init_scale=2.0**10, growth_interval=2))

    def step(carry, x):
        weight, state = carry
        grad = jax.grad(lambda w: state.scaler.scale(w * x))(weight)
        updates, state = optimizer.update(grad, state, weight)
        return (optax.apply_updates(weight, updates), state), state.scaler.loss_scale

    zero = jnp.float32(0.0)
    inputs = jnp.array([1.0, 2.0, jnp.inf, 4.0])
    (weight, _), scales = jax.lax.scan(step, (zero, optimizer.init(zero)), inputs)
    assert weight == -0.5 * (1 + 2 + 4)
    assert scales.tolist() == [2.0**10, 2.0**11, 2.0**10, 2.0**10]


def test_devices_that_did_not_average_their_gradients_decide_together():
    optimizer = loss_scaled(optax.sgd(1.0), POLICY, axis_name="batch")
    weight = jnp.float32(1.0)

    def step(grad):
        updates, state = optimizer.update(grad, optimizer.init(weight), weight)
        return updates, state.scaler.loss_scale

    grads = jnp.arange(8.0).at[5].set(jnp.inf)
    updates, scales = jax.pmap(step, axis_name="batch")(grads)
    assert updates.tolist() == [0.0] * 8
    assert scales.tolist() == [2.0**9] * 8


def test_flax_serialises_the_whole_state(exact):
    from flax import serialization

    optimizer, weights, target = start(NESTINGS["chain"]())
    _, state = optimizer.update(gradients(0), target, weights)
    assert exact(serialization.from_bytes(target, serialization.to_bytes(state))) == exact(state)


@pytest.mark.parametrize(
    ("arguments", "name"), [((0.1,), "optimizer"), ((optax.sgd(0.1), 2.0**16), "policy")]
)
def test_anything_but_an_optimizer_and_a_policy_is_refused(arguments, name):
    with pytest.raises(TypeError, match=f"{name} must be"):
        loss_scaled(*arguments)


def test_without_optax_it_says_what_to_install(monkeypatch):
    optimizer = optax.sgd(0.1)
    monkeypatch.setitem(sys.modules, "optax", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs optax: pip install .*'optax>="):
        loss_scaled(optimizer)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_inject_hyperparams_around_it_trains_like_the_bare_optimizer(jit, exact):
    bare, theirs, plain = start(optax.inject_hyperparams(lambda lr: optax.adam(lr))(lr=0.1))
    scaled, mine, state = start(
        optax.inject_hyperparams(lambda lr: loss_scaled(optax.adam(lr), POLICY))(lr=0.1)
    )
    compiled = jax.jit if jit else lambda function: function
    update, bare_update = compiled(scaled.update), compiled(bare.update)
    for step, overflow in enumerate([False, False, True, False, False]):
        if step == 3:
            state.hyperparams["lr"] = plain.hyperparams["lr"] = jnp.float32(0.01)
        grads = state.inner_state.scaler.scale(gradients(step))
        if overflow:
            grads["b"] = grads["b"] * jnp.inf
        before = exact(state.inner_state.inner_state)
        updates, state = update(grads, state, mine)
        mine = optax.apply_updates(mine, updates)
        if overflow:
            assert exact(state.inner_state.inner_state) == before
        else:
            updates, plain = bare_update(gradients(step), plain, theirs)
            theirs = optax.apply_updates(theirs, updates)
        assert exact(mine) == exact(theirs)
    assert state.inner_state.scaler.loss_scale == 2.0**9
    assert optax.tree_utils.tree_get(state, "scaler") is state.inner_state.scaler
    doubled = optax.tree_utils.tree_map_params(scaled, lambda leaf: leaf * 2, state)
    assert doubled.inner_state.scaler.loss_scale == 2.0**9


def test_schedules_around_it_count_skipped_steps():
    schedule = optax.linear_schedule(1.0, 0.0, 4)
    injected = optax.inject_hyperparams(lambda lr: loss_scaled(optax.sgd(lr), POLICY))(lr=schedule)
    state = injected.init(jnp.float32(1))
    for grad in (jnp.inf, 2.0**9):
        updates, state = injected.update(jnp.float32(grad), state, jnp.float32(1))
    assert updates == -0.75
