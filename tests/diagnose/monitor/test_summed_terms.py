"""A sum over a batch beside a mean, which a monitor reads in the graph of a finite loss."""

import warnings

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy, mse_loss

from gradscaler.diagnose import FindingWarning, Monitor
from tests.support.marked_lines import lines_marked_in

pytestmark = pytest.mark.usefixtures("own_random_numbers_and_one_thread")
line_with = lines_marked_in(__file__)
BATCH, WIDTH, HIDDEN = 64, 16, 4


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 2 * HIDDEN))
        self.decoder = nn.Sequential(
            nn.Linear(HIDDEN, 32), nn.Tanh(), nn.Linear(32, WIDTH), nn.Sigmoid()
        )

    def forward(self, x):
        mean, logs = self.encoder(x).chunk(2, 1)
        code = mean + (logs / 2).exp() * torch.randn_like(mean)
        return self.decoder(code), mean, logs


def divergence(mean, logs):
    return 1 + logs - mean.square() - logs.exp()


def judged(loss_of, steps=220):
    model = Autoencoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    prototypes = torch.rand(4, WIDTH).round()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FindingWarning)
        with Monitor(None, model) as monitor:
            for _ in range(steps):
                x = prototypes[torch.randint(4, (BATCH,))]
                out, mean, logs = model(x)
                loss = loss_of(x, out, divergence(mean, logs), mean, model)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return monitor.verdict


SUMMED = {
    "mean square": lambda x, out, kl, *_: mse_loss(out, x) - 0.5 * torch.sum(kl),  # mean square
    "entropy": lambda x, out, kl, *_: binary_cross_entropy(out, x) - 0.5 * kl.sum(),  # entropy
    "twice": lambda x, out, kl, *_: mse_loss(out, x) + (-0.5 * kl).sum(1).sum(),  # twice
    "stacked": lambda x, out, kl, *_: torch.stack([mse_loss(out, x), -kl.sum()]).mean(),  # stacked
}
NOT_SUMMED = {
    "of rows": lambda x, out, kl, *_: mse_loss(out, x) - 0.005 * kl.sum(1).mean(),
    "both": lambda x, out, kl, *_: mse_loss(out, x, reduction="sum") - 0.5 * kl.sum(),
    "divided": lambda x, out, kl, *_: mse_loss(out, x) - 0.5 * kl.sum() / x.numel(),
    "a small factor": lambda x, out, kl, *_: mse_loss(out, x) - 1e-4 * kl.sum(),
    "a penalty": lambda x, out, _, __, m: (
        mse_loss(out, x) + 1e-3 * sum(p.square().sum() for p in m.parameters())
    ),
    "collapsed, of rows": lambda x, out, kl, *_: mse_loss(out, x) - 5 * kl.sum(1).mean(),
}


@pytest.mark.parametrize("name", SUMMED)
def test_a_sum_beside_a_mean_whose_outputs_are_all_one_row_is_told(name):
    found = judged(SUMMED[name]).findings[0]
    assert (found.kind, found.line) == ("misuse", line_with(name)), found
    assert f"sum at {line_with(name)} makes one number of [64, 4" in found.cause


@pytest.mark.parametrize("name", NOT_SUMMED)
def test_terms_that_are_reduced_alike_or_weighed_are_not_told(name):
    assert "adds a sum over all" not in judged(NOT_SUMMED[name]).text


def test_a_sum_beside_a_mean_that_learns_is_not_told():
    def loss(x, out, _, mean, __):
        return 100 * mse_loss(out, x) + 0.5 * (mean.square() < 0).float().mul(mean).sum()

    assert "adds a sum over all" not in judged(loss).text


def test_a_short_run_is_not_told():
    assert "adds a sum over all" not in judged(SUMMED["twice"], steps=150).text
