"""Optimizers of the same parameters or of copies, evaluation mode that stays, and look-alikes."""

import copy

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn.functional import mse_loss

from gradscaler.diagnose import Monitor
from gradscaler.diagnose._monitor.held_parameters import HeldParameters
from gradscaler.diagnose._monitor.parameters import OptimizersParameters
from gradscaler.torch import GradScaler
from tests.support.marked_lines import lines_marked_in

line_with = lines_marked_in(__file__)
pytestmark = pytest.mark.usefixtures("own_random_numbers_and_one_thread")


class Loop:
    """A loop with or without a scaler, of 60 steps; each training below fills it."""

    def __init__(self, has_scaler, model):
        self.scaler = GradScaler(init_scale=256.0) if has_scaler else None
        self.model = model
        models = model if isinstance(model, dict) else {"": model}
        self.models = list(models.values())
        self.monitor = Monitor(self.scaler, model, tell=[].append)

    def backward(self, outputs):
        loss = outputs.float().square().mean()
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def step(self, *optimizers):
        for optimizer in optimizers:
            optimizer.step() if self.scaler is None else self.scaler.step(optimizer)

    def update(self, *optimizers):
        if self.scaler is not None:
            self.scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()

    def verdict(self):
        self.monitor.close()
        return str(self.monitor.verdict)


def sgd(*modules):
    return torch.optim.SGD([p for m in modules for p in m.parameters()], lr=1e-3)


def inputs():
    return torch.randn(8, 4)


@pytest.fixture(params=[False, True], ids=["without a scaler", "with a scaler"])
def has_scaler(request):
    return request.param


# Two optimizers.


def of_the_same_parameters(has_scaler, order):
    loop = Loop(has_scaler, nn.Linear(4, 4))
    both = sgd(loop.model), torch.optim.Adam(list(loop.model.parameters())[::order], lr=1e-3)
    for _ in range(60):
        loop.backward(loop.model(inputs()))
        loop.step(*both)
        loop.update(*both)
    return loop


def of_two_networks(has_scaler):
    loop = Loop(has_scaler, {"G": nn.Linear(4, 4), "D": nn.Linear(4, 4)})
    both = tuple(map(sgd, loop.models))
    for _ in range(60):
        loop.backward(loop.models[1](loop.models[0](inputs())))
        loop.step(*both)
        loop.update(*both)
    return loop


def of_heads_with_a_shared_encoder(has_scaler):
    encoder, *heads = (nn.Linear(4, 4) for _ in range(3))
    loop = Loop(has_scaler, nn.ModuleList([encoder, *heads]))
    both = tuple(sgd(encoder, head) for head in heads)
    for _ in range(60):
        hidden = encoder(inputs())
        loop.backward(heads[0](hidden) + heads[1](hidden))
        loop.step(*both)
        loop.update(*both)
    return loop


def that_take_turns(has_scaler):
    loop = Loop(has_scaler, nn.Linear(4, 4))
    both = sgd(loop.model), torch.optim.Adam(loop.model.parameters(), lr=1e-3)
    for _ in range(30):
        for optimizer in both:
            loop.backward(loop.model(inputs()))
            loop.step(optimizer)
            loop.update(optimizer)
    return loop


def of_two_stages(has_scaler):
    loop = Loop(has_scaler, nn.Linear(4, 4))
    for optimizer in (sgd(loop.model), torch.optim.Adam(loop.model.parameters(), lr=1e-3)):
        for _ in range(30):
            loop.backward(loop.model(inputs()))
            loop.step(optimizer)
            loop.update(optimizer)
    return loop


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another one, with its groups, such as Lookahead."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups

    def step(self, closure=None):
        return self.inner.step(closure)


def around_another(has_scaler):
    loop = Loop(has_scaler, nn.Linear(4, 4))
    optimizer = Wrapper(sgd(loop.model))
    for _ in range(60):
        loop.backward(loop.model(inputs()))
        loop.step(optimizer)
        loop.update(optimizer)
    return loop


@pytest.mark.parametrize("order", [1, -1])
def test_two_optimizers_of_the_same_parameters_are_told(has_scaler, order):
    said = of_the_same_parameters(has_scaler, order).verdict()
    assert "Two optimizers hold the same parameters" in said
    assert "Nothing wrong was seen" not in said


