"""A state dict that does not fit is refused, and changes nothing."""

import copy
import math

import pytest
import torch
from torch import nn

from gradscaler.torch import MasterWeights

KEYS = {"float32": "master", "remainder16": "remainder", "stochastic": "rounding"}


def make(store, steps):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = MasterWeights(torch.optim.Adam, model, store=store, lr=0.01)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return model, optimizer


def all_of(model, optimizer, exact):
    wide = [optimizer.wide(parameter) for parameter in model.parameters()]
    return exact([wide, model.state_dict(), optimizer.state_dict()])


NO_TENSORS = {
    "None": lambda entry: None,
    "a number": lambda entry: 3.0,
    "a text": lambda entry: "remainder",
    "a list": lambda entry: entry.tolist(),
    "a meta tensor": lambda entry: entry.to("meta"),
    "a sparse tensor": lambda entry: entry.to_sparse(),
    "a complex tensor": lambda entry: entry.to(torch.complex64),
}
NO_VALUES = {
    "another shape": lambda entry: entry[:1],
    "the elements in a row": lambda entry: torch.zeros(5, dtype=entry.dtype),
}
WRONG = [(change, TypeError) for change in NO_TENSORS.values()]
WRONG += [(change, ValueError) for change in NO_VALUES.values()]


@pytest.mark.parametrize("saved_by", KEYS)
@pytest.mark.parametrize("store", KEYS)
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(("change", "error"), WRONG, ids=[*NO_TENSORS, *NO_VALUES])
def test_an_entry_that_is_none_is_refused_by_name_and_changes_nothing(
    store, saved_by, steps, change, error, exact
):
    model, optimizer = make(store, steps)
    before = all_of(model, optimizer, exact)
    _, other = make(saved_by, 3)
    state, key = copy.deepcopy(other.state_dict()), KEYS[saved_by]
    state["param_groups"][0]["lr"] = 0.5
    state["state"][2][key] = change(state["state"][2][key])
    with pytest.raises(error, match=f"the state dict's '{key}' of parameter 2 must"):
        optimizer.load_state_dict(state)
    assert all_of(model, optimizer, exact) == before


BEYOND = [
    *((dtype, value) for dtype in (torch.float32, torch.float64) for value in (math.nan, 1e30)),
    *((torch.float32, value) for value in (math.inf, -math.inf, 32768.0, -32769.0, 0.5)),
    *((torch.float16, value) for value in (math.nan, 60_000.0, 0.5)),
    *((torch.int32, value) for value in (32768, -32769, 2**16, 2**31 - 1)),
    (torch.uint16, 40_000),
]


@pytest.mark.parametrize(("dtype", "value"), BEYOND)
@pytest.mark.parametrize("store", ["float32", "remainder16"])
def test_a_remainder_that_int16_does_not_hold_is_refused(store, dtype, value, exact):
    model, optimizer = make(store, 2)
    before = all_of(model, optimizer, exact)
    _, other = make("remainder16", 3)
    state = copy.deepcopy(other.state_dict())
    state["state"][0]["remainder"] = torch.full((4, 3), value, dtype=dtype)
    with pytest.raises(ValueError, match="whole numbers from -32768 to 32767"):
        optimizer.load_state_dict(state)
    assert all_of(model, optimizer, exact) == before


@pytest.mark.parametrize(
    ("store", "dtype"),
    [
        ("float32", torch.float64),
        ("remainder16", torch.float32),
        ("remainder16", torch.float64),
        ("remainder16", torch.int64),
    ],
)
def test_entries_of_a_wider_dtype_load_as_they_were(store, dtype, exact):
    model, optimizer = make(store, 2)
    before = all_of(model, optimizer, exact)
    state = copy.deepcopy(optimizer.state_dict())
    for each in state["state"].values():
        each[KEYS[store]] = each[KEYS[store]].to(dtype)
    optimizer.load_state_dict(state)
    assert all_of(model, optimizer, exact) == before


def test_random_numbers_that_are_floats_are_refused():
    _, optimizer = make("stochastic", 2)
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["rounding"] = state["state"][0]["rounding"].double()
    with pytest.raises(TypeError, match=r"must be a dense torch\.int64 tensor with values"):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize("store", KEYS)
@pytest.mark.parametrize("params", [[0, 0, 2, 3], [0, 1, 2, 1]])
def test_a_group_that_repeats_a_parameter_is_refused(store, params, exact):
    model, optimizer = make(store, 2)
    before = all_of(model, optimizer, exact)
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0].update(params=params, lr=0.5)
    with pytest.raises(ValueError, match="the groups of the state dict repeat a parameter"):
        optimizer.load_state_dict(state)
    assert all_of(model, optimizer, exact) == before


@pytest.mark.parametrize("state", [None, 3.0, "text"])
def test_a_parameter_s_state_that_is_no_dict_changes_nothing(state, exact):
    model, optimizer = make("float32", 2)
    before = all_of(model, optimizer, exact)
    loaded = copy.deepcopy(optimizer.state_dict())
    loaded["state"][1] = state
    with pytest.raises((AttributeError, TypeError)):
        optimizer.load_state_dict(loaded)
    assert all_of(model, optimizer, exact) == before
