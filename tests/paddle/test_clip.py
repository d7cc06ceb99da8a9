"""clip_grad_norm_ against unscale_, paddle.nn.utils.clip_grad_norm_ and step."""

import math

import numpy as np
import paddle
import pytest

from gradscaler.paddle import GradScaler

INF = math.inf


class Side:
    """A scaler, and an optimizer with parameters of its own."""

    def __init__(self, make, backward, **options):
        self.scaler = GradScaler(init_loss_scaling=1024.0, **options)
        self.parameters = make([2, 3], [4])
        self.optimizer = paddle.optimizer.Momentum(0.1, parameters=self.parameters)
        self._backward = backward

    def backward(self, gradients):
        self.optimizer.clear_grad()
        self._backward(self.scaler, self.parameters, gradients)

    def finish(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Ours(Side):
    def clip(self, *args, **kwargs):
        return self.scaler.clip_grad_norm_(self.optimizer, *args, **kwargs)


class Paddles(Side):
    """Clips as one does without gradscaler: after unscale_."""

    def clip(self, *args, **kwargs):
        self.scaler.unscale_(self.optimizer)
        return paddle.nn.utils.clip_grad_norm_(self.parameters, *args, **kwargs)


@pytest.fixture
def ours(make, backward):
    return Ours(make, backward)


@pytest.fixture
def paddles(make, backward):
    return Paddles(make, backward)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 0.0, INF])
@pytest.mark.parametrize("max_norm", [0.5, 100.0, 0.0])
def test_norm_and_steps_are_paddle_s(max_norm, norm_type, ours, paddles, finite):
    for _ in range(3):
        norms = []
        for side in (ours, paddles):
            side.backward(finite)
            norms.append(side.clip(max_norm, norm_type).item())
            side.finish()
        assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    for mine, theirs in zip(ours.parameters, paddles.parameters, strict=True):
        np.testing.assert_allclose(mine.numpy(), theirs.numpy(), rtol=1e-6)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, INF])
def test_the_norm_is_that_of_all_unscaled_gradients_as_one_vector(norm_type, ours, finite):
    ours.backward(finite)
    norm = ours.clip(1.0, norm_type)
    flat = np.concatenate([gradient.ravel() for gradient in finite])
    assert norm.shape == []
    assert norm.item() == pytest.approx(np.linalg.norm(flat, norm_type), rel=1e-6)


def test_clipping_an_infinite_norm_only_measures(ours, finite, exact):
    ours.backward(finite)
    ours.clip(INF)
    ours.finish()
    plain = [paddle.to_tensor(gradient) for gradient in finite]
    assert exact([parameter.grad for parameter in ours.parameters]) == exact(plain)


@pytest.mark.parametrize("unscale", ["before", "after", "never"])
def test_unscaling_before_or_after_clipping_changes_nothing(
    unscale, ours, paddles, finite, stepped
):
    ours.backward(finite)
    if unscale == "before":
        ours.scaler.unscale_(ours.optimizer)
    ours.clip(0.5)
    if unscale == "after":
        ours.scaler.unscale_(ours.optimizer)
    ours.finish()
    paddles.backward(finite)
    paddles.clip(0.5)
    paddles.finish()
    assert stepped(ours.optimizer) == stepped(paddles.optimizer)


def test_minimize_clips_too(ours, paddles, finite, stepped):
    for side in (ours, paddles):
        side.backward(finite)
        side.clip(0.5)
        side.scaler.minimize(side.optimizer, paddle.ones([1]))
    assert stepped(ours.optimizer) == stepped(paddles.optimizer)


def test_a_norm_that_overflows_though_the_gradients_are_finite_skips_nothing(ours):
    ours.backward([np.full([2, 3], 2.0**50, np.float32), np.full([4], 2.0**51, np.float32)])
    ours.clip(1.0)
    ours.finish()
    assert ours.scaler.last_step(ours.optimizer).applied
    flat = np.concatenate([parameter.grad.numpy().ravel() for parameter in ours.parameters])
    assert np.linalg.norm(flat) == pytest.approx(1.0, rel=1e-5)


def test_the_gradients_are_unscaled_and_clipped_in_step_and_not_before(ours, finite):
    ours.backward(finite)
    scaled = ours.parameters[0].grad.numpy().copy()
    ours.clip(0.5)
    assert (ours.parameters[0].grad.numpy() == scaled).all()
    ours.finish()
    flat = np.concatenate([parameter.grad.numpy().ravel() for parameter in ours.parameters])
    assert np.linalg.norm(flat) == pytest.approx(0.5, rel=1e-5)


def test_the_next_iteration_is_not_clipped(ours, finite, exact):
    ours.backward(finite)
    ours.clip(0.5)
    ours.finish()
    ours.backward(finite)
    ours.finish()
    plain = [paddle.to_tensor(gradient) for gradient in finite]
    assert exact([parameter.grad for parameter in ours.parameters]) == exact(plain)


def test_a_second_call_clips_what_the_first_has_left(ours, finite):
    ours.backward(finite)
    ours.clip(0.5)
    assert ours.clip(0.25).item() == pytest.approx(0.5, rel=1e-5)
    ours.finish()
    flat = np.concatenate([parameter.grad.numpy().ravel() for parameter in ours.parameters])
    assert np.linalg.norm(flat) == pytest.approx(0.25, rel=1e-5)


