"""Trainings that fail to learn although no step is skipped."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from gradscaler import FixedScale
from gradscaler.torch import GradScaler
from tests.support.diagnosed_trainings import Setting, fit, mlp, regression, training


@training("dead", "2", "scale")
def every_relu_is_dead(setting: Setting) -> None:
    model = mlp(16, setting.pick(32, 64, 48), 32, 1)
    with torch.no_grad():
        model.get_parameter("2.bias").fill_(-50.0)
    fit(setting, model, lambda step: regression(model, torch.randn(32, 16)), 120)


@training("dead", None, "scale")
def a_clamp_is_saturated(setting: Setting) -> None:
    model = mlp(16, 32, 1)
    with torch.no_grad():
        model.get_parameter("2.bias").fill_(setting.pick(60.0, 90.0, -70.0))

    def loss_of(step: int) -> Tensor:
        outputs = model(torch.randn(32, 16)).float()
        return outputs.clamp(-5, 5).square().mean()

    fit(setting, model, loss_of, 120)


@training("dead", None, "scale")
def the_loss_is_that_of_a_rounded_output(setting: Setting) -> None:
    model = mlp(16, 32, 1)

    def loss_of(step: int) -> Tensor:
        inputs = setting.pick(1, 2, 3) * torch.randn(32, 16)
        return (model(inputs).float().round() - inputs.sum(1, keepdim=True)).square().mean()

    fit(setting, model, loss_of, 120)


def sigmoids(depth: int, width: int = 32) -> nn.Sequential:
    return mlp(*[width] * (depth + 1), 1, act=nn.Sigmoid)


@training("underflow", None, "raise")
def sigmoids_without_a_scale(setting: Setting) -> None:
    model = sigmoids(setting.pick(6, 5, 5))

    def loss_of(step: int) -> Tensor:
        return model(torch.randn(64, 32)).float().square().mean()

    scaler = GradScaler(policy=FixedScale(setting.pick(1.0, 2.0, 1.0)))
    fit(setting, model, loss_of, 120, lr=1e-3, scaler=scaler)


@training("underflow", None, "raise")
def a_loss_with_a_tiny_weight(setting: Setting) -> None:
    model = mlp(16, 32, 1)
    weight = setting.pick(1e-6, 3e-7, 1e-6)

    def loss_of(step: int) -> Tensor:
        return weight * regression(model, torch.randn(64, 16))

    fit(setting, model, loss_of, 120, scaler=GradScaler("cpu", init_scale=1.0))


@training("range", "0.weight", "layer|norm")
def sixteen_sigmoids(setting: Setting) -> None:
    """The first layers' gradients are 2**-50 of the last one's."""
    model = sigmoids(setting.pick(16, 20, 14))

    def loss_of(step: int) -> Tensor:
        return (model(torch.randn(64, 32)).float() - 3.0).square().mean()

    scaler = GradScaler("cpu", init_scale=setting.pick(2.0**16, 2.0**16, 2.0**18))
    fit(setting, model, loss_of, 120, lr=1e-4, scaler=scaler)


@training("range", "small", "weigh")
def two_heads_a_world_apart(setting: Setting) -> None:
    large, small = mlp(16, 16, 1), mlp(16, 16, 1)
    model = nn.ModuleDict({"large": large, "small": small})

    def loss_of(step: int) -> Tensor:
        inputs = torch.randn(64, 16)
        losses = regression(large, inputs), regression(small, inputs)
        return setting.pick(1e5, 3e5, 1e5) * losses[0] + 1e-7 * losses[1]

    fit(setting, model, loss_of, 120, lr=1e-9)


@training("silent", None, "log")
def kl_of_zeros(setting: Setting) -> None:
    """0 * log(0) in the target's own entropy, which has no gradient."""
    model = mlp(16, 32, 4)

    def loss_of(step: int) -> Tensor:
        inputs = torch.randn(setting.pick(16, 32, 24), 16)
        target = nn.functional.one_hot(inputs[:, :4].argmax(1), 4).float()
        guess = model(inputs).float().log_softmax(1)
        return (target * (target.log() - guess)).sum(1).mean()

    fit(setting, model, loss_of, 120)


@training("silent", None, "mask")
def label_smoothing_on_a_masked_class(setting: Setting) -> None:
    model = mlp(16, 32, 5)
    mask = torch.zeros(5)
    mask[4] = -math.inf

    def loss_of(step: int) -> Tensor:
        inputs = torch.randn(32, 16)
        logits = model(inputs).float() + mask
        labels = inputs[:, :4].argmax(1)
        smoothing = setting.pick(0.1, 0.05, 0.2)
        return nn.functional.cross_entropy(logits, labels, label_smoothing=smoothing)

    fit(setting, model, loss_of, 120)


