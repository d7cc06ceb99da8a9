"""The largest gradient is that of all processes that decide together."""

from unittest import mock

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from paddle.distributed import fleet

from gradscaler import AmaxScale
from gradscaler.paddle import GradScaler

INF = float("inf")
LARGEST = [(0.5, 3.0), (2.0**-20, 2.0**-12), (5.0, INF), (0.25, 7.0), (1.0, 1.0)]


def own_parameter(clip, interval, sharing):
    """A parameter of each rank alone; the ranks' largest gradients are those of ``LARGEST``.

    They decide together by a group, or by fleet's wrapper of the scaler.
    """
    parameter = paddle.create_parameter([4], "float32")
    optimizer = paddle.optimizer.SGD(0.1, parameters=[parameter])
    rule = AmaxScale(init_scale=1024.0, growth_interval=2, half_life=3.0, amax_interval=interval)
    scaler = GradScaler(policy=rule, group=dist.get_group(0) if sharing == "group" else None)
    if sharing == "fleet":
        scaler = fleet.distributed_scaler(scaler)
        optimizer = fleet.distributed_optimizer(optimizer)
    expected = rule.init()
    for largest in LARGEST:
        optimizer.clear_grad()
        most = paddle.to_tensor([0.0, largest[dist.get_rank()], 0.0, 0.0])
        scaler.scale((parameter * most).sum()).backward()
        due = expected.finite_steps % interval == 0 and INF not in largest
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduces:
            if clip:
                scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
        norms = clip and sharing == "fleet"  # of weights that may lie on several ranks
        assert all_reduces.call_count == 1 + due + norms
        expected = rule.update(expected, INF in largest, amax=np.float32(max(largest)))
        assert scaler.observed.state == expected
    return tuple(map(float, expected))


@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("sharing", ["group", "fleet"])
def test_one_process_large_gradient_is_everyone_s(ranks, sharing, clip, interval):
    first, second = ranks(2, mp=2).run(own_parameter, clip, interval, sharing)
    assert first == second
