"""step(optimizer, closure) with optimizers and gradients that only PyTorch has."""

import pytest
import torch

from gradscaler.torch import GradScaler
from tests.support.eager import library

INF = float("inf")


class Restless(torch.optim.Optimizer):
    """Evaluates twice, and changes everything in between."""

    def __init__(self, params, adds):
        super().__init__(params, {"lr": 1.0, "betas": [0.5, 0.5]})
        self.adds = adds

    @torch.no_grad()
    def step(self, closure):
        for _ in range(2):
            closure()
            for group in self.param_groups:
                group["lr"] *= 0.5
                group["betas"][0] *= 0.5
                if self.adds:
                    group["added"] = True
                for parameter in group["params"]:
                    parameter.add_(1.0)
                    self.state[parameter].setdefault("history", []).append(parameter.clone())


@pytest.mark.parametrize("adds", [False, True], ids=["changes options", "adds one"])
def test_what_an_optimizer_changed_between_evaluations_is_put_back(adds, parameters, finite):
    optimizer, scaler = Restless(parameters, adds), GradScaler(max_retries=1)
    before, evaluations = library.kept(optimizer), []

    def closure():
        evaluations.append(1)
        optimizer.zero_grad()
        factor = INF if len(evaluations) > 1 else 1.0
        library.backward(scaler, parameters, [factor * gradient for gradient in finite])

    scaler.step(optimizer, closure)
    assert len(evaluations) == 3
    assert library.kept(optimizer) == before


def test_float16_gradients_are_refused_and_nothing_is_stepped():
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer, scaler = torch.optim.SGD([parameter]), GradScaler(init_scale=8.0)
    before = library.kept(optimizer)
    with pytest.raises(ValueError, match="float16"):
        scaler.step(optimizer, lambda: scaler.scale(parameter.float().sum()).backward())
    assert library.kept(optimizer) == before


@pytest.mark.parametrize("kind", ["closure", "attempts"])
def test_a_gradient_penalty_is_that_of_float32_at_a_scale_that_was_too_high(kind):
    """The cookbook's recipe, which divides by ``get_scale()``."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Sigmoid(), torch.nn.Linear(32, 1))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.0), GradScaler(init_scale=2.0**20)
    inputs, penalties = torch.randn(32, 8), []

    def penalty_at(scale, dtype):
        with torch.autocast("cpu", torch.float16, enabled=dtype is torch.float16):
            outputs = model(inputs)
        loss = (outputs.float() - inputs.sum(1, keepdim=True)).square().mean()
        scaled = torch.autograd.grad(scale(loss), list(model.parameters()), create_graph=True)
        divisor = scaler.get_scale() if dtype is torch.float16 else 1.0
        return loss, sum((gradient / divisor).square().sum() for gradient in scaled)

    def body():
        optimizer.zero_grad()
        loss, penalty = penalty_at(scaler.scale, torch.float16)
        penalties.append(penalty.item())
        scaler.scale(loss + 0.1 * penalty).backward()
        return loss

    if kind == "closure":
        scaler.step(optimizer, body)
    else:
        for _ in scaler.attempts(optimizer):
            body()
        scaler.step(optimizer)
    assert scaler.last_step(optimizer).reason == "finite"
    assert len(penalties) > 1
    _, exact = penalty_at(lambda loss: loss, torch.float32)
    assert penalties[-1] == pytest.approx(exact.item(), rel=1e-2)
