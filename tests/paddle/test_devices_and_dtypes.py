"""It scales wherever Paddle's switches itself off; gradients of any dtype, or none at all.

On the CPU Paddle has no fp16 kernels to compute or to step in. So half-precision gradients come
here from a cast's backward pass, and the optimizer that steps fp16 parameters is written out below.
"""

import subprocess
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from paddle.base.framework import EagerParamBase

from gradscaler.paddle import GradScaler
from tests.support.eager import library

HALVES = ["float16", "bfloat16"]
INF = float("inf")


def parameter(values, dtype):
    return EagerParamBase.from_tensor(library.tensor(values, dtype))


def backward(scaler, parameters, gradients):
    """A backward pass through float64, so that each gradient is rounded once, to its own dtype."""
    pairs = zip(parameters, gradients, strict=True)
    parts = [(p.double() * library.tensor(gradient, "float64")).sum() for p, gradient in pairs]
    scaler.scale(sum(parts)).backward()


class MasterWeightSGD(paddle.optimizer.Optimizer):
    """Steps as multi_precision=True does on a GPU, with operations that the CPU has for fp16."""

    def __init__(self, learning_rate, parameters, **options):
        super().__init__(learning_rate, parameters, **options)
        self._multi_precision = True

    def _create_accumulators(self, block, parameters):
        for each in parameters["params"] if isinstance(parameters, dict) else parameters:
            if each.name not in self._master_weights:
                self._master_weights[each.name] = each.astype("float32").detach()

    def _append_optimize_op(self, block, pair):
        owned, gradient = pair["params"] if isinstance(pair, dict) else pair
        master = self._master_weights[owned.name]
        master.set_value(master - self.get_lr() * gradient.astype("float32"))
        owned.set_value(master.astype(owned.dtype))


def assert_runs_in_a_process_of_its_own(code):
    """Where a fault would be Paddle's own and end the process."""
    start = """
import warnings
warnings.simplefilter("ignore")
import paddle
from gradscaler.paddle import GradScaler
"""
    command = [sys.executable, "-c", start + code]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, f"{result.returncode}: {result.stderr[-1000:]}"


# Devices and autocast.


def test_paddle_s_own_switches_itself_off_on_the_cpu_and_gradscaler_does_not():
    with pytest.warns(UserWarning, match="it makes no effect"):
        assert not paddle.amp.GradScaler().is_enable()
    scaler = GradScaler()
    assert scaler.is_enable()
    assert scaler.scale(paddle.ones([1])).item() == 32768.0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_paddle_s_own_switches_itself_off_under_another_autocast_and_gradscaler_does_not(
    dtype, native, monkeypatch
):
    module = sys.modules["paddle.amp.grad_scaler"]
    monkeypatch.setattr(module, "amp_global_state", lambda: SimpleNamespace(amp_dtype=dtype))
    theirs, ours = native(), GradScaler()
    with pytest.warns(UserWarning, match="disable"):
        assert theirs.scale(paddle.ones([1])).item() == 1.0
    assert not theirs.is_enable()
    for _ in range(2):
        assert ours.scale(paddle.ones([1])).item() == 32768.0
    assert ours.is_enable()
    assert ours.is_use_dynamic_loss_scaling()


@pytest.mark.parametrize("dtype", [None, *HALVES])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_loop_under_autocast_scales_steps_and_grows(level, dtype):
    model = paddle.nn.Linear(3, 2)
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    scaler = GradScaler(init_loss_scaling=1024.0, incr_every_n_steps=2)
    before = model.weight.numpy()
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "amp_guard can only be enabled", UserWarning)
            with paddle.amp.auto_cast(dtype is not None, level=level, dtype=dtype or "float16"):
                loss = model(paddle.ones([4, 3])).mean()
        scaled = scaler.scale(loss)
        assert scaled.item() == loss.item() * 1024.0
        scaled.backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.last_step(optimizer).applied
        optimizer.clear_grad()
    assert scaler.state_dict()["scale"] == [2048.0]
    np.testing.assert_allclose(before - model.weight.numpy(), 2 * 0.1 * 0.5, rtol=1e-5)


def test_making_and_using_a_scaler_warns_of_nothing(parameters, finite):
    optimizer = paddle.optimizer.SGD(0.1, parameters=parameters)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler = GradScaler()
        backward(scaler, parameters, finite)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scaler._scale = scaler._scale * 2.0


def test_an_uninitialised_loss_is_returned_as_it_is_as_by_paddle():
    """On the ranks of a pipeline that do not compute it."""
    assert_runs_in_a_process_of_its_own("""
import paddle.distributed as dist
elsewhere = dist.ProcessMesh([1], dim_names=["x"])
loss = dist.shard_tensor(paddle.ones([1]), elsewhere, [dist.Replicate()])
assert not loss._is_initialized()
assert GradScaler().scale(loss) is loss
""")


