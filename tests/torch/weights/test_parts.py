"""An optimizer casts what it steps, and leaves the rest of a model to others."""

import pytest
import torch
from torch import nn

from gradscaler import ParameterError
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
        f"{part}.{name}"
        for part in ("generator", "discriminator")
        for name in ("table", "1.weight", "1.bias", "1.running_mean", "1.running_var")
    }


def test_a_part_that_no_master_weights_step_stays_as_it_is():
    model = Adversaries()
    MasterWeights(torch.optim.SGD, model.generator.parameters(), model=model, lr=0.1)
    assert model.generator[0].weight.dtype is torch.float16
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


@pytest.mark.parametrize("of", [lambda model: model, lambda model: model.parameters()])
def test_a_cast_that_gives_the_model_new_parameters_is_refused(monkeypatch, of):
    model = Adversaries()
    held = list(model.parameters())
    name = "get_overwrite_module_params_on_conversion"
    monkeypatch.setattr(torch.__future__, name, lambda: True)
    with pytest.raises(ParameterError, match="which no optimizer steps: set it to False"):
        MasterWeights(torch.optim.SGD, of(model), model=model, lr=0.1)
    assert all(map(torch.Tensor.is_set_to, held, model.parameters()))


def test_a_cast_that_swaps_what_the_parameters_hold_is_stepped(monkeypatch):
    model, reference = Adversaries(), Adversaries()
    name = "get_swap_module_params_on_conversion"
    monkeypatch.setattr(torch.__future__, name, lambda: True)
    optimizer = MasterWeights(torch.optim.SGD, model, lr=2.0**-9)
    step([optimizer], model)
    step([torch.optim.SGD(reference.parameters(), lr=2.0**-9)], reference)
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert not other.requires_grad or torch.equal(optimizer.wide(parameter), other)


class Remade(nn.Linear):
    """Makes its parameters again in each conversion."""

    def _apply(self, *args):
        super()._apply(*args)
        self.weight = nn.Parameter(self.weight.detach().clone())
        return self


def test_a_module_that_replaces_its_parameters_in_the_cast_is_refused():
    with pytest.raises(ParameterError, match="Sequential has replaced its parameters in the cast"):
        MasterWeights(torch.optim.SGD, nn.Sequential(Remade(2, 2)), lr=0.1)


def test_a_model_that_holds_none_of_the_parameters_is_refused():
    model = Adversaries()
    stale = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    with pytest.raises(ParameterError, match="holds none of the parameters"):
        MasterWeights(torch.optim.SGD, stale, model=model, lr=0.1)
    assert model.scale.weight.dtype is torch.float32


def columns(matrix):
    return nn.Parameter(matrix[:, :2]), nn.Parameter(matrix[:, 2:])


def rows(matrix):
    return nn.Parameter(matrix[:2]), nn.Parameter(matrix[1:])


def copied(matrix):
    return nn.Parameter(matrix), nn.Parameter(matrix)


@pytest.mark.parametrize("share", [rows, copied])
@pytest.mark.parametrize("dtype", [torch.float16, None])
def test_parameters_that_share_memory_are_refused(share, dtype):
    first, second = share(torch.ones(3, 4, dtype=torch.float32 if dtype else torch.float16))
    with pytest.raises(ParameterError, match=r"two parameters share memory, one of shape"):
        MasterWeights(torch.optim.SGD, [first, second], dtype=dtype, lr=0.1)
    optimizer = MasterWeights(torch.optim.SGD, [first], dtype=None, lr=0.1)
    with pytest.raises(ParameterError, match="so that each would undo the other's step"):
        optimizer.add_param_group({"params": [second]})
    assert len(optimizer.param_groups) == 1
    assert second.dtype is first.dtype


def test_weights_that_are_tied_by_their_data_are_refused_and_named():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight.data = model[0].weight.data
    with pytest.raises(ParameterError, match=r"share memory, '0\.weight' and '1\.weight'"):
        MasterWeights(torch.optim.SGD, model, lr=0.1)
    model[1].weight = model[0].weight
    MasterWeights(torch.optim.SGD, model, lr=0.1)


def test_parameters_side_by_side_in_one_memory_are_stepped():
    first, second = columns(torch.ones(3, 4))
    optimizer = MasterWeights(torch.optim.SGD, [first, second], lr=0.25)
    optimizer.add_param_group({"params": list(torch.nn.LSTM(2, 2).parameters())})
    first.grad, second.grad = torch.ones_like(first), torch.ones_like(second)
    optimizer.step()
    assert torch.equal(optimizer.wide(second), torch.full((3, 2), 0.75))
