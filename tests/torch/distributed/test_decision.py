"""One all-reduce decides for all processes: the flag, whether there are gradients, the scale."""

import copy
from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import sharded_grad_scaler
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from gradscaler import ScaleMismatchError
from gradscaler._on_torch import processes
from gradscaler.torch import GradScaler, ShardedGradScaler, install
from gradscaler.torch._install import raise_as_theirs, replace_sharded
from tests.support.all_reduces import CountedAllReduces

INF = float("inf")


def scaler_of(name, **kwargs):
    if name == "ShardedGradScaler":
        return ShardedGradScaler("cpu", init_scale=1024.0, **kwargs)
    return GradScaler(init_scale=1024.0, group=dist.group.WORLD, **kwargs)


def own_parameter(name, fused, clip, unscale, bad):
    """A parameter of each rank alone; the gradient of rank ``bad`` overflows."""
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=fused)
    scaler = scaler_of(name, growth_interval=2)
    results = []
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale((parameter * (dist.get_rank() + 1)).sum()).backward()
        if step == 1 and dist.get_rank() == bad:
            parameter.grad[-1] = INF
        with CountedAllReduces() as counted:
            if unscale:
                scaler.unscale_(optimizer)
            if clip:
                scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
        outcome = scaler.last_step(optimizer)
        results.append((outcome.reason, outcome.scale, scaler.state_dict(), counted.count))
    return results, bool(torch.equal(parameter, torch.ones(4)))


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["GradScaler", "ShardedGradScaler"])
def test_all_skip_what_one_finds(ranks, name, fused, clip, unscale, bad):
    (first, _), (second, _) = ranks(2).run(own_parameter, name, fused, clip, unscale, bad)
    assert first == second
    assert [reason for reason, *_ in first] == ["finite", "overflow", "finite", "finite"]
    assert [count for *_, count in first] == [1, 1, 1, 1]
    assert [state["scale"] for _, _, state, _ in first] == [1024.0, 512.0, 512.0, 1024.0]


