"""Gradients that are not multiplied by the scale that a scaler divides by, and look-alikes."""

import math

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_

from gradscaler.diagnose import Monitor
from gradscaler.torch import GradScaler
from tests.support.marked_lines import lines_marked_in

line_with = lines_marked_in(__file__)
pytestmark = pytest.mark.usefixtures("own_random_numbers_and_one_thread")
SCALE = 2.0**16


def scaled(loss, scaler):
    scaler.scale(loss).backward()


def dropped(loss, scaler):
    scaler.scale(loss)
    loss.backward()


def verdict_on(change, passes=1, backward=scaled):
    """The verdict on steps before which the code changes the gradients of a scaled loss."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=SCALE)
    with Monitor(scaler, model, tell=[].append) as monitor:
        for _ in range(30):
            optimizer.zero_grad()
            for _ in range(passes):
                loss = mse_loss(model(torch.randn(16, 8)), torch.randn(16, 4)) / passes
                backward(loss, scaler)  # backward
            change(model, optimizer, scaler)
            scaler.step(optimizer)  # step
            scaler.update()
    return monitor.verdict


def divided(model, optimizer, scaler):
    for each in model.parameters():
        each.grad.div_(scaler.get_scale())


def replaced(model, optimizer, scaler):
    for each in model.parameters():
        each.grad = each.grad * (1 / scaler.get_scale())


def divided_and_clipped(model, optimizer, scaler):
    divided(model, optimizer, scaler)
    clip_grad_norm_(model.parameters(), 1e-2)


def clipped_to_a_limit_of_its_own(model, optimizer, scaler):
    norm = math.hypot(*(float(each.grad.norm()) for each in model.parameters()))
    for each in model.parameters():
        each.grad.mul_(torch.rand(()) * 0.1 / norm)


def unscaled(model, optimizer, scaler):
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 1e-6)


def averaged(model, optimizer, scaler):
    for each in model.parameters():
        each.grad.div_(64)


def untouched(model, optimizer, scaler):
    pass


def clipped_by_value(model, optimizer, scaler):
    for each in model.parameters():
        each.grad.clamp_(-100, 100)


@pytest.mark.parametrize(
    "change",
    [divided, replaced],
    ids=lambda f: f.__name__,
)
def test_gradients_that_are_divided_once_too_often_are_told(change):
    found = verdict_on(change).findings[0]
    assert (found.kind, found.line) == ("misuse", line_with("step"))
    assert f"divided the gradients by {SCALE:g}, which is the loss scale" in found.cause


def test_gradients_that_are_clipped_to_one_limit_then_are_told_by_it():
    assert "Call scaler.unscale_(optimizer)" in verdict_on(divided_and_clipped).text


def test_it_is_told_with_micro_batches():
    assert "once more" in verdict_on(divided, passes=4).text


@pytest.mark.parametrize(
    "change",
    [unscaled, averaged, untouched, clipped_by_value, clipped_to_a_limit_of_its_own],
    ids=lambda f: f.__name__,
)
def test_gradients_that_the_scaler_alone_divides_are_not_told(change):
    assert "once more" not in verdict_on(change).text


def weighed(loss, scaler):
    (scaler.scale(loss) / SCALE).backward()


def of_rows(loss, scaler):
    scaler.scale(loss.expand(4096)).mean().backward()


def looked_at(loss, scaler):
    loss.backward(retain_graph=True)
    scaler.scale(loss).backward()


def in_two_parts(loss, scaler):
    part = scaler.scale(0.001 * loss)
    (part + scaler.scale(0.999 * loss)).backward()


@pytest.mark.parametrize("passes", [1, 4])
def test_a_scaled_loss_that_no_pass_takes_is_told(passes):
    found = verdict_on(untouched, passes, dropped).findings[0]
    assert (found.kind, found.line) == ("misuse", line_with("backward"))
    assert "took the loss that scale() returned, and step() divided" in found.cause
    assert f"by {SCALE:g} all the same" in found.cause


@pytest.mark.parametrize(
    "backward", [weighed, of_rows, looked_at, in_two_parts], ids=lambda f: f.__name__
)
def test_a_scaled_loss_that_is_weighed_or_added_is_not_told(backward):
    assert "scale() returned" not in verdict_on(untouched, backward=backward).text
