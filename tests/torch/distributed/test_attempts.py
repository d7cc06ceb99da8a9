"""scaler.attempts(optimizer) in many processes: all repeat a micro-batch, or none does."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from gradscaler.errors import CallOrderError, ParameterError
from gradscaler.torch import GradScaler, ShardedGradScaler
from tests.support.all_reduces import CountedAllReduces

INF = float("inf")
MICRO_BATCHES = 3
WAYS = ["DDP", "DDP with bucket views", "DDP without syncs", "FSDP1", "FSDP2"]


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))


def loss_of(model, step, micro_batch, rank):
    generator = torch.Generator().manual_seed(100 * step + 10 * micro_batch + rank)
    inputs, targets = (torch.randn(4, width, generator=generator) for width in (4, 8))
    return (model(inputs) - targets).square().mean()


def in_one_list(tensors):
    whole = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]
    return torch.cat([tensor.detach().flatten() for tensor in whole]).tolist()


def by_one_process(steps, world):
    """The parameters after each step of PyTorch's optimizer alone, on all ranks' batches."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    results = []
    for step in range(steps):
        optimizer.zero_grad()
        for micro_batch in range(MICRO_BATCHES):
            losses = [loss_of(model, step, micro_batch, rank) for rank in range(world)]
            (sum(losses) / world).backward()
        optimizer.step()
        results.append(in_one_list(model.parameters()))
    return results


def train(way, overflows, max_retries):
    """What each step came to; ``overflows``: (step, micro-batch, attempt) to a rank."""
    model, options = network(), {"init_scale": 1024.0, "max_retries": max_retries}
    if way == "FSDP1":
        cpu = torch.device("cpu")
        model = FullyShardedDataParallel(model, device_id=cpu, use_orig_params=True)
        scaler = ShardedGradScaler("cpu", **options)
    elif way == "FSDP2":
        fully_shard(model)
        scaler = GradScaler(**options)
    else:
        model = DistributedDataParallel(model, gradient_as_bucket_view="views" in way)
        scaler = GradScaler(group=dist.group.WORLD, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    results, rank = [], dist.get_rank()
    for step in range(3):
        optimizer.zero_grad()
        scales = []
        with CountedAllReduces() as counted:
            for micro_batch in range(MICRO_BATCHES):
                is_last = micro_batch == MICRO_BATCHES - 1
                alone = way == "DDP without syncs" and not is_last
                with model.no_sync() if alone else nullcontext():
                    for attempt in scaler.attempts(optimizer):
                        loss = loss_of(model, step, micro_batch, rank)
                        scaled = scaler.scale(loss)
                        scales.append(scaled.item() / loss.item())
                        bad = overflows.get((step, micro_batch, attempt)) == rank
                        (scaled * INF if bad else scaled).backward()
            scaler.step(optimizer)
        outcome = scaler.last_step(optimizer)
        scaler.update()
        results.append(
            {
                "scales": scales,
                "reason": outcome.reason,
                "scale": outcome.scale,
                "state": scaler.state_dict(),
                "count": counted.count,
                "parameters": whole(model),
            }
        )
    return results


def whole(model):
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            return in_one_list(model.module.parameters())
    return in_one_list(model.parameters())


def together(ranks, world, *args):
    """What each step came to, which all processes agree on."""
    first, *others = ranks(world).run(train, *args)
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("way", WAYS)
def test_all_repeat_a_micro_batch_that_overflows_in_one(ranks, way, bad):
    overflows = {(1, 0, 0): bad, (2, 1, 0): bad, (2, 1, 1): 1 - bad, (2, 2, 0): bad}
    results = together(ranks, 2, way, overflows, 16)
    assert [result["scales"] for result in results] == [
        [1024.0] * 3,
        [1024.0, 512.0, 512.0, 512.0],
        [512.0, 512.0, 256.0, 128.0, 128.0, 64.0],
    ]
    assert [result["reason"] for result in results] == ["finite"] * 3
    assert [result["scale"] for result in results] == [1024.0, 512.0, 64.0]
    for result, expected in zip(results, by_one_process(3, 2), strict=True):
        assert result["parameters"] == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_an_overflow_changes_no_bit_of_the_parameters(ranks, way):
    overflows = {(0, 1, 0): 1, (0, 2, 0): 0, (2, 0, 0): 1}
    results, plain = together(ranks, 2, way, overflows, 16), together(ranks, 2, way, {}, 16)
    assert [r["parameters"] for r in results] == [r["parameters"] for r in plain]


def test_an_attempt_takes_one_all_reduce_and_a_repetition_another_for_what_was_there(ranks):
    results = together(ranks, 2, "FSDP2", {(1, 1, 0): 0, (1, 1, 1): 0}, 16)
    attempts = [len(result["scales"]) for result in results]
    assert attempts == [3, 5, 3]
    assert [result["count"] for result in results] == [3 + 1, 5 + 1 + 1, 3 + 1]


@pytest.mark.parametrize("way", WAYS)
def test_retries_are_exhausted_in_all(ranks, way):
    overflows = {(1, 1, 0): 1, (1, 1, 1): 0}
    results = together(ranks, 2, way, overflows, 1)
    assert [result["reason"] for result in results] == ["finite", "retries_exhausted", "finite"]
    assert results[1]["parameters"] == results[0]["parameters"]
    assert [result["state"]["scale"] for result in results] == [1024.0, 512.0, 512.0]


def own_parameters(bad):
    """A parameter of each process alone, which needs no collective but the decision."""
    rank = dist.get_rank()
    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = GradScaler(init_scale=1024.0, group=dist.group.WORLD)
    attempts = []
    for step in range(3):
        for attempt in scaler.attempts(optimizer):
            attempts.append(attempt)
            scaled = scaler.scale((parameter * 10**rank * (step + 1)).sum())
            (scaled * INF if (rank, step) == (bad, 1) and attempt < 2 else scaled).backward()
    scaler.step(optimizer)
    scaler.update()
    return attempts, scaler.state_dict(), parameter.tolist()


@pytest.mark.parametrize("bad", range(3))
def test_each_process_keeps_its_own_gradients(ranks, bad):
    attempts, states, parameters = zip(*ranks(3).run(own_parameters, bad), strict=True)
    assert attempts == ([0, 0, 1, 2, 0],) * 3
    assert all(state == states[0] for state in states)
    assert states[0]["scale"] == 256.0
    assert list(parameters) == [[-(10.0**rank) * 6] * 4 for rank in range(3)]


def without_a_group():
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ParameterError, match=r"GradScaler\(group="):
        GradScaler().attempts(optimizer)
    return True


def test_nobody_is_left_to_repeat_alone(ranks):
    assert ranks(2).run(without_a_group) == [True, True]


def held_back():
    model = network()
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler()
    model.set_requires_gradient_sync(False)
    loop = scaler.attempts(optimizer)
    next(loop)
    scaler.scale(loss_of(model, 0, 0, dist.get_rank())).backward()
    with pytest.raises(CallOrderError, match="set_requires_gradient_sync"):
        next(loop)
    return True


def test_gradients_that_fsdp_holds_back_are_refused(ranks):
    assert ranks(2).run(held_back) == [True, True]
