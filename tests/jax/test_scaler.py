"""The native scaler: its rule, what it does to trees, and every transformation of JAX."""

import copy
import functools
import importlib
import math
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gradscaler import AmaxScale, DynamicScale, FixedScale, ScaleState
from gradscaler.jax import GradScaler, all_finite, loss_scaled, select_tree
from gradscaler.policies._checks import LARGEST_SCALE, SMALLEST_SCALE
from tests.support.chosen import examples

INF = float("inf")
POLICIES = st.builds(
    DynamicScale,
    init_scale=st.sampled_from([2.0**-126, 1.0, 2.0**16, 2.0**127]),
    growth_factor=st.sampled_from([1.1, 2.0, 4.0]),
    backoff_factor=st.sampled_from([0.3, 0.5, 0.9]),
    growth_interval=st.integers(1, 4),
    hysteresis=st.integers(1, 3),
    hysteresis_reset=st.sampled_from(["finite_step", "finite_step_only", "growth"]),
) | st.builds(FixedScale, st.sampled_from([3.0, 128.0]))


def quick(**options):
    return GradScaler(DynamicScale(**{"init_scale": 8.0, "growth_interval": 2, **options}))


def mean_of_squares(weight, inputs):
    return ((inputs @ weight) ** 2).mean()


WEIGHT, INPUTS = jnp.linspace(-1, 1, 3), jnp.arange(12.0).reshape(4, 3)


# The rule.


@functools.partial(jax.jit, static_argnums=0)
def scan(policy, found_infs):
    """All states of a run, by lax.scan."""

    def step(scaler, found_inf):
        scaler = scaler.adjust(~found_inf)
        return scaler, scaler.state

    return jax.lax.scan(step, GradScaler(policy), found_infs)[1]


@settings(max_examples=examples(40))
@given(policy=POLICIES, found_infs=st.lists(st.booleans(), min_size=12, max_size=12))
def test_the_trace_has_the_bits_of_the_policy_on_the_host(policy, found_infs):
    states = scan(policy, jnp.array(found_infs))
    state = policy.init()
    for i, found_inf in enumerate(found_infs):
        state = policy.update(state, found_inf)
        assert np.asarray(states.scale)[i].tobytes() == np.float32(state.scale).tobytes()
        assert states.finite_steps[i] == state.finite_steps
        assert states.nonfinite_steps[i] == state.nonfinite_steps


@pytest.mark.parametrize("x64", [False, True], ids=["x32", "x64"])
def test_dtypes_are_float32_and_int32_and_strong_before_and_after_a_step(x64):
    with jax.enable_x64(x64):
        before = quick()
        after = jax.jit(lambda scaler: scaler.adjust(True))(before)
        for scaler in (before, after):
            assert [leaf.dtype for leaf in scaler.state] == [jnp.float32, jnp.int32, jnp.int32]
            assert not any(leaf.weak_type for leaf in scaler.state)


@pytest.mark.parametrize("options", [{}, {"donate_argnums": 0}], ids=["kept", "donated"])
def test_nothing_is_traced_again_when_the_scale_changes(options, counted_jit):
    step, traces = counted_jit(lambda scaler, finite: scaler.adjust(finite), **options)
    scaler = quick()
    for finite in (True, True, False, True):
        scaler = step(scaler, finite)
    assert scaler.loss_scale == 8.0
    assert len(traces) == 1


def test_compiled_steps_call_nothing_on_the_host():
    step = jax.jit(lambda s, w, x: s.value_and_grad(mean_of_squares)(w, x))
    assert "callback" not in step.lower(quick(), WEIGHT, INPUTS).as_text()


# Trees.


