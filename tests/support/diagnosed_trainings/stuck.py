"""Trainings that skip every step from some step on."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from gradscaler import DynamicScale, FixedScale
from gradscaler.torch import GradScaler
from tests.support.diagnosed_trainings import Setting, fit, mlp, regression, training


@training("parameter", "0.weight", "checkpoint")
def a_row_is_normalised_by_hand(setting: Setting) -> None:
    """0 / 0 in a pruned row."""
    model = mlp(setting.pick(16, 32, 48), 16, 1)
    weight = model.get_parameter("0.weight")

    def normalise(step: int) -> None:
        if step == setting.pick(30, 55, 12):
            with torch.no_grad():
                weight[3] = 0.0
                weight.div_(weight.norm(dim=1, keepdim=True))

    width = weight.shape[1]
    fit(setting, model, lambda step: regression(model, torch.randn(32, width)), 90, after=normalise)


@training("parameter", "2.weight", "checkpoint")
def a_checkpoint_beyond_float16_is_cast(setting: Setting) -> None:
    model = mlp(8, 16, 1)
    with torch.no_grad():
        model.get_parameter("2.weight")[0, setting.pick(0, 5, 9)] = setting.pick(1e5, 3e5, -7e4)
    model.half()
    scaler = GradScaler("cpu", allow_fp16_gradients=True)

    def loss_of(step: int) -> Tensor:
        return regression(model, torch.randn(16, 8).half())

    fit(setting, model, loss_of, 40, scaler=scaler, dtype=None)


@training("parameter", "0.weight", r"eps .*(float16|half)")
def adam_divides_by_an_eps_that_float16_rounds_to_0(setting: Setting) -> None:
    model = mlp(16, setting.pick(16, 24, 32), 1).half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=setting.pick(1e-8, 1e-8, 1e-9))
    scaler = GradScaler("cpu", allow_fp16_gradients=True)

    def loss_of(step: int) -> Tensor:
        return 1e-2 * regression(model, torch.randn(32, 16).half())

    fit(setting, model, loss_of, 60, optimizer=optimizer, scaler=scaler, dtype=None)


@training("activations", "2", "float32")
def weights_that_suit_bfloat16(setting: Setting) -> None:
    model = mlp(32, 32, 1)
    with torch.no_grad():
        for parameter in (model.get_parameter("0.weight"), model.get_parameter("2.weight")):
            parameter.mul_(setting.pick(3000.0, 5000.0, 2000.0))
    fit(setting, model, lambda step: regression(model, torch.randn(64, 32)), 40)


class Block(nn.Module):
    def __init__(self, width: int, gain: float) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width, bias=False)
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        return x.half() + self.gain * self.inner(x)


@training("activations", "blocks", "float32|bfloat16")
def a_residual_stream_without_norms(setting: Setting) -> None:
    blocks = (Block(16, gain=setting.pick(8.0, 6.0, 7.0)) for _ in range(setting.pick(24, 30, 36)))
    model = nn.Sequential()
    model.add_module("blocks", nn.Sequential(*blocks))
    fit(setting, model, lambda step: model(torch.randn(16, 16)).float().square().mean(), 40)


class Attention(nn.Module):
    """One head, by hand; ``mask`` is added to the scores."""

    def __init__(self, width: int, gain: float = 1.0) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.gain = gain
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gain * self.query(x) @ (self.gain * self.key(x)).transpose(1, 2)
        if self.mask is not None:
            scores = scores + self.mask
        return scores.softmax(2) @ x


@training("activations", "attention", "float32|bfloat16|divide")
def attention_scores_without_their_root(setting: Setting) -> None:
    attention = Attention(setting.pick(64, 96, 128), gain=setting.pick(300.0, 400.0, 350.0))
    model = nn.Sequential()
    model.add_module("attention", attention)
    width = attention.query.in_features
    fit(setting, model, lambda step: model(torch.randn(4, 6, width)).float().square().mean(), 40)


@training("activations", "attention", "mask")
def a_sequence_that_is_all_padding(setting: Setting) -> None:
    """A row of the softmax holds only -inf: it is NaN, though no number is too large."""
    attention = Attention(16)
    attention.mask = torch.zeros(4, 1, 6)
    attention.mask[setting.pick(2, 0, 3)] = -math.inf
    model = nn.Sequential()
    model.add_module("attention", attention)
    fit(setting, model, lambda step: model(torch.randn(4, 6, 16)).float().square().mean(), 40)


@training("activations", "attention", "mask")
def multihead_attention_with_a_full_padding_mask(setting: Setting) -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, setting.pick(1, 2, 4), batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            padding = torch.zeros(x.shape[:2], dtype=torch.bool)
            padding[1] = True
            out: Tensor = self.attention(x, x, x, key_padding_mask=padding)[0]
            return out

    model = Encoder()
    fit(setting, model, lambda step: model(torch.randn(4, 5, 16)).float().square().mean(), 40)


class Contrast(nn.Module):
    """Similarities over a temperature, exponentiated by hand."""

    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.project = nn.Linear(16, 8)
        self.temperature = temperature

    def forward(self, x: Tensor) -> Tensor:
        points = nn.functional.normalize(self.project(x), dim=1)
        return torch.exp((points @ points.T) / self.temperature)


@training("activations", "", "temperature|exp")
def a_temperature_that_is_too_low(setting: Setting) -> None:
    """exp(1 / 0.05) is beyond 65504."""
    model = Contrast(setting.pick(0.05, 0.07, 0.01))

    def loss_of(step: int) -> Tensor:
        raised = model(torch.randn(setting.pick(8, 16, 12), 16)).half()
        return -(raised.diagonal() / raised.sum(1)).float().log().mean()

    fit(setting, model, loss_of, 40)


@training("loss", None, "logits")
def the_logarithm_of_a_sigmoid(setting: Setting) -> None:
    model = nn.Sequential(*mlp(32, 32, 1), nn.Sigmoid())

    def loss_of(step: int) -> Tensor:
        inputs = torch.randn(64, 32)
        labels = (inputs.sum(1, keepdim=True) > 0).float()
        guess = model(setting.pick(100.0, 200.0, 150.0) * inputs).half()
        return -(labels * guess.log() + (1 - labels) * (1 - guess).log()).mean()

    fit(setting, model, loss_of, 40)


@training("silent", None, "no elements")
def the_mean_over_no_element(setting: Setting) -> None:
    """Every label is the one to ignore: 0 / 0."""
    model = mlp(8, setting.pick(16, 24, 32), 4)

    def loss_of(step: int) -> Tensor:
        labels = torch.full((16,), -100)
        return nn.functional.cross_entropy(model(torch.randn(16, 8)), labels)

    fit(setting, model, loss_of, 40)


@training("loss|data", None, "batch|deviation")
def inputs_are_divided_by_a_deviation_of_0(setting: Setting) -> None:
    model = mlp(8, 16, 1)

    def loss_of(step: int) -> Tensor:
        raw = torch.randn(16, 8)
        raw[:, setting.pick(0, 3, 7)] = 5.0
        return regression(model, (raw - raw.mean(0)) / raw.std(0))

    fit(setting, model, loss_of, 40)


@training("nan", "0.weight", "root|norm of 0")
def the_distance_of_a_point_to_itself(setting: Setting) -> None:
    model = mlp(16, 16, 4)

    def loss_of(step: int) -> Tensor:
        points = model(torch.randn(setting.pick(8, 16, 12), 16)).float()
        return (points - points[:1]).square().sum(1).sqrt().mean()

    fit(setting, model, loss_of, 40)


@training("nan", "0.weight", "root|where|0 \\* Inf")
def a_branch_that_where_does_not_take(setting: Setting) -> None:
    model = mlp(8, 16, 4)

    def loss_of(step: int) -> Tensor:
        x = model(torch.randn(32, 8)).float()
        return torch.where(x > 0, x ** setting.pick(0.5, 0.25, 0.75), 0.0 * x).mean()

    fit(setting, model, loss_of, 40)


@training("nan", "0.weight", "root|0 \\* Inf|deviation")
def the_deviation_of_equal_numbers(setting: Setting) -> None:
    model = mlp(8, 16, setting.pick(4, 6, 8))

    def loss_of(step: int) -> Tensor:
        x = model(torch.ones(16, 8)).float()
        return x.square().mean() - x.var(0).sqrt().mean()

    fit(setting, model, loss_of, 40)


@training("floor", None, "mean")
def a_sum_of_squares_above_a_scale_of_1(setting: Setting) -> None:
    model = mlp(32, 32, 1)
    scaler = GradScaler(policy=DynamicScale(init_scale=setting.pick(2.0**8, 2.0**12), min_scale=1))
    far = setting.pick(5e3, 2e4, 9e3)

    def loss_of(step: int) -> Tensor:
        return (model(torch.randn(64, 32)).float() - far).square().sum()

    fit(setting, model, loss_of, 60, scaler=scaler, lr=0.0)


@training("floor", None, "below 1")
def a_scale_below_1_cures_it(setting: Setting) -> None:
    """The gradients are 2**20 or more: no scale above 1 fits, but one below 1 does."""
    model = mlp(32, 32, 1)
    far = setting.pick(1e4, 3e4, 2e4)

    def loss_of(step: int) -> Tensor:
        return (model(torch.randn(64, 32)).float() - far).square().sum()

    fit(setting, model, loss_of, setting.pick(150, 60, 90), lr=1e-12)


@training("floor", None, "below 1")
def a_loss_in_small_units(setting: Setting) -> None:
    """Nanometres, where metres would do."""
    model = mlp(16, 16, 1)
    units = setting.pick(1e8, 1e9, 3e7)

    def loss_of(step: int) -> Tensor:
        return units * regression(model, torch.randn(64, 16))

    fit(setting, model, loss_of, setting.pick(120, 60, 90), lr=1e-12)


@training("divergence", None, "learning rate")
def the_learning_rate_is_too_large(setting: Setting) -> None:
    model = mlp(32, 64, 1)
    lr = setting.pick(1.0, 3.0, 2.0)
    fit(setting, model, lambda step: regression(model, 2 * torch.randn(64, 32)), 80, lr=lr)


@training("divergence", None, "learning rate")
def a_learning_rate_that_grows(setting: Setting) -> None:
    """A long warm-up that goes too far."""
    model = mlp(16, 32, 32, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def faster(step: int) -> None:
        optimizer.param_groups[0]["lr"] *= setting.pick(1.1, 1.15, 1.2)

    def loss_of(step: int) -> Tensor:
        return regression(model, torch.randn(64, 16))

    fit(setting, model, loss_of, 140, optimizer=optimizer, after=faster)


@training("divergence", None, "learning rate")
def adam_with_a_large_step_on_cross_entropy(setting: Setting) -> None:
    model = mlp(16, 64, 64, 64, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=setting.pick(5.0, 10.0, 8.0))

    def loss_of(step: int) -> Tensor:
        inputs = torch.randn(32, 16)
        return nn.functional.cross_entropy(model(inputs), inputs[:, :4].argmax(1))

    fit(setting, model, loss_of, 60, optimizer=optimizer)


class Recurrence(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.cell = nn.Linear(16, 16, bias=False)
        with torch.no_grad():
            self.cell.weight.copy_(gain * torch.eye(16))

    def forward(self, x: Tensor, length: int) -> Tensor:
        for _ in range(length):
            x = self.cell(x)
        return x


@training("activations", "cell", "float32|bfloat16")
def a_recurrence_that_doubles(setting: Setting) -> None:
    model = Recurrence(setting.pick(1.5, 2.0, 1.7))

    def loss_of(step: int) -> Tensor:
        return model(torch.randn(8, 16), 40).float().square().mean()

    fit(setting, model, loss_of, 40)


class OwnLayerNorm(nn.Module):
    """A layer norm by hand, whose eps is 0 in float16."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs.half()
        if self.way == "normalize":
            return nn.functional.normalize(inputs, eps=1e-12)
        variance, mean = torch.var_mean(inputs, 1, keepdim=True)
        if self.way == "rsqrt":
            return (inputs - mean) * (variance + 1e-8).rsqrt()
        return (inputs - mean) / (variance + 1e-8).sqrt()


