"""Trainings whose steps are skipped now and then."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from gradscaler import FixedScale
from gradscaler.torch import GradScaler
from tests.support.diagnosed_trainings import Setting, fit, mlp, regression, training


@training("data", None, "every (20|32|50)")
def a_bad_batch_every_n_steps(setting: Setting) -> None:
    model = mlp(16, 32, 1)
    period, bad = setting.pick(20, 32, 50), setting.pick(math.nan, math.inf, math.nan)

    def loss_of(step: int) -> Tensor:
        inputs = torch.randn(32, 16)
        if step % period == 0:
            inputs[3, 5] = bad
        return regression(model, inputs)

    fit(setting, model, loss_of, 300)


@training("data", None, "batch")
def a_few_percent_of_the_batches_hold_a_nan(setting: Setting) -> None:
    model = mlp(16, 32, 1)
    share = setting.pick(0.03, 0.06, 0.1)

    def loss_of(step: int) -> Tensor:
        inputs = torch.randn(32, 16)
        if torch.rand(()) < share:
            inputs[0, 0] = math.nan
        return regression(model, inputs)

    fit(setting, model, loss_of, 300)


@training("data", None, "clamp its input|clamp it")
def an_exp_overflows_before_a_clamp_now_and_then(setting: Setting) -> None:
    """The loss is finite and the gradient 0 * Inf, in float32 or bfloat16, which need no scale."""
    model = mlp(16, 32, 1)
    share = setting.pick(0.08, 0.15, 0.1)

    def loss_of(step: int) -> Tensor:
        inputs = torch.randn(32, 16)
        far = 200.0 * (torch.rand(()) < share)
        ratio = (0.01 * model(inputs).float() + far).exp().clamp(max=10.0)
        return regression(model, inputs) + 0.01 * ratio.mean()

    scaler = GradScaler("cpu", policy=FixedScale(1.0))
    dtype = setting.pick(None, torch.bfloat16)
    fit(setting, model, loss_of, 300, scaler=scaler, dtype=dtype)


@training("data", None, "batch")
def half_of_the_batches_sink_the_scale(setting: Setting) -> None:
    model = mlp(16, 32, 1)
    share = setting.pick(0.3, 0.5, 0.2)

    def loss_of(step: int) -> Tensor:
        inputs = torch.randn(32, 16)
        if torch.rand(()) < share:
            inputs[0, 0] = math.nan
        return regression(model, inputs)

    fit(setting, model, loss_of, 150)


@training("data", None, "batch")
def one_class_has_no_weight(setting: Setting) -> None:
    """Its weights are 1 / 0."""
    model = mlp(16, 32, 4)
    counts = torch.tensor([5.0, 3.0, 0.0, 4.0])

    def loss_of(step: int) -> Tensor:
        labels = torch.randint(0, 2, (8,))
        if torch.rand(()) < setting.pick(0.05, 0.1, 0.15):
            labels[0] = 2
        return nn.functional.cross_entropy(model(torch.randn(8, 16)), labels, 1 / counts)

    fit(setting, model, loss_of, 250)


@training("data", None, "batch")
def long_sequences_overflow_a_sum(setting: Setting) -> None:
    """Their sum is taken in float16."""
    model = mlp(8, 16, 1)

    def loss_of(step: int) -> Tensor:
        is_long = step % setting.pick(17, 23, 31) == 0
        tokens = torch.randn(2, 4000 if is_long else 100, 8).abs()
        pooled = (model[0](tokens).relu() * 100).half().cumsum(1)[:, -1]
        return model[2](pooled / tokens.shape[1]).float().square().mean()

    fit(setting, model, loss_of, 200, lr=1e-7)


@training("data", None, "batch")
def outliers_whose_gradients_overflow(setting: Setting) -> None:
    """Their loss is finite, and far larger than the others'."""
    model = mlp(16, 32, 1)
    period = setting.pick(12, 15, 9)

    def loss_of(step: int) -> Tensor:
        inputs = torch.randn(32, 16)
        far = setting.pick(1e9, 1e10, 1e9) if step % period == 0 else 0.0
        outputs = model(inputs).float() - inputs.sum(1, keepdim=True) - far
        return outputs.square().mean()

    fit(setting, model, loss_of, 200)


