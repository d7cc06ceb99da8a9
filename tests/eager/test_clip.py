"""clip_grad_norm_ against the framework's own sequence: unscale_, its clip_grad_norm_, step."""

import math
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.chosen import examples
from tests.support.eager import library
from tests.support.eager.base import SHAPES, normal

INF = math.inf
PADDLE = library.name == "paddle"
NORM_TYPES = [2.0, 1.0, 0.0, INF] if PADDLE else [2.0, 1.0, 3.0, INF, "inf"]


class Clipped:
    """A scaler, and an optimizer with parameters of its own."""

    def __init__(self, scaler, make_optimizer=library.sgd, parameters=None):
        self.scaler = scaler
        self.parameters = parameters or library.parameters()
        self.optimizer = make_optimizer(self.parameters)

    def backward(self, gradients):
        library.clear_gradients(self.optimizer)
        library.backward(self.scaler, self.parameters, gradients)
        return self

    def unscale(self):
        self.scaler.unscale_(self.optimizer)
        return self

    def finish(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def gradients(self):
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def norm(self):
        return np.linalg.norm(values(self.gradients()))


class Ours(Clipped):
    def clip(self, *args, **kwargs):
        return self.scaler.clip_grad_norm_(self.optimizer, *args, **kwargs)

    def divides_once(self):
        """A fused optimizer divides by scale / coefficient, which rounds in another place."""
        return bool(getattr(self.optimizer, "defaults", {}).get("fused"))


class Native(Clipped):
    def clip(self, *args, **kwargs):
        return library.framework.nn.utils.clip_grad_norm_(self.parameters, *args, **kwargs)


@pytest.fixture
def ours(make_optimizer):
    return Ours(library.scaler(), make_optimizer)


@pytest.fixture
def theirs(make_optimizer, native):
    return Native(native(), make_optimizer)


def values(item):
    """All numbers in tensors, and in mappings and lists of them."""
    if library.is_tensor(item):
        return library.numpy(item).ravel().tolist()
    if isinstance(item, Mapping):
        item = list(item.values())
    return [value for each in item for value in values(each)] if isinstance(item, list) else []


def assert_same(ours, theirs, to_the_bit=True):
    """The same parameters, gradients and state: to the bit, or within a few roundings."""
    if to_the_bit:
        assert library.stepped(ours.optimizer) == library.stepped(theirs.optimizer)
    for kept in (library.owned, lambda _: ours.gradients(), library.state):
        mine = values(kept(ours.optimizer))
        np.testing.assert_allclose(mine, values(kept(theirs.optimizer)), rtol=1e-5, atol=1e-8)


def clip_both(ours, theirs, gradients, *args, **kwargs):
    """Clip on both sides; the norm, which is the same to the bit."""
    norm = ours.backward(gradients).clip(*args, **kwargs)
    native = theirs.backward(gradients).unscale().clip(*args, **kwargs)
    assert library.exact(norm) == library.exact(native)
    return norm


def finish_both(ours, theirs, to_the_bit=True):
    """Step and update on both sides, which end up the same."""
    ours.finish()
    theirs.finish()
    assert_same(ours, theirs, to_the_bit)


# Every order of calls.


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("max_norm", [0.5, 100.0, 0.0, INF])
def test_norm_and_step_are_the_framework_s(ours, theirs, max_norm, norm_type, finite):
    norm = clip_both(ours, theirs, finite, max_norm, norm_type)
    clipped = norm_type == 2 and norm.item() > max_norm > 0
    finish_both(ours, theirs, to_the_bit=not (clipped and ours.divides_once()))


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, INF])
def test_the_norm_is_that_of_all_unscaled_gradients_as_one_vector(norm_type, scaler, finite):
    norm = Ours(scaler).backward(finite).clip(1.0, norm_type)
    flat = np.concatenate([gradient.ravel() for gradient in finite])
    assert tuple(norm.shape) == ()
    assert norm.item() == pytest.approx(np.linalg.norm(flat, norm_type), rel=1e-6)


@pytest.mark.parametrize("unscale", ["before", "after", "never"])
def test_several_iterations_are_the_framework_s_whenever_unscaled(unscale, ours, theirs, finite):
    for factor in (1.0, 0.1, 10.0):
        gradients = [np.float32(factor) * gradient for gradient in finite]
        ours.backward(gradients)
        if unscale == "before":
            ours.unscale()
        ours.clip(0.5)
        if unscale == "after":
            ours.unscale()
        theirs.backward(gradients).unscale().clip(0.5)
        ours.finish()
        theirs.finish()
    rounds_elsewhere = ours.divides_once() or PADDLE  # which adds up squares in another order
    assert_same(ours, theirs, to_the_bit=unscale == "before" or not rounds_elsewhere)


@pytest.mark.parametrize("norm_type", [2.0, INF])
def test_unscaling_twice_after_clipping_is_refused(norm_type, ours, finite):
    ours.backward(finite).clip(0.5, norm_type)
    ours.unscale()
    with pytest.raises(RuntimeError, match="already been called"):
        ours.unscale()


