"""Units of a layer that have the same weights and the same gradients, and those that only seem to.

Each look-alike has equal weights, which its first step tells apart, or which are as they should be.
"""

import pytest
import torch
from torch import nn

from gradscaler.diagnose._monitor.held_parameters import alike_in

INPUTS = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
TARGETS = INPUTS[:, :4].sin()
ROW = INPUTS[:1].repeat(4, 1)
SAME = torch.full((1, 4), 0.3)


def alike(weight, after=None, inputs=INPUTS, targets=TARGETS[:, :1], turned=False):
    """The names of the matrices that are alike after a backward pass through two layers."""
    weight, after = (None if each is None else nn.Parameter(each) for each in (weight, after))
    outputs = torch.tanh(inputs @ weight.T)
    outputs = outputs if after is None else outputs @ after.T
    nn.functional.mse_loss(outputs, targets).backward()
    named = {"weight": weight} | ({} if after is None else {"after": after})
    for name, own in named.items():
        own.grad *= 1 + 1e-6 * torch.rand(own.shape)  # by rounding
        if turned:
            named[name] = nn.Parameter(own.detach().T.contiguous())
            named[name].grad = own.grad.T.contiguous()
    return alike_in(named)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("weight", [torch.full((4, 8), 0.1), ROW])
def test_units_that_are_one_are_alike(weight, turned):
    assert alike(weight, SAME, turned=turned) == ("weight",)


def test_units_are_one_whatever_a_softmax_leaves_out_of_the_next_weights():
    """What is added to all scores of a row is no part of them, so the next weights may differ."""
    after = torch.tensor([[0.3, 0.1, 0.2, 0.4]]) + torch.tensor([[0.5], [-0.2], [0.1]])
    weight, after = nn.Parameter(ROW), nn.Parameter(after)
    scores = torch.tanh(INPUTS @ weight.T) @ after.T
    nn.functional.cross_entropy(scores, torch.arange(16) % 3).backward()
    assert alike_in({"weight": weight, "after": after}) == ("weight",)


@pytest.mark.parametrize(
    "given",
    [
        {"weight": torch.zeros(4, 8), "targets": TARGETS},  # a head that starts at zero
        {"weight": torch.ones(4, 8), "targets": TARGETS},  # with a target for each unit
        {"weight": ROW, "targets": TARGETS[:, :1].repeat(1, 4)},  # with the same one
        {"weight": ROW, "after": torch.tensor([[0.3, 0.1, 0.2, 0.4]])},
        {"weight": torch.full((2, 8), 0.1), "after": SAME[:, :2]},  # two heads of a critic
        {"weight": INPUTS[:4], "after": SAME},
        {"weight": INPUTS[:4, :1].repeat(1, 8), "inputs": INPUTS[:, :1].repeat(1, 8)},  # of grey
    ],
    ids=["zero", "one", "equal targets", "other weights", "two", "random", "equal inputs"],
)
def test_units_that_a_step_tells_apart_or_that_may_be_equal_are_not(given):
    given = {"targets": TARGETS[:, :1], **given}
    given["targets"] = given["targets"].expand(16, 4) if "after" not in given else given["targets"]
    assert alike(**given) == ()


def test_a_layer_without_a_gradient_is_not_looked_at():
    sparse = nn.Embedding(4, 8, sparse=True)
    nn.init.ones_(sparse.weight)
    sparse(torch.tensor([0, 1, 2, 3])).sum().backward()
    still = nn.Parameter(torch.ones(4, 8))
    still.grad = torch.zeros(4, 8)
    complex_ = nn.Parameter(torch.ones(4, 8, dtype=torch.complex64))
    complex_.grad = torch.ones_like(complex_)
    last = nn.Parameter(torch.ones(8, 4))
    last.grad = torch.ones(8, 4)
    for each in (sparse.weight, still, complex_, nn.Parameter(torch.ones(4, 8))):
        assert alike_in({"a": each, "b": last}) == ()