@pytest.mark.parametrize(
    ("leaf", "dtype", "product"),
    [
        (jnp.array([1.5, -0.0], jnp.float16), jnp.float32, [12.0, -0.0]),
        (jnp.array(3.0, jnp.bfloat16), jnp.float32, 24.0),
        (jnp.array([[2.0]]), jnp.float32, [[16.0]]),
        (jnp.array(1 + 2j), jnp.complex64, 8 + 16j),
        (jnp.array([7]), jnp.int32, [7]),
        (jnp.array(True), jnp.bool_, True),
        (0.25, jnp.float32, 2.0),
    ],
)
def test_scale_and_unscale_take_leaves_of_any_dtype_in_any_tree(leaf, dtype, product):
    scaled = quick().scale({"layer": [leaf, None, ()]})
    first, *empty = scaled["layer"]
    assert (first.dtype, first.tolist(), empty) == (dtype, product, [None, ()])
    assert (quick().unscale(scaled)["layer"][0] == leaf).all()


def test_float64_stays_float64():
    with jax.enable_x64(True):
        third = jnp.array(1 / 3, jnp.float64)
        assert quick().scale(third).dtype == jnp.float64
        assert quick().unscale(quick().scale(third)) == third


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float16, jnp.bfloat16])
def test_narrow_leaves_become_float32_under_strict_promotion_too(dtype):
    scaler = quick(init_scale=2.0**20)
    with jax.numpy_dtype_promotion("strict"):
        scaled = scaler.scale(jnp.ones(2, dtype))
        assert (scaled.dtype, scaled.tolist()) == (jnp.float32, [2.0**20] * 2)
        assert scaler.unscale(scaled).tolist() == [1.0, 1.0]


def test_a_loss_in_float16_does_not_overflow_when_it_is_scaled():
    assert GradScaler().scale(jnp.array(4.0, jnp.float16)) == 2.0**18


@settings(max_examples=examples(50))
@given(exponent=st.integers(-20, 40), data=st.lists(st.floats(-(2.0**60), 2.0**60, width=32)))
def test_scaling_and_unscaling_by_a_power_of_two_change_no_bit(exponent, data):
    values = np.array(data, np.float32)
    values = np.where(np.abs(values) < 2.0**-80, 0, values).astype(np.float32)
    scaler = GradScaler(FixedScale(2.0**exponent))
    assert np.asarray(scaler.unscale(scaler.scale(jnp.array(values)))).tobytes() == values.tobytes()


@pytest.mark.parametrize("value", [INF, -INF, float("nan")])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.complex64])
def test_all_finite_finds_one_element(value, dtype):
    leaf = jnp.ones((3, 5), dtype)
    assert all_finite({"a": leaf, "b": [leaf, None, jnp.arange(3)]})
    assert not all_finite({"a": leaf, "b": [leaf.at[2, 1].set(value)]})


@pytest.mark.parametrize("value", [INF, float("nan")])
@pytest.mark.parametrize("place", [0, 40_000, 77_076])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32, jnp.complex64])
def test_all_finite_finds_one_element_of_many(value, place, dtype):
    """XLA's own maximum of so many values loses a NaN on the CPU."""
    leaf = jnp.ones(77_077, dtype).at[place].set(value).reshape(1001, 77)
    assert not all_finite(leaf)
    assert not jax.jit(all_finite)([jnp.ones(3), leaf])


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.complex64])
def test_all_finite_takes_no_large_number_for_an_inf(dtype):
    largest = jnp.finfo(dtype).max
    many = jnp.full((40, 50), -largest, dtype)
    if dtype == jnp.complex64:  # the magnitude of this is inf
        many = many + 1j * many.real
    assert all_finite([many, many])


def test_all_finite_takes_leaves_of_all_dtypes_together_in_x64():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        leaves = [jnp.ones(2, t) for t in (jnp.float16, jnp.float32, jnp.float64, jnp.complex128)]
        leaves[2] *= 1e300
        assert all_finite([*leaves, jnp.zeros((0, 2), jnp.float32)])
        for place, leaf in enumerate(leaves):
            assert not all_finite([*leaves[:place], leaf.at[1].set(INF), *leaves[place + 1 :]])


