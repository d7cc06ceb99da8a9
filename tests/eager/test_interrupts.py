"""Ctrl-C, or an optimizer that raises, at any line of a step: the next call is refused or right."""

import math
import pickle
from contextlib import suppress
from functools import cache, partial

import numpy as np
import pytest

from gradscaler import CallOrderError
from tests.support.chosen import IS_ALL
from tests.support.eager import library
from tests.support.interrupts import interrupting, moments, watching

PLACES = tuple(
    f"/gradscaler/{name}/" for name in ("_eager", "_torch_like", "_on_torch", library.name)
)
PLACES += (f"/{library.name}/optim/", f"/{library.name}/optimizer/")
GRADIENT = np.float32([3.0, -4.0])
INF = math.inf


class OneWeight:
    """One parameter whose true gradient is always the same; a step of lr 1 subtracts it."""

    def __init__(self, fused=False, clip=None):
        self.gradient = GRADIENT
        (self.weight,) = library.make_parameters(np.zeros(2, np.float32))
        self.optimizer = library.sgd([self.weight], lr=1.0, fused=fused)
        self.scaler = library.scaler(init_scale=1024.0)
        self.clip = clip  # the norm's type
        self.true_step = -GRADIENT * (0.5 if clip else 1.0)

    def begin(self, clear=True):
        if clear:
            library.clear_gradients(self.optimizer)
        self.scaled = library.backward(self.scaler, [self.weight], [self.gradient])

    def step(self):
        self.clip_if_asked()
        self.step_alone()

    def clip_if_asked(self):
        if self.clip:
            self.scaler.clip_grad_norm_(self.optimizer, 2.5 if self.clip == 2 else 2.0, self.clip)

    def step_alone(self):
        self.scaler.step(self.optimizer)

    def update(self):
        self.scaler.update()

    def minimize(self):
        self.scaler.minimize(self.optimizer, self.scaled)

    def step_with_closure(self):
        def closure():
            self.begin()
            self.clip_if_asked()

        self.scaler.step(self.optimizer, closure)

    def accumulate(self):
        """Two parts of the gradient, of which the second overflows once."""
        library.clear_gradients(self.optimizer)
        for part, overflows in ((0.25, 0), (0.75, 1)):
            for attempt in self.scaler.attempts(self.optimizer):
                factor = part if attempt >= overflows else np.inf
                library.backward(self.scaler, [self.weight], [GRADIENT * np.float32(factor)])

    def takes_a_true_step(self, calls):
        """Whether the calls moved the weight by the true step; False if they were refused."""
        before = library.numpy(self.weight)
        try:
            calls()
        except CallOrderError:
            np.testing.assert_array_equal(library.numpy(self.weight), before)
            return False
        moved = library.numpy(self.weight) - before
        np.testing.assert_allclose(moved, self.true_step, rtol=1e-6)
        return True

    def must_have_moved_once_at_most(self):
        assert max(library.numpy(self.weight) / self.true_step) <= 1.0 + 1e-6

    def raise_once(self, error):
        """Have the optimizer raise in place of its next step."""

        def raising(*_):
            vars(self.optimizer).pop("step")
            vars(self.optimizer).pop("minimize")
            raise error

        self.optimizer.step = self.optimizer.minimize = raising


@cache
def is_ours(code):
    return any(place in code.co_filename for place in PLACES)


def interrupted(training, call, before=None):
    """The training, interrupted at each line of a call in turn, after the call ``before``.

    A line that runs often is interrupted at its first time and its last. No interrupt leaves an
    attribute on a fused optimizer.
    """

    def begun():
        each = training()
        each.begin()
        if before:
            getattr(each, before)()
        return each

    seen = []
    for _ in range(2):  # the first time, more is made
        seen.clear()
        each = begun()
        with watching(seen.append, is_ours):
            getattr(each, call)()
    assert len(seen) > 10
    for moment in moments(seen):
        each = begun()
        with pytest.raises(KeyboardInterrupt), interrupting(moment, is_ours):
            getattr(each, call)()
        library.framework.set_grad_enabled(True)  # the framework's own step may leave it off
        assert not {"grad_scale", "found_inf"} & set(vars(each.optimizer))
        yield each


@pytest.fixture(params=[None, 2.0, math.inf], ids=["unclipped", "clipped", "clipped by inf"])
def clip(request):
    return request.param


@pytest.fixture
def training(fused, clip):
    return lambda: OneWeight(fused, clip)


# At any line.


