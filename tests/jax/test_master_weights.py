"""Master weights against float32 parameters that the forward pass casts."""

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gradscaler import AmaxScale, DynamicScale
from gradscaler.jax import BitUpdate, loss_scaled, master_weights
from gradscaler.jax import _rounding as rounding

NARROW = [jnp.float16, jnp.bfloat16]
STORES = {
    "float32": {},
    "remainder16": {},
    "stochastic": {"key": jax.random.PRNGKey(0)},
}
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": lambda: optax.adamw(0.01, weight_decay=0.1),
    "lamb": lambda: optax.lamb(0.01),
    "adafactor": lambda: optax.adafactor(0.01),
    "lion": lambda: optax.lion(0.001),
    "clip": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.01)),
    "schedule": lambda: optax.adam(optax.cosine_decay_schedule(0.1, 10)),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(0.01),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(0.01), 2).gradient_transformation(),
}
SOME = ["sgd", "adamw", "clip", "MultiSteps"]
POLICY = DynamicScale(init_scale=2.0**10, growth_interval=3)

narrow_dtypes = pytest.mark.parametrize("dtype", NARROW, ids=lambda dtype: dtype.__name__)
every_store = pytest.mark.parametrize("store", STORES)
a_store = pytest.mark.some(1, "a container sees a store's type alone")
each_alike = pytest.mark.rare("the wrapper calls each in one way, and sgd compiles the least")
exact_stores = pytest.mark.parametrize("store", ["float32", "remainder16"])


def wide_params():
    """Weights of every size that a network has, and a norm's scale, which stays in float32."""
    draw = np.random.RandomState(0)
    weights = draw.randn(16, 33) * np.exp2(draw.uniform(-6, 2, (16, 33)))
    return {
        "w": jnp.asarray(weights, jnp.float32),
        "norm": {"scale": jnp.ones(33), "none": None},
        "b": jnp.asarray(draw.randn(33), jnp.float32),
    }


def casting(dtype):
    def cast(params):
        def leaf(path, value):
            return value if "scale" in jax.tree_util.keystr(path) else value.astype(dtype)

        return jax.tree_util.tree_map_with_path(leaf, params)

    return cast


def loss(params, batch):
    """In the dtype of the weights, except the norm and the mean."""
    outputs = jnp.tanh(batch.astype(params["w"].dtype) @ params["w"] + params["b"])
    return jnp.mean((outputs.astype(jnp.float32) * params["norm"]["scale"] - 0.5) ** 2)


def batches(count=6):
    return np.random.RandomState(1).randn(count, 8, 16).astype(np.float32)


def started(optimizer, store="float32", dtype=jnp.float16):
    """The transformation, 16-bit parameters, and a state that starts from the wide ones."""
    cast, params = casting(dtype), wide_params()
    wrapped = master_weights(optimizer, store, cast=cast, **STORES[store])
    return wrapped, cast(params), wrapped.init(params)