def test_the_compiled_step_grows_in_proportion_to_the_leaves():
    def size(leaves):
        weights = [jnp.ones((40, 40))] * leaves

        def step(scaler, weights):
            scaler, finite, _, grads = scaler.value_and_grad(lambda w: sum(map(loss, w)))(weights)
            new = [weight - 0.1 * grad for weight, grad in zip(weights, grads, strict=True)]
            return scaler, select_tree(finite, new, weights)

        return jax.jit(step).lower(quick(), weights).compile().as_text().count(" = ")

    def loss(weight):
        return jnp.tanh(weight @ weight).sum()

    few, some, many = map(size, (4, 8, 16))
    assert many - some < 2.5 * (some - few)


def test_all_finite_of_what_has_no_floats():
    for tree in ((), None, jnp.arange(3), jax.random.key(0), {"a": jnp.array(True)}):
        finite = all_finite(tree)
        assert finite.dtype == jnp.bool_
        assert finite


def test_select_tree_keeps_every_bit(exact):
    def tree(seed, value):
        return {
            "nan": jnp.array([value, -0.0]),
            "count": jnp.array(seed),
            "key": jax.random.key(seed),
            "none": None,
        }

    a, b = tree(1, float("nan")), tree(2, 5.0)
    assert exact(jax.jit(select_tree)(True, a, b)) == exact(a)
    assert exact(jax.jit(select_tree)(False, a, b)) == exact(b)


def test_select_tree_leaves_settings_alone_and_chooses_between_numbers_that_differ():
    a = {"relu": jax.nn.relu, "name": "mlp", "train": True, "rate": 0.5, "zero": 0.0}
    b = {**a, "rate": float("0.5"), "zero": -0.0}

    @jax.jit
    def chosen(pred):
        tree = select_tree(pred, a, b)
        kept = [tree[name] is a[name] for name in ("relu", "name", "train")]
        assert all(kept)
        assert type(tree["rate"]) is float
        return tree["zero"]

    assert str(chosen(True)) == "0.0"
    assert str(chosen(False)) == "-0.0"


def test_select_tree_names_a_setting_that_differs():
    with pytest.raises(ValueError, match=r"\['act'\]: cannot choose between 'relu' and 'gelu'"):
        select_tree(True, {"act": "relu"}, {"act": "gelu"})


# Bad input.


@pytest.mark.parametrize("flag", [1.0, 1, jnp.ones(2, bool), jnp.ones((1,), bool)])
def test_anything_but_a_boolean_scalar_is_refused(flag):
    with pytest.raises(ValueError, match="grads_finite: expected boolean scalar, got"):
        quick().adjust(flag)
    with pytest.raises(ValueError, match="pred: expected boolean scalar, got"):
        select_tree(flag, 1.0, 2.0)


@pytest.mark.parametrize("policy", [2.0**16, "dynamic", None, DynamicScale])
def test_anything_but_a_policy_is_refused_with_an_example(policy):
    message = r"a DynamicScale, an AmaxScale or a FixedScale, .* DynamicScale\(init_scale="
    with pytest.raises(TypeError, match=message):
        GradScaler(policy)


@pytest.mark.parametrize("name", ["gradscaler.jax.flax", "flax.training.dynamic_scale"])
def test_flax_s_class_of_the_policy_s_name_is_refused_by_its_module(name):
    namesake = importlib.import_module(name).DynamicScale()
    for make in (GradScaler, functools.partial(loss_scaled, optax.sgd(0.1))):
        with pytest.raises(TypeError, match=f"a {name}.DynamicScale, which is not gradscaler.Dyn"):
            make(namesake)


BAD_SCALES = [0.0, INF, jnp.float32(-1), 1e39, 1e-46, 1e-40, np.array([8.0, 1e39]), 10**400]


@pytest.mark.parametrize("scale", BAD_SCALES)
def test_a_scale_that_is_not_positive_and_finite_in_float32_is_refused(scale):
    message = "the scale in state must be positive and finite in float32"
    with pytest.raises(ValueError, match=message):
        GradScaler(DynamicScale(), ScaleState(scale, 0, 0))


