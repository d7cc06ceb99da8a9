"""One decision on four devices, however weights and batches lie on them."""

import functools
import os
import socket
import subprocess
import sys
from pathlib import Path
from time import monotonic

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gradscaler import DynamicScale
from gradscaler.errors import ParameterError, ScaleMismatchError
from gradscaler.jax import (
    DynamicLossScale,
    GradScaler,
    all_finite,
    check_same,
    loss_scaled,
    select_tree,
)
from gradscaler.jax import DynamicScale as FlaxScale
from tests.support import xla

POLICY = DynamicScale(init_scale=8.0, growth_interval=2)
RATE = 0.125
STEPS, BAD_STEP = 5, 2
TIME_LIMIT = 300.0  # seconds, for two processes on a busy machine

# All values are small multiples of powers of two: sums are exact in any order.
WEIGHT = np.array([1.0, -2.0, 3.0, 5.0], np.float32)
BATCHES = np.random.RandomState(0).randint(1, 4, (STEPS, 4, 4)).astype(np.float32)


def loss(weight, batch):
    """Each weight has its own column, so an Inf reaches the gradient of one weight alone."""
    return (batch * weight**2).sum(axis=1).mean()


def stepped(result, weight):
    new = weight - RATE * result.grads
    return result.scaler, select_tree(result.grads_finite, new, weight)


def on_one_device(scaler, weight, batch):
    return stepped(scaler.value_and_grad(loss)(weight, batch), weight)


# Each way is a step, and where the scaler, the weight and the batch lie: on a mesh, by their specs.


def mesh(**axes):
    return Mesh(np.array(jax.devices()[:4]).reshape(*axes.values()), tuple(axes))


def by_jit(weight_spec):
    return on_one_device, mesh(dp=4), (P(), weight_spec, P("dp"))


def sharded(step, mesh, *specs, check_vma=True):
    step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs[:2], check_vma=check_vma)
    return step, mesh, specs


def data_parallel(check_vma):
    def step(scaler, weight, batch):
        return stepped(scaler.value_and_grad(loss, axis_name="dp")(weight, batch), weight)

    return sharded(step, mesh(dp=4), P(), P(), P("dp"), check_vma=check_vma)


def gathered_loss(weight, batch, check_vma=True):
    own = loss(lax.all_gather(weight, "dp", tiled=True), batch)
    return lax.pmean(own, "dp") if check_vma else own / 4


def fsdp(check_vma):
    def step(scaler, weight, batch):
        differentiated = scaler.value_and_grad(gathered_loss, finite_axis="dp")
        return stepped(differentiated(weight, batch, check_vma=check_vma), weight)

    return sharded(step, mesh(dp=4), P(), P("dp"), P("dp"), check_vma=check_vma)


def fsdp_by_optax():
    optimizer = loss_scaled(optax.sgd(RATE), POLICY, finite_axis="dp")

    def step(scaler, weight, batch):
        state = optimizer.init(weight)._replace(scaler=scaler)
        grads = jax.grad(lambda weight: scaler.scale(gathered_loss(weight, batch)))(weight)
        updates, state = optimizer.update(grads, state, weight)
        return state.scaler, optax.apply_updates(weight, updates)

    return sharded(step, mesh(dp=4), P(), P("dp"), P("dp"))


def data_and_tensor_parallel(check_vma):
    def step(scaler, weight, batch):
        differentiated = scaler.value_and_grad(loss, axis_name="dp", finite_axis="tp")
        return stepped(differentiated(weight, batch), weight)

    specs = P(), P("tp"), P("dp", "tp")
    return sharded(step, mesh(dp=2, tp=2), *specs, check_vma=check_vma)


WAYS = {
    "jit": lambda: by_jit(P()),
    "jit, FSDP": lambda: by_jit(P("dp")),
    "shard_map": lambda: data_parallel(True),
    "shard_map, unchecked": lambda: data_parallel(False),
    "shard_map, FSDP": lambda: fsdp(True),
    "shard_map, FSDP, unchecked": lambda: fsdp(False),
    "shard_map, FSDP, optax": fsdp_by_optax,
    "shard_map, dp x tp": lambda: data_and_tensor_parallel(True),
    "shard_map, dp x tp, unchecked": lambda: data_and_tensor_parallel(False),
}


def batches_with_inf(row, column):
    batches = BATCHES.copy()
    batches[BAD_STEP, row, column] = np.inf
    return batches


def cases():
    """An Inf on each device's batch in turn, in a weight that another device may hold."""
    for row in range(4):
        yield batches_with_inf(row, (row + 1) % 4)
    yield BATCHES


def states(step, scaler, weight, batches):
    for batch in batches:
        scaler, weight = step(scaler, weight, batch)
        yield scaler, weight


@functools.cache
def states_on_one_device():
    step = jax.jit(on_one_device)
    return [list(states(step, GradScaler(POLICY), WEIGHT, batches)) for batches in cases()]


