"""A value that other code writes to a parameter stays, in whatever way it is written."""

import math

import pytest
import torch
from torch import nn

from gradscaler.torch import MasterWeights

STORES = ("float32", "remainder16", "stochastic")


def of_numpy(parameter, value):
    parameter.detach().numpy()[...] = value.numpy()


def of_dlpack(parameter, value):
    torch.from_dlpack(parameter.detach().numpy()).copy_(value)


def under_no_grad(parameter, value):
    with torch.no_grad():
        parameter.copy_(value)


def of_storage(parameter, value):
    parameter.data = value.clone()


WRITES = {
    "data.copy_": lambda p, value: p.data.copy_(value),
    "data[:] =": lambda p, value: p.data.__setitem__(slice(None), value),
    "data.zero_().add_": lambda p, value: p.data.zero_().add_(value),
    "detach().numpy()": of_numpy,
    "another library": of_dlpack,
    "no_grad": under_no_grad,
    "data =": of_storage,
}


def make(store, dtype=torch.float16, chunk_elements=None, lr=0.0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4, bias=False), nn.Linear(4, 3, bias=False))
    return model, MasterWeights(
        torch.optim.Adam, model, dtype=dtype, store=store, chunk_elements=chunk_elements, lr=lr
    )


def step(model, optimizer):
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape).to(parameter.dtype)
    optimizer.step()


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("chunk_elements", [None, 3], ids=["whole", "in spans"])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_written_value_stays_and_the_rest_keeps_its_low_bits(write, store, chunk_elements, steps):
    model, optimizer = make(store, chunk_elements=chunk_elements)
    for _ in range(steps):
        step(model, optimizer)
    weight, other = model.parameters()
    kept, kept_other = optimizer.wide(weight), optimizer.wide(other)
    value = weight.detach().clone()
    value[1:3] = 0.1875
    WRITES[write](weight, value)
    step(model, optimizer)
    assert torch.equal(weight, value)
    assert torch.equal(optimizer.wide(other), kept_other)
    is_kept = (value.float() - kept).abs() < 2.0**-11
    assert torch.equal(optimizer.wide(weight)[is_kept], kept[is_kept])
    if store == "float32":
        assert torch.equal(optimizer.wide(weight)[1:3], torch.full((2, 5), 0.1875))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_masters_that_others_have_not_set_keep_every_bit(dtype):
    """Also where a value is Inf, NaN or a zero of either sign."""
    model, optimizer = make("float32", dtype)
    with torch.no_grad():
        model[0].weight[0] = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0])
    step(model, optimizer)
    master = optimizer.state[model[0].weight]["master"]
    master[1] = torch.tensor([1e-30, -1e-30, 3e38, -3e38, 1 / 3])
    model[0].weight.data[1] = master[1].to(dtype)
    before = optimizer.wide(model[0].weight)
    model[1].weight.data.zero_()  # so that masters are compared one by one
    step(model, optimizer)
    assert torch.equal(optimizer.wide(model[0].weight).nan_to_num(7), before.nan_to_num(7))
    assert torch.equal(master.nan_to_num(7), before.nan_to_num(7))


@pytest.mark.parametrize("store", STORES)
def test_a_parameter_that_became_nan_can_be_reset(store):
    model, optimizer = make(store)
    weight = model[0].weight
    for value in (math.nan, math.inf, 0.5):
        weight.data.fill_(value)
        step(model, optimizer)
    assert torch.equal(weight, torch.full_like(weight, 0.5))


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_that_are_pruned_stay_zero_to_half_of_the_smallest_spacing(store, dtype):
    """A zero of either sign, with the remainder of another value."""
    model, optimizer = make(store, dtype, lr=1e-3)
    for _ in range(3):
        step(model, optimizer)
    for parameter in model.parameters():
        parameter.data.mul_(torch.arange(parameter.numel()).view_as(parameter) % 2)
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.param_groups[0]["lr"] = 0.0
    step(model, optimizer)
    smallest = 2.0**-24 if dtype is torch.float16 else 2.0**-133
    for parameter, value in zip(model.parameters(), kept, strict=True):
        wide = optimizer.wide(parameter)[value == 0]
        assert len(wide) >= 6
        assert (wide.abs() <= smallest / 2).all()


