"""found_inf is each optimizer's own: one's overflow skips its step alone, and moves the scale."""

import paddle
import pytest

from gradscaler.paddle import GradScaler


class Two:
    """A scaler over two optimizers, each with one parameter."""

    def __init__(self, kind, make, backward, **options):
        self.scaler = kind(init_loss_scaling=1024.0, decr_every_n_nan_or_inf=1, **options)
        self.parameters = make([2, 3], [4])
        self.first, self.second = (
            paddle.optimizer.SGD(1.0, parameters=[parameter]) for parameter in self.parameters
        )
        self.start = [parameter.numpy() for parameter in self.parameters]
        self._backward = backward

    def backward(self, gradients):
        for optimizer in (self.first, self.second):
            optimizer.clear_grad()
        self._backward(self.scaler, self.parameters, gradients)

    def run(self, calls):
        for call in calls.split():
            name, _, which = call.partition(":")
            arguments = [getattr(self, which)] if which else []
            getattr(self.scaler, name)(*arguments)

    @property
    def moved(self):
        return [
            bool((parameter.numpy() != start).any())
            for parameter, start in zip(self.parameters, self.start, strict=True)
        ]


BOTH_UNSCALED_FIRST = "unscale_:first unscale_:second step:first step:second update"
ORDERS = [
    BOTH_UNSCALED_FIRST,
    "unscale_:second unscale_:first step:first step:second update",
    "unscale_:first unscale_:second step:second step:first update",
    "unscale_:second step:first step:second update",
    "step:first step:second update",
    "step:second step:first update",
]


@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "fixed"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("overflowed", [0, 1])
def test_the_optimizer_that_overflowed_is_skipped_and_the_other_steps(
    overflowed, order, dynamic, make, backward, finite
):
    two = Two(GradScaler, make, backward, use_dynamic_loss_scaling=dynamic)
    gradients = list(finite)
    gradients[overflowed] = gradients[overflowed] * float("inf")
    two.backward(gradients)
    two.run(order)
    assert two.moved == [overflowed != 0, overflowed != 1]
    outcomes = [two.scaler.last_step(optimizer) for optimizer in (two.first, two.second)]
    assert [outcome.applied for outcome in outcomes] == two.moved


@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "fixed"])
@pytest.mark.parametrize("order", ORDERS)
def test_each_optimizer_s_gradients_are_divided_once(order, dynamic, make, backward, finite, exact):
    two = Two(GradScaler, make, backward, use_dynamic_loss_scaling=dynamic)
    two.backward(finite)
    two.run(order)
    expected = [start - gradient for start, gradient in zip(two.start, finite, strict=True)]
    assert exact(two.parameters) == exact([paddle.to_tensor(each) for each in expected])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("overflowed", [0, 1])
def test_any_overflow_backs_off_once(overflowed, order, make, backward, finite):
    two = Two(GradScaler, make, backward)
    gradients = list(finite)
    gradients[overflowed] = gradients[overflowed] * float("inf")
    two.backward(gradients)
    two.run(order)
    assert two.scaler.state_dict()["scale"] == [512.0]


def test_two_finite_steps_are_one_finite_iteration(make, backward, finite):
    two = Two(GradScaler, make, backward)
    two.backward(finite)
    two.run(BOTH_UNSCALED_FIRST)
    assert two.scaler.state_dict()["incr_count"] == 1


def test_an_optimizer_without_gradients_does_not_hide_the_other_s_overflow(
    make, backward, overflowed
):
    two = Two(GradScaler, make, backward)
    two.backward([None, overflowed[1]])
    two.parameters[0].clear_gradient(False)
    two.run("step:second step:first update")
    assert two.scaler.state_dict()["scale"] == [512.0]
    assert two.scaler.last_step(two.first).reason == "no_gradients"


@pytest.mark.parametrize("overflowed", [0, 1])
def test_paddle_s_own_decides_both_steps_by_the_gradients_it_unscaled_last(
    overflowed, native, make, backward, finite
):
    """The trap: unscale_ both, then step both."""
    two = Two(native, make, backward)
    gradients = list(finite)
    gradients[overflowed] = gradients[overflowed] * float("inf")
    two.backward(gradients)
    two.run(BOTH_UNSCALED_FIRST)
    assert two.moved == ([True, True] if overflowed == 0 else [False, False])


def test_paddle_s_own_forgets_the_first_overflow_when_the_second_step_is_finite(
    native, make, backward, finite
):
    two = Two(native, make, backward)
    two.backward([finite[0] * float("inf"), finite[1]])
    two.run("step:first step:second update")
    assert two.scaler.state_dict()["scale"] == [1024.0]


def test_paddle_s_own_with_a_fixed_scale_divides_the_second_optimizer_s_gradients_twice(
    native, make, backward, finite, exact
):
    two = Two(native, make, backward, use_dynamic_loss_scaling=False)
    two.backward(finite)
    two.run(BOTH_UNSCALED_FIRST)
    twice = two.start[1] - finite[1] / 1024.0
    assert exact(two.parameters[1]) == exact(paddle.to_tensor(twice))
