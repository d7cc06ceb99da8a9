"""The first warning of a failure comes in the step that shows it, whatever the clock says."""

import math
import re
import warnings

import pytest

pytest.importorskip("torch")

import torch

from gradscaler import FixedScale
from gradscaler.diagnose import FindingWarning, Monitor
from gradscaler.diagnose._monitor.warning_filter import WarningFilter  # it has no other door
from gradscaler.diagnose._record.finding import Finding
from gradscaler.torch import GradScaler

pytestmark = pytest.mark.usefixtures("own_random_numbers_and_one_thread")


def quotient(outputs, is_bad):
    """A mean over a mask, which is 0 / 0 if the mask is empty."""
    mask = torch.full_like(outputs, not is_bad)
    return (outputs.square() * mask).sum() / mask.sum()


def logarithm(outputs, is_bad):
    return (outputs.square() - 100 * is_bad).log().mean()


def root(outputs, is_bad):
    """The slope of a root at 0 is Inf, and the loss is finite."""
    return (outputs * (not is_bad)).square().sum().sqrt()


def hidden_logarithm(outputs, is_bad):
    """The branch of where() that is not taken."""
    inputs = outputs.square() * (not is_bad)
    return torch.where(inputs > 0, inputs.log(), outputs).square().mean()


def stepped(scaler, optimizer, loss):
    """Take a step; return its warnings."""
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scaler.update()
    return caught


def warned_of(loss_of, bad, steps=60):
    """The steps with a warning, and the kind of the verdict."""
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler, found = GradScaler(policy=FixedScale(1.0)), []
    with Monitor(scaler, model) as monitor:
        for step in range(1, steps + 1):
            caught = stepped(scaler, optimizer, loss_of(model(torch.randn(8, 4)), step in bad))
            found += [step] * any(issubclass(each.category, FindingWarning) for each in caught)
        return found, monitor.verdict.kind


@pytest.mark.parametrize("bad", [{7}, {37}, {37, 55}])
@pytest.mark.parametrize("loss_of", [quotient, root, hidden_logarithm])
def test_code_that_fails_once_is_told_in_that_step(loss_of, bad):
    found, kind = warned_of(loss_of, bad)
    assert found[0] == min(bad)
    assert kind != "normal"


@pytest.mark.parametrize("bad", [{37}, {59}])
def test_one_batch_of_nan_does_no_harm(bad):
    labels = torch.tensor([[0.5], [math.nan]])
    found, kind = warned_of(lambda out, is_bad: (out - labels[int(is_bad)]).square().sum(), bad)
    assert (found, kind) == ([], "normal")


def test_an_event_is_looked_at_in_its_step_at_numbers_that_grow():
    reported, looks = WarningFilter(0), []
    for step in range(1, 101):
        reported.note_event("failure")
        if reported.is_due(step):
            reported._next = math.inf  # no look for the clock's sake
            looks.append(step)
    assert looks == [1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96]


def test_an_uncertain_finding_is_no_surer_for_two_looks_one_after_the_other():
    reported, doubtful = WarningFilter(0), Finding("data", "x", "y", is_certain=False)
    assert reported.select([doubtful], 5, 5, is_last=False) == []
    assert reported.select([doubtful], 6, 5, is_last=False) == []
    assert reported.select([doubtful], 15, 5, is_last=False) == [doubtful]


@pytest.mark.parametrize(
    ("operation", "slope"),
    [
        ("pow", lambda inputs: inputs.pow(1 / 3)),
        ("sqrt", lambda inputs: inputs.sqrt()),
        ("log", lambda inputs: torch.where(inputs > 0, inputs.log(), 0)),
    ],
)
def test_a_slope_of_inf_is_told_at_the_largest_scale_and_is_no_overflow(operation, slope):
    """Its Inf * 0 is NaN in one layer, and its Inf * 1 is Inf in another, at each scale."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler, told = GradScaler(), {}
    with Monitor(scaler, model) as monitor:
        for step in range(1, 26):
            with torch.autocast("cpu", torch.float16):
                hidden = model[1](model[0](torch.randn(8, 4))) * torch.arange(8).sign()
                loss = (model[2](slope(hidden.float())).float()).sum()
            caught = stepped(scaler, optimizer, loss)
            told.update((step, str(each.message)) for each in caught)
        assert monitor.verdict.kind == "nan"
    assert min(told) == 2
    assert all(re.search(rf"gradient of \w*{operation}", text) for text in told.values())
