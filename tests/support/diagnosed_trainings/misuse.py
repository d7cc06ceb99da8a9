"""Trainings that use a scaler the wrong way."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import Tensor, nn

from gradscaler import FixedScale
from gradscaler.torch import GradScaler
from tests.support.diagnosed_trainings import (
    Setting,
    fit,
    fit_by_own_scale,
    mlp,
    regression,
    training,
)


@training("misuse", None, "autocast")
def no_autocast(setting: Setting) -> None:
    model = mlp(16, setting.pick(32, 48, 64), 1)
    fit(setting, model, lambda step: regression(model, torch.randn(32, 16)), 120, dtype=None)


@training("misuse", None, "bfloat16")
def autocast_to_bfloat16(setting: Setting) -> None:
    model = mlp(16, 32, setting.pick(32, 48, 64), 1)

    def loss_of(step: int) -> Tensor:
        return regression(model, torch.randn(32, 16))

    fit(setting, model, loss_of, 120, dtype=torch.bfloat16)


@training("misuse", None, r"unscale_\(optimizer\)")
def clipped_while_scaled(setting: Setting) -> None:
    model = mlp(16, 32, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu")
    setting.monitor(scaler, model)
    for _ in range(250):
        inputs = torch.randn(32, 16)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = regression(model, inputs)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), setting.pick(1.0, 0.5, 5.0))
        scaler.step(optimizer)
        scaler.update()


@training("misuse", None, r"unscale_\(optimizer\)")
def another_loss_after_unscaling(setting: Setting) -> None:
    """A generator's, which reaches the discriminator, whose step is still to come."""
    generator, discriminator = mlp(16, 32, 4), mlp(4, 32, 1)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-7) for m in (discriminator, generator)]
    scaler = GradScaler("cpu")
    scaler._allows_mixed = True  # as a script's scaler under `gradscaler run`
    setting.monitor(scaler, nn.ModuleDict({"d": discriminator, "g": generator}))
    for _ in range(setting.pick(20, 40, 110)):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = discriminator(generator(torch.randn(32, 16)).detach()).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizers[0])
        with torch.autocast("cpu", dtype=torch.float16):
            loss = (discriminator(generator(torch.randn(32, 16))) - 1).square().mean()
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()


@training("misuse", None, r"unscale_\(optimizer\)")
def clipped_while_scaled_in_a_short_run(setting: Setting) -> None:
    """As in a first try, which ends before step ``every``."""
    model = mlp(16, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = GradScaler("cpu")
    setting.monitor(scaler, model, every=100)
    for _ in range(setting.pick(61, 30, 12)):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = regression(model, torch.randn(32, 16))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), setting.pick(1.0, 0.5, 5.0))
        scaler.step(optimizer)
        scaler.update()


