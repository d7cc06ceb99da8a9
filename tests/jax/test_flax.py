"""flax's DynamicScale against flax's own, on the same traces."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization, struct
from flax.training import dynamic_scale as flax
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import gradscaler.jax as ours
from tests.support.chosen import examples

MODULES = {"ours": ours, "flax": flax}
SHARDS = np.arange(8.0, dtype=np.float32)


def test_signatures_and_defaults_are_flax_s():
    mine, theirs = (inspect.signature(module.DynamicScale) for module in (ours, flax))
    assert list(mine.parameters) == list(theirs.parameters)
    for name, parameter in theirs.parameters.items():
        assert mine.parameters[name].default == parameter.default
    mine, theirs = (
        inspect.signature(module.DynamicScale.value_and_grad) for module in (ours, flax)
    )
    assert list(mine.parameters) == list(theirs.parameters)
    assert ours.DynamicScaleResult._fields == flax.DynamicScaleResult._fields


def product(weight, x):
    return weight * x


@settings(max_examples=examples(40))
@given(
    options=st.fixed_dictionaries(
        {
            "growth_factor": st.sampled_from([1.1, 2.0, 4.0]),
            "backoff_factor": st.sampled_from([0.3, 0.5]),
            "growth_interval": st.integers(1, 4),
            "scale": st.sampled_from([1.0, 1000.0, 2.0**16]),
            "minimum_scale": st.sampled_from([2.0**-126, 1.0, 3.0]),
        }
    ),
    trace=st.lists(st.sampled_from([0.5, 3.0, np.inf, np.nan]), max_size=12),
)
def test_value_and_grad_is_flax_s_to_the_bit(options, trace, exact):
    options["scale"] = max(options["scale"], options["minimum_scale"])
    mine, theirs = ours.DynamicScale(**options), flax.DynamicScale(**options)
    for x in trace:
        a, b = (s.value_and_grad(product)(jnp.float32(2), jnp.float32(x)) for s in (mine, theirs))
        mine, theirs = a.dynamic_scale, b.dynamic_scale
        assert np.asarray(mine.scale).tobytes() == np.float32(theirs.scale).tobytes()
        assert mine.fin_steps == theirs.fin_steps
        assert a.finite == b.finite
        assert exact(a.grad) == exact(b.grad)
        np.testing.assert_allclose(a.aux, b.aux, rtol=1e-6)


def test_aux_and_argnums_are_flax_s():
    def fun(a, b):
        return a * b, {"sum": a + b}

    results = [
        scale.value_and_grad(fun, argnums=(0, 1), has_aux=True)(jnp.float32(2), jnp.float32(3))
        for scale in (ours.DynamicScale(), flax.DynamicScale())
    ]
    assert results[0].aux == results[1].aux == (6, {"sum": 5})
    assert results[0].grad == results[1].grad == (3, 2)


def test_gradients_are_averaged_over_the_axis_as_flax_averages_them():
    def step(scale, x):
        return scale.value_and_grad(product, axis_name="batch")(1.0, x)

    parallel = jax.pmap(step, axis_name="batch", in_axes=(None, 0))
    for shards in (SHARDS, np.where(SHARDS == 3, np.inf, SHARDS)):
        mine, theirs = (parallel(module.DynamicScale(), shards) for module in (ours, flax))
        assert mine.grad.tolist() == theirs.grad.tolist()
        assert mine.finite.tolist() == theirs.finite.tolist()
        assert mine.dynamic_scale.scale.tolist() == theirs.dynamic_scale.scale.tolist()


def test_the_value_of_a_float16_loss_is_right_though_flax_s_is_nan_at_first():
    def half(weight):
        return weight.astype(jnp.float16)

    assert np.isnan(flax.DynamicScale().value_and_grad(half)(jnp.float32(2)).aux)
    assert ours.DynamicScale().value_and_grad(half)(jnp.float32(2)).aux == 2


def test_orbax_saves_a_new_one(tmp_path):
    import orbax.checkpoint

    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", {"scale": ours.DynamicScale()})


def test_without_a_minimum_flax_s_scale_sinks_to_zero_and_this_does_not():
    def sunk(module):
        scale = module.DynamicScale(scale=2.0**-120, minimum_scale=None)
        for _ in range(40):
            scale = scale.value_and_grad(product)(1.0, jnp.inf).dynamic_scale
        return float(scale.scale)

    assert sunk(ours) == 2.0**-126
    assert sunk(flax) == 0


def test_state_dicts_go_both_ways():
    mine = ours.DynamicScale(fin_steps=3, scale=64.0)
    theirs = serialization.from_state_dict(flax.DynamicScale(), serialization.to_state_dict(mine))
    assert (theirs.fin_steps, theirs.scale) == (3, 64.0)
    again = serialization.from_bytes(ours.DynamicScale(), serialization.to_bytes(theirs))
    assert (again.fin_steps, again.scale) == (3, 64.0)


def test_jit_compiles_once_whatever_number_the_scale_starts_as(counted_jit):
    step, traces = counted_jit(lambda s, x: s.value_and_grad(product)(1.0, x).dynamic_scale)
    for start in (8, np.float64(8), jnp.asarray(8), jnp.asarray(8.0)):
        scale = ours.DynamicScale(scale=start, growth_interval=1)
        for x in (1.0, 2.0, np.inf):
            scale = step(scale, x)
        assert scale.scale == 8.0
    assert len(traces) == 1


def test_replace_changes_fields():
    scale = ours.DynamicScale().replace(growth_interval=5, scale=2.0)
    assert (scale.growth_interval, scale.scale) == (5, 2.0)


def test_a_bad_parameter_is_named():
    with pytest.raises(ValueError, match="growth_factor"):
        ours.DynamicScale(growth_factor=0.5).value_and_grad(product)(1.0, 1.0)
    with pytest.raises(ValueError, match="scale must be positive and finite"):
        ours.DynamicScale(scale=0.0)


PLACEHOLDERS = {
    "PartitionSpec": PartitionSpec(),
    "None": None,
    "object": object(),
    "ShapeDtypeStruct": jax.ShapeDtypeStruct((), np.float32),
    "axis": 0,
}


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("name", PLACEHOLDERS)
def test_anything_may_stand_in_place_of_the_leaves(name, module):
    made = MODULES[module].DynamicScale(fin_steps=PLACEHOLDERS[name], scale=PLACEHOLDERS[name])
    assert made.fin_steps is made.scale is PLACEHOLDERS[name]


@pytest.mark.parametrize("value", [16, [16.0], (16.0,)], ids=repr)
def test_ints_above_0_and_lists_are_numbers(value):
    made = ours.DynamicScale(fin_steps=value, scale=value)
    assert (made.fin_steps.dtype, made.scale.dtype) == (np.int32, np.float32)
    bad = [-1.0] if isinstance(value, list) else -16.0
    with pytest.raises(ValueError, match="scale must be positive"):
        made.replace(scale=bad)


@pytest.mark.parametrize("axes", [{"scale": 0}, {"fin_steps": None, "scale": 0}])
def test_axes_of_vmap_may_be_given_in_its_place(axes):
    def mapped(module):
        in_axes = module.DynamicScale(**axes)
        scales = jnp.array([2.0, 8.0])
        steps = jnp.int32(3) if in_axes.fin_steps is None else jnp.array([3, 4])
        stacked = module.DynamicScale(fin_steps=steps, scale=scales)
        step = jax.vmap(lambda s: s.value_and_grad(product)(1.0, 2.0)[0], in_axes=(in_axes,))
        moved = step(stacked)
        return moved.scale.tolist(), moved.fin_steps.tolist()

    assert mapped(ours) == mapped(flax)


def test_shardings_and_specs_may_be_given_in_its_place(devices):
    mesh = Mesh(np.array(devices), ("devices",))
    everywhere = NamedSharding(mesh, PartitionSpec())

    def placed(module):
        at = module.DynamicScale(fin_steps=everywhere, scale=everywhere)
        specs = module.DynamicScale(fin_steps=PartitionSpec(), scale=PartitionSpec())
        start = module.DynamicScale(scale=8.0)
        put = jax.device_put(start, at)
        jitted = jax.jit(lambda s: s, in_shardings=(at,), out_shardings=at)(start)
        mapped = jax.shard_map(lambda s: s, mesh=mesh, in_specs=(specs,), out_specs=specs)(start)
        return [(leaf.sharding, leaf) for leaf in jax.tree.leaves((put, jitted, mapped))]

    assert placed(ours) == placed(flax)
    assert len(placed(ours)) == 6


def test_shapes_are_restored_as_flax_restores_them():
    def restored(module):
        shapes = jax.eval_shape(lambda: module.DynamicScale(fin_steps=jnp.int32(0)))
        again = serialization.from_state_dict(shapes, serialization.to_state_dict(shapes))
        return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(again)]

    assert restored(ours) == restored(flax) == [((), np.int32), ((), np.float32)]


@pytest.mark.parametrize("scale", [0, "large", -1.0, 1e39, 1e-46, 1e-40, 10**400])
def test_a_scale_that_cannot_work_is_refused_when_it_is_used_at_the_latest(scale):
    with pytest.raises((TypeError, ValueError), match="must be"):
        ours.DynamicScale(scale=scale).value_and_grad(product)(1.0, 1.0)


@pytest.mark.parametrize("count", [-7, 2.5, np.nan, 2**31, jnp.array([3.0, 2.5])])
def test_a_count_that_is_none_is_refused_and_not_rounded(count):
    with pytest.raises(ValueError, match="fin_steps must be an integer of at least 0 in int32"):
        ours.DynamicScale(fin_steps=count)


def test_a_count_may_be_a_whole_number_of_any_dtype():
    assert ours.DynamicScale(fin_steps=jnp.float32(3)).fin_steps == 3
    assert ours.DynamicScale(fin_steps=np.uint8(3)).fin_steps == 3


def subclass(module, **options):
    class Logged(module.DynamicScale, **options):
        seen: float = 3.0
        name: str = struct.field(pytree_node=False, default="loss")

    return Logged


def test_a_subclass_is_a_pytree_with_its_fields_as_flax_s_is():
    def described(module):
        scale = subclass(module)(scale=8.0, seen=5.0, name="mine")
        step = jax.jit(lambda s: s.value_and_grad(product)(1.0, jnp.inf).dynamic_scale)
        for _ in range(2):
            scale = step(scale)
        leaves = jax.tree.leaves(scale)
        state = {name: float(leaf) for name, leaf in serialization.to_state_dict(scale).items()}
        restored = serialization.from_state_dict(scale, state | {"seen": 7.0})
        return type(scale).__name__, scale.name, leaves, state, restored.seen

    assert described(ours) == described(flax)
    assert described(ours)[:3] == ("Logged", "mine", [0, 2.0, 5.0])


def test_a_subclass_is_frozen_and_takes_the_options_of_a_dataclass_as_flax_s_does():
    for module in MODULES.values():
        made = subclass(module, kw_only=True)(seen=4.0)
        with pytest.raises(AttributeError, match="cannot assign"):
            made.seen = 1.0
        with pytest.raises(TypeError, match="positional argument"):
            subclass(module, kw_only=True)(2.0, 0.5, 2000, 0, 8.0, None, 4.0)


@pytest.mark.parametrize("module", MODULES)
def test_a_subclass_may_be_decorated_as_flax_s_may(module):
    decorated = struct.dataclass(subclass(MODULES[module]))
    assert len(jax.tree.leaves(decorated())) == 3


def test_a_subclass_may_have_another_interval_which_is_a_leaf_in_flax_alone():
    def grown(module):
        class Faster(module.DynamicScale):
            growth_interval: int = 1

        step = jax.jit(lambda s: s.value_and_grad(product)(1.0, 1.0).dynamic_scale)
        scale = Faster(scale=8.0)
        for _ in range(2):
            scale = step(scale)
        return float(scale.scale), len(jax.tree.leaves(scale))

    assert grown(ours) == (16.0, 2)
    assert grown(flax) == (16.0, 3)
