"""A model that is saved or copied while a monitor watches it."""

import copy
import io
import pickle
import subprocess
import sys

import pytest

pytest.importorskip("torch")

import torch

from gradscaler.diagnose import Monitor
from gradscaler.torch import GradScaler


def watched(every=100):
    """A model whose modules are watched in the next step, as in the last of a streak of skips."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler(init_scale=8.0)
    monitor = Monitor(scaler, model, every, stuck_after=2, on_stuck="continue")

    def begin(inputs):
        optimizer.zero_grad()
        scaler.scale(model(inputs).sum()).backward()

    begin(torch.full((2, 4), torch.inf))
    scaler.step(optimizer)
    scaler.update()
    assert monitor._source._watch.step == 2
    return model, monitor, begin


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def hooks_of(model):
    return [
        hook
        for module in model.modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
        for hook in hooks.values()
    ]


@pytest.mark.parametrize("between", ["update and scale", "scale and step"])
@pytest.mark.parametrize("way", [saved, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_watched_model_is_saved_and_copied_as_any_other(way, between):
    model, monitor, begin = watched()
    assert hooks_of(model)
    inputs = torch.ones(2, 4)
    if between == "scale and step":
        begin(inputs)
    twin = way(model)
    monitor.close()
    assert hooks_of(model) == []
    for hook in hooks_of(twin):  # they are there, and do nothing
        assert hook(twin, (), {}) is hook(twin, (), None) is None
    assert torch.equal(twin(inputs), model(inputs))


def test_what_was_saved_is_loaded_without_gradscaler(tmp_path):
    model, monitor, _ = watched()
    torch.save(model, tmp_path / "model.pt")
    monitor.close()
    code = (
        "import sys, torch; sys.modules['gradscaler'] = None\n"
        "model = torch.load(sys.argv[1], weights_only=False); model(torch.ones(2, 4))"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "model.pt"], check=True)
