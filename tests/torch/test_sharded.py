"""``ShardedGradScaler`` in one process, beside FSDP's own class."""

import pytest
import torch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as Native

from gradscaler.torch import ShardedGradScaler

CLASSES = [ShardedGradScaler, Native]


class OneProcess:
    """A stand-in for a process group, such as PyTorch's own tests and others pass."""

    def rank(self):
        return 0

    def size(self):
        return 1


def sparse(values, dtype):
    """A gradient of three values, two of them for the same element."""
    where = [[0, 1, 1], [2, 0, 0]]
    return torch.sparse_coo_tensor(where, values, (2, 3), dtype=dtype, check_invariants=True)


@pytest.mark.parametrize("scaler_class", CLASSES)
@pytest.mark.parametrize(
    ("values", "dtype", "found"),
    [
        ([16.0, 32.0, 64.0], torch.float32, 0.0),
        ([16.0, 32.0, float("inf")], torch.float32, 1.0),
        ([1.0, 2.0**15, 2.0**15], torch.float16, 1.0),  # whose sum overflows
    ],
)
def test_gradients_are_unscaled_without_saying_what_float16_is_for(
    scaler_class, values, dtype, found
):
    scaler = scaler_class("cpu", init_scale=2.0, process_group=OneProcess())
    scaler.scale(torch.ones(1))
    parameter = torch.zeros(2, 3, dtype=dtype, requires_grad=True)
    parameter.grad = sparse(values, dtype)
    optimizer = torch.optim.SGD([parameter])
    flags = scaler._unscale_grads_(optimizer, torch.tensor([0.5]), torch.zeros(1))
    assert flags[parameter.device].item() == found
    if not found:
        assert torch.equal(parameter.grad.to_dense(), sparse(values, dtype).to_dense() / 2)


def test_an_overflow_skips_the_step():
    scaler = ShardedGradScaler("cpu", init_scale=2.0, process_group=OneProcess())
    scaler.scale(torch.ones(1))
    parameter = torch.ones(1, requires_grad=True)
    parameter.grad = torch.tensor([float("inf")])
    assert scaler.step(torch.optim.SGD([parameter], lr=1.0)) is None
    assert parameter.item() == 1.0


@pytest.mark.parametrize("scaler_class", CLASSES)
def test_the_group_can_be_set(scaler_class):
    scaler, group = scaler_class("cpu"), OneProcess()
    scaler.process_group = group
    assert scaler.process_group is group


def test_only_a_group_can_be_set():
    scaler = ShardedGradScaler("cpu", process_group=OneProcess())
    with pytest.raises(TypeError, match="process_group must be a process group"):
        scaler.process_group = 1
    assert isinstance(scaler.process_group, OneProcess)
