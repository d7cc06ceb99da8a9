"""Steps that are taken by a scaler and by a call of the optimizer's own."""

import pytest

pytest.importorskip("torch")

import torch
from torch.nn.functional import mse_loss
from torch.optim import optimizer as optimizers

from gradscaler.diagnose import Monitor
from gradscaler.torch import GradScaler

pytestmark = pytest.mark.usefixtures("own_random_numbers_and_one_thread")


class Training:
    """A training with a scaler, and more calls in each step."""

    def __init__(self, more):
        self.model = torch.nn.Linear(4, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.scaler, self.more = GradScaler(init_scale=256.0), more

    def loss(self):
        inputs = torch.randn(8, 4)
        return mse_loss(self.model(inputs), inputs)

    def backward(self):
        self.optimizer.zero_grad(set_to_none=False)
        self.scaler.scale(self.loss()).backward()

    def step(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def verdict(self, steps=30):
        with Monitor(self.scaler, self.model, tell=[].append) as monitor:
            for _ in range(steps):
                self.backward()
                self.more(self)
        return monitor.verdict


def after(t):
    t.step()
    t.optimizer.step()


def before(t):
    t.optimizer.step()
    t.step()


def between(t):
    t.scaler.step(t.optimizer)
    t.optimizer.step()
    t.scaler.update()


def after_clipping(t):
    t.scaler.unscale_(t.optimizer)
    torch.nn.utils.clip_grad_norm_(t.model.parameters(), 1.0)
    t.step()
    t.optimizer.step()


def before_the_scaler_s_and_after_clipping(t):
    t.scaler.unscale_(t.optimizer)
    torch.nn.utils.clip_grad_norm_(t.model.parameters(), 1.0)
    t.optimizer.step()
    t.step()


def after_and_soon_without_the_bias(t):
    if t.optimizer.state:  # else it is the first step
        t.model.bias.grad = None
    after(t)


@pytest.mark.parametrize(
    "more",
    [
        after,
        before,
        between,
        after_clipping,
        before_the_scaler_s_and_after_clipping,
        after_and_soon_without_the_bias,
    ],
)
def test_a_step_that_is_taken_twice_is_told(more):
    first = Training(more).verdict().findings[0]
    assert first.kind == "misuse"
    assert "beside step(optimizer) of the scaler, with the same gradients" in first.cause
    assert "Leave out optimizer.step()" in first.action


def one_step(t):
    t.step()


def with_a_loss_that_is_not_scaled(t):
    t.step()
    t.optimizer.zero_grad(set_to_none=False)
    t.loss().backward()
    t.optimizer.step()


def with_new_gradients(t):
    t.step()
    t.optimizer.zero_grad()
    t.loss().backward()
    t.optimizer.step()


def with_another_scaler(t):
    t.step()
    t.optimizer.zero_grad()
    t.scaler.scale(t.loss()).backward()
    t.step()


def of_the_bias_alone(t):
    t.step()
    t.model.bias.grad = None
    t.model(torch.randn(8, 4)).detach().add(t.model.bias).square().mean().backward()
    t.optimizer.step()


@pytest.mark.parametrize(
    "more",
    [
        one_step,
        of_the_bias_alone,
        with_a_loss_that_is_not_scaled,
        with_new_gradients,
        with_another_scaler,
    ],
)
def test_steps_of_other_gradients_are_not_told(more):
    assert "beside step(optimizer)" not in str(Training(more).verdict())


def test_nothing_is_left_on_the_optimizer_in_its_steps_or_after_them():
    counts, hooks = [], optimizers._global_optimizer_post_hooks
    before = len(hooks)

    def step(t):
        after(t)
        counts.append((len(t.optimizer._optimizer_step_post_hooks), len(hooks) - before))

    training = Training(step)
    training.verdict()
    assert set(counts) == {(0, 1)}
    assert len(hooks) == before


def test_optimizers_that_are_unscaled_first_and_stepped_then_are_not_told():
    models = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    scaler, inputs = GradScaler(init_scale=256.0), torch.randn(8, 4)
    with Monitor(scaler, models, tell=[].append) as monitor:
        for step in range(40):
            for optimizer, model in zip(optimizers, models, strict=True):
                if step % 2 == 0 or model is models[0]:
                    optimizer.zero_grad()
                    scaler.scale(mse_loss(model(inputs), inputs)).backward()
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
    assert "beside step(optimizer)" not in str(monitor.verdict)