@pytest.mark.parametrize("field", ["finite_steps", "nonfinite_steps"])
@pytest.mark.parametrize("count", [-7, 2.5, math.nan, 2**31, jnp.array([1, -7])])
def test_a_count_in_the_state_that_is_none_is_refused_and_not_rounded(field, count):
    with pytest.raises(ValueError, match=f"{field} in state must be an integer of at least 0"):
        GradScaler(state=DynamicScale().init()._replace(**{field: count}))


@pytest.mark.parametrize("size", [math.nan, INF, 1e39])
@pytest.mark.parametrize("field", ["peak", "reach"])
def test_a_size_in_the_state_that_is_not_finite_in_float32_is_refused(field, size):
    with pytest.raises(ValueError, match=f"{field} in state must be a finite number in float32"):
        GradScaler(AmaxScale(), AmaxScale().init()._replace(**{field: size}))


def test_the_largest_and_the_smallest_scale_are_taken_and_multiply():
    for scale in (LARGEST_SCALE, SMALLEST_SCALE):
        scaler = GradScaler(state=ScaleState(scale, 0, 0))
        assert scaler.unscale(scaler.scale(1.0)) == 1.0


@pytest.mark.parametrize("state", [ScaleState("large", 0, 0), 65536.0, (65536.0, 0, 0)])
def test_anything_but_a_state_of_numbers_is_refused(state):
    with pytest.raises(TypeError, match="state must be"):
        GradScaler(DynamicScale(), state)


def test_a_state_of_numbers_becomes_arrays(exact):
    policy = DynamicScale()
    assert exact(GradScaler(policy, ScaleState(65536, 0, 0))) == exact(GradScaler(policy))


@pytest.mark.parametrize("leaf", [PartitionSpec(), None, jax.ShapeDtypeStruct((), np.float32)])
def test_anything_that_is_not_a_number_stands_in_place_of_the_state(leaf):
    state = GradScaler(state=ScaleState(leaf, leaf, leaf)).state
    assert all(each is leaf for each in state)


def test_shapes_are_restored_by_flax():
    from flax import serialization

    shapes = jax.eval_shape(quick)
    restored = serialization.from_state_dict(shapes, serialization.to_state_dict(shapes))
    assert restored.state == shapes.state


def test_with_aux_a_function_that_does_not_return_a_pair_is_refused():
    with pytest.raises(TypeError, match="fun must return a pair of a scalar and anything, got"):
        quick().value_and_grad(mean_of_squares, has_aux=True)(jnp.ones(2), jnp.ones(2))


@pytest.mark.parametrize("leaf", ["1.0", "float32", jnp.float32, object(), DynamicScale()])
def test_a_leaf_that_is_not_an_array_is_named_while_tracing(leaf):
    scaler, tree = quick(), {"layer": [1.0, leaf]}
    for function in (scaler.scale, scaler.unscale, all_finite):
        with pytest.raises(TypeError, match=r"leaf \['layer'\]\[1\] is neither an array nor"):
            jax.eval_shape(lambda function=function: function(tree))


def test_trees_that_do_not_match_are_refused_and_the_leaf_is_named():
    tree = {"layer": jnp.ones(2)}
    for other in ({"layer": jnp.ones(3)}, {"layer": jnp.ones(2, jnp.float16)}):
        with pytest.raises(ValueError, match=r"leaf \['layer'\]: cannot choose between float32"):
            select_tree(True, tree, other)
    with pytest.raises(ValueError, match="layer"):
        select_tree(True, tree, {"other": jnp.ones(2)})


