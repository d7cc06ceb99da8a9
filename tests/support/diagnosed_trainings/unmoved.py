"""Trainings whose steps are applied, and which learn nothing, in the manner of public reports."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.utils.checkpoint import checkpoint

from gradscaler import FixedScale
from gradscaler.torch import GradScaler
from tests.support.diagnosed_trainings import Setting, fit, mlp, training
from tests.support.diagnosed_trainings.reported import adam, digits


def _one() -> GradScaler:
    return GradScaler("cpu", policy=FixedScale(1.0))


@training("misuse", None, r"learning rate was 0 in .* of .* steps.*scheduler\.step")
def a_warm_up_that_is_never_stepped(setting: Setting) -> None:
    """Or one by hand that divides integers, or a schedule that ended at 0."""
    model = mlp(16, 32, 10)
    optimizer = adam(model, 1e-3)
    lambdas = (lambda _: 0.0, lambda step: step // 1000, lambda step: max(0.0, 1 - step / 60))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, setting.pick(*lambdas))

    def loss_of(_: int) -> Tensor:
        inputs, labels = digits()
        return cross_entropy(model(inputs), labels)

    after = setting.pick(lambda _: None, lambda _: schedule.step(), lambda _: schedule.step())
    fit(setting, model, loss_of, 120, optimizer=optimizer, scaler=_one(), dtype=None, after=after)


@training("divergence", None, "weights' norm fell from .* while the loss stood.*weight_decay")
def a_weight_decay_that_outweighs_the_gradients(setting: Setting) -> None:
    model = mlp(16, 32, 32, 10)
    parameters = model.parameters()
    optimizer = setting.pick(
        torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=0.5),
        torch.optim.SGD(model.parameters(), 0.05, momentum=0.5, weight_decay=2.0),
        torch.optim.SGD(model.parameters(), 0.5, weight_decay=0.3),
    )

    def loss_of(_: int) -> Tensor:
        inputs, labels = digits()
        return cross_entropy(model(inputs * 0.1).float(), labels)

    fit(setting, model, loss_of, 200, optimizer=optimizer, scaler=_one(), dtype=torch.bfloat16)


@training("misuse", "discriminator", r"In no optimizer.*Call step\(\) with the optimizer that")
def a_scaler_that_steps_the_wrong_optimizer(setting: Setting) -> None:
    """The generator's, so that the discriminator never moves."""
    generator, discriminator = mlp(8, 16, 16), mlp(16, setting.pick(16, 32, 8), 1)
    of_g, of_d = adam(generator, 1e-3), adam(discriminator, 1e-3)
    for_g, for_d = GradScaler("cpu", init_scale=2.0**8), GradScaler("cpu", init_scale=2.0**8)
    watched = nn.ModuleDict({"discriminator": discriminator})
    setting.monitor(for_d, watched)
    ones, zeros = torch.ones(32, 1), torch.zeros(32, 1)
    for _ in range(80):
        fake = generator(torch.randn(32, 8))
        of_g.zero_grad()
        loss = binary_cross_entropy_with_logits(discriminator(fake), ones)
        for_g.scale(loss).backward()
        for_g.step(of_g)
        for_g.update()
        of_d.zero_grad()
        scores = discriminator(torch.cat([torch.randn(32, 16) + 1, fake.detach()]))
        loss = binary_cross_entropy_with_logits(scores, torch.cat([ones, zeros]))
        for_d.scale(loss).backward()
        for_d.step(of_g)
        for_d.update()


@training("misuse", "discriminator", r"those of discriminator.*zero_grad\(\) .*for discriminator")
def one_of_two_models_is_never_zeroed(setting: Setting) -> None:
    generator, discriminator = mlp(8, 16, 16), mlp(16, setting.pick(16, 32, 8), 1)
    of_g, of_d = adam(generator, 1e-3), adam(discriminator, 1e-3)
    scaler = setting.pick(_one(), _one(), GradScaler("cpu", init_scale=2.0**8))
    setting.monitor(scaler, nn.ModuleDict({"generator": generator, "discriminator": discriminator}))
    ones, zeros = torch.ones(32, 1), torch.zeros(32, 1)
    for _ in range(60):
        fake = generator(torch.randn(32, 8))
        scores = discriminator(torch.cat([torch.randn(32, 16) + 1, fake.detach()]))
        loss = binary_cross_entropy_with_logits(scores, torch.cat([ones, zeros]))
        scaler.scale(loss).backward()
        scaler.step(of_d)
        of_g.zero_grad()
        loss = binary_cross_entropy_with_logits(discriminator(fake), ones)
        scaler.scale(loss).backward()
        scaler.step(of_g)
        scaler.update()


@training("dead", "blocks", r"no gradient.*reentrant checkpoint.*use_reentrant=False")
def checkpointed_blocks_behind_a_frozen_embedding(setting: Setting) -> None:
    """No input of the blocks requires a gradient, so that only the head learns."""
    model = nn.ModuleDict(
        {"embed": nn.Linear(16, 16), "blocks": nn.ModuleList(), "head": mlp(16, 10)}
    )
    model["embed"].requires_grad_(False)
    for _ in range(setting.pick(3, 2, 1)):
        model["blocks"].append(mlp(16, 32, 16))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)

    def loss_of(_: int) -> Tensor:
        inputs, labels = digits()
        hidden = model["embed"](inputs)
        for block in model["blocks"]:
            with warnings.catch_warnings():  # PyTorch's own is shown once in a process
                warnings.simplefilter("ignore")
                hidden = hidden + checkpoint(block, hidden, use_reentrant=True)
        return cross_entropy(model["head"](hidden).float(), labels)

    fit(setting, model, loss_of, 60, optimizer=optimizer)


@training("eps", None, "below the optimizer's eps of 1e-0[68].*lower eps")
def a_loss_that_is_divided_by_the_size_of_the_data_set(setting: Setting) -> None:
    model = mlp(16, 32, 1)
    rule = setting.pick(torch.optim.AdamW, torch.optim.RMSprop)
    optimizer = rule(model.parameters(), lr=1e-3, eps=setting.pick(1e-8, 1e-6))

    inputs = torch.randn(32, 16)

    def loss_of(_: int) -> Tensor:
        return (model(inputs) - inputs.sum(1, keepdim=True)).square().mean() / 1e10

    fit(setting, model, loss_of, 120, optimizer=optimizer, scaler=_one(), dtype=None)
