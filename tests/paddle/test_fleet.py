"""Paddle's distributed code finds the names that it needs in a scaler; all in one process.

The functions are Paddle's own; stand-ins replace the other processes and their launcher.
"""

import warnings
from collections import defaultdict
from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from paddle.amp.grad_scaler import _refresh_optimizer_state
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.hybrid_parallel_gradscaler import (
    HybridParallelGradScaler,
)
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_utils import GroupShardedScaler
from paddle.distributed.fleet.utils import mix_precision_utils

from gradscaler import AmaxScale
from gradscaler.paddle import GradScaler
from tests.support.eager import library

INF = float("inf")


@pytest.fixture(autouse=True)
def reduced(monkeypatch):
    """Replace all_reduce, as if no other process overflowed; return the operations of its calls."""
    operations = []
    monkeypatch.setattr(
        paddle.distributed, "all_reduce", lambda tensor, op, group: operations.append(op)
    )
    return operations


@pytest.fixture
def elsewhere(monkeypatch):
    """Replace all_reduce, as if another process overflowed."""
    monkeypatch.setattr(paddle.distributed, "all_reduce", lambda tensor, op, group: tensor.fill_(1))


class Way(NamedTuple):
    """How Paddle's code takes a scaler and an optimizer.

    Attributes:
        change: takes a scaler, and returns the object that a training calls in its place.
        wrap: takes an optimizer, and returns the object that a training steps in its place.
        backward: takes a scaler, parameters and their true gradients, and runs a backward pass.
    """

    change: Callable[[Any], Any]
    wrap: Callable[[Any], Any] = lambda optimizer: optimizer
    backward: Callable[..., Any] = library.backward


def by_fleet(monkeypatch):
    """fleet.distributed_scaler."""
    topology = SimpleNamespace(get_parallel_mode=lambda: "tensor parallel")
    sharding = SimpleNamespace(comm_overlap=False)
    strategy = SimpleNamespace(hybrid_configs={"sharding_configs": sharding})
    monkeypatch.setattr(fleet.fleet, "_hcg", topology, raising=False)
    monkeypatch.setattr(fleet.fleet, "_user_defined_strategy", strategy, raising=False)
    return Way(fleet.distributed_scaler)


class Sharded:
    """Wraps an optimizer, as GroupShardedOptimizerStage2 does."""

    offload = True

    def __init__(self, optimizer):
        self._optim = optimizer

    def __getattr__(self, name):
        return getattr(self._optim, name)

    def step(self):
        self._optim.step()


def by_group_sharding(monkeypatch):
    return Way(GroupShardedScaler, Sharded)


def by_mixed_precision(monkeypatch):
    """MixPrecisionScaler, which reads a parameter's ``main_grad``."""
    monkeypatch.setattr(fleet, "get_hybrid_communicate_group", lambda: None)

    def change(scaler):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Paddle says that this wrapper is an old one
            return mix_precision_utils.MixPrecisionScaler(scaler)

    def backward(scaler, parameters, gradients):
        scaled = library.backward(scaler, parameters, gradients)
        for parameter in parameters:
            parameter.main_grad = parameter.grad
            parameter._reset_grad_inplace_version(True)
        return scaled

    return Way(change, backward=backward)


@pytest.fixture(params=[by_fleet, by_group_sharding, by_mixed_precision])
def way(request, monkeypatch):
    return request.param(monkeypatch)


ways_that_ask_other_processes = pytest.mark.parametrize(
    "way", [by_fleet, by_group_sharding], indirect=True
)


@pytest.fixture
def start(parameters):
    """The parameters' first values."""
    return [parameter.numpy() for parameter in parameters]


def sgd(parameters, groups=False):
    """A step subtracts the true gradient."""
    given = [{"params": [each]} for each in parameters] if groups else parameters
    return paddle.optimizer.SGD(1.0, parameters=given)


def clear(parameters):
    for parameter in parameters:
        parameter.clear_gradient(False)


def bits(parameters):
    return library.exact([parameter.numpy() for parameter in parameters])


