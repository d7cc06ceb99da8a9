"""Calls out of order: the framework's exception, the missing call by name, and nothing changed."""

import copy
import gc
import pickle
import weakref

import pytest

from gradscaler import CallOrderError, DynamicScale, FixedScale
from tests.support.eager import library


class Loop:
    """One scaler, one optimizer, and the calls of a training loop by name."""

    def __init__(self, scaler, gradients, fused=False):
        self.scaler = scaler
        self.parameters = library.parameters()
        self.gradients = gradients
        self.optimizer = library.adamw(self.parameters, fused=fused)

    def call(self, names):
        for name in names.split():
            getattr(self, name)()

    def clear(self):
        library.clear_gradients(self.optimizer)

    def backward(self):
        library.backward(self.scaler, self.parameters, self.gradients)

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
        self.scaler.minimize(self.optimizer, library.tensor([1.0]))

    def last_step(self):
        self.scaler.last_step(self.optimizer)

    def copy(self):
        copy.deepcopy(self.scaler)

    def pickle(self):
        pickle.dumps(self.scaler)

    def everything(self):
        return library.everything(self.scaler, self.optimizer)


# The calls before, the call that raises, and the call that its message asks for.
IN_MID_ITERATION = [
    ("backward unscale", "unscale", "update"),
    ("backward step", "unscale", "update"),
    ("backward step", "step", "update"),
    ("backward unscale step", "step", "update"),
    ("backward unscale step", "unscale", "update"),
]
WITHOUT_A_STEP = [
    ("", "update", "scale"),
    ("backward", "update", "step"),
    ("backward step update", "update", "step"),
]
COPIES = [
    ("backward unscale", "copy", "update"),
    ("backward step", "pickle", "update"),
]
OURS_ALONE = [
    ("", "last_step", "step"),
    ("backward unscale", "last_step", "step"),
    ("backward step", "clip", "step"),
    ("backward step", "minimize", "update"),
    ("backward step", "step_with_closure", "update"),
    ("backward clip", "step_with_closure", "clip_grad_norm"),
]
if library.name == "paddle":  # gradients may come from elsewhere than a scaled loss
    AS_NATIVE = IN_MID_ITERATION
    OURS_ALONE += [*COPIES, ("", "update", "step"), *WITHOUT_A_STEP[1:]]
    OURS_ALONE += [("backward minimize", "update", "step")]
else:
    UNSCALED_LOSS = [("", call, "scale") for call in ("unscale", "step", "set_scale", "check")]
    AS_NATIVE = [*IN_MID_ITERATION, *WITHOUT_A_STEP, *COPIES, *UNSCALED_LOSS]
    OURS_ALONE += [("", "clip", "scale"), ("", "minimize", "scale")]


@pytest.mark.parametrize(
    "policy", [DynamicScale(1024.0), FixedScale(1024.0)], ids=["dynamic", "fixed"]
)
def test_each_call_in_order_goes_through(policy, fused, finite):
    loop = Loop(library.scaler(policy=policy), finite, fused)
    for _ in range(2):
        loop.call("clear backward unscale clip step update last_step copy pickle")
        loop.call("clear backward clip unscale minimize last_step copy pickle")


@pytest.mark.parametrize(("before", "call", "missing"), AS_NATIVE)
def test_the_exception_can_be_caught_as_the_framework_s(
    before, call, missing, fused, native, finite
):
    raised = []
    for make_scaler in (native, library.scaler):
        loop = Loop(make_scaler(), finite, fused)
        loop.call(before)
        with pytest.raises((RuntimeError, AssertionError)) as error:
            loop.call(call)
        raised.append(error.value)
    assert isinstance(raised[1], type(raised[0]))


@pytest.mark.parametrize(("before", "call", "missing"), [*AS_NATIVE, *OURS_ALONE])
def test_the_message_names_the_missing_call_and_nothing_changes(
    before, call, missing, scaler, fused, finite
):
    loop = Loop(scaler, finite, fused)
    loop.call(before)
    untouched = loop.everything()
    with pytest.raises(CallOrderError, match=rf"\b{missing}_?\("):
        loop.call(call)
    assert loop.everything() == untouched


@pytest.mark.parametrize(
    ("before", "call"),
    [
        *((before, call) for before, call, _ in IN_MID_ITERATION),
        ("backward", "update"),
        ("backward", "last_step"),
        ("backward unscale", "last_step"),
        ("backward step update", "update"),
    ],
)
def test_after_the_error_the_iteration_can_be_finished(before, call, finite):
    loop, undisturbed = (Loop(library.scaler(), finite) for _ in range(2))
    for each in (loop, undisturbed):
        each.call(before)
    with pytest.raises(CallOrderError):
        loop.call(call)
    for each in (loop, undisturbed):
        each.call(" ".join(call for call in ("step", "update") if call not in before))
    assert loop.everything() == undisturbed.everything()


def test_under_a_fixed_scale_update_ends_an_iteration_that_took_no_step(finite):
    """The message of the error says so: call update() once per iteration."""
    loop = Loop(library.scaler(policy=FixedScale(1024.0)), finite)
    for _ in range(2):
        loop.call("clear backward unscale update")


def test_under_a_fixed_scale_gradients_are_not_unscaled_twice(finite):
    loop = Loop(library.scaler(policy=FixedScale(1024.0)), finite)
    loop.call("backward unscale")
    with pytest.raises(CallOrderError, match="update"):
        loop.unscale()


def test_one_optimizer_s_stage_is_not_the_other_s(scaler, parameters, finite):
    first, second = (library.sgd([parameter]) for parameter in parameters)
    library.backward(scaler, parameters, finite)
    scaler.unscale_(first)
    scaler.step(first)
    scaler.unscale_(second)
    with pytest.raises(RuntimeError, match="update"):
        scaler.unscale_(second)
    scaler.step(second)
    assert scaler.last_step(second).applied


def test_an_optimizer_that_raises_leaves_the_step_to_be_taken(fused, finite):
    loop, undisturbed = (Loop(library.scaler(), finite, fused) for _ in range(2))
    loop.backward()
    before = library.kept(loop.optimizer)
    with pytest.raises(TypeError, match="unknown_argument"):
        loop.scaler.step(loop.optimizer, unknown_argument=1)
    assert library.kept(loop.optimizer) == before
    assert not hasattr(loop.optimizer, "grad_scale")
    loop.call("step update")
    undisturbed.call("backward step update")
    assert library.kept(loop.optimizer) == library.kept(undisturbed.optimizer) != before


def test_an_optimizer_freed_in_mid_iteration_leaves_no_record_to_another(
    scaler, parameters, finite
):
    """An id is used again once its object is gone, as in a loop that makes an optimizer a time."""
    for _ in range(50):
        optimizer = library.sgd(parameters, lr=0.0)
        library.clear_gradients(optimizer)
        library.backward(scaler, parameters, finite)
        scaler.unscale_(optimizer)
        del optimizer
    scaler.update()
    assert library.finite_steps_of(scaler) == 1


def test_no_optimizer_is_kept_alive_after_the_iteration(scaler, parameters, finite):
    optimizer = library.sgd(parameters)
    library.backward(scaler, parameters, finite)
    scaler.step(optimizer)
    scaler.update()
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    assert not scaler._outcomes._by_id  # where an optimizer with its id would find the outcome
