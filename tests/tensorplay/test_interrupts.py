"""An optimizer that raises, gradients that overlap: the next call is refused or right."""

import pytest
import tensorplay as tp

from gradscaler import CallOrderError
from gradscaler.tensorplay import GradScaler


class Training:
    """One parameter whose true gradient is 3; a step of lr 1 subtracts it."""

    def __init__(self, error=None):
        self.weight = tp.nn.Parameter(tp.zeros(2))
        self.optimizer = tp.optim.SGD([self.weight], lr=1.0)
        self.scaler = GradScaler(init_scale=1024.0)
        self.error = error
        step = self.optimizer.step
        self.optimizer.step = lambda: self.fail() if self.error else step()

    def fail(self):
        error, self.error = self.error, None
        raise error

    def begin(self, clear=True):
        if clear:
            self.optimizer.zero_grad()
        self.scaler.scale((self.weight * 3.0).sum()).backward()

    def step(self):
        self.scaler.step(self.optimizer)


@pytest.fixture(params=[KeyboardInterrupt, ZeroDivisionError])
def raised(request):
    training = Training(request.param())
    training.begin()
    with pytest.raises(request.param):
        training.step()
    return training


def test_a_step_that_raised_can_be_taken_again(raised):
    raised.step()
    assert raised.weight.tolist() == [-3.0, -3.0]


def test_an_iteration_repeated_with_new_gradients_is_right(raised):
    raised.begin()
    raised.step()
    assert raised.weight.tolist() == [-3.0, -3.0]


def test_an_iteration_repeated_with_the_old_gradients_is_refused_until_update(raised):
    raised.begin(clear=False)
    with pytest.raises(CallOrderError, match=r"clear the gradients, call scaler\.update"):
        raised.step()
    assert raised.weight.tolist() == [0.0, 0.0]
    raised.scaler.update()
    raised.begin()
    raised.step()
    assert raised.weight.tolist() == [-3.0, -3.0]


@pytest.mark.parametrize("call", ["step", "update", "minimize"])
def test_a_call_in_a_closure_is_refused_by_name(call):
    training = Training()

    def closure():
        training.begin()
        arguments = () if call == "update" else (training.optimizer,)
        getattr(training.scaler, call)(*arguments)

    with pytest.raises(CallOrderError, match="in a closure"):
        training.scaler.step(training.optimizer, closure)


@pytest.mark.parametrize("calls", ["step", "unscale_ step", "clip_grad_norm_ step"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("size", [100, 20_000])
def test_an_expanded_gradient_steps_as_a_whole_one_does(size, fused, calls):
    weights = []
    for gradient in (tp.full((1,), 1024.0).expand(size), tp.full((size,), 1024.0)):
        weight = tp.nn.Parameter(tp.ones(size))
        optimizer = tp.optim.AdamW([weight], lr=0.5, fused=fused)
        scaler = GradScaler(init_scale=1024.0)
        scaler.scale(tp.zeros(()))
        weight.grad = gradient
        for call in calls.split():
            getattr(scaler, call)(optimizer, *([1.0] if "clip" in call else []))
        weights.append(weight.tolist())
    assert weights[0] == weights[1]
    assert weights[0] != [1.0] * size
