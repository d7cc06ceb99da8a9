"""Tensor and sequence parallelism, and FSDP2 over them, need no arguments."""

from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from gradscaler import ParameterError
from gradscaler._on_torch import processes
from gradscaler.torch import GradScaler
from tests.support.all_reduces import CountedAllReduces
from tests.support.ranks import agreed

INF = float("inf")
WIDTH = 4
LENGTH = 2  # of a sequence


@cache
def mesh_of(world):
    if world == 2:
        return init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


class Model(torch.nn.Module):
    """A norm, two linear layers, and a scale."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 2 * WIDTH)
        self.down = torch.nn.Linear(2 * WIDTH, WIDTH)
        self.scale = torch.nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x):
        return self.down(self.up(self.norm(x)).relu()) * self.scale


def tensor_parallel(model, mesh):
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def sequence_parallel(model, mesh):
    plan = {
        "norm": SequenceParallel(use_local_output=True),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    return model


def fsdp_over(parallel):
    def parallelize(model, mesh):
        fully_shard(parallel(model, mesh["tp"]), mesh=mesh["dp"])
        return model

    return parallelize


def two_meshes(model, mesh):
    """Split one layer over each dimension of the mesh."""
    parallelize_module(model.up, mesh["tp"], ColwiseParallel(output_layouts=Replicate()))
    parallelize_module(model.down, mesh["dp"], RowwiseParallel(input_layouts=Replicate()))
    return model


PARALLEL = {
    "TP": (2, tensor_parallel),  # the norm and the scale stay plain
    "TP and SP": (2, sequence_parallel),
    "FSDP2 x TP": (4, fsdp_over(tensor_parallel)),
    "FSDP2 x TP and SP": (4, fsdp_over(sequence_parallel)),
    "two meshes": (4, two_meshes),
}


EACH_RANK = [(name, rank) for name, (world, _) in PARALLEL.items() for rank in range(world)]


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, LENGTH, WIDTH, generator=generator)


def loss_of(model, name, mesh, step):
    """FSDP2 averages the gradients of two halves of the batch."""
    inputs = batch(step)
    if name.startswith("FSDP2"):
        inputs = inputs.chunk(2)[mesh["dp"].get_local_rank()]
    return model(inputs).square().mean()


def adamw(parameters, fused):
    """AdamW that steps each parameter by itself; if fused, the parameters of a mesh together."""
    if not fused:
        return torch.optim.AdamW(parameters, lr=2**-6, foreach=False)
    groups = {}
    for parameter in parameters:
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return torch.optim.AdamW([{"params": each} for each in groups.values()], lr=2**-6, fused=True)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def all_whole(tensors):
    return [whole(tensor.detach()).tolist() for tensor in tensors]


def put_inf_into(gradient):
    """Put an Inf into the last element of this rank's part."""
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    local.view(-1)[-1:] = INF


def assert_close(found, expected, atol=1e-5):
    """Allow for rounding: products of parts, and two means, are rounded in other places."""
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(mine), theirs, rtol=1e-4, atol=atol)


# In the second of eight steps one rank overflows. The scale doubles after two finite steps.


def eight_steps(name, fused, order, overflows_in, bad):
    world, parallelize = PARALLEL[name]
    mesh = mesh_of(world)
    model = parallelize(Model(), mesh)
    parameters = list(model.parameters())
    optimizer = adamw(parameters[::order], fused)
    scaler = GradScaler(init_scale=64.0, growth_interval=2)
    reasons, scales = [], []
    for step in range(8):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, name, mesh, step)).backward()
        if step == 1 and dist.get_rank() == bad:
            put_inf_into(parameters[overflows_in].grad)
        scaler.step(optimizer)
        scaler.update()
        outcome = scaler.last_step(optimizer)
        reasons.append(outcome.reason)
        scales.append(outcome.scale)
    return reasons, scales, scaler.state_dict(), all_whole(parameters)


