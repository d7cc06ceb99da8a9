"""Trainings in the manner of public reports, written without knowledge of the detectors."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import (
    cross_entropy,
    ctc_loss,
    logsigmoid,
    normalize,
    one_hot,
    smooth_l1_loss,
)

from gradscaler.torch import GradScaler
from tests.support.diagnosed_trainings import Setting, fit, mlp, training


def digits(classes: int = 10, size: int = 64) -> tuple[Tensor, Tensor]:
    """Random rows of 16 numbers, which their class shifts, and the classes."""
    labels = torch.randint(classes, (size,))
    return torch.randn(size, 16) + one_hot(labels, 16) * 3, labels


def adam(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=lr)


@training("nan|data", None, r"by the gradient of pow|in the gradient of pow")
def a_focal_loss_with_a_root(setting: Setting) -> None:
    """The slope of (1 - p) ** 0.5 is Inf where a sure p rounds to 1."""
    model = mlp(16, 32, 10)

    def loss_of(_: int) -> Tensor:
        inputs, labels = digits()
        logits = model(inputs) * setting.pick(4, 6, 8)
        logits = torch.where(one_hot(labels, 10).bool(), logits, -logits)
        return (-((1 - logits.sigmoid()) ** 0.5) * logsigmoid(logits)).float().sum(1).mean()

    fit(setting, model, loss_of, 200, optimizer=adam(model, 5e-3))


@training("data|activations|loss", None, r"in (div|normalize)|by (div|normalize)")
def an_eps_of_normalize_is_0_in_float16(setting: Setting) -> None:
    """The features of an empty picture are 0, and 1e-12 is 0 in float16: 0 / 0."""
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.ReLU(), nn.Linear(32, 8, bias=False))
    share = setting.pick(0.15, 0.25, 0.1)

    def loss_of(_: int) -> Tensor:
        inputs, labels = digits(classes=8)
        if torch.rand(()) < share:
            inputs[0] = 0
        with torch.autocast("cpu", torch.float16):
            features = model(inputs)
        return cross_entropy(10 * normalize(features, dim=-1).float(), labels)

    fit(setting, model, loss_of, 200, optimizer=adam(model, 2e-3), dtype=None)


@training("data", None, "ctc_loss.*zero_infinity")
def a_ctc_target_is_longer_than_its_input(setting: Setting) -> None:
    model = mlp(4, 16, 11)
    share = setting.pick(0.12, 0.2, 0.3)

    def loss_of(_: int) -> Tensor:
        scores = model(torch.randn(6, 8, 4)).float().log_softmax(-1)
        lengths = torch.full((8,), 2)
        if torch.rand(()) < share:
            lengths[3] = 9
        targets = torch.randint(1, 11, (8, 9))
        return ctc_loss(scores, targets, torch.full((8,), 6), lengths)

    fit(setting, model, loss_of, 200, optimizer=adam(model, 2e-3))


@training("silent|data", None, "(cross_entropy|nll_loss).*(ignored|elements)")
def a_batch_has_no_label(setting: Setting) -> None:
    """The mean over no labels is NaN, and its gradients are 0."""
    model = mlp(16, 32, 10)
    share = setting.pick(0.1, 0.2, 0.3)

    def loss_of(_: int) -> Tensor:
        inputs, labels = digits(size=8)
        labels[torch.rand(()).expand(8) < share] = -100
        return cross_entropy(model(inputs).float(), labels)

    fit(setting, model, loss_of, 200, optimizer=adam(model, 2e-3))


@training("nan|data", None, r"(?i)acos.*clamp its input")
def an_angle_of_a_cosine_of_1(setting: Setting) -> None:
    """Cosines round to 1, where the slope of acos is Inf."""
    model = mlp(16, 32, 2)
    classes = nn.Parameter(torch.randn(10, 2))
    model.register_parameter("classes", classes)

    def loss_of(_: int) -> Tensor:
        inputs, labels = digits()
        features = normalize(model(inputs).float(), dim=-1)
        cosines = (features @ normalize(classes, dim=-1).t()).clamp(-1, 1)  # in float16
        angles = cosines.acos() + 0.3 * one_hot(labels, 10)
        return cross_entropy(setting.pick(8, 4, 2) * angles.cos().float(), labels)

    fit(setting, model, loss_of, 200, optimizer=adam(model, 5e-3))


@training("parameter", "words.weight", "not finite from the start")
def a_row_of_an_embedding_is_nan(setting: Setting) -> None:
    """The vector of a rare word is a mean of none."""
    model = nn.ModuleDict({"words": nn.Embedding(200, 16), "head": mlp(16, 32, 10)})
    with torch.no_grad():
        model["words"].weight[137] = torch.empty(0, 16).mean(0)
    share = setting.pick(0.1, 0.2, 0.3)

    def loss_of(_: int) -> Tensor:
        labels = torch.randint(10, (32,))
        words = labels[:, None] * 13 + torch.randint(7, (32, 6))
        if torch.rand(()) < share:
            words[0, 0] = 137
        return cross_entropy(model["head"](model["words"](words).mean(1)).float(), labels)

    fit(setting, model, loss_of, 200, optimizer=adam(model, 3e-3))


@training("activations", "weight", "initialise them with other numbers than 0")
def a_layer_of_zeros_under_weight_norm(setting: Setting) -> None:
    model = mlp(16, setting.pick(32, 16, 8), 10)
    nn.init.zeros_(model[2].weight)
    nn.utils.parametrizations.weight_norm(model[2])

    def loss_of(_: int) -> Tensor:
        inputs, labels = digits()
        return cross_entropy(model(inputs).float(), labels)

    fit(setting, model, loss_of, 60, optimizer=adam(model, 1e-3))


@training("normal")
def a_guard_leaves_out_large_norms(setting: Setting) -> None:
    model = mlp(16, 32, 10)
    optimizer, scaler = adam(model, 2e-3), GradScaler("cpu")
    setting.monitor(scaler, model)
    for step in range(200):
        inputs, labels = digits()
        with torch.autocast("cpu", torch.float16):
            loss = cross_entropy(model(inputs * (30 if step % 9 == 8 else 1)).float(), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        norm = scaler.clip_grad_norm_(optimizer, 1.0)
        if norm < setting.pick(10.0, 20.0, 40.0):
            scaler.step(optimizer)
        scaler.update()


@training("loss|activations", None, "exponential of more than 11")
def a_temperature_that_grows(setting: Setting) -> None:
    """It is in no module, and its exponential leaves float16 after some steps."""
    image, text = nn.Linear(24, 16), nn.Linear(12, 16)
    logit_scale = nn.Parameter(torch.tensor(setting.pick(5.0, 6.5, 8.0)))
    parameters = [*image.parameters(), *text.parameters(), logit_scale]
    model = nn.ModuleList([image, text])

    def loss_of(step: int) -> Tensor:
        z = torch.randn(8, 6)
        a = normalize(image(torch.cat([z] * 4, 1)), dim=1)
        b = normalize(text(torch.cat([z, -z], 1)), dim=1)
        logits = (a @ b.T) * logit_scale.half().exp()
        return cross_entropy(logits + 0.1, torch.arange(8))

    fit(setting, model, loss_of, 120, optimizer=torch.optim.AdamW(parameters, lr=1e-2),
        scaler=GradScaler("cpu", init_scale=1.0),
        after=lambda step: logit_scale.data.add_(0.2))  # fmt: skip


@training("data", None, r"rows? \d+[^.]* of \d+ of a tensor")
def a_table_with_an_empty_cell(setting: Setting) -> None:
    """Each epoch has a batch or two with the row of an empty cell."""
    table = torch.randn(640, 9)
    table[setting.pick(77, 500, 3), setting.pick(3, 0, 7)] = torch.nan
    model = mlp(8, 32, 1)
    rows = torch.cat([torch.randperm(640) for _ in range(6)]).split(32)

    def loss_of(step: int) -> Tensor:
        batch = table[rows[step - 1]]
        return smooth_l1_loss(model(batch[:, :8]).float(), batch[:, 8:])

    fit(setting, model, loss_of, 120)
