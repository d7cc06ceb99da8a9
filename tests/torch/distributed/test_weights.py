"""MasterWeights trains under DDP, FSDP2 and tensor parallelism as in one process."""

from functools import cache

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from gradscaler.torch import GradScaler, MasterWeights

STORES = ("float32", "remainder16", "stochastic")
INF = float("inf")
STEPS = 6
OVERFLOWS = (2, 3)
FINITE = (0, 1, 4)
OPTIONS = {"lr": 2.0**-9}


@cache
def mesh_of(world):
    return init_device_mesh("cpu", (world,))


class Model(torch.nn.Module):
    """Three outputs and one gain: FSDP gives ranks parts of different sizes, and an empty one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up = torch.nn.Linear(4, 8)
        self.down = torch.nn.Linear(8, 3)
        self.gain = torch.nn.Parameter(torch.full((1,), 0.7))

    def forward(self, x):
        return self.down(self.up(x).relu()) * self.gain


def batch(step):
    """Of small integers, the same on all ranks, so that a mean over ranks is no other number."""
    return torch.randint(-2, 3, (4, 4), generator=torch.Generator().manual_seed(step)).half()


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def train(model, optimizer, scaler, steps=range(STEPS), clip=0.5):
    """The reason of each step; an Inf comes on one rank alone."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    reasons = []
    for step in steps:
        optimizer.zero_grad()
        scaler.scale(model(batch(step)).float().square().mean()).backward()
        if step in OVERFLOWS and rank == 0:
            parts = [local(p.grad).view(-1) for g in optimizer.param_groups for p in g["params"]]
            next(part for part in parts if part.numel())[0] = INF
        if clip is not None:
            scaler.clip_grad_norm_(optimizer, clip)
        scaler.step(optimizer)
        scaler.update()
        reasons.append(scaler.last_step(optimizer).reason)
    return reasons


def values(model, optimizer):
    named = {n.removeprefix("module."): p for n, p in model.named_parameters()}
    return {name: whole(optimizer.wide(p)).tolist() for name, p in named.items()}


def plain(store):
    model = Model()
    return model, MasterWeights(torch.optim.AdamW, model, store=store, **OPTIONS)


def replicated(store):
    model = Model()
    optimizer = MasterWeights(torch.optim.AdamW, model, store=store, **OPTIONS)
    return DistributedDataParallel(model), optimizer


def sharded(store):
    model = Model()
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for layer in (model.up, model):
        fully_shard(layer, mesh=mesh_of(dist.get_world_size()), mp_policy=policy)
    return model, MasterWeights(torch.optim.AdamW, model, store=store, **OPTIONS)


def tensor_parallel(store):
    model = Model()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh_of(dist.get_world_size()), plan)
    return model, MasterWeights(torch.optim.AdamW, model, store=store, **OPTIONS)


MAKE = {"ddp": replicated, "fsdp2": sharded, "tensor parallel": tensor_parallel}


def trained_on_ranks(kind, store, clip):
    model, optimizer = MAKE[kind](store)
    scaler = GradScaler(init_scale=1024.0, group=dist.group.WORLD if kind == "ddp" else None)
    reasons = train(model, optimizer, scaler, clip=clip)
    dtypes = {str(parameter.dtype) for parameter in model.parameters()}
    return reasons, values(model, optimizer), dtypes


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_ranks_train_as_one_process_and_skip_together(ranks, kind, store, clip):
    answers = ranks(2).run(trained_on_ranks, kind, store, clip)
    assert answers[0] == answers[1]
    reasons, parameters, dtypes = answers[0]
    assert reasons == ["overflow" if step in OVERFLOWS else "finite" for step in range(STEPS)]
    assert dtypes == {"torch.float16"}
    model, optimizer = plain(store)
    train(model, optimizer, GradScaler(init_scale=1024.0), clip=clip)
    # Sums over ranks round in another order, and random numbers differ.
    within = {"atol": 2.0**-8 if store == "stochastic" else 2.0**-12, "rtol": 0}
    for name, expected in values(model, optimizer).items():
        torch.testing.assert_close(torch.tensor(parameters[name]), torch.tensor(expected), **within)


def unscaled_and_clipped(kind):
    """As trainers do it."""
    model, optimizer = MAKE[kind]("remainder16")
    scaler = GradScaler(init_scale=1024.0, group=dist.group.WORLD if kind == "ddp" else None)
    for step in FINITE:
        optimizer.zero_grad()
        scaler.scale(model(batch(step)).float().square().mean()).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        model.zero_grad()
    return values(model, optimizer)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_unscaled_gradients_are_clipped_by_pytorch(ranks, kind):
    first, second = ranks(2).run(unscaled_and_clipped, kind)
    assert first == second
    model, optimizer = plain("remainder16")
    train(model, optimizer, GradScaler(init_scale=1024.0), FINITE)
    for name, expected in values(model, optimizer).items():
        torch.testing.assert_close(
            torch.tensor(first[name]), torch.tensor(expected), atol=2.0**-12, rtol=0
        )


def copies_of_a_parameter_beside_parts():
    """The copies after a step, whose parameters before are larger on the first rank."""
    mesh = mesh_of(2)
    parts, copies = (
        torch.nn.Parameter(distribute_tensor(torch.full((count,), 0.75), mesh, [placement]).half())
        for count, placement in ((3, Shard(0)), (100, Replicate()))
    )
    optimizer = MasterWeights(torch.optim.SGD, [parts, copies], store="stochastic", lr=1e-4)
    for parameter in (parts, copies):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return copies.to_local().tolist(), parts.to_local().numel()


def test_copies_of_a_parameter_are_rounded_at_random_alike(ranks):
    (first, first_part), (second, second_part) = ranks(2).run(copies_of_a_parameter_beside_parts)
    assert (first_part, second_part) == (2, 1)
    assert first == second
    assert len(set(first)) == 2


def resumed_from_a_distributed_checkpoint(kind, store, folder):
    model, optimizer = MAKE[kind](store)
    scaler = GradScaler(init_scale=1024.0)
    train(model, optimizer, scaler, range(3))
    optimizer.zero_grad()
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=folder)
    expected = train(model, optimizer, scaler, range(4, STEPS)), values(model, optimizer)
    torch.manual_seed(5)
    model, optimizer = MAKE[kind](store)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(states, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=states["model"],
        optim_state_dict=states["optimizer"],
    )
    scaler = GradScaler(init_scale=512.0)
    return expected, (train(model, optimizer, scaler, range(4, STEPS)), values(model, optimizer))


@pytest.mark.parametrize("kind", ["fsdp2", "tensor parallel"])
@pytest.mark.parametrize("store", STORES)
def test_ranks_resume_from_a_distributed_checkpoint_with_the_same_bits(
    ranks, kind, store, tmp_path
):
    for expected, resumed in ranks(2).run(
        resumed_from_a_distributed_checkpoint, kind, store, str(tmp_path)
    ):
        assert resumed == expected


def refused_without_the_model():
    model = Model()
    fully_shard(model, mesh=mesh_of(2))
    message = ""
    try:
        MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-3)
    except ValueError as error:
        message = str(error)
    return message, str(next(model.parameters()).dtype)


def test_sharded_parameters_without_their_model_are_refused(ranks):
    for message, dtype in ranks(2).run(refused_without_the_model):
        assert "a sharded parameter can only be cast with its module" in message
        assert dtype == "torch.float32"
