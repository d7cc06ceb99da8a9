"""Embeddings that are all one point, at which a loss with a margin is that margin."""

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional

from gradscaler.diagnose import Monitor

pytestmark = pytest.mark.usefixtures("own_random_numbers_and_one_thread")


@pytest.mark.parametrize(
    ("loss_of", "is_told"),
    [
        (lambda a, b, margin: functional.relu(a - b + margin).mean(), True),
        (lambda a, b, margin: (a - b + margin).clamp(min=0).sum() / 8, True),
        (lambda a, b, margin: (a - b + margin).abs().mean(), False),
    ],
    ids=["relu", "clamp", "abs"],
)
def test_a_loss_that_stays_at_its_margin_is_not_praised(loss_of, is_told):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with Monitor(model=model, tell=[].append) as monitor:
        for step in range(140):
            out = model(torch.randn(8, 4))[:, 0] * 1e-3
            optimizer.zero_grad()
            margin = 0.9 if step < 20 else 0.5 + 1e-4 * (step % 9)
            loss_of(out, 2 * out.roll(1), margin).backward()
            optimizer.step()
    assert ("which may be its margin" in str(monitor.verdict)) is is_told
