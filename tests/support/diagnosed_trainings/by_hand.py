"""Operations and derivatives that a user wrote by hand, in the manner of public reports."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.support.diagnosed_trainings import Setting, fit, mlp, training
from tests.support.diagnosed_trainings.reported import adam, digits


class _Mish(torch.autograd.Function):
    """The slope is Inf / Inf in float16 above 3.7."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.tanh(nn.functional.softplus(x))

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        e = x.exp()
        omega = 4 * (x + 1) + 4 * e.pow(2) + e.pow(3) + e * (4 * x + 6)
        return grad * e * omega / (2 * e + e.pow(2) + 2).pow(2)


class _Swish(torch.autograd.Function):
    """The slope is Inf / Inf in float16 above 11."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        e = x.exp()
        return grad * (e * (e + 1 + x) / (e + 1).pow(2))


class _Unit(torch.autograd.Function):
    """The slope is 0 / 0 where a row is 0."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        norm = x.norm(dim=1, keepdim=True)
        ctx.save_for_backward(x, norm)
        return x / norm.clamp(min=1e-3)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        x, norm = ctx.saved_tensors
        return (grad - x * (x * grad).sum(1, keepdim=True) / norm.square()) / norm


@training("nan|data", None, r"the gradient of _(Mish|Swish|Unit) .*its own backward\(\)")
def a_backward_by_hand_that_leaves_float16(setting: Setting) -> None:
    model, function = mlp(16, 32, 10), setting.pick(_Mish, _Swish, _Unit)
    factor = setting.pick(1.5, 8.0, 1.0)

    def loss_of(step: int) -> Tensor:
        inputs, labels = digits()
        hidden = model[0](inputs * factor)
        if function is _Unit and step % 6 == 0:
            hidden = hidden * (torch.arange(64) > 0)[:, None]
        return cross_entropy(model[2](function.apply(hidden.half())).float(), labels)

    fit(setting, model, loss_of, 100, optimizer=adam(model, 1e-3))


@training("nan|data", None, r"the gradient of (sqrt|pow|div) .*(root|base|divisor)")
def a_penalty_on_gradients_of_0(setting: Setting) -> None:
    """Where all units are off, the root of the squared gradient has a slope of Inf."""
    model = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 1))
    nn.init.constant_(model[0].bias, -0.5)  # off near the origin
    root = setting.pick(torch.sqrt, lambda squares: squares**0.5, torch.sqrt)
    size = setting.pick(16, 24, 32)

    def loss_of(_: int) -> Tensor:
        points = torch.randn(size, 2, requires_grad=True)
        scores = model(points).float()
        (slopes,) = torch.autograd.grad(scores.sum(), points, create_graph=True)
        return scores.mean() + (root(slopes.float().square().sum(1)) - 1).square().mean()

    fit(setting, model, loss_of, 100, optimizer=adam(model, 1e-3))


@training("activations", None, r"an Inf of float16, in (rsqrt|reciprocal|div) at .*by_hand")
def a_norm_by_hand_whose_squares_leave_float16(setting: Setting) -> None:
    """1 / Inf is 0, so that the layer is switched off and the loss is finite."""
    model = mlp(16, 32, 10)
    scale_of = setting.pick(
        lambda squares: squares.rsqrt(),
        lambda squares: squares.sqrt().reciprocal(),
        lambda squares: 1 / squares.sqrt(),
    )

    def loss_of(_: int) -> Tensor:
        inputs, labels = digits()
        hidden = (model[0](inputs) * 300).half()
        hidden = hidden * scale_of((hidden * hidden).sum(1, keepdim=True))
        return cross_entropy(model[2](hidden).float(), labels)

    fit(setting, model, loss_of, 60, optimizer=adam(model, 1e-3))
