"""Causes that look like others: given Inf, modules for losses, an Inf made 0, large steps."""

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 # as users write it

from gradscaler.diagnose import Monitor
from gradscaler.torch import GradScaler
from tests.support.marked_lines import lines_marked_in

pytestmark = pytest.mark.usefixtures("own_random_numbers_and_one_thread")
line_with = lines_marked_in(__file__)
INF = float("inf")


def findings_of(loss_of, spoil=lambda inputs, target: None):
    """The first finding on a training whose third batch is spoiled."""
    model = nn.Linear(6, 4)
    optimizer, told = torch.optim.SGD(model.parameters(), lr=0.01), []
    with Monitor(model=model, tell=told.append):
        for step in range(1, 5):
            inputs, target = torch.randn(16, 6), torch.rand(16, 4)
            if step == 3:
                spoil(inputs, target)
            optimizer.zero_grad()
            loss_of(model(inputs), target).backward()
            optimizer.step()
    return told


LOSSES = {
    "mse_loss": F.mse_loss,
    "square": lambda p, t: (p - t).square().mean(),
    "power": lambda p, t: ((p - t) ** 4).mean(),
    "norm": lambda p, t: torch.linalg.vector_norm(p - t),
    "pairwise_distance": lambda p, t: F.pairwise_distance(p, t).mean(),
    "triplet": lambda p, t: F.triplet_margin_loss(p, t, p.flip(0)),
    "gaussian_nll": lambda p, t: F.gaussian_nll_loss(p, t, p.abs() + 1),
    "poisson_nll": F.poisson_nll_loss,
    "cross_entropy": F.cross_entropy,
    "binary_cross_entropy": F.binary_cross_entropy_with_logits,
    "advantage": lambda p, t: (p * t).mean(),
}


@pytest.mark.parametrize("infinite", [INF, -INF])
@pytest.mark.parametrize("loss_of", LOSSES.values(), ids=LOSSES)
def test_a_target_of_inf_is_told_as_given_and_not_as_made(loss_of, infinite):
    def spoil(_, target):
        target[3, 1] = infinite

    first, *_ = findings_of(loss_of, spoil)
    assert first.kind == "data"
    assert first.cause.startswith("A tensor without a gradient holds Inf or NaN")


class LogOfProbability(nn.Module):
    def forward(self, outputs, target):
        return -outputs.softmax(1)[:, 0].log().mean()  # log


def far(inputs, target):
    inputs *= 1e6


def test_a_criterion_without_weights_gets_the_advice_of_its_operation():
    first, *_ = findings_of(LogOfProbability(), far)
    assert f"by log at {line_with('log')}" in first.cause
    assert first.cause.startswith("Code outside of the model makes")
    assert "The input of the logarithm is 0: clamp it" in first.action


def test_a_criterion_of_pytorch_gets_the_advice_of_its_operation():
    ctc, lengths = nn.CTCLoss(), torch.full((4,), 5)  # longer than the inputs

    def loss_of(outputs, _):
        logs = outputs.log_softmax(1).reshape(4, 4, 4)
        return ctc(logs, torch.ones(4, 5, dtype=torch.long), torch.full((4,), 4), lengths)

    first, *_ = findings_of(loss_of)
    assert "ctc_loss" in first.cause
    assert "set zero_infinity=True" in first.action


class Teacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.full((4,), 1e3))

    def forward(self, outputs):
        return torch.exp(self.scale * outputs)


def test_another_module_with_weights_is_told_as_one():
    teacher = Teacher()
    first, *_ = findings_of(lambda p, t: teacher(p).mean(), far)
    assert first.cause.startswith("Another module (Teacher) makes")
    assert "float32 (autocast" not in first.action


def test_an_inf_that_a_division_makes_0_is_the_origin_of_what_the_0_makes():
    def loss_of(outputs, _):
        total = outputs.exp().sum(1)  # exp
        return -(outputs[:, 0].tanh().abs() / total).log().mean()  # quotient

    first, *_ = findings_of(loss_of, far)
    assert f"by exp at {line_with('exp')}" in first.cause


def test_a_step_that_is_too_large_and_turns_all_units_off_is_a_divergence():
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model=model, every=10, tell=lambda _: None) as monitor:
        for step in range(60):
            if step == 5:  # as such a step leaves them
                with torch.no_grad():
                    for parameter in model[0].parameters():
                        parameter.fill_(-1e4)
                    model[2].bias.fill_(1e4)
            inputs = torch.rand(64, 6)
            optimizer.zero_grad()
            (model(inputs)[:, 0] - inputs[:, 0]).square().mean().backward()
            optimizer.step()
    first, *others = monitor.verdict.findings
    losses = [step.loss for step in monitor.history]
    assert max(losses) > 1e3 * losses[0] > losses[-1]  # it came back
    assert first.kind == "divergence"
    assert "The loss grew from" in first.cause
    assert "exactly 0" in first.cause
    assert first.action.startswith("Lower the learning rate")
    assert "dead" not in {each.kind for each in others}


