"""clip_grad_norm_ against TensorPlay's unscale_, tensorplay.nn.utils.clip_grad_norm_ and step."""

import copy
import math

import pytest
import tensorplay as tp
from tensorplay.nn.utils import clip_grad_norm_, get_total_norm

from gradscaler.tensorplay import GradScaler

INF = math.inf
OPTIMIZERS = {
    "SGD": (tp.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "foreach Adam": (tp.optim.Adam, {"foreach": True}),
    "fused Adagrad": (tp.optim.Adagrad, {"fused": True}),
    "fused SGD": (tp.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
}


@pytest.fixture(params=OPTIMIZERS)
def kind(request):
    optimizer, options = OPTIMIZERS[request.param]
    return lambda parameters: optimizer(parameters, **options)


class Side:
    """A scaler, and an optimizer with copies of the parameters."""

    def __init__(self, scaler, kind, parameters, backward):
        self.scaler = scaler
        self.parameters = copy.deepcopy(parameters)
        self.optimizer = kind(self.parameters)
        self.fused = bool(self.optimizer.defaults.get("fused"))
        self._backward = backward

    def backward(self, gradients):
        self.optimizer.zero_grad()
        self._backward(self.scaler, self.parameters, gradients)
        return self

    def unscale(self):
        self.scaler.unscale_(self.optimizer)
        return self

    def finish(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Ours(Side):
    def __init__(self, kind, parameters, backward):
        super().__init__(GradScaler(), kind, parameters, backward)

    def clip(self, *args, **kwargs):
        return self.scaler.clip_grad_norm_(self.optimizer, *args, **kwargs)


class Native(Side):
    """Clips as the documentation of TensorPlay's scaler says to: after unscale_."""

    def __init__(self, kind, parameters, backward):
        super().__init__(tp.amp.GradScaler("cpu"), kind, parameters, backward)

    def clip(self, *args, **kwargs):
        return clip_grad_norm_(self.parameters, *args, **kwargs)


@pytest.fixture
def ours(kind, parameters, backward):
    return Ours(kind, parameters, backward)


@pytest.fixture
def native(kind, parameters, backward):
    return Native(kind, parameters, backward)


# Every order of calls.


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, INF, "inf"])
@pytest.mark.parametrize("max_norm", [0.5, 100.0, 0.0, INF])
def test_norm_and_step_are_tensorplay_s(ours, native, max_norm, norm_type, finite, exact, stepped):
    mine = ours.backward(finite).clip(max_norm, norm_type)
    theirs = native.backward(finite).unscale().clip(max_norm, norm_type)
    assert exact(mine) == exact(theirs)
    ours.finish()
    native.finish()
    if ours.fused and norm_type == 2 and mine.item() > max_norm > 0:
        assert_close(ours, native)  # it divides once, by scale / coefficient
    else:
        assert stepped(ours.optimizer) == stepped(native.optimizer)


@pytest.mark.parametrize("scale", [2.0**-80, 2.0**-100, 0.5])
def test_a_scale_that_squares_of_gradients_underflow_at_is_no_hindrance(
    scale, ours, native, finite, exact, stepped
):
    ours.scaler = GradScaler(init_scale=scale)
    native.scaler = tp.amp.GradScaler("cpu", init_scale=scale)
    mine = ours.backward(finite).clip(0.5)
    theirs = native.backward(finite).unscale().clip(0.5)
    assert exact(mine) == exact(theirs)
    ours.finish()
    native.finish()
    assert stepped(ours.optimizer) == stepped(native.optimizer)


def assert_close(ours, native):
    """The same parameters, gradients and state to within a few roundings."""
    for mine, theirs in zip(ours.parameters, native.parameters, strict=True):
        assert tp.allclose(mine.grad, theirs.grad)
        assert tp.allclose(mine, theirs)
        for name, value in native.optimizer.state[theirs].items():
            if isinstance(value, tp.Tensor):
                assert tp.allclose(ours.optimizer.state[mine][name], value)


@pytest.mark.parametrize("unscaled_first", [False, True], ids=["alone", "after unscale_"])
def test_several_iterations_are_tensorplay_s(ours, native, unscaled_first, finite, stepped):
    for factor in (1.0, 0.1, 10.0):
        gradients = [factor * gradient for gradient in finite]
        ours.backward(gradients)
        if unscaled_first:
            ours.unscale()
        ours.clip(0.5)
        native.backward(gradients).unscale().clip(0.5)
        ours.finish()
        native.finish()
    if ours.fused and not unscaled_first:
        assert_close(ours, native)
    else:
        assert stepped(ours.optimizer) == stepped(native.optimizer)


def test_unscaling_after_clipping_is_in_order_too(ours, native, finite, stepped):
    ours.backward(finite).clip(0.5)
    ours.unscale().finish()
    native.backward(finite).unscale().clip(0.5)
    native.finish()
    assert stepped(ours.optimizer) == stepped(native.optimizer)


def test_a_second_clip_clips_what_the_first_has_left(ours, native, finite):
    ours.backward(finite)
    native.backward(finite).unscale()
    for max_norm in (1.0, 0.25, 0.5):
        assert ours.clip(max_norm).item() == pytest.approx(native.clip(max_norm).item())
    ours.finish()
    native.finish()
    for mine, theirs in zip(ours.parameters, native.parameters, strict=True):
        assert tp.allclose(mine, theirs)


def test_the_gradients_are_unscaled_and_clipped_in_step_and_not_before(ours, finite, exact):
    scaled = exact([parameter.grad for parameter in ours.backward(finite).parameters])
    ours.clip(0.5)
    assert exact([parameter.grad for parameter in ours.parameters]) == scaled
    ours.finish()
    norm = get_total_norm([parameter.grad for parameter in ours.parameters])
    assert norm.item() == pytest.approx(0.5, rel=1e-5)


def test_the_next_iteration_is_not_clipped(ours, native, finite, stepped):
    for side in (ours, native):
        side.backward(finite).unscale().clip(0.5)
        side.finish()
        side.backward(finite).finish()
    assert stepped(ours.optimizer) == stepped(native.optimizer)


def test_one_optimizer_s_clipping_is_not_the_other_s(parameters, finite, backward, exact):
    first, second = (tp.optim.SGD([parameter]) for parameter in parameters)
    scaler = GradScaler()
    backward(scaler, parameters, finite)
    scaler.clip_grad_norm_(first, 0.01)
    scaler.step(first)
    scaler.step(second)
    assert get_total_norm([parameters[0].grad]).item() == pytest.approx(0.01, rel=1e-3)
    assert exact(parameters[1].grad) == exact(finite[1])


def test_disabled_it_is_tensorplay_s_at_once(parameters, finite, exact):
    twins = copy.deepcopy(parameters)
    for parameter, gradient in zip([*parameters, *twins], [*finite, *finite], strict=True):
        parameter.grad = gradient.clone()
    optimizer = tp.optim.SGD(parameters)
    mine = GradScaler(enabled=False).clip_grad_norm_(optimizer, 0.5)
    assert exact(mine) == exact(clip_grad_norm_(twins, 0.5))
    assert exact([p.grad for p in parameters]) == exact([p.grad for p in twins])


# Gradients of every kind.


def test_zero_gradients_stay_zero(ours, native, finite, stepped):
    zero = [tp.zeros(gradient.shape) for gradient in finite]
    norms = ours.backward(zero).clip(0.5), native.backward(zero).unscale().clip(0.5)
    assert [norm.item() for norm in norms] == [0.0, 0.0]
    ours.finish()
    native.finish()
    assert stepped(ours.optimizer) == stepped(native.optimizer)


def test_without_any_gradient_the_norm_is_zero(parameters):
    scaler, optimizer = GradScaler(), tp.optim.SGD(parameters)
    scaler.scale(tp.ones(()))
    assert scaler.clip_grad_norm_(optimizer, 1.0).item() == 0.0
    scaler.step(optimizer)
    assert scaler.last_step(optimizer).reason == "no_gradients"


def test_all_parameter_groups_count(parameters, finite, backward, exact, stepped):
    def two_groups(owned):
        return tp.optim.SGD([{"params": [owned[0]], "lr": 0.5}, {"params": [owned[1]]}], lr=0.1)

    ours, native = (side(two_groups, parameters, backward) for side in (Ours, Native))
    mine, theirs = ours.backward(finite).clip(0.5), native.backward(finite).unscale().clip(0.5)
    assert exact(mine) == exact(theirs)
    ours.finish()
    native.finish()
    assert stepped(ours.optimizer) == stepped(native.optimizer)


def test_a_mix_of_dtypes_is_tensorplay_s_to_the_bit(backward, exact, stepped):
    dtypes = [tp.float32, tp.bfloat16, tp.float64, tp.float32]
    parameters = [tp.nn.Parameter(tp.ones(3, dtype=dtype)) for dtype in dtypes]
    gradients = [tp.tensor([1 / 3, 2 / 3, 1.0], dtype=dtype) for dtype in dtypes]
    ours, native = (side(tp.optim.SGD, parameters, backward) for side in (Ours, Native))
    mine = ours.backward(gradients).clip(0.5)
    theirs = native.backward(gradients).unscale().clip(0.5)
    assert exact(mine) == exact(theirs)
    ours.finish()
    native.finish()
    assert stepped(ours.optimizer) == stepped(native.optimizer)


def test_a_norm_that_overflows_though_the_gradients_are_finite_skips_nothing(ours, native):
    huge = [tp.full((2, 3), 2.0**50), tp.full((4,), 2.0**51)]
    mine = ours.backward(huge).clip(1.0)
    theirs = native.backward(huge).unscale().clip(1.0)
    assert mine.item() == theirs.item()
    ours.finish()
    native.finish()
    assert ours.scaler.last_step(ours.optimizer).applied
    assert_close(ours, native)


# Norms that are not finite, and bad arguments.


def test_a_norm_that_is_not_finite_is_returned_and_the_step_skipped(ours, overflowed, stepped):
    before = stepped(ours.optimizer)
    assert ours.backward(overflowed).clip(0.5).item() == INF
    ours.finish()
    assert stepped(ours.optimizer) == before
    assert ours.scaler.get_scale() == 2.0**15


def test_a_norm_that_is_not_finite_can_be_an_error(ours, overflowed):
    ours.backward(overflowed)
    with pytest.raises(RuntimeError, match=r"norm.*inf"):
        ours.clip(0.5, error_if_nonfinite=True)


def test_after_that_error_the_step_can_be_skipped_as_ever(ours, overflowed, stepped):
    before = stepped(ours.optimizer)
    ours.backward(overflowed)
    with pytest.raises(RuntimeError, match="norm"):
        ours.clip(0.5, error_if_nonfinite=True)
    ours.finish()
    assert stepped(ours.optimizer) == before
    assert ours.scaler.last_step(ours.optimizer).reason == "overflow"


def test_a_finite_norm_is_no_error(ours, native, finite, exact):
    mine = ours.backward(finite).clip(0.5, error_if_nonfinite=True)
    theirs = native.backward(finite).unscale().clip(0.5, error_if_nonfinite=True)
    assert exact(mine) == exact(theirs)


@pytest.mark.parametrize("max_norm", [-1.0, math.nan, -INF])
@pytest.mark.parametrize("unscaled", [False, True], ids=["scaled", "unscaled"])
def test_a_bad_max_norm_is_an_error_that_changes_nothing(
    ours, max_norm, unscaled, finite, everything
):
    ours.backward(finite)
    if unscaled:
        ours.unscale()
    before = everything(ours.scaler, ours.optimizer)
    with pytest.raises(ValueError, match=f"max_norm.*{max_norm}"):
        ours.clip(max_norm)
    assert everything(ours.scaler, ours.optimizer) == before
