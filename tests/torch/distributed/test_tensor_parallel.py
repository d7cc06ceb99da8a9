"""Tensor and sequence parallelism, and FSDP2 over them, need no arguments."""

from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from gradscaler import ParameterError
from gradscaler.torch import GradScaler

INF = float("inf")
WIDTH = 4
LENGTH = 2  # of a sequence
INTERVAL = 2
STEPS = 3 * INTERVAL + 2  # one overflow, and three times the growth interval


@cache
def mesh_of(world):
    if world == 2:
        return init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


class Model(torch.nn.Module):
    """A residual block."""

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
    """One layer is split over each dimension alone."""
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


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, LENGTH, WIDTH, generator=generator)


def optimizer_of(model, fused, backwards):
    """An optimizer that steps each parameter by itself, or those that lie alike if fused."""
    groups = {}
    for parameter in list(model.parameters())[:: -1 if backwards else 1]:
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    if not fused:
        groups = {None: list(model.parameters())[:: -1 if backwards else 1]}
    params = [{"params": members} for members in groups.values()]
    return torch.optim.AdamW(params, lr=2**-6, fused=fused, foreach=False if not fused else None)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def one_process(fused, max_norm):
    """The whole model on the whole batch without a scaler: each step's gradients, and norms."""
    model = Model()
    optimizer = optimizer_of(model, fused, False)
    gradients, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        if max_norm is not None:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        if step != 1:
            optimizer.step()
    return model, gradients, norms


def train(name, fused, clip, unscale, backwards, bad, bad_last):
    world, parallelize = PARALLEL[name]
    mesh = mesh_of(world)
    model = parallelize(Model(), mesh)
    optimizer = optimizer_of(model, fused, backwards)
    scaler = GradScaler(init_scale=64.0, growth_interval=INTERVAL)
    max_norm = 0.125 if clip else None
    expected, gradients, norms = one_process(fused, max_norm)
    parameters, results = list(model.parameters()), []
    for step in range(STEPS):
        optimizer.zero_grad()
        # FSDP2 averages the gradients of two halves of the batch.
        part = batch(step)
        if name.startswith("FSDP2"):
            part = part.chunk(2)[mesh["dp"].get_local_rank()]
        scaler.scale(model(part).square().mean()).backward()
        if step == 1 and dist.get_rank() == bad:
            gradient = parameters[-1 if bad_last else 0].grad
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            local.view(-1)[-1:] = INF
        if unscale:
            scaler.unscale_(optimizer)
            if step != 1:
                for parameter, gradient in zip(parameters, gradients[step], strict=True):
                    # Matrix products of parts, and two means, are rounded in other places.
                    torch.testing.assert_close(
                        whole(parameter.grad), gradient, rtol=1e-4, atol=1e-6
                    )
        if clip:
            norm = scaler.clip_grad_norm_(optimizer, max_norm).item()
        if not clip or step == 1:  # an Inf in one replica alone is in the norm of its process
            norm = None
        else:
            assert norm == pytest.approx(norms[step], rel=1e-5)
        scaler.step(optimizer)
        scaler.update()
        outcome = scaler.last_step(optimizer)
        results.append((outcome.reason, outcome.scale, norm, scaler.state_dict()))
    for parameter, value in zip(parameters, expected.parameters(), strict=True):
        torch.testing.assert_close(whole(parameter), value, rtol=1e-4, atol=1e-5)
    return results


def check(results):
    first, *others = results
    assert all(other == first for other in others)
    assert [reason for reason, *_ in first] == ["finite", "overflow"] + ["finite"] * 6
    assert [scale for _, scale, *_ in first] == [64.0, 64.0, 32.0, 32.0, 64.0, 64.0, 128.0, 128.0]


# Fused, clipped, unscaled first, parameters listed backwards, Inf in the last one.
CHOICES = [
    (False, False, True, False, False),
    (True, False, False, True, False),
    (False, True, False, True, True),
    (True, True, True, False, True),
    (True, True, False, False, False),
]


@pytest.mark.parametrize(
    ("name", "bad", "choice"),
    [
        (name, rank, choice)
        for name, (world, _) in PARALLEL.items()
        for rank in range(world)
        for choice in CHOICES[rank % 2 :: 2]  # each has both parameters
    ],
)
def test_parallel_training_is_that_of_one_process(ranks, name, bad, choice):
    *options, bad_last = choice
    check(ranks(PARALLEL[name][0]).run(train, name, *options, bad, bad_last))


def count_of_all_reduces(clip):
    """Those of the scaler, in each step: DTensors reduce by other functions."""
    mesh = mesh_of(4)
    model = fsdp_over(tensor_parallel)(Model(), mesh)
    optimizer = optimizer_of(model, False, False)
    scaler = GradScaler(init_scale=64.0)
    all_reduce, counts = dist.all_reduce, []

    def counted(*args, **kwargs):
        counts[-1] += 1
        return all_reduce(*args, **kwargs)

    for step in range(3):
        scaler.scale(model(batch(step)).square().mean()).backward()
        if (step, dist.get_rank()) == (1, 2):
            next(model.parameters()).grad.to_local()[0] = INF
        counts.append(0)
        dist.all_reduce = counted
        try:
            if clip:
                scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
        finally:
            dist.all_reduce = all_reduce
        optimizer.zero_grad()
    return counts


def test_one_all_reduce_decides_and_one_for_each_dimension_measures(ranks):
    assert ranks(4).run(count_of_all_reduces, False) == [[1, 1, 1]] * 4
    assert ranks(4).run(count_of_all_reduces, True) == [[3, 3, 3]] * 4


