"""Variables of flax's fp8 layers whose gradients are new values: scales, histories of maxima."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.linen import fp8_ops
from flax.training.dynamic_scale import DynamicScale as NativeScale
from flax.training.train_state import TrainState
from jax.sharding import Mesh, PartitionSpec

from gradscaler import DynamicScale, FixedScale
from gradscaler.diagnose import exponents
from gradscaler.jax import DynamicScale as FlaxScale
from gradscaler.jax import GradScaler, all_finite, loss_scaled, select_tree

NAME = fp8_ops.OVERWRITE_WITH_GRADIENT
INPUTS = jnp.linspace(-1, 1, 16).reshape(2, 8)


class Layer(nn.Module):
    """A dense layer in fp8."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp)(x)


def loss(variables, inputs=INPUTS):
    return (Layer().apply(variables, inputs) ** 2).mean()


@pytest.fixture
def variables():
    return Layer().init(jax.random.key(0), INPUTS)


def histories(tree):
    """The maxima that the layer has seen of its inputs, its weights and its outputs' gradients."""
    fp8 = tree[NAME]["Dense_0"]["Fp8DirectDotGeneralOp_0"]
    return [float(fp8[f"{name}_amax_history"].max()) for name in ("input", "kernel", "output_grad")]


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_they_are_the_new_values_and_the_others_are_unscaled(variables, jit, exact):
    def step(scaler):
        return scaler.value_and_grad(loss)(variables)

    plain = jax.grad(loss)(variables)
    result = (jax.jit(step) if jit else step)(GradScaler(FixedScale(1024.0)))
    assert exact(result.grads["params"]) == exact(plain["params"])
    seen, of_plain = histories(result.grads), histories(plain)
    assert seen[:2] == of_plain[:2]
    assert seen[2] == 1024 * of_plain[2]  # the backward pass quantizes scaled gradients
    assert result.grads_finite


def test_flax_s_dynamic_scale_hands_them_on_and_flax_s_own_divides_them(variables):
    seen, mine, theirs = (
        histories(grads)[:2]
        for grads in (
            jax.grad(loss)(variables),
            FlaxScale(scale=1024.0).value_and_grad(loss)(variables).grad,
            NativeScale(scale=1024.0).value_and_grad(loss)(variables).grad,
        )
    )
    assert mine == seen
    assert theirs == [amax / 1024 for amax in seen]


def test_no_scale_divides_them_and_no_inf_in_them_is_an_overflow():
    scaler = GradScaler(FixedScale(8.0))
    tree = {"params": jnp.float32(8), NAME: {"amax": jnp.array([8.0, jnp.inf])}}
    assert scaler.unscale(tree)["params"] == 1
    assert scaler.scale(tree)["params"] == 64
    for changed in (scaler.unscale(tree), scaler.scale(tree)):
        assert changed[NAME]["amax"].tolist() == [8.0, jnp.inf]
    assert all_finite(tree)
    assert not all_finite({**tree, "params": jnp.inf})


def test_diagnose_does_not_count_them_as_gradients():
    marked = nnx.variablelib.variable_type_from_name(NAME, allow_register=True)
    state = nnx.State({"amax": marked(jnp.ones(3)), "w": nnx.Param(jnp.ones(1))})
    assert list(exponents({"w": jnp.ones(1), NAME: {"amax": jnp.ones(3)}}).parameters) == ["w"]
    assert list(exponents(state).parameters) == ["w"]


def test_nnx_marks_them_by_the_type_of_a_variable(exact):
    marked = nnx.variablelib.variable_type_from_name(NAME, allow_register=True)
    state = nnx.State({"amax": marked(jnp.array([8.0, jnp.inf])), "w": nnx.Param(jnp.ones(1))})
    unscaled = GradScaler(FixedScale(8.0)).unscale(state)
    assert exact(unscaled["amax"]) == exact(state["amax"])
    assert unscaled["w"][...] == 0.125
    assert all_finite(state)
    assert not all_finite(nnx.State({"w": nnx.Param(jnp.array(jnp.inf))}))


def test_a_model_of_linen_in_nnx_hands_them_on(exact):
    marked = nnx.variablelib.variable_type_from_name(NAME, allow_register=True)
    weights = nnx.DiffState(0, nnx.Any(nnx.Param, marked))

    def differentiate(value_and_grad):
        model = nnx.bridge.ToNNX(Layer(), rngs=nnx.Rngs(0)).lazy_init(INPUTS)
        return value_and_grad(lambda model: (model(INPUTS) ** 2).mean(), argnums=weights)(model)

    _, plain = differentiate(nnx.value_and_grad)
    scaler = GradScaler(FixedScale(1024.0))
    grads = differentiate(functools.partial(scaler.value_and_grad, transform=nnx.value_and_grad))[3]
    fp8, of_plain = (tree["Dense_0"].pop("Fp8DirectDotGeneralOp_0") for tree in (grads, plain))
    assert exact(grads) == exact(plain)
    assert fp8["input_amax_history"][...].max() == 1
    name = "output_grad_amax_history"
    assert fp8[name][...].max() == 1024 * of_plain[name][...].max()


@pytest.mark.parametrize("check_vma", [True, False])
def test_devices_keep_the_largest_and_average_the_gradients(variables, check_vma):
    mesh = Mesh(jax.devices()[:2], ("batch",))
    everywhere, split = PartitionSpec(), PartitionSpec("batch")

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(everywhere, everywhere, split),
        out_specs=everywhere,
        check_vma=check_vma,
    )
    def step(scaler, weights, amax):
        def loss(weights, amax):
            """The gradient of the marked variable is this device's maximum."""
            overwrite = weights[NAME] * jax.lax.stop_gradient(amax / scaler.loss_scale)
            return (weights["params"] * amax + overwrite).sum()

        return scaler.value_and_grad(loss, axis_name="batch")(weights, amax).grads

    weights = {"params": jnp.ones(1), NAME: jnp.zeros(1)}
    grads = step(GradScaler(FixedScale(8.0)), weights, jnp.array([2.0, 6.0]))
    assert (grads["params"].item(), grads[NAME].item()) == (4.0, 6.0)


def test_a_training_keeps_its_scales_and_skips_them_with_the_rest(variables, exact):
    optimizer = loss_scaled(
        optax.sgd(0.1), DynamicScale(init_scale=2.0**127, backoff_factor=2**-60)
    )
    state = TrainState.create(apply_fn=None, params=variables, tx=optimizer)

    @jax.jit
    def step(state):
        scaled = lambda variables: state.opt_state.scaler.scale(1e3 * loss(variables))  # noqa: E731
        new = state.apply_gradients(grads=jax.grad(scaled)(state.params))
        return select_tree(new.opt_state.grads_finite, new.params, state.params), new

    kept, new = step(state)
    assert not new.opt_state.grads_finite
    assert exact(kept) == exact(variables)
    kept, new = step(new.replace(params=kept))
    assert new.opt_state.grads_finite
    assert histories(kept)[0] == 1.0