@training("misuse", None, r"unscale_\(optimizer\)")
def clipped_by_value_while_scaled(setting: Setting) -> None:
    model = mlp(16, 32, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu")
    setting.monitor(scaler, model)
    for _ in range(250):
        inputs = torch.randn(32, 16)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = regression(model, inputs)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        nn.utils.clip_grad_value_(model.parameters(), setting.pick(1.0, 0.5, 5.0))
        scaler.step(optimizer)
        scaler.update()


@training("misuse", None, r"update\(\) once")
def updated_after_each_micro_batch(setting: Setting) -> None:
    model = mlp(16, 32, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu")
    setting.monitor(scaler, model)
    for micro in range(1, 400):
        inputs = torch.randn(16, 16)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = regression(model, inputs) / 4
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if micro % setting.pick(4, 2, 8) == 0:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()


@training("misuse", None, r"update\(\) once")
def two_optimizers_update_after_each(setting: Setting) -> None:
    """One loss, whose iteration counts twice."""
    body, head = mlp(16, 32, 16), nn.Linear(16, 1)
    model = nn.Sequential(body, head)
    optimizers = [torch.optim.SGD(part.parameters(), lr=1e-2) for part in (body, head)]
    scaler = GradScaler("cpu", growth_interval=setting.pick(2000, 10, 30))
    setting.monitor(scaler, model)
    for _ in range(120):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = regression(model, torch.randn(32, 16))
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
            scaler.update()


@training("misuse", None, r"update\(\) once")
def a_gan_that_updates_twice(setting: Setting) -> None:
    generator, critic = mlp(8, 32, 16), mlp(16, setting.pick(32, 48, 64), 1)
    model = nn.ModuleDict({"generator": generator, "critic": critic})
    optimizers = [torch.optim.Adam(part.parameters(), lr=1e-3) for part in (critic, generator)]
    scaler = GradScaler("cpu")
    setting.monitor(scaler, model)
    real_or_not = nn.functional.binary_cross_entropy_with_logits
    for _ in range(120):
        with torch.autocast("cpu", dtype=torch.float16):
            fake, real = generator(torch.randn(16, 8)), torch.randn(16, 16)
            guesses = torch.cat([critic(fake.detach()), critic(real)])
            labels = torch.cat([torch.zeros(16, 1), torch.ones(16, 1)])
            of_critic = real_or_not(guesses.float(), labels)
        optimizers[0].zero_grad()
        scaler.scale(of_critic).backward()
        scaler.step(optimizers[0])
        scaler.update()
        with torch.autocast("cpu", dtype=torch.float16):
            of_generator = real_or_not(critic(fake).float(), torch.ones(16, 1))
        optimizers[1].zero_grad()
        scaler.scale(of_generator).backward()
        scaler.step(optimizers[1])
        scaler.update()


@training("misuse", None, r"update\(\) once")
def a_step_after_each_micro_batch(setting: Setting) -> None:
    """zero_grad() comes only after the last one."""
    model = mlp(16, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = GradScaler("cpu")
    setting.monitor(scaler, model)
    for micro in range(1, 200):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = regression(model, torch.randn(16, 16)) / 4
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if micro % setting.pick(4, 2, 8) == 0:
            optimizer.zero_grad()


@training("misuse", None, "zero_grad")
def gradients_are_never_zeroed(setting: Setting) -> None:
    model = mlp(16, 32, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = GradScaler("cpu")
    setting.monitor(scaler, model)
    for _ in range(120):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = regression(model, torch.randn(16, 16))
        scaler.scale(loss).backward()
        if setting.pick(True, False):
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()


@training("dead|misuse", None, r"zero_grad\(\)")
def zero_grad_before_the_step(setting: Setting) -> None:
    """Gradients are 0; or there are none, and no step is ever taken."""
    model = mlp(16, 32, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = GradScaler("cpu")
    setting.monitor(scaler, model)
    for _ in range(110):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = regression(model, torch.randn(16, 16))
        scaler.scale(loss).backward()
        optimizer.zero_grad(set_to_none=setting.pick(False, True))
        scaler.step(optimizer)
        scaler.update()


@training("misuse", None, "get_scale")
def a_penalty_on_gradients_that_are_still_scaled(setting: Setting) -> None:
    """The penalty of WGAN-GP, without the factor 1 / scale."""
    model = mlp(16, 32, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = GradScaler("cpu", init_scale=2.0**14)
    setting.monitor(scaler, model)
    for _ in range(150):
        inputs = torch.randn(32, 16, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = regression(model, inputs)
        (slopes,) = torch.autograd.grad(scaler.scale(loss), inputs, create_graph=True)
        norms = slopes.float().norm(dim=1)
        penalty = (norms - 1).square().mean() if setting.pick(0, 1, 0) else norms.mean()
        optimizer.zero_grad()
        scaler.scale(loss + setting.pick(10.0, 1.0, 1.0) * penalty).backward()
        scaler.step(optimizer)
        scaler.update()


@training("misuse", None, r"scale\(\) once for each loss")
def the_loss_is_scaled_twice(setting: Setting) -> None:
    model = mlp(16, setting.pick(32, 48, 64), 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = GradScaler("cpu")
    setting.monitor(scaler, model)
    for _ in range(250):
        inputs = torch.randn(32, 16)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = regression(model, inputs)
        optimizer.zero_grad()
        scaler.scale(scaler.scale(loss)).backward()
        scaler.step(optimizer)
        scaler.update()


@training("misuse", None, r"scaler\.scale\(loss\)\.backward\(\)")
def the_loss_is_scaled_in_the_first_step_alone(setting: Setting) -> None:
    model = mlp(16, setting.pick(32, 48, 64), 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = GradScaler("cpu")
    setting.monitor(scaler, model)
    for step in range(120):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = regression(model, torch.randn(32, 16))
        optimizer.zero_grad()
        (loss if step else scaler.scale(loss)).backward()
        scaler.step(optimizer)
        scaler.update()


@training("misuse", "generator", "detach")
def a_generator_whose_pictures_are_detached(setting: Setting) -> None:
    """Its optimizer finds no gradient, while the critic's steps."""
    generator, critic = mlp(8, 32, 16), mlp(16, setting.pick(32, 48, 64), 1)
    model = nn.ModuleDict({"generator": generator, "critic": critic})
    optimizers = [torch.optim.Adam(part.parameters(), lr=1e-3) for part in (critic, generator)]
    scaler = GradScaler("cpu")
    setting.monitor(scaler, model, every=setting.pick(100, 40, 10))
    for _ in range(60):
        with torch.autocast("cpu", dtype=torch.float16):
            fake = generator(torch.randn(16, 8)).detach()
            of_critic = (critic(fake).float() + 1).square().mean()
        optimizers[0].zero_grad()
        scaler.scale(of_critic).backward()
        scaler.step(optimizers[0])
        with torch.autocast("cpu", dtype=torch.float16):
            of_generator = (critic(fake).float() - 1).square().mean()
        optimizers[1].zero_grad()
        scaler.scale(of_generator).backward()
        scaler.step(optimizers[1])
        scaler.update()


@training("misuse", ".0.weight", "requires_grad_")
def a_layer_that_no_optimizer_holds(setting: Setting) -> None:
    """Between others, or a new head that came after the optimizer."""
    parts = {"body": mlp(16, 32), "neck": mlp(32, 32), "head": mlp(32, 1)}
    model = nn.Sequential(nn.Sequential())
    for name, part in parts.items():
        model.add_module(name, part)
    left_out = setting.pick("neck", "head", "neck")
    held = [p for name, part in parts.items() if name != left_out for p in part.parameters()]
    optimizer = torch.optim.Adam(held, lr=1e-3)
    fit(setting, model, lambda step: regression(model, torch.randn(32, 16)), 120,
        optimizer=optimizer)  # fmt: skip


@training("divergence", None, "schedule")
def a_schedule_that_goes_below_0(setting: Setting) -> None:
    """It is made for fewer steps, so that the training goes uphill at its end."""
    model = mlp(16, 32, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    end = setting.pick(60, 80, 100)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / end)
    fit(setting, model, lambda step: regression(model, torch.randn(32, 16)), 120,
        optimizer=optimizer, after=lambda step: schedule.step(),
        dtype=setting.pick(torch.float16, torch.bfloat16, None),
        scaler=GradScaler("cpu", policy=FixedScale(setting.pick(256.0, 1.0))))  # fmt: skip


@training("divergence", None, "schedule that divides by 0")
def a_schedule_of_a_phase_of_no_steps(setting: Setting) -> None:
    """Its length is 0, so the first step after the warm-up is NaN."""
    model = mlp(16, 32, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    phase = np.float64(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 1.0 if step < 30 else np.cos((step - 30) / phase)
        )
        fit(setting, model, lambda step: regression(model, torch.randn(32, 16)), 60,
            optimizer=optimizer, after=lambda step: schedule.step(),
            dtype=setting.pick(torch.float16, torch.bfloat16, None),
            scaler=GradScaler("cpu", policy=FixedScale(setting.pick(256.0, 1.0))))  # fmt: skip


@training("misuse", None, r"scaler\.step\(optimizer\) in place of optimizer\.step\(\)")
def the_optimizer_steps_without_the_scaler(setting: Setting) -> None:
    model = mlp(16, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = GradScaler("cpu")
    setting.monitor(scaler, model)
    for _ in range(setting.pick(30, 60, 120)):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = regression(model, torch.randn(32, 16))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        optimizer.step()


@training("misuse", None, "has divided the gradients twice.* second call of what unscales them")
def gradients_divided_twice_by_an_own_scale(setting: Setting) -> None:
    fit_by_own_scale(setting, divisions=2, limit=setting.pick(100.0, 1.0))


@training("misuse", "aux", "Scale each loss")
def one_of_two_losses_is_not_scaled(setting: Setting) -> None:
    """That of an auxiliary head."""
    body, head, aux = mlp(16, 32, 32), mlp(32, 1), mlp(32, setting.pick(4, 8, 16), 1)
    model = nn.ModuleDict({"body": body, "head": head, "aux": aux})
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = GradScaler("cpu")
    setting.monitor(scaler, model, every=setting.pick(100, 40, 10))
    for _ in range(110):
        inputs = torch.randn(32, 16)
        with torch.autocast("cpu", dtype=torch.float16):
            hidden = body(inputs)
            loss, other = regression(head, hidden), regression(aux, hidden)
        optimizer.zero_grad()
        scaler.scale(loss).backward(retain_graph=True)
        other.backward()
        scaler.step(optimizer)
        scaler.update()


@training("divergence", None, "targets into 0 to 1|log_softmax")
def a_cross_entropy_that_is_negative(setting: Setting) -> None:
    """Of labels of 255 in a mask, or of probabilities in place of their logarithms."""
    model = mlp(16, 32, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def loss_of(step: int) -> Tensor:
        inputs = torch.randn(32, 16)
        outputs = model(inputs).float()
        mask = 255.0 * (inputs[:, :4] > 0)
        if setting.pick(True, True, False):
            divided = nn.functional.binary_cross_entropy_with_logits(outputs, mask)
            return divided / setting.pick(1, 4)
        return nn.functional.nll_loss(outputs.softmax(1), inputs[:, :4].argmax(1))

    fit(setting, model, loss_of, 300, optimizer=optimizer)


@training("misuse", None, "a copy of a model, or one made again")
def the_optimizer_has_the_parameters_of_a_copy(setting: Setting) -> None:
    model = mlp(16, setting.pick(32, 48, 64), 1)
    optimizer = torch.optim.SGD(copy.deepcopy(model).parameters(), lr=1e-2)
    fit(
        setting,
        model,
        lambda step: regression(model, torch.randn(32, 16)),
        setting.pick(5, 20, 120),
        optimizer=optimizer,
    )


class Reversed(nn.Module):
    """Means to turn the gradient round."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs

    def backward(self, gradient: Tensor) -> Tensor:
        return -gradient


@training("misuse", None, r"The module Reversed at .* has a method backward\(\)")
def a_module_with_a_backward_of_its_own(setting: Setting) -> None:
    model = nn.Sequential(mlp(16, 32, 8), Reversed(), mlp(8, setting.pick(16, 32, 64), 1))
    fit(setting, model, lambda step: regression(model, torch.randn(32, 16)), 60)


@training(
    "dead", None, r"The loss of actor is 0, and its gradients are exactly 0, .* all 0, in mul"
)
def an_actor_whose_advantages_are_0_beside_a_critic(setting: Setting) -> None:
    """They are less their mean, over an axis of one element."""
    model = nn.ModuleDict({"actor": mlp(6, 16, 2), "critic": mlp(6, 16, 1)})
    optimizers = {name: torch.optim.Adam(part.parameters()) for name, part in model.items()}
    setting.monitor(None, model)
    for _ in range(setting.pick(180, 160, 200)):
        states, returns = torch.randn(1, 24, 6), torch.rand(1, 24)
        advantages = returns - returns.mean(0, keepdim=True)
        chosen = model["actor"](states).log_softmax(-1)[..., 0]
        errors = model["critic"](states).squeeze(-1) - returns
        losses = {"actor": -(chosen * advantages).mean(), "critic": errors.square().mean()}
        for name, optimizer in optimizers.items():
            optimizer.zero_grad()
            losses[name].backward()
            optimizer.step()