@pytest.mark.parametrize(
    "train",
    [
        of_two_networks,
        of_heads_with_a_shared_encoder,
        that_take_turns,
        of_two_stages,
        around_another,
    ],
)
def test_two_optimizers_that_may_be_meant_are_not_told(train, has_scaler):
    assert "Two optimizers" not in train(has_scaler).verdict()


# Parameters that nothing writes to.


class ByData(torch.optim.Optimizer):
    """One that writes to ``.data``, which PyTorch does not count."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad, alpha=-group["lr"])


class Accumulating(Wrapper):
    """One that lets the other one step in each sixteenth call."""

    calls = 0

    def step(self, closure=None):
        self.calls += 1
        if self.calls % 16 == 0:
            self.inner.step()


def around_one_of_copies(loop):
    wrapper = Wrapper(sgd(loop.model))
    wrapper.inner = copy.deepcopy(wrapper.inner)  # as load_state_dict() does, of all of a state
    return wrapper


def at_a_rate_of_0(loop):
    return torch.optim.Adam(loop.model.parameters(), lr=0.0)


def whose_updates_are_lost(loop):
    return torch.optim.SGD(loop.model.parameters(), lr=1e-12)


def by_data(loop):
    return ByData(loop.model.parameters(), {"lr": 1e-3})


def by_data_in_16_bits(loop):
    return ByData(loop.model.bfloat16().parameters(), {"lr": 1e-5})


def that_accumulates(loop):
    return Accumulating(sgd(loop.model))


def of_a_bias_alone(loop):
    loop.model.weight.requires_grad_(False)
    return torch.optim.SGD(loop.model.parameters(), lr=1e-3)


def trained_by(make, has_scaler):
    loop = Loop(has_scaler, nn.Linear(4, 4))
    optimizer = make(loop)
    for _ in range(60):
        loop.backward(loop.model(inputs().to(loop.model.weight.dtype)))
        loop.step(optimizer)
        loop.update(optimizer)
    return loop.verdict()


def test_an_optimizer_that_steps_copies_is_told(has_scaler):
    said = trained_by(around_one_of_copies, has_scaler)
    assert "None of the 2 parameters with a gradient that the optimizer holds has moved" in said


@pytest.mark.parametrize(
    "make",
    [
        at_a_rate_of_0,
        whose_updates_are_lost,
        by_data,
        by_data_in_16_bits,
        that_accumulates,
        of_a_bias_alone,
        lambda loop: Wrapper(sgd(loop.model)),
    ],
)
def test_an_optimizer_that_writes_anything_is_not_told_so(make, has_scaler):
    assert "None of the" not in trained_by(make, has_scaler)


# The mode.


def with_dropout():
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 4))


def with_batch_norm():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


def evaluate(model):
    model.eval()
    with torch.no_grad():
        mse_loss(model(inputs()), torch.zeros(8, 4))


def train_with(has_scaler, model, before_step):
    loop = Loop(has_scaler, model)
    optimizer = sgd(model)
    for step in range(60):
        before_step(step, model)
        loop.backward(model(inputs()))
        loop.step(optimizer)
        loop.update(optimizer)
    return loop.verdict()


def forgets(step, model):
    if step == 20:
        evaluate(model)


def puts_back(step, model):
    if step % 20 == 0:
        evaluate(model)
        model.train()


def evaluates_from_the_start(step, model):
    model.eval()


def keeps_statistics(step, model):
    """As a fine-tuning that freezes batch normalization after a while."""
    if step > 20:
        model[1].eval()


def freezes_a_part(step, model):
    model[0].eval()
    model[0].requires_grad_(False)


@pytest.mark.parametrize("model", [with_dropout, with_batch_norm])
def test_a_model_that_stays_in_evaluation_mode_is_told(model, has_scaler):
    said = train_with(has_scaler, model(), forgets)
    assert "In 40 of 60 steps, the model was in evaluation mode" in said
    assert "Call model.train() after each validation" in said


@pytest.mark.parametrize(
    ("model", "before_step"),
    [
        (with_batch_norm, puts_back),
        (with_batch_norm, evaluates_from_the_start),
        (with_batch_norm, keeps_statistics),
        (with_dropout, freezes_a_part),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.LayerNorm(4)), forgets),
        (lambda: nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False)), forgets),
    ],
)
def test_an_evaluation_mode_that_may_be_meant_is_not_told(model, before_step, has_scaler):
    assert "evaluation mode" not in train_with(has_scaler, model(), before_step)


def test_a_discriminator_that_evaluates_in_the_generator_s_step_alone_is_not_told(has_scaler):
    generator, discriminator = with_batch_norm(), with_dropout()
    loop = Loop(has_scaler, {"G": generator, "D": discriminator})
    of_g, of_d = sgd(generator), sgd(discriminator)
    for _ in range(40):
        discriminator.train()
        loop.backward(discriminator(generator(inputs()).detach()))
        loop.step(of_d)
        loop.update(of_d)
        discriminator.eval()
        loop.backward(discriminator(generator(inputs())))
        loop.step(of_g)
        loop.update(of_g, of_d)
    assert "evaluation mode" not in loop.verdict()


def of_another_model(net):
    return net(inputs())


def of_a_tensor_made_anew(net):
    return net(inputs()).detach().requires_grad_()


def of_zeroed_gradients(net):
    return net(inputs())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (of_another_model, "as the loss depends on other parameters than it holds"),
        (of_a_tensor_made_anew, "its graph begins at a tensor that was made anew"),
        (of_zeroed_gradients, "as they are gone between the backward pass and the step"),
    ],
)
def test_why_no_step_finds_a_gradient_is_told(make, said):
    net = nn.Linear(4, 4)
    other = nn.Linear(4, 4) if make is of_another_model else net
    optimizer = sgd(net)
    with Monitor(model=net, tell=lambda _: None) as monitor:
        for _ in range(20):
            make(other).square().mean().backward()
            if make is of_zeroed_gradients:
                optimizer.zero_grad()
            optimizer.step()
    assert said in monitor.verdict.text


@pytest.mark.parametrize(
    ("is_parameter", "found"), [(False, "others"), (True, "parameters")], ids=["latent", "layer"]
)
def test_tensors_that_are_no_parameters_may_be_cut_off_from_the_loss(is_parameter, found):
    net, latent = nn.Linear(4, 4), torch.randn(8, 4, requires_grad=True)
    held = HeldParameters(net, OptimizersParameters(net))
    held.see_leaves(net(torch.from_numpy(latent.detach().numpy())).square().mean())
    given = [nn.Parameter(latent.detach())] if is_parameter else [latent]
    assert held.what_else(torch.optim.SGD(given, lr=0.1)) == found


@pytest.mark.parametrize("is_zeroed", [True, False], ids=["zeroed", "kept"])
def test_an_optimizer_that_steps_every_second_time(is_zeroed):
    """What a pass adds to zeroed gradients, which wait for a step, was used by none."""
    net, other = nn.Linear(4, 4), nn.Linear(4, 4)
    often, seldom = sgd(net), sgd(other)
    with Monitor(model=nn.ModuleList([net, other]), tell=lambda _: None) as monitor:
        for n in range(60):
            other(net(inputs())).square().mean().backward()
            often.step()
            often.zero_grad()
            if n % 2:
                seldom.step()
                if is_zeroed:
                    seldom.zero_grad()
    assert ("that the step before had used" in monitor.verdict.text) == (not is_zeroed)


# Gradients that are set to 0 before the step.


@pytest.mark.parametrize("max_norm", [0.25, 1e6], ids=["clips", "does not clip"])
def test_a_clip_whose_norm_overflows_sets_all_gradients_to_0(max_norm):
    """The sum of the squares of float16 gradients is Inf, though none of them is."""
    model = nn.Linear(4, 4).half()
    optimizer, told = torch.optim.SGD(model.parameters(), lr=1e-6), []
    with Monitor(model=model, tell=told.append):
        for _ in range(24):
            optimizer.zero_grad()
            (model(inputs().half()).float() * 16).square().sum().backward()
            gradients = [p.grad for p in model.parameters()]
            norm = torch.stack([(g**2).sum() for g in gradients]).sum().sqrt()
            if (factor := max_norm / norm) < 1 and max_norm < 1:
                for each in gradients:
                    each.mul_(factor)
            optimizer.step()  # with gradients of 0
    found = [each for each in told if "all of them were 0 when the optimizer stepped" in each.text]
    assert len(found) == (max_norm < 1)
    assert not found or found[0].line == line_with("with gradients of 0")
