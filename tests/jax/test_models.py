"""Equinox's and NNX's models, whole: their own value_and_grad, and select_tree on them."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from gradscaler import DynamicScale, FixedScale
from gradscaler.jax import GradScaler, select_tree

SCALER = GradScaler(FixedScale(1024.0))
INPUTS = jnp.linspace(-1, 1, 12).reshape(4, 3)


def mlp():
    return eqx.nn.Sequential(
        [eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0)), eqx.nn.Dropout(0.5, inference=True)]
    )


def loss(model, inputs):
    return (jax.vmap(model)(inputs) ** 2).mean()


def loss_and_size(model, inputs):
    return loss(model, inputs), {"size": len(inputs)}


class Network(nnx.Module):
    """A layer, a BatchNorm that keeps statistics, and a setting that is no array."""

    def __init__(self):
        self.linear = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
        self.activation = jax.nn.relu

    def __call__(self, x):
        return self.activation(self.norm(self.linear(x)))


def nnx_loss(model, inputs):
    return (model(inputs) ** 2).mean()


@pytest.mark.parametrize("wrap", [lambda f: f, eqx.filter_jit], ids=["eager", "filter_jit"])
def test_equinox_s_models_need_no_partition(wrap, exact):
    result = wrap(
        lambda scaler, model: scaler.value_and_grad(loss, transform=eqx.filter_value_and_grad)(
            model, INPUTS
        )
    )(SCALER, mlp())
    value, grads = wrap(eqx.filter_value_and_grad(loss))(mlp(), INPUTS)
    assert exact(result.grads) == exact(grads)
    assert result.value == value
    assert result.grads_finite


def test_equinox_s_models_with_aux_and_one_s_own_arguments():
    result = SCALER.value_and_grad(
        loss_and_size, has_aux=True, transform=eqx.filter_value_and_grad
    )(mlp(), inputs=INPUTS)
    assert result.value == (loss(mlp(), INPUTS), {"size": 4})


@pytest.mark.parametrize("finite", [True, False])
def test_select_tree_takes_equinox_s_models_whole(finite, exact):
    @eqx.filter_jit
    def chosen(model):
        moved = eqx.apply_updates(
            model, jax.tree.map(jnp.ones_like, eqx.filter(model, eqx.is_array))
        )
        selected = select_tree(jnp.bool_(finite), moved, model)
        assert selected[0].activation is model[0].activation
        assert selected[1].inference is True
        return selected, moved

    selected, moved = chosen(mlp())
    expected = moved if finite else mlp()
    assert exact(eqx.filter(selected, eqx.is_array)) == exact(eqx.filter(expected, eqx.is_array))
    assert eqx.tree_equal(jax.vmap(selected)(INPUTS), jax.vmap(expected)(INPUTS), rtol=1e-6)


@pytest.mark.parametrize("check_vma", [True, False])
def test_equinox_s_models_are_averaged_over_devices(check_vma):
    everywhere, split = PartitionSpec(), PartitionSpec("batch")
    arrays, static = eqx.partition(mlp(), eqx.is_array)

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=Mesh(jax.devices()[:4], ("batch",)),
        in_specs=(everywhere, everywhere, split),
        out_specs=everywhere,
        check_vma=check_vma,
    )
    def step(scaler, arrays, inputs):
        differentiated = scaler.value_and_grad(
            loss, axis_name="batch", transform=eqx.filter_value_and_grad
        )
        return eqx.filter(differentiated(eqx.combine(arrays, static), inputs).grads, eqx.is_array)

    grads = step(SCALER, arrays, INPUTS)
    expected = eqx.filter_grad(loss)(mlp(), INPUTS)
    for mine, theirs in zip(*map(jax.tree.leaves, (grads, expected)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5)


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_nnx_s_models_need_no_split_and_keep_their_statistics(wrap, exact):
    ours, theirs = Network(), Network()
    differentiated = wrap(
        lambda scaler, model: scaler.value_and_grad(nnx_loss, transform=nnx.value_and_grad)(
            model, INPUTS
        )
    )
    result = differentiated(SCALER, ours)
    value, grads = wrap(nnx.value_and_grad(nnx_loss))(theirs, INPUTS)
    for mine, expected in zip(*map(jax.tree.leaves, (result.grads, grads)), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-7)
    assert result.value == value
    assert exact(nnx.state(ours)) == exact(nnx.state(theirs))
    assert ours.norm.mean[...].any()


def test_nnx_s_argnums_say_which_variables():
    argnums = nnx.DiffState(1, nnx.Param)
    result = SCALER.value_and_grad(
        lambda inputs, model: nnx_loss(model, inputs), argnums, transform=nnx.value_and_grad
    )(INPUTS, Network())
    assert set(result.grads) == {"linear", "norm"}


@pytest.mark.parametrize("finite", [True, False])
def test_select_tree_takes_nnx_s_models_whole(finite, exact):
    model = Network()
    before = nnx.clone(model)
    nnx_loss(model, INPUTS)
    assert exact(nnx.state(model)) != exact(nnx.state(before))
    selected = select_tree(jnp.bool_(finite), model, before)
    assert exact(nnx.state(selected)) == exact(nnx.state(model if finite else before))
    assert selected.activation is jax.nn.relu


@pytest.mark.parametrize("options", [{"axis_name": "batch"}, {"retries": 1}])
def test_what_cannot_follow_a_model_that_changes_in_place_is_refused(options):
    with pytest.raises(ValueError, match=r"value_and_grad changes its model in place.*nnx.split"):
        SCALER.value_and_grad(nnx_loss, transform=nnx.value_and_grad, **options)


def test_equinox_s_models_can_be_tried_again():
    scaler = GradScaler(DynamicScale(init_scale=2.0**20))

    def half_loss(model, inputs):
        half = jax.tree.map(lambda x: x.astype(jnp.float16) if eqx.is_array(x) else x, model)
        return loss(half, inputs.astype(jnp.float16)).astype(jnp.float32)

    @eqx.filter_jit
    def step(scaler, model):
        return scaler.value_and_grad(half_loss, transform=eqx.filter_value_and_grad, retries=16)(
            model, INPUTS
        )

    result = step(scaler, mlp())
    assert result.grads_finite
    assert result.scaler.loss_scale < 2.0**20
