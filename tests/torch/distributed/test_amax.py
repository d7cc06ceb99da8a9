"""The largest gradient is that of all processes that decide together."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from gradscaler import AmaxScale, ScaleMismatchError
from gradscaler.torch import GradScaler
from tests.support.all_reduces import CountedAllReduces

INF = float("inf")
LARGEST = [(0.5, 3.0), (2.0**-20, 2.0**-12), (5.0, INF), (0.25, 7.0), (0.0, 2.0**-9), (1.0, 1.0)]


class Operations(type(GradScaler._operations)):
    def on_host(self, tensor):
        return False


class OnDevice(GradScaler):
    _operations = Operations()


def scaler_of(place, **parameters):
    rule = AmaxScale(init_scale=1024.0, growth_interval=2, half_life=3.0, **parameters)
    kind = GradScaler if place == "host" else OnDevice
    return rule, kind(policy=rule, group=dist.group.WORLD)


def own_parameter(place, fused, clip, interval, turned):
    """A parameter of each rank alone; the ranks' largest gradients are those of ``LARGEST``."""
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=fused)
    rule, scaler = scaler_of(place, amax_interval=interval)
    expected, results = rule.init(), []
    rank = dist.get_rank() ^ turned
    for step, largest in enumerate(LARGEST):
        optimizer.zero_grad()
        loss = scaler.scale((parameter * torch.tensor([0.0, largest[rank], 0.0, 0.0])).sum())
        if step != 4 or rank == 1:  # there only one of them has a gradient
            loss.backward()
        with CountedAllReduces() as counted:
            if clip:
                scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
        due = expected.finite_steps % interval == 0 and INF not in largest
        expected = rule.update(expected, INF in largest, amax=np.float32(max(largest)))
        assert scaler.observed.state == expected
        results.append((tuple(scaler.observed.state), counted.count, due))
    return results


@pytest.mark.parametrize("turned", [0, 1])
@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("place", ["host", "device"])
def test_one_process_large_gradient_is_everyone_s(ranks, place, fused, clip, interval, turned):
    first, second = ranks(2).run(own_parameter, place, fused, clip, interval, turned)
    assert first == second
    for _, all_reduces, due in first:
        assert all_reduces == (2 if place == "host" and due else 1)


def sharded(place):
    """A model whose parameters FSDP splits, against the same model on this process alone."""
    torch.manual_seed(0)
    plain, model = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
    model.load_state_dict(plain.state_dict())
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    rule = AmaxScale(init_scale=1024.0, half_life=3.0)
    scaler = (GradScaler if place == "host" else OnDevice)(policy=rule)
    expected = rule.init()
    for size in (1.0, 2.0**-8, 4.0, INF, 0.5):
        inputs = torch.arange(8.0).view(2, 4) * size
        optimizer.zero_grad()
        plain.zero_grad()
        scaler.scale(model(inputs).sum()).backward()
        plain(inputs).sum().backward()
        scaler.step(optimizer)
        scaler.update()
        amax = max(parameter.grad.abs().max().item() for parameter in plain.parameters())
        expected = rule.update(expected, not np.isfinite(amax), amax=amax)
        assert scaler.observed.state == expected
    return tuple(expected)


@pytest.mark.parametrize("place", ["host", "device"])
def test_the_parts_of_a_sharded_gradient_count_together(ranks, place):
    first, second = ranks(2).run(sharded, place)
    assert first == second


def different(place, leaf):
    _, scaler = scaler_of(place)
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler.load_state_dict({**scaler.state_dict(), f"_{leaf}": 1.0 + dist.get_rank()})
    message = None
    for _ in range(2):  # on a device it is known one step later
        scaler.scale(parameter.sum()).backward()
        try:
            scaler.step(optimizer)
        except ScaleMismatchError as error:
            message = str(error)
            break
        scaler.update()
    return message


@pytest.mark.parametrize("leaf", ["peak", "reach"])
@pytest.mark.parametrize("place", ["host", "device"])
def test_processes_with_different_sizes_all_raise(ranks, place, leaf):
    first, second = ranks(2).run(different, place, leaf)
    assert first == second
    assert f"{leaf} is 1 on one and 2 on another" in first