@pytest.mark.parametrize("clear", [True, False], ids=["new gradients", "old gradients"])
def test_an_interrupted_iteration_repeated_is_refused_or_right(clear, training):
    def repeat(clear=True):
        each.begin(clear)
        each.step()

    results = []
    for each in interrupted(training, "step"):
        if not clear:
            each.weight.grad *= 0.0
        results.append(each.takes_a_true_step(lambda: repeat(clear)))
        each.scaler.update()
        assert each.takes_a_true_step(repeat)
    assert True in results
    assert clear or False in results
    if clear and IS_ALL:  # refused where the optimizer had begun; TensorPlay's is itself in Python
        assert sum(results) > (0.3 if library.name == "tensorplay" else 0.7) * len(results)


def test_an_interrupted_step_taken_again_is_refused_or_right(training):
    results = set()
    for each in interrupted(training, "step_alone", before="clip_if_asked"):
        results.add(each.takes_a_true_step(each.step_alone))
        each.must_have_moved_once_at_most()
    assert results == {False, True}


@pytest.mark.parametrize(("factor", "expected"), [(1.0, 2048.0), (INF, 512.0)])
def test_an_interrupted_update_repeated_moves_the_scale_once(factor, expected):
    def training():
        each = OneWeight()
        each.scaler = library.scaler(init_scale=1024.0, growth_interval=1)
        each.gradient = GRADIENT * np.float32(factor)
        return each

    for each in interrupted(training, "update", before="step"):
        with suppress(CallOrderError):  # all but its last line was done
            each.scaler.update()
        assert library.scale_of(each.scaler) == expected
        each.gradient = GRADIENT
        each.begin()
        each.step()
        each.scaler.update()
        assert library.scale_of(each.scaler) == 2.0 * expected


class BadBatch(OneWeight):
    """The second part of the gradient overflows at every scale."""

    parts = 0.25, INF

    def accumulate(self):
        library.clear_gradients(self.optimizer)
        for part in self.parts:
            for _ in self.scaler.attempts(self.optimizer, max_retries=2):
                library.backward(self.scaler, [self.weight], [GRADIENT * np.float32(part)])

    def repeat(self):
        self.accumulate()
        self.step()
        self.scaler.update()

    def go_on(self):
        self.step()
        self.scaler.update()

    def drop_the_batch(self):
        library.clear_gradients(self.optimizer)
        with suppress(CallOrderError):  # nothing was checked
            self.scaler.update()
        self.parts = 0.25, 0.75
        self.repeat()


@pytest.mark.parametrize("recover", ["repeat", "go_on", "drop_the_batch"])
def test_an_interrupted_loop_over_a_bad_batch_backs_off_at_most_once(recover):
    scales = set()
    for each in interrupted(BadBatch, "accumulate"):
        try:
            getattr(each, recover)()
        except CallOrderError:
            with suppress(CallOrderError):
                each.scaler.update()
            if recover != "go_on":
                getattr(each, recover)()
        scales.add(library.scale_of(each.scaler))
    assert (
        scales == {"repeat": {512.0}, "go_on": {512.0, 1024.0}, "drop_the_batch": {1024.0}}[recover]
    )


def test_an_interrupted_loop_keeps_a_scale_that_was_low_enough():
    class OneWeight512(OneWeight):
        def accumulate(self):
            library.clear_gradients(self.optimizer)
            for part in (0.25, 0.75):
                for _ in self.scaler.attempts(self.optimizer):
                    scale = float(library.numpy(self.scaler.scale(library.tensor([1.0])))[0])
                    factor = np.float32(part if scale <= 512.0 else INF)
                    library.backward(self.scaler, [self.weight], [GRADIENT * factor])

    for each in interrupted(OneWeight512, "accumulate"):
        try:
            accumulated_and_stepped(each)
        except CallOrderError:
            each.scaler.update()
            accumulated_and_stepped(each)
        each.scaler.update()
        assert library.scale_of(each.scaler) == 512.0


def test_nothing_switches_gradients_off_where_an_interrupt_could_leave_them_so(monkeypatch, fused):
    each = OneWeight(fused, clip=2.0)
    each.begin()
    each.step()
    each.scaler.update()
    monkeypatch.setattr(library.framework, "no_grad", lambda: pytest.fail("it uses no_grad()"))
    each.accumulate()
    each.clip_if_asked()
    each.scaler.unscale_(each.optimizer)
    each.optimizer.step = lambda *_: None
    each.step_alone()
    each.scaler.update()
    each.step_with_closure()
    each.scaler.update()
    each.gradient = GRADIENT * np.float32(INF)
    each.step_with_closure()


def test_an_interrupted_closure_repeated_is_refused_or_right(training):
    results = []
    for each in interrupted(training, "step_with_closure"):
        results.append(each.takes_a_true_step(each.step_with_closure))
        each.must_have_moved_once_at_most()
        each.scaler.update()
        assert each.takes_a_true_step(each.step_with_closure)
        each.scaler.update()
        pickle.dumps(each.scaler)
    assert not IS_ALL or sum(results) > 0.9 * len(results)


