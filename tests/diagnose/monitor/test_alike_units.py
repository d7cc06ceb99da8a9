"""Units of a layer that have the same weights and the same gradients, and those that only seem to.

Each look-alike begins with equal weights, which its first step tells apart.
"""

import pytest
import torch
from torch import nn

from gradscaler.diagnose._monitor.held_parameters import _is_alike


def trained(weight, inputs, targets, after=None):
    """A weight of a shape (out, in) with its gradient; ``after`` is a weight behind it."""
    weight = nn.Parameter(weight)
    outputs = torch.tanh(inputs @ weight.T)
    outputs = outputs if after is None else outputs @ after.T
    nn.functional.mse_loss(outputs, targets).backward()
    return weight


INPUTS = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
TARGETS = INPUTS[:, :4].sin()


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("weight", [torch.full((4, 8), 0.1), INPUTS[:1].repeat(4, 1)])
def test_units_that_are_one_are_alike(weight, turned):
    found = trained(weight, INPUTS, TARGETS[:, :1], torch.full((1, 4), 0.3))
    if turned:
        gradient, found = found.grad.T.contiguous(), nn.Parameter(found.detach().T.contiguous())
        found.grad = gradient
    assert _is_alike(found)
    found.grad = found.grad * (1 + 1e-6 * torch.rand(found.shape))  # by rounding
    assert _is_alike(found)


@pytest.mark.parametrize(
    ("weight", "targets", "after"),
    [
        (torch.zeros(4, 8), TARGETS, None),  # a head that starts at zero
        (torch.ones(4, 8), TARGETS, None),  # with a target for each unit
        (torch.full((4, 8), 0.1), TARGETS[:, :1], torch.tensor([[0.3, 0.1, 0.2, 0.4]])),
        (torch.full((2, 8), 0.1), TARGETS[:, :1], torch.full((1, 2), 0.3)),  # two heads of a critic
        (INPUTS[:4], TARGETS[:, :1], torch.full((1, 4), 0.3)),
    ],
)
def test_units_that_a_step_tells_apart_are_not(weight, targets, after):
    assert not _is_alike(trained(weight, INPUTS, targets, after))


def test_a_layer_without_a_gradient_is_not_looked_at():
    sparse = nn.Embedding(4, 8, sparse=True)
    nn.init.ones_(sparse.weight)
    sparse(torch.tensor([0, 1, 2, 3])).sum().backward()
    no_matrix = trained(torch.ones(1, 8), INPUTS, TARGETS[:, :1])
    no_matrix.grad.zero_()
    complex_ = nn.Parameter(torch.ones(4, 8, dtype=torch.complex64))
    complex_.grad = torch.ones_like(complex_)
    for each in (sparse.weight, no_matrix, complex_, nn.Parameter(torch.ones(4, 8))):
        assert not _is_alike(each)
