"""Steps that the user leaves out after clipping, and steps that the user takes instead of them."""

import numpy as np
import pytest

from gradscaler import CallOrderError
from tests.support.eager import library
from tests.support.eager.base import SHAPES, normal

LIMIT = 8.0
FACTORS = {"finite": 1.0, "too large": 100.0, "overflow": np.inf}
LOOPS = [
    ["finite", "too large", "finite"],
    ["too large", "finite", "too large", "too large", "finite"],
    ["overflow", "too large", "finite", "overflow", "finite"],
    ["too large"] * 3,
]


class Guarded:
    """A loop that leaves out the step of a batch whose gradients have too large a norm.

    The limit is that of the norm; None takes each step.
    """

    def __init__(self, scaler, make_optimizer, clip, limit=LIMIT):
        self.scaler, self.clip, self.limit = scaler, clip, limit
        self.parameters = library.parameters()
        self.optimizer = make_optimizer(self.parameters)
        self.norms = []

    def iterate(self, kind, clears_at_once):
        gradients = [FACTORS[kind] * gradient for gradient in normal(3, *SHAPES)]
        library.backward(self.scaler, self.parameters, gradients)
        norm = self.clip(self)
        self.norms.append(norm.item())
        if self.limit is None or norm < self.limit:
            self.scaler.step(self.optimizer)
        elif clears_at_once:
            library.clear_gradients(self.optimizer)
        self.scaler.update()
        library.clear_gradients(self.optimizer)


def clip(guarded):
    return guarded.scaler.clip_grad_norm_(guarded.optimizer, 1.0)


def unscale_and_clip(guarded):
    guarded.scaler.unscale_(guarded.optimizer)
    return clip(guarded)


def clip_and_unscale(guarded):
    norm = clip(guarded)
    guarded.scaler.unscale_(guarded.optimizer)
    return norm


def clip_natively(guarded):
    guarded.scaler.unscale_(guarded.optimizer)
    return library.framework.nn.utils.clip_grad_norm_(guarded.parameters, 1.0)


