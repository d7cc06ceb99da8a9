"""An outside flag: what GradScaler(overflow=...) returns is one more vote of each decision."""

import copy

import pytest
import torch

from gradscaler.torch import GradScaler, ShardedGradScaler


class Flag:
    """Returns the values that it was given, one a call, then False."""

    def __init__(self, *values):
        self.values = list(values)
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return self.values.pop(0) if self.values else False


def training(flag, optimizer_type=torch.optim.SGD, kind=GradScaler, **options):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = optimizer_type([weight], lr=0.5, **options)
    return weight, optimizer, kind("cpu", init_scale=8.0, overflow=flag)


def backward(weight, optimizer, scaler):
    optimizer.zero_grad()
    scaler.scale(weight.sum()).backward()


def steps(weight, optimizer, scaler, count, clip=False):
    """Take steps; the reason of each, and the scale after it."""
    found = []
    for _ in range(count):
        backward(weight, optimizer, scaler)
        if clip:
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        found.append((scaler.last_step(optimizer).reason, scaler.get_scale()))
    return found


@pytest.mark.parametrize("kind", [GradScaler, ShardedGradScaler])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("raised", [True, torch.tensor(True), torch.tensor([0.0, 2.0])])
def test_a_step_whose_flag_is_raised_is_skipped_once(raised, fused, clip, kind):
    flag = Flag(False, raised, False)
    weight, optimizer, scaler = training(flag, kind=kind, fused=fused)
    assert steps(weight, optimizer, scaler, 1, clip) == [("finite", 8.0)]
    before = weight.detach().clone()
    assert steps(weight, optimizer, scaler, 1, clip) == [("overflow", 4.0)]
    assert torch.equal(weight, before)
    assert steps(weight, optimizer, scaler, 1, clip) == [("finite", 4.0)]
    assert not torch.equal(weight, before)
    assert flag.calls == 3


def test_gradients_that_overflow_are_skipped_though_the_flag_is_not_raised():
    weight, optimizer, scaler = training(Flag())
    backward(weight, optimizer, scaler)
    weight.grad[0] = torch.inf
    scaler.step(optimizer)
    assert scaler.last_step(optimizer).reason == "overflow"


def test_each_optimizer_has_a_vote_of_its_own():
    flag = Flag(True, False)
    first, one, scaler = training(flag)
    second, other, _ = training(None)
    scaler.scale(first.sum() + second.sum()).backward()
    scaler.step(one)
    scaler.step(other)
    scaler.update()
    assert scaler.last_step(one).reason == "overflow"
    assert scaler.last_step(other).reason == "finite"
    assert scaler.get_scale() == 4.0


def test_a_flag_that_stays_raised_until_it_is_cleared_skips_every_optimizer_that_iteration():
    """As in docs/devices.md for hardware: it is cleared where the gradients are."""
    raised = []
    first, one, scaler = training(lambda: bool(raised))
    second, other, _ = training(None)
    reasons = []
    for overflows in (True, False):
        for optimizer in (one, other):
            optimizer.zero_grad()
        raised.clear()
        scaler.scale(first.sum() + second.sum()).backward()
        raised += [True] * overflows
        for optimizer in (one, other):
            scaler.step(optimizer)
        scaler.update()
        reasons.append([scaler.last_step(optimizer).reason for optimizer in (one, other)])
    assert reasons == [["overflow"] * 2, ["finite"] * 2]
    assert scaler.get_scale() == 4.0


def test_nothing_is_asked_for_an_optimizer_without_gradients():
    flag = Flag(True)
    _, optimizer, scaler = training(flag)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    assert flag.calls == 0
    assert scaler.last_step(optimizer).reason == "no_gradients"


def test_a_loop_over_attempts_repeats_while_the_flag_is_raised():
    weight, optimizer, scaler = training(Flag(True, True))
    attempts = 0
    for _ in scaler.attempts(optimizer):
        attempts += 1
        scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert attempts == 3
    assert scaler.get_scale() == 2.0
    assert torch.equal(weight, torch.full((3,), 0.5))


def test_a_closure_is_repeated_while_the_flag_is_raised():
    weight, optimizer, scaler = training(Flag(True))
    evaluations = []

    def closure():
        optimizer.zero_grad()
        loss = weight.sum()
        scaler.scale(loss).backward()
        evaluations.append(scaler.get_scale())
        return loss

    scaler.step(optimizer, closure)
    scaler.update()
    assert len(evaluations) == 2
    assert torch.equal(weight, torch.full((3,), 0.5))


def test_what_is_not_a_flag_is_refused_and_no_parameter_changes():
    weight, optimizer, scaler = training(lambda: None)
    backward(weight, optimizer, scaler)
    with pytest.raises(TypeError, match=r"overflow\(\) must return a bool or a tensor, got None"):
        scaler.step(optimizer)
    assert torch.equal(weight, torch.ones(3))


def test_what_cannot_be_called_is_refused():
    with pytest.raises(TypeError, match="overflow must be a callable, got True"):
        GradScaler(overflow=True)


def test_a_copy_asks_the_same_flag():
    flag = Flag(True)
    weight, optimizer, scaler = training(flag)
    twin = copy.deepcopy(scaler)
    assert steps(weight, optimizer, twin, 1) == [("overflow", 4.0)]
    assert flag.calls == 1
