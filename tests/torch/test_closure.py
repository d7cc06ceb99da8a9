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
