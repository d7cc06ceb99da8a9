"""Experts of one process alone, or on a second mesh, some of them cold: without a gradient."""

from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from gradscaler import ScaleMismatchError
from gradscaler.torch import GradScaler

INF = float("inf")
RATE = 2.0**-3
INTERVAL = 2
STEPS = 3 * INTERVAL + 2
OVERFLOW = 1  # the step with an Inf


def inputs(expert, step):
    """The factors of an expert's weights: its gradient, exact in float32."""
    return torch.arange(4.0) + expert - step


def is_hot(expert, step, routing):
    return {
        "all": True,
        "alternating": (expert + step) % 2 == 0 or step == OVERFLOW,
        "last alone": expert == 3 or step == OVERFLOW,
        "none": False,
    }[routing]


def one_process(experts, routing, clip, optimizer_of):
    """The shared layer and each expert after all steps without a scaler, and the norms."""
    weights = [torch.nn.Parameter(torch.ones(4)) for _ in range(1 + experts)]
    optimizer = optimizer_of([{"params": weights}])
    norms = []
    for step in range(STEPS):
        weights[0].grad = inputs(0, step)
        for expert, weight in enumerate(weights[1:]):
            weight.grad = inputs(expert, step) if is_hot(expert, step, routing) else None
        if clip:
            norms.append(torch.nn.utils.clip_grad_norm_(weights, 1.0).item())
        if step != OVERFLOW:
            optimizer.step()
    return weights[0], torch.stack(weights[1:]), norms


@cache
def meshes(world):
    """Where the shared layer lies, and where the experts do."""
    if world == 2:
        return tuple(init_device_mesh("cpu", (2,), mesh_dim_names=(name,)) for name in ("dp", "ep"))
    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    return root, root["ep"]


def on_a_second_mesh(fused, clip, routing, backwards, bad):
    """Two experts on each rank of a mesh of two; in a world of four, each has two replicas."""
    mesh, expert_mesh = meshes(dist.get_world_size())
    placements = [Shard(0)] + [Replicate()] * (mesh.ndim - 1)
    shared = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, placements))
    experts = [
        torch.nn.Parameter(distribute_tensor(torch.ones(2, 4), expert_mesh, [Shard(0)]))
        for _ in range(2)
    ]
    ep = expert_mesh.get_local_rank()
    groups = [{"params": experts}, {"params": [shared]}]

    def optimizer_of(groups):
        return torch.optim.AdamW(groups, lr=RATE, fused=fused)

    optimizer = optimizer_of(groups[:: -1 if backwards else 1])
    scaler = GradScaler(init_scale=64.0, growth_interval=INTERVAL)
    of_shared, of_experts, norms = one_process(4, routing, clip, optimizer_of)
    results = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = (shared.full_tensor() * inputs(0, step)).sum()
        for i, parameter in enumerate(experts):  # of its two rows, rank 0 has the first
            if is_hot(2 * i + ep, step, routing):
                loss = loss + (parameter.to_local()[0] * inputs(2 * i + ep, step)).sum()
        scaler.scale(loss).backward()
        if step == OVERFLOW and dist.get_rank() == bad:
            experts[-1].grad.to_local()[-1, -1] = INF
        norm = scaler.clip_grad_norm_(optimizer, 1.0).item() if clip else None
        if clip and step != OVERFLOW:
            assert norm == pytest.approx(norms[step], rel=1e-6)
        scaler.step(optimizer)
        scaler.update()
        outcome = scaler.last_step(optimizer)
        norm = None if step == OVERFLOW else norm  # the other replica of an expert has no Inf
        results.append((outcome.reason, outcome.scale, norm, scaler.state_dict()))
    for value, expected in [
        (shared.full_tensor(), of_shared),
        *((experts[i].full_tensor(), of_experts[2 * i : 2 * i + 2]) for i in range(2)),
    ]:
        # Vectorized kernels round the last elements of a part in another way than the others.
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)
    return results


def check(results):
    first, *others = results
    assert all(other == first for other in others)
    assert [reason for reason, *_ in first] == ["finite", "overflow"] + ["finite"] * 6
    assert [scale for _, scale, *_ in first] == [64.0, 64.0, 32.0, 32.0, 64.0, 64.0, 128.0, 128.0]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("routing", "clip", "backwards"),
    [
        ("all", True, False),
        ("alternating", False, True),
        ("alternating", True, False),
        ("last alone", False, False),
        ("last alone", True, True),
    ],
)
@pytest.mark.parametrize(("world", "bad"), [(2, 0), (2, 1), (4, 0), (4, 1), (4, 2), (4, 3)])
def test_experts_on_a_second_mesh(ranks, world, bad, routing, clip, backwards, fused):
    check(ranks(world).run(on_a_second_mesh, fused, clip, routing, backwards, bad))


