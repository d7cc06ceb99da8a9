"""Processes on devices without float64 decide and measure norms as they do elsewhere."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

from gradscaler import ScaleMismatchError
from gradscaler.torch import GradScaler
from tests.support.no_float64 import no_float64

INF = float("inf")
WEIGHTS = [1.0, 2.0, 3.0, 4.0]


def train(has_float64, norm_type):
    """The weights, the scale and the norms of this process; the last gradients overflow on one."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    parameter = torch.nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))
    optimizer, scaler = torch.optim.SGD([parameter], 1.0), GradScaler(init_scale=1024.0)
    norms = []
    with contextlib.nullcontext() if has_float64 else no_float64():
        for last in (WEIGHTS[-1], INF, WEIGHTS[-1]):
            gradient = torch.tensor([*WEIGHTS[:-1], last])
            scaler.scale(torch.ones(()))
            parameter.grad = distribute_tensor(gradient * scaler.get_scale(), mesh, [Shard(0)])
            norms.append(scaler.clip_grad_norm_(optimizer, 1.0, norm_type).item())
            scaler.step(optimizer)
            scaler.update()
    return parameter.full_tensor().tolist(), scaler.get_scale(), norms


@pytest.mark.parametrize("norm_type", [2.0, 3.0, INF])
def test_they_skip_together_and_clip_by_the_norm_of_all(ranks, norm_type):
    norm = torch.linalg.vector_norm(torch.tensor(WEIGHTS), norm_type).item()
    for values, scale, norms in [
        *ranks(2).run(train, False, norm_type),
        *ranks(2).run(train, True, norm_type),
    ]:
        assert values == pytest.approx([-2 * weight / norm for weight in WEIGHTS], rel=1e-4)
        assert scale == 512.0
        assert norms == pytest.approx([norm, INF, norm])


def different():
    scaler = GradScaler(init_scale=1024.0 * (1 + dist.get_rank()), group=dist.group.WORLD)
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    with no_float64():
        for _ in range(2):
            scaler.scale(parameter.sum()).backward()
            try:
                scaler.step(optimizer)
            except ScaleMismatchError as error:
                return str(error)
            scaler.update()
    return ""


def test_processes_with_different_scales_raise_there(ranks):
    first, second = ranks(2).run(different)
    assert first == second
    assert "scale is 1024 on one and 2048 on another" in first
