"""What goes wrong in existing scalers and does not here, beyond what ``tests/eager`` shows."""

import inspect

import torch

from gradscaler.torch import GradScaler


def test_on_the_cpu_and_outside_autocast_it_does_not_switch_itself_off():
    """A scaler that goes silent where it thinks itself not needed."""
    scaler = GradScaler()
    assert scaler.scale(torch.ones(())) == 2.0**16
    assert scaler.is_enabled()
    with torch.autocast("cpu", dtype=torch.float16):
        assert scaler.scale(torch.ones(())) == 2.0**16


def test_positional_arguments_mean_what_they_mean_in_torch():
    """Growth and backoff exchanged."""
    arguments = ("cpu", 8.0, 4.0, 0.25, 7, True)
    ours, theirs = GradScaler(*arguments), torch.amp.GradScaler(*arguments)
    assert ours.state_dict() == theirs.state_dict()
    given = inspect.signature(GradScaler).bind(*arguments).arguments
    assert list(given) == list(inspect.signature(torch.amp.GradScaler).parameters)


def test_a_scaled_float16_loss_is_not_cast_to_float16():
    """2**16 is above the largest float16."""
    scaled = GradScaler().scale(torch.ones((), dtype=torch.float16))
    assert scaled == 2.0**16
    assert scaled.dtype is torch.float32
