"""last_step, history and observers: what happened, read from the device only when asked."""

import pickle

import numpy as np
import pytest

from gradscaler import CallOrderError, FixedScale, StepOutcome
from tests.support.eager import library


@pytest.fixture(params=[False, True], ids=["unscaled in step", "unscaled by hand"])
def unscale(request):
    return request.param


@pytest.fixture
def optimizer(make_optimizer, parameters):
    return make_optimizer(parameters)


@pytest.fixture
def step(unscale, scaler, optimizer, parameters):
    """Take an iteration; its outcome."""

    def step(gradients):
        library.clear_gradients(optimizer)
        library.backward(scaler, parameters, gradients)
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        outcome = scaler.last_step(optimizer)
        scaler.update()
        assert scaler.last_step(optimizer) is outcome
        return outcome

    return step


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_an_outcome_says_whether_the_parameters_moved(bad, step, parameters, finite):
    for factor in (1.0, bad, 1.0, bad, 1.0):
        before = library.exact(parameters)
        outcome = step([factor * gradient for gradient in finite])
        moved = library.exact(parameters) != before
        assert (
            (outcome.applied, outcome.skipped) == (moved, not moved) == (factor == 1, factor != 1)
        )


def test_asked_late_an_outcome_is_still_that_of_its_own_step(step, place, finite, overflowed):
    outcomes = [step(gradients) for gradients in (finite, overflowed, overflowed, finite)]
    assert [(outcome.reason, outcome.found_inf, outcome.scale) for outcome in outcomes] == [
        ("finite", False, 1024.0),
        ("overflow", True, 1024.0),
        ("overflow", True, 512.0),
        ("finite", False, 256.0),
    ]
    assert [outcome.applied for outcome in outcomes] == [True, False, False, True]


def test_an_outcome_keeps_the_scale_that_was_used_when_another_is_set(
    optimizer, scaler, parameters, finite, place
):
    library.backward(scaler, parameters, finite)
    scaler.step(optimizer)
    outcome = scaler.last_step(optimizer)
    library.set_scale(scaler, 8.0)
    assert (outcome.scale, library.scale_of(scaler)) == (1024.0, 8.0)


def test_without_gradients_the_step_is_passed_by(scaler, optimizer):
    before = library.stepped(optimizer)
    optimizer.step = lambda: pytest.fail("the optimizer's step was called")
    scaler.scale(library.tensor([1.0]))
    scaler.step(optimizer)
    scaler.update()
    outcome = scaler.last_step(optimizer)
    assert (outcome.skipped, outcome.reason, outcome.found_inf) == (True, "no_gradients", False)
    assert outcome.scale == 1024.0
    assert library.stepped(optimizer) == before
    assert library.finite_steps_of(scaler) == 0


def test_disabled_every_step_is_applied(optimizer, parameters, finite):
    scaler = library.scaler(enabled=False)
    library.set_gradients(parameters, finite)
    scaler.step(optimizer)
    outcome = scaler.last_step(optimizer)
    assert isinstance(outcome, StepOutcome)
    assert (outcome.applied, outcome.reason, outcome.scale) == (True, "disabled", 1.0)
    assert outcome.found_inf is False


def test_history_holds_the_outcomes_of_all_optimizers_in_order_and_is_bounded(
    parameters, finite, overflowed, monkeypatch
):
    monkeypatch.setattr("gradscaler._eager.scaler.HISTORY_LENGTH", 3)
    scaler, seen = library.scaler(), []
    optimizers = [library.sgd([parameter]) for parameter in parameters]
    for gradients in (finite, [overflowed[1][0] * finite[0], overflowed[1]]):
        for optimizer in optimizers:
            library.clear_gradients(optimizer)
        library.backward(scaler, parameters, gradients)
        for optimizer in optimizers:
            scaler.step(optimizer)
            seen.append(scaler.last_step(optimizer))
        scaler.update()
    assert scaler.history == tuple(seen[1:])
    assert [outcome.skipped for outcome in scaler.history] == [False, True, True]


def test_a_copy_knows_of_no_step_and_tells_nobody(scaler, parameters, finite):
    optimizer = library.sgd(parameters)
    library.backward(scaler, parameters, finite)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.history
    scaler.add_observer(lambda: 0)  # cannot be pickled
    copy = pickle.loads(pickle.dumps(scaler))
    with pytest.raises(CallOrderError):
        copy.last_step(optimizer)
    assert copy.history == ()
    assert copy._observers == []


# Two optimizers.

BOTH_UNSCALED_FIRST = "unscale_:0 unscale_:1 step:0 step:1"
ORDERS = [
    BOTH_UNSCALED_FIRST,
    "unscale_:1 unscale_:0 step:0 step:1",
    "unscale_:0 unscale_:1 step:1 step:0",
    "unscale_:1 step:0 step:1",
    "step:0 step:1",
    "step:1 step:0",
]
POLICIES = {"dynamic": {"init_scale": 1024.0}, "fixed": {"policy": FixedScale(1024.0)}}
if library.name == "paddle":
    POLICIES["not dynamic"] = {"init_scale": 1024.0, "use_dynamic_loss_scaling": False}


