"""A monitor of a scaler that is disabled, which announces nothing."""

import warnings

import pytest

pytest.importorskip("torch")

import torch

from gradscaler.diagnose import FindingWarning, Monitor
from gradscaler.torch import GradScaler

pytestmark = pytest.mark.usefixtures("own_random_numbers_and_one_thread")


def trained(cast_to=None, weights=torch.float32, steps=20, train=True):
    """The verdict, the warnings, and the hooks that are left on the model."""
    model = torch.nn.Linear(4, 2).to(weights)
    scaler = GradScaler("cpu", enabled=False)
    monitor = Monitor(scaler, model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(steps):
            with torch.autocast("cpu", cast_to or torch.float16, enabled=cast_to is not None):
                outputs = model(torch.ones(3, 4, dtype=weights))
            if train:
                scaler.scale(outputs.float().square().mean()).backward()
        verdict = monitor.verdict
        monitor.close()
    return verdict, said, list(model._forward_hooks)


@pytest.mark.parametrize(
    "precision", [{"cast_to": torch.float16}, {"weights": torch.float16}], ids=["cast", "whole"]
)
def test_a_disabled_scaler_in_float16_is_warned_of_once(precision):
    verdict, said, hooks = trained(**precision)
    assert verdict.kind == "misuse"
    assert "Enable the scaler" in verdict.text
    assert [each.category for each in said] == [FindingWarning]
    assert hooks == []


@pytest.mark.parametrize(
    "precision", [{"cast_to": torch.bfloat16}, {}, {"weights": torch.bfloat16}]
)
def test_a_disabled_scaler_in_another_precision_is_right(precision):
    verdict, said, hooks = trained(**precision)
    assert (verdict.kind, said, hooks) == ("normal", [], [])


def test_a_few_passes_in_float16_are_no_training():
    verdict, said, hooks = trained(torch.float16, steps=4)
    assert (verdict.kind, said, hooks) == ("normal", [], [])
