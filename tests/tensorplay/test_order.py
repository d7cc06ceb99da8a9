"""Calls out of order: the missing call by name, and nothing changed; and what is no such error."""

import copy
import pickle

import pytest
import tensorplay as tp

from gradscaler import CallOrderError
from gradscaler.tensorplay import GradScaler


class Loop:
    """One scaler, one optimizer, and the calls of a training loop by name."""

    def __init__(self, scaler, fused, backward, randn):
        self.scaler = scaler
        self.parameters = [tp.nn.Parameter(value) for value in randn(0, (2, 3), (4,))]
        self.optimizer = tp.optim.SGD(self.parameters, lr=0.1, momentum=0.9, fused=fused)
        self._backward = backward
        self._gradients = randn(1, (2, 3), (4,))

    def backward(self):
        self.optimizer.zero_grad()
        self._backward(self.scaler, self.parameters, self._gradients)

    def unscale(self):
        self.scaler.unscale_(self.optimizer)

    def clip(self):
        self.scaler.clip_grad_norm_(self.optimizer, 1.0)

    def step(self):
        self.scaler.step(self.optimizer)

    def step_with_closure(self):
        self.scaler.step(self.optimizer, lambda: pytest.fail("the closure was called"))

    def check(self):
        self.scaler._check_inf_per_device(self.optimizer)

    def update(self):
        self.scaler.update()

    def set_scale(self):
        self.scaler.update(8.0)

    def minimize(self):
        self.scaler.minimize(self.optimizer)

    def last_step(self):
        self.scaler.last_step(self.optimizer)

    def deepcopy(self):
        copy.deepcopy(self.scaler)

    def pickle(self):
        pickle.dumps(self.scaler)

    def call(self, names):
        for name in names.split():
            getattr(self, name)()


# The calls before, the call that raises, and the call that its message asks for.
AS_TENSORPLAY = [
    ("", "unscale", "scale"),
    ("", "step", "scale"),
    ("", "update", "scale"),
    ("", "set_scale", "scale"),
    ("", "check", "scale"),
    ("backward", "update", "step"),
    ("backward unscale", "unscale", "update"),
    ("backward step", "unscale", "update"),
    ("backward step", "step", "update"),
    ("backward unscale step", "step", "update"),
    ("backward unscale step", "unscale", "update"),
    ("backward step update", "update", "step"),
    ("backward unscale", "deepcopy", "update"),
    ("backward step", "pickle", "update"),
]
OURS_ALONE = [
    ("", "clip", "scale"),
    ("", "minimize", "scale"),
    ("", "last_step", "step"),
    ("backward unscale", "last_step", "step"),
    ("backward step", "clip", "step"),
    ("backward step", "minimize", "update"),
    ("backward step", "step_with_closure", "update"),
]
FUSED = pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])


@pytest.fixture
def loop(backward, randn):
    return lambda fused, kind=GradScaler: Loop(
        kind("cpu", init_scale=1024.0), fused, backward, randn
    )


@FUSED
def test_each_call_in_order_goes_through(fused, loop):
    looped = loop(fused)
    for _ in range(2):
        looped.call("backward unscale clip step update last_step deepcopy pickle")


@FUSED
@pytest.mark.parametrize(("before", "call", "missing"), AS_TENSORPLAY)
def test_the_exception_can_be_caught_as_tensorplay_s(before, call, missing, fused, loop):
    raised = []
    for kind in (tp.amp.GradScaler, GradScaler):
        looped = loop(fused, kind)
        looped.call(before)
        with pytest.raises((RuntimeError, AssertionError)) as error:
            looped.call(call)
        raised.append(error.value)
    assert isinstance(raised[1], type(raised[0]))


@FUSED
@pytest.mark.parametrize(("before", "call", "missing"), [*AS_TENSORPLAY, *OURS_ALONE])
def test_the_message_names_the_missing_call_and_nothing_changes(
    before, call, missing, fused, loop, everything
):
    looped = loop(fused)
    looped.call(before)
    untouched = everything(looped.scaler, looped.optimizer)
    with pytest.raises(CallOrderError, match=rf"\b{missing}_?\("):
        looped.call(call)
    assert everything(looped.scaler, looped.optimizer) == untouched


@pytest.mark.parametrize("before", ["backward", "backward unscale", "backward step"])
def test_after_an_error_the_iteration_can_be_finished(before, loop, everything):
    disturbed, undisturbed = loop(False), loop(False)
    finish = "update" if "step" in before else "step update"
    for looped in (disturbed, undisturbed):
        looped.call(before)
        if looped is disturbed:
            with pytest.raises(CallOrderError):
                looped.call("step" if "step" in before else "last_step")
        looped.call(finish)
    mine, theirs = (everything(each.scaler, each.optimizer) for each in (disturbed, undisturbed))
    assert mine == theirs


def test_one_optimizer_s_stage_is_not_the_other_s(backward, parameters, finite):
    scaler = GradScaler()
    first, second = (tp.optim.SGD([parameter]) for parameter in parameters)
    backward(scaler, parameters, finite)
    scaler.unscale_(first)
    scaler.step(first)
    scaler.unscale_(second)
    with pytest.raises(RuntimeError, match="update"):
        scaler.unscale_(second)
    scaler.step(second)
    assert scaler.last_step(second).applied


@FUSED
def test_an_optimizer_that_raises_leaves_the_step_to_be_taken(fused, loop, stepped):
    looped, undisturbed = loop(fused), loop(fused)
    looped.backward()
    before = stepped(looped.optimizer)
    with pytest.raises(TypeError, match="unknown_argument"):
        looped.scaler.step(looped.optimizer, unknown_argument=1)
    assert stepped(looped.optimizer) == before
    assert not hasattr(looped.optimizer, "grad_scale")
    looped.call("step update")
    undisturbed.call("backward step update")
    assert stepped(looped.optimizer) == stepped(undisturbed.optimizer)


def test_unscaling_in_advance_changes_nothing_of_the_step(kind, randn, backward, stepped):
    after = []
    for explicit in (False, True):
        parameters = [tp.nn.Parameter(value) for value in randn(0, *kind.shapes)]
        optimizer, scaler = kind(parameters), GradScaler()
        backward(scaler, parameters, randn(1, *kind.shapes))
        if explicit:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        after.append(stepped(optimizer))
    assert after[0] == after[1]


def test_an_optimizer_freed_in_mid_iteration_leaves_no_record_to_another(
    backward, parameters, finite
):
    """An id is used again once its object is gone, as in a loop that makes an optimizer a time."""
    scaler = GradScaler()
    for _ in range(50):
        optimizer = tp.optim.SGD(parameters, lr=0.0)
        optimizer.zero_grad()
        backward(scaler, parameters, finite)
        scaler.unscale_(optimizer)
        del optimizer
    scaler.update()
    assert scaler._get_growth_tracker() == 1
