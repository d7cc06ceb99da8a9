"""Gradients that lie side by side under DDP: in its own buckets, or in our buffers."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradscaler._on_torch.flat import side_by_side
from gradscaler.torch import GradScaler, flat_gradients
from tests.support.eager import library

INF = float("inf")


def trained(kind, set_to_none):
    """The result of each step, and the number of tensors that hold the last gradients."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(5, 5) for _ in range(4)))
    parallel = DistributedDataParallel(model, gradient_as_bucket_view="bucket" in kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if "flat" in kind:
        flat_gradients(model)
    scaler = GradScaler(init_scale=2.0**8, growth_interval=2)
    left = []
    for step in range(5):
        optimizer.zero_grad(set_to_none)
        numbers = torch.Generator().manual_seed(10 * step + dist.get_rank())
        x = torch.randn(3, 5, generator=numbers) * (INF if (step, dist.get_rank()) == (2, 1) else 1)
        scaler.scale(parallel(x).square().mean()).backward()
        pieces = len(side_by_side([parameter.grad for parameter in model.parameters()]))
        if step % 2:
            scaler.clip_grad_norm_(optimizer, INF)
        scaler.step(optimizer)
        scaler.update()
        left.append((scaler.get_scale(), scaler.last_step(optimizer).applied))
        left.append(library.exact([parameter.grad for parameter in model.parameters()]))
        left.append(library.exact([parameter.detach() for parameter in model.parameters()]))
    return left, pieces


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("kind", ["flat", "buckets", "flat and buckets"])
def test_a_training_under_ddp_is_the_same_to_the_bit(ranks, kind, set_to_none):
    ordinary = ranks(2).run(trained, "ordinary", set_to_none)
    for (left, pieces), (expected, others) in zip(
        ranks(2).run(trained, kind, set_to_none), ordinary, strict=True
    ):
        assert [scale for scale, _ in left[::3]] == [256.0, 512.0, 256.0, 256.0, 512.0]
        assert left == expected
        assert pieces == 1 < others