def searches():
    """How often three steps compare the ranks of meshes with those of process groups."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parameter = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh))
    optimizer, scaler = torch.optim.SGD([parameter], lr=0.1), GradScaler()
    with pytest.MonkeyPatch.context() as patch:
        connected, calls = processes._connected, []
        patch.setattr(processes, "_connected", lambda ms: calls.append(ms) or connected(ms))
        for _ in range(3):
            scaler.scale(parameter.full_tensor().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    return len(calls)


def test_the_group_of_a_mesh_is_searched_only_once(ranks):
    assert all(count <= 1 for count in ranks(2).run(searches))


def without_gradients(has, fused):
    """Only the ranks in ``has`` have gradients."""
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([parameter], fused=fused)
    scaler = scaler_of("GradScaler", growth_interval=2)
    reasons = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = scaler.scale(parameter.sum())
        if dist.get_rank() in has:
            loss.backward()
        scaler.step(optimizer)
        scaler.update()
        reasons.append(scaler.last_step(optimizer).reason)
    return reasons, scaler.state_dict()


@pytest.mark.parametrize("fused", [False, True])
def test_one_process_with_gradients_makes_it_a_step_of_all(ranks, fused):
    first, second = ranks(2).run(without_gradients, [1], fused)
    assert first == second
    assert first[0] == ["finite"] * 6
    assert first[1]["scale"] == 8192.0


@pytest.mark.parametrize("fused", [False, True])
def test_without_gradients_anywhere_it_is_not_a_step(ranks, fused):
    first, second = ranks(2).run(without_gradients, [], fused)
    assert first == second
    assert first[0] == ["no_gradients"] * 6
    assert first[1]["scale"] == 1024.0


def different(what):
    scaler = scaler_of("GradScaler")
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    if dist.get_rank() == 1:
        scaler.load_state_dict({**scaler.state_dict(), **what})
    scaler.scale(parameter.sum()).backward()
    with pytest.raises(ScaleMismatchError) as raised:
        scaler.step(optimizer)
    assert torch.equal(parameter, torch.ones(4))
    scaler.load_state_dict({**scaler.state_dict(), "scale": 64.0, "_growth_tracker": 0})
    optimizer.zero_grad()
    scaler.update()
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return str(raised.value), parameter.tolist()


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ({"scale": 64.0}, ["scale", "64", "1024"]),
        ({"_growth_tracker": 7}, ["finite_steps", "0", "7"]),
    ],
)
def test_processes_with_different_scales_all_raise_and_can_go_on(ranks, what, named):
    first, second = ranks(2).run(different, what)
    assert first == second
    assert all(word in first[0] for word in named)
    assert first[1] == [pytest.approx(0.9)] * 4


def different_on_a_device():
    """The error of each call of step() or update(), where nothing waits for the host."""

    class Operations(type(GradScaler._operations)):
        def on_host(self, tensor):
            return False

    class OnDevice(GradScaler):
        _operations = Operations()

    scaler = OnDevice(init_scale=1024.0, group=dist.group.WORLD)
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    errors = []
    for step in range(4):
        if step == 2 or (step == 0 and dist.get_rank() == 1):
            scaler.load_state_dict({**scaler.state_dict(), "scale": 64.0, "_growth_tracker": 0})
        optimizer.zero_grad()
        scaler.scale(parameter.sum()).backward()
        try:
            scaler.step(optimizer)
            errors.append(None)
        except ScaleMismatchError as error:
            errors.append(str(error))
            optimizer.zero_grad()
        scaler.update()
    return errors, scaler.state_dict(), parameter.tolist()


def test_processes_on_devices_raise_one_step_later_and_can_go_on(ranks):
    first, second = ranks(2).run(different_on_a_device)
    assert first == second
    errors, state, values = first
    assert [error is None for error in errors] == [True, False, True, True]
    assert all(word in errors[1] for word in ("scale", "64", "1024"))
    assert (state["scale"], state["_growth_tracker"]) == (64.0, 2)
    assert values == [pytest.approx(0.7)] * 4


def order_of_two(orders, sizes, on_device, kind):
    """Step two optimizers in this rank's order of each iteration; return the error of each."""

    class Operations(type(GradScaler._operations)):
        def on_host(self, tensor):
            return not on_device and super().on_host(tensor)

    class Scaler(GradScaler):
        _operations = Operations()

    scaler = Scaler(init_scale=1024.0, group=dist.group.WORLD)
    parameters = [torch.nn.Parameter(torch.ones(size)) for size in sizes[dist.get_rank()]]
    if kind == "DTensors":
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        parameters = [torch.nn.Parameter(distribute_tensor(p, mesh)) for p in parameters]
    second = torch.optim.Adam if kind == "classes" else torch.optim.SGD
    optimizers = [torch.optim.SGD(parameters[:1], lr=0.1), second(parameters[1:], lr=0.1)]
    errors, counts = [], []
    for order in orders[dist.get_rank()]:
        scaler.scale(sum(parameter.sum() for parameter in parameters)).backward()
        with CountedAllReduces() as counted:
            try:
                for i in order:
                    scaler.step(optimizers[i])
                errors.append(None)
            except ScaleMismatchError as error:
                errors.append(str(error))
        counts.append(counted.count)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return errors, counts


SAME_SIZES = [[3, 4], [3, 4]]


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize(
    ("kind", "same_at_first"), [("alike", 1), ("DTensors", 0), ("DTensors", 1), ("classes", 0)]
)
def test_optimizers_stepped_in_different_orders_raise_on_all(ranks, kind, same_at_first, on_device):
    orders = [[(0, 1)] * 3, [(0, 1)] * same_at_first + [(1, 0)] * (3 - same_at_first)]
    (first, _), (second, _) = ranks(2).run(order_of_two, orders, SAME_SIZES, on_device, kind)
    assert first == second
    assert first[:same_at_first] == [None] * same_at_first
    assert "different optimizers" in first[same_at_first]


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("sizes", [SAME_SIZES, [[3, 4], [5, 6]]], ids=["alike", "stages"])
def test_one_order_of_optimizers_is_no_mismatch(ranks, sizes, on_device):
    orders = [[(0, 1), (0, 1), (1,), (1, 0)]] * 2
    (first, counts), (second, _) = ranks(2).run(order_of_two, orders, sizes, on_device, "alike")
    assert first == second == [None] * 4
    assert counts == [2, 2, 1, 2]


def distributed_data_parallel():
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler()
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    with CountedAllReduces() as counted:
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
    return counted.count


def test_data_parallel_training_needs_no_all_reduce(ranks):
    assert ranks(2).run(distributed_data_parallel) == [0, 0]


