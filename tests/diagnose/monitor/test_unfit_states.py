"""Calls of ``load_state_dict(strict=False)``: those that load nothing are told, with their line."""

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from gradscaler.diagnose import Monitor
from gradscaler.diagnose._monitor import unfit_states
from tests.support.marked_lines import lines_marked_in

pytestmark = pytest.mark.usefixtures("own_random_numbers_and_one_thread")
line_with = lines_marked_in(__file__)


@pytest.fixture
def model(monkeypatch):
    load = unfit_states.noting(nn.Module.load_state_dict)
    monkeypatch.setattr(nn.Module, "load_state_dict", load)
    monkeypatch.setattr(unfit_states, "places", [])
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


def train(model):
    """Take ten steps, and return what a monitor tells of them."""
    told, optimizer = [], torch.optim.SGD(model.parameters(), lr=0.01)
    with Monitor(model=model, tell=told.append):
        for _ in range(10):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    return told


def test_a_state_of_which_no_key_fits_is_told(model):
    state = {f"module.{name}": value for name, value in model.state_dict().items()}
    model.load_state_dict(state, strict=False)  # no key fits
    (told,) = train(model)
    assert told.kind == "misuse"
    assert "none of its 4 keys (such as module.0.weight, not 0.weight)" in told.cause
    assert told.line == line_with("no key fits")


@pytest.mark.parametrize("keys", [{"0.bias", "head.bias"}, {"0.bias"}, set()])
def test_a_part_that_fits_is_not_told(model, keys):
    state = {key: torch.zeros(4) for key in keys}
    found = model.load_state_dict(state, strict=False)
    assert set(found.unexpected_keys) == keys - {"0.bias"}
    assert train(model) == []


def test_an_error_and_an_empty_model_pass(model):
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({"0.bias": torch.zeros(4)})
    nn.ReLU().load_state_dict({"inplace": torch.zeros(1)}, strict=False)
    assert unfit_states.places == []