def stepping(optimizer, loss=loss):
    @jax.jit
    def step(params, state, batch):
        updates, state = optimizer.update(jax.grad(loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    return step


def scaled_stepping(optimizer, loss=loss):
    @jax.jit
    def step(params, state, batch):
        grads = jax.grad(lambda params: state.scaler.scale(loss(params, batch)))(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


# The rounding.

floats = arrays(
    np.float32,
    64,
    elements=st.one_of(
        st.floats(width=32),
        st.floats(-(2.0**-13), 2.0**-13, width=32),
        st.integers(0, 2**16 - 1).map(
            lambda bits: float(np.uint32(bits << 16 | 0x8000).view(np.float32))
        ),
        st.integers(-(2**11), 2**11).map(lambda steps: (steps + 0.5) * 2.0**-24),
    ),
)


def bits_of(array):
    array = np.asarray(array)
    return array.view({2: np.int16, 4: np.int32}[array.dtype.itemsize])


def split(wide, dtype):
    """A value in 16 bits, its remainder, and the value that both restore."""
    narrow = rounding.with_remainder(wide, dtype)
    remainder = rounding.remainder(wide, narrow)
    return narrow, remainder, rounding.completed(narrow, remainder)


# XLA takes casts together under jit alone.
either_way = pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
SPLIT = {False: split, True: jax.jit(split, static_argnums=1)}
STOCHASTIC = {
    False: rounding.stochastic,
    True: jax.jit(rounding.stochastic, static_argnums=1),
}


@either_way
@given(floats)
def test_a_bfloat16_and_its_remainder_are_the_float32_value_bit_for_bit(jit, wide):
    wide = np.nan_to_num(wide, posinf=np.inf, neginf=-np.inf)
    _, remainder, completed = SPLIT[jit](wide, jnp.bfloat16)
    np.testing.assert_array_equal(bits_of(completed), bits_of(wide))
    np.testing.assert_array_equal(remainder, bits_of(wide).astype(np.int16))  # the lower half


@either_way
@given(floats)
def test_a_float16_and_its_remainder_are_the_float32_value_down_to_2_to_the_minus_17(jit, wide):
    wide = np.where((np.abs(wide) >= 2.0**-17) & (np.abs(wide) < 65520), wide, 1)
    _, _, completed = SPLIT[jit](wide, jnp.float16)
    np.testing.assert_array_equal(bits_of(completed), bits_of(wide))


@either_way
@given(floats)
def test_below_that_a_float16_and_its_remainder_are_off_by_2_to_the_minus_41_at_most(jit, wide):
    wide = np.where(np.abs(wide) < 2.0**-17, wide, 0)
    completed = np.asarray(SPLIT[jit](wide, jnp.float16)[2])
    assert (np.abs(completed.astype(np.float64) - wide) <= 2.0**-41).all()
    np.testing.assert_array_equal(np.signbit(completed), np.signbit(wide))


@pytest.mark.parametrize(
    "jit",
    [
        pytest.param(False, marks=pytest.mark.rare("the examples above lie at such borders, too")),
        True,
    ],
    ids=["eager", "jit"],
)
def test_every_border_of_float16_is_exact_and_so_is_what_lies_next_to_it(jit):
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    wide = np.concatenate([halves, (halves[1:] + halves[:-1]) / 2])
    wide = np.concatenate([wide, *(np.nextafter(wide, np.float32(end)) for end in (0, np.inf))])
    wide = wide[wide >= 2.0**-17]
    wide = np.concatenate([wide, -wide])
    _, _, completed = SPLIT[jit](wide, jnp.float16)
    np.testing.assert_array_equal(bits_of(completed), bits_of(wide))


@either_way
@narrow_dtypes
@given(floats)
def test_beside_a_remainder_the_parameter_is_the_nearest_and_of_two_the_one_away_from_zero(
    dtype, jit, wide
):
    finite = np.abs(wide) < float(jnp.finfo(dtype).max)
    wide = np.where(finite & ((np.abs(wide) >= 2.0**-126) | (wide == 0)), wide, 1)
    even = wide.astype(dtype)
    narrow = np.asarray(SPLIT[jit](wide, dtype)[0])
    differ = bits_of(narrow) != bits_of(even)
    away = (bits_of(even) + np.int16(1)).view(even.dtype)
    np.testing.assert_array_equal(bits_of(narrow)[differ], bits_of(away)[differ])
    sides = [np.abs(each[differ].astype(np.float64) - wide[differ]) for each in (even, away)]
    np.testing.assert_array_equal(*sides)


@narrow_dtypes
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_an_inf_or_a_nan_stays_one_beside_a_remainder(dtype, value):
    wide = jnp.float32(value)
    narrow = rounding.with_remainder(wide, dtype)
    np.testing.assert_array_equal(np.float32(narrow), wide)
    np.testing.assert_array_equal(
        rounding.completed(narrow, rounding.remainder(wide, narrow)), wide
    )


@either_way
@narrow_dtypes
@given(floats, st.integers(0, 2**31 - 1))
def test_stochastic_rounding_gives_one_of_the_two_neighbours(dtype, jit, wide, seed):
    finite = np.abs(wide) < float(jnp.finfo(dtype).max)
    wide = np.where(finite & ((np.abs(wide) >= 2.0**-118) | (wide == 0)), wide, 1)
    narrow = bits_of(STOCHASTIC[jit](wide, dtype, jax.random.key(seed)))
    nearest = wide.astype(dtype)
    past = np.abs(nearest.astype(np.float32)) > np.abs(wide)
    lower = bits_of(nearest) - past
    exact = nearest.astype(np.float32) == wide
    assert ((narrow == lower) | (narrow == lower + 1) & ~exact).all()


@either_way
@narrow_dtypes
@pytest.mark.parametrize("size", [1.0, -1.0, 2.0**-14, 2.0**-20, 2.0**-24])
@pytest.mark.parametrize("part", [2.0**-9, 0.25, 0.5, 0.9])
def test_the_mean_of_stochastic_rounding_is_the_value(dtype, jit, size, part):
    spacing = max(abs(size) * float(jnp.finfo(dtype).eps), 2.0**-24 * (dtype == jnp.float16))
    wide = jnp.full(2**18, size + np.sign(size) * part * spacing, jnp.float32)
    ups = np.asarray(STOCHASTIC[jit](wide, dtype, jax.random.key(1))) != dtype(size)
    deviation = (part * (1 - part) / ups.size) ** 0.5
    assert abs(ups.mean() - part) < 4 * deviation  # nearest rounding is off by 22 or more


@narrow_dtypes
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 3e38, -3.4e38])
def test_stochastic_rounding_keeps_what_is_not_finite_and_makes_none(dtype, value):
    rounded = rounding.stochastic(jnp.float32(value), dtype, jax.random.key(0))
    expected = np.clip(value, *(float(end) for end in (jnp.finfo(dtype).min, jnp.finfo(dtype).max)))
    if np.isinf(value):
        expected = value
    np.testing.assert_allclose(np.float32(rounded), expected, rtol=0.01)


# The update.


@narrow_dtypes
@given(arrays(np.int16, 64, elements=st.integers(-(2**15), 2**15 - 1)), floats)
def test_apply_updates_gives_the_rounded_master_bit_for_bit(dtype, old, wide):
    params = jax.lax.bitcast_convert_type(jnp.asarray(old), dtype)
    optimizer = master_weights(optax.GradientTransformation(lambda p: (), replacing(wide)))
    updates, state = optimizer.update(params, optimizer.init(params), params)
    after = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(bits_of(after), bits_of(state.kept.astype(dtype)))
    np.testing.assert_array_equal(bits_of(np.asarray(params) + updates), bits_of(after))


def replacing(wide):
    """An optimizer's update that leads to the given values, or nearly; some are NaN."""
    return lambda grads, state, params: (wide - params, state)


@narrow_dtypes
def test_an_update_of_zeros_leaves_minus_zero_and_nan_as_they_are(dtype):
    params = jnp.asarray([-0.0, 0.0, jnp.nan, -jnp.inf, 1.0], dtype)
    after = optax.apply_updates(params, BitUpdate(jnp.zeros(5, jnp.int16)))
    np.testing.assert_array_equal(bits_of(after), bits_of(params))


def test_an_update_that_was_scaled_is_refused():
    wrapped, params = master_weights(optax.sgd(0.1)), jnp.ones(3, jnp.float16)
    updates, _ = wrapped.update(params, wrapped.init(params), params)
    halves = jax.tree.map(lambda leaf: 0.5 * leaf, updates)
    with pytest.raises(TypeError, match=r"inside it: master_weights\(optax.chain"):
        optax.apply_updates(params, halves)


@pytest.mark.parametrize(
    "arrange",
    [
        lambda masters: optax.chain(masters, optax.scale_by_schedule(lambda count: -0.1)),
        lambda masters: optax.chain(optax.clip(1.0), optax.chain(masters), optax.scale(-1)),
        lambda masters: optax.named_chain(("a", masters), ("b", optax.scale(-1))),
        lambda masters: optax.chain(
            optax.inject_hyperparams(lambda unused: masters)(unused=1.0), optax.scale(-1)
        ),
        lambda masters: loss_scaled(optax.chain(masters, optax.scale(-1))),
    ],
    ids=["schedule", "chain in chain", "named", "in inject_hyperparams", "scaled"],
)
def test_what_follows_in_a_chain_is_refused(arrange):
    """Some of these would turn the updates into 0, or negate their bits, and raise nothing."""
    params = jnp.ones(3, jnp.float16)
    optimizer = arrange(master_weights(optax.sgd(0.1)))
    state = optimizer.init(params)
    with pytest.raises(ValueError, match="followed by other transformations"):
        optimizer.update(params, state, params)


def test_an_update_is_refused_by_a_float32_parameter():
    with pytest.raises(TypeError, match="to a parameter of float32"):
        jnp.ones(2) + BitUpdate(jnp.zeros(2, jnp.int16))


# The same bits as float32 parameters.


@narrow_dtypes
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.some(2, "the wrapper calls each in one way; the tests below step three others")
def test_masters_have_the_bits_of_float32_parameters(name, dtype, exact):
    cast, theirs, bare = casting(dtype), wide_params(), OPTIMIZERS[name]()
    wrapped, mine, state = started(OPTIMIZERS[name](), dtype=dtype)
    step, bare_step = stepping(wrapped), stepping(bare, lambda p, batch: loss(cast(p), batch))
    inner = bare.init(theirs)
    for batch in batches():
        theirs, inner = bare_step(theirs, inner, batch)
        mine, state = step(mine, state, batch)
        assert exact(mine) == exact(cast(theirs))
    assert exact(state.inner_state) == exact(inner)
    assert exact(state.kept["w"]) == exact(theirs["w"])
    assert state.kept["norm"]["scale"] is None


@pytest.mark.parametrize("name", SOME)
@pytest.mark.some(1, "the wrapper calls each in one way, as the test above shows")
def test_bfloat16_and_a_remainder_have_the_bits_of_float32_parameters(name, exact):
    wrapped, mine, state = started(OPTIMIZERS[name](), "remainder16", jnp.bfloat16)
    reference, theirs, inner = started(OPTIMIZERS[name](), "float32", jnp.bfloat16)
    step, reference_step = stepping(wrapped), stepping(reference)
    for batch in batches():
        mine, state = step(mine, state, batch)
        theirs, inner = reference_step(theirs, inner, batch)
        assert exact(mine) == exact(theirs)  # but for a master halfway between two of bfloat16's
        for key in ("w", "b"):
            completed = rounding.completed(mine[key], state.kept[key])
            assert exact(completed) == exact(inner.kept[key])


@pytest.mark.parametrize(
    "name", ["sgd", *(pytest.param(name, marks=each_alike) for name in SOME if name != "sgd")]
)
def test_float16_and_a_remainder_follow_float32_parameters_to_2_to_the_minus_38(name):
    wrapped, mine, state = started(OPTIMIZERS[name](), "remainder16")
    reference, theirs, inner = started(OPTIMIZERS[name]())
    step, reference_step = stepping(wrapped), stepping(reference)
    # Compiled, a product and a sum may be rounded once in one of the two, and twice in the other.
    with jax.disable_jit():
        for batch in batches():
            mine, state = step(mine, state, batch)
            theirs, inner = reference_step(theirs, inner, batch)
            for key in ("w", "b"):
                completed = rounding.completed(mine[key], state.kept[key])
                np.testing.assert_allclose(completed, inner.kept[key], rtol=0, atol=2.0**-38)


def test_small_steps_add_up_where_float16_alone_stands_still():
    ends = {}
    for store in [None, *STORES]:
        bare = optax.sgd(2.0**-14)
        optimizer = master_weights(bare, store, **STORES[store]) if store else bare
        params = jnp.ones(2**10, jnp.float16)
        state = optimizer.init(params)
        update = jax.jit(optimizer.update)
        for _ in range(64):
            updates, state = update(jnp.ones_like(params), state, params)
            params = optax.apply_updates(params, updates)
        ends[store] = float(params.astype(jnp.float32).mean())
    assert ends.pop(None) == 1.0
    assert ends.pop("stochastic") == pytest.approx(1 - 2.0**-8, abs=2.0**-8 / 20)
    assert set(ends.values()) == {1 - 2.0**-8}


@exact_stores
@narrow_dtypes
def test_without_cast_the_masters_start_at_the_parameters(dtype, store):
    params = casting(dtype)(wide_params())
    state = master_weights(optax.sgd(0.1), store).init(params)
    if store == "float32":
        np.testing.assert_array_equal(state.kept["w"], params["w"].astype(jnp.float32))
    else:
        assert not state.kept["w"].any()


@pytest.mark.parametrize(
    ("store", "expected"), [("float32", 14), ("remainder16", 12), ("stochastic", 10)]
)
def test_weights_and_adam_s_state_take_so_many_bytes_a_parameter(store, expected):
    optimizer = master_weights(optax.adam(0.1), store, **STORES[store])
    params = jnp.ones(2**16, jnp.bfloat16)
    leaves = jax.tree.leaves((params, optimizer.init(params)))
    assert sum(leaf.nbytes for leaf in leaves) // params.size == expected


@every_store
def test_the_optimizer_sees_float32_alone(store):
    seen = []

    def update(grads, state, params):
        seen.extend(jax.tree.leaves((grads, params)))
        return grads, state

    wrapped, params, state = started(
        optax.GradientTransformation(lambda params: seen.extend(jax.tree.leaves(params)), update),
        store,
    )
    wrapped.update(params, state, params)
    assert len(seen) == 9
    assert {leaf.dtype for leaf in seen} == {jnp.dtype("float32")}


# With loss scaling.


@narrow_dtypes
def test_with_loss_scaled_around_it_the_bits_are_those_of_float32_parameters(dtype, exact):
    cast, theirs = casting(dtype), wide_params()
    bare = loss_scaled(optax.adamw(0.01), POLICY)
    scaled = loss_scaled(master_weights(optax.adamw(0.01), cast=cast), POLICY)
    mine, state, inner = cast(theirs), scaled.init(theirs), bare.init(theirs)
    step = scaled_stepping(scaled)
    bare_step = scaled_stepping(bare, lambda params, batch: loss(cast(params), batch))
    for batch, factor in zip(batches(), [1, 1, np.inf, 1, 1, 1], strict=True):
        mine, state = step(mine, state, batch * np.float32(factor))
        theirs, inner = bare_step(theirs, inner, batch * np.float32(factor))
        assert exact(mine) == exact(cast(theirs))
    assert state.scaler.loss_scale == 2.0**10  # one overflow, and three finite steps
    assert exact(state.inner_state.inner_state) == exact(inner.inner_state)
    assert exact(state.inner_state.kept["w"]) == exact(theirs["w"])


@every_store
def test_an_overflow_leaves_parameters_and_state_bit_for_bit(store, exact):
    wrapped, params, inner = started(optax.adamw(0.01), store)
    params["b"] = params["b"].at[0].set(-0.0)
    optimizer = loss_scaled(wrapped, POLICY)
    step, state = scaled_stepping(optimizer), optimizer.init(params)
    params, state = step(params, state._replace(inner_state=inner), batches()[0])
    after, state_after = step(params, state, batches()[1] * np.inf)
    assert not state_after.grads_finite
    assert exact((after, state_after.inner_state)) == exact((params, state.inner_state))
    after, state_after = step(after, state_after, batches()[2])
    assert state_after.grads_finite
    assert exact(after) != exact(params)


def test_gradients_below_float16_s_smallest_reach_the_masters():
    weight = jnp.float16(1.0)
    optimizer = loss_scaled(master_weights(optax.sgd(4.0)), DynamicScale(init_scale=2.0**16))
    state = optimizer.init(weight)
    grads = jax.grad(lambda weight: state.scaler.scale(weight.astype(jnp.float32) * 2.0**-24 / 4))
    _, state = optimizer.update(grads(weight), state, weight)
    assert state.inner_state.kept == 1 - 2.0**-24


def test_a_clip_inside_measures_float16_gradients_in_float32():
    weight = jnp.zeros(2, jnp.float16)
    clip = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    optimizer = loss_scaled(master_weights(clip), DynamicScale(init_scale=1.0))
    state = optimizer.init(weight)
    _, state = optimizer.update(jnp.asarray([3e4, 4e4], jnp.float16), state, weight)
    np.testing.assert_allclose(state.inner_state.kept, [-0.6, -0.8], rtol=1e-3)


def test_a_clip_between_loss_scaling_and_the_masters_gets_float32_too():
    weight = jnp.zeros(2, jnp.float16)
    chain = optax.chain(optax.clip_by_global_norm(1.0), master_weights(optax.sgd(1.0)))
    optimizer = loss_scaled(chain, DynamicScale(init_scale=1.0))
    state = optimizer.init(weight)
    _, state = optimizer.update(jnp.asarray([3e4, 4e4], jnp.float16), state, weight)
    np.testing.assert_allclose(state.inner_state[1].kept, [-0.6, -0.8], rtol=1e-3)


def test_an_amax_policy_sees_float32_gradients():
    weight = jnp.float16(1.0)
    optimizer = loss_scaled(master_weights(optax.sgd(1.0)), AmaxScale(init_scale=2.0**16))
    state = optimizer.init(weight)
    _, state = optimizer.update(jnp.float16(2.0**-9), state, weight)
    assert 2.0**-25 in map(float, state.scaler.state)


# Around and inside other transformations.

LABELS = {"w": "a", "norm": {"scale": "b", "none": None}, "b": "b"}
MASK = {"w": True, "norm": {"scale": False, "none": None}, "b": False}
ARRANGEMENTS = {
    "alone": lambda masters: masters(optax.sgd(0.1)),
    "after a clip": lambda masters: optax.chain(
        optax.clip_by_global_norm(0.1), masters(optax.sgd(0.1))
    ),
    "in multi_transform": lambda masters: optax.multi_transform(
        {"a": masters(optax.sgd(0.1)), "b": masters(optax.sgd(0.5))}, LABELS
    ),
    "around multi_transform": lambda masters: masters(
        optax.multi_transform({"a": optax.sgd(0.1), "b": optax.sgd(0.5)}, LABELS)
    ),
    "in masked": lambda masters: optax.chain(
        optax.masked(masters(optax.sgd(0.1)), MASK),
        optax.masked(optax.set_to_zero(), jax.tree.map(lambda trained: not trained, MASK)),
    ),
    "around masked": lambda masters: masters(optax.masked(optax.sgd(0.1), MASK)),
    "in inject_hyperparams": lambda masters: optax.inject_hyperparams(
        lambda learning_rate: masters(optax.sgd(learning_rate))
    )(0.125),
}


@every_store
@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_it_works_around_and_inside_other_transformations(name, store):
    """Against the same arrangement of bare optimizers and float32 parameters."""
    cast, theirs = casting(jnp.float16), wide_params()
    bare = ARRANGEMENTS[name](lambda optimizer: optimizer)
    wrapped = ARRANGEMENTS[name](
        lambda optimizer: master_weights(optimizer, store, cast=cast, **STORES[store])
    )
    mine, state, inner = cast(theirs), wrapped.init(theirs), bare.init(theirs)
    step, bare_step = stepping(wrapped), stepping(bare, lambda p, batch: loss(cast(p), batch))
    for batch in batches(3):
        mine, state = step(mine, state, batch)
        theirs, inner = bare_step(theirs, inner, batch)
    # The clip before master_weights measures gradients of float16.
    same = store != "stochastic" and name != "after a clip"
    for new, wide in zip(*map(jax.tree.leaves, (mine, theirs)), strict=True):
        expected = wide.astype(new.dtype)
        assert new.dtype == expected.dtype
        np.testing.assert_allclose(new, expected, rtol=0 if same else 2.0**-8, atol=1e-6)


@every_store
@narrow_dtypes
def test_it_gives_the_same_bits_with_x64(dtype, store, exact):
    ends = []
    for x64 in (False, True):
        with jax.enable_x64(x64):
            params = jnp.linspace(-1, 1, 64, dtype=jnp.float32).astype(dtype)
            optimizer = master_weights(optax.sgd(0.01), store, **STORES[store])
            state, step = optimizer.init(params), jax.jit(optimizer.update)
            for _ in range(2):
                updates, state = step(jnp.sin(params), state, params)
                params = optax.apply_updates(params, updates)
            ends.append(exact((params, state.kept)))
    assert ends[0] == ends[1]


@every_store
def test_it_compiles_once(store, counted_jit):
    wrapped, params, state = started(optax.adamw(0.01), store)
    update, traces = counted_jit(wrapped.update)
    for _ in range(3):
        updates, state = update(params, state, params)
        params = optax.apply_updates(params, updates)
    assert len(traces) == 1


def test_optax_s_tree_functions_find_its_state():
    wrapped, _, state = started(optax.adamw(0.01))
    assert optax.tree_utils.tree_get({"state": state}, "kept") is state.kept
    doubled = optax.tree_utils.tree_map_params(wrapped, lambda leaf: leaf * 2, state)
    np.testing.assert_array_equal(doubled.kept["w"], state.kept["w"] * 2)
    assert doubled.inner_state[0].count == 0


@every_store
@a_store
def test_it_runs_inside_a_scan(store, exact):
    wrapped, params, state = started(optax.adamw(0.01), store)
    step = stepping(wrapped)
    scanned, _ = jax.lax.scan(
        lambda carry, batch: (step(*carry, batch), None), (params, state), batches(3)
    )
    for batch in batches(3):
        params, state = step(params, state, batch)
    assert exact(scanned) == exact((params, state))


# Sharded.


@every_store
@pytest.mark.parametrize("jit_init", [False, True], ids=["eager init", "jitted init"])
@pytest.mark.some(2, "a store's arrays lie where the parameters do, whichever it is")
def test_sharded_parameters_give_the_same_bits_and_a_state_sharded_like_them(
    store, jit_init, exact
):
    mesh = Mesh(np.array(jax.devices()[:4]), ("model",))
    lies = NamedSharding(mesh, P("model"))
    params = jnp.linspace(-1, 1, 64).reshape(8, 8)

    def loss(weights, batch):
        return jnp.sum((weights * batch.astype(weights.dtype)).astype(jnp.float32) ** 2)

    def cast(weights):
        return weights.astype(jnp.float16)

    optimizer = loss_scaled(
        master_weights(optax.sgd(0.01, momentum=0.9), store, cast=cast, **STORES[store]), POLICY
    )

    @jax.jit
    def step(weights, state, batch):
        grads = jax.grad(lambda weights: state.scaler.scale(loss(weights, batch)))(weights)
        updates, state = optimizer.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state

    ends = []
    for wide in (params, jax.device_put(params, lies)):
        state, weights = (jax.jit(optimizer.init) if jit_init else optimizer.init)(wide), cast(wide)
        for batch in np.random.RandomState(0).randn(4, 8, 8).astype(np.float32):
            weights, state = step(weights, state, batch)
        ends.append(exact((weights, state)))
    assert ends[0] == ends[1]
    assert weights.sharding.is_equivalent_to(lies, 2)
    for leaf in jax.tree.leaves((state.inner_state.kept, state.inner_state.inner_state)):
        assert leaf.ndim != 2 or leaf.sharding.is_equivalent_to(lies, 2)


def test_replicas_inside_shard_map_draw_alike():
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    optimizer = master_weights(optax.sgd(2.0**-14), "stochastic", key=jax.random.PRNGKey(0))

    def step(weights, state, batch):
        grads = jax.lax.pmean(weights * 0 + batch.mean().astype(weights.dtype), "data")
        updates, state = optimizer.update(grads, state, weights)
        return optax.apply_updates(weights, updates)

    weights = jnp.ones(64, jnp.float16)
    specs = P(), P(), P("data")
    sharded = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P()))
    after = sharded(weights, optimizer.init(weights), jnp.ones(4))
    copies = [np.asarray(shard.data) for shard in after.addressable_shards]
    assert len(copies) == 4
    assert len({copy.tobytes() for copy in copies}) == 1
    assert 0 < (copies[0] != 1).sum() < 64


