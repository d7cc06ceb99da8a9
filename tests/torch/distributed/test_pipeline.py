"""Stages of a pipeline decide together; those before the last never scale a loss."""

from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor import DTensor

from gradscaler import CallOrderError
from gradscaler.torch import GradScaler

INF = float("inf")
WIDTH = 4
MICROBATCHES = 4
INTERVAL = 2
SCHEDULES = {
    "GPipe": ScheduleGPipe,
    "1F1B": Schedule1F1B,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
}


def blocks(count):
    """A model of as many layers as there are stages."""
    torch.manual_seed(3)
    model = torch.nn.Sequential()
    for _ in range(count):
        linear = torch.nn.Linear(WIDTH, WIDTH)
        for parameter in linear.parameters():
            parameter.data = torch.randint(-2, 3, parameter.shape).float()
        model.append(torch.nn.Sequential(linear, torch.nn.ReLU()))
    return model


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(-2, 3, (2 * MICROBATCHES, WIDTH), generator=generator).float()


def loss_of(out, target):
    return ((out - target) * target).sum() / 2


def optimizer_of(parameters, fused, backwards):
    parameters = list(parameters)
    return torch.optim.AdamW(parameters[:: -1 if backwards else 1], lr=2**-6, fused=fused)


def overflows(step):
    return step == 1


def one_process(stages, steps, fused, max_norm, norm_type):
    """The whole model without a scaler: its parameters at the end, norms and gradients.

    It takes the same microbatches, because a sum over the whole batch rounds in another order.
    """
    model = blocks(stages)
    optimizer = optimizer_of(model.parameters(), fused, False)
    norms, gradients = [], []
    for step in range(steps):
        optimizer.zero_grad()
        microbatches = (batch(i).chunk(MICROBATCHES) for i in (step, step + 100))
        for inputs, target in zip(*microbatches, strict=True):
            (loss_of(model(inputs), target) / MICROBATCHES).backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        if max_norm is not None:
            parameters = list(model.parameters())
            norms.append(torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type).item())
        if not overflows(step):
            optimizer.step()
    return model, norms, gradients


@cache
def group_of(ranks):
    return dist.group.WORLD if len(ranks) == dist.get_world_size() else dist.new_group(list(ranks))


def train(schedule, fused, clip, backwards, bad, bad_last, norm_type=2.0, unscale=False):  # noqa: C901 # a training
    """Steps of a pipeline over all ranks; one gradient of rank ``bad`` overflows in the second."""
    world, rank = dist.get_world_size(), dist.get_rank()
    per_rank = 2 if schedule == "Interleaved1F1B" else 1
    count, steps = world * per_rank, 3 * INTERVAL + 2
    mine = [rank + i * world for i in range(per_rank)]
    model = blocks(count)
    device = torch.device("cpu")
    stages = [PipelineStage(model[i], i, count, device) for i in mine]
    scaler = GradScaler(init_scale=64.0, growth_interval=INTERVAL, group=dist.group.WORLD)

    def scaled_loss(out, target):
        return scaler.scale(loss_of(out, target))

    runner = SCHEDULES[schedule](
        stages if per_rank > 1 else stages[0], MICROBATCHES, loss_fn=scaled_loss
    )
    own = [parameter for i in mine for parameter in model[i].parameters()]
    optimizer = optimizer_of(own, fused, backwards)
    max_norm = 0.5 if clip else None
    whole, norms, gradients = one_process(count, steps, fused, max_norm, norm_type)
    names = [name for name, _ in whole.named_parameters()]
    results = []
    for step in range(steps):
        optimizer.zero_grad()
        inputs = (batch(step),) if 0 in mine else ()
        target = {"target": batch(step + 100)} if count - 1 in mine else {}
        runner.step(*inputs, **target)
        if overflows(step) and rank == bad:
            own[-1 if bad_last else 0].grad.view(-1)[-1] = INF
        if unscale:
            scaler.unscale_(optimizer)
            for name, parameter in model.named_parameters():
                if parameter.grad is not None and not overflows(step):
                    expected = gradients[step][names.index(name)]
                    # The norm's sum rounds in another order, so clipped weights differ a little.
                    atol = 1e-5 if clip else 0.0
                    torch.testing.assert_close(parameter.grad, expected, rtol=atol, atol=atol)
        if clip:
            norm = scaler.clip_grad_norm_(
                optimizer, max_norm, norm_type, shards=dist.group.WORLD
            ).item()
            assert norm == (INF if overflows(step) else pytest.approx(norms[step], rel=1e-6))
        scaler.step(optimizer)
        scaler.update()
        outcome = scaler.last_step(optimizer)
        results.append((outcome.reason, outcome.scale, scaler.state_dict()))
    whole = dict(whole.named_parameters())
    for i in mine:
        for name, parameter in model[i].named_parameters():
            expected = whole[f"{i}.{name}"]
            if clip:  # its norm is summed in another order
                torch.testing.assert_close(parameter, expected, rtol=1e-6, atol=1e-7)
            else:
                assert torch.equal(parameter, expected), name
    return results