def minus(values, gradients):
    return [value - gradient for value, gradient in zip(values, gradients, strict=True)]


@pytest.mark.parametrize("groups", [False, True], ids=["plain", "groups"])
@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale_ and step"])
def test_a_finite_step_is_taken_with_gradients_divided_once(
    way, parameters, start, groups, unscale, finite
):
    plain = GradScaler(init_loss_scaling=1024.0)
    scaler, optimizer = way.change(plain), way.wrap(sgd(parameters, groups))
    way.backward(scaler, parameters, finite)
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert bits(parameters) == library.exact(minus(start, finite))
    assert plain.state_dict()["incr_count"] == 1
    outcome = plain.last_step(optimizer)
    assert (outcome.applied, outcome.scale) == (True, 1024.0)


def test_an_overflow_skips_and_backs_off(way, parameters, start, overflowed):
    scaler = way.change(GradScaler(init_loss_scaling=1024.0, decr_every_n_nan_or_inf=1))
    optimizer = way.wrap(sgd(parameters))
    way.backward(scaler, parameters, overflowed)
    scaler.step(optimizer)
    scaler.update()
    assert bits(parameters) == library.exact(start)
    assert scaler.state_dict()["scale"] == [512.0]
    assert scaler.last_step(optimizer).reason == "overflow"
    assert scaler._cache_found_inf is True


def test_minimize_skips_an_overflow_and_backs_off(way, parameters, start, overflowed):
    scaler = way.change(GradScaler(init_loss_scaling=1024.0, decr_every_n_nan_or_inf=1))
    optimizer = way.wrap(sgd(parameters))
    scaler.minimize(optimizer, way.backward(scaler, parameters, overflowed))
    assert bits(parameters) == library.exact(start)
    assert scaler.state_dict()["scale"] == [512.0]
    assert scaler.last_step(optimizer).reason == "overflow"
    assert scaler._cache_found_inf is True


def test_training_goes_on_after_an_overflow(way, parameters, start, finite, overflowed):
    scaler = way.change(GradScaler(init_loss_scaling=1024.0, decr_every_n_nan_or_inf=1))
    optimizer = way.wrap(sgd(parameters))
    reasons, flags = [], []
    for gradients in (overflowed, finite, finite):
        clear(parameters)
        way.backward(scaler, parameters, gradients)
        scaler.step(optimizer)
        scaler.update()
        reasons.append(scaler.last_step(optimizer).reason)
        flags.append(scaler._cache_found_inf)
    assert reasons == ["overflow", "finite", "finite"]
    assert flags == [True, False, False]
    assert bits(parameters) == library.exact(minus(minus(start, finite), finite))


@ways_that_ask_other_processes
def test_an_overflow_in_another_process_skips_the_step_here(
    way, elsewhere, parameters, start, finite
):
    scaler = way.change(GradScaler(init_loss_scaling=1024.0, decr_every_n_nan_or_inf=1))
    optimizer = way.wrap(sgd(parameters))
    way.backward(scaler, parameters, finite)
    scaler.step(optimizer)
    scaler.update()
    assert bits(parameters) == library.exact(start)
    assert scaler.state_dict()["scale"] == [512.0]


@ways_that_ask_other_processes
def test_processes_agree_once_a_step(way, reduced, parameters, finite):
    scaler = way.change(GradScaler(init_loss_scaling=1024.0))
    optimizer = way.wrap(sgd(parameters))
    way.backward(scaler, parameters, finite)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert reduced == [paddle.distributed.ReduceOp.MAX]


@pytest.mark.parametrize(
    ("before", "call"),
    [
        (["unscale_"], "unscale_"),
        (["step"], "unscale_"),
        (["step"], "step"),
        (["unscale_", "step"], "step"),
    ],
)
def test_calls_out_of_order_are_refused(way, before, call, parameters, finite):
    """Paddle's replacement of _unscale does not look at the stage by itself."""
    scaler = way.change(GradScaler(init_loss_scaling=1024.0))
    optimizer = way.wrap(sgd(parameters))
    way.backward(scaler, parameters, finite)
    for each in before:
        getattr(scaler, each)(optimizer)
    untouched = library.stepped(optimizer)
    with pytest.raises(RuntimeError, match="update"):
        getattr(scaler, call)(optimizer)
    assert library.stepped(optimizer) == untouched