@pytest.mark.parametrize(
    ("fused", "order", "overflows_in"),
    [(False, 1, 0), (True, -1, -1)],
    ids=["first parameter", "last parameter, fused, listed backwards"],
)
@pytest.mark.parametrize(("name", "bad"), EACH_RANK)
def test_all_skip_what_overflows_in_one_rank_and_end_as_one_process(
    ranks, name, bad, fused, order, overflows_in
):
    model = Model()
    optimizer = adamw(list(model.parameters()), fused)
    for step in (0, 2, 3, 4, 5, 6, 7):  # all but the one that is skipped
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()

    world = PARALLEL[name][0]
    results = ranks(world).run(eight_steps, name, fused, order, overflows_in, bad)
    reasons, scales, _, parameters = agreed(results)

    assert reasons == ["finite", "overflow"] + ["finite"] * 6
    assert scales == [64.0, 64.0, 32.0, 32.0, 64.0, 64.0, 128.0, 128.0]
    assert_close(parameters, model.parameters())


# Gradients after unscale_ or clip_grad_norm_, in three steps. The second step overflows.


def unscaled_gradients(name, fused):
    world, parallelize = PARALLEL[name]
    mesh = mesh_of(world)
    model = parallelize(Model(), mesh)
    parameters = list(model.parameters())
    optimizer = adamw(parameters, fused)
    scaler = GradScaler(init_scale=64.0)
    gradients = []
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, name, mesh, step)).backward()
        if step == 1 and dist.get_rank() == 1:
            put_inf_into(parameters[0].grad)
        scaler.unscale_(optimizer)
        gradients.append(all_whole(parameter.grad for parameter in parameters))
        scaler.step(optimizer)
        scaler.update()
    return gradients


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", PARALLEL)
def test_unscaled_gradients_are_those_of_one_process(ranks, name, fused):
    first, _, third = ranks(PARALLEL[name][0]).run(unscaled_gradients, name, fused)[0]
    model = Model()
    optimizer = adamw(list(model.parameters()), fused)
    for step, found in ((0, first), (2, third)):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        assert_close(found, [parameter.grad for parameter in model.parameters()], atol=1e-6)
        optimizer.step()


def clipped(name, fused, order, unscale_first):
    world, parallelize = PARALLEL[name]
    mesh = mesh_of(world)
    model = parallelize(Model(), mesh)
    parameters = list(model.parameters())
    optimizer = adamw(parameters[::order], fused)
    scaler = GradScaler(init_scale=64.0)
    norms = []
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, name, mesh, step)).backward()
        if step == 1 and dist.get_rank() == 1:
            put_inf_into(parameters[-1].grad)
        if unscale_first:
            scaler.unscale_(optimizer)
        norms.append(scaler.clip_grad_norm_(optimizer, 0.125).item())
        scaler.step(optimizer)
        scaler.update()
    # The second norm is left out: an Inf in one replica is in the norm of its process only.
    return norms[0], norms[2], scaler.state_dict(), all_whole(parameters)


@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize(("fused", "order"), [(False, 1), (False, -1), (True, 1)])
@pytest.mark.parametrize("name", PARALLEL)
def test_the_norm_is_that_of_one_process_and_clips_as_there(
    ranks, name, fused, order, unscale_first
):
    model = Model()
    optimizer = adamw(list(model.parameters()), fused)
    expected = []
    for step in (0, 2):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        expected.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.125).item())
        optimizer.step()

    results = ranks(PARALLEL[name][0]).run(clipped, name, fused, order, unscale_first)
    first, third, state, parameters = agreed(results)

    assert [first, third] == pytest.approx(expected, rel=1e-5)
    assert min(expected) > 0.125
    assert state["scale"] == 32.0
    assert_close(parameters, model.parameters())


def all_reduces_of_three_steps(clip):
    """The scaler's all-reduces in each step; DTensors reduce by other functions."""
    mesh = mesh_of(4)
    model = fsdp_over(tensor_parallel)(Model(), mesh)
    optimizer = adamw(list(model.parameters()), fused=False)
    scaler = GradScaler(init_scale=64.0)
    counts = []
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(model(batch(step)).square().mean()).backward()
        if step == 1 and dist.get_rank() == 2:
            put_inf_into(next(model.parameters()).grad)
        with CountedAllReduces() as counted:
            if clip:
                scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
        counts.append(counted.count)
    return counts


