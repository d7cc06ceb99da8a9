"""Ctrl-C, or an optimizer that raises, at any line of a step: the next call is refused or right."""

import itertools
import math
import pickle
import sys

import pytest
import torch

from gradscaler import CallOrderError
from gradscaler.torch import GradScaler

PLACES = ("/gradscaler/_eager/", "/gradscaler/_torch_like/", "/gradscaler/torch/", "/torch/optim/")
GRADIENT = torch.tensor([3.0, -4.0])


class Training:
    """One parameter whose true gradient is always the same; a step of lr 1 subtracts it."""

    def __init__(self, fused=False, clip=None, set_to_none=True):
        self.weight = torch.nn.Parameter(torch.zeros(2))
        self.optimizer = torch.optim.SGD([self.weight], lr=1.0, fused=fused)
        self.scaler = GradScaler(init_scale=1024.0)
        self.clip = clip  # the norm's type
        self.set_to_none = set_to_none
        self.true_step = -GRADIENT * (0.5 if clip else 1.0)

    def begin(self):
        self.optimizer.zero_grad(self.set_to_none)
        self.scaler.scale((self.weight * GRADIENT).sum()).backward()

    def step(self):
        self.clip_if_asked()
        self.step_alone()

    def clip_if_asked(self):
        if self.clip:
            self.scaler.clip_grad_norm_(self.optimizer, 2.5 if self.clip == 2 else 2.0, self.clip)

    def step_alone(self):
        self.scaler.step(self.optimizer)

    def step_with_closure(self):
        def closure():
            self.begin()
            self.clip_if_asked()

        self.scaler.step(self.optimizer, closure)

    def takes_a_true_step(self, calls):
        """Whether the calls moved the weight by the true step; False if they were refused."""
        before = self.weight.detach().clone()
        try:
            calls()
        except CallOrderError:
            assert torch.equal(self.weight, before)
            return False
        torch.testing.assert_close(self.weight - before, self.true_step, rtol=1e-6, atol=0)
        return True


def interrupt_at(line, call):
    """Raise KeyboardInterrupt before the n-th line of a call; whether it has that many lines."""
    lines = itertools.count()

    def trace(frame, event, _):
        if not any(place in frame.f_code.co_filename for place in PLACES):
            return None
        if event == "line" and next(lines) == line:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
        torch.set_grad_enabled(True)  # PyTorch's own step may leave it off
    return False


def interrupted(training, call):
    """The training, interrupted at each line of a call in turn."""
    for line in itertools.count():
        each = training()
        each.begin()
        if not interrupt_at(line, getattr(each, call)):
            assert line > 20
            return
        yield each


@pytest.fixture(params=[False, True], ids=["plain", "fused"])
def fused(request):
    return request.param


@pytest.fixture(params=[None, 2.0, math.inf], ids=["unclipped", "clipped", "clipped by inf"])
def clip(request):
    return request.param


@pytest.fixture
def training(fused, clip):
    return lambda: Training(fused, clip)


@pytest.mark.parametrize("set_to_none", [True, False], ids=["new gradients", "zeroed gradients"])
def test_an_interrupted_iteration_repeated_is_refused_or_right(fused, clip, set_to_none):
    def repeat():
        each.begin()
        each.step()

    results = []
    for each in interrupted(lambda: Training(fused, clip, set_to_none), "step"):
        results.append(each.takes_a_true_step(repeat))
        each.scaler.update()
        assert each.takes_a_true_step(repeat)
    assert True in results
    assert set_to_none or False in results
    if set_to_none:  # refused only where the optimizer had stepped
        assert sum(results) > 0.7 * len(results)


def test_an_interrupted_step_taken_again_is_refused_or_right(training):
    def begun():
        each = training()
        each.begin()
        each.clip_if_asked()
        each.begin = lambda: None
        return each

    interruptions = interrupted(begun, "step_alone")
    results = {each.takes_a_true_step(each.step_alone) for each in interruptions}
    assert results == {False, True}


def test_an_interrupted_closure_repeated_is_refused_or_right(training):
    results = []
    for each in interrupted(training, "step_with_closure"):
        results.append(each.takes_a_true_step(each.step_with_closure))
        each.scaler.update()
        assert each.takes_a_true_step(each.step_with_closure)
        each.scaler.update()
        pickle.dumps(each.scaler)
    assert sum(results) > 0.9 * len(results)


def test_an_iteration_that_ended_between_clip_and_step_is_refused_or_right(training):
    each = training()
    each.begin()
    each.clip_if_asked()
    each.begin()
    assert each.takes_a_true_step(each.step) is (each.clip is None)
    each.scaler.update()
    each.begin()
    assert each.takes_a_true_step(each.step)


def test_skipping_a_batch_whose_step_raises_is_right():
    training = Training()
    hook = training.optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    for _ in range(3):
        training.begin()
        with pytest.raises(ZeroDivisionError):
            training.step()
    hook.remove()
    training.begin()
    assert training.takes_a_true_step(training.step)


def test_an_interrupt_leaves_no_attribute_on_a_fused_optimizer(training):
    for each in interrupted(training, "step"):
        assert not {"grad_scale", "found_inf"} & set(vars(each.optimizer))


def test_a_repeated_iteration_after_an_optimizer_raised_is_refused_until_update():
    def refuse(*_):
        raise ZeroDivisionError

    training = Training(set_to_none=False)
    hook = training.optimizer.register_step_pre_hook(refuse)
    training.begin()
    with pytest.raises(ZeroDivisionError):
        training.step()
    hook.remove()
    training.begin()
    with pytest.raises(CallOrderError, match=r"clear the gradients, call scaler\.update"):
        training.step()
    training.scaler.update()
    training.begin()
    assert training.takes_a_true_step(training.step)


def test_a_step_whose_hook_raised_after_it_is_refused_or_right(fused):
    training = Training(fused)
    hook = training.optimizer.register_step_post_hook(lambda *_: 1 / 0)
    training.begin()
    with pytest.raises(ZeroDivisionError):
        training.step()
    hook.remove()
    assert training.takes_a_true_step(training.step) is not fused
    training.begin()
    assert training.takes_a_true_step(training.step) is fused


def test_a_raised_step_of_one_optimizer_leaves_the_other_alone():
    first, second = Training(), Training()
    second.scaler = first.scaler
    first.begin()
    first.optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        first.step()
    second.begin()
    assert second.takes_a_true_step(second.step)


@pytest.mark.parametrize("call", ["step", "update", "minimize"])
def test_a_call_in_a_closure_is_refused_by_name(call):
    training = Training()

    def closure():
        training.begin()
        arguments = () if call == "update" else (training.optimizer,)
        getattr(training.scaler, call)(*arguments)

    with pytest.raises(CallOrderError, match="in a closure"):
        training.scaler.step(training.optimizer, closure)
    assert torch.equal(training.weight, torch.zeros(2))
