"""Scores that are multiplied by a mask of 0 and 1 before their softmax, and look-alikes."""

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout

from gradscaler.diagnose import Monitor
from tests.support.marked_lines import lines_marked_in

line_with = lines_marked_in(__file__)
pytestmark = pytest.mark.usefixtures("own_random_numbers_and_one_thread")
SAID = "Masked scores become 0 and not -Inf before a softmax"
PLACES = torch.arange(10)


def verdict_on(weights_of, lengths=(4, 9)):
    """The verdict on a pooling whose weights are made of scores and a mask."""
    score, head = nn.Linear(6, 1), nn.Linear(6, 3)
    model = nn.ModuleList([score, head])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Monitor(None, model, tell=[].append) as monitor:
        for _ in range(22):
            x, ends = torch.randn(8, 10, 6), torch.randint(*lengths, (8, 1))
            mask = ends > PLACES
            weights = weights_of(score(x).squeeze(-1), mask)
            loss = cross_entropy(head((weights.unsqueeze(-1) * x).sum(1)), torch.arange(8) % 3)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return monitor.verdict


MISTAKES = {
    "booleans": lambda s, mask: (s * mask).softmax(-1),  # booleans
    "floats": lambda s, mask: (mask.float() * s).softmax(-1),  # floats
    "temperature": lambda s, mask: ((s * mask) / 0.5).softmax(-1),  # temperature
    "bfloat16": lambda s, mask: (s.bfloat16() * mask).float().softmax(-1),  # bfloat16
}


@pytest.mark.parametrize("name", MISTAKES)
def test_scores_that_a_mask_makes_0_are_told_with_the_line(name):
    found = verdict_on(MISTAKES[name]).findings[0]
    assert found.cause.startswith(f"{SAID}, in mul at {line_with(name)}")
    assert (found.kind, found.line) == ("misuse", line_with(name))
    assert "masked_fill()" in found.action


def masked_and_normalised(mask_again):
    """A masked softmax that masks its weights once more, and normalises them."""

    def weights_of(scores, mask):
        weights = mask_again((scores * mask).softmax(-1), mask)
        return weights / weights.sum(-1, keepdim=True)

    return weights_of


BETA = nn.Parameter(torch.ones(1))
LOOK_ALIKES = {
    "filled": lambda s, mask: s.masked_fill(~mask, -torch.inf).softmax(-1),
    "added": lambda s, mask: (s * mask + (~mask) * -1e9).softmax(-1),
    "multiplied again": masked_and_normalised(lambda w, mask: w * mask),
    "filled again": masked_and_normalised(lambda w, mask: w.masked_fill(~mask, 0.0)),
    "selected again": masked_and_normalised(lambda w, mask: torch.where(mask, w, 0.0)),
    "features of 0 and 1": lambda s, mask: (mask.float() * BETA).softmax(-1) + 0 * s,
    "after the softmax": lambda s, mask: s.softmax(-1) * mask,
    "dropped": lambda s, mask: dropout(s, 0.3).softmax(-1),
    "of whole rows": lambda s, mask: (s * (mask[:, 4:5])).softmax(-1),
    "a weight of each": lambda s, mask: (s * torch.rand(10)).softmax(-1),
    "computed": lambda s, mask: (s * (s > 0)).softmax(-1) * (s.detach() > 0),
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_other_masks_are_not(name):
    assert SAID not in str(verdict_on(LOOK_ALIKES[name]))


def test_a_mask_that_leaves_out_nothing_is_not():
    assert SAID not in str(verdict_on(MISTAKES["booleans"], lengths=(10, 11)))
