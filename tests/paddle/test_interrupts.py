"""An optimizer that raises, gradients that overlap: the next call is refused or right."""

import paddle
import pytest

from gradscaler import CallOrderError
from gradscaler.paddle import GradScaler


class Training:
    """One parameter whose true gradient is 3; a step of lr 1 subtracts it."""

    def __init__(self, call="step", error=None):
        zeros = paddle.nn.initializer.Constant(0.0)
        self.weight = paddle.create_parameter([2], "float32", default_initializer=zeros)
        self.optimizer = paddle.optimizer.SGD(learning_rate=1.0, parameters=[self.weight])
        self.scaler = GradScaler(init_loss_scaling=1024.0)
        self.call = call
        self.error = error
        step = getattr(self.optimizer, call)
        setattr(self.optimizer, call, lambda *a: self.fail() if self.error else step(*a))

    def fail(self):
        error, self.error = self.error, None
        raise error

    def begin(self, clear=True):
        if clear:
            self.optimizer.clear_grad()
        self.loss = self.scaler.scale((self.weight * 3.0).sum())
        self.loss.backward()

    def step(self):
        arguments = [self.loss] if self.call == "minimize" else []
        getattr(self.scaler, self.call)(self.optimizer, *arguments)


@pytest.fixture(params=[KeyboardInterrupt, ZeroDivisionError])
def error(request):
    return request.param


@pytest.fixture(params=["step", "minimize"])
def raised(request, error):
    training = Training(request.param, error())
    training.begin()
    with pytest.raises(error):
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
@pytest.mark.parametrize("size", [100, 20_000])
def test_an_expanded_gradient_steps_as_a_whole_one_does(size, calls):
    weights = []
    ones = paddle.nn.initializer.Constant(1.0)
    for gradient in (
        paddle.as_strided(paddle.full([1], 1024.0), [size], [0]),
        paddle.full([size], 1024.0),
    ):
        weight = paddle.create_parameter([size], "float32", default_initializer=ones)
        optimizer = paddle.optimizer.AdamW(learning_rate=0.5, parameters=[weight])
        scaler = GradScaler(init_loss_scaling=1024.0)
        scaler.scale(paddle.zeros([]))
        weight.grad = gradient
        for call in calls.split():
            getattr(scaler, call)(optimizer, *([1.0] if "clip" in call else []))
        weights.append(weight.tolist())
    assert weights[0] == weights[1]
    assert weights[0] != [1.0] * size
