"""Calls of ``load_state_dict(strict=False)``: those that load nothing are told, with their line."""

import copy

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from gradscaler.diagnose import Monitor
from gradscaler.diagnose._monitor import unfit_states
from gradscaler.diagnose._monitor.by_identity import ByIdentity
from tests.support.marked_lines import lines_marked_in

pytestmark = pytest.mark.usefixtures("own_random_numbers_and_one_thread")
line_with = lines_marked_in(__file__)


@pytest.fixture
def model(monkeypatch):
    load = unfit_states.noting(nn.Module.load_state_dict)
    monkeypatch.setattr(nn.Module, "load_state_dict", load)
    monkeypatch.setattr(unfit_states, "places", [])
    monkeypatch.setattr(unfit_states, "copies", [])
    monkeypatch.setattr(unfit_states, "whole", ByIdentity())
    monkeypatch.setattr(unfit_states, "loaded", ByIdentity())
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


def train(model, after=lambda step: None):
    """Take ten steps, and return what a monitor tells of them."""
    told, optimizer = [], torch.optim.SGD(model.parameters(), lr=0.01)
    with Monitor(model=model, tell=told.append):
        for step in range(10):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            after(step)
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


def test_a_target_that_is_the_model_is_told(model):
    target = model
    (told,) = train(model, lambda _: target.load_state_dict(model.state_dict()))  # one object
    assert told.kind == "misuse"
    assert f"{line_with('one object')} copied a model onto itself" in told.cause
    assert told.line == line_with("one object")


def test_a_state_that_is_kept_without_a_copy_is_told(model):
    kept = model.state_dict()
    (told,) = train(model, lambda _: model.load_state_dict(kept))
    assert "copy.deepcopy(model.state_dict())" in told.action


def test_copies_of_a_model_and_one_before_training_are_not_told(model):
    target, kept = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    for _ in range(5):
        model.load_state_dict(model.state_dict())
    tied = nn.ModuleList([model[0], nn.Linear(4, 1)])  # shares a layer alone

    def after(step):
        target.load_state_dict(model.state_dict())
        copy.deepcopy(model).load_state_dict(model.state_dict(), assign=True)
        target.load_state_dict(kept)
        tied.load_state_dict({**tied.state_dict(), "1.weight": torch.ones(1, 4)})
        with torch.device("meta"):
            nn.Linear(4, 1).load_state_dict(nn.Linear(4, 1).state_dict())
        nn.ReLU().load_state_dict({})

    assert train(model, after) == []


@pytest.mark.parametrize(
    ("of", "kind", "is_whole", "is_told"),
    [
        ("model", torch.optim.Adam, True, True),
        ("model", torch.optim.Adam, False, False),  # the head is new
        ("teacher", torch.optim.Adam, True, False),
        ("model", torch.optim.SGD, True, False),  # which keeps no state
    ],
)
def test_weights_that_were_loaded_are_named_where_the_loss_rises_at_once(
    model, of, kind, is_whole, is_told
):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    _ = None if is_whole else state.pop("1.bias")
    loaded = {"model": model, "teacher": copy.deepcopy(model)}[of]
    loaded.load_state_dict(state, strict=is_whole)  # all of it
    optimizer = kind(model.parameters(), lr=1e-4)
    with Monitor(model=model, tell=[].append) as monitor:
        for step in range(60):
            target = 2.0 if 0 < step < 8 else 1.0
            optimizer.zero_grad()
            (model(torch.randn(8, 4)).tanh().mean() / 100 + target).backward()
            optimizer.step()
    line = line_with("all of it")
    assert (f"The weights were loaded at {line}" in str(monitor.verdict)) is is_told


@pytest.mark.parametrize(("of", "is_told"), [("model", True), ("teacher", False)])
def test_weights_that_are_loaded_in_the_middle_are_named_where_the_loss_rises(model, of, is_told):
    first = copy.deepcopy(model.state_dict())
    loaded = {"model": model, "teacher": copy.deepcopy(model)}[of]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with Monitor(model=model, tell=[].append) as monitor:
        for step in range(120):
            if step == 80:
                loaded.load_state_dict(first)  # in the middle
                optimizer.param_groups[0]["lr"] = 1e-4
            jump = 20.0 * (step >= 80 and of == "teacher")
            optimizer.zero_grad()
            ((model(torch.randn(8, 4)) - 5).square().mean() + jump).backward()
            optimizer.step()
    said = f"load_state_dict() at {line_with('in the middle')} brought before step 81"
    assert "rose at step 81" in str(monitor.verdict)
    assert (said in str(monitor.verdict)) is is_told
