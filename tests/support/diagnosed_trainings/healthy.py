"""Trainings with nothing wrong, which must raise no alarm."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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


@training("normal")
def early_skips(setting: Setting) -> None:
    model = mlp(16, 64, 1)
    scaler = GradScaler("cpu", init_scale=setting.pick(2.0**16, 2.0**24, 2.0**20))
    fit(setting, model, lambda step: regression(model, torch.randn(64, 16)), 200, scaler=scaler)


@training("normal")
def growth_with_a_skip_each_time(setting: Setting) -> None:
    """The scale is doubled until it overflows, again and again."""
    model = mlp(16, 64, 4)
    scaler = GradScaler("cpu", growth_interval=setting.pick(20, 50, 10))

    def loss_of(step: int) -> Tensor:
        inputs = torch.randn(64, 16)
        return nn.functional.cross_entropy(model(inputs), inputs[:, :4].argmax(1))

    fit(setting, model, loss_of, 400, scaler=scaler, lr=0.1)


@training("normal")
def noisy_gradients_at_the_edge(setting: Setting) -> None:
    """Batches differ by a factor of some 10, so that skips come late after a growth."""
    model = mlp(16, 32, 1)
    scaler = GradScaler("cpu", growth_interval=setting.pick(40, 25, 60))

    def loss_of(step: int) -> Tensor:
        return torch.randn(()).exp() * regression(model, torch.randn(16, 16))

    fit(setting, model, loss_of, 400, scaler=scaler, lr=1e-3)


@training("normal")
def a_convolutional_network(setting: Setting) -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 4),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def loss_of(step: int) -> Tensor:
        images = torch.randn(8, 1, setting.pick(8, 10, 12), 8)
        labels = images[:, 0, :2, :2].flatten(1).argmax(1)
        return nn.functional.cross_entropy(model(images), labels)

    fit(setting, model, loss_of, 120, optimizer=optimizer)


@training("normal")
def sparse_gradients(setting: Setting) -> None:
    embedding = nn.Embedding(setting.pick(100, 5000, 40000), 16, sparse=True)
    head = nn.Linear(16, 4)
    model = nn.ModuleDict({"embedding": embedding, "head": head})

    def loss_of(step: int) -> Tensor:
        tokens = torch.randint(0, embedding.num_embeddings, (32,))
        return nn.functional.cross_entropy(head(embedding(tokens)), tokens % 4)

    fit(setting, model, loss_of, 120, lr=0.1)


@training("normal")
def an_embedding_of_which_few_rows_are_used(setting: Setting) -> None:
    embedding = nn.Embedding(setting.pick(1000, 20000, 40000), 16)
    head = nn.Linear(16, 4)
    model = nn.ModuleDict({"embedding": embedding, "head": head})

    def loss_of(step: int) -> Tensor:
        tokens = torch.randint(0, 60, (32,)) * 13
        return nn.functional.cross_entropy(head(embedding(tokens)), tokens % 4)

    fit(setting, model, loss_of, 120, lr=0.1)


@training("normal")
def a_gan_with_one_update(setting: Setting) -> None:
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
        with torch.autocast("cpu", dtype=torch.float16):
            of_generator = real_or_not(critic(fake).float(), torch.ones(16, 1))
        optimizers[1].zero_grad()
        scaler.scale(of_generator).backward()
        scaler.step(optimizers[1])
        scaler.update()


@training("normal")
def a_critic_that_steps_more_often(setting: Setting) -> None:
    """Each step of either has its own loss and its own update."""
    generator, critic = mlp(8, 32, 16), mlp(16, 32, 1)
    model = nn.ModuleDict({"generator": generator, "critic": critic})
    of_critic = torch.optim.SGD(critic.parameters(), lr=1e-3)
    of_generator = torch.optim.SGD(generator.parameters(), lr=1e-3)
    scaler = GradScaler("cpu")
    setting.monitor(scaler, model)
    for step in range(1, 150):
        is_critics = step % setting.pick(5, 3, 4) != 0
        optimizer = of_critic if is_critics else of_generator
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            fake = generator(torch.randn(16, 8))
            outputs = critic(fake.detach() if is_critics else fake).float()
            loss = nn.functional.softplus(outputs if is_critics else -outputs).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@training("normal")
def accumulation_done_right(setting: Setting) -> None:
    model = mlp(16, 32, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = GradScaler("cpu")
    setting.monitor(scaler, model)
    micro_batches = setting.pick(2, 4, 8)
    for micro in range(1, 120 * micro_batches):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = regression(model, torch.randn(8, 16)) / micro_batches
        scaler.scale(loss).backward()
        if micro % micro_batches == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


@training("normal")
def clipped_after_unscaling(setting: Setting) -> None:
    """At a norm that always clips."""
    model = mlp(16, 32, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    scaler = GradScaler("cpu")
    setting.monitor(scaler, model)
    for _ in range(250):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = regression(model, torch.randn(32, 16))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        max_norm = setting.pick(0.01, 0.1, 1.0)
        if setting.pick(True, False):
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        else:
            scaler.clip_grad_norm_(optimizer, max_norm)
        scaler.step(optimizer)
        scaler.update()


@training("normal")
def frozen_layers(setting: Setting) -> None:
    model = mlp(16, 64, 64, 1)
    for layer in (model[0], model[2])[: setting.pick(1, 2)]:
        layer.requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1e-2)

    def loss_of(step: int) -> Tensor:
        return regression(model, torch.randn(32, 16))

    fit(setting, model, loss_of, 120, optimizer=optimizer)


@training("normal")
def relus_with_many_zeros(setting: Setting) -> None:
    """Most units are off for most inputs."""
    model = mlp(16, 128, 128, 1)
    with torch.no_grad():
        model.get_parameter("0.bias").fill_(setting.pick(-1.0, -1.2, -0.8))
    fit(setting, model, lambda step: regression(model, torch.randn(32, 16)), 120)


@training("normal")
def a_head_that_starts_at_zero(setting: Setting) -> None:
    """The first gradients of the body are 0, and all gradients of an unused branch are."""
    model = mlp(16, 32, 32, 1)
    nn.init.zeros_(model.get_parameter("4.weight"))
    unused = nn.Linear(16, 1)
    model.add_module("unused", unused)

    def loss_of(step: int) -> Tensor:
        inputs = torch.randn(32, 16)
        weight = 0.0 if step < setting.pick(200, 50, 100) else 1.0
        return regression(model[:5], inputs) + weight * regression(unused, inputs)

    fit(setting, model, loss_of, 120)


@training("normal")
def full_precision_at_first(setting: Setting) -> None:
    model = mlp(16, 32, 1)
    scaler = GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    setting.monitor(scaler, model)
    for step in range(200):
        with torch.autocast("cpu", torch.float16, enabled=step >= setting.pick(30, 20, 10)):
            loss = regression(model, torch.randn(32, 16))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@training("normal")
def half_parameters(setting: Setting) -> None:
    model = mlp(16, 32, 1).half()
    scaler = GradScaler("cpu", allow_fp16_gradients=True, init_scale=setting.pick(1024.0, 256.0))

    def loss_of(step: int) -> Tensor:
        return regression(model, torch.randn(32, 16).half())

    fit(setting, model, loss_of, 120, scaler=scaler, dtype=None)


@training("normal")
def padded_sequences(setting: Setting) -> None:
    embed, out = nn.Embedding(20, 16), nn.Linear(16, 4)
    attention = nn.MultiheadAttention(16, setting.pick(1, 2, 4), batch_first=True)
    model = nn.ModuleDict({"embed": embed, "attention": attention, "out": out})

    def loss_of(step: int) -> Tensor:
        padding = torch.arange(6)[None] >= torch.randint(1, 7, (8, 1))
        tokens = torch.randint(0, 20, (8, 6))
        x = embed(tokens)
        mixed = attention(x, x, x, key_padding_mask=padding)[0]
        return nn.functional.cross_entropy(out(mixed[:, 0]), tokens[:, 0] % 4)

    fit(setting, model, loss_of, 120)


@training("normal")
def a_small_loss_that_rises_at_times(setting: Setting) -> None:
    """It crosses 0 and falls by orders of magnitude, and comes back when the data change."""
    model = mlp(16, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def loss_of(step: int) -> Tensor:
        inputs = torch.randn(64, 16)
        far = 0.0 if step < 100 else setting.pick(3.0, 10.0, 30.0)
        error = (model(inputs).float() - far).square().mean()
        return error - setting.pick(0.0, 0.5, 0.1)

    fit(setting, model, loss_of, 200, optimizer=optimizer)


@training("normal")
def activations_computed_again(setting: Setting) -> None:
    first, second = mlp(16, setting.pick(32, 48, 64), 16), mlp(16, 32, 1)
    model = nn.Sequential(first, second)

    def loss_of(step: int) -> Tensor:
        inputs = torch.randn(32, 16, requires_grad=True)
        hidden = checkpoint(first, inputs, use_reentrant=setting.pick(False, True))
        return (second(hidden).float() - 1).square().mean()

    fit(setting, model, loss_of, 120)


@training("normal")
def the_same_batch_at_a_learning_rate_of_0(setting: Setting) -> None:
    """The loss and the parameters stay as they are, because they are meant to."""
    model = mlp(16, 32, 1)
    inputs = torch.randn(32, 16)
    fit(setting, model, lambda step: regression(model, inputs), 250, lr=setting.pick(0.0, 1e-9))


@training("normal")
def a_closure(setting: Setting) -> None:
    model = mlp(16, 32, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=setting.pick(0.1, 0.2), max_iter=3)
    scaler = GradScaler("cpu", init_scale=1024.0)
    setting.monitor(scaler, model)
    inputs = torch.randn(64, 16)

    def closure() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = regression(model, inputs)
        scaler.scale(loss).backward()
        return loss

    for _ in range(40):
        scaler.step(optimizer, closure)
        scaler.update()


@training("normal")
def gradients_are_set_to_zero_in_place(setting: Setting) -> None:
    """After the forward pass, after the loss is scaled, or by hand before both."""
    model = mlp(16, 32, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = GradScaler("cpu")
    setting.monitor(scaler, model)
    for _ in range(120):
        for parameter in model.parameters() if setting.pick(False, False, True) else ():
            if parameter.grad is not None:
                parameter.grad.data.zero_()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = regression(model, torch.randn(32, 16))
        if setting.pick(True, False):
            optimizer.zero_grad(set_to_none=False)
        scaled = scaler.scale(loss)
        if setting.pick(False, True, False):
            optimizer.zero_grad(set_to_none=False)
        scaled.backward()
        scaler.step(optimizer)
        scaler.update()


class LowRank(nn.Module):
    """A frozen layer, and an adapter whose second matrix starts at zero."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs) + self.up(self.down(inputs))
        return outputs