def test_clipping_then_unscaling_divides_once(way, parameters, start, finite):
    scaler = way.change(GradScaler(init_loss_scaling=1024.0))
    optimizer = way.wrap(sgd(parameters))
    way.backward(scaler, parameters, finite)
    scaler.clip_grad_norm_(optimizer, INF)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert bits(parameters) == library.exact(minus(start, finite))


def test_clipping_by_the_norm_clips_what_the_optimizer_steps_by(way, parameters, start, finite):
    scaler = way.change(GradScaler(init_loss_scaling=1024.0))
    optimizer = way.wrap(sgd(parameters))
    way.backward(scaler, parameters, finite)
    norm = scaler.clip_grad_norm_(optimizer, 0.5).item()
    scaler.step(optimizer)
    flat = np.concatenate([gradient.ravel() for gradient in finite])
    assert norm == pytest.approx(np.linalg.norm(flat), rel=1e-5)
    moved = minus(start, [parameter.numpy() for parameter in parameters])
    flat = np.concatenate([movement.ravel() for movement in moved])
    assert np.linalg.norm(flat) == pytest.approx(0.5, rel=1e-4)


def test_disabled_gradients_are_left_as_they_are(way, parameters, start, finite):
    scaler = way.change(GradScaler(enable=False))
    optimizer = way.wrap(sgd(parameters))
    way.backward(scaler, parameters, finite)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert bits(parameters) == library.exact(minus(start, finite))


def test_a_fixed_scale_steps_every_iteration(way, parameters, start, finite):
    scaler = way.change(GradScaler(init_loss_scaling=1024.0, use_dynamic_loss_scaling=False))
    optimizer = way.wrap(sgd(parameters))
    for _ in range(2):
        clear(parameters)
        way.backward(scaler, parameters, finite)
        scaler.step(optimizer)
        scaler.update()
    assert bits(parameters) == library.exact(minus(minus(start, finite), finite))


def test_gradients_that_sharding_still_reduces_are_left_to_fleet_s_scaler(parameters, finite):
    class Overlapping(paddle.optimizer.SGD):
        _hcg = SimpleNamespace(get_parallel_mode=lambda: dist.ParallelMode.SHARDING_PARALLEL)
        comm_overlap = True

    scaler, optimizer = GradScaler(init_loss_scaling=8.0), Overlapping(1.0, parameters=parameters)
    library.backward(scaler, parameters, finite)
    before = library.exact([parameter.grad for parameter in parameters])
    for call in (scaler.unscale_, scaler.step, scaler.minimize):
        with pytest.raises(ValueError, match=r"scaler = fleet.distributed_scaler\(scaler\)"):
            call(optimizer)
    assert library.exact([parameter.grad for parameter in parameters]) == before


@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("groups", [False, True], ids=["plain", "groups"])
def test_a_policy_is_handed_the_largest_gradient(
    way, parameters, start, groups, interval, finite, overflowed
):
    rule = AmaxScale(init_scale=8.0, growth_interval=2, amax_interval=interval)
    scaler, optimizer = way.change(GradScaler(policy=rule)), way.wrap(sgd(parameters, groups))
    largest = np.float32(max(np.abs(gradient).max() for gradient in finite))
    state = rule.init()
    for gradients in (finite, finite, overflowed, finite):
        clear(parameters)
        way.backward(scaler, parameters, gradients)
        scaler.step(optimizer)
        scaler.update()
        state = rule.update(state, gradients is overflowed, amax=largest)
        assert scaler.observed.state == state
    assert state.peak > 0
    three_steps = minus(minus(minus(start, finite), finite), finite)
    assert bits(parameters) == library.exact(three_steps)