def check(results):
    first, *others = results
    assert all(other == first for other in others)
    assert [reason for reason, *_ in first] == ["finite", "overflow"] + ["finite"] * 6
    assert [scale for _, scale, _ in first] == [64.0, 64.0, 32.0, 32.0, 64.0, 64.0, 128.0, 128.0]


@pytest.mark.parametrize("bad_last", [False, True])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_one_stage_of_two_overflows_and_all_skip(ranks, schedule, bad, fused, clip, bad_last):
    check(ranks(2).run(train, schedule, fused, clip, bad_last, bad, bad_last))


@pytest.mark.parametrize(
    ("bad", "fused", "clip", "bad_last"),
    [(0, False, True, True), (1, True, False, False), (2, True, True, True), (3, False, False, 0)],
)
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_one_stage_of_four_overflows_and_all_skip(ranks, schedule, bad, fused, clip, bad_last):
    check(ranks(4).run(train, schedule, fused, clip, not bad_last, bad, bad_last))


@pytest.mark.parametrize("bad", [0, 1])
def test_two_stages_on_each_rank(ranks, bad):
    check(ranks(2).run(train, "Interleaved1F1B", False, True, False, bad, True))


@pytest.mark.parametrize("norm_type", [1.0, 3.0, INF])
@pytest.mark.parametrize("world", [2, 4])
def test_norm_is_that_of_the_whole_model(ranks, world, norm_type):
    check(ranks(world).run(train, "1F1B", False, True, False, 0, False, norm_type))


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("world", [2, 4])
def test_unscaled_gradients_are_those_of_one_process(ranks, world, clip):
    check(ranks(world).run(train, "GPipe", False, clip, False, world - 1, False, 2.0, True))


@cache
def root_mesh():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))


def sharded_stages(bad):
    """FSDP2 within each of two stages: DTensors on the mesh of the stage alone."""
    mesh = root_mesh()
    pp, dp = mesh["pp"], mesh["dp"]
    index, steps = pp.get_local_rank(), 4
    model = blocks(2)
    fully_shard(model[index], mesh=dp)
    stage = PipelineStage(model[index], index, 2, torch.device("cpu"), group=pp.get_group())
    scaler = GradScaler(init_scale=64.0, growth_interval=INTERVAL, group=dist.group.WORLD)
    runner = Schedule1F1B(
        stage, MICROBATCHES, loss_fn=lambda out, target: scaler.scale(loss_of(out, target))
    )
    optimizer = torch.optim.AdamW(model[index].parameters(), lr=2**-6)
    whole, norms, _ = one_process(2, steps, False, 0.5, 2.0)
    results = []
    for step in range(steps):
        optimizer.zero_grad()
        # The replicas' gradients are averaged: both take the whole batch.
        inputs = (batch(step),) if index == 0 else ()
        runner.step(*inputs, **({"target": batch(step + 100)} if index == 1 else {}))
        if overflows(step) and dist.get_rank() == bad:
            next(model[index].parameters()).grad.to_local()[-1] = INF
        norm = scaler.clip_grad_norm_(optimizer, 0.5, shards=pp.get_group()).item()
        assert norm == (INF if overflows(step) else pytest.approx(norms[step], rel=1e-6))
        scaler.step(optimizer)
        scaler.update()
        results.append((scaler.last_step(optimizer).reason, norm, scaler.state_dict()))
    for mine, expected in zip(model[index].parameters(), whole[index].parameters(), strict=True):
        assert isinstance(mine, DTensor)
        torch.testing.assert_close(mine.full_tensor(), expected, rtol=1e-6, atol=1e-7)
    return results


@pytest.mark.parametrize("bad", range(4))
def test_sharded_stages_decide_and_clip_together(ranks, bad):
    first, *others = ranks(4).run(sharded_stages, bad)
    assert others == [first] * 3
    assert [reason for reason, *_ in first] == ["finite", "overflow", "finite", "finite"]


def stage_without_a_loss(call):
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.full((2,), 128.0)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    alone = GradScaler()
    with pytest.raises(CallOrderError, match=r"before any loss was scaled"):
        alone.step(optimizer)
    scaler = GradScaler(init_scale=64.0, group=dist.group.WORLD)
    if dist.get_rank() == 1:
        scaler.scale(torch.ones(()))
    if call == "unscale_":
        scaler.unscale_(optimizer)
    elif call == "clip_grad_norm_":
        scaler.clip_grad_norm_(optimizer, INF)
    scaler.step(optimizer)
    scaler.update()
    return parameter.tolist(), scaler.state_dict()


@pytest.mark.parametrize("call", ["unscale_", "clip_grad_norm_", "step"])
def test_scale_is_placed_by_the_call_that_needs_it_first(ranks, call):
    first, second = ranks(2).run(stage_without_a_loss, call)
    assert first == second
    assert first[0] == [-1.0, -1.0]