@training("normal")
def adapters_that_start_at_zero(setting: Setting) -> None:
    """Their first gradients are 0, and each step is sampled."""
    model = nn.Sequential(LowRank(16, 4), nn.ReLU(), LowRank(16, setting.pick(2, 4, 8)), mlp(16, 1))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    scaler = GradScaler("cpu")
    setting.monitor(scaler, model, every=setting.pick(1, 2, 3))
    for _ in range(40):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = regression(model, torch.randn(32, 16))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


class Gated(nn.Module):
    """A residual branch behind a gate that starts at zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch = mlp(width, width, width)
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = inputs + self.gate * self.branch(inputs)
        return outputs


@training("normal")
def residual_gates_that_start_at_zero(setting: Setting) -> None:
    model = nn.Sequential(*(Gated(16) for _ in range(setting.pick(2, 4, 6))), nn.Linear(16, 1))
    fit(setting, model, lambda step: regression(model, torch.randn(32, 16)), 120)


@training("normal")
def experts_that_are_cold_now_and_then(setting: Setting) -> None:
    """An expert without inputs has a gradient of 0, or none if it is not called."""
    experts = nn.ModuleList(mlp(16, 16, 1) for _ in range(6))
    gate = nn.Linear(16, 6)
    model = nn.ModuleDict({"gate": gate, "experts": experts})
    model.register_parameter("bias", nn.Parameter(torch.zeros(1)))

    def loss_of(step: int) -> Tensor:
        inputs = torch.randn(4, 16)
        shares, chosen = gate(inputs).softmax(-1).max(-1)
        total = model.bias * torch.ones(4, 1)
        for number, expert in enumerate(experts):
            mine = chosen == number
            if setting.pick(False, True, False) and not mine.any():
                continue
            outputs = expert(inputs * mine[:, None]) * mine[:, None] * shares[:, None]
            total = total + outputs
        return (total.float() - inputs.sum(1, keepdim=True)).square().mean()

    fit(setting, model, loss_of, 150)


@training("normal", None, "b.0.weight and 3 more should be trained")
def heads_that_are_not_used_in_this_phase(setting: Setting) -> None:
    """They are called or not, and nothing uses their outputs."""
    body, used, idle = mlp(16, 32, 32), mlp(32, 16, 1), mlp(32, 16, 4)
    model = nn.ModuleDict({"body": body, "b": idle, "a": used})

    def loss_of(step: int) -> Tensor:
        inputs = torch.randn(32, 16)
        hidden = body(inputs).relu()
        if setting.pick(True, False):
            idle(hidden)
        return regression(used, hidden)

    fit(setting, model, loss_of, 150)


@training("normal", None, "should be trained")
def an_encoder_under_no_grad(setting: Setting) -> None:
    """A first phase in which only the head is trained."""
    encoder, head = mlp(16, 32, 16), mlp(16, setting.pick(16, 32), 1)
    model = nn.Sequential(encoder, head)

    def loss_of(step: int) -> Tensor:
        inputs = torch.randn(32, 16)
        with torch.no_grad():
            hidden = encoder(inputs)
        return regression(head, hidden.float())

    fit(setting, model, loss_of, 120)


@training("normal")
def a_margin_that_is_met(setting: Setting) -> None:
    """A second loss that has nothing left to improve."""
    body, first, second = mlp(16, 32, 16), nn.Linear(16, 1), mlp(16, 16, 1)
    model = nn.ModuleDict({"body": body, "first": first, "second": second})
    with torch.no_grad():
        second.get_parameter("2.bias").fill_(setting.pick(30.0, 50.0))

    def loss_of(step: int) -> Tensor:
        inputs = torch.randn(32, 16)
        hidden = body(inputs)
        margin = (1.0 - second(hidden).float()).relu().mean()
        return regression(first, hidden) + margin

    fit(setting, model, loss_of, 120)


@training("normal")
def a_head_that_is_used_every_few_steps(setting: Setting) -> None:
    body, often, seldom = mlp(16, 32, 16), mlp(16, 16, 1), mlp(16, 16, 1)
    model = nn.ModuleDict({"body": body, "often": often, "seldom": seldom})

    def loss_of(step: int) -> Tensor:
        hidden = body(torch.randn(32, 16))
        loss = regression(often, hidden)
        return loss + regression(seldom, hidden) if step % setting.pick(4, 7, 5) == 0 else loss

    fit(setting, model, loss_of, 200)


@training("normal")
def biases_before_batch_norms(setting: Setting) -> None:
    """Their gradients are 0 but for rounding."""
    width = setting.pick(8, 16, 32)
    layers = (nn.Linear(16, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 1))
    model = nn.Sequential(*layers)
    fit(setting, model, lambda step: regression(model, torch.randn(32, 16)), 120)


@training("normal")
def a_quantizer_that_gradients_pass(setting: Setting) -> None:
    """A straight-through estimator, or a book of codes with its own loss."""
    encoder, decoder = mlp(16, 32, 8), mlp(8, 32, 16)
    book = nn.Embedding(setting.pick(16, 64, 512), 8)
    model = nn.ModuleDict({"encoder": encoder, "book": book, "decoder": decoder})

    def loss_of(step: int) -> Tensor:
        inputs = torch.randn(32, 16)
        hidden = encoder(inputs).float()
        code = book(torch.cdist(hidden.detach(), book.weight).argmin(1))
        loss = (code - hidden.detach()).square().mean() + (hidden - code.detach()).square().mean()
        rounded = hidden.round() if setting.pick(True, False) else code
        outputs = decoder(hidden + (rounded - hidden).detach()).float()
        return loss + nn.functional.mse_loss(outputs, inputs)

    fit(setting, model, loss_of, 120)


@training("normal")
def a_state_that_is_detached_between_windows(setting: Setting) -> None:
    cell, out = nn.GRUCell(8, 16), nn.Linear(16, 1)
    model = nn.ModuleDict({"cell": cell, "out": out})
    state = torch.zeros(8, 16)

    def loss_of(step: int) -> Tensor:
        nonlocal state
        state = state.detach().float()
        loss = torch.zeros(())
        for _ in range(setting.pick(1, 5, 3)):
            inputs = torch.randn(8, 8)
            state = cell(inputs, state)
            error = out(state).float() - inputs.sum(1, keepdim=True)
            loss = loss + error.square().mean()
        return loss

    fit(setting, model, loss_of, 120)


@training("normal", None, "do no harm")
def one_bad_batch(setting: Setting) -> None:
    """In 400 steps, or in 1,500."""
    model = mlp(16, 32, 1)
    steps = setting.pick(400, 1500, 400)

    def loss_of(step: int) -> Tensor:
        inputs = torch.randn(32, 16)
        if step == setting.pick(37, 1300, 399):
            inputs[0, 0] = torch.nan
        return regression(model, inputs)

    fit(setting, model, loss_of, steps, scaler=GradScaler("cpu", init_scale=2.0**8))


@training("normal")
def targets_that_grow(setting: Setting) -> None:
    """The loss grows with them by orders of magnitude, and the scale falls now and then."""
    model = mlp(16, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    rate = setting.pick(500.0, 450.0, 600.0)

    def loss_of(step: int) -> Tensor:
        inputs = torch.randn(64, 16)
        targets = inputs.sum(1, keepdim=True) * 2.0 ** (step / rate * 4)
        return nn.functional.mse_loss(model(inputs).float(), targets)

    fit(setting, model, loss_of, 1000, optimizer=optimizer)


@training("normal", None, "the loss itself was NaN or Inf in step 60")
def one_loss_of_no_element(setting: Setting) -> None:
    """It is NaN, and its gradients are 0, so that the step is applied."""
    model = mlp(16, 32, 1)

    def loss_of(step: int) -> Tensor:
        inputs = torch.randn(setting.pick(32, 16, 64), 16)
        error = model(inputs).float() - inputs.sum(1, keepdim=True)
        return error.square()[: 0 if step == 60 else None].mean()

    fit(setting, model, loss_of, 300)


@training("normal")
def bfloat16_at_a_scale_that_is_fixed_at_1(setting: Setting) -> None:
    model = mlp(16, setting.pick(32, 48, 64), 1)
    scaler = GradScaler("cpu", policy=FixedScale(1.0))

    def loss_of(step: int) -> Tensor:
        return regression(model, torch.randn(32, 16))

    fit(setting, model, loss_of, 120, scaler=scaler, dtype=torch.bfloat16)


@training("normal")
def a_small_loss_without_a_loss_scale(setting: Setting) -> None:
    """Its gradients are beyond float16, and in the range of what computes them."""
    model = mlp(16, 32, 1)

    def loss_of(step: int) -> Tensor:
        return 1e-7 * regression(model, torch.randn(32, 16))

    scaler = GradScaler("cpu", policy=FixedScale(1.0))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-12)
    dtype = setting.pick(torch.bfloat16, None)
    fit(setting, model, loss_of, 250, scaler=scaler, optimizer=optimizer, dtype=dtype)


@training("normal")
def steps_with_a_large_norm_are_left_out(setting: Setting) -> None:
    """A guard leaves out about a third of the steps, and calls update() all the same."""
    model = mlp(16, 32, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = GradScaler("cpu", init_scale=2.0**8)
    setting.monitor(scaler, model)
    for step in range(200):
        factor = 100.0 if step % 3 == 0 or torch.rand(()) < 0.1 else 1.0
        with torch.autocast("cpu", dtype=torch.float16):
            loss = factor * regression(model, torch.randn(32, 16))
        scaled = scaler.scale(loss)
        optimizer.zero_grad(set_to_none=setting.pick(True, False))
        scaled.backward()
        scaler.unscale_(optimizer)
        if nn.utils.clip_grad_norm_(model.parameters(), 100.0) < 100.0:
            scaler.step(optimizer)
        scaler.update()


@training("normal")
def gradients_that_shrink_before_the_first_sample(setting: Setting) -> None:
    """Skips lower the scale now and then while they are large."""
    model = mlp(16, 32, 1)

    def loss_of(step: int) -> Tensor:
        size = 2.0 ** (step // 8) if step < 60 else 2.0**-9
        return size * regression(model, torch.randn(32, 16))

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    fit(setting, model, loss_of, setting.pick(90, 150, 300), optimizer=optimizer)


@training("normal")
def a_head_on_a_backbone_that_stays(setting: Setting) -> None:
    """The backbone has gradients, which nobody uses, or an optimizer of its own."""
    body, head = mlp(16, 32, 32), mlp(32, 1)
    model = nn.Sequential(head, body) if setting.pick(False, True) else nn.Sequential(body, head)
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-3)
    of_body = torch.optim.SGD(body.parameters(), lr=1e-3)
    scaler = GradScaler("cpu", init_scale=2.0**8)
    setting.monitor(scaler, model, every=setting.pick(100, 60, 70))
    for _ in range(150):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = regression(nn.Sequential(body, head), torch.randn(32, 16))
        model.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        for parameter in body.parameters() if setting.pick(False, True) else ():
            assert parameter.grad is not None
            parameter.grad /= 2.0**8
        if setting.pick(False, True):
            of_body.step()


@training("normal")
def a_policy_gradient(setting: Setting) -> None:
    """Its loss is a cross entropy times an advantage, which may be negative."""
    model = mlp(16, 32, 4)

    def loss_of(step: int) -> Tensor:
        outputs = model(torch.randn(32, 16)).float()
        actions = torch.distributions.Categorical(logits=outputs.detach()).sample()
        reduction = setting.pick("none", "mean")
        cost = nn.functional.cross_entropy(outputs, actions, reduction=reduction)
        return (cost * -(torch.rand(32) if reduction == "none" else torch.rand(()))).mean()

    fit(setting, model, loss_of, 120, lr=1e-3)


@training("normal")
def many_micro_batches_before_the_first_step(setting: Setting) -> None:
    model = mlp(16, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = GradScaler("cpu")
    setting.monitor(scaler, model)
    for micro in range(1, 400):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = regression(model, torch.randn(32, 16)) / 32
        scaler.scale(loss).backward()
        if micro % setting.pick(16, 32, 64) == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


@training("normal")
def a_loss_that_is_0_while_the_scale_settles(setting: Setting) -> None:
    """A margin is met from the start, except in some batches, which overflow."""
    model = mlp(16, 32, 1)

    def loss_of(step: int) -> Tensor:
        loss = regression(model, torch.randn(32, 16))
        return loss * (setting.pick(1e4, 1e5, 3e4) if step % 3 == 0 and step < 20 else 0.0)

    fit(setting, model, loss_of, 40)


@training("normal")
def an_own_scale_beside_a_clipping(setting: Setting) -> None:
    """One that clips to less than a gradient divided twice, and one with micro-batches."""
    fit_by_own_scale(setting, limit=setting.pick(1e-7, 1.0), passes=setting.pick(1, 4))


@training("normal")
def two_scalers_of_which_one_is_watched(setting: Setting) -> None:
    """In the critic's own steps the gradient of its bias is 0, and in the generator's it is not."""
    generator, critic = nn.Linear(8, 16), nn.Linear(16, 1)
    optimizers = [torch.optim.Adam(each.parameters(), 1e-3) for each in (generator, critic)]
    scalers = [GradScaler("cpu", init_scale=2.0**10) for _ in optimizers]
    setting.monitor(scalers[0], nn.ModuleList([generator, critic]), setting.pick(10, 5, 7))
    for step in range(60):
        with torch.autocast("cpu", torch.float16):
            fake = generator(torch.randn(32, 8))
            own = step % 2 and critic(fake.detach()).mean() - critic(torch.randn(32, 16)).mean()
            loss = own if step % 2 else -critic(fake).mean()
        optimizers[step % 2].zero_grad()
        scalers[step % 2].scale(loss).backward()
        scalers[step % 2].step(optimizers[step % 2])
        scalers[step % 2].update()


@training("normal")
def rare_rewards(setting: Setting) -> None:
    """A policy whose first episodes get no reward, so that their losses are exactly 0."""
    policy = mlp(8, 32, 4)

    def loss_of(step: int) -> Tensor:
        choices = policy(torch.randn(12, 8)).float().log_softmax(-1)[:, 0]
        return -(choices * float(step >= setting.pick(8, 14, 18))).sum()

    fit(setting, policy, loss_of, 120, lr=1e-2)