# Operations of numbers from 0 to 1 that have no slope at 0.
NO_SLOPE = {
    "acosh": (lambda z: torch.acosh(z + 1), "at least 1 + 1e-6"),
    "hypot": (lambda z: torch.hypot(z, z), "a root of more than 0"),
    "log1p": (lambda z: torch.log1p(z - 1).clamp(min=-5.0), "its slope at -1 is Inf"),
    "lgamma": (lambda z: torch.lgamma(z).clamp(max=5.0), "a concentration"),
    "logit": (lambda z: torch.logit(z).clamp(min=-5.0), "within 1e-6 and 1 - 1e-6"),
    "xlogy": (lambda z: torch.special.xlogy(z + 1, z).clamp(min=-5.0), "input of the logarithm"),
    "special_ndtri": (lambda z: torch.special.ndtri(z).clamp(-5.0, 5.0), "1e-6 and 1 - 1e-6"),
    "special_entr": (torch.special.entr, "input of the logarithm"),
    "linalg_slogdet": (
        lambda z: torch.linalg.slogdet(torch.diag_embed(z[:, :2]))[1].clamp(min=-5.0),
        "matrix is singular",
    ),
    # At a share of 0, all values are equal.
    "linalg_eigh": (
        lambda z: torch.linalg.eigh(z.T @ z)[1],
        "no slope where eigenvalues are equal",
    ),
    "linalg_svd": (lambda z: torch.linalg.svd(z)[2], "where singular values are equal or 0"),
}


@pytest.mark.parametrize("name", NO_SLOPE)
def test_an_operation_without_a_slope_is_named_in_the_step_that_fails(name):
    operation, action = NO_SLOPE[name]
    model, told = nn.Linear(4, 4), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Monitor(model=model, tell=told.append):
        for step in range(1, 11):
            optimizer.zero_grad()
            share = model(torch.randn(8, 4)).sigmoid() * (step < 10)
            operation(share).mean().backward()
            optimizer.step()
    (found,) = told
    assert (found.kind, found.steps[0]) == ("nan", 10)
    assert f"by the gradient of {name} at " in found.cause
    assert found.line is not None
    assert action in found.action


def test_a_sum_in_float16_that_the_graph_does_not_keep_is_told_to_be_in_float16():
    model, told = nn.Linear(4, 64), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    with Monitor(model=model, tell=told.append):
        for step in range(1, 9):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                total = (model(torch.ones(8, 4)) * 0 + 1e4 * (step > 3)).sum(1).mean()
            (total + model.bias.sum()).backward()
            optimizer.step()
    found = next(each for each in told if "seen in sum at " in each.cause)
    assert "take it in float32 (dtype=torch.float32)" in found.action


class GraphLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, inputs, adjacency):
        norm = adjacency.sum(1).pow(-0.5)  # degrees
        return norm[:, None] * adjacency @ self.layer(inputs)


def test_what_is_found_later_says_that_it_replaces_what_was_said():
    """Degrees need no gradient, so the next failing step is the first to show their power."""
    model, adjacency = GraphLayer(), torch.ones(16, 16).triu(1)  # the last row has no neighbour
    optimizer, told = torch.optim.SGD(model.parameters(), lr=0.01), []
    with Monitor(model=model, tell=told.append) as monitor:
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(16, 6), adjacency).square().mean().backward()
            optimizer.step()
    first, second = told
    assert first.cause.startswith("A tensor without a gradient holds Inf or NaN in row")
    assert "Look at what makes it" in first.action
    assert second.cause.startswith("In place of what was said at step 1: The forward pass of")
    assert f"by pow at {line_with('degrees')}" in second.cause
    assert "clamp the base" in second.action
    assert monitor.verdict.text.startswith("The forward pass of")


class PartialLayer(nn.Module):
    """Divides by the share of its inputs that a mask leaves, which is none somewhere."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, inputs, mask):
        with torch.no_grad():
            ratio = len(mask) / (mask.sum(1, keepdim=True) + 1e-50)  # ratio
        return self.layer(inputs * mask) * (ratio * mask), mask


class TwoPartialLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = PartialLayer(), PartialLayer()

    def forward(self, inputs, mask):
        return self.second(*self.first(inputs, mask))[0]


def test_an_inf_without_a_graph_is_of_the_first_of_two_layers_that_make_one():
    model, mask = TwoPartialLayers(), torch.ones(16, 6)
    mask[3] = 0
    scaler, told = GradScaler("cpu"), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Monitor(scaler, model, tell=told.append, forensics=0):
        for _ in range(40):
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(16, 6), mask).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    place = f"div at {line_with('ratio')}"
    told = [each.cause for each in told if place in each.cause]
    assert len(told) > 1
    assert told[-1].startswith("The forward pass of first makes")
    # One that names the same line replaces nothing.
    assert not any(each.startswith("In place of") for each in told[1:])
