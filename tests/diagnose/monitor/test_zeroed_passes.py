"""Micro-batches whose gradients are zeroed before the next one, and look-alikes."""

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gradscaler.diagnose import Monitor
from gradscaler.torch import GradScaler
from tests.support.marked_lines import lines_marked_in

line_with = lines_marked_in(__file__)
pytestmark = pytest.mark.usefixtures("own_random_numbers_and_one_thread")
STEPS, PASSES = 22, 4  # samples at steps 2, 5, 10 and 20
SAID = "backward passes of a step lost their gradients"


class Net(nn.Sequential):
    """A network of tokens, and its optimizer, with or without a scaler."""

    def __init__(self, scaler=None):
        super().__init__(nn.Embedding(30, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 20))
        self.optimizer = torch.optim.SGD(self.parameters(), lr=1e-2)
        self.scaler = scaler

    def losses(self, rows=8, reduction="mean"):
        tokens, classes = torch.randint(30, (rows,)), torch.randint(20, (rows,))
        return cross_entropy(self(tokens), classes, reduction=reduction)

    def backward(self, loss, **how):
        (loss if self.scaler is None else self.scaler.scale(loss)).backward(**how)

    def gradients(self):
        return [p.grad.clone() for p in self.parameters()]

    def give(self, gradients):
        for parameter, gradient in zip(self.parameters(), gradients, strict=True):
            parameter.grad = gradient

    def step(self):
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()


def verdict_on(steps, has_scaler, number=STEPS):
    net = Net(GradScaler(init_scale=256.0) if has_scaler else None)
    with Monitor(net.scaler, net, tell=[].append) as monitor:
        for step in range(number):
            steps(net, step)
    return str(monitor.verdict)


# Mistakes.


def by_the_model(net, _):
    for _ in range(PASSES):
        net.zero_grad()  # once too often
        net.backward(net.losses() / PASSES)
    net.step()


def in_place_after_the_loss(net, _):
    for _ in range(PASSES):
        loss = net.losses()
        net.optimizer.zero_grad(set_to_none=False)
        net.backward(loss)
    net.step()


def by_hand_before_a_clipping(net, _):
    for _ in range(PASSES):
        for parameter in net.parameters():
            parameter.grad = None
        net.backward(net.losses() / PASSES)
    if net.scaler is not None:
        net.scaler.unscale_(net.optimizer)
    nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
    net.step()


def at_the_end_but_for_the_last(net, _):
    for number in range(PASSES):
        net.backward(net.losses())
        if number == PASSES - 1:
            net.step()
        net.optimizer.zero_grad()


@pytest.mark.parametrize("has_scaler", [False, True], ids=["without a scaler", "with a scaler"])
@pytest.mark.parametrize(
    "steps",
    [by_the_model, in_place_after_the_loss, by_hand_before_a_clipping, at_the_end_but_for_the_last],
)
def test_gradients_of_micro_batches_that_are_zeroed_are_told(steps, has_scaler):
    said = verdict_on(steps, has_scaler)
    assert f"3 of 4 {SAID}" in said
    assert "zero gradients once a step" in said


def test_the_line_that_zeroes_is_named():
    said = verdict_on(by_the_model, has_scaler=False)
    assert f"before the next one at {line_with('once too often')}, so" in said


# Look-alikes.


def that_add_up(net, _):
    net.zero_grad()
    for _ in range(PASSES):
        net.backward(net.losses() / PASSES)
    net.step()


def of_two(net, _):
    for _ in range(2):
        net.zero_grad()
        net.backward(net.losses())
    net.step()


def zeroed_now_and_then(net, step):
    """Squares of gradients tell how much a weight matters, after each of several tasks."""
    if step in (4, 9):
        by_the_model(net, step)
    else:
        that_add_up(net, step)


def added_up_by_hand(net, _):
    sums = [torch.zeros_like(p) for p in net.parameters()]
    for _ in range(PASSES):
        net.zero_grad()
        net.backward(net.losses())
        sums = [a + b for a, b in zip(sums, net.gradients(), strict=True)]
    net.give(sums)
    net.step()


def added_up_in_place(net, _):
    sums = [torch.zeros_like(p) for p in net.parameters()]
    for _ in range(PASSES):
        net.zero_grad()
        net.backward(net.losses())
        for a, b in zip(sums, net.gradients(), strict=True):
            a += b
    for parameter, total in zip(net.parameters(), sums, strict=True):
        parameter.grad.copy_(total)
    net.step()


def added_up_by_hooks(net, _):
    sums = [torch.zeros_like(p) for p in net.parameters()]
    both = zip(net.parameters(), sums, strict=True)
    handles = [p.register_hook(total.add_) for p, total in both]
    by_the_model(net, _)
    for handle in handles:
        handle.remove()


def of_single_rows(net, _):
    """The norms of single rows' gradients choose the rows of the batch."""
    for _ in range(PASSES):
        net.zero_grad()
        net.backward(net.losses(rows=1))
    net.zero_grad()
    net.backward(net.losses(rows=4))
    net.step()


def of_terms(net, _):
    """The gradients' norms weight the terms of a sum."""
    terms = [net.losses() for _ in range(PASSES)]
    for term in terms:
        net.zero_grad()
        net.backward(term, retain_graph=True)
    net.zero_grad()
    net.backward(sum(terms))
    net.step()