def test_an_optimizer_on_an_xpu_finds_the_flag_that_it_asks_is_dist(
    scaler, parameters, finite, monkeypatch
):
    """Paddle's optimizers call found_inf.is_dist() there, so it has to be a tensor."""
    optimizer = paddle.optimizer.SGD(0.1, parameters=parameters)
    backward(scaler, parameters, finite)
    monkeypatch.setattr(paddle.device, "get_device", lambda: "xpu:0")
    scaler.step(optimizer)
    assert scaler.last_step(optimizer).applied


# Dtypes of gradients.


@pytest.mark.parametrize("stop_gradient", [True, False])
@pytest.mark.parametrize("dtype", library.dtypes)
def test_gradients_that_were_assigned_are_unscaled(dtype, stop_gradient, scaler):
    each = parameter([1.0, 2.0], dtype)
    each.grad = paddle.to_tensor([512.0, -2048.0], stop_gradient=stop_gradient).astype(dtype)
    scaler.unscale_(paddle.optimizer.SGD(parameters=[each]))
    assert library.numpy(each.grad).tolist() == [0.5, -2.0]


# A weight that is used transposed has a gradient in another order in memory than in shape.

ROWS = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]


def transposed(scaler, dtype="float32"):
    """An optimizer, and a weight whose true gradient is ``ROWS``, in memory its transpose."""
    weight = parameter(np.zeros([2, 3]), dtype)
    scaler.scale((weight.t().double() * library.tensor(ROWS, "float64").t()).sum()).backward()
    assert not weight.grad.is_contiguous()
    return paddle.optimizer.SGD(1.0, parameters=[weight]), weight


@pytest.mark.parametrize("dtype", library.dtypes)
def test_the_gradient_of_a_transposed_weight_keeps_its_order(dtype, scaler):
    optimizer, weight = transposed(scaler, dtype)
    scaler.unscale_(optimizer)
    assert library.numpy(weight.grad).tolist() == ROWS


def test_an_overflow_in_the_gradient_of_a_transposed_weight_is_found():
    scaler = GradScaler(init_loss_scaling=2.0**127)
    optimizer, _ = transposed(scaler)
    scaler.step(optimizer)
    assert scaler.last_step(optimizer).reason == "overflow"


def test_clipping_reaches_the_gradient_of_a_transposed_weight(scaler):
    optimizer, weight = transposed(scaler)
    norm = scaler.clip_grad_norm_(optimizer, 1.0).item()
    scaler.step(optimizer)
    np.testing.assert_allclose(weight.numpy(), -np.array(ROWS) / norm, rtol=1e-6)


def test_paddle_s_own_scrambles_the_gradient_of_a_transposed_weight(native):
    scaler = native(init_loss_scaling=1024.0)
    optimizer, weight = transposed(scaler)
    scaler.unscale_(optimizer)
    assert library.numpy(weight.grad).tolist() != ROWS


# float16 and float32 parameters.


def test_a_gradient_too_large_for_fp16_once_scaled_is_an_overflow_and_then_fits():
    each = parameter([1.0], "float16")
    optimizer = MasterWeightSGD(1.0, [each])
    scaler = GradScaler(init_loss_scaling=2.0**16, decr_every_n_nan_or_inf=1)
    reasons = []
    for _ in range(2):
        backward(scaler, [each], [[1.0]])
        scaler.step(optimizer)
        scaler.update()
        reasons.append(scaler.last_step(optimizer).reason)
        optimizer.clear_grad(set_to_zero=False)
    assert reasons == ["overflow", "finite"]
    assert library.numpy(each) == [0.0]


def test_a_gradient_too_small_for_fp16_is_kept_by_the_scale():
    moved = []
    for enable in (True, False):
        each = parameter([1.0], "float16")
        optimizer = MasterWeightSGD(2.0**30, [each])
        scaler = GradScaler(enable, init_loss_scaling=2.0**10)
        # In a float32 copy of a parameter the gradient survives; on its way to fp16 it may not.
        backward(scaler, [each], [[2.0**-30]])
        gradient = library.numpy(each.grad).item()
        scaler.step(optimizer)
        moved.append((gradient, library.numpy(optimizer._master_weights[each.name]).item()))
    assert moved[1] == (0.0, 1.0)
    assert moved[0][0] == 2.0**-20


