"""One small training for every package, and proof of whose scaler it used."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gradscaler.torch import GradScaler

TOO_LARGE = 1e37  # as a target: the scaled gradients overflow float32


@pytest.fixture
def made(monkeypatch):
    """All scalers of ours that are made in a test."""
    scalers = []
    constructor = GradScaler.__init__

    def counted(self, *args, **kwargs):
        scalers.append(self)
        constructor(self, *args, **kwargs)

    monkeypatch.setattr(GradScaler, "__init__", counted)
    return scalers


@pytest.fixture
def task():
    """Makes a model, its optimizer, and eight batches, of which the third overflows."""

    def make(optimizer=torch.optim.SGD, **settings):
        random = torch.Generator().manual_seed(0)
        inputs = torch.randn(8, 4, 3, generator=random)
        targets = torch.randn(8, 4, 1, generator=random)
        targets[2, 0] = TOO_LARGE
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        settings = settings or {"lr": 0.1, "momentum": 0.9}
        return SimpleNamespace(
            model=model,
            optimizer=optimizer(model.parameters(), **settings),
            inputs=inputs,
            targets=targets,
            batches=list(zip(inputs, targets, strict=True)),
            samples=torch.utils.data.TensorDataset(inputs.flatten(0, 1), targets.flatten(0, 1)),
        )

    return make


@pytest.fixture
def cuda_scalers_on_the_cpu(monkeypatch):
    """Leave scalers enabled that a package makes for CUDA, torch's and ours; the CPU runs them."""
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    monkeypatch.setattr("gradscaler.torch.scaler._cuda_may_be_available", lambda: True)


@pytest.fixture
def accelerator():
    """Makes an Accelerator whose fp16 works on the CPU too, and which uses a scaler."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    def make(scaler, **settings):
        made = Accelerator(cpu=True, mixed_precision="fp16", **settings)
        made.native_amp = True  # Accelerate turns autocast off on the CPU
        made.scaler = scaler
        return made

    yield make
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