def of_each_process(fused, clip, routing, bad):
    """A plain expert on each rank, and two optimizers: of it, and of a shared layer."""
    world, rank = dist.get_world_size(), dist.get_rank()
    shared, expert = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    optimizers = [torch.optim.SGD([p], lr=RATE, fused=fused) for p in (shared, expert)]
    scaler = GradScaler(init_scale=64.0, growth_interval=INTERVAL, group=dist.group.WORLD)
    results = []
    for step in range(STEPS):
        expert.grad = shared.grad = None
        loss = (shared * inputs(0, step)).sum()
        if is_hot(rank, step, routing):
            loss = loss + (expert * inputs(rank, step)).sum()
        scaler.scale(loss).backward()
        if step == OVERFLOW and rank == bad:
            (shared if expert.grad is None else expert).grad[-1] = INF
        if clip:  # only measured
            scaler.clip_grad_norm_(optimizers[0], INF)
            norm = scaler.clip_grad_norm_(optimizers[1], INF, shards=dist.group.WORLD).item()
            hot = [inputs(e, step) for e in range(world) if is_hot(e, step, routing)]
            expected = torch.cat(hot).norm().item() if hot else 0.0
            assert step == OVERFLOW or norm == pytest.approx(expected, rel=1e-6)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        results.append(([scaler.last_step(o).reason for o in optimizers], scaler.state_dict()))
    # Closed forms, exact in float32: overflows skip the step, and cold experts have no gradient.
    skipped = OVERFLOW if routing == "none" else None  # else the experts alone overflow
    moved = [inputs(0, step) for step in range(STEPS) if step != skipped]
    assert torch.equal(shared, 1 - RATE * sum(moved))
    hot = [step for step in range(STEPS) if is_hot(rank, step, routing) and step != OVERFLOW]
    assert torch.equal(expert, 1 - RATE * sum((inputs(rank, step) for step in hot), torch.zeros(4)))
    return results


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("world", "bad", "routing"),
    [
        (2, 0, "all"),
        (2, 1, "alternating"),
        (2, 0, "none"),
        (2, 1, "none"),
        (4, 0, "alternating"),
        (4, 1, "last alone"),
        (4, 3, "last alone"),
        (4, 2, "none"),
    ],
)
def test_experts_of_one_process_alone(ranks, world, bad, routing, fused, clip):
    first, *others = ranks(world).run(of_each_process, fused, clip, routing, bad)
    assert others == [first] * (world - 1)
    of_experts = "no_gradients" if routing == "none" else "finite"
    for step, (reasons, _) in enumerate(first):
        expected = ["finite", of_experts]
        if step == OVERFLOW:
            expected = ["overflow", of_experts] if routing == "none" else ["finite", "overflow"]
        assert reasons == expected
    scales = [state["scale"] for _, state in first]
    assert scales == [64.0, 32.0, 32.0, 64.0, 64.0, 128.0, 128.0, 256.0]


def of_two_optimizers(bad, named):
    """The shared layer's optimizer is that of all four ranks, the expert's that of two."""
    mesh, expert_mesh = meshes(4)
    shared = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0), Replicate()]))
    expert = torch.nn.Parameter(distribute_tensor(torch.ones(2), expert_mesh, [Shard(0)]))
    optimizers = [torch.optim.SGD([parameter], lr=RATE) for parameter in (shared, expert)]
    scaler = GradScaler(init_scale=64.0, group=dist.group.WORLD if named else None)
    results = []
    for step in range(OVERFLOW + 2):
        scaler.scale(shared.to_local().sum() + expert.to_local().sum()).backward()
        if step == OVERFLOW and dist.get_rank() == bad:
            expert.grad.to_local()[0] = INF
        try:
            for optimizer in optimizers:
                scaler.step(optimizer)
                optimizer.zero_grad()
        except ScaleMismatchError as error:
            return str(error)
        scaler.update()
        reasons = [scaler.last_step(optimizer).reason for optimizer in optimizers]
        results.append((reasons, scaler.get_scale()))
    return results


@pytest.mark.parametrize("bad", range(4))
def test_optimizers_on_different_meshes_keep_one_scale_in_a_group(ranks, bad):
    first, *others = ranks(4).run(of_two_optimizers, bad, True)
    assert others == [first] * 3
    finite = ["finite", "finite"]
    assert first == [(finite, 64.0), (["finite", "overflow"], 32.0), (finite, 32.0)]


def test_optimizers_on_different_meshes_without_a_group_are_told_to_name_one(ranks):
    messages = ranks(4).run(of_two_optimizers, 3, False)
    assert len(set(messages)) == 1
    assert "scale is 32 on one and 64 on another" in messages[0]
    assert "group=" in messages[0]
