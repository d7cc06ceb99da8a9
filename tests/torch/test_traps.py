"""What goes wrong in existing scalers and does not here, beyond what ``tests/eager`` shows."""

import inspect

import pytest
import torch

from gradscaler import CallOrderError
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


def test_no_norm_is_measured_anew_after_another_loss_and_an_error():
    """The flags of the first loss say nothing of the second's."""
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([parameter]), GradScaler(init_scale=64.0)
    scaler.scale(parameter.sum()).backward()
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.scale(parameter.sum()).backward()
    with pytest.raises(TypeError, match="surprise"):
        scaler.step(optimizer, surprise=True)
    with pytest.raises(CallOrderError, match="a loss was scaled after it"):
        scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)  # may be repeated
    assert scaler.last_step(optimizer).applied


def test_a_step_with_a_closure_ends_what_a_loop_over_attempts_began():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([parameter]), GradScaler(init_scale=64.0)

    def backward():
        optimizer.zero_grad()
        loss = parameter.sum()
        scaler.scale(loss).backward()
        return loss

    for _ in scaler.attempts(optimizer):
        backward()
    with pytest.raises(CallOrderError, match=r"scale\(\) was called outside of a loop"):
        backward()
    scaler.step(optimizer, backward)
    backward()
