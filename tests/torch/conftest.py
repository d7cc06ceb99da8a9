"""Fixtures of several test modules, which cannot import one another."""

import pytest
import torch

from gradscaler.torch import GradScaler
from tests.support.eager import library

INF = float("inf")


class _AskingOptimizer(torch.optim.SGD):
    """An optimizer that unscales and skips by itself, on any device, and counts its steps."""

    _step_supports_amp_scaling = True

    def __init__(self, params, lr=1.0):
        super().__init__(params, lr=lr)
        self.seen = []

    @torch.no_grad()
    def step(self):
        self.seen.append((self.grad_scale, self.found_inf))
        factor = 1.0 if self.grad_scale is None else 1.0 / self.grad_scale
        for group in self.param_groups:
            for parameter in group["params"]:
                moved = parameter - group["lr"] * factor * parameter.grad
                parameter.copy_(torch.where(self.found_inf == 0, moved, parameter))
        return "asked"


@pytest.fixture(scope="session")
def exact():
    return library.exact


@pytest.fixture(scope="session")
def backward():
    return library.backward


@pytest.fixture(scope="session")
def asking_optimizer():
    return _AskingOptimizer


@pytest.fixture
def parameters():
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(2, 3)), torch.nn.Parameter(torch.randn(4))]


@pytest.fixture
def finite(parameters):
    """Gradients of those parameters, finite at any scale up to 2**120."""
    torch.manual_seed(1)
    return [torch.randn_like(parameter) for parameter in parameters]


@pytest.fixture
def overflowed(finite):
    """The same gradients, with an inf in the last one."""
    return [*finite[:-1], torch.full_like(finite[-1], INF)]


@pytest.fixture
def scaler():
    return GradScaler(init_scale=1024.0)


@pytest.fixture
def off_the_host(monkeypatch):
    """Run CPU tensors through the code that is meant for accelerators, which reads nothing back."""
    library.on_accelerator(monkeypatch)
