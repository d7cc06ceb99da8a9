"""jmp's names against jmp itself, on the same traces."""

import dataclasses
import importlib.util
import inspect
import typing
import unittest
from collections import Counter

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jmp._src import loss_scale

import gradscaler.jax as ours
from tests.support.chosen import examples

CLASSES = ["NoOpLossScale", "StaticLossScale", "DynamicLossScale"]


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")  # in its sums
def test_jmp_s_own_tests_pass(monkeypatch):
    used = Counter()

    def counted(name):
        def ours_by_name(*args, **kwargs):
            used[name] += 1
            return getattr(ours, name)(*args, **kwargs)

        return ours_by_name

    for name in [*CLASSES, "all_finite", "select_tree"]:
        monkeypatch.setattr(loss_scale, name, counted(name))  # where the suite looks names up
    # Executed afresh: as it is imported, the suite takes classes for its parametrized tests.
    spec = importlib.util.find_spec("jmp._src.loss_scale_test")
    suite = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(suite)
    result = unittest.defaultTestLoader.loadTestsFromModule(suite).run(unittest.TestResult())
    assert (result.failures, result.errors, result.skipped) == ([], [], [])
    assert result.testsRun == 25
    assert used == {
        "NoOpLossScale": 2,
        "StaticLossScale": 4,
        "DynamicLossScale": 14,
        "all_finite": 12,
        "select_tree": 5,
    }


def both(*args, name="DynamicLossScale", **kwargs):
    """Our object and jmp's, made alike."""
    return [getattr(module, name)(*args, **kwargs) for module in (ours, jmp)]


@pytest.mark.parametrize("method", ["__init__", "scale", "unscale", "adjust"])
@pytest.mark.parametrize("name", CLASSES)
def test_signatures_are_jmp_s(name, method):
    functions = (getattr(getattr(module, name), method) for module in (ours, jmp))
    mine, theirs = (list(inspect.signature(function).parameters) for function in functions)
    assert mine == theirs


def test_defaults_are_jmp_s():
    mine, theirs = both(jnp.float32(8))
    for name in ("loss_scale", "counter", "period", "factor", "min_loss_scale"):
        a, b = getattr(mine, name), getattr(theirs, name)
        assert (a, jnp.result_type(a)) == (b, jnp.result_type(b))


# Outside jit, where jmp keeps its floor.
@settings(max_examples=examples(60))
@given(
    start=st.sampled_from([1.0, 10.0, 2.0**15, 3e38]),
    period=st.integers(1, 4),
    factor=st.sampled_from([2, 3, 10]),
    floor=st.sampled_from([0.5, 1.0, 7.0]),
    trace=st.lists(st.booleans(), max_size=12),
)
def test_adjust_is_jmp_s_to_the_bit(start, period, factor, floor, trace):
    mine, theirs = both(
        jnp.float32(start), period=period, factor=factor, min_loss_scale=jnp.float32(floor)
    )
    for finite in trace:
        mine, theirs = (scale.adjust(jnp.bool_(finite)) for scale in (mine, theirs))
        assert mine.loss_scale.tobytes() == theirs.loss_scale.tobytes()
        assert mine.counter == theirs.counter
        assert (mine.loss_scale.dtype, mine.counter.dtype) == (jnp.float32, jnp.int32)


def test_the_floor_survives_jit_and_jmp_s_does_not():
    def lowered(module):
        scale = module.DynamicLossScale(jnp.float32(32), min_loss_scale=jnp.float32(8))
        for _ in range(4):
            scale = jax.jit(lambda scale: scale.adjust(jnp.bool_(False)))(scale)
        return scale.loss_scale

    assert lowered(ours) == 8
    assert lowered(jmp) == 2


def test_a_floor_that_is_traced_or_an_array_is_a_leaf_like_the_scale():
    def lowered(floor):
        scale = ours.DynamicLossScale(2 * floor, min_loss_scale=floor)
        for _ in range(3):
            scale = scale.adjust(jnp.bool_(False))
        return scale

    floors = jnp.array([2.0, 8.0])
    for scale in (jax.vmap(lowered)(floors), lowered(floors)):
        assert scale.loss_scale.tolist() == scale.min_loss_scale.tolist() == [2.0, 8.0]
        assert len(jax.tree.leaves(scale)) == 3
    assert len(jax.tree.leaves(lowered(jnp.float32(2)))) == 2