# value_and_grad.


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_value_and_grad_is_jax_s_where_gradients_are_finite(jit, exact):
    wrap = jax.jit if jit else lambda function: function
    value, grads = wrap(jax.value_and_grad(mean_of_squares))(WEIGHT, INPUTS)
    scaled = wrap(lambda s, *args: s.value_and_grad(mean_of_squares)(*args))
    result = scaled(GradScaler(), WEIGHT, INPUTS)
    assert exact((result.value, result.grads)) == exact((value, grads))
    assert result.grads_finite
    assert result.scaler.state.finite_steps == 1


def test_argnums_and_aux_and_keywords():
    def fun(a, b, *, c):
        return a * b * c, {"sum": a + b}

    result = quick().value_and_grad(fun, argnums=(0, 1), has_aux=True)(2.0, 3.0, c=5.0)
    assert result.value == (30.0, {"sum": 5.0})
    assert result.grads == (15.0, 10.0)


def test_gradients_that_flush_in_float16_come_through():
    def fun(weight):
        return (weight.astype(jnp.float16) * jnp.float16(2.0**-13)).astype(jnp.float32) * 2.0**-13

    weight = jnp.float32(1.0)
    assert jax.grad(fun)(weight) == 0
    assert GradScaler().value_and_grad(fun)(weight).grads == 2.0**-26


def test_an_overflow_is_found_and_the_scale_backs_off():
    def fun(weight):
        return (weight.astype(jnp.float16) * 4).astype(jnp.float32)

    scaler = GradScaler()  # 4 * 2**16 is beyond float16
    for expected in (False, False, False, True):
        scaler, finite, _, grads = scaler.value_and_grad(fun)(jnp.float32(1.0))
        assert finite == expected
    assert scaler.loss_scale == 2.0**13
    assert grads == 4.0


# Transformations.


def test_vmap_gives_each_member_of_an_ensemble_its_own_scaler():
    scalers = jax.vmap(lambda _: quick())(jnp.arange(4))
    weights = jnp.array([1.0, INF, 2.0, INF])
    result = jax.vmap(lambda s, w: s.value_and_grad(lambda w: w * w)(w))(scalers, weights)
    assert result.grads_finite.tolist() == [True, False, True, False]
    assert result.scaler.loss_scale.tolist() == [8.0, 4.0, 8.0, 4.0]


def test_a_scaled_step_can_be_differentiated_through():
    def after_a_step(rate, weight):
        result = quick().value_and_grad(lambda w: w**2)(weight)
        return (weight - rate * result.grads) ** 2

    assert jax.grad(after_a_step)(0.1, 3.0) == pytest.approx(2 * (3 - 0.6) * -6)


def test_jax_checkpoint_changes_nothing(exact):
    plain = quick().value_and_grad(mean_of_squares)(WEIGHT, INPUTS)
    again = quick().value_and_grad(jax.checkpoint(mean_of_squares))(WEIGHT, INPUTS)
    assert exact(again) == exact(plain)


SHARDS = jnp.arange(8.0).at[3].set(INF)
MESH = Mesh(jax.devices(), ("batch",))
REPLICATED, SPLIT = PartitionSpec(), PartitionSpec("batch")


def pmapped_step(scaler, inputs):
    result = scaler.value_and_grad(lambda w: w * inputs, axis_name="batch")(1.0)
    return result.grads_finite, result.scaler.loss_scale


@functools.partial(jax.shard_map, mesh=MESH, in_specs=(REPLICATED, SPLIT), out_specs=(SPLIT, SPLIT))
def sharded_step(scaler, grads):
    finite = all_finite(scaler.unscale(grads), "batch")
    return finite.reshape(1), scaler.adjust(finite).loss_scale.reshape(1)


