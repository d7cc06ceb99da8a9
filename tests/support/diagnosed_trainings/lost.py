"""Trainings that lose updates, an optimizer's state or a scaler's state."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradscaler import FixedScale
from gradscaler.torch import GradScaler
from tests.support.diagnosed_trainings import Setting, fit, mlp, regression, training


@training("stalled", None, "float32")
def weights_in_bfloat16_that_stall_in_a_short_run(setting: Setting) -> None:
    model = mlp(16, 64, 64, 1).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    scaler = GradScaler("cpu", policy=FixedScale(1.0))
    setting.monitor(scaler, model, every=100)
    for _ in range(setting.pick(60, 80, 120)):
        inputs = torch.randn(32, 16).bfloat16()
        loss = nn.functional.mse_loss(model(inputs).float(), inputs.sum(1, keepdim=True).float())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@training("stalled", None, "float32")
def updates_below_half_an_ulp(setting: Setting) -> None:
    """The parameters are float16, and the learning rate is that of fine-tuning."""
    model = mlp(16, 64, 64, 1)
    model.half()
    rate = setting.pick(1e-6, 3e-6, 1e-6)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    scaler = GradScaler("cpu", allow_fp16_gradients=True)

    def loss_of(step: int) -> Tensor:
        inputs = torch.randn(32, 16).half()
        return nn.functional.mse_loss(model(inputs).float(), inputs.sum(1, keepdim=True).float())

    fit(setting, model, loss_of, 320, optimizer=optimizer, scaler=scaler, dtype=None)


@training("state|parameter", None, "checkpoint")
def a_step_without_the_scaler(setting: Setting) -> None:
    """One step in between is taken by the optimizer itself, on gradients that overflowed."""
    model = mlp(16, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    when = setting.pick(5, 30, 60)

    def after(step: int) -> None:
        if step == when:
            for parameter in model[2].parameters():
                parameter.grad = torch.full_like(parameter, torch.inf)
            optimizer.step()

    def loss_of(step: int) -> Tensor:
        return regression(model, torch.randn(32, 16))

    fit(setting, model, loss_of, 120, optimizer=optimizer, after=after)


@training("state", "exp_avg_sq of 2.weight", "checkpoint")
def a_second_moment_of_inf(setting: Setting) -> None:
    """Adam divides by it, so that this weight no longer moves, and nothing is NaN."""
    model = mlp(16, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = GradScaler("cpu", init_scale=setting.pick(2.0**24, 2.0**22, 2.0**20))

    def after(step: int) -> None:
        if step == 40:
            optimizer.state[model[2].weight]["exp_avg_sq"][0, 3] = torch.inf

    def loss_of(step: int) -> Tensor:
        return regression(model, torch.randn(32, 16))

    fit(setting, model, loss_of, 120, optimizer=optimizer, scaler=scaler, after=after)


def goes_on(setting: Setting, load: bool) -> None:
    """A training in two parts: the second has the model and the optimizer of the first."""
    model = mlp(16, 64, 1)
    optimizer = setting.pick(
        torch.optim.Adam(model.parameters(), lr=1e-3),
        torch.optim.SGD(model.parameters(), lr=1e-7, momentum=0.9),
    )

    def loss_of(step: int) -> Tensor:
        return 1e4 * regression(model, torch.randn(64, 16))

    first = GradScaler("cpu", init_scale=2.0**24)
    fit(setting, model, loss_of, 60, optimizer=optimizer, scaler=first)
    setting.watching.close()
    setting.path.unlink()
    second = GradScaler("cpu", init_scale=2.0**24)
    if load:
        second.load_state_dict(first.state_dict())
    fit(setting, model, loss_of, 60, optimizer=optimizer, scaler=second)


@training("restart", None, r"scaler\.state_dict\(\)")
def a_run_goes_on_without_the_scalers_state(setting: Setting) -> None:
    goes_on(setting, load=False)


@training("normal")
def a_run_goes_on_with_the_scalers_state(setting: Setting) -> None:
    goes_on(setting, load=True)
