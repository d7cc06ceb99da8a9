"""What several test modules need, handed to them as fixtures: they cannot import one another."""

from collections.abc import Mapping

import pytest
import torch

from gradscaler.torch import GradScaler

INF = float("inf")


def _exact(value):
    """Something that compares equal if and only if two values are the same to the bit."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        if value.is_sparse:
            return ("sparse", _exact(value._indices()), _exact(value._values()))
        return (str(value.dtype), tuple(value.shape), repr(value.tolist()))
    if isinstance(value, Mapping):
        return {key: _exact(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_exact(item) for item in value]
    return repr(value)


def _everything(scaler, *optimizers):
    """All that a call which raises must leave alone."""
    records = {
        key: (record["stage"], _exact(record["found_inf_per_device"]))
        for key, record in scaler._per_optimizer_states.items()
    }
    return _exact(scaler.state_dict()), records, [_stepped(optimizer) for optimizer in optimizers]


def _stepped(optimizer):
    """All that a step may change in an optimizer, and the gradients."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {
        "parameters": _exact(parameters),
        "gradients": _exact([parameter.grad for parameter in parameters]),
        "state": _exact(optimizer.state_dict()),
    }


def _backward(scaler, parameters, gradients):
    """A backward pass whose unscaled gradients are ``gradients``; None for a parameter left out."""
    used = [(p, g) for p, g in zip(parameters, gradients, strict=True) if g is not None]
    scaler.scale(sum((p * torch.as_tensor(g)).sum() for p, g in used)).backward()


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
    return _exact


@pytest.fixture(scope="session")
def everything():
    return _everything


@pytest.fixture(scope="session")
def stepped():
    return _stepped


@pytest.fixture(scope="session")
def backward():
    return _backward


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
    """The same, with an inf in the last."""
    return [*finite[:-1], torch.full_like(finite[-1], INF)]


@pytest.fixture
def scaler():
    return GradScaler(init_scale=1024.0)


@pytest.fixture
def off_the_host(monkeypatch):
    """Run CPU tensors through the code that is meant for accelerators, which reads nothing back."""
    monkeypatch.setattr(GradScaler._operations, "on_host", lambda tensor: False)