def test_gradients_that_fleet_has_not_unscaled_do_not_count(monkeypatch):
    """Sharding with comm_overlap leaves those of other processes as they are."""
    mine, other = (paddle.create_parameter([1], "float32") for _ in range(2))
    rule = AmaxScale(init_scale=8.0)
    scaler = by_fleet(monkeypatch).change(GradScaler(policy=rule))
    optimizer = paddle.optimizer.SGD(1.0, parameters=[mine, other])
    optimizer.comm_overlap, optimizer._sharding_enable = True, True
    optimizer._comm_buffers, optimizer._local_parameter_list = [], [mine]
    fleet.fleet._user_defined_strategy.hybrid_configs["sharding_configs"].comm_overlap = True
    scaler.scale((mine * 0.5 + other * 3.0).sum()).backward()
    scaler.unscale_(optimizer)
    assert (mine.grad.item(), other.grad.item()) == (0.5, 24.0)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.observed.state == rule.update(rule.init(), False, amax=np.float32(0.5))


# Records that come from outside.


@pytest.mark.parametrize("replaced", [False, True], ids=["its own _unscale", "replaced"])
def test_the_records_can_be_replaced_by_paddle_s_empty_ones(
    replaced, replace_unscale, scaler, parameters, start, finite
):
    if replaced:
        replace_unscale(scaler)
    optimizer = sgd(parameters)
    for _ in range(2):
        scaler._optimizer_states = defaultdict(_refresh_optimizer_state)
        clear(parameters)
        library.backward(scaler, parameters, finite)
        scaler.step(optimizer)
        scaler.update()
    assert bits(parameters) == library.exact(minus(minus(start, finite), finite))


def test_a_subclass_that_overrides_unscale_is_obeyed(parameters, start, finite):
    class Halving(GradScaler):
        def _unscale(self, optimizer):
            super()._unscale(optimizer)
            for parameter in optimizer._parameter_list:
                parameter.grad = parameter.grad * 0.5

    scaler = Halving(init_loss_scaling=1024.0)
    library.backward(scaler, parameters, finite)
    scaler.step(sgd(parameters))
    halves = [gradient * np.float32(0.5) for gradient in finite]
    assert bits(parameters) == library.exact(minus(start, halves))


def test_unscaling_through_the_private_name_counts_as_unscaled(scaler, parameters, start, finite):
    optimizer = sgd(parameters)
    library.backward(scaler, parameters, finite)
    scaler._unscale(optimizer)
    scaler.step(optimizer)
    assert bits(parameters) == library.exact(minus(start, finite))


def test_an_optimizer_that_finds_an_inf_itself_is_reported_as_skipping(scaler, parameters, finite):
    """A sharded optimizer may, in a shard that only it has seen."""

    class Finding(paddle.optimizer.SGD):
        def step(self):
            self._set_auxiliary_var("found_inf", True)

    optimizer = Finding(1.0, parameters=parameters)
    library.backward(scaler, parameters, finite)
    scaler.step(optimizer)
    assert scaler._cache_found_inf is True
    assert scaler.last_step(optimizer).reason == "overflow"
    scaler.update()
    assert scaler.state_dict()["decr_count"] == 1


class Plain:
    """An optimizer without _set_auxiliary_var, as some wrappers are."""

    def __init__(self, optimizer):
        self._inner, self._parameter_list = optimizer, optimizer._parameter_list

    def step(self):
        self._inner.step()

    def minimize(self, loss):
        return self._inner.minimize(loss)


@pytest.mark.parametrize("minimize", [False, True], ids=["step", "minimize"])
@pytest.mark.parametrize("gradients", ["finite", "overflowed"])
def test_an_optimizer_without_the_auxiliary_flag_goes_as_with_paddle(
    minimize, gradients, native, request
):
    gradients = request.getfixturevalue(gradients)
    finals = []
    for kind in (GradScaler, native):
        scaler, parameters = kind(init_loss_scaling=8.0), library.parameters()
        optimizer = Plain(paddle.optimizer.SGD(1.0, parameters=parameters))
        scaled = library.backward(scaler, parameters, gradients)
        if minimize:
            operators, _ = scaler.minimize(optimizer, scaled)
        else:
            operators = scaler.step(optimizer)
            scaler.update()
        finals.append((operators, library.exact(parameters), bool(scaler._cache_found_inf)))
    assert finals[0] == finals[1]