def assert_every_device_agrees(states, expected):
    for state, one in zip(states, expected, strict=True):
        for leaf, whole in zip(jax.tree.leaves(state), jax.tree.leaves(one), strict=True):
            for shard in leaf.addressable_shards:
                np.testing.assert_array_equal(shard.data, np.asarray(whole)[shard.index])
    check_same(state[0])


def assert_it_is_as_on_one_device(way):
    step, mesh, specs = WAYS[way]()
    step, places = jax.jit(step), [NamedSharding(mesh, spec) for spec in specs]
    for batches, expected in zip(cases(), states_on_one_device(), strict=True):
        scaler, weight = map(jax.device_put, (GradScaler(POLICY), WEIGHT), places[:2])
        placed = (jax.device_put(batch, places[2]) for batch in batches)
        assert_every_device_agrees(states(step, scaler, weight, placed), expected)


def test_one_device_skips_and_backs_off_once():
    for run in states_on_one_device()[:-1]:
        assert [float(scaler.loss_scale) for scaler, _ in run] == [8, 16, 8, 8, 16]
        assert (run[BAD_STEP][1] == run[BAD_STEP - 1][1]).all()
    assert states_on_one_device()[-1][-1][0].loss_scale == 32


@pytest.mark.parametrize("way", WAYS)
def test_devices_decide_as_one_device_does(way):
    assert_it_is_as_on_one_device(way)


def test_pmap_decides_as_one_device_does():
    def step(scaler, weight, batch):
        return stepped(scaler.value_and_grad(loss, axis_name="dp")(weight, batch), weight)

    def four(tree):
        return jax.tree.map(lambda leaf: np.stack([leaf] * 4), tree)

    step = jax.pmap(step, axis_name="dp", devices=jax.devices()[:4])
    for batches, expected in zip(cases(), states_on_one_device(), strict=True):
        ours = states(step, four(GradScaler(POLICY)), four(WEIGHT), batches[:, :, None])
        assert_every_device_agrees(ours, four(expected))


# Wrong axes.


def refusal(axes, specs, gradients_of):
    """The message for ``gradients_of(scaler, weights, batch)`` inside ``shard_map``."""
    step = jax.shard_map(gradients_of, mesh=mesh(**axes), in_specs=specs, out_specs=P())
    with pytest.raises(ParameterError) as raised:
        jax.eval_shape(step, GradScaler(POLICY), {"w": WEIGHT}, BATCHES[0])
    return str(raised.value)


def loss_of_dict(weights, batch):
    return loss(weights["w"], batch)


@pytest.mark.parametrize("spelling", [GradScaler, FlaxScale], ids=["ours", "flax"])
def test_weights_sharded_over_axis_name_are_refused(spelling):
    def step(_, weights, batch):
        return spelling().value_and_grad(loss_of_dict, axis_name="dp")(weights, batch)

    message = refusal({"dp": 4}, (P(), P("dp"), P(None, "dp")), step)
    assert message.startswith("leaf ['w'] varies over 'dp': each device holds another part of it")
    assert "return jax.lax.pmean(loss, 'dp')" in message
    assert "finite_axis='dp' instead" in message


def test_all_axes_that_shard_a_weight_are_named():
    def step(scaler, weights, batch):
        return scaler.value_and_grad(loss_of_dict, axis_name=["tp", "dp"])(weights, batch)

    both = ("dp", "tp")
    message = refusal({"dp": 2, "tp": 2}, (P(), P(both), P(None, both)), step)
    assert "finite_axis=('dp', 'tp') instead" in message


def test_a_decision_that_would_differ_between_devices_is_refused():
    def without_finite_axis(scaler, weights, batch):
        return scaler.value_and_grad(loss_of_dict, axis_name="dp")(weights, batch)

    def by_optax(scaler, weights, batch):
        optimizer = loss_scaled(optax.sgd(RATE), POLICY, axis_name="dp")
        return optimizer.update(weights, optimizer.init(weights))

    for step in (without_finite_axis, by_optax):
        message = refusal({"dp": 2, "tp": 2}, (P(), P("tp"), P("dp", "tp")), step)
        assert message.startswith("grads_finite varies over 'tp' and the loss scale does not")
        assert "pass finite_axis='tp' to value_and_grad, all_finite or loss_scaled" in message


@pytest.mark.parametrize("has_aux", [False, True])
def test_a_loss_that_fun_has_averaged_is_not_averaged_again(has_aux):
    def averaged(weights, batch):
        own = loss_of_dict(weights, batch)
        return (lax.pmean(own, "dp"), own) if has_aux else lax.pmean(own, "dp")

    def step(scaler, weights, batch):
        return scaler.value_and_grad(averaged, has_aux=has_aux, axis_name="dp")(weights, batch)

    message = refusal({"dp": 4}, (P(), P(), P("dp")), step)
    assert message.startswith("the loss does not vary over 'dp': fun has averaged it")


