"""A model that is saved or copied while a monitor watches it."""

import copy
import io
import pickle

import pytest

pytest.importorskip("torch")

import torch

from gradscaler.diagnose import Monitor
from gradscaler.torch import GradScaler
from tests.support import programs


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


def state_of(model):
    """All that modules hold, which hooks would be a part of."""
    return [{name: repr(held) for name, held in vars(each).items()} for each in model.modules()]


@pytest.mark.parametrize("between", ["update and scale", "scale and step"])
@pytest.mark.parametrize("way", [saved, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_watched_model_is_saved_and_copied_as_any_other(way, between):
    model, monitor, begin = watched()
    inputs = torch.ones(2, 4)
    if between == "scale and step":
        begin(inputs)
    twin = way(model)
    monitor.close()
    for parameter in model.parameters():
        parameter.grad = None
    for parameter in twin.parameters():
        parameter.grad = None
    assert state_of(twin) == state_of(model)
    assert torch.equal(twin(inputs), model(inputs))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_watched_model_is_scripted_and_traced_and_loaded_from_weights_alone():
    model, monitor, _ = watched()
    inputs = torch.ones(2, 4)
    expected = model(inputs)
    assert torch.equal(torch.jit.script(model)(inputs), expected)
    assert torch.equal(torch.jit.trace(model, inputs, check_trace=True)(inputs), expected)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    kinds = [*map(type, model.modules()), set]
    with torch.serialization.safe_globals(kinds):
        assert torch.equal(torch.load(file, weights_only=True)(inputs), expected)
    monitor.close()


def test_what_was_saved_is_loaded_without_gradscaler(tmp_path):
    model, monitor, _ = watched()
    torch.save(model, tmp_path / "model.pt")
    monitor.close()
    code = (
        "import sys, torch; sys.modules['gradscaler'] = None\n"
        "model = torch.load(sys.argv[1], weights_only=False); model(torch.ones(2, 4))"
    )
    done = programs.run("-c", code, tmp_path / "model.pt", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
