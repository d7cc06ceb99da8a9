"""The lines of calls that cut parameters off from the loss."""

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gradscaler.diagnose import Monitor
from gradscaler.torch import GradScaler
from tests.support.marked_lines import lines_marked_in

pytestmark = pytest.mark.usefixtures("own_random_numbers_and_one_thread", "nothing_was_compiled")
line_with = lines_marked_in(__file__)


class Net(nn.Module):
    """A network whose first layers weigh the input of the others."""

    def __init__(self, cut):
        super().__init__()
        self.query, self.key, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.cut = cut

    def forward(self, x):
        weights = (self.query(x) * self.key(x)).tanh()
        self.shown = weights.detach()  # only shown
        return self.out((1 + self.cut(weights)) * x)


def detached(weights):
    return weights.detach()  # detached


def as_numbers(weights):
    return torch.tensor(weights.tolist())


def as_a_number(weights):
    return 0.5 * weights.mean().item()


def verdict_on(cut):
    net = Net(cut)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with Monitor(None, net, tell=[].append) as monitor:
        for _ in range(60):
            loss = cross_entropy(net(torch.randn(16, 6)), torch.randint(3, (16,)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return monitor.verdict


def test_the_call_that_cuts_layers_off_is_named_with_its_line():
    found = verdict_on(detached).findings[0]
    line = line_with("detached")
    assert (found.kind, found.line) == ("dead", line)
    assert "4 of 6 parameters, query.weight first, have no gradient" in found.cause
    assert f"detach() at {line} cuts them off" in found.cause
    assert found.action.startswith("Unless it is meant, leave that call out")


@pytest.mark.parametrize("cut", [as_numbers, as_a_number], ids=lambda f: f.__name__)
def test_a_call_that_is_not_seen_is_looked_for(cut):
    found = verdict_on(cut).findings[0]
    assert "Look behind key for what cuts the graph" in found.action
    assert found.line is None


def verdict_of_two(loss_of):
    """The verdict on a maker and a judge, each with an optimizer of its own."""
    maker, judge = nn.Linear(6, 6), nn.Linear(6, 3)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (maker, judge)]
    with Monitor(None, nn.ModuleDict({"maker": maker, "judge": judge}), tell=[].append) as monitor:
        for _ in range(60):
            for each in optimizers:
                each.zero_grad()
            loss_of(maker, judge, torch.randn(16, 6), torch.randint(3, (16,))).backward()
            for each in optimizers:
                each.step()
    return monitor.verdict.findings[0]


def judged(maker, judge, x, y):
    return cross_entropy(judge(maker(x).tanh().detach() * x), y)  # judged


def judged_twice(maker, judge, x, y):
    right = cross_entropy(judge(maker(x).detach()), y)  # right
    return right - cross_entropy(judge(maker(x).detach()), y.flip(0))  # wrong


def test_the_call_that_cuts_an_optimizer_off_is_named_with_its_line():
    found, line = verdict_of_two(judged), line_with("judged")
    assert (found.kind, found.line, found.where) == ("misuse", line, "maker")
    assert "The optimizer of maker found no gradient in its first" in found.cause
    assert f"detach() at {line} cuts off what it holds" in found.cause


def test_each_of_two_calls_that_cut_an_optimizer_off_is_named():
    found = verdict_of_two(judged_twice)
    both = [f"detach() at {line_with(each)}" for each in ("right", "wrong")]
    assert f"{' and '.join(both)} cuts off what it holds" in found.cause


def test_a_picture_that_is_detached_for_the_critic_and_used_again_is_named():
    """The optimizers take turns, and the generator's loss reads what was cut off for the other."""
    generator, critic = nn.Linear(6, 6), nn.Linear(6, 1)
    model = nn.ModuleDict({"generator": generator, "critic": critic})
    optimizers = [torch.optim.Adam(each.parameters(), 1e-3) for each in (critic, generator)]
    scaler = GradScaler("cpu")
    with Monitor(scaler, model, tell=[].append) as monitor:
        for _ in range(40):
            fake = generator(torch.randn(16, 6)).detach()  # picture
            real = torch.randn(16, 6)
            losses = (
                lambda fake=fake, real=real: critic(fake).mean() - critic(real).mean(),
                lambda fake=fake: -critic(fake).mean(),
            )
            for each, loss_of in zip(optimizers, losses, strict=True):
                each.zero_grad()
                scaler.scale(loss_of()).backward()
                scaler.step(each)
            scaler.update()
    found = monitor.verdict.findings[0]
    assert (found.where, found.line) == ("generator", line_with("picture"))


def test_an_optimizer_of_what_no_loss_reads_is_told_without_a_line():
    found = verdict_of_two(lambda maker, judge, x, y: cross_entropy(judge(x), y))
    assert "The optimizer of maker found no gradient" in found.cause
    assert "look for detach()" in found.action
    assert found.line is None
