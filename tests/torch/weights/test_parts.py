"""An optimizer casts what it steps, and leaves the rest of a model to others."""

import pytest
import torch
from torch import nn

from gradscaler.torch import MasterWeights


class Adversaries(nn.Module):
    """A generator and a discriminator, each with a buffer, in one module."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
        self.discriminator = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
        self.generator.register_buffer("table", torch.full((2,), 1 / 3))
        self.discriminator.register_buffer("table", torch.full((2,), 1 / 3))
        self.scale = nn.Linear(2, 2).requires_grad_(requires_grad=False)


def by_module(model):
    return list(model.generator.parameters()), list(model.discriminator.parameters())


def by_rank(model):
    """As with Muon for matrices and Adam for vectors: parts that share modules."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim < 2]


def step(optimizers, model):
    torch.manual_seed(1)
    for p in model.parameters():
        p.grad = torch.randn(p.shape).half().to(p.dtype) if p.requires_grad else None
    for optimizer in optimizers:
        optimizer.step()


@pytest.mark.parametrize("parts_of", [by_module, by_rank])
@pytest.mark.parametrize("store", ["float32", "remainder16"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_optimizers_of_parts_of_a_model_step_as_on_float32(parts_of, store, order):
    model, reference = Adversaries(), Adversaries()
    parts, others = parts_of(model), parts_of(reference)
    optimizers = [
        MasterWeights(torch.optim.SGD, parts[i], model=model, store=store, lr=2.0**-9)
        for i in order
    ]
    native = [torch.optim.SGD(others[i], lr=2.0**-9) for i in order]
    for _ in range(3):
        step(optimizers, model)
        step(native, reference)
    for i, optimizer in zip(order, optimizers, strict=True):
        for parameter, other in zip(parts[i], others[i], strict=True):
            assert torch.equal(optimizer.wide(parameter), other)
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    wide = {name for name, dtype in dtypes.items() if dtype is torch.float32}
    assert wide == {
        f"{part}.1.{name}"
        for part in ("generator", "discriminator")
        for name in ("weight", "bias", "running_mean", "running_var")
    }


def test_a_part_that_no_master_weights_step_stays_as_it_is():
    model = Adversaries()
    MasterWeights(torch.optim.SGD, model.generator.parameters(), model=model, lr=0.1)
    assert model.generator[0].weight.dtype is torch.float16
    assert model.generator.table.dtype is torch.float16
    assert model.scale.weight.dtype is torch.float16  # it is frozen
    assert {tensor.dtype for tensor in model.discriminator.state_dict().values()} == {
        torch.float32,
        torch.int64,
    }


def test_a_part_that_is_added_later_has_all_its_bits():
    model = Adversaries()
    start = model.discriminator[0].weight.detach().clone()
    optimizer = MasterWeights(torch.optim.SGD, model.generator.parameters(), model=model, lr=0.1)
    optimizer.add_param_group({"params": model.discriminator[0].parameters()})
    assert model.discriminator[0].weight.dtype is torch.float16
    assert torch.equal(optimizer.wide(model.discriminator[0].weight), start)