@training("activations|data|loss", None, "float16")
def an_eps_that_is_0_in_float16(setting: Setting) -> None:
    """Each batch has a row of equal numbers."""
    norm = OwnLayerNorm(setting.pick("div", "rsqrt", "normalize"))
    model = nn.Sequential(nn.Linear(16, 16), norm, nn.Linear(16, 1))

    def loss_of(step: int) -> Tensor:
        hidden: Tensor = model[0](torch.randn(16, 16)) * (torch.arange(16) > 0)[:, None]
        return model[2](norm(hidden)).float().square().mean()

    fit(setting, model, loss_of, 60)


@training("activations|loss", None, r"float32|lower")
def a_teacher_that_overflows(setting: Setting) -> None:
    """It is another module, under no_grad, and its outputs are inputs of the student."""
    teacher, student = mlp(16, 32, 16), mlp(16, 32, 1)
    with torch.no_grad():
        for weight in teacher.parameters():
            weight.mul_(setting.pick(3000.0, 6000.0, 9000.0))

    def loss_of(step: int) -> Tensor:
        with torch.no_grad():
            hidden = teacher(torch.randn(32, 16))
        return regression(student, hidden)

    fit(setting, student, loss_of, 60)


@training("loss|activations|divergence", None, r"ratio|clamp|divergence|learning rate")
def a_ratio_of_probabilities_that_grows(setting: Setting) -> None:
    """The ratio of PPO: the exponential of a difference of logarithms, without a clamp."""
    model = mlp(8, 16, 1)
    with torch.no_grad():
        old = model(torch.ones(1, 8))

    def loss_of(step: int) -> Tensor:
        inputs = torch.rand(32, 8) + 0.5
        ratio = (setting.pick(4.0, 2.0, 8.0) * (model(inputs) - old.half())).exp()
        return -(ratio * 0.5).float().mean()

    fit(setting, model, loss_of, 300, lr=setting.pick(3e-3, 1e-2, 1e-3))