def stranded():
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = scaler_of("GradScaler")
    scaler.scale(parameter.sum()).backward()
    if dist.get_rank() == 0:
        parameter.grad[0] = INF
    with pytest.raises(RuntimeError, match=r"not|inf"):
        scaler.clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True)
    return True


def test_a_norm_that_is_not_finite_on_one_process_raises_on_all(ranks):
    assert ranks(2).run(stranded) == [True, True]


def beside_torchs(unscale, bad):
    """Four steps of a scaler of PyTorch's on rank 1, and of what stands in for it on rank 0."""
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    with ExitStack() as watched:
        if dist.get_rank() == 0:
            replace_sharded()
            watched.enter_context(install())
            watched.enter_context(raise_as_theirs())
        made = sharded_grad_scaler.ShardedGradScaler("cpu", init_scale=1024.0, growth_interval=2)
    results = [isinstance(made, ShardedGradScaler)]
    for step in range(4):
        optimizer.zero_grad()
        made.scale((parameter * (dist.get_rank() + 1)).sum()).backward()
        if step == 1 and dist.get_rank() == bad:
            parameter.grad[-1] = INF
        if unscale:
            made.unscale_(optimizer)
        made.step(optimizer)
        made.update()
        results += [made.get_scale()]
    return results, parameter.tolist()


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("unscale", [False, True])
def test_a_rank_that_is_watched_decides_with_one_that_has_torchs_own(ranks, unscale, bad):
    """As where a trainer starts the other ranks, and gradscaler run the first."""
    (ours, first), (theirs, second) = ranks(2).run(beside_torchs, unscale, bad)
    assert ours == [True, 1024.0, 512.0, 512.0, 1024.0]
    assert theirs == [False, *ours[1:]]
    assert first == pytest.approx([0.7] * 4)
    assert second == pytest.approx([0.4] * 4)


def copied(copier, name):
    scaler = scaler_of("GradScaler")
    if name == "ShardedGradScaler":
        scaler = scaler_of(name, process_group=dist.group.WORLD)
    again = getattr(copy, copier)(scaler)
    parameter = torch.nn.Parameter(torch.ones(4))
    again.scale(parameter.sum()).backward()
    if dist.get_rank() == 1:
        parameter.grad[0] = INF
    again.step(torch.optim.SGD([parameter], lr=0.1))
    again.update()
    return again._group is scaler._group, again.get_scale(), scaler.get_scale()


@pytest.mark.parametrize("name", ["GradScaler", "ShardedGradScaler"])
@pytest.mark.parametrize("copier", ["copy", "deepcopy"])
def test_a_copy_decides_with_the_same_group(ranks, copier, name):
    assert ranks(2).run(copied, copier, name) == [(True, 512.0, 1024.0)] * 2


def without_a_loss(name):
    """The second rank has an optimizer without parameters, and scales no loss."""
    has = dist.get_rank() == 0
    parameters = [torch.nn.Parameter(torch.ones(4))] if has else []
    optimizer = torch.optim.SGD([{"params": parameters}], lr=1.0)
    scaler = scaler_of(name)
    for parameter in parameters:
        scaler.scale(parameter.sum()).backward()
        parameter.grad[0] = INF
    scaler.step(optimizer)
    scaler.update()
    return scaler.last_step(optimizer).reason, scaler.state_dict()


@pytest.mark.parametrize("name", ["GradScaler", "ShardedGradScaler"])
def test_a_process_without_loss_and_parameters_takes_part(ranks, name):
    first, second = ranks(2).run(without_a_loss, name)
    assert first == second
    assert first[0] == "overflow"


def with_an_outside_flag(raised_on, clip):
    """One step, in which the flag of a rank is raised; all gradients are finite."""
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([parameter], fused=True)
    scaler = scaler_of("GradScaler", overflow=lambda: dist.get_rank() == raised_on)
    scaler.scale(parameter.sum()).backward()
    if clip:
        scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
    reason = scaler.last_step(optimizer).reason
    return reason, scaler.get_scale(), bool(torch.equal(parameter, torch.ones(4)))


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize(
    ("raised_on", "all_find"), [(1, ("overflow", 512.0, True)), (None, ("finite", 1024.0, False))]
)
def test_an_outside_flag_of_one_is_a_vote_for_all(ranks, raised_on, all_find, clip):
    assert ranks(2).run(with_an_outside_flag, raised_on, clip) == [all_find, all_find]
