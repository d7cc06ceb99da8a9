"""Calls out of order: torch's exception, the missing call by name, and nothing changed."""

import copy
import pickle

import pytest
import torch

from gradscaler import CallOrderError
from gradscaler.torch import GradScaler


class Loop:
    """One scaler, one optimizer, and the calls of a training loop by name."""

    def __init__(self, kind, fused, backward, gradients):
        torch.manual_seed(0)
        self.parameters = [torch.nn.Parameter(torch.randn(g.shape)) for g in gradients]
        self.optimizer = torch.optim.AdamW(self.parameters, fused=fused)
        self.scaler = kind("cpu", init_scale=1024.0)
        self.backward = lambda: backward(self.scaler, self.parameters, gradients)

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

    def copy(self):
        copy.deepcopy(self.scaler)

    def pickle(self):
        pickle.dumps(self.scaler)


# The calls before, the call that raises, and the call that its message asks for.
AS_TORCH = [
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
    ("backward unscale", "copy", "update"),
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


def test_each_call_in_order_goes_through(backward, finite):
    loop = Loop(GradScaler, False, backward, finite)
    calls = ["backward", "unscale", "clip", "step", "update", "last_step", "copy", "pickle"]
    for call in 2 * calls:
        getattr(loop, call)()


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize(("before", "call", "missing"), AS_TORCH)
def test_the_exception_is_of_torch_s_type(before, call, missing, fused, backward, finite):
    raised = []
    for kind in (torch.amp.GradScaler, GradScaler):
        loop = Loop(kind, fused, backward, finite)
        for name in before.split():
            getattr(loop, name)()
        with pytest.raises((RuntimeError, AssertionError)) as error:
            getattr(loop, call)()
        raised.append(error.value)
    assert isinstance(raised[1], type(raised[0]))


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize(("before", "call", "missing"), [*AS_TORCH, *OURS_ALONE])
def test_the_message_names_the_missing_call_and_nothing_changes(
    before, call, missing, fused, backward, finite, everything
):
    loop = Loop(GradScaler, fused, backward, finite)
    for name in before.split():
        getattr(loop, name)()
    untouched = everything(loop.scaler, loop.optimizer)
    with pytest.raises(CallOrderError, match=rf"\b{missing}_?\("):
        getattr(loop, call)()
    assert everything(loop.scaler, loop.optimizer) == untouched


@pytest.mark.parametrize(
    ("call", "name"),
    {
        "unscale": "unscale_()",
        "clip": "clip_grad_norm_()",
        "step": "step()",
        "update": "update()",
    }.items(),
)
def test_a_call_before_any_loss_was_scaled_is_named(call, name, backward, finite):
    loop = Loop(GradScaler, False, backward, finite)
    with pytest.raises(CallOrderError) as error:
        getattr(loop, call)()
    assert str(error.value).startswith(f"{name} was called before any loss was scaled")


@pytest.mark.parametrize(("before", "call", "missing"), AS_TORCH[5:12])
def test_after_the_error_the_iteration_can_be_finished(
    before, call, missing, backward, finite, everything
):
    loop, undisturbed = (Loop(GradScaler, False, backward, finite) for _ in range(2))
    for each in (loop, undisturbed):
        for name in before.split():
            getattr(each, name)()
    with pytest.raises(CallOrderError):
        getattr(loop, call)()
    for each in (loop, undisturbed):
        if "step" not in before:
            each.step()
        if "update" not in before:
            each.update()
    mine, theirs = (everything(each.scaler, each.optimizer) for each in (loop, undisturbed))
    assert mine == theirs


def test_one_optimizer_s_stage_is_not_the_other_s(backward, parameters, finite):
    scaler = GradScaler()
    first, second = (torch.optim.SGD([parameter]) for parameter in parameters)
    backward(scaler, parameters, finite)
    scaler.unscale_(first)
    scaler.step(first)
    scaler.unscale_(second)
    with pytest.raises(RuntimeError, match="update"):
        scaler.unscale_(second)
    scaler.step(second)


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
def test_an_optimizer_that_raises_leaves_the_step_to_be_taken(
    fused, backward, parameters, finite, exact
):
    optimizer = torch.optim.AdamW(parameters, fused=fused)
    scaler = GradScaler()
    backward(scaler, parameters, finite)
    before = exact(parameters)
    with pytest.raises(TypeError):
        scaler.step(optimizer, unknown_argument=1)
    assert exact(parameters) == before
    assert not hasattr(optimizer, "grad_scale")
    scaler.step(optimizer)
    assert exact(parameters) != before
    scaler.update()


def test_an_optimizer_freed_in_mid_iteration_leaves_no_record_to_another(
    backward, parameters, finite
):
    """An id is used again once its object is gone, as in a loop that makes an optimizer a time."""
    scaler = GradScaler()
    for _ in range(50):
        optimizer = torch.optim.SGD(parameters, lr=0.0)
        optimizer.zero_grad()
        backward(scaler, parameters, finite)
        scaler.unscale_(optimizer)
        del optimizer
    scaler.update()
    assert scaler._get_growth_tracker() == 1