def test_the_optimizer_s_own_grad_clip_comes_after(make, backward, finite):
    parameters = make([2, 3], [4])
    clip = paddle.nn.ClipGradByValue(0.01)
    optimizer = paddle.optimizer.SGD(1.0, parameters=parameters, grad_clip=clip)
    scaler = GradScaler()
    before = [parameter.numpy() for parameter in parameters]
    backward(scaler, parameters, finite)
    scaler.clip_grad_norm_(optimizer, 0.5)
    scaler.step(optimizer)
    norm = np.linalg.norm(np.concatenate([gradient.ravel() for gradient in finite]))
    for parameter, start, gradient in zip(parameters, before, finite, strict=True):
        expected = np.clip(gradient * (0.5 / norm), -0.01, 0.01)
        np.testing.assert_allclose(start - parameter.numpy(), expected, atol=1e-6)


def test_disabled_it_clips_at_once(make, finite):
    parameters = make([2, 3], [4])
    optimizer = paddle.optimizer.SGD(parameters=parameters)
    for parameter, gradient in zip(parameters, finite, strict=True):
        parameter.grad = paddle.to_tensor(gradient)
    GradScaler(enable=False).clip_grad_norm_(optimizer, 0.5)
    flat = np.concatenate([parameter.grad.numpy().ravel() for parameter in parameters])
    assert np.linalg.norm(flat) == pytest.approx(0.5, rel=1e-5)


def test_without_any_gradient_the_norm_is_zero(ours):
    ours.scaler.scale(paddle.ones([]))
    assert ours.clip(1.0).item() == 0.0
    ours.finish()
    assert ours.scaler.last_step(ours.optimizer).reason == "no_gradients"


def test_all_parameter_groups_count(make, backward, finite):
    parameters = make([2, 3], [4])
    groups = [{"params": [each]} for each in parameters]
    optimizer = paddle.optimizer.SGD(parameters=groups)
    scaler = GradScaler()
    backward(scaler, parameters, finite)
    flat = np.concatenate([gradient.ravel() for gradient in finite])
    norm = scaler.clip_grad_norm_(optimizer, 1.0).item()
    assert norm == pytest.approx(np.linalg.norm(flat), rel=1e-6)


@pytest.mark.parametrize("scale", [2.0**-80, 2.0**-100, 0.5])
def test_a_scale_that_squares_of_gradients_underflow_at_is_no_hindrance(scale, ours, finite):
    ours.scaler.set_init_loss_scaling(scale)
    ours.backward(finite)
    flat = np.concatenate([gradient.ravel() for gradient in finite])
    assert ours.clip(0.5).item() == pytest.approx(np.linalg.norm(flat), rel=1e-6)
    ours.finish()
    clipped = np.concatenate([p.grad.numpy().ravel() for p in ours.parameters])
    assert np.linalg.norm(clipped) == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_gradients_of_any_dtype_are_clipped(dtype):
    parameter = paddle.zeros([2], dtype)
    parameter.stop_gradient = False
    parameter.grad = paddle.to_tensor([3.0 * 1024, 4.0 * 1024]).astype(dtype)
    optimizer = paddle.optimizer.SGD(parameters=[parameter])
    optimizer.step = lambda: None  # not every dtype has a kernel for it on the CPU
    scaler = GradScaler(init_loss_scaling=1024.0)
    norm = scaler.clip_grad_norm_(optimizer, 1.25)
    scaler.step(optimizer)
    assert norm.item() == 5.0
    clipped = parameter.grad.astype("float64").numpy()
    np.testing.assert_allclose(clipped, [0.75, 1.0], rtol=1e-6 if dtype[-2:] > "16" else 2**-7)


def test_clipping_hard_does_not_lose_what_fp16_can_hold():
    """A coefficient below 2**-24 is 0 in fp16, but what it leaves of a gradient is not."""
    parameter = paddle.zeros([1], "float16")
    parameter.stop_gradient = False
    parameter.grad = paddle.to_tensor([32768.0]).astype("float16")
    optimizer = paddle.optimizer.SGD(parameters=[parameter])
    optimizer.step = lambda: None
    scaler = GradScaler(init_loss_scaling=1.0)
    scaler.clip_grad_norm_(optimizer, 2.0**-12)
    scaler.step(optimizer)
    assert parameter.grad.astype("float64").item() == pytest.approx(2.0**-12, rel=1e-3)


def test_the_norm_of_float64_gradients_is_taken_in_float64():
    parameter = paddle.zeros([2], "float64")
    parameter.stop_gradient = False
    parameter.grad = paddle.to_tensor([3e100, 4e100], "float64")
    optimizer = paddle.optimizer.SGD(1.0, parameters=[parameter])
    scaler = GradScaler(init_loss_scaling=1.0)
    assert scaler.clip_grad_norm_(optimizer, 1.0).item() == pytest.approx(5e100)
    scaler.step(optimizer)
    np.testing.assert_allclose(parameter.numpy(), [-0.6, -0.8], rtol=1e-6)


@pytest.mark.parametrize("norm_type", [2.0, INF])
def test_a_norm_that_is_not_finite_is_returned_and_the_step_skipped(
    norm_type, ours, overflowed, exact
):
    before = exact(ours.parameters)
    ours.backward(overflowed)
    assert not math.isfinite(ours.clip(1.0, norm_type).item())
    ours.finish()
    assert ours.scaler.last_step(ours.optimizer).reason == "overflow"
    assert exact(ours.parameters) == before


def test_a_norm_that_is_not_finite_can_be_an_error(ours, overflowed):
    ours.backward(overflowed)
    with pytest.raises(RuntimeError, match="norm"):
        ours.clip(1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("max_norm", [-1.0, math.nan, -INF])
def test_a_bad_max_norm_is_an_error_that_changes_nothing(max_norm, ours, finite, everything):
    ours.backward(finite)
    before = everything(ours.scaler, ours.optimizer)
    with pytest.raises(ValueError, match="max_norm"):
        ours.clip(max_norm)
    assert everything(ours.scaler, ours.optimizer) == before