@training("data", None, "batch")
def masks_that_are_empty_now_and_then(setting: Setting) -> None:
    model = mlp(16, 32, 1)

    def loss_of(step: int) -> Tensor:
        inputs = torch.randn(8, 16)
        mask = (torch.rand(8) < setting.pick(0.3, 0.25, 0.35)).float()
        errors = (model(inputs).float() - inputs.sum(1, keepdim=True)).square()[:, 0]
        return (errors * mask).sum() / mask.sum()

    fit(setting, model, loss_of, 250)


@training("data", None, r"in div at .*clamp the divisor")
def an_advantage_of_one_sample(setting: Setting) -> None:
    """What scales the loss is made without gradients, and is NaN for short batches."""
    policy = mlp(8, 32, 2)
    share, amp = setting.pick(0.08, 0.15, 0.1), setting.pick(None, torch.float16)

    def loss_of(_: int) -> Tensor:
        num = 1 if torch.rand(()) < share else 16
        with torch.no_grad():
            rewards = torch.randn(num)
            advantages = (rewards - rewards.mean()) / rewards.std(correction=0)
        chances = policy(torch.randn(num, 8)).float().log_softmax(-1)
        return -(advantages * chances[:, 0]).mean()

    fit(setting, policy, loss_of, 250, dtype=amp)


@training("data", None, "batch")
def bursts_of_bad_batches(setting: Setting) -> None:
    """A damaged shard of the data: some batches in a row, once an epoch."""
    model = mlp(16, 32, 1)
    epoch, damaged = setting.pick(60, 40, 80), setting.pick(4, 3, 6)

    def loss_of(step: int) -> Tensor:
        inputs = torch.randn(32, 16)
        if 20 <= step % epoch < 20 + damaged:
            inputs[0, 0] = math.nan
        return regression(model, inputs)

    fit(setting, model, loss_of, 300)


@training("data", None, "gradient of")
def duplicates_at_a_distance_of_0(setting: Setting) -> None:
    """The loss is finite, and its gradient is 0 * Inf."""
    model = mlp(16, 16, 4)

    def loss_of(step: int) -> Tensor:
        inputs = torch.randn(16, 16)
        if torch.rand(()) < setting.pick(0.08, 0.12, 0.1):
            inputs[1] = inputs[0]
        points = model(inputs).float()
        return (points[0] - points[1:]).square().sum(1).sqrt().mean()

    fit(setting, model, loss_of, 250)


@training("data", None, "mask")
def some_sequences_are_all_padding(setting: Setting) -> None:
    embed, out = nn.Embedding(20, 16), nn.Linear(16, 1)
    attention = nn.MultiheadAttention(16, 2, batch_first=True)
    model = nn.ModuleDict({"embed": embed, "attention": attention, "out": out})

    def loss_of(step: int) -> Tensor:
        lengths = torch.randint(1, 7, (8,))
        if step % setting.pick(11, 19, 14) == 0:
            lengths[2] = 0
        padding = torch.arange(6)[None] >= lengths[:, None]
        x = embed(torch.randint(0, 20, (8, 6)))
        mixed = attention(x, x, x, key_padding_mask=padding)[0]
        return out(mixed.mean(1)).float().square().mean()

    fit(setting, model, loss_of, 160)


@training("data", None, "mask")
def an_additive_mask_on_a_whole_row(setting: Setting) -> None:
    """It is -inf in float16."""
    query, key, value = (nn.Linear(16, 16) for _ in range(3))
    model = nn.ModuleDict({"query": query, "key": key, "value": value})

    def loss_of(step: int) -> Tensor:
        inputs = torch.randn(8, 6, 16)
        lengths = torch.randint(1, 7, (8, 1))
        if step % setting.pick(13, 21, 17) == 0:
            lengths[0] = 0
        mask = (torch.arange(6) >= lengths).half() * -1e5
        scores = query(inputs) @ key(inputs).transpose(1, 2) / 4 + mask[:, None]
        return (scores.softmax(-1) @ value(inputs)).float().square().mean()

    fit(setting, model, loss_of, 160)


@training("data", None, "outliers")
def outliers_sink_the_scale_until_they_fit(setting: Setting) -> None:
    """No step is skipped then, and the gradients of all other batches are flushed to 0."""
    model = mlp(16, 32, 1)
    share = setting.pick(0.2, 0.3, 0.25)

    def loss_of(step: int) -> Tensor:
        inputs = torch.randn(32, 16)
        size = 1e9 if torch.rand(()) < share else 1.0
        return nn.functional.mse_loss(model(inputs).float(), inputs.sum(1, keepdim=True) * size)

    fit(setting, model, loss_of, 300, lr=1e-12)
