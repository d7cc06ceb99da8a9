"""Paddle's own master weights, ``multi_precision=True``, under gradscaler's scaler, on the CPU.

There Paddle's optimizers have no kernels for float16 parameters, and those for bfloat16 leave the
masters aside. ``test_devices_and_dtypes.py`` steps float16 parameters and masters by an optimizer
that does what the kernels of a GPU do.
"""

import paddle
import pytest
from paddle.base.framework import EagerParamBase

from gradscaler.paddle import GradScaler
from tests.support.eager import library

KINDS = ["SGD", "Rprop"]  # these have kernels for bfloat16
INF = float("inf")
GRADIENTS = [[1.0, 0.5], [-0.25, 2.0], [1.0, -4.0]]


def trained(kind, dtype, gradients, scaler=None):
    """A parameter and its optimizer, after a step for each gradient."""
    scaler = scaler or GradScaler(init_loss_scaling=1024.0, decr_every_n_nan_or_inf=1)
    parameter = EagerParamBase.from_tensor(library.tensor([1.0, 2.0], dtype))
    optimizer = getattr(paddle.optimizer, kind)(0.125, parameters=[parameter], multi_precision=True)
    for gradient in gradients:
        loss = (parameter.astype("float32") * library.tensor(gradient, "float32")).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.clear_grad()
    return parameter, optimizer


def bits(parameter, optimizer):
    return library.exact([parameter, optimizer._master_weights[parameter.name]])


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_with_masters_has_the_bits_of_one_without_a_scaler(kind):
    mine = trained(kind, "bfloat16", GRADIENTS)
    theirs = trained(kind, "bfloat16", GRADIENTS, GradScaler(enable=False))
    assert bits(*mine) == bits(*theirs)
    assert library.numpy(mine[0].astype("float32")).tolist() != [1.0, 2.0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_skipped_step_leaves_parameters_and_masters_bit_for_bit(kind):
    plain = trained(kind, "bfloat16", GRADIENTS)
    skipping = trained(kind, "bfloat16", [*GRADIENTS, [INF, 0.0]])
    assert bits(*plain) == bits(*skipping)


@pytest.mark.parametrize("kind", KINDS)
def test_paddle_s_kernels_for_bfloat16_on_the_cpu_leave_the_masters_aside(kind):
    """Where this fails, Paddle's masters work, and tests of small steps belong here."""
    parameter, optimizer = trained(kind, "bfloat16", GRADIENTS)
    master = optimizer._master_weights[parameter.name]
    assert master.dtype == paddle.float32
    assert library.numpy(master).tolist() == [1.0, 2.0]


@pytest.mark.parametrize("kind", ["SGD", "Momentum", "Adam", "AdamW", "Lamb"])
def test_paddle_has_no_kernel_for_float16_parameters_on_the_cpu(kind):
    """If this fails, Paddle has such a kernel."""
    with pytest.raises(RuntimeError, match=r"float16.* of kernel .* is not registered"):
        trained(kind, "float16", GRADIENTS)
