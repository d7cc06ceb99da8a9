"""An Inf or NaN that operations pass on which keep nothing for the backward pass."""

import math

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from gradscaler.diagnose._graph.watch import GraphWatch
from tests.support.marked_lines import lines_marked_in

line_with = lines_marked_in(__file__)

OFFSET = torch.tensor([0.5, 0.0, 0.5, 0.5])
PASSES_ON = {
    "constant": lambda z: z + 0.1,
    "tensor": lambda z: z - OFFSET,
    "mask": lambda z: z.masked_fill(torch.eye(8, 4, dtype=torch.bool), -1e9),
    "choice": lambda z: torch.where(torch.ones(8, 4, dtype=torch.bool), z, 0.0),
    "cat": lambda z: torch.cat([z, torch.ones_like(z)]),
    "stack": lambda z: torch.stack([z, z.detach(), z]),
    "view": lambda z: z.view(2, 4, 4).transpose(0, 1),
    "sum": lambda z: z.sum(1, keepdim=True) + torch.zeros(8, 2),
    "gather": lambda z: z.gather(1, torch.zeros(8, 2, dtype=torch.long)),
    "index": lambda z: z[torch.arange(8).flip(0)],
    "split": lambda z: z.split(2, 1)[0],
    "negation": lambda z: 1 - (-z),
    "roll": lambda z: z.roll(1, 0).flip(1).repeat(2, 1),
    "several": lambda z: torch.cat([z + 0.1, z]).masked_fill(torch.zeros(16, 4).bool(), 0).sum(1),
}
READS = {
    "log_softmax": lambda z: -z.flatten().log_softmax(0).mean(),
    "exp": lambda z: z.exp().mean(),
    "square": lambda z: z.square().mean(),
    "sum": lambda z: z.sum(),
}


def located(loss):
    """The place that a watch finds in the graph of a loss."""
    watch = GraphWatch(None)
    try:
        assert not loss.detach().isfinite()
        watch.see(loss)
        return watch.located
    finally:
        watch.stop()


def hidden():
    """Activations, with a row of 0."""
    torch.manual_seed(0)
    h = nn.Linear(4, 4, bias=False)(torch.rand(8, 4))
    return h * torch.tensor([1.0] * 5 + [0.0] + [1.0] * 2)[:, None]


@pytest.mark.parametrize("reads", READS.values(), ids=READS)
@pytest.mark.parametrize("passes_on", PASSES_ON.values(), ids=PASSES_ON)
def test_the_operation_that_made_a_nan_is_named_not_one_that_reads_it(passes_on, reads):
    watch, h = GraphWatch(None), hidden()
    z = h / h.norm(dim=1, keepdim=True)  # 0 by 0
    watch.see(reads(passes_on(z)))
    watch.stop()
    assert (watch.located.operation, watch.located.line) == ("div", line_with("0 by 0"))
    assert watch.located.smallest_divisor == 0


@pytest.mark.parametrize(
    ("loss_of", "operation"),
    [
        (lambda h: torch.where(h > 9, h.exp() * 1e38 * 1e38, 0 * h + 1).sum(), None),
        (lambda h: (h * 1e38 * 1e38).clamp(max=1).sub(2).sqrt().sum(), "sqrt"),
        (lambda h: torch.where(h > 0, 0 * h, (h * 1e38 * 1e38)).sub(1).log().sum(), "log"),
        (lambda h: (1 / (h + 1e-45).pow(-1)).sub(2).log().sum(), "log"),
    ],
)
def test_an_inf_that_is_left_out_is_not_blamed_for_a_nan_behind_it(loss_of, operation):
    loss = loss_of(hidden().abs() + torch.arange(2.0).repeat(4)[:, None])
    if operation is None:
        assert loss.detach().isfinite()
    else:
        assert located(loss).operation == operation


@pytest.mark.parametrize(
    ("loss_of", "operation"),
    [
        (lambda h: ((h + 100).exp() - (h + 100).exp()).sum(), "exp"),  # Inf - Inf
        (lambda h: (h * 0 * (h + 100).exp()).sum(), "exp"),  # 0 * Inf
        (lambda h: (h * 0 * torch.tensor(math.inf)).sum(), "mul"),
        (lambda h: torch.stack([h, h]).mul(torch.full((8, 4), math.nan)).sum(), "mul"),
    ],
)
def test_what_makes_nan_of_an_inf_is_not_named_before_what_made_the_inf(loss_of, operation):
    found = located(loss_of(hidden()))
    assert found.operation == operation
    assert found.kind == ("forward" if operation == "exp" else "input")


def test_a_mask_that_makes_each_row_nan_is_named_not_the_softmax():
    h, mask = hidden(), torch.ones(8, 4)
    mask[3:, 2] = 0
    found = located(((h + (1 - mask) * -math.inf).softmax(1) @ torch.ones(4, 4)).sum())
    assert (found.kind, found.operation) == ("input", "add")


def test_a_mask_that_leaves_out_one_row_is_of_the_softmax():
    mask = torch.zeros(8, 4)
    mask[3] = -math.inf
    found = located(((hidden() + mask).softmax(1) @ torch.ones(4, 4)).sum())
    assert (found.kind, found.operation) == ("forward", "softmax")


@pytest.mark.parametrize(("old", "operation"), [(math.nan, "sub"), (-1e3, "exp")])
def test_a_nan_that_an_exponential_was_given_is_not_of_the_exponential(old, operation):
    chosen = hidden().log_softmax(1)[:, 0]
    found = located((chosen - torch.tensor([old] + [0.0] * 7)).exp().sum())
    assert found.operation == operation