@settings(
    max_examples=examples(40),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    clips=st.lists(
        st.tuples(st.floats(0.01, 10.0), st.sampled_from(sorted({*NORM_TYPES} - {"inf"}))),
        min_size=2,
        max_size=4,
    ),
    unscaled_first=st.booleans(),
)
def test_each_clip_clips_what_the_last_has_left(clips, unscaled_first, native):
    ours, theirs = Ours(library.scaler()), Native(native())
    gradients = normal(2, *SHAPES)
    ours.backward(gradients)
    theirs.backward(gradients).unscale()
    if unscaled_first:
        ours.unscale()
    for clip in clips:
        assert ours.clip(*clip).item() == pytest.approx(theirs.clip(*clip).item(), rel=2e-6)
    finish_both(ours, theirs, to_the_bit=False)


def test_the_gradients_are_unscaled_and_clipped_in_step_and_not_before(ours, finite):
    scaled = [gradient * np.float32(2.0**16) for gradient in finite]
    ours.backward(finite).clip(0.5)
    assert library.exact(ours.gradients()) == library.exact(list(map(library.tensor, scaled)))
    ours.finish()
    assert ours.norm() == pytest.approx(0.5, rel=1e-5)


def test_the_next_iteration_is_not_clipped(ours, theirs, finite):
    for side in (ours, theirs):
        side.backward(finite).unscale().clip(0.5)
        side.finish()
        side.backward(finite).finish()
    assert_same(ours, theirs)
    assert library.exact(ours.gradients()) == library.exact(list(map(library.tensor, finite)))


def test_one_optimizer_s_clipping_is_not_the_other_s(scaler, parameters, finite):
    first, second = (library.sgd([parameter]) for parameter in parameters)
    library.backward(scaler, parameters, finite)
    scaler.clip_grad_norm_(first, 0.01)
    scaler.step(first)
    scaler.step(second)
    assert np.linalg.norm(values([parameters[0].grad])) == pytest.approx(0.01, rel=1e-3)
    assert library.exact(parameters[1].grad) == library.exact(library.tensor(finite[1]))


def test_minimize_clips_too(ours, theirs, finite):
    ours.backward(finite).clip(0.5)
    ours.scaler.minimize(ours.optimizer, library.tensor([1.0]))
    theirs.backward(finite).unscale().clip(0.5)
    theirs.finish()
    assert_same(ours, theirs, to_the_bit=not ours.divides_once())


def test_disabled_it_is_the_framework_s_at_once(native, finite):
    ours, theirs = Ours(library.scaler(enabled=False)), Native(native(enabled=False))
    clip_both(ours, theirs, finite, 0.5)
    assert_same(ours, theirs)
    assert ours.norm() == pytest.approx(0.5, rel=1e-5)


def test_clipping_before_a_step_with_a_closure_is_refused_not_lost(ours, finite):
    ours.backward(finite).clip(0.5)
    with pytest.raises(RuntimeError, match="in the closure"):
        ours.scaler.step(ours.optimizer, lambda: None)
    ours.finish()
    assert ours.norm() == pytest.approx(0.5, rel=1e-5)


def test_a_step_that_raised_is_clipped_when_taken_again(ours, theirs, finite):
    def refuse(*_):
        raise ZeroDivisionError

    for side in (ours, theirs):
        side.backward(finite)
        if side is theirs:
            side.unscale()
        side.clip(0.5)
        side.optimizer.step = refuse
        with pytest.raises(ZeroDivisionError):
            side.scaler.step(side.optimizer)
        del side.optimizer.step
        side.finish()
    assert_same(ours, theirs, to_the_bit=not ours.divides_once())


# Gradients of every kind.


def test_zero_gradients_stay_zero(ours, theirs, finite):
    zero = [np.zeros_like(gradient) for gradient in finite]
    assert clip_both(ours, theirs, zero, 0.5).item() == 0.0
    finish_both(ours, theirs)


def test_without_any_gradient_the_norm_is_zero(ours):
    ours.scaler.scale(library.tensor([1.0]))
    assert ours.clip(1.0).item() == 0.0
    ours.finish()
    assert ours.scaler.last_step(ours.optimizer).reason == "no_gradients"


def test_parameters_without_a_gradient_are_passed_by(ours, theirs, finite):
    gradients = [None, finite[1]]
    clip_both(ours, theirs, gradients, 0.5)
    finish_both(ours, theirs, to_the_bit=not ours.divides_once())


def test_all_parameter_groups_count(native, finite):
    def two_groups(owned):
        first, second = owned
        return library.sgd([{"params": [first], "weight_decay": 0.5}, {"params": [second]}])

    ours, theirs = Ours(library.scaler(), two_groups), Native(native(), two_groups)
    clip_both(ours, theirs, finite, 0.5)
    finish_both(ours, theirs)