# Wrappers around a scaler.


@pytest.mark.parametrize("mode", ["tensor parallel", 0], ids=["tensor parallel", "data parallel"])
def test_the_hybrid_parallel_wrapper_goes_as_around_paddle_s_own(mode, native, finite, overflowed):
    def states(scaler):
        wrapper = HybridParallelGradScaler(scaler, SimpleNamespace(get_parallel_mode=lambda: mode))
        parameters = library.parameters()
        optimizer = paddle.optimizer.SGD(1.0, parameters=parameters)
        for gradients in (overflowed, finite, overflowed, finite):
            optimizer.clear_grad()
            wrapper.minimize(optimizer, library.backward(wrapper, parameters, gradients))
            flags = scaler._found_inf, scaler._temp_found_inf_value_false
            state = parameters, wrapper.state_dict(), bool(wrapper._cache_found_inf), flags
            yield library.exact(state)

    arguments = True, 1024.0, 2.0, 0.5, 3, 1
    assert list(states(GradScaler(*arguments))) == list(states(native(*arguments)))


def test_group_sharding_takes_it_for_a_scaler():
    """paddle.distributed.sharding.group_sharded_parallel checks this before it wraps a scaler."""
    assert isinstance(GradScaler(), paddle.amp.GradScaler)
    scaler = GradScaler()
    assert GroupShardedScaler(scaler) is scaler
    assert isinstance(scaler._unscale, MethodType)
    assert "unscale_method" in scaler._unscale.__qualname__


# Semi-automatic parallelism, where shard_scaler works on a mesh of one process as it is.


@pytest.fixture
def mesh():
    return dist.ProcessMesh([0], dim_names=["x"])


@pytest.fixture
def sharded(mesh):
    """A layer on the mesh, its optimizer, and its loss, which a factor of Inf makes overflow."""
    layer = paddle.nn.Linear(3, 2)
    dist.shard_layer(layer, mesh)
    optimizer = dist.shard_optimizer(paddle.optimizer.SGD(1.0, parameters=layer.parameters()))
    inputs = dist.shard_tensor(paddle.ones([4, 3]), mesh, [dist.Replicate()])
    return layer, optimizer, lambda factor=1.0: layer(inputs).sum() * factor


def test_a_sharded_scaler_steps_skips_and_backs_off(sharded):
    layer, optimizer, loss = sharded
    scaler = dist.shard_scaler(GradScaler(init_loss_scaling=1024.0, decr_every_n_nan_or_inf=1))
    steps = []
    for factor in (1.0, INF, 1.0):
        before = layer.bias.numpy()
        scaler.scale(loss(factor)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.clear_grad()
        steps.append((scaler.last_step(optimizer).reason, (before - layer.bias.numpy()).tolist()))
    assert steps == [("finite", [4, 4]), ("overflow", [0, 0]), ("finite", [4, 4])]
    assert scaler.state_dict()["scale"] == [512.0]


def test_a_sharded_scaler_refuses_to_unscale_twice(sharded):
    _, optimizer, loss = sharded
    scaler = dist.shard_scaler(GradScaler())
    scaler.scale(loss()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="update"):
        scaler.unscale_(optimizer)


def test_a_loss_on_a_mesh_leaves_other_scalers_off_it(sharded, parameters, finite):
    """Paddle puts the tensor that a distributed one is multiplied by on its mesh, in place."""
    _, _, loss = sharded
    GradScaler(init_loss_scaling=2.0**13).scale(loss())
    bystander = GradScaler(init_loss_scaling=2.0**13)
    assert not bystander._scale.is_dist()
    optimizer = paddle.optimizer.SGD(1.0, parameters=parameters)
    library.backward(bystander, parameters, finite)
    bystander.step(optimizer)
    assert bystander.last_step(optimizer).applied
