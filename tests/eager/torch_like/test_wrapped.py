"""Optimizers that a trainer wraps: the user has the wrapper, the trainer steps the inner one."""

import pytest

from gradscaler import CallOrderError
from tests.support.eager import library


class Wrapped:
    """A trainer's optimizer: it steps the one inside through the scaler."""

    def __init__(self, optimizer, scaler):
        self.optimizer, self.scaler = optimizer, scaler

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def step(self):
        return self.scaler.step(self.optimizer)


@pytest.fixture(params=[1, 2])
def wrapped(request, scaler, parameters):
    optimizer = library.sgd(parameters, lr=1.0)
    for _ in range(request.param):
        optimizer = Wrapped(optimizer, scaler)
    return optimizer


def innermost(optimizer):
    return innermost(optimizer.optimizer) if isinstance(optimizer, Wrapped) else optimizer


def moved(parameters):
    before = [library.numpy(parameter) for parameter in library.parameters()]
    after = map(library.numpy, parameters)
    return sum(((a - b) ** 2).sum() for a, b in zip(after, before, strict=True)) ** 0.5


def test_what_is_asked_of_the_wrapper_holds_for_what_it_steps(scaler, parameters, finite, wrapped):
    library.backward(scaler, parameters, finite)
    scaler.clip_grad_norm_(wrapped, 0.001)
    scaler.step(innermost(wrapped))
    scaler.update()
    assert moved(parameters) == pytest.approx(0.001, rel=1e-3)
    assert scaler.last_step(wrapped) is scaler.last_step(innermost(wrapped))


def test_either_is_unscaled_once(scaler, parameters, finite, wrapped):
    library.backward(scaler, parameters, finite)
    scaler.unscale_(innermost(wrapped))
    with pytest.raises(CallOrderError, match="already been called"):
        scaler.unscale_(wrapped)


def test_the_wrapper_s_own_step_is_called(scaler, parameters, finite):
    class Counting(Wrapped):
        steps = 0

        def step(self):
            self.steps += 1
            return self.optimizer.step()

    counting = Counting(library.sgd(parameters), scaler)
    library.backward(scaler, parameters, finite)
    scaler.step(counting)
    assert counting.steps == 1


@pytest.mark.parametrize("clips", [False, True])
def test_a_fused_optimizer_is_stepped_through_a_wrapper_that_has_its_attributes(
    scaler, parameters, finite, overflowed, clips
):
    """The optimizer inside does not see attributes of the wrapper, such as its scale."""

    class Transparent:
        def __init__(self, optimizer):
            self.optimizer = optimizer

        def __getattr__(self, name):
            return getattr(self.optimizer, name)

        def step(self):
            return self.optimizer.step()

    wrapped = Transparent(library.sgd(parameters, lr=1.0, fused=True))
    assert wrapped._step_supports_amp_scaling
    for gradients in (finite, overflowed):
        wrapped.zero_grad()
        library.backward(scaler, parameters, gradients)
        if clips:
            scaler.clip_grad_norm_(wrapped, 0.001)
        scaler.step(wrapped)
        scaler.update()
    expected = 0.001 if clips else sum((gradient**2).sum() for gradient in finite) ** 0.5
    assert moved(parameters) == pytest.approx(expected, rel=1e-3)
    assert [outcome.applied for outcome in scaler.history] == [True, False]


def test_a_clip_that_no_step_used_is_an_error(scaler, parameters, finite, wrapped):
    library.backward(scaler, parameters, finite)
    scaler.clip_grad_norm_(wrapped, 0.001)
    innermost(wrapped).step()
    before = library.everything(scaler, innermost(wrapped))
    with pytest.raises(CallOrderError, match=r"scaler\.step\(optimizer\)"):
        scaler.update()
    assert library.everything(scaler, innermost(wrapped)) == before


def test_a_norm_that_is_only_measured_needs_no_step(scaler, parameters, finite, wrapped):
    library.backward(scaler, parameters, finite)
    scaler.clip_grad_norm_(wrapped, float("inf"))
    scaler.update()


@pytest.mark.parametrize("asks_first", [True, False])
def test_flags_are_found_by_the_wrapper_s_id(scaler, parameters, finite, wrapped, asks_first):
    """A loop of the user's own reduces them over processes."""
    before = library.exact(parameters)
    library.backward(scaler, parameters, finite)
    record = scaler._per_optimizer_states[id(wrapped)] if asks_first else None
    scaler.unscale_(wrapped)
    found = scaler._per_optimizer_states[id(wrapped)]
    assert record is None or found is record
    for flag in found["found_inf_per_device"].values():
        flag.fill_(1.0)
    scaler.step(wrapped)
    scaler.update()
    assert library.exact(parameters) == before
    assert scaler.get_scale() == 512.0
    assert not scaler._per_optimizer_states[id(wrapped)]["found_inf_per_device"]


def test_another_optimizer_of_the_same_name_is_not_taken_for_the_owner(scaler, parameters, finite):
    optimizer, other = (library.sgd(parameters) for _ in range(2))
    optimizer.optimizer = other
    library.backward(scaler, parameters, finite)
    scaler.unscale_(optimizer)
    assert id(optimizer) in scaler._per_optimizer_states


def test_an_optimizer_that_nothing_can_refer_to_weakly_has_an_outcome(scaler, parameters, finite):
    class Slotted:
        __slots__ = ("inner", "param_groups")

        def step(self):
            self.inner.step()

    optimizer = Slotted()
    optimizer.inner = library.sgd(parameters)
    optimizer.param_groups = optimizer.inner.param_groups
    library.backward(scaler, parameters, finite)
    scaler.step(optimizer)
    assert scaler.last_step(optimizer).applied