@pytest.mark.parametrize("clears_at_once", [False, True])
@pytest.mark.parametrize("kinds", LOOPS, ids=", ".join)
@pytest.mark.parametrize("way", [clip, unscale_and_clip, clip_and_unscale])
def test_a_step_can_be_left_out_after_clipping(
    way, kinds, clears_at_once, place, make_optimizer, native
):
    """Parameters are those of the native scaler, and the scale is that of one without a limit."""
    rule = {"init_scale": 2.0**10, "growth_interval": 2}
    ours = Guarded(library.scaler(**rule), make_optimizer, way)
    theirs = Guarded(native(**rule), make_optimizer, clip_natively)
    unlimited = Guarded(native(**rule), make_optimizer, clip_natively, limit=None)
    for kind in kinds:
        for each in (ours, theirs, unlimited):
            each.iterate(kind, clears_at_once)
        assert library.scale_of(ours.scaler) == library.scale_of(unlimited.scaler)
    native_norms = np.where(np.isnan(theirs.norms), np.inf, theirs.norms)  # NaN is Paddle's
    assert ours.norms == pytest.approx(native_norms, rel=1e-5)
    kept = [[library.numpy(parameter) for parameter in each.parameters] for each in (ours, theirs)]
    for mine, native_s in zip(*kept, strict=True):
        np.testing.assert_allclose(mine, native_s, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("kinds", LOOPS, ids=", ".join)
def test_a_step_that_is_left_out_changes_neither_parameters_nor_state(kinds, make_optimizer):
    guarded = Guarded(library.scaler(), make_optimizer, clip)
    for kind in kinds:
        before = library.kept(guarded.optimizer)
        guarded.iterate(kind, clears_at_once=False)
        assert (library.kept(guarded.optimizer) == before) is (kind != "finite")


def test_a_parameter_that_is_nan_is_not_taken_for_one_that_changed():
    guarded = Guarded(library.scaler(), library.sgd, clip)
    guarded.parameters = library.make_parameters(*[np.full(shape, np.nan) for shape in SHAPES])
    guarded.optimizer = library.sgd(guarded.parameters)
    guarded.iterate("too large", clears_at_once=False)


# Steps that the scaler does not see.


class Unaware:
    """A loop that clips by the scaler, and steps by the optimizer."""

    def __init__(self, make_optimizer):
        self.guarded = Guarded(library.scaler(), make_optimizer, clip)
        self.optimizer = self.guarded.optimizer
        self.gradients = normal(3, *SHAPES)

    def clip_and_step(self, step):
        library.clear_gradients(self.optimizer)
        guarded = self.guarded
        library.backward(guarded.scaler, guarded.parameters, self.gradients)
        clip(guarded)
        step()
        guarded.scaler.update()

    def clip_and_step_by_itself(self):
        self.clip_and_step(self.optimizer.step)


@pytest.fixture
def unaware(make_optimizer):
    return Unaware(make_optimizer)


def test_the_first_step_of_an_optimizer_by_itself_after_clipping_is_an_error(unaware, place):
    with pytest.raises(CallOrderError, match=r"scaler\.step\(optimizer\)"):
        unaware.clip_and_step_by_itself()


def test_that_error_moves_no_scale_and_can_be_ended_by_the_scaler_s_step(unaware):
    with pytest.raises(CallOrderError):
        unaware.clip_and_step_by_itself()
    scaler = unaware.guarded.scaler
    assert library.scale_of(scaler) == 2.0**16
    scaler.step(unaware.optimizer)
    scaler.update()
    assert scaler.last_step(unaware.optimizer).applied


@pytest.mark.parametrize("ways", ["s", "ss", "s-", "s-s", "ss--"])
def test_so_is_one_after_steps_that_the_scaler_took_and_left_out(ways, unaware, place):
    scaler = unaware.guarded.scaler
    for way in ways:
        step = {"s": lambda: scaler.step(unaware.optimizer), "-": lambda: None}[way]
        unaware.clip_and_step(step)
    with pytest.raises(CallOrderError, match=r"scaler\.step\(optimizer\)"):
        unaware.clip_and_step_by_itself()


@pytest.mark.parametrize("ways", ["", "-", "s-"])
def test_a_step_that_does_not_move_the_smallest_parameter_is_noticed_too(ways):
    """Until the scaler has taken a step, and after one that was left out."""
    unaware = Unaware(library.sgd)
    smallest = min(range(len(SHAPES)), key=lambda n: np.prod(SHAPES[n]))
    unaware.gradients[smallest] *= 0
    step = {"s": lambda: unaware.guarded.scaler.step(unaware.optimizer), "-": lambda: None}
    for way in ways:
        unaware.clip_and_step(step[way])
    with pytest.raises(CallOrderError, match=r"scaler\.step\(optimizer\)"):
        unaware.clip_and_step_by_itself()


def test_so_is_one_of_two_optimizers_whose_steps_were_left_out_together():
    scaler, all_of = library.scaler(), [library.parameters() for _ in range(2)]
    optimizers = [library.sgd(parameters) for parameters in all_of]
    gradients = normal(3, *SHAPES)
    gradients[min(range(len(SHAPES)), key=lambda n: np.prod(SHAPES[n]))] *= 0

    def iterate(step):
        for parameters, optimizer in zip(all_of, optimizers, strict=True):
            library.clear_gradients(optimizer)
            library.backward(scaler, parameters, gradients)
        for optimizer in optimizers:
            scaler.clip_grad_norm_(optimizer, 1.0)
        step()
        scaler.update()

    iterate(lambda: [scaler.step(optimizer) for optimizer in optimizers])
    iterate(lambda: None)
    with pytest.raises(CallOrderError, match=r"scaler\.step\(optimizer\)"):
        iterate(optimizers[0].step)


@pytest.mark.skipif(library.name == "paddle", reason="its parameters have no data")
def test_an_optimizer_that_writes_through_data_is_noticed():
    class Old(library.framework.optim.SGD):
        def step(self):
            for parameter in library.owned(self):
                parameter.data.sub_(parameter.grad, alpha=1e-6)

    unaware = Unaware(lambda parameters: Old(parameters, lr=0.1))
    with pytest.raises(CallOrderError, match=r"scaler\.step\(optimizer\)"):
        unaware.clip_and_step_by_itself()


def test_each_optimizer_of_the_user_s_is_noticed_beside_one_of_the_scaler_s(parameters, finite):
    scaler = library.scaler()
    first, second = (library.sgd([parameter]) for parameter in parameters)
    library.backward(scaler, parameters, finite)
    for optimizer in (first, second):
        scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(first)
    second.step()
    with pytest.raises(CallOrderError, match=r"scaler\.step\(optimizer\)"):
        scaler.update()


# Several optimizers of one loss, with an update() for each.


@pytest.mark.parametrize("check", ["clip_grad_norm_", "unscale_"])
def test_steps_may_be_left_out_of_optimizers_that_were_checked_together(check, parameters, finite):
    scaler = library.scaler(init_scale=1024.0)
    first, second = (library.sgd([parameter]) for parameter in parameters)
    library.backward(scaler, parameters, finite)
    for optimizer in (first, second):
        getattr(scaler, check)(optimizer, *[1.0] * (check == "clip_grad_norm_"))
    before = library.numpy(parameters[1])
    scaler.step(first)
    scaler.update()
    scaler.update()  # the second's step is left out
    assert library.scale_of(scaler) == 1024.0
    np.testing.assert_array_equal(library.numpy(parameters[1]), before)
    assert scaler.last_step(first).applied
