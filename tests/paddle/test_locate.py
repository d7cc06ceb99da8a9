"""What ``locate`` does with tensors that only Paddle has."""

import paddle
from paddle import nn

from gradscaler.diagnose import locate


def test_a_tensor_that_is_spread_over_processes_is_not_read(monkeypatch):
    distributed = paddle.distributed
    mesh = distributed.ProcessMesh([0], dim_names=["x"])
    spread = distributed.shard_tensor(paddle.zeros([4]), mesh, [distributed.Replicate()])
    read = []
    monkeypatch.setattr(paddle.Tensor, "numpy", lambda tensor: read.append(tensor))
    assert locate(nn.Linear(1, 1), lambda: (spread.log() + 1).sum()) is None
    assert not any(each.is_dist() for each in read)
