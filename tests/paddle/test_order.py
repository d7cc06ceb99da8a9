"""Calls out of order: Paddle's exception, the missing call by name, and nothing changed."""

import copy
import gc
import pickle
import weakref

import paddle
import pytest

from gradscaler import CallOrderError
from gradscaler.paddle import GradScaler


class Loop:
    """One scaler, one optimizer, and the calls of a training loop by name."""

    def __init__(self, kind, make, backward, gradients, **options):
        self.parameters = make([2, 3], [4])
        self.optimizer = paddle.optimizer.AdamW(0.1, parameters=self.parameters)
        self.scaler = kind(init_loss_scaling=1024.0, **options)
        self.backward = lambda: backward(self.scaler, self.parameters, gradients)

    def scale(self):
        self.scaler.scale(paddle.ones([]))

    def clear(self):
        self.optimizer.clear_grad()

    def unscale(self):
        self.scaler.unscale_(self.optimizer)

    def clip(self):
        self.scaler.clip_grad_norm_(self.optimizer, 1.0)

    def step(self):
        self.scaler.step(self.optimizer)

    def step_with_closure(self):
        self.scaler.step(self.optimizer, lambda: pytest.fail("the closure was called"))

    def update(self):
        self.scaler.update()

    def minimize(self):
        self.scaler.minimize(self.optimizer, paddle.ones([1]))

    def last_step(self):
        self.scaler.last_step(self.optimizer)

    def copy(self):
        copy.deepcopy(self.scaler)

    def pickle(self):
        pickle.dumps(self.scaler)


# The calls before, the call that raises, and the call that its message asks for.
AS_PADDLE = [
    ("backward unscale", "unscale", "update"),
    ("backward step", "unscale", "update"),
    ("backward step", "step", "update"),
    ("backward unscale step", "step", "update"),
    ("backward unscale step", "unscale", "update"),
]
OURS_ALONE = [
    ("", "update", "step"),
    ("backward", "update", "step"),
    ("backward step update", "update", "step"),
    ("backward minimize", "update", "step"),
    ("backward step", "minimize", "update"),
    ("backward step", "clip", "step"),
    ("backward step", "step_with_closure", "update"),
    ("backward clip", "step_with_closure", "clip_grad_norm"),
    ("", "last_step", "step"),
    ("backward unscale", "last_step", "step"),
    ("backward unscale", "copy", "update"),
    ("backward step", "pickle", "update"),
]


@pytest.fixture(params=[True, False], ids=["dynamic", "fixed"])
def dynamic(request):
    return request.param


def test_each_call_in_order_goes_through(dynamic, make, backward, finite):
    loop = Loop(GradScaler, make, backward, finite, use_dynamic_loss_scaling=dynamic)
    for _ in range(2):
        for calls in (
            "clear backward unscale clip step update last_step copy pickle",
            "clear backward clip unscale minimize last_step copy pickle",
        ):
            for call in calls.split():
                getattr(loop, call)()


@pytest.mark.parametrize(("before", "call", "missing"), AS_PADDLE)
def test_the_exception_is_of_paddle_s_type(before, call, missing, native, make, backward, finite):
    raised = []
    for kind in (native, GradScaler):
        loop = Loop(kind, make, backward, finite)
        for name in before.split():
            getattr(loop, name)()
        with pytest.raises(RuntimeError) as error:
            getattr(loop, call)()
        raised.append(error.value)
    assert isinstance(raised[1], type(raised[0]))


@pytest.mark.parametrize(("before", "call", "missing"), [*AS_PADDLE, *OURS_ALONE])
def test_the_message_names_the_missing_call_and_nothing_changes(
    before, call, missing, make, backward, finite, everything
):
    loop = Loop(GradScaler, make, backward, finite)
    for name in before.split():
        getattr(loop, name)()
    untouched = everything(loop.scaler, loop.optimizer)
    with pytest.raises(CallOrderError, match=rf"\b{missing}_?\("):
        getattr(loop, call)()
    assert everything(loop.scaler, loop.optimizer) == untouched