def accumulated_and_stepped(each):
    each.accumulate()
    each.step()


@pytest.mark.parametrize("after", ["clear", "go on"])
def test_an_interrupted_loop_over_attempts_is_refused_or_right(after):
    results = []
    for each in interrupted(OneWeight, "accumulate"):
        if after == "clear":
            results.append(each.takes_a_true_step(partial(accumulated_and_stepped, each)))
        else:  # some parts may be missing, but each counts by its own scale
            before = library.numpy(each.weight)
            with suppress(CallOrderError):
                each.step()
                results.append(True)
            moved = (library.numpy(each.weight) - before) / each.true_step
            assert set(moved) in ({0.0}, {0.25}, {0.75}, {1.0})
        with suppress(CallOrderError):  # nothing was checked
            each.scaler.update()
        assert each.takes_a_true_step(partial(accumulated_and_stepped, each))
        each.scaler.update()
        pickle.dumps(each.scaler)
    assert not IS_ALL or sum(results) > 0.7 * len(results)


def test_an_iteration_that_ended_between_clip_and_step_is_refused_or_right(training):
    each = training()
    each.begin()
    each.clip_if_asked()
    each.begin()
    assert each.takes_a_true_step(each.step) is (each.clip is None)
    each.scaler.update()
    each.begin()
    assert each.takes_a_true_step(each.step)


# In the optimizer.


@pytest.fixture(params=[KeyboardInterrupt, ZeroDivisionError])
def error(request):
    return request.param


@pytest.fixture(params=["step", "minimize"])
def raised(request, error):
    """A training whose optimizer raised, and in ``repeat`` the call to make again."""
    training = OneWeight()
    training.begin()
    training.raise_once(error)
    training.repeat = getattr(training, request.param)
    with pytest.raises(error):
        training.repeat()
    return training


def test_a_step_that_raised_can_be_taken_again_unless_it_was_interrupted(raised, error):
    assert raised.takes_a_true_step(raised.repeat) is (error is not KeyboardInterrupt)


def test_an_iteration_repeated_with_new_gradients_is_right(raised, error):
    for _ in range(2):  # a loop that skips batches
        raised.begin()
        raised.raise_once(error)
        with pytest.raises(error):
            raised.repeat()
    raised.begin()
    assert raised.takes_a_true_step(raised.repeat)


def test_an_iteration_repeated_with_the_old_gradients_is_refused_until_update(raised):
    before = library.kept(raised.optimizer)
    raised.begin(clear=False)
    with pytest.raises(CallOrderError, match=r"clear the gradients, call scaler\.update"):
        raised.repeat()
    assert library.kept(raised.optimizer) == before
    raised.scaler.update()
    raised.begin()
    assert raised.takes_a_true_step(raised.repeat)


def test_a_raised_step_of_one_optimizer_leaves_the_other_alone(raised):
    other = OneWeight()
    other.scaler = raised.scaler
    other.begin()
    assert other.takes_a_true_step(other.step)


# In a closure, and with gradients that overlap.


@pytest.mark.parametrize(
    ("call", "name"), [("step", "step"), ("update", "update"), ("minimize", "step")]
)
def test_a_call_in_a_closure_is_refused_by_name(call, name):
    training = OneWeight()
    before = library.kept(training.optimizer)
    calls = {"step": training.step, "update": training.scaler.update, "minimize": training.minimize}

    def closure():
        training.begin()
        calls[call]()

    with pytest.raises(CallOrderError, match=rf"{name}\(\) was called in a closure"):
        training.scaler.step(training.optimizer, closure)
    assert library.kept(training.optimizer) == before


@pytest.mark.parametrize("calls", ["step", "unscale_ step", "clip_grad_norm_ step"])
@pytest.mark.parametrize("size", [100, 20_000])
def test_an_expanded_gradient_steps_as_a_whole_one_does(size, fused, calls):
    weights = []
    ones = np.ones(size, np.float32)
    for gradient in (library.expanded(1024.0, size), library.tensor(1024.0 * ones)):
        (weight,) = library.make_parameters(ones)
        optimizer = library.adamw([weight], lr=0.5, fused=fused)
        scaler = library.scaler(init_scale=1024.0)
        scaler.scale(library.tensor([0.0]))
        weight.grad = gradient
        for call in calls.split():
            getattr(scaler, call)(optimizer, *([1.0] if "clip" in call else []))
        weights.append(library.numpy(weight))
    np.testing.assert_array_equal(*weights)
    assert (weights[0] != ones).all()