@pytest.mark.parametrize("groups", [False, True], ids=["plain", "groups"])
def test_fp16_parameters_with_master_weights_move_as_float32_ones_and_round(groups):
    gradients = [[0.5, -2.0], [0.25]]
    finals = []
    for dtype, kind in (("float16", MasterWeightSGD), ("float32", paddle.optimizer.SGD)):
        parameters = [parameter([1.0, 2.0], dtype), parameter([3.0], dtype)]
        given = [{"params": [each]} for each in parameters] if groups else parameters
        optimizer = kind(0.1, parameters=given)
        scaler = GradScaler(init_loss_scaling=1024.0)
        for step in range(4):
            optimizer.clear_grad(set_to_zero=False)
            overflow = [[INF, 0.0], [0.0]]
            backward(scaler, parameters, overflow if step == 1 else gradients)
            scaler.step(optimizer)
            scaler.update()
        finals.append((parameters, optimizer))
    (halves, optimizer), (singles, _) = finals
    for half, single in zip(halves, singles, strict=True):
        master = optimizer._master_weights[half.name]
        np.testing.assert_allclose(library.numpy(master), library.numpy(single), rtol=1e-6)
        assert library.numpy(half).tolist() == library.numpy(single.astype("float16")).tolist()


@pytest.mark.parametrize("kind", ["SGD", "Momentum", "Adam", "AdamW"])
def test_the_multi_precision_option_changes_nothing_for_float32_parameters(kind, finite):
    finals = []
    for multi_precision in (False, True):
        parameters = library.parameters()
        optimizer = getattr(paddle.optimizer, kind)(
            0.1, parameters=parameters, multi_precision=multi_precision
        )
        scaler = GradScaler()
        backward(scaler, parameters, finite)
        scaler.step(optimizer)
        finals.append(library.exact(parameters))
    assert finals[0] == finals[1]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gradients_are_clipped_by_the_optimizer_after_they_are_unscaled(dtype):
    each = parameter([0.0, 0.0], dtype)
    clip = paddle.nn.ClipGradByGlobalNorm(1.0)
    optimizer = paddle.optimizer.SGD(1.0, parameters=[each], grad_clip=clip)
    scaler = GradScaler(init_loss_scaling=1024.0)
    backward(scaler, [each], [[3.0, 4.0]])
    scaler.step(optimizer)
    np.testing.assert_allclose(library.numpy(each), [-0.6, -0.8], rtol=1e-6)


def test_sparse_gradients_are_unscaled_or_refused_by_that_name():
    assert_runs_in_a_process_of_its_own("""
embedding = paddle.nn.Embedding(5, 2, sparse=True)
optimizer = paddle.optimizer.SGD(1.0, parameters=embedding.parameters())
scaler = GradScaler(init_loss_scaling=1024.0)
before = embedding.weight.numpy()
scaler.scale(embedding(paddle.to_tensor([1, 3])).sum()).backward()
try:
    scaler.step(optimizer)
except (NotImplementedError, ValueError, TypeError) as error:
    assert "sparse" in str(error)
else:
    moved = embedding.weight.numpy() - before
    assert moved.round(3).tolist() == [[0, 0], [-1, -1], [0, 0], [-1, -1], [0, 0]]
""")


# Gradients that are zero, or of frozen parameters.


def test_gradients_cleared_to_zero_are_gradients(scaler, parameters, finite):
    optimizer = paddle.optimizer.SGD(parameters=parameters)
    backward(scaler, parameters, finite)
    optimizer.clear_grad(set_to_zero=True)
    scaler.step(optimizer)
    assert scaler.last_step(optimizer).reason == "finite"


def test_a_frozen_parameter_is_left_alone(scaler, parameters, finite):
    parameters[1].stop_gradient = True
    optimizer = paddle.optimizer.SGD(0.1, parameters=parameters)
    before = library.exact(parameters)
    backward(scaler, parameters, finite)
    scaler.step(optimizer)
    after = library.exact(parameters)
    assert after[0] != before[0]
    assert after[1] == before[1]


def test_only_frozen_parameters_are_no_gradients(scaler, parameters):
    for each in parameters:
        each.stop_gradient = True
    optimizer = paddle.optimizer.SGD(parameters=parameters)
    scaler.scale(paddle.ones([]))
    scaler.step(optimizer)
    assert scaler.last_step(optimizer).reason == "no_gradients"


def test_what_is_left_in_a_frozen_parameter_s_gradient_counts_as_in_paddle_s(native):
    seen = []
    for kind in (GradScaler, native):
        parameters = library.parameters([2], [2])
        optimizer = paddle.optimizer.SGD(0.1, parameters=parameters)
        scaler = kind(init_loss_scaling=8.0)
        backward(scaler, parameters, [[1.0, 1.0], [INF, 1.0]])
        parameters[1].stop_gradient = True
        scaler.step(optimizer)
        scaler.update()
        seen.append((bool(scaler._cache_found_inf), library.exact(parameters)))
    assert seen[0] == seen[1]