@training("parameter", "0.weight", "Another module's .*find what wrote it")
def averaged_weights_become_inf(setting: Setting) -> None:
    """They belong to another model, and no skip repairs them."""
    model, teacher = mlp(16, 32, 4), mlp(16, 32, 4).requires_grad_(False)
    bad = setting.pick(40, 70, 110)

    def loss_of(step: int) -> Tensor:
        for mean, now in zip(teacher.parameters(), model.parameters(), strict=True):
            mean.mul_(0.99).add_(now.detach() * (math.inf if step == bad else 0.01))
        inputs = torch.randn(32, 16)
        return nn.functional.mse_loss(model(inputs).float(), teacher(inputs).float())

    fit(setting, model, loss_of, bad + 40)


@training("loss", None, r"Another module .* by (linear|matmul) .*average's decay")
def averaged_weights_grow_without_end(setting: Setting) -> None:
    """The loss grows, too, but the model does not diverge."""
    model, teacher = mlp(16, 32, 4), mlp(16, 32, 4).requires_grad_(False)

    def loss_of(step: int) -> Tensor:
        decay = 1 + step / setting.pick(200, 300)
        with torch.no_grad():
            for mean, now in zip(teacher.parameters(), model.parameters(), strict=True):
                mean.mul_(decay).add_(now, alpha=1 - decay)
        inputs = torch.randn(32, 16)
        outputs, target = model(inputs).float(), teacher(inputs).float()
        return outputs.square().mean() + 0.01 * (outputs - target).square().mean()

    fit(setting, model, loss_of, 140)


