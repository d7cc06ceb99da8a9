"""Training loops of PyTorch without a scaler, as users write them.

Each yields after each step of the user's own count. In the steps that ``fails`` holds, the gradient
is NaN by the root of 0, though the loss is finite; that line runs in every step.
"""

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

LOOPS = {}


def loop(function):
    LOOPS[function.__name__] = function
    return function


def net(width=1):
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, width))


@dataclass
class Training:
    """A training: its models, its optimizers, and its steps."""

    name: str
    dtype: torch.dtype = torch.float32
    fails: tuple = ()
    step: int = 0
    optimizers: list = field(default_factory=list)

    def __post_init__(self):
        torch.manual_seed(0)
        is_gan = self.name == "adversarial"
        self.models = {"G": net(4), "D": net()} if is_gan else {"net": net()}

    @property
    def net(self):
        return self.models["net"]

    def batch(self):
        return torch.randn(8, 4)

    def loss(self, outputs):
        """A loss whose gradient is NaN in the steps that fail; the loss itself is finite."""
        error = outputs.float() - 1
        if self.step in self.fails:
            error = error * 0
        return error.square().sum(1).sqrt().mean() + 0.1 * outputs.float().mean()  # the root

    def forward(self, model=None):
        with self.autocast():
            return self.loss((model or self.net)(self.batch()))

    def autocast(self):
        return torch.autocast("cpu", self.dtype, enabled=self.dtype != torch.float32)

    def adam(self, model=None):
        return torch.optim.Adam((model or self.net).parameters(), lr=1e-3)

    def states(self):
        """All weights, states of optimizers, and the state of the random numbers."""
        weights = [model.state_dict() for model in self.models.values()]
        return weights, [each.state_dict() for each in self.optimizers], torch.get_rng_state()

    def run(self, steps):
        """Take steps."""
        for _ in LOOPS[self.name](self, steps):
            pass


@loop
def usual(training, steps):
    training.optimizers = (optimizer,) = [training.adam()]
    for step in range(1, steps + 1):
        training.step = step
        optimizer.zero_grad()
        training.forward().backward()
        optimizer.step()
        yield step


@loop
def clipped_and_zeroed_after(training, steps):
    training.optimizers = (optimizer,) = [training.adam()]
    for step in range(1, steps + 1):
        training.step = step
        training.forward().backward()
        nn.utils.clip_grad_norm_(training.net.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        yield step


@loop
def accumulating(training, steps):
    training.optimizers = (optimizer,) = [training.adam()]
    for step in range(1, steps + 1):
        training.step = step
        for _ in range(3):
            (training.forward() / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield step


@loop
def with_a_closure(training, steps):
    kinds = torch.optim.LBFGS(training.net.parameters(), lr=0.01, max_iter=3)
    training.optimizers = (optimizer,) = [kinds]

    def closure():
        optimizer.zero_grad()
        loss = training.forward()
        loss.backward()
        return loss

    for step in range(1, steps + 1):
        training.step = step
        optimizer.step(closure)
        yield step


@loop
def two_optimizers_of_one_loss(training, steps):
    first, last = training.net[0], training.net[2]
    training.optimizers = [training.adam(first), torch.optim.SGD(last.parameters(), lr=1e-3)]
    for step in range(1, steps + 1):
        training.step = step
        for optimizer in training.optimizers:
            optimizer.zero_grad()
        training.forward().backward()
        for optimizer in training.optimizers:
            optimizer.step()
        yield step


@loop
def adversarial(training, steps):
    g, d = training.models.values()
    training.optimizers = [training.adam(g), training.adam(d)]
    for step in range(1, steps + 1):
        training.step = step
        with training.autocast():
            fake = g(training.batch())
            loss = training.loss(d(fake.detach())) - d(training.batch()).float().mean()
        training.optimizers[1].zero_grad()
        loss.backward()
        training.optimizers[1].step()
        with training.autocast():
            loss = d(fake).float().mean().square()
        training.optimizers[0].zero_grad()
        loss.backward()
        training.optimizers[0].step()
        yield step


@loop
def penalised(training, steps):
    training.optimizers = (optimizer,) = [training.adam()]
    for step in range(1, steps + 1):
        training.step = step
        optimizer.zero_grad()
        loss = training.forward()
        grads = torch.autograd.grad(loss, training.net.parameters(), create_graph=True)
        (loss + 0.01 * sum(each.square().sum() for each in grads)).backward()
        optimizer.step()
        yield step


@loop
def gradients_by_hand(training, steps):
    training.optimizers = (optimizer,) = [training.adam()]
    for step in range(1, steps + 1):
        training.step = step
        grads = torch.autograd.grad(training.forward(), training.net.parameters())
        for parameter, grad in zip(training.net.parameters(), grads, strict=True):
            parameter.grad = grad
        optimizer.step()
        yield step


@loop
def checkpointed(training, steps):
    training.optimizers = (optimizer,) = [training.adam()]
    first, *rest = training.net
    for step in range(1, steps + 1):
        training.step = step
        optimizer.zero_grad()
        with training.autocast():
            inner = checkpoint(nn.Sequential(*rest), first(training.batch()), use_reentrant=True)
            loss = training.loss(inner)
        loss.backward()
        optimizer.step()
        yield step


@loop
def compiled(training, steps):
    training.optimizers = (optimizer,) = [training.adam()]
    fast = torch.compile(training.net, backend="aot_eager")
    for step in range(1, steps + 1):
        training.step = step
        optimizer.zero_grad()
        training.forward(fast).backward()
        optimizer.step()
        yield step


@loop
def stepping_in_the_backward_pass(training, steps):
    training.optimizers = [torch.optim.SGD([p], lr=1e-3) for p in training.net.parameters()]
    of = dict(zip(training.net.parameters(), training.optimizers, strict=True))

    def hook(parameter):
        of[parameter].step()
        of[parameter].zero_grad()

    for parameter in training.net.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    for step in range(1, steps + 1):
        training.step = step
        training.forward().backward()
        yield step


@loop
def sharpness_aware(training, steps):
    training.optimizers = (optimizer,) = [training.adam()]
    for step in range(1, steps + 1):
        training.step = step
        optimizer.zero_grad()
        training.forward().backward()
        ascents = [0.01 * parameter.grad for parameter in training.net.parameters()]
        with torch.no_grad():
            torch._foreach_add_([*training.net.parameters()], ascents)
        optimizer.zero_grad()
        training.forward().backward()
        with torch.no_grad():
            torch._foreach_sub_([*training.net.parameters()], ascents)
        optimizer.step()
        yield step