# With packages that build on optax.


@every_store
@a_store
def test_flax_s_train_state_holds_it(store, exact):
    from flax.training.train_state import TrainState

    cast, wide = casting(jnp.float16), wide_params()
    wrapped, params, state = started(optax.adamw(0.01), store)
    made = TrainState.create(apply_fn=None, params=wide, tx=wrapped)
    made = made.replace(params=cast(wide))
    train = jax.jit(
        lambda made, batch: made.apply_gradients(grads=jax.grad(loss)(made.params, batch))
    )
    step = stepping(wrapped)
    for batch in batches(3):
        made = train(made, batch)
        params, state = step(params, state, batch)
    assert exact(made.params) == exact(params)
    assert exact(made.opt_state) == exact(state)


@every_store
@a_store
def test_an_nnx_optimizer_holds_it(store, exact):
    from flax import nnx

    def cast(params):
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float16), params)

    model = nnx.Linear(16, 33, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
    wide = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    wrapped = loss_scaled(
        master_weights(optax.adamw(0.01), store, cast=cast, **STORES[store]), POLICY
    )
    optimizer = nnx.Optimizer(model, wrapped, wrt=nnx.Param)
    nnx.update(model, cast(nnx.state(model, nnx.Param)))
    params, state = cast(wide), wrapped.init(wide)

    def network(kernel, bias, batch):
        return jnp.mean((batch.astype(kernel.dtype) @ kernel + bias).astype(jnp.float32) ** 2)

    @nnx.jit
    def train(model, optimizer, batch):
        def scaled(model):
            value = network(model.kernel[...], model.bias[...], batch)
            return optimizer.opt_state.scaler.scale(value)

        optimizer.update(model, nnx.grad(scaled)(model))

    @jax.jit
    def step(params, state, batch):
        grads = jax.grad(lambda params: state.scaler.scale(network(batch=batch, **params)))(params)
        updates, state = wrapped.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for batch in batches(3):
        train(model, optimizer, batch)
        params, state = step(params, state, batch)
    assert model.kernel[...].dtype == jnp.float16
    assert exact(nnx.to_pure_dict(nnx.state(model, nnx.Param))) == exact(params)


@every_store
@a_store
def test_the_arrays_of_an_equinox_model_take_its_updates(store, exact):
    import equinox as eqx

    def cast(arrays):
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float16), arrays)

    model = eqx.nn.MLP(4, 1, 8, 1, key=jax.random.key(0))
    wide, static = eqx.partition(model, eqx.is_array)
    optimizer = master_weights(optax.adamw(0.01), store, cast=cast, **STORES[store])
    # Uncompiled, each of its operations is compiled for each shape, which takes a minute.
    arrays, state = cast(wide), jax.jit(optimizer.init)(wide)

    @eqx.filter_jit
    def step(model, state, batch):
        arrays, static = eqx.partition(model, eqx.is_array)
        grads = eqx.filter_grad(lambda model: jax.vmap(model)(batch).sum())(model)
        updates, state = optimizer.update(grads, state, arrays)
        return eqx.combine(optax.apply_updates(arrays, updates), static), state, updates

    after, _, updates = step(eqx.combine(arrays, static), state, jnp.ones((2, 4), jnp.float16))
    before = jax.tree.map(lambda leaf: np.asarray(leaf), arrays)
    expected = jax.tree.map(lambda leaf, update: leaf + update, before, updates)
    assert exact(eqx.filter(after, eqx.is_array)) == exact(expected)
    assert exact(eqx.filter(after, eqx.is_array)) != exact(arrays)