def test_each_device_may_keep_a_scale_of_its_own():
    def step(state, weight, batch):
        scaler = GradScaler(POLICY, jax.tree.map(lambda leaf: leaf[0], state))
        return scaler.value_and_grad(loss)(weight[0], batch).scaler.loss_scale[None]

    one = P("dp")
    step = jax.shard_map(step, mesh=mesh(dp=4), in_specs=(one, one, one), out_specs=one)
    state, weights = (
        jax.tree.map(lambda leaf: np.stack([leaf] * 4), tree)
        for tree in (GradScaler(POLICY).state, WEIGHT)
    )
    assert step(state, weights, batches_with_inf(1, 2)[BAD_STEP]).tolist() == [8, 4, 8, 8]


@pytest.mark.parametrize(
    ("axis_name", "finite_axis"),
    [("a", "b"), (["a", "b"], None), (None, ("a", "b")), ("a", ["b", "a"])],
)
def test_all_finite_reduces_over_both_kinds_of_axes(axis_name, finite_axis):
    def finite(value):
        return all_finite(value, axis_name, finite_axis=finite_axis)

    for axis in ("c", "b", "a"):
        finite = jax.vmap(finite, axis_name=axis)
    values = jnp.zeros((2, 3, 2)).at[0, 1, 1].set(jnp.inf)
    assert finite(values)[:, :, 0].all()
    assert not finite(values)[:, :, 1].any()


# Devices that hold different scales.


def test_devices_of_one_process_that_differ_are_noticed():
    def step(scaler, weight, batch):
        return stepped(scaler.value_and_grad(loss, axis_name="dp")(weight, batch), weight)

    specs = P(), P("tp"), P("dp", "tp")
    step, *_ = sharded(step, mesh(dp=2, tp=2), *specs, check_vma=False)
    scaler, _ = step(GradScaler(POLICY), WEIGHT, batches_with_inf(0, 3)[BAD_STEP])
    with pytest.raises(ScaleMismatchError, match=r": state.scale is 4.0 on one and 8.0 on another"):
        check_same(scaler)


@pytest.mark.parametrize("spelling", [GradScaler, FlaxScale, lambda: DynamicLossScale(8.0)])
def test_any_scaler_on_one_device_is_the_same_everywhere(spelling):
    check_same(spelling())


def one_scaler_for_each(scales):
    return jax.vmap(lambda scale: GradScaler(state=POLICY.init()._replace(scale=scale)))(scales)


@pytest.mark.parametrize(
    "make",
    [
        lambda: one_scaler_for_each(jnp.array([4.0, 8.0])),
        lambda: {"key": jax.random.key(0), "empty": jnp.zeros((0, 2)), "step": 3},
    ],
    ids=["vmap", "other leaves"],
)
def test_leaves_are_compared_element_by_element(make):
    check_same(make())


def test_the_element_that_differs_is_named():
    rows = [[4.0, 8.0], [4.0, 2.0]]
    devices = jax.devices()[:2]
    arrays = [jax.device_put(jnp.array(r), d) for r, d in zip(rows, devices, strict=True)]
    both = NamedSharding(Mesh(np.array(devices), "dp"), P())
    leaf = jax.make_array_from_single_device_arrays((2,), both, arrays)
    with pytest.raises(ScaleMismatchError, match=r"\['scale'\] is 2.0 on one and 8.0 on another"):
        check_same({"scale": leaf})


# Two processes of two devices each.


def run_as_process(rank, port):
    """The program of each of the two processes; an assertion that fails ends it."""
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=rank)
    assert [device.process_index for device in jax.devices()] == [0, 0, 1, 1]
    for way in ("jit, FSDP", "shard_map", "shard_map, FSDP", "shard_map, dp x tp"):
        assert_it_is_as_on_one_device(way)
    of_one_process = GradScaler(DynamicScale(init_scale=[4.0, 16.0][rank]))
    replicated = NamedSharding(mesh(dp=4), P())
    on_the_mesh = jax.tree.map(
        lambda leaf: jax.make_array_from_process_local_data(replicated, np.asarray(leaf)),
        of_one_process,
    )
    check_same(one_scaler_for_each(jnp.array([4.0, 8.0])))
    for scaler in (of_one_process, on_the_mesh):
        with pytest.raises(ScaleMismatchError, match=r"state.scale is 4.0 on one and 16.0 on"):
            check_same(scaler)


def test_two_processes_decide_as_one_device_does_and_notice_that_their_scales_differ():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = "import sys; sys.path.insert(0, {!r}); import {} as here; here.run_as_process({}, {})"
    path = Path(__file__)
    environment = {**os.environ, "XLA_FLAGS": xla.flags(devices=2)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code.format(str(path.parent), path.stem, rank, port)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    end = monotonic() + TIME_LIMIT
    try:
        for process in processes:
            printed, _ = process.communicate(timeout=max(0.0, end - monotonic()))
            assert process.returncode == 0, printed
    finally:
        for process in processes:
            process.kill()
            process.communicate()