def test_one_all_reduce_decides(ranks):
    assert ranks(4).run(all_reduces_of_three_steps, False) == [[1, 1, 1]] * 4


def test_two_more_measure_the_norm_over_the_two_dimensions_of_a_mesh(ranks):
    assert ranks(4).run(all_reduces_of_three_steps, True) == [[3, 3, 3]] * 4


# Placements of gradients: a replicated and a sharded parameter of ones, with gradients of 2.


def step_on(inputs_placement, number, placement):
    """A step of lr 1. The numbered gradient has this placement, unlike its parameter."""
    mesh = mesh_of(2)
    replicated = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
    sharded = torch.nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    optimizer = torch.optim.SGD([replicated, sharded], lr=1.0)
    scaler = GradScaler(init_scale=64.0)
    inputs = distribute_tensor(torch.ones(2, 4), mesh, [inputs_placement])
    outputs = torch.nn.functional.linear(inputs, sharded)
    scaler.scale((inputs * replicated).sum() + outputs.sum()).backward()
    (found,) = (replicated, sharded)[number].grad.placements
    assert found == placement
    scaler.step(optimizer)
    scaler.update()
    outcome, state = scaler.last_step(optimizer), scaler.state_dict()
    return outcome.reason, state, all_whole([replicated, sharded])


@pytest.mark.parametrize(
    ("inputs_placement", "number", "placement"),
    [(Shard(0), 0, Partial()), (Replicate(), 1, Replicate())],
    ids=["partial", "replicated"],
)
def test_a_gradient_with_another_placement_than_its_parameter_is_unscaled(
    ranks, inputs_placement, number, placement
):
    results = ranks(2).run(step_on, inputs_placement, number, placement)
    reason, _, (replicated, sharded) = agreed(results)
    assert reason == "finite"
    assert replicated == [-1.0] * 4
    assert sharded == [[-1.0] * 4] * 4


def inf_in_a_shard(bad, fused):
    """The sharded gradient comes after a replicated one, which is finite."""
    mesh = mesh_of(2)
    replicated = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
    sharded = torch.nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)]))
    optimizer = torch.optim.AdamW([replicated, sharded], fused=fused)
    scaler = GradScaler(init_scale=64.0)
    scaler.scale(replicated.sum() + sharded.square().sum()).backward()
    if dist.get_rank() == bad:
        sharded.grad.to_local()[-1, -1] = INF
    scaler.step(optimizer)
    scaler.update()
    return scaler.last_step(optimizer).reason, scaler.state_dict(), all_whole([sharded])


def inf_in_an_expanded_shard(bad, fused):
    """All elements of the shard are one number in memory."""
    mesh = mesh_of(2)
    replicated = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
    sharded = torch.nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)]))
    optimizer = torch.optim.AdamW([replicated, sharded], fused=fused)
    scaler = GradScaler(init_scale=64.0)
    scaler.scale(replicated.sum() + sharded.sum()).backward()
    number = torch.tensor(INF if dist.get_rank() == bad else 64.0)
    sharded.grad = DTensor.from_local(number.expand(4, 2), mesh, [Shard(1)])
    scaler.step(optimizer)
    scaler.update()
    return scaler.last_step(optimizer).reason, scaler.state_dict(), all_whole([sharded])


@pytest.mark.parametrize("overflow", [inf_in_a_shard, inf_in_an_expanded_shard])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bad", [0, 1])
def test_an_inf_in_one_shard_after_a_replicated_gradient_skips(ranks, bad, fused, overflow):
    reason, state, (sharded,) = agreed(ranks(2).run(overflow, bad, fused))
    assert reason == "overflow"
    assert state["scale"] == 32.0
    assert sharded == [[1.0] * 4] * 4


# Parameters on several meshes.


@cache
def rows_and_columns():
    """The meshes of four ranks in a square. No mesh of both dimensions connects them."""
    return (
        [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])],
        [DeviceMesh("cpu", [0, 2]), DeviceMesh("cpu", [1, 3])],
    )


