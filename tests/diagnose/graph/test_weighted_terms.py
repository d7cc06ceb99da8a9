"""Whether a loss weighs what is trained by numbers without a gradient, such as rewards."""

import pytest

pytest.importorskip("torch")

import torch
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    mse_loss,
    softplus,
)

from gradscaler.diagnose._graph.weighted_terms import weighted_in

ACTIONS = torch.arange(8) % 3
REWARDS = torch.arange(8.0)
ADVANTAGES = REWARDS - 3.5
SIGNS = ADVANTAGES.sign()


def chosen(logits):
    return logits.log_softmax(-1).gather(1, ACTIONS[:, None])[:, 0]


def clipped(logits):
    ratio = (chosen(logits) - chosen(logits).detach()).exp()
    return torch.min(ratio * ADVANTAGES, ratio.clamp(0.8, 1.2) * ADVANTAGES)


def normal(logits):
    return torch.distributions.Normal(logits[:, 0], 1.0).log_prob(REWARDS)


WEIGHTED = {
    "REINFORCE": lambda out: -(chosen(out) * REWARDS).mean(),
    "a distribution": lambda out: (
        -torch.distributions.Categorical(logits=out).log_prob(ACTIONS) * REWARDS
    ).sum(),
    "a long episode": lambda out: (
        -(torch.stack([*chosen(out)] * 9) * REWARDS.repeat_interleave(9)).sum()
    ),
    "one action": lambda out: -(chosen(out)[:1] * REWARDS[1:2]).mean(),
    "numbers": lambda out: torch.stack([-p * 0.9**n for n, p in enumerate(chosen(out))]).sum(),
    "a cross entropy": lambda out: (cross_entropy(out, ACTIONS, reduction="none") * REWARDS).mean(),
    "PPO": lambda out: -clipped(out).mean(),
    "an actor and a critic": lambda out: (
        -(chosen(out) * ADVANTAGES).mean() + 0.5 * mse_loss(out[:, 0], REWARDS)
    ),
    "a normal policy": lambda out: -(normal(out) * ADVANTAGES).mean() - 0.01 * out.mean(),
}
OTHERS = {
    "a cross entropy": lambda out: cross_entropy(out, ACTIONS),
    "a part of one": lambda out: 0.5 * cross_entropy(out, ACTIONS) + 0.1 * mse_loss(out, out * 0),
    "soft targets": lambda out: -(out.detach().softmax(-1) * out.log_softmax(-1)).sum(-1).mean(),
    "a micro-batch": lambda out: cross_entropy(out, ACTIONS) / 4,
    "weights of rows": lambda out: ((out[:, 0] - REWARDS).square() * REWARDS).mean(),
    "a hinge": lambda out: (1 - SIGNS * out[:, 0]).relu().mean(),
    "a logistic loss": lambda out: softplus(-SIGNS * out[:, 0]).mean(),
    "an entropy": lambda out: -(out.softmax(-1) * out.log_softmax(-1)).sum(),
    "a rotation": lambda out: mse_loss((out * ADVANTAGES[:, None]).tanh(), out.detach()),
    "two classes": lambda out: binary_cross_entropy_with_logits(out[:, 0], SIGNS.clamp(min=0)),
    "a mean of few": lambda out: torch.stack([cross_entropy(out, ACTIONS), out.mean()]).sum() * 2,
}


@pytest.mark.parametrize("name", WEIGHTED)
def test_rewards_and_advantages_in_a_loss_are_found(name):
    loss = WEIGHTED[name](torch.randn(8, 3, requires_grad=True))
    assert weighted_in(loss.grad_fn) is not None


@pytest.mark.parametrize("name", OTHERS)
def test_another_loss_weighs_nothing_so(name):
    assert weighted_in(OTHERS[name](torch.randn(8, 3, requires_grad=True)).grad_fn) is None


def test_odd_factors_weigh_nothing():
    given = torch.randn(8, 3, requires_grad=True)
    assert (
        weighted_in((given.to(torch.complex64) * 1j * ADVANTAGES[:, None]).abs().sum().grad_fn)
        is None
    )
    sparse = torch.eye(3).to_sparse()
    assert weighted_in((torch.sparse.mm(sparse, given.T) * 2).sum().grad_fn) is None
    assert weighted_in((given.T[:, :3].to_sparse() * sparse).sum().grad_fn) is None
