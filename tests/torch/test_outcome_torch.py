"""last_step: what happened, for every kind of optimizer, read from the device when asked."""

import gc
import pickle
import weakref

import pytest
import torch

from gradscaler import CallOrderError
from gradscaler.torch import GradScaler

KINDS = {
    "unfused": lambda p: torch.optim.AdamW(p, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "fused SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "fused SGD without momentum": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
}


@pytest.fixture(params=KINDS)
def optimizer(request, parameters):
    return KINDS[request.param](parameters)


@pytest.fixture(params=[False, True], ids=["unscaled in step", "unscaled by hand"])
def step(request, scaler, optimizer, parameters, backward):
    """An iteration but for its update(), and what it reports."""

    def step(gradients):
        optimizer.zero_grad()
        backward(scaler, parameters, gradients)
        if request.param:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        return scaler.last_step(optimizer)

    return step


@pytest.mark.parametrize("gradients", ["finite", "overflowed"])
def test_applied_is_whether_the_parameters_moved(step, parameters, gradients, exact, request):
    before = exact(parameters)
    outcome = step(request.getfixturevalue(gradients))
    assert outcome.applied is (exact(parameters) != before)
    assert outcome.skipped is not outcome.applied


def test_a_finite_step_is_reported(step, finite):
    outcome = step(finite)
    assert (outcome.reason, outcome.found_inf, outcome.scale) == ("finite", False, 1024.0)


def test_an_overflow_is_reported(step, overflowed):
    outcome = step(overflowed)
    assert (outcome.reason, outcome.found_inf, outcome.scale) == ("overflow", True, 1024.0)


def test_a_later_step_is_reported_as_truthfully(step, finite, overflowed, scaler):
    reasons = []
    for gradients in (finite, overflowed, finite):
        reasons.append(step(gradients).reason)
        scaler.update()
    assert reasons == ["finite", "overflow", "finite"]


def test_asked_late_it_still_tells_of_its_own_step(step, finite, overflowed, scaler):
    skipped = step(overflowed)
    scaler.update()
    applied = step(finite)
    scaler.update()
    assert (skipped.applied, skipped.scale) == (False, 1024.0)
    assert (applied.applied, applied.scale) == (True, 512.0)


def test_on_an_accelerator_the_scale_used_survives_the_update(
    step, overflowed, scaler, off_the_host
):
    outcome = step(overflowed)
    scaler.update()
    assert (outcome.scale, scaler.get_scale()) == (1024.0, 512.0)


def test_it_is_kept_until_the_next_step(step, finite, scaler, optimizer):
    outcome = step(finite)
    scaler.update()
    assert scaler.last_step(optimizer) is outcome


def test_without_gradients_the_step_is_passed_by(scaler, optimizer, parameters, stepped):
    before = stepped(optimizer)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    outcome = scaler.last_step(optimizer)
    assert (outcome.skipped, outcome.reason, outcome.found_inf) == (True, "no_gradients", False)
    assert outcome.scale == 1024.0
    assert stepped(optimizer) == before
    assert scaler.state_dict()["_growth_tracker"] == 0


def test_disabled_every_step_is_applied(optimizer, parameters, finite):
    scaler = GradScaler(enabled=False)
    for parameter, gradient in zip(parameters, finite, strict=True):
        parameter.grad = gradient
    scaler.step(optimizer)
    outcome = scaler.last_step(optimizer)
    assert (outcome.applied, outcome.reason, outcome.scale) == (True, "disabled", 1.0)
    assert outcome.found_inf is False


def test_before_any_step_it_is_an_error(scaler, optimizer, parameters, finite, backward):
    backward(scaler, parameters, finite)
    scaler.unscale_(optimizer)
    with pytest.raises(CallOrderError, match=r"step\("):
        scaler.last_step(optimizer)


def test_each_optimizer_has_its_own(scaler, parameters, overflowed, backward):
    well, ill = (torch.optim.AdamW([p], fused=True) for p in parameters)
    backward(scaler, parameters, overflowed)
    scaler.step(well)
    scaler.step(ill)
    scaler.update()
    assert scaler.last_step(well).applied
    assert scaler.last_step(ill).skipped


def test_after_a_copy_there_is_none(step, finite, scaler, optimizer):
    step(finite)
    scaler.update()
    with pytest.raises(CallOrderError):
        pickle.loads(pickle.dumps(scaler)).last_step(optimizer)


def test_it_keeps_no_optimizer_alive(parameters, finite, scaler, backward):
    optimizer = torch.optim.SGD(parameters)
    backward(scaler, parameters, finite)
    scaler.step(optimizer)
    scaler.update()
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    assert not scaler._outcomes._by_id  # where an optimizer with its id would find the outcome


def test_an_optimizer_that_is_handed_the_scaler_and_does_not_unscale_steps_once(
    parameters, finite, scaler, backward
):
    class Handed(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure=None, *, grad_scaler):
            """Leave all to the next step."""

    optimizer = Handed(parameters)
    backward(scaler, parameters, finite)
    with pytest.warns(FutureWarning, match="grad_scaler"):
        scaler.step(optimizer)
    with pytest.raises(CallOrderError, match="already been called"):
        scaler.step(optimizer)


class Recorder:
    """An observer that notes what it is told, and what the gradients are then."""

    def __init__(self, parameters):
        self.parameters = parameters
        self.told = []

    def note(self, *what):
        self.told.append((*what, [p.grad.clone() for p in self.parameters if p.grad is not None]))

    def scaled(self, outputs):
        self.note("scaled", outputs)

    def unscaling(self, optimizer, scale):
        self.note("unscaling", optimizer, scale)

    def stepping(self, optimizer, scale):
        self.note("stepping", optimizer, scale)

    def stepped(self, optimizer, outcome):
        self.note("stepped", optimizer, outcome)

    def updating(self):
        self.note("updating")


@pytest.mark.parametrize("unscale", [False, True])
def test_an_observer_is_told_of_each_call_while_the_gradients_are_there(unscale, parameters):
    scaler, recorder = GradScaler(init_scale=8.0), Recorder(parameters)
    optimizer = torch.optim.SGD(parameters)
    scaler.add_observer(recorder)
    loss = sum(p.sum() for p in parameters)
    scaler.scale(loss).backward()
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    told = {what[0]: what for what in recorder.told}
    order = ["unscaling", "stepping"] if unscale else ["stepping", "unscaling"]
    assert [what[0] for what in recorder.told] == ["scaled", *order, "stepped", "updating"]
    scaled, stepping, stepped = (told[name] for name in ("scaled", "stepping", "stepped"))
    assert told["unscaling"][2].item() == 8.0
    assert all((grad == 8.0).all() for grad in told["unscaling"][3])
    assert scaled == ("scaled", loss, [])
    assert stepping[:2] == ("stepping", optimizer)
    assert stepping[2] is None if unscale else stepping[2].item() == 8.0
    assert all((grad == (1.0 if unscale else 8.0)).all() for grad in stepping[3])
    assert stepped[:3] == ("stepped", optimizer, scaler.last_step(optimizer))
    assert all((grad == 1.0).all() for grad in stepped[3])


def test_an_observer_that_raises_in_update_stops_it_with_nothing_moved(parameters):
    scaler, recorder = GradScaler(init_scale=8.0), Recorder(parameters)
    optimizer = torch.optim.SGD(parameters)
    recorder.updating = lambda: 1 / 0
    scaler.add_observer(recorder)
    scaler.scale(sum(p.sum() * float("inf") for p in parameters)).backward()
    scaler.step(optimizer)
    with pytest.raises(ZeroDivisionError):
        scaler.update()
    assert scaler.get_scale() == 8.0
    scaler.remove_observer(recorder)
    scaler.remove_observer(recorder)  # a second time does nothing
    scaler.update()
    assert scaler.get_scale() == 4.0


def test_a_copy_tells_nobody(parameters):
    scaler = GradScaler()
    scaler.add_observer(lambda: 0)  # cannot be pickled
    assert pickle.loads(pickle.dumps(scaler))._observers == []


def test_nothing_is_read_from_the_device_before_it_is_asked_for(asking_optimizer):
    """On the meta device every read raises."""
    parameter = torch.nn.Parameter(torch.ones(3, device="meta"))
    optimizer = asking_optimizer([parameter])
    scaler = GradScaler()
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    outcome = scaler.last_step(optimizer)
    for name in ("applied", "scale"):
        with pytest.raises(RuntimeError, match="meta"):
            getattr(outcome, name)


@pytest.mark.filterwarnings("ignore:an optimizer whose step:FutureWarning")
def test_an_optimizer_that_is_handed_the_scaler_is_reported_too(
    parameters, overflowed, scaler, backward
):
    class Handed(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure=None, *, grad_scaler):
            grad_scaler.unscale_(self)

    optimizer = Handed(parameters)
    backward(scaler, parameters, overflowed)
    scaler.step(optimizer)
    outcome = scaler.last_step(optimizer)
    scaler.update()
    assert (outcome.found_inf, outcome.scale, scaler.get_scale()) == (True, 1024.0, 512.0)


def test_history_holds_the_outcomes_of_all_optimizers_in_order_and_is_bounded(monkeypatch):
    monkeypatch.setattr("gradscaler._eager.scaler.HISTORY_LENGTH", 3)
    scaler = GradScaler(init_scale=8.0)
    first, second = (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1) for _ in "ab")
    seen = []
    for step in range(2):
        for optimizer in (first, second):
            (parameter,) = optimizer.param_groups[0]["params"]
            parameter.grad = None
            scaler.scale(parameter * (float("inf") if step else 1.0)).sum().backward()
            scaler.step(optimizer)
            seen.append(scaler.last_step(optimizer))
        scaler.update()
    assert scaler.history == tuple(seen[1:])
    assert [outcome.skipped for outcome in scaler.history] == [False, True, True]


def test_a_pickled_scaler_has_no_history():
    scaler, optimizer = GradScaler(), torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    scaler.scale(optimizer.param_groups[0]["params"][0].sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.history
    assert pickle.loads(pickle.dumps(scaler)).history == ()