@every_store
@a_store
def test_a_checkpoint_of_flax_continues_bit_for_bit(store, exact):
    wrapped, params, state = started(optax.adamw(0.01), store)
    step = stepping(wrapped)
    params, state = step(params, state, batches()[0])
    saved = flax.serialization.to_bytes((params, state))
    target = started(optax.adamw(0.01), store)[1:]
    restored = jax.tree.map(jnp.asarray, flax.serialization.from_bytes(target, saved))
    assert exact(restored) == exact((params, state))
    for batch in batches()[1:]:
        params, state = step(params, state, batch)
        restored = step(*restored, batch)
    assert exact(restored) == exact((params, state))


@every_store
@a_store
def test_a_checkpoint_of_orbax_continues_bit_for_bit(store, tmp_path, exact):
    import orbax.checkpoint as ocp

    wrapped, params, state = started(optax.adamw(0.01), store)
    step = stepping(wrapped)
    saved = step(params, state, batches()[0])
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "it", saved)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "it", jax.tree.map(jnp.zeros_like, saved))
    assert exact(step(*restored, batches()[1])) == exact(step(*saved, batches()[1]))


def test_a_typed_key_gives_the_bits_of_a_raw_one_and_a_skip_keeps_it(exact):
    ends = []
    for key in (jax.random.key(3), jax.random.PRNGKey(3)):
        weight = jnp.ones(64, jnp.float16)
        optimizer = loss_scaled(master_weights(optax.sgd(1e-4), "stochastic", key=key), POLICY)
        state = optimizer.init(weight)
        update = jax.jit(optimizer.update)
        for factor in (1.0, jnp.inf, 1.0):
            updates, state = update(weight * 2.0**10 * factor, state, weight)
            weight = optax.apply_updates(weight, updates)
        ends.append(exact((weight, jax.random.key_data(state.inner_state.key))))
    assert ends[0] == ends[1]


