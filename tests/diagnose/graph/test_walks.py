"""Walks through graphs, which are remembered, and what the gradients of vectors show of others'."""

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from gradscaler.diagnose._graph.nodes import in_order
from gradscaler.diagnose._graph.walks import Walks

ENCODER = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


def names(nodes):
    return sorted(node.name().removesuffix("Backward0") for node in nodes)


def test_a_graph_that_comes_again_has_the_same_suspects():
    walks, found = Walks(), []
    for _ in range(3):
        loss = ENCODER(torch.randn(2, 3, 8)).softmax(-1).log().sqrt().mean()
        found.append(walks.suspects(loss.grad_fn))
        assert set(found[-1]) <= set(in_order(loss))
    first, second, third = map(names, found)
    assert first == second == third
    assert {"Softmax", "Log", "Sqrt"} <= set(first)


def test_a_branch_that_is_taken_later_is_walked_through():
    walks, x = Walks(), torch.ones(3, requires_grad=True)
    branches = [lambda: x * 2, lambda: x * 2, lambda: (x * 2).log(), lambda: (x * 2).sqrt()]
    found = [names(walks.suspects(branch().sum().grad_fn)) for branch in branches * 2]
    assert found == [[], [], ["Log"], ["Sqrt"]] * 2


def test_a_sum_of_fewer_than_before_is_walked_through():
    walks, x = Walks(), torch.ones(3, requires_grad=True)
    for number in (3, 1, 2):
        loss = torch.cat([x.log() for _ in range(number)]).sum()
        assert names(walks.suspects(loss.grad_fn)) == ["Log"] * number


@pytest.mark.parametrize("exponent", [0.5, 1, 1.5, 2, 3.0])
def test_a_power_of_2_or_more_is_no_suspect(exponent):
    walks, x = Walks(), torch.ones(3, requires_grad=True)
    for _ in range(2):
        found = walks.suspects(x.pow(exponent).sum().grad_fn)
        assert len(found) == (exponent < 2)


def test_a_graph_that_is_too_large_has_no_suspects(monkeypatch):
    monkeypatch.setattr("gradscaler.diagnose._graph.walks.MOST_NODES", 3)
    walks, x = Walks(), torch.ones(3, requires_grad=True)
    for _ in range(2):
        assert walks.suspects(x.log().neg().neg().neg().sum().grad_fn) == []
        assert len(walks.suspects(x.log().sum().grad_fn)) == 1


class Layers(nn.Module):
    """A layer that reads the batch, and others that read what it makes."""

    def __init__(self, bias=True):
        super().__init__()
        self.first, self.inner = nn.Linear(4, 4), nn.Linear(4, 4, bias=bias)
        self.table, self.filter = nn.Embedding(3, 4), nn.Conv1d(2, 2, 1)

    def forward(self, x, between=torch.tanh):
        hidden = between(self.first(x) + self.table(torch.zeros(len(x), dtype=torch.long)))
        return self.filter(self.inner(hidden).reshape(-1, 2, 4))


def shown_of(model, loss_of):
    """The names of matrices, and of the vectors that show whether their gradients are bad."""
    walks, named = Walks(), {id(p): name for name, p in model.named_parameters()}
    for number in range(2):
        walks.suspects(loss_of().grad_fn)
        assert number or not walks.shown  # a graph that does not come again costs no more
    return {named[matrix]: named[vector] for matrix, vector in walks.shown.items()}


def test_a_matrix_whose_product_gets_a_vector_is_shown_by_it():
    model, x = Layers(), torch.randn(4, 4)
    shown = shown_of(model, lambda: model(x).square().mean())
    assert shown == {"inner.weight": "inner.bias", "filter.weight": "filter.bias"}
    shown = shown_of(ENCODER, lambda: ENCODER(torch.randn(2, 3, 8, requires_grad=True)).mean())
    assert shown["self_attn.in_proj_weight"] == "self_attn.in_proj_bias"
    assert shown["linear2.weight"] == "linear2.bias"
    assert shown.keys() == {name for name, p in ENCODER.named_parameters() if p.ndim > 1}


def with_hook():
    model = Layers()
    model.inner.weight.register_hook(lambda gradient: gradient / gradient.norm())
    return model


def test_an_autocast_to_bfloat16_changes_nothing_and_to_float16_shows_nothing():
    model, x = Layers(), torch.randn(4, 4)
    for dtype, is_shown in ((torch.bfloat16, True), (torch.float16, False)):
        with torch.autocast("cpu", dtype=dtype):
            shown = shown_of(model, lambda: model(x).square().mean())
        assert ("inner.weight" in shown) == is_shown


@pytest.mark.parametrize(
    ("make", "between", "loss_of"),
    [
        (lambda: Layers(bias=False), torch.tanh, lambda out, model: out.mean()),
        (Layers, torch.tanh, lambda out, model: out.mean() + model.inner.weight.norm()),
        (Layers, torch.exp, lambda out, model: out.mean()),
        (Layers, torch.sqrt, lambda out, model: out.mean()),
        (with_hook, torch.tanh, lambda out, model: out.mean()),
    ],
    ids=["no bias", "penalty", "exp before", "sqrt before", "hook"],
)
def test_a_matrix_that_can_be_bad_alone_is_not_shown(make, between, loss_of):
    model, x = make(), torch.rand(4, 4)
    assert "inner.weight" not in shown_of(model, lambda: loss_of(model(x, between), model))