@pytest.mark.parametrize(
    "step",
    [jax.pmap(pmapped_step, axis_name="batch", in_axes=(None, 0)), jax.jit(sharded_step)],
    ids=["pmap", "shard_map"],
)
def test_all_shards_find_what_one_of_them_finds(step):
    finite, scale = step(quick(), SHARDS)
    assert (finite.tolist(), scale.tolist()) == ([False] * 8, [4.0] * 8)


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_of_replicated_weights_are_averaged_and_not_summed(check_vma):
    @functools.partial(
        jax.shard_map,
        mesh=MESH,
        in_specs=(REPLICATED, REPLICATED, SPLIT),
        out_specs=REPLICATED,
        check_vma=check_vma,
    )
    def step(scaler, weight, x):
        def loss(weight, x):
            return (weight * x).mean()

        return scaler.value_and_grad(loss, argnums=-2, axis_name="batch")(weight, x)[3]

    assert step(quick(), jnp.float32(2), jnp.arange(8.0)) == 3.5


def test_without_the_axis_each_shard_would_decide_alone():
    finite = jax.pmap(all_finite)(SHARDS)
    assert finite.tolist() == [True] * 3 + [False] + [True] * 4


def test_all_finite_reduces_over_several_axes():
    inner = jax.vmap(lambda x: all_finite(x, ("a", "b")), axis_name="b")
    assert not jax.vmap(inner, axis_name="a")(SHARDS.reshape(2, 4)).any()


def test_arrays_sharded_by_jit_need_no_axis():
    step = jax.jit(lambda s, x: s.value_and_grad(lambda w: (w * x).sum())(1.0))
    result = step(quick(), jax.device_put(SHARDS, NamedSharding(MESH, SPLIT)))
    assert not result.grads_finite
    assert result.scaler.loss_scale == 4.0


@pytest.mark.parametrize("value", [INF, float("nan")])
@pytest.mark.parametrize("place", range(8))
def test_one_element_of_a_sharded_array_is_found(value, place):
    sharded = jax.device_put(jnp.ones(8).at[place].set(value), NamedSharding(MESH, SPLIT))
    assert not all_finite(sharded)
    assert not jax.jit(all_finite)([jnp.ones(3), sharded])


# Copies and files.


def through_flax(scaler, path):
    from flax import serialization

    return serialization.from_bytes(quick(), serialization.to_bytes(scaler))


def through_orbax(scaler, path):
    import orbax.checkpoint

    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "scaler", {"scaler": scaler})
        checkpointer.wait_until_finished()
        return checkpointer.restore(path / "scaler", {"scaler": quick()})["scaler"]


@pytest.mark.parametrize(
    "twin_of",
    [
        through_flax,
        through_orbax,
        lambda scaler, path: pickle.loads(pickle.dumps(scaler)),
        lambda scaler, path: copy.deepcopy(scaler),
    ],
)
def test_a_copy_or_a_file_keeps_state_and_policy(twin_of, exact, tmp_path):
    scaler = quick().adjust(True).adjust(True).adjust(False).adjust(True)
    twin = twin_of(scaler, tmp_path)
    assert twin.policy == scaler.policy
    assert exact(twin) == exact(scaler)


def test_flax_does_not_restore_what_is_not_the_state_of_a_scaler():
    from flax import serialization

    with pytest.raises(ValueError, match="the state of a GradScaler has"):
        serialization.from_state_dict(quick(), {"scale": 1.0})


def test_flax_may_be_imported_after_the_scaler_was_made():
    code = """
import jax
from gradscaler.jax import DynamicLossScale, DynamicScale, GradScaler
made = jax.tree.map(lambda leaf: leaf, [GradScaler(), DynamicScale(), DynamicLossScale(8.0)])
from flax import serialization
made = jax.tree.map(lambda leaf: leaf, made)  # as every step does
for each in made:
    again = serialization.from_bytes(each, serialization.to_bytes(each))
    assert type(again) is type(each) and str(again) == str(each), (again, each)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_its_leaves_have_names():
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(quick())]
    assert paths == [".state.scale", ".state.finite_steps", ".state.nonfinite_steps"]


def test_importing_it_imports_neither_flax_nor_optax_nor_jmp():
    code = (
        "import sys, gradscaler.jax; "
        "assert not {'flax', 'optax', 'jmp', 'equinox'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