def of_adversarial_inputs(net, _):
    embedding, *rest = net
    tokens, classes = torch.randint(30, (8,)), torch.randint(20, (8,))
    change = torch.zeros(8, 16)
    for _ in range(PASSES):
        change.requires_grad_()
        net.zero_grad()
        net.backward(cross_entropy(nn.Sequential(*rest)(embedding(tokens) + change), classes))
        change = change.detach() + 0.01 * change.grad.sign()
    net.zero_grad()
    net.backward(cross_entropy(nn.Sequential(*rest)(embedding(tokens) + change), classes))
    net.step()


def of_adversarial_embeddings(net, _):
    """As often written: the embedding alone is moved, by ``data``, and moved back."""
    weight = net[0].weight
    before, tokens, classes = weight.data.clone(), torch.randint(30, (8,)), torch.randint(20, (8,))
    for _ in range(PASSES):
        net.zero_grad()
        net.backward(cross_entropy(net(tokens), classes))
        weight.data.add_(1e-2 * weight.grad / weight.grad.norm())
    weight.data.copy_(before)
    net.step()


def of_sharpness(net, _):
    before = [p.detach().clone() for p in net.parameters()]
    for number in range(PASSES):
        net.zero_grad()
        net.backward(net.losses())
        if number < PASSES - 1:
            with torch.no_grad():
                for parameter, gradient in zip(net.parameters(), net.gradients(), strict=True):
                    parameter.add_(gradient, alpha=1e-3)
    with torch.no_grad():
        for parameter, value in zip(net.parameters(), before, strict=True):
            parameter.copy_(value)
    net.step()


def of_projected_gradients(net, _):
    """As for the gradients of tasks that contradict each other."""
    of_tasks = []
    for _ in range(PASSES):
        net.zero_grad()
        net.backward(net.losses())
        of_tasks.append(net.gradients())
    net.give([a - 0.1 * b for a, b in zip(*of_tasks[-2:], strict=True)])
    net.step()


def that_are_left_out_by_their_norm(net, step):
    for _ in range(PASSES + step % 7):
        net.zero_grad()
        net.backward(net.losses())
    net.step()


def in_which_a_part_adds_up(net, _):
    net.zero_grad()
    for _ in range(PASSES):
        net[0].zero_grad()
        net.backward(net.losses())
    net.step()


@pytest.mark.parametrize("has_scaler", [False, True], ids=["without a scaler", "with a scaler"])
@pytest.mark.parametrize(
    "steps",
    [
        that_add_up,
        of_two,
        zeroed_now_and_then,
        added_up_by_hand,
        added_up_in_place,
        added_up_by_hooks,
        of_single_rows,
        of_terms,
        of_adversarial_inputs,
        of_adversarial_embeddings,
        of_sharpness,
        of_projected_gradients,
        that_are_left_out_by_their_norm,
        in_which_a_part_adds_up,
    ],
)
def test_passes_that_may_be_meant_are_not_told(steps, has_scaler):
    assert SAID not in verdict_on(steps, has_scaler)


def test_the_evaluations_of_one_step_are_not_told():
    def steps(net, _):
        def closure():
            optimizer.zero_grad()
            loss = net.losses()
            loss.backward()
            return loss

        optimizer.step(closure)

    net = Net()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=1e-3, max_iter=PASSES)
    with Monitor(None, net, tell=[].append) as monitor:
        for step in range(STEPS):
            steps(net, step)
    assert SAID not in str(monitor.verdict)


def two_networks(balances):
    """A generator, and a discriminator whose gradients its passes fill."""
    nets = nn.ModuleDict({"G": nn.Linear(16, 16), "D": nn.Linear(16, 16)})
    of = {name: torch.optim.SGD(net.parameters(), lr=1e-3) for name, net in nets.items()}
    with Monitor(None, nets, tell=[].append) as monitor:
        for _ in range(STEPS):
            for _ in range(PASSES):
                nets.zero_grad()
                made = nets["G"](torch.randn(8, 16))
                (
                    nets["D"](torch.randn(8, 16)) - nets["D"](made.detach())
                ).square().mean().backward()
                if not balances:
                    of["D"].step()
            nets.zero_grad()
            nets["D"](made).square().mean().backward()
            of["G"].step()
            if balances:
                of["D"].zero_grad()
                (
                    nets["D"](torch.randn(8, 16)) - nets["D"](made.detach())
                ).square().mean().backward()
                of["D"].step()
    return str(monitor.verdict)


@pytest.mark.parametrize("balances", [False, True])
def test_networks_that_fill_each_other_s_gradients_are_not_told(balances):
    assert SAID not in two_networks(balances)


def test_a_pass_that_is_looked_at_changes_no_number():
    ends = []
    for is_watched in (False, True):
        torch.manual_seed(0)
        net = Net()
        monitor = Monitor(None, net, tell=[].append) if is_watched else None
        for step in range(STEPS):
            by_the_model(net, step)
        if monitor is not None:
            monitor.close()
        ends.append([p.detach().clone() for p in net.parameters()])
    assert all(map(torch.equal, *ends))
