"""States and casts that do not belong to a ``master_weights``, and parameters set by hand."""

import itertools

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gradscaler.jax import master_weights

KEY = {"float32": {}, "remainder16": {}, "stochastic": {"key": jax.random.PRNGKey(0)}}
NARROW = pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16], ids=lambda d: d.__name__)
each_change = pytest.mark.parametrize(("before", "after"), list(itertools.permutations(KEY, 2)))


def params(dtype=jnp.float32):
    """Weights that no 16-bit dtype holds, and a scale that stays in float32."""
    weights = np.linspace(-3, 3, 9) * 1.0001
    return {"w": jnp.asarray(weights, jnp.float32).astype(dtype), "scale": jnp.ones(2)}


def wrapped(store, dtype=jnp.float16, learning_rate=0.0):
    """Without a change by the optimizer, so that the weights may not change either."""
    cast = lambda tree: {**tree, "w": tree["w"].astype(dtype)}  # noqa: E731
    return master_weights(optax.adam(learning_rate), store, cast=cast, **KEY[store])


def stepped(optimizer, state, weights):
    grads = jax.tree.map(jnp.ones_like, weights)
    updates, state = jax.jit(optimizer.update)(grads, state, weights)
    return optax.apply_updates(weights, updates), state


# The state of another store.


@NARROW
@each_change
def test_the_state_of_another_store_is_refused_and_both_are_named(before, after, dtype):
    state = wrapped(before, dtype).init(params())
    message = f"the state is of store='{before}', and the optimizer of store='{after}'"
    with pytest.raises(ValueError, match=message):
        stepped(wrapped(after, dtype), state, params(dtype))


@each_change
def test_it_is_refused_from_a_file_of_flax_too(before, after):
    saved = flax.serialization.to_bytes(wrapped(before).init(params()))
    state = flax.serialization.from_bytes(wrapped(after).init(params()), saved)
    with pytest.raises(ValueError, match=f"store='{before}', and the optimizer of store='{after}'"):
        stepped(wrapped(after), state, params(jnp.float16))


@each_change
def test_the_way_out_that_the_error_names_keeps_the_optimizer_s_state(before, after, exact):
    weights, old = stepped(wrapped(before), wrapped(before).init(params()), params(jnp.float16))
    optimizer = wrapped(after)
    state = optimizer.init(weights)._replace(inner_state=old.inner_state)
    weights_after, new = stepped(optimizer, state, weights)
    assert exact(weights_after) == exact(weights)
    assert exact(new.inner_state) == exact(stepped(wrapped(before), old, weights)[1].inner_state)


@each_change
def test_orbax_s_casts_to_the_dtypes_of_another_store_cannot_destroy_the_weights(
    before, after, tmp_path
):
    import orbax.checkpoint as ocp

    weights = params(jnp.float16)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "it", wrapped(before).init(params()))
        checkpointer.wait_until_finished()
        state = checkpointer.restore(tmp_path / "it", wrapped(after).init(params()))
    if "stochastic" in (before, after):
        with pytest.raises(ValueError, match="restore it by the store that wrote it"):
            stepped(wrapped(after), state, weights)
        return
    kept, _ = stepped(wrapped(after), state, weights)
    np.testing.assert_array_equal(kept["w"], weights["w"])


@pytest.mark.parametrize("plain", [lambda state: state._asdict(), tuple], ids=["dict", "tuple"])
@pytest.mark.parametrize("store", KEY)
def test_a_state_that_was_restored_without_its_type_is_refused(store, plain):
    state = wrapped(store).init(params())
    with pytest.raises(TypeError, match=r"got a \w+. Restore a checkpoint into the tree that"):
        stepped(wrapped(store), plain(state), params(jnp.float16))


def test_a_state_in_a_dtype_that_no_store_keeps_is_refused():
    state = wrapped("remainder16").init(params())
    state = jax.tree.map(lambda leaf: leaf.astype(jnp.int32), state)
    with pytest.raises(ValueError, match="of store='int32', and the optimizer"):
        stepped(wrapped("remainder16"), state, params(jnp.float16))


SET = [0.0, -0.0, 100.0, 2.0**-24, -(2.0**-16), 1.0, 3e-5, 60000.0]


@NARROW
@pytest.mark.parametrize("store", KEY)
@pytest.mark.parametrize("size", [1.0, 1e-6])
def test_parameters_that_are_set_by_hand_keep_their_values(size, store, dtype, exact):
    optimizer = wrapped(store, dtype)
    before = np.random.RandomState(0).randn(500, len(SET)) * size
    state = optimizer.init({"w": jnp.asarray(before, jnp.float32)})
    weights = {"w": jnp.tile(jnp.asarray(SET, dtype), (500, 1))}
    after, _ = stepped(optimizer, state, weights)
    assert exact(after) == exact(weights)


# Casts.

TOO_NARROW = [jnp.int8, jnp.int16, jnp.uint8, jnp.bool_, jnp.float8_e4m3fn, jnp.float8_e5m2]


@pytest.mark.parametrize("store", KEY)
@pytest.mark.parametrize("dtype", TOO_NARROW, ids=lambda dtype: jnp.dtype(dtype).name)
def test_a_cast_to_a_dtype_that_has_no_masters_is_refused_and_named(dtype, store):
    with pytest.raises(ValueError, match=rf"cast makes leaf \['w'\] {jnp.dtype(dtype).name}, "):
        wrapped(store, dtype).init(params())


def test_a_cast_may_change_leaves_that_no_gradient_has_and_widen_others():
    def cast(tree):
        return {"w": tree["w"].astype(jnp.float32), "steps": tree["steps"].astype(jnp.int8)}

    tree = {"w": jnp.ones(3, jnp.bfloat16), "steps": jnp.arange(3)}
    state = master_weights(optax.set_to_zero(), cast=cast).init(tree)
    assert state.kept == {"w": None, "steps": None}