# Uses that are refused.


def test_update_without_parameters_is_refused():
    wrapped, params, state = started(optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"needs params: update\(grads, state, params\)"):
        wrapped.update(params, state)


@exact_stores
def test_parameters_that_were_cast_after_init_are_refused(store):
    wrapped = master_weights(optax.sgd(0.1), store)
    state = wrapped.init(wide_params())
    params = casting(jnp.float16)(wide_params())
    with pytest.raises(ValueError, match=r"\['b'\] is float16 in update, and was wider in init"):
        wrapped.update(params, state, params)


@exact_stores
def test_parameters_that_were_not_cast_after_init_are_refused(store):
    wrapped, _, state = started(optax.sgd(0.1), store)
    params = wide_params()
    with pytest.raises(ValueError, match=r"\['b'\] is float32 in update, and was of 16 bits"):
        wrapped.update(params, state, params)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("adam",), TypeError, "optimizer must be an optax transformation, got 'adam'"),
        ((optax.sgd(1.0), "bfloat16"), ValueError, "one of float32, remainder16, stochastic, got"),
        ((optax.sgd(1.0), "stochastic"), ValueError, r"key=jax.random.key\(0\)"),
        ((optax.sgd(1.0), ["float32"]), ValueError, "one of float32, remainder16, stochastic, got"),
    ],
)
def test_arguments_that_cannot_work_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        master_weights(*arguments)


def test_a_cast_that_is_not_a_function_is_refused():
    with pytest.raises(TypeError, match="cast must be a function of the parameters"):
        master_weights(optax.sgd(1.0), cast="float16")


@pytest.mark.parametrize("key", [3, "seed", jnp.zeros(2)])
def test_a_key_that_is_none_is_refused(key):
    with pytest.raises(TypeError, match="key must be a key of jax"):
        master_weights(optax.sgd(1.0), "stochastic", key=key)


def test_a_key_without_stochastic_rounding_is_refused():
    with pytest.raises(ValueError, match="key belongs to store='stochastic'"):
        master_weights(optax.sgd(1.0), key=jax.random.key(0))