@pytest.mark.skipif(library.name == "paddle", reason="its kernels take one dtype")
def test_a_mix_of_dtypes_is_the_framework_s_to_the_bit(native):
    def side(kind, scaler):
        dtypes = ("float32", "bfloat16", "float64", "float32")
        values = (library.tensor([1.0, 1.0, 1.0], dtype) for dtype in dtypes)
        side = kind(scaler, library.sgd, library.make_parameters(*values))
        return side.backward([[1 / 3, 2 / 3, 1.0]] * 4)

    ours, theirs = side(Ours, library.scaler()), side(Native, native())
    assert library.exact(ours.clip(0.5)) == library.exact(theirs.unscale().clip(0.5))
    finish_both(ours, theirs)


@pytest.mark.parametrize("scale", [2.0**-80, 2.0**-100, 0.5])
def test_a_scale_at_which_squares_of_gradients_underflow_does_no_harm(
    scale, make_optimizer, native, finite
):
    ours = Ours(library.scaler(init_scale=scale), make_optimizer)
    theirs = Native(native(init_scale=scale), make_optimizer)
    clip_both(ours, theirs, finite, 0.5)
    finish_both(ours, theirs)


def test_without_clipping_every_bit_is_the_framework_s(ours, theirs, finite):
    for gradients in (finite, [gradient / 3 for gradient in finite]):
        ours.backward(gradients).clip(INF)
        theirs.backward(gradients).unscale()
        ours.finish()
        theirs.finish()
    assert library.stepped(ours.optimizer) == library.stepped(theirs.optimizer)


# Norms that are not finite.


def test_a_norm_that_overflows_though_the_gradients_are_finite_skips_nothing(ours, theirs):
    huge = [np.full(shape, 2.0 ** (50 + i), np.float32) for i, shape in enumerate(SHAPES)]
    clip_both(ours, theirs, huge, 1.0)
    finish_both(ours, theirs, to_the_bit=False)
    assert ours.scaler.last_step(ours.optimizer).applied
    assert ours.norm() == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("unscaled_first", [False, True])
def test_a_second_clip_of_a_norm_that_overflowed_finds_zeros_as_the_framework_s_does(
    unscaled_first, parameters
):
    before = library.exact(parameters)
    ours = Ours(library.scaler(init_scale=1.0), library.sgd, parameters)
    ours.backward([np.full(shape, 1e38, np.float32) for shape in SHAPES])
    if unscaled_first:
        ours.unscale()
    norms = [ours.clip(1.0).item() for _ in range(2)]
    ours.finish()
    assert norms == [INF, 0.0]
    assert library.exact(parameters) == before


@pytest.mark.parametrize("norm_type", [2.0, INF])
def test_a_norm_that_is_not_finite_is_returned_and_the_step_skipped(norm_type, ours, overflowed):
    before = library.exact(ours.parameters)
    assert ours.backward(overflowed).clip(0.5, norm_type).item() == INF
    ours.finish()
    assert library.exact(ours.parameters) == before
    assert ours.scaler.last_step(ours.optimizer).reason == "overflow"
    assert library.scale_of(ours.scaler) == 2.0**15


def test_a_norm_that_is_not_finite_can_be_an_error_that_changes_nothing(ours, overflowed):
    state = library.kept if PADDLE else library.stepped  # Paddle's gradients are unscaled by then
    before = state(ours.backward(overflowed).optimizer)
    with pytest.raises(RuntimeError, match=r"norm.*inf"):
        ours.clip(0.5, error_if_nonfinite=True)
    assert state(ours.optimizer) == before
    ours.finish()
    assert library.exact(ours.parameters) == before["parameters"]
    assert ours.scaler.last_step(ours.optimizer).reason == "overflow"


@pytest.mark.parametrize("norm_type", [2.0, INF])
def test_after_that_error_update_backs_off(norm_type, ours, overflowed):
    with pytest.raises(RuntimeError, match="norm"):
        ours.backward(overflowed).clip(0.5, norm_type, error_if_nonfinite=True)
    library.clear_gradients(ours.optimizer)
    ours.scaler.update()
    assert library.scale_of(ours.scaler) == 2.0**15


def test_after_that_error_the_step_is_not_clipped(ours, theirs, finite):
    ours.backward(finite).unscale()
    library.set_gradients(ours.parameters, [np.full_like(finite[0], INF), finite[1]])
    with pytest.raises(RuntimeError, match="norm"):
        ours.clip(0.5, error_if_nonfinite=True)
    library.set_gradients(ours.parameters, finite)
    ours.finish()
    theirs.backward(finite).finish()
    assert library.kept(ours.optimizer) == library.kept(theirs.optimizer)


def test_a_finite_norm_is_no_error(ours, theirs, finite):
    clip_both(ours, theirs, finite, 0.5, error_if_nonfinite=True)


@pytest.mark.parametrize("max_norm", [-1.0, math.nan, -INF])
@pytest.mark.parametrize("unscaled", [False, True], ids=["scaled", "unscaled"])
def test_a_bad_max_norm_is_an_error_that_changes_nothing(ours, max_norm, unscaled, finite):
    ours.backward(finite)
    if unscaled:
        ours.unscale()
    before = library.everything(ours.scaler, ours.optimizer)
    with pytest.raises(ValueError, match=f"max_norm.*{max_norm}"):
        ours.clip(max_norm)
    assert library.everything(ours.scaler, ours.optimizer) == before