def test_a_floor_of_0_is_the_smallest_normal_number_and_jmp_s_scale_sinks_to_0():
    mine, theirs = both(jnp.float32(2.0**-120), min_loss_scale=jnp.float32(0))
    for exponent in range(-121, -127, -1):
        mine, theirs = (scale.adjust(jnp.bool_(False)) for scale in (mine, theirs))
        assert mine.loss_scale == theirs.loss_scale == 2.0**exponent
    for _ in range(30):
        mine, theirs = (scale.adjust(jnp.bool_(False)) for scale in (mine, theirs))
    assert (mine.loss_scale, theirs.loss_scale) == (2.0**-126, 0)
    assert mine.min_loss_scale == 0


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_a_narrow_scale_does_not_grow_to_inf(dtype):
    largest = jnp.asarray(jnp.finfo(dtype).max, dtype)
    for scale in both(largest, period=1, min_loss_scale=dtype(1)):
        assert scale.adjust(jnp.bool_(True)).loss_scale == largest
    assert ours.DynamicLossScale(dtype(8)).adjust(jnp.bool_(False)).loss_scale.dtype == dtype


@pytest.mark.parametrize("scale", [2.0**15, np.float32(2**15), jnp.asarray(2.0**15)])
def test_adjust_is_traced_once(scale, counted_jit):
    adjusted, traces = counted_jit(lambda scale: scale.adjust(jnp.bool_(True)))
    scale = ours.DynamicLossScale(scale)
    for _ in range(3):
        scale = adjusted(scale)
    assert len(traces) == 1


def test_a_python_number_multiplies_in_float32_and_jmp_s_first_step_in_float16():
    gradient = jnp.ones(1, jnp.float16)
    for module, first in (ours, jnp.float32), (jmp, jnp.float16):
        loss_scale = jax.jit(module.DynamicLossScale)(2.0**15)
        assert loss_scale.unscale(gradient).dtype == first
        loss_scale = loss_scale.adjust(jnp.array(True))
        assert loss_scale.unscale(gradient).dtype == jnp.float32


@pytest.mark.parametrize("name", CLASSES)
def test_trees_are_scaled_as_jmp_scales_them(name, exact):
    tree = {
        "half": jnp.ones(2, jnp.float16),
        "single": jnp.float32(3),
        "int": jnp.arange(2),
        "none": None,
        "python": 0.5,
    }
    mine, theirs = both(*([] if name == "NoOpLossScale" else [jnp.float32(6)]), name=name)
    assert exact(mine.scale(tree)) == exact(theirs.scale(tree))
    assert exact(mine.unscale(tree)) == exact(theirs.unscale(tree))
    if name != "DynamicLossScale":
        assert mine.adjust(jnp.bool_(False)) is mine
    assert mine.loss_scale == theirs.loss_scale


@pytest.mark.parametrize("make", [ours.NoOpLossScale, lambda: ours.StaticLossScale(0)])
def test_scales_that_do_not_move_have_no_leaves(make):
    assert jax.tree.leaves(make()) == []
    assert jax.tree.map(lambda leaf: leaf, make()) == make()


@pytest.mark.parametrize("scale", [8.0, np.float32(8), jnp.float32(8)])
def test_a_static_scale_passes_through_jit(scale, counted_jit):
    scaled, traces = counted_jit(lambda loss_scale: loss_scale.scale(jnp.float32(2)))
    for _ in range(2):
        assert scaled(ours.StaticLossScale(scale)) == 16
    assert len(traces) == 1


@pytest.mark.parametrize("argument", ["loss_scale", "min_loss_scale"])
def test_an_integer_scale_warns_as_jmp_does(argument):
    arguments = {"loss_scale": jnp.float32(1), argument: jnp.int32(1)}
    for module in (ours, jmp):
        with pytest.warns(UserWarning, match=f"Expected floating type for {argument}, got int32"):
            module.DynamicLossScale(**arguments)


def test_rebuilding_the_tree_of_anything_does_not_warn():
    scale = ours.DynamicLossScale(jnp.float32(1))
    jax.tree.map(lambda _: object(), scale)
    jax.tree.map(lambda _: None, scale)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("loss_scale", jnp.float32(0), ValueError),
        ("loss_scale", -1.0, ValueError),
        ("loss_scale", "large", TypeError),
        ("loss_scale", jnp.float32("nan"), ValueError),
        ("loss_scale", 1e39, ValueError),
        ("loss_scale", 1e-46, ValueError),
        ("loss_scale", jnp.float16(2.0**-24), ValueError),
        ("counter", -7, ValueError),
        ("counter", 2.5, ValueError),
        ("counter", jnp.array([0, -7]), ValueError),
        ("counter", "many", TypeError),
        ("min_loss_scale", jnp.float32(-1), ValueError),
        ("min_loss_scale", 1e39, ValueError),
        ("min_loss_scale", jnp.float32("inf"), ValueError),
        ("period", 0, ValueError),
        ("period", 2.5, TypeError),
        ("factor", 1, ValueError),
    ],
)
def test_a_parameter_that_cannot_work_is_named(name, value, error):
    with pytest.raises(error, match=name):
        ours.DynamicLossScale(**{"loss_scale": jnp.float32(1), name: value})


