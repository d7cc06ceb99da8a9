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
from tests.support.ranks import agreed

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


def wrapped(way):
    """A model, and the scaler for it."""
    model, options = network(), {"init_scale": 1024.0}
    if way == "FSDP1":
        cpu = torch.device("cpu")
        model = FullyShardedDataParallel(model, device_id=cpu, use_orig_params=True)
        return model, ShardedGradScaler("cpu", **options)
    if way == "FSDP2":
        fully_shard(model)
        return model, GradScaler(**options)
    model = DistributedDataParallel(model, gradient_as_bucket_view="views" in way)
    return model, GradScaler(group=dist.group.WORLD, **options)


def parameters_of(model):
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            return in_one_list(model.module.parameters())
    return in_one_list(model.parameters())


def train(way, overflows, max_retries=None):
    """A training with a loop for each of three micro-batches.

    Args:
        way: how the model is wrapped.
        overflows: for each step and micro-batch the rank that overflows in each attempt; after
            these no rank does.
        max_retries: of the loops.

    Returns:
        For each step its loss scales, its reason, the state after it, the all-reduces that the
        scaler made, and the parameters after it.
    """
    model, scaler = wrapped(way)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    results, rank = [], dist.get_rank()
    for step, in_step in enumerate(overflows):
        optimizer.zero_grad()
        scales = []
        with CountedAllReduces() as counted:
            for micro_batch, bad_ranks in enumerate(in_step):
                is_last = micro_batch == MICRO_BATCHES - 1
                alone = way == "DDP without syncs" and not is_last
                with model.no_sync() if alone else nullcontext():
                    for attempt in scaler.attempts(optimizer, max_retries=max_retries):
                        loss = loss_of(model, step, micro_batch, rank)
                        scaled = scaler.scale(loss)
                        scales.append(scaled.item() / loss.item())
                        is_bad = bad_ranks[attempt : attempt + 1] == [rank]
                        (scaled * INF if is_bad else scaled).backward()
            scaler.step(optimizer)
        reason = scaler.last_step(optimizer).reason
        scaler.update()
        results.append((scales, reason, scaler.state_dict(), counted.count, parameters_of(model)))
    return results


NONE = [[[], [], []]] * 3  # in three steps


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("bad", "other"), [(0, 1), (1, 0)])
def test_all_repeat_a_micro_batch_that_overflows_in_one(ranks, way, bad, other):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    expected = []
    for step in range(3):
        optimizer.zero_grad()
        for micro_batch in range(3):
            losses = [loss_of(model, step, micro_batch, rank) for rank in (0, 1)]
            (sum(losses) / 2).backward()
        optimizer.step()
        expected.append(in_one_list(model.parameters()))

    overflows = [[[], [], []], [[bad], [], []], [[], [bad, other], [bad]]]
    results = agreed(ranks(2).run(train, way, overflows))
    scales, reasons, states, _, parameters = zip(*results, strict=True)

    assert scales == (
        [1024.0, 1024.0, 1024.0],
        [1024.0, 512.0, 512.0, 512.0],
        [512.0, 512.0, 256.0, 128.0, 128.0, 64.0],
    )
    assert reasons == ("finite", "finite", "finite")
    assert [state["scale"] for state in states] == [1024.0, 512.0, 64.0]
    for found, true in zip(parameters, expected, strict=True):
        assert found == pytest.approx(true, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_an_overflow_changes_no_bit_of_the_parameters(ranks, way):
    overflows = [[[], [1], [0]], [[], [], []], [[1], [], []]]
    repeated = agreed(ranks(2).run(train, way, overflows))
    plain = agreed(ranks(2).run(train, way, NONE))
    assert [len(scales) for scales, *_ in repeated] == [5, 3, 4]
    assert [step[-1] for step in repeated] == [step[-1] for step in plain]


def test_an_attempt_takes_one_all_reduce_and_a_repetition_another_for_what_was_there(ranks):
    overflows = [[[], [], []], [[], [0, 0], []], [[], [], []]]
    results = agreed(ranks(2).run(train, "FSDP2", overflows))
    assert [len(scales) for scales, *_ in results] == [3, 5, 3]
    step, what_was_there = 1, 1
    counts = [count for *_, count, _ in results]
    assert counts == [3 + step, 5 + what_was_there + step, 3 + step]


@pytest.mark.parametrize("way", WAYS)
def test_retries_are_exhausted_in_all(ranks, way):
    overflows = [[[], [], []], [[], [1, 0], []], [[], [], []]]
    results = agreed(ranks(2).run(train, way, overflows, 1))
    _, reasons, states, _, parameters = zip(*results, strict=True)
    assert reasons == ("finite", "retries_exhausted", "finite")
    assert [state["scale"] for state in states] == [1024.0, 512.0, 512.0]
    assert parameters[1] == parameters[0] != parameters[2]


def own_parameters(bad):
    """A parameter of each process alone, which needs no collective but the decision."""
    rank = dist.get_rank()
    parameter = torch.nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = GradScaler(init_scale=1024.0, group=dist.group.WORLD)
    attempts = []
    for micro_batch, overflows in enumerate((0, 2, 0), start=1):
        for attempt in scaler.attempts(optimizer):
            attempts.append(attempt)
            scaled = scaler.scale((parameter * 10**rank * micro_batch).sum())
            (scaled * INF if rank == bad and attempt < overflows else scaled).backward()
    scaler.step(optimizer)
    scaler.update()
    return attempts, scaler.get_scale(), parameter.tolist()


@pytest.mark.parametrize("bad", range(3))
def test_each_process_keeps_its_own_gradients(ranks, bad):
    attempts, scales, parameters = zip(*ranks(3).run(own_parameters, bad), strict=True)
    assert attempts == ([0, 0, 1, 2, 0],) * 3
    assert scales == (256.0, 256.0, 256.0)
    assert parameters == ([-6.0] * 4, [-60.0] * 4, [-600.0] * 4)


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