def on_this_rank_s_row_and_column(group):
    rank = dist.get_rank()
    rows, columns = rows_and_columns()
    parameters = [
        torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
        for mesh in (rows[rank // 2], columns[rank % 2])
    ]
    optimizer = torch.optim.SGD(parameters, lr=1.0, foreach=False)
    scaler = GradScaler(init_scale=64.0, group=group)
    for parameter in parameters:
        scaler.scale(parameter.square().sum()).backward()
    return parameters, optimizer, scaler


def refused_without_a_group():
    parameters, optimizer, scaler = on_this_rank_s_row_and_column(group=None)
    before = parameters[0].grad.to_local().clone()
    with pytest.raises(ParameterError, match=r"ranks \[.*nothing connects.*group=") as raised:
        scaler.step(optimizer)
    assert torch.equal(parameters[0].grad.to_local(), before)
    return str(raised.value)


def test_meshes_that_nothing_connects_are_refused_without_a_group(ranks):
    first, second, third, fourth = ranks(4).run(refused_without_a_group)
    assert "[0, 1]" in first
    assert "[0, 1]" in second
    assert "[2, 3]" in third
    assert "[2, 3]" in fourth


def overflow_in_rank_3_of_a_group():
    parameters, optimizer, scaler = on_this_rank_s_row_and_column(group=dist.group.WORLD)
    if dist.get_rank() == 3:
        parameters[1].grad.to_local()[0] = INF
    scaler.step(optimizer)
    scaler.update()
    return scaler.last_step(optimizer).reason, scaler.state_dict()


def test_a_group_decides_for_meshes_that_nothing_connects(ranks):
    reason, state = agreed(ranks(4).run(overflow_in_rank_3_of_a_group))
    assert reason == "overflow"
    assert state["scale"] == 32.0


def on_two_dimensions_of_a_mesh():
    parameters = [
        torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh_of(4)[name], [Shard(0)]))
        for name in ("dp", "tp")
    ]
    optimizer = torch.optim.SGD(parameters, lr=1.0, foreach=False)
    scaler = GradScaler(init_scale=64.0)
    for parameter in parameters:
        scaler.scale(parameter.square().sum()).backward()
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(DeviceMesh, "_get_root_mesh")  # which PyTorch 2.13 has
        patch.setattr(processes, "_found", {})  # another test may have found this group
        with pytest.raises(ParameterError, match=r"nothing connects.*group="):
            scaler.step(optimizer)
    scaler.step(optimizer)
    return scaler.last_step(optimizer).reason


def test_without_pytorch_s_private_name_of_a_root_several_meshes_need_a_group(ranks):
    assert ranks(4).run(on_two_dimensions_of_a_mesh) == ["finite"] * 4


def part_of_a_larger_world():
    """A mesh of four of five ranks, for which no process group exists, and two scalers on it."""
    rank = dist.get_rank()
    groups = dist.distributed_c10d._world.pg_group_ranks
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    before = len(groups)
    if rank == 4:
        return None  # takes no part
    new_groups, reasons, scales = [], [], []
    for _ in range(2):
        parameters = [
            torch.nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, placements))
            for placements in ([Shard(0), Shard(1)], [Replicate(), Shard(0)])
        ]
        optimizer = torch.optim.SGD(parameters, lr=0.0)
        scaler = GradScaler(init_scale=64.0)
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(sum(p.square().sum() for p in parameters)).backward()
            if step == 1 and rank == 3:
                parameters[0].grad.to_local()[0] = INF
            scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
            new_groups.append(len(groups) - before)
            reasons.append(scaler.last_step(optimizer).reason)
            scales.append(scaler.get_scale())
    return new_groups, dist.get_process_group_ranks(list(groups)[-1]), reasons, scales


def test_a_group_of_a_part_of_the_world_is_made_once_by_those_in_it(ranks):
    *inside, outside = ranks(5).run(part_of_a_larger_world)
    assert outside is None
    new_groups, members, reasons, scales = agreed(inside)
    assert new_groups == [1] * 6
    assert members == [0, 1, 2, 3]
    assert reasons == ["finite", "overflow", "finite"] * 2
    assert scales == [64.0, 32.0, 32.0] * 2