@pytest.mark.parametrize("value", [1e39, 1e-46, np.float64(1e300)])
@pytest.mark.parametrize("method", ["scale", "unscale"])
def test_a_static_scale_that_float32_cannot_hold_cannot_be_used(method, value):
    with pytest.raises(ValueError, match="loss_scale must be positive and finite in float32"):
        getattr(ours.StaticLossScale(value), method)(1.0)


def test_a_scale_that_float64_holds_is_taken_with_x64():
    with jax.enable_x64(True):
        scale = ours.DynamicLossScale(1e39)
        assert scale.unscale(scale.scale(2.0)) == 2.0 == scale.loss_scale / 1e39 * 2


@pytest.mark.parametrize("method", ["scale", "unscale"])
def test_a_static_scale_of_zero_cannot_be_used(method):
    with pytest.raises(
        ValueError, match=r"loss_scale must be positive and finite in float32 .*, got 0"
    ):
        jax.jit(lambda x: getattr(ours.StaticLossScale(0), method)(x))(1.0)


@pytest.mark.parametrize("module", [ours, jmp])
def test_a_flag_that_is_not_a_scalar_is_refused_as_by_jmp(module):
    with pytest.raises(AssertionError):
        module.DynamicLossScale(jnp.float32(1)).adjust(jnp.array([True]))
    with pytest.raises(AssertionError):
        module.select_tree(jnp.array([True]), 1.0, 2.0)


def test_all_finite_and_select_tree_are_jmp_s():
    for tree in ({}, {"a": jnp.ones(2)}, {"a": jnp.array([1.0, jnp.nan]), "b": jnp.arange(2)}):
        assert ours.all_finite(tree) == jmp.all_finite(tree)
    a, b = {"x": jnp.ones(2)}, {"x": jnp.zeros(2)}
    for pred in (jnp.bool_(True), jnp.bool_(False)):
        assert (ours.select_tree(pred, a, b)["x"] == jmp.select_tree(pred, a, b)["x"]).all()


def test_flax_serialises_it(exact):
    from flax import serialization

    scale = ours.DynamicLossScale(jnp.float32(64)).adjust(jnp.bool_(True))
    target = ours.DynamicLossScale(jnp.float32(1))
    restored = serialization.from_bytes(target, serialization.to_bytes(scale))
    assert exact(restored) == exact(scale)


def test_the_union_of_the_classes_is_jmp_s():
    mine, theirs = (typing.get_args(module.LossScale) for module in (ours, jmp))
    assert [kind.__name__ for kind in mine] == [kind.__name__ for kind in theirs] == CLASSES
    assert all(kind is getattr(ours, kind.__name__) for kind in mine)


SPEC = jax.sharding.PartitionSpec()


@pytest.mark.parametrize("leaf", [object(), jax.ShapeDtypeStruct((), np.float32)])
def test_what_jmp_takes_in_place_of_the_leaves_stays_as_it_is(leaf):
    for made in both(leaf, leaf):
        assert made.loss_scale is made.counter is leaf


@pytest.mark.parametrize("leaf", [SPEC, None])
def test_specs_and_none_are_taken_in_place_of_the_leaves_and_by_jmp_they_are_not(leaf):
    made = ours.DynamicLossScale(leaf, leaf, min_loss_scale=leaf)
    assert made.loss_scale is made.counter is made.min_loss_scale is leaf
    with pytest.raises((TypeError, AttributeError)):
        jmp.DynamicLossScale(leaf, leaf)


def test_axes_of_vmap_may_be_given_in_its_place():
    """As in jmp, whose class JAX 0.6 cannot map, though."""
    axes, stacked = ours.DynamicLossScale(0, 0), (jnp.array([2.0, 8.0]), jnp.array([1999, 0]))
    adjust = jax.vmap(lambda scale: scale.adjust(jnp.bool_(True)), in_axes=(axes,))
    result = adjust(ours.DynamicLossScale(*stacked))
    assert (result.loss_scale.tolist(), result.counter.tolist()) == ([4.0, 8.0], [0, 1])


def test_a_static_scale_may_hold_anything_until_it_is_used():
    assert ours.StaticLossScale(SPEC).loss_scale is SPEC
    with pytest.raises(TypeError):
        ours.StaticLossScale(SPEC).scale(1.0)


def test_a_subclass_is_a_pytree_once_it_is_registered_as_jmp_s_is():
    def adjusted(module):
        @dataclasses.dataclass(frozen=True)
        class Named(module.DynamicLossScale):
            name: str = "loss"

        with pytest.raises(TypeError, match="Named"):
            jax.jit(lambda scale: scale)(Named(jnp.float32(8)))
        jax.tree_util.register_pytree_node_class(Named)
        scale = jax.jit(lambda scale: scale)(Named(jnp.float32(8), name="mine"))
        assert scale.name == "loss"  # neither's tree_flatten knows the field
        return type(scale).__name__, float(scale.adjust(jnp.bool_(False)).loss_scale)

    assert adjusted(ours) == adjusted(jmp) == ("Named", 4.0)