def test_an_average_copied_into_the_parameters_is_where_training_goes_on():
    """As float32 training goes on from the same values; steps are below 16 bits' spacing."""
    model, optimizer = make("float32", lr=1e-5)
    for _ in range(3):
        step(model, optimizer)
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data * 0.5)
    native = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    reference = torch.optim.Adam(native, lr=1e-5)
    for own, other in zip(model.parameters(), native, strict=True):
        state = optimizer.state[own].items()
        reference.state[other] = {k: v.clone() for k, v in state if k != "master"}
    for _ in range(3):
        step(model, optimizer)
        for own, other in zip(model.parameters(), native, strict=True):
            other.grad = own.grad.float()
        reference.step()
    for own, other in zip(model.parameters(), native, strict=True):
        assert torch.equal(optimizer.wide(own), other)


# In any layout.


def strided():
    """A parameter whose memory has gaps, as a slice of a fused matrix."""
    return torch.randn(4, 9)[:, :3]


LAYOUTS = {
    "a slice of columns": strided,
    "a transposed slice": lambda: torch.randn(9, 4)[:3].t()[:, ::2],
    "every second row": lambda: torch.randn(8, 3)[::2],
    "one row for all": lambda: torch.randn(1, 3).expand(4, 3),
    "transposed": lambda: torch.randn(3, 4).t(),
    "an offset": lambda: torch.randn(20)[5:17].view(4, 3),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("store", ["float32", "remainder16"])
@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, None])
def test_a_parameter_of_any_layout_steps_as_on_float32(layout, store, optimizer_class, dtype):
    torch.manual_seed(0)
    parameter = nn.Parameter(LAYOUTS[layout]())
    native = nn.Parameter(parameter.detach().clone(memory_format=torch.contiguous_format))
    if dtype is None and layout == "one row for all":
        parameter = nn.Parameter(parameter.detach().clone())  # float32 itself cannot be stepped so
    options = {"dtype": dtype, "store": store, "chunk_elements": 5}
    optimizer = MasterWeights(optimizer_class, [parameter], lr=0.01, **options)
    reference = optimizer_class([native], lr=0.01)
    for _ in range(4):
        grad = torch.randn(parameter.shape).to(dtype or torch.float32)
        parameter.grad, native.grad = grad, grad.float()
        optimizer.step()
        reference.step()
    assert torch.equal(optimizer.wide(parameter), native)


@pytest.mark.parametrize("store", ["float32", "remainder16"])
@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_model_whose_layout_changes_steps_as_on_float32(store, optimizer_class, steps):
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 2, bias=False)
    native = nn.Parameter(model.weight.detach().clone())
    optimizer = MasterWeights(optimizer_class, model, store=store, lr=0.01, chunk_elements=7)
    reference = optimizer_class([native], lr=0.01)
    for i in range(4):
        if i == steps:
            model.to(memory_format=torch.channels_last)
            state = optimizer.state[model.weight]
            for key in {"exp_avg", "exp_avg_sq", "sum"} & state.keys():
                state[key] = state[key].to(memory_format=torch.channels_last)
        grad = torch.randn(native.shape).half()
        model.weight.grad = grad.to(memory_format=torch.channels_last) if i >= steps else grad
        native.grad = grad.float()
        optimizer.step()
        reference.step()
    assert torch.equal(optimizer.wide(model.weight), native)


@pytest.mark.parametrize("store", ["float32", "remainder16"])
def test_a_loaded_state_of_another_layout_steps_as_on_float32(store):
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 2, bias=False).to(memory_format=torch.channels_last)
    native = nn.Parameter(model.weight.detach().clone())
    optimizer = MasterWeights(torch.optim.AdamW, model, store=store, lr=0.01, chunk_elements=7)
    reference = torch.optim.AdamW([native], lr=0.01)
    for i in range(4):
        if i == 2:
            saved = optimizer.state_dict()
            key = "master" if store == "float32" else "remainder"
            saved["state"][0] = {**saved["state"][0], key: saved["state"][0][key].contiguous()}
            optimizer.load_state_dict(saved)
        grad = torch.randn(native.shape).half()
        model.weight.grad = grad.to(memory_format=torch.channels_last)
        native.grad = grad.float()
        optimizer.step()
        reference.step()
    assert torch.equal(optimizer.wide(model.weight), native)


def test_a_master_lies_in_memory_as_its_parameter_so_that_it_is_stepped_in_spans(monkeypatch):
    parameter = nn.Parameter(strided())
    optimizer = MasterWeights(
        torch.optim.AdamW, [parameter], store="float32", lr=0.1, chunk_elements=5
    )
    sizes = []
    native = torch.optim.AdamW.step

    def counting(inner, *args):
        sizes.append(sum(p.numel() for group in inner.param_groups for p in group["params"]))
        return native(inner, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", counting)
    for _ in range(2):
        parameter.grad = torch.ones(4, 3).half()
        optimizer.step()
    assert sizes == [12, 5, 5, 2]