def run(scaler, optimizers, calls):
    for call in calls.split():
        name, which = call.split(":")
        getattr(scaler, name)(optimizers[int(which)])
    scaler.update()


@pytest.mark.parametrize("options", POLICIES.values(), ids=list(POLICIES))
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("overflow", [None, 0, 1])
def test_an_overflow_skips_its_own_optimizer_alone_and_backs_the_scale_off_once(
    overflow, order, options, fused, parameters, finite
):
    scaler = library.scaler(**options)
    optimizers = [library.sgd([parameter], lr=1.0, fused=fused) for parameter in parameters]
    expected = [
        library.numpy(parameter) - g for parameter, g in zip(parameters, finite, strict=True)
    ]
    if overflow is not None:
        expected[overflow] = library.numpy(parameters[overflow])
        finite[overflow] = finite[overflow] * np.float32("inf")
    library.backward(scaler, parameters, finite)
    run(scaler, optimizers, order)
    applied = [scaler.last_step(optimizer).applied for optimizer in optimizers]
    assert applied == [overflow != 0, overflow != 1]
    assert library.exact(parameters) == library.exact([library.tensor(each) for each in expected])
    dynamic = "policy" not in options and options.get("use_dynamic_loss_scaling", True)
    assert library.scale_of(scaler) == (512.0 if dynamic and overflow is not None else 1024.0)
    if dynamic:
        assert library.finite_steps_of(scaler) == (overflow is None)


def test_an_optimizer_without_gradients_does_not_hide_the_other_s_overflow(
    scaler, parameters, overflowed
):
    optimizers = [library.sgd([parameter]) for parameter in parameters]
    library.backward(scaler, parameters, [None, overflowed[1]])
    run(scaler, optimizers, "step:1 step:0")
    assert library.scale_of(scaler) == 512.0
    assert scaler.last_step(optimizers[0]).reason == "no_gradients"


# Observers.


class Recorder:
    """An observer that records the calls that it is told of, with the gradients."""

    def __init__(self, parameters):
        self.parameters = parameters
        self.told = []

    def note(self, *what):
        gradients = [library.numpy(p.grad) for p in self.parameters if p.grad is not None]
        self.told.append((*what, [np.unique(gradient).tolist() for gradient in gradients]))

    def scaled(self, outputs):
        self.note("scaled", outputs)

    def unscaling(self, optimizer, scale):
        self.note("unscaling", optimizer, float(scale))

    def stepping(self, optimizer, scale):
        self.note("stepping", optimizer, None if scale is None else float(scale))

    def stepped(self, optimizer, outcome):
        self.note("stepped", optimizer, outcome)

    def updating(self):
        self.note("updating")

    def updated(self):
        self.note("updated")


def test_an_observer_is_told_of_each_call_while_the_gradients_are_there(
    unscale, scaler, parameters
):
    recorder, optimizer = Recorder(parameters), library.sgd(parameters)
    scaler.add_observer(recorder)
    loss = sum(parameter.sum() for parameter in parameters)
    scaler.scale(loss).backward()
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    stepping = (None, [[1.0]] * 2) if unscale else (1024.0, [[1024.0]] * 2)
    unscaling = ("unscaling", optimizer, 1024.0, [[1024.0]] * 2)
    calls = [unscaling, ("stepping", optimizer, *stepping)]
    assert recorder.told == [
        ("scaled", loss, []),
        *(calls if unscale else reversed(calls)),
        ("stepped", optimizer, scaler.last_step(optimizer), [[1.0]] * 2),
        ("updating", [[1.0]] * 2),
        ("updated", [[1.0]] * 2),
    ]


@pytest.mark.parametrize("overflows", [False, True])
def test_an_observer_that_raises_after_an_update_has_it_move_once(
    overflows, scaler, parameters, finite, overflowed
):
    recorder, optimizer = Recorder(parameters), library.sgd(parameters)
    recorder.updated = lambda: 1 / 0
    scaler.add_observer(recorder)
    library.backward(scaler, parameters, overflowed if overflows else finite)
    scaler.step(optimizer)
    with pytest.raises(ZeroDivisionError):
        scaler.update()
    with pytest.raises(CallOrderError):
        scaler.update()
    moved = library.scale_of(scaler), library.finite_steps_of(scaler)
    assert moved == ((512.0, 0) if overflows else (1024.0, 1))


def test_an_observer_that_raises_in_update_stops_it_with_nothing_moved(
    scaler, parameters, overflowed
):
    recorder, optimizer = Recorder(parameters), library.sgd(parameters)
    recorder.updating = lambda: 1 / 0
    scaler.add_observer(recorder)
    library.backward(scaler, parameters, overflowed)
    scaler.step(optimizer)
    with pytest.raises(ZeroDivisionError):
        scaler.update()
    assert library.scale_of(scaler) == 1024.0
    scaler.remove_observer(recorder)
    scaler.update()
    assert library.scale_of(scaler) == 512.0
