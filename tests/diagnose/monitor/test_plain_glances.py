"""Most steps of a loop without a scaler look at a part of the gradients, which shows the others."""

import sys

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from gradscaler.diagnose import Monitor

STEPS, BAD = 12, 8  # which is no sample


class Net(nn.Module):
    """Layers whose matrices have a bias beside them."""

    def __init__(self):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.last(self.inner(self.first(x).sigmoid()).tanh())


def inf_in_the_batch(net, x, is_bad):
    return net(x.masked_fill(torch.eye(8, 4, dtype=torch.bool), torch.inf) if is_bad else x).mean()


def penalty(net, x, is_bad):
    return net(x).mean() + (net.inner.weight.square().sum() * (not is_bad)).sqrt()


def exponential(net, x, is_bad):
    hidden = (net.first(x) - 100.0).relu() + 1e3 * is_bad  # the relu passes no gradient on
    rare = torch.cat([hidden[:, :1].exp(), 0 * hidden[:, 1:]], 1)
    return net.inner(rare).tanh().mean()


def later_penalty(net, x, is_bad):
    return net(x).mean() + ((net.inner.weight * 0).square().sum().sqrt() if is_bad else 0)


def second_loss(net, x, is_bad):
    return net(x).mean(), (net.inner.weight.square().sum() * (not is_bad)).sqrt()


LOSSES = inf_in_the_batch, penalty, exponential, later_penalty, second_loss


def train(loss_of, told, watch=True):
    """The weights after a training that fails at a step, and the gradients that were bad there."""
    torch.manual_seed(0)
    net, bad = Net(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    monitor = Monitor(model=net, tell=told.append) if watch else None
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        loss = loss_of(net, torch.randn(8, 4), step == BAD)
        torch.autograd.backward(loss)
        if step == BAD:
            bad += [n for n, p in net.named_parameters() if not _is_finite(p)]
        optimizer.step()
    if monitor is not None:
        monitor.close()
        assert monitor.bad_step == BAD
    return [p.detach() for p in net.parameters()], bad


def _is_finite(parameter):
    return parameter.grad is None or bool(parameter.grad.isfinite().all())


@pytest.mark.parametrize("loss_of", LOSSES)
def test_a_gradient_that_is_bad_alone_is_told_in_its_step(loss_of):
    told = []
    watched, bad = train(loss_of, told)
    assert bad
    assert not any(name.endswith("bias") for name in bad)
    assert told[-1].steps == (BAD,)
    plain, _ = train(loss_of, [], watch=False)
    for one, other in zip(watched, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_an_ordinary_step_looks_at_vectors_and_at_the_matrix_that_reads_the_batch(monkeypatch):
    looked_at, cat, total = [], torch.cat, torch.Tensor.sum
    net, x = Net(), torch.randn(8, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def see(tensor):
        looked_at.append(tuple(tensor.shape))
        return total(tensor)

    def see_all(tensors):
        looked_at.append(len(tensors))
        return cat(tensors)

    with Monitor(model=net, tell=pytest.fail):
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            loss = net(x).mean()
            if step == BAD:
                monkeypatch.setattr(torch, "cat", see_all)
                monkeypatch.setattr(torch.Tensor, "sum", see)
            loss.backward()
            monkeypatch.undo()
            optimizer.step()
    assert looked_at == [3, (9,), (4, 4)]  # three biases, and the first matrix


def test_an_ordinary_step_makes_few_calls():
    """The time that is added to a short step goes with their number."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    optimizer, x = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True), torch.randn(2, 3, 8)

    def calls():
        made = []
        sys.setprofile(lambda frame, event, arg: made.append(event == "call"))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        sys.setprofile(None)
        return sum(made)

    calls(), calls()
    plain = calls()
    with Monitor(model=model, tell=pytest.fail):
        added = [calls() - plain for _ in range(STEPS)]
    # The second is a sample. The garbage of other tests may be collected in any.
    assert min(added) < 190 < added[1]