@training("loss", None, "zero_infinity")
def a_target_that_is_longer_than_its_input(setting: Setting) -> None:
    model = mlp(16, 32, 5)
    length = setting.pick(7, 9, 12)

    def loss_of(step: int) -> Tensor:
        frames = model(torch.randn(6, 4, 16)).float().log_softmax(-1)
        targets = torch.ones(4, length, dtype=torch.long)
        lengths = torch.full((4,), 6), torch.full((4,), length)
        return nn.functional.ctc_loss(frames, targets, *lengths)

    fit(setting, model, loss_of, 40)


@training("floor", None, "something sets again .* Leave out what sets it, such as update")
def the_scale_is_set_in_each_step(setting: Setting) -> None:
    """A scale of its own is passed to update(), so that no skip lowers it."""
    model, scale = mlp(16, 32, 1), setting.pick(2.0**24, 2.0**26, 2.0**22)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = GradScaler("cpu", init_scale=scale)
    setting.monitor(scaler, model)
    for _ in range(40):
        with torch.autocast("cpu", torch.float16):
            loss = regression(model, torch.randn(32, 16)) * 100
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update(scale)


@training("floor", None, "Allow a lower scale .* DynamicScale")
def a_fixed_scale_that_is_too_large(setting: Setting) -> None:
    model = mlp(16, 32, 1)
    scaler = GradScaler("cpu", policy=FixedScale(setting.pick(2.0**24, 2.0**26, 2.0**22)))

    def loss_of(step: int) -> Tensor:
        return regression(model, torch.randn(32, 16)) * 100

    fit(setting, model, loss_of, 40, scaler=scaler)
