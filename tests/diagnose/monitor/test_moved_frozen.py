"""Frozen parameters that an optimizer moves all the same, and look-alikes."""

from functools import partial

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn.functional import mse_loss

from gradscaler.diagnose import Monitor
from gradscaler.torch import GradScaler
from tests.support.steps import take_step

pytestmark = pytest.mark.usefixtures("own_random_numbers_and_one_thread")
SGD = torch.optim.SGD
SAID = "with requires_grad=False: the gradients there are 0 and not None"


def verdict_on(make, keeps_gradients=True, is_scaled=False, frozen=2, own_gradients=False):
    """The verdict on 60 steps, from the 30th on with frozen parameters."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = make(model.parameters(), lr=0.05)
    scaler = GradScaler("cpu", init_scale=8.0) if is_scaled else None
    with Monitor(scaler, model, tell=[].append) as monitor:
        for number in range(60):
            if number == 30:
                for each in [*model.parameters()][:frozen]:
                    each.requires_grad = False
            optimizer.zero_grad(set_to_none=not keeps_gradients)
            loss = mse_loss(model(torch.randn(16, 8)), torch.randn(16, 4))
            if loss.grad_fn is None:
                for each in model.parameters():
                    each.grad = torch.randn_like(each) if own_gradients else each.grad
                optimizer.step()
            else:
                take_step(loss, optimizer, scaler)
    return monitor.verdict


@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize(
    "make",
    [partial(SGD, momentum=0.9), partial(SGD, weight_decay=1e-2), torch.optim.AdamW],
    ids=["momentum", "decay", "AdamW"],
)
def test_a_frozen_layer_that_keeps_gradients_of_0_and_moves_is_told(make, is_scaled):
    found = verdict_on(make, is_scaled=is_scaled).findings[0]
    assert found.kind == "misuse"
    assert f"The optimizer moves 2 parameters (0.weight first) {SAID}" in found.cause


@pytest.mark.parametrize(
    ("make", "more"),
    [
        (SGD, {}),  # without momentum and decay, a gradient of 0 moves nothing
        (torch.optim.AdamW, {"keeps_gradients": False}),
        (torch.optim.AdamW, {"frozen": 0}),
        (torch.optim.AdamW, {"frozen": 4, "own_gradients": True}),
    ],
    ids=["no momentum", "gradients of None", "none frozen", "gradients of its own"],
)
def test_what_stays_or_is_moved_on_purpose_is_not_told(make, more):
    assert SAID not in verdict_on(make, **more).text


class Averaging(SGD):
    """An optimizer that moves the last of its parameters, which was never trained, by itself."""

    def step(self, closure=None):
        super().step()
        with torch.no_grad():
            self.param_groups[0]["params"][-1].mul_(0.9)


@pytest.mark.parametrize("kind", [SGD, Averaging, torch.optim.Adam])
def test_what_was_never_trained_and_has_a_gradient_of_its_own_is_not_told(kind):
    model, price = nn.Linear(8, 4), torch.ones(3)
    optimizer = kind([*model.parameters(), price], lr=0.05)
    with Monitor(None, model, tell=[].append) as monitor:
        for step in range(60):
            optimizer.zero_grad()
            mse_loss(model(torch.randn(16, 8)), torch.randn(16, 4)).backward()
            price.grad = torch.zeros(3) if step % 3 else torch.ones(3)
            optimizer.step()
    assert SAID not in monitor.verdict.text
