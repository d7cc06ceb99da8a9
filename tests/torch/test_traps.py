"""What goes wrong in existing scalers, each shown not to go wrong here."""

import copy
import inspect
import pickle

import pytest
import torch

from gradscaler import DynamicScale
from gradscaler.torch import GradScaler

INF = float("inf")


def iteration(scaler, optimizer, parameters, gradients, backward):
    optimizer.zero_grad()
    backward(scaler, parameters, gradients)
    scaler.step(optimizer)
    scaler.update()


def test_gradients_are_not_unscaled_by_the_scale_that_comes_next(
    parameters, finite, backward, exact
):
    """Trap 1: a scale that grows before gradients are unscaled halves them."""
    scaler = GradScaler(growth_interval=1)
    optimizer = torch.optim.SGD(parameters)
    for _ in range(3):
        iteration(scaler, optimizer, parameters, finite, backward)
        assert exact([parameter.grad for parameter in parameters]) == exact(finite)
    assert scaler.get_scale() == 2.0**19


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("ill", [0, 1], ids=["first", "second"])
def test_one_optimizer_s_overflow_does_not_skip_the_other(
    fused, ill, parameters, finite, backward, exact
):
    """Trap 2: the step of A decided on the flag of B, when B was unscaled later."""
    optimizers = [torch.optim.AdamW([p], fused=fused) for p in parameters]
    finite[ill] = torch.full_like(finite[ill], INF)
    before = [exact(parameter) for parameter in parameters]
    scaler = GradScaler()
    backward(scaler, parameters, finite)
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    moved = [exact(parameter) != old for parameter, old in zip(parameters, before, strict=True)]
    assert moved == [index != ill for index in range(2)]
    assert scaler.get_scale() == 2.0**15


@pytest.mark.parametrize("by", ["setter", "private name", "state dict"])
def test_lowering_the_interval_below_the_counter_does_not_freeze_growth(
    by, parameters, finite, backward
):
    """Trap 3: a counter compared with == never meets an interval that it has passed."""
    scaler = GradScaler(init_scale=1024.0, growth_interval=100)
    optimizer = torch.optim.SGD(parameters)
    for _ in range(5):
        iteration(scaler, optimizer, parameters, finite, backward)
    if by == "setter":
        scaler.set_growth_interval(3)
    elif by == "private name":
        scaler._growth_interval = 3
    else:
        scaler.load_state_dict({**scaler.state_dict(), "growth_interval": 3})
    iteration(scaler, optimizer, parameters, finite, backward)
    assert scaler.get_scale() == 2048.0


def test_on_the_cpu_and_outside_autocast_it_does_not_switch_itself_off():
    """Trap 4: a scaler that goes silent where it thinks itself not needed."""
    scaler = GradScaler()
    assert scaler.scale(torch.ones(())) == 2.0**16
    assert scaler.is_enabled()
    with torch.autocast("cpu", dtype=torch.float16):
        assert scaler.scale(torch.ones(())) == 2.0**16


@pytest.mark.parametrize("path", ["on the host", "on an accelerator"])
def test_growth_stops_short_of_inf(path, parameters, finite, backward, request):
    """Trap 5: 2**127 doubled is inf."""
    if path == "on an accelerator":
        request.getfixturevalue("off_the_host")
    scaler = GradScaler(init_scale=2.0**126, growth_interval=1)
    optimizer = torch.optim.SGD(parameters)
    small = [2.0**-10 * gradient for gradient in finite]
    for _ in range(3):
        iteration(scaler, optimizer, parameters, small, backward)
    assert scaler.get_scale() == 2.0**127


@pytest.mark.parametrize("path", ["on the host", "on an accelerator"])
def test_backing_off_stops_short_of_zero(path, parameters, overflowed, backward, request):
    """Trap 5: 1e-312 has been reported, whose reciprocal is inf."""
    if path == "on an accelerator":
        request.getfixturevalue("off_the_host")
    scaler = GradScaler(init_scale=2.0**-120)
    optimizer = torch.optim.SGD(parameters)
    for _ in range(10):
        iteration(scaler, optimizer, parameters, overflowed, backward)
    assert scaler.get_scale() == 2.0**-126


def test_at_the_smallest_scale_finite_gradients_are_still_unscaled(parameters, backward):
    scaler = GradScaler(init_scale=2.0**-126)
    large = [torch.full_like(parameter, 2.0**120) for parameter in parameters]
    iteration(scaler, torch.optim.SGD(parameters), parameters, large, backward)
    assert all((parameter.grad == 2.0**120).all() for parameter in parameters)


def test_a_step_that_a_fused_optimizer_skipped_is_not_reported_as_applied(
    parameters, overflowed, backward, exact
):
    """Trap 6: the call of optimizer.step is not the step."""
    scaler = GradScaler()
    optimizer = torch.optim.AdamW(parameters, fused=True)
    before = exact(parameters)
    iteration(scaler, optimizer, parameters, overflowed, backward)
    assert exact(parameters) == before
    assert scaler.last_step(optimizer).skipped


def test_positional_arguments_mean_what_they_mean_in_torch():
    """Trap 7: growth and backoff exchanged."""
    arguments = ("cpu", 8.0, 4.0, 0.25, 7, True)
    ours, theirs = GradScaler(*arguments), torch.amp.GradScaler(*arguments)
    assert ours.state_dict() == theirs.state_dict()
    given = inspect.signature(GradScaler).bind(*arguments).arguments
    assert list(given) == list(inspect.signature(torch.amp.GradScaler).parameters)


@pytest.mark.parametrize("ill", range(3))
def test_an_overflow_in_one_gradient_leaves_none_scaled(ill, backward):
    """Trap 8: unscaling that stops at the first inf."""
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    gradients = [torch.ones(2) for _ in range(3)]
    gradients[ill][0] = INF
    scaler = GradScaler()
    backward(scaler, parameters, gradients)
    scaler.unscale_(torch.optim.SGD(parameters))
    assert all(torch.equal(p.grad, g) for p, g in zip(parameters, gradients, strict=True))


@pytest.mark.parametrize(
    "through",
    [
        copy.deepcopy,
        lambda scaler: pickle.loads(pickle.dumps(scaler)),
        lambda scaler: scaler.load_state_dict(scaler.state_dict()) or scaler,
    ],
    ids=["deepcopy", "pickle", "state dict"],
)
def test_the_floor_survives_a_checkpoint(through, parameters, overflowed, backward):
    """Trap 9: a floor that is lost with the rest of what is not saved."""
    scaler = through(GradScaler(policy=DynamicScale(init_scale=8.0, min_scale=4.0)))
    optimizer = torch.optim.SGD(parameters)
    for _ in range(3):
        iteration(scaler, optimizer, parameters, overflowed, backward)
    assert scaler.get_scale() == 4.0


def test_a_scaled_float16_loss_is_not_cast_to_float16():
    """Trap 10: 2**16 is above the largest float16."""
    scaled = GradScaler().scale(torch.ones((), dtype=torch.float16))
    assert scaled == 2.0**16
    assert scaled.dtype is torch.float32
