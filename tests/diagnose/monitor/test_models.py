"""Several models under one monitor."""

import pytest

pytest.importorskip("torch")

import torch

from gradscaler.diagnose import Monitor, read_run
from gradscaler.torch import GradScaler

pytestmark = pytest.mark.usefixtures("own_random_numbers_and_one_thread")


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (lambda g, d: {"G": g, "D": d}, ["D.bias", "D.weight", "G.bias", "G.weight"]),
        (lambda g, d: [g, d], ["0.bias", "0.weight", "1.bias", "1.weight"]),
    ],
    ids=["dict", "list"],
)
@pytest.mark.parametrize("bad", [False, True])
def test_parameters_and_places_of_several_models_have_their_names(path, given, names, bad):
    first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(part.parameters(), lr=1e-3) for part in (first, second)]
    scaler = GradScaler()
    with Monitor(scaler, given(first, second), path=path, every=3, on_stuck="continue") as monitor:
        for _ in range(25):
            with torch.autocast("cpu", torch.float16):
                hidden = first(torch.ones(2, 4)) * (torch.inf if bad else 1.0)
                loss = second(hidden).float().square().mean()
            for optimizer in optimizers:
                optimizer.zero_grad()
            scaler.scale(loss).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
    assert sorted(read_run(path).samples[0].parameters) == names
    located = [line.located for line in read_run(path).watched if line.located is not None]
    assert [each.operation for each in located] == ["mul"] * bad
    assert monitor.verdict.kind == ("loss" if bad else "normal")


def test_several_models_are_evaluated_if_none_is_in_training():
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    monitor = Monitor(GradScaler(), [first, second])
    model = monitor._source.model
    first.eval()
    assert model.training
    second.eval()
    assert not model.training
    assert (first.training, second.training) == (False, False)
    monitor.close()


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match="named_parameters, got int"):
        Monitor(GradScaler(), [torch.nn.Linear(2, 1), 3])


def test_the_losses_of_a_step_are_counted(path):
    model = torch.nn.Linear(2, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-3), GradScaler()
    with Monitor(scaler, model, path=path, every=2, on_stuck="continue"):
        for number in range(1, 5):
            for _ in range(3 if number == 3 else 1):
                scaler.scale(model(torch.ones(1, 2)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert [sample.num_losses for sample in read_run(path).samples] == [1, 3, 1]  # at 2, 3 and 4
