"""Faults of existing scalers that ours does not have, beyond those in ``tests/eager``."""

import inspect

import pytest
import torch
from torch.amp.grad_scaler import OptState

from gradscaler import CallOrderError
from gradscaler.torch import GradScaler


def test_on_the_cpu_and_outside_autocast_it_does_not_switch_itself_off():
    """Some scalers disable themselves there."""
    scaler = GradScaler()
    assert scaler.scale(torch.ones(())) == 2.0**16
    assert scaler.is_enabled()
    with torch.autocast("cpu", dtype=torch.float16):
        assert scaler.scale(torch.ones(())) == 2.0**16


def test_positional_arguments_mean_what_they_mean_in_torch():
    """FSDP's scaler takes growth and backoff in the other order."""
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


def test_no_norm_is_measured_again_after_another_loss_and_an_error():
    """The flags of the first loss say nothing of the second's."""
    parameter, other = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer, scaler = torch.optim.SGD([parameter]), GradScaler(init_scale=64.0)
    scaler.scale(parameter.sum()).backward()
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.scale(other.sum()).backward()  # one of the same parameter would mix their gradients
    with pytest.raises(TypeError, match="surprise"):
        scaler.step(optimizer, surprise=True)
    with pytest.raises(CallOrderError, match="before the latest loss was scaled"):
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


def loop(*parameters, scaler=None):
    """An optimizer, a scaler, and a backward pass whose true gradients are 1."""
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    scaler = scaler or GradScaler(init_scale=64.0)

    def backward():
        loss = sum(parameter.sum() for parameter in parameters)
        scaler.scale(loss).backward()
        return loss

    return optimizer, scaler, backward


class AsTorchWritesIt(GradScaler):
    """Finds its optimizer's dict by the id alone."""

    def unscale_(self, optimizer):
        state = self._per_optimizer_states[id(optimizer)]
        inverse, zero = self._scale.double().reciprocal().float(), torch.zeros(())
        state["found_inf_per_device"] = self._unscale_grads_(optimizer, inverse, zero, False)
        state["stage"] = OptState.UNSCALED


def test_an_override_may_find_its_state_by_the_id_alone():
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer, scaler, backward = loop(parameter, scaler=AsTorchWritesIt(init_scale=64.0))
    backward()
    scaler.step(optimizer)
    assert scaler.last_step(optimizer).applied
    assert list(scaler._per_optimizer_states) == [id(optimizer)]
    scaler.update()
    assert parameter.tolist() == [-1.0, -1.0]


@pytest.mark.parametrize("first", ["step", "unscale_"])
def test_gradients_of_a_closure_that_raised_are_not_taken_for_unscaled_ones(first):
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer, scaler, backward = loop(parameter)
    backward()
    if first == "unscale_":
        scaler.unscale_(optimizer)
    else:
        with pytest.raises(TypeError, match="surprise"):
            scaler.step(optimizer, surprise=True)

    def closure():
        optimizer.zero_grad()
        backward()
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        scaler.step(optimizer, closure)
    with pytest.raises(CallOrderError, match="clear the gradients"):
        scaler.step(optimizer)
    assert parameter.tolist() == [0.0, 0.0]


def test_a_refusal_after_attempts_keeps_the_scale_that_they_were_made_with():
    parameter = torch.nn.Parameter(torch.zeros(2))
    half = torch.nn.Parameter(torch.zeros(2, dtype=torch.float16))
    optimizer, scaler, backward = loop(parameter, half)
    for attempt in scaler.attempts(optimizer):
        backward()
        if not attempt:
            parameter.grad.fill_(float("inf"))
    with pytest.raises(ValueError, match="FP16"):
        scaler.step(optimizer)
    half.grad = None
    scaler.step(optimizer)
    assert parameter.tolist() == [-1.0, -1.0]


def test_what_replaces_unscale_is_handed_the_owner_of_the_gradients():
    seen = []

    class Spy(GradScaler):
        def unscale_(self, optimizer):
            seen.append(optimizer)
            super().unscale_(optimizer)

    class Wrapper:
        def __init__(self, optimizer):
            self.optimizer, self.param_groups = optimizer, optimizer.param_groups

        def step(self):
            return self.optimizer.step()

    optimizer, scaler, backward = loop(torch.nn.Parameter(torch.zeros(2)), scaler=Spy())
    backward()
    scaler.step(Wrapper(optimizer))
    assert seen == [optimizer]


def test_an_optimizer_may_go_on_after_an_evaluation_that_always_overflowed():
    parameter = torch.nn.Parameter(torch.zeros(2))
    _, scaler, _ = loop(parameter, scaler=GradScaler(init_scale=64.0, max_retries=1))
    factors = iter([1.0, float("inf"), float("inf"), 1.0])

    class Careful(torch.optim.SGD):
        def step(self, closure):
            closure()
            try:
                closure()
            except Exception:
                closure()
            return super().step()

    optimizer = Careful([parameter], lr=1.0)

    def closure():
        optimizer.zero_grad()
        loss = (parameter * next(factors)).sum()
        scaler.scale(loss).backward()
        return loss

    scaler.step(optimizer, closure)
    assert scaler.last_step(optimizer).applied
    assert parameter.tolist() == [-1.0, -1.0]