def lone_gradient(kind):
    """A parameter whose gradient is distributed in its own way, after a replicated one."""
    mesh = mesh_of(2)
    first = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
    second = torch.nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    optimizer = torch.optim.SGD([first, second], lr=1.0)
    scaler = GradScaler(init_scale=64.0)
    inputs = distribute_tensor(
        torch.ones(2, 4), mesh, [Shard(0) if kind == "partial" else Replicate()]
    )
    scaler.scale(
        (inputs * first).sum() + torch.nn.functional.linear(inputs, second).sum()
    ).backward()
    placed = first.grad.placements[0] if kind == "partial" else second.grad.placements[0]
    assert placed.is_partial() if kind == "partial" else placed == Replicate()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(first.full_tensor(), torch.full((4,), -1.0))
    assert torch.equal(second.full_tensor(), torch.full((4, 4), -1.0))
    return scaler.last_step(optimizer).reason, scaler.state_dict()


@pytest.mark.parametrize("kind", ["partial", "replicated"])
def test_gradient_placed_unlike_its_parameter_is_unscaled(ranks, kind):
    first, second = ranks(2).run(lone_gradient, kind)
    assert first == second
    assert first[0] == "finite"


def inf_on(bad, fused, expanded):
    """A replicated gradient is listed first, and one shard of the other overflows."""
    mesh = mesh_of(2)
    first = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
    second = torch.nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)]))
    optimizer = torch.optim.AdamW([first, second], fused=fused)
    scaler = GradScaler(init_scale=64.0)
    scaler.scale(first.sum() + (second.sum() if expanded else second.square().sum())).backward()
    if dist.get_rank() == bad:
        if expanded:
            second.grad = DTensor.from_local(torch.tensor(INF).expand(4, 2), mesh, [Shard(1)])
        else:
            second.grad.to_local()[-1, -1] = INF
    elif expanded:
        second.grad = DTensor.from_local(torch.tensor(64.0).expand(4, 2), mesh, [Shard(1)])
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(second.full_tensor(), torch.ones(4, 4))
    return scaler.last_step(optimizer).reason, scaler.state_dict()


@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bad", [0, 1])
def test_inf_in_one_shard_after_a_replicated_gradient(ranks, bad, fused, expanded):
    first, second = ranks(2).run(inf_on, bad, fused, expanded)
    assert first == second
    assert first[0] == "overflow"
    assert first[1]["scale"] == 32.0


@cache
def unrelated():
    return (
        DeviceMesh("cpu", [0, 1]),
        DeviceMesh("cpu", [2, 3]),
        DeviceMesh("cpu", [0, 2]),
        DeviceMesh("cpu", [1, 3]),
    )


def on_unrelated_meshes(grouped):
    rank = dist.get_rank()
    rows, columns = unrelated()[rank // 2], unrelated()[2 + rank % 2]
    parameters = [
        torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
        for mesh in (rows, columns)
    ]
    optimizer = torch.optim.SGD(parameters, lr=1.0, foreach=False)
    scaler = GradScaler(init_scale=64.0, group=dist.group.WORLD if grouped else None)
    for parameter in parameters:
        scaler.scale(parameter.square().sum()).backward()
    before = parameters[0].grad.to_local().clone()
    if grouped:
        if rank == 3:
            parameters[1].grad.to_local()[0] = INF
        scaler.step(optimizer)
        scaler.update()
        return scaler.last_step(optimizer).reason, scaler.state_dict()
    with pytest.raises(ParameterError, match=r"ranks \[.*nothing connects.*group=") as raised:
        scaler.step(optimizer)
    assert torch.equal(parameters[0].grad.to_local(), before)
    return str(raised.value)


def test_meshes_that_nothing_connects_need_a_group(ranks):
    for rank, message in enumerate(ranks(4).run(on_unrelated_meshes, False)):
        row = 2 * (rank // 2)
        assert str([row, row + 1]) in message
    first, *others = ranks(4).run(on_unrelated_meshes, True)
    assert others == [first] * 3
    assert first[0] == "overflow"


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
        with pytest.raises(ParameterError, match=r"nothing connects.*group="):
            scaler.step(optimizer)
    scaler.step(optimizer)
    return scaler.last_step(optimizer).reason


def test_without_pytorch_s_private_name_of_a_root_several_meshes_need_a_group(ranks):
    assert ranks(4).run(on_two_dimensions_of_a_mesh) == ["finite"] * 4


def stage_of_a_larger_world():
    """A mesh of four of five ranks, for which no process group exists."""
    rank = dist.get_rank()
    groups = dist.distributed_c10d._world.pg_group_ranks
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    before = len(groups)
    if rank == 4:
        return None  # takes no part
    counts, results = [], []
    for _ in range(2):  # two scalers share the group
        parameters = [
            torch.nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, placements))
            for placements in ([Shard(0), Shard(1)], [Replicate(), Shard(0)])
        ]
        optimizer = torch.optim.SGD(parameters, lr=0.0)
        scaler = GradScaler(init_scale=64.0)
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(sum(p.square().sum() for p in parameters)).backward()
            if (step, rank) == (1, 3):
                parameters[0].grad.to_local()[0] = INF
            scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
            counts.append(len(groups) - before)
            results.append((scaler.last_step(optimizer).reason, scaler.state_dict()))
    new = list(groups)[-1]
    return counts, dist.get_process_group_ranks(new), results


def test_group_of_a_part_of_the_world_is_made_once_by_those_in_it(ranks):
    first, *others, outside = ranks(5).run(stage_of_a_larger_world)
    assert outside is None
    assert others == [first] * 3
    counts, members, results = first
    assert counts == [1] * 6
    assert members == [0, 1, 2, 3]
    assert [reason for reason, _ in results] == ["finite", "overflow", "finite"] * 2
