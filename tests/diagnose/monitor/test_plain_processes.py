"""A loop without a scaler in two processes that train one model together."""

import os

import pytest

pytest.importorskip("torch")

import torch

if not torch.distributed.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradscaler.diagnose import Monitor, read_run

RANKS = 2
STEPS, BAD = 12, 7

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the ranks are forked")


def wrapped(wrapper):
    """A model, and what the loop calls."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    if wrapper == "ddp":
        return model, DistributedDataParallel(model)
    return model, fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))


def train(rank, wrapper, path, is_watched):
    """The weights of a rank after a training that fails on rank 1, and what its monitor says."""
    torch.manual_seed(0)
    model, called = wrapped(wrapper)
    torch.manual_seed(rank)
    optimizer, told, monitor = torch.optim.Adam(model.parameters(), lr=1e-3), [], None
    if is_watched:
        monitor = Monitor(model=model, path=path, every=3, tell=told.append)
    for step in range(1, STEPS + 1):
        is_bad = step == BAD and rank == 1
        optimizer.zero_grad()
        out = called(torch.randn(8, 4)) * (0.0 if is_bad else 1.0)
        out.square().sum(1).sqrt().mean().backward()
        optimizer.step()
    weights = [getattr(p, "to_local", lambda p=p: p)().detach() for p in model.parameters()]
    if monitor is None:
        return weights, None
    monitor.close()
    return weights, (monitor.bad_step, [(each.kind, each.cause) for each in told])


def case(wrapper, path, is_watched):
    return train(dist.get_rank(), wrapper, path, is_watched)


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_only_the_rank_at_fault_names_an_operation_and_no_bit_changes(ranks, wrapper, tmp_path):
    path = tmp_path / "run.{rank}.jsonl"
    alone = ranks(RANKS).run(case, wrapper, path, False)
    watched = ranks(RANKS).run(case, wrapper, path, True)
    for (before, _), (after, _) in zip(alone, watched, strict=True):
        for one, other in zip(before, after, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    (first, said), (bad, told) = (found for _, found in watched)
    assert first == bad == BAD
    assert [kind for kind, _ in said] == ["elsewhere"]
    assert [kind for kind, _ in told] == ["nan"]
    assert "by the gradient of sqrt" in told[0][1]
    run = read_run(*(tmp_path / f"run.{rank}.jsonl" for rank in range(RANKS)))
    assert run.verdict.text.startswith("rank 1: The gradient of")