@pytest.mark.parametrize(("before", "call", "missing"), AS_PADDLE)
def test_after_the_error_the_iteration_can_be_finished(
    before, call, missing, make, backward, finite, everything
):
    loop, undisturbed = (Loop(GradScaler, make, backward, finite) for _ in range(2))
    for each in (loop, undisturbed):
        for name in before.split():
            getattr(each, name)()
    with pytest.raises(CallOrderError):
        getattr(loop, call)()
    for each in (loop, undisturbed):
        if "step" not in before:
            each.step()
        each.update()
    mine, theirs = (everything(each.scaler, each.optimizer) for each in (loop, undisturbed))
    assert mine == theirs


def test_gradients_may_come_from_elsewhere_than_a_scaled_loss_as_with_paddle(
    native, make, finite, exact
):
    finals = []
    for kind in (GradScaler, native):
        parameters = make([2, 3], [4])
        optimizer = paddle.optimizer.SGD(0.1, parameters=parameters)
        scaler = kind(init_loss_scaling=1024.0)
        for parameter, gradient in zip(parameters, finite, strict=True):
            parameter.grad = paddle.to_tensor(gradient * 1024.0)
        scaler.step(optimizer)
        scaler.update()
        finals.append(exact(parameters))
    assert finals[0] == finals[1]


# A fixed scale: nothing moves in update(), so Paddle's loops leave it out, or call it, or both.


@pytest.mark.parametrize("calls", ["step", "step update", "unscale step", "unscale step update"])
def test_with_a_fixed_scale_update_may_be_left_out(calls, native, make, backward, finite, stepped):
    finals = []
    for kind in (GradScaler, native):
        loop = Loop(kind, make, backward, finite, use_dynamic_loss_scaling=False)
        for _ in range(3):
            for call in ["clear", "backward", *calls.split()]:
                getattr(loop, call)()
        finals.append(stepped(loop.optimizer)["parameters"])
    assert finals[0] == finals[1]


def test_with_a_fixed_scale_update_ends_an_iteration_that_took_no_step(make, backward, finite):
    """The message of the error says so: call update() once per iteration."""
    loop = Loop(GradScaler, make, backward, finite, use_dynamic_loss_scaling=False)
    for _ in range(2):
        for call in ("clear", "backward", "unscale", "update"):
            getattr(loop, call)()


def test_with_a_fixed_scale_gradients_are_not_unscaled_twice(make, backward, finite):
    loop = Loop(GradScaler, make, backward, finite, use_dynamic_loss_scaling=False)
    loop.backward()
    loop.unscale()
    with pytest.raises(CallOrderError, match="update"):
        loop.unscale()


# What goes wrong inside.


def test_an_optimizer_that_raises_leaves_the_step_to_be_taken(
    scaler, backward, parameters, finite, exact
):
    optimizer = paddle.optimizer.AdamW(0.1, parameters=parameters)
    backward(scaler, parameters, finite)
    before = exact(parameters)
    with pytest.raises(TypeError):
        scaler.step(optimizer, unknown_argument=1)
    assert exact(parameters) == before
    scaler.step(optimizer)
    assert exact(parameters) != before
    scaler.update()


def test_an_optimizer_freed_in_mid_iteration_leaves_no_record_to_another(
    scaler, backward, parameters, finite
):
    """An id is used again once its object is gone, as in a loop that makes an optimizer a time."""
    for _ in range(50):
        optimizer = paddle.optimizer.SGD(0.0, parameters=parameters)
        optimizer.clear_grad()
        backward(scaler, parameters, finite)
        scaler.unscale_(optimizer)
        del optimizer
    scaler.update()
    assert scaler.state_dict()["incr_count"] == 1


def test_no_optimizer_is_kept_alive_after_the_iteration(scaler, backward, parameters, finite):
    optimizer = paddle.optimizer.SGD(0.1, parameters=parameters)
    backward(scaler, parameters, finite)
    scaler.step(optimizer)
    scaler.update()
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