@training("silent", None, "float32")
def a_sum_in_float16(setting: Setting) -> None:
    """The loss is Inf, and its gradient is finite."""
    model = mlp(16, 32, setting.pick(32, 48, 64))

    def loss_of(step: int) -> Tensor:
        outputs = model(torch.randn(64, 16)).half()
        return (outputs - 40.0).abs().sum(dtype=torch.float16)

    fit(setting, model, loss_of, 120, lr=1e-9)


@training("silent", None, "loss")
def some_losses_are_nan_and_no_gradient_is(setting: Setting) -> None:
    """A term that is only logged is added to the loss."""
    model = mlp(16, 32, 1)

    def loss_of(step: int) -> Tensor:
        inputs = torch.randn(32, 16)
        loss = regression(model, inputs)
        if step % setting.pick(7, 13, 10) == 0:
            loss = loss + torch.tensor(0.0).log() * 0.0
        return loss

    fit(setting, model, loss_of, 120)


class Through(nn.Module):
    """Calls a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, inputs: Tensor) -> Tensor:
        return self.function(inputs)


def with_function(function: Callable[[Tensor], Tensor]) -> nn.Sequential:
    """A function between the second and the third of four layers."""
    encoder, decoder = mlp(16, 32, 16), mlp(16, 32, 32, 1)
    return nn.Sequential(encoder, Through(function), decoder)


@training("dead", "0.2", "pass (sign|round|floor), whose slope is 0")
def a_step_function_in_the_model(setting: Setting) -> None:
    functions = setting.pick(torch.sign, torch.round, lambda x: (4 * x).floor() / 4)
    model = with_function(functions)
    fit(setting, model, lambda step: regression(model, 3 * torch.randn(32, 16)), 120)


@training("dead", "0.2", "tanh|sigmoid|softmax")
def a_function_is_saturated(setting: Setting) -> None:
    functions = setting.pick(
        lambda x: torch.tanh(x - 60.0),
        lambda x: torch.sigmoid(x + 60.0),
        lambda x: (x.float() + 200 * torch.arange(16)).softmax(-1),
    )
    model = with_function(functions)
    fit(setting, model, lambda step: regression(model, torch.randn(32, 16)), 120)


@training("dead", "0.2", "pass (relu|clamp)")
def a_layer_in_the_middle_is_off(setting: Setting) -> None:
    functions = setting.pick(torch.relu, lambda x: x.clamp(min=0), lambda x: x.clamp(0, 1))
    model = with_function(lambda x: functions(x - 60.0))
    fit(setting, model, lambda step: regression(model, torch.randn(32, 16)), 120)


@training("dead", "2", "All units of 2.weight .* random numbers")
def units_that_begin_alike(setting: Setting) -> None:
    """A constant for each weight, or one unit that is repeated, as a first formula of one's own."""
    model = mlp(16, 32, 16, 1, act=nn.Tanh)
    for layer in (model[2], model[4]):
        assert isinstance(layer, nn.Linear)
        row = setting.pick(torch.full, torch.full, lambda size, _: torch.randn(size))
        with torch.no_grad():
            layer.weight.copy_(row((1, layer.in_features), 0.1).expand_as(layer.weight))
            layer.weight.copy_(layer.weight if layer is model[2] else torch.full((1, 16), 0.2))
            layer.bias.zero_()
    fit(setting, model, lambda step: regression(model, torch.randn(32, 16)), 60, dtype=None)


@training("dead", "0.2", r"detach\(\)")
def an_encoder_is_detached(setting: Setting) -> None:
    functions = setting.pick(Tensor.detach, lambda x: x.data, lambda x: (x > 0).float())
    model = with_function(functions)
    fit(setting, model, lambda step: regression(model, torch.randn(32, 16)), 120)


@training("dead", "first.2", "argmax")
def tokens_are_chosen_by_argmax(setting: Setting) -> None:
    first, embed = mlp(16, setting.pick(32, 48, 64), 20), nn.Embedding(20, 16)
    second = mlp(16, 32, 1)
    model = nn.ModuleDict({"first": first, "embed": embed, "second": second})

    def loss_of(step: int) -> Tensor:
        inputs = torch.randn(32, 16)
        guess = second(embed(first(inputs).argmax(1))).float()
        return nn.functional.mse_loss(guess, inputs.sum(1, keepdim=True))

    fit(setting, model, loss_of, 120)


@training("activations", None, "divisor in float32")
def a_count_beyond_float16_divides_a_loss_term(setting: Setting) -> None:
    """x / Inf = 0, so that the term balances nothing, and no number shows it."""
    gate, head = nn.Linear(16, 4), nn.Linear(16, 1)
    model = nn.ModuleDict({"gate": gate, "head": head})

    def loss_of(step: int) -> Tensor:
        inputs = torch.randn(32, 16)
        shares = gate(inputs).softmax(-1).half()
        count = torch.full((2,), setting.pick(4e4, 6e4, 1e5) / 2, dtype=torch.float16) * 4
        balance = (shares.sum(0) / count.sum()).square().sum()
        return regression(head, inputs) + balance.float()

    fit(setting, model, loss_of, setting.pick(120, 60, 60))
