"""clip_grad_norm_ in Paddle only: Paddle's own clipping after ours, float16 and float64."""

import numpy as np
import paddle
import pytest

from gradscaler.paddle import GradScaler
from tests.support.eager import library


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


@pytest.mark.parametrize(
    ("dtype", "scale", "gradient", "norm", "max_norm", "clipped"),
    [
        *((dtype, 1024.0, [3.0, 4.0], 5.0, 1.25, [0.75, 1.0]) for dtype in library.dtypes),
        # A coefficient below 2**-24 is 0 in fp16, but the clipped gradient is not.
        ("float16", 1.0, [32768.0], 32768.0, 2.0**-12, [2.0**-12]),
        ("float64", 1.0, [3e100, 4e100], 5e100, 1.0, [0.6, 0.8]),
    ],
)
def test_gradients_are_measured_and_clipped_in_any_dtype(
    dtype, scale, gradient, norm, max_norm, clipped
):
    (parameter,) = library.make_parameters(library.tensor(np.zeros(len(gradient)), dtype))
    library.set_gradients([parameter], [scale * np.array(gradient)])
    optimizer = paddle.optimizer.SGD(parameters=[parameter])
    optimizer.step = lambda: None  # not every dtype has a kernel for it on the CPU
    scaler = GradScaler(init_loss_scaling=scale)
    assert scaler.clip_grad_norm_(optimizer, max_norm).item() == pytest.approx(norm)
    scaler.step(optimizer)
    rounding = 2.0**-7 if dtype in ("float16", "bfloat16") else 1e-6
    np.testing.assert_allclose(library.numpy(parameter.grad), clipped, rtol=rounding)


@pytest.mark.parametrize("gradient", [[np.nan, 1.0], [1.0, np.nan]])
def test_the_largest_magnitude_is_nan_where_one_is(gradient):
    """Paddle's own norm of infinite order forgets a NaN that comes before a number."""
    (parameter,) = library.make_parameters(library.tensor(np.zeros(2), "float32"))
    library.set_gradients([parameter], [np.array(gradient)])
    optimizer = paddle.optimizer.SGD(parameters=[parameter])
    assert np.isnan(GradScaler().clip_grad_norm_(optimizer, 1.0, np.inf).item())
