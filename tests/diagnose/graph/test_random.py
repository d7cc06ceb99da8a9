"""The search in a graph of PyTorch draws none of the training's random numbers."""

import pytest

pytest.importorskip("torch")

import torch
from torch.nn import functional

from gradscaler.diagnose._graph.values import operations_to_compute
from gradscaler.diagnose._graph.watch import GraphWatch


def names_of_pytorch():
    """Each operation of PyTorch's own library, as the installed version lists them."""
    every = (schema.name for schema in torch._C._jit_get_all_schemas())
    return sorted({name.removeprefix("aten::") for name in every if name.startswith("aten::")})


def may_draw(operation):
    """Whether it makes a tensor, and takes a generator of random numbers for that."""
    takes = [str(each.type) for each in operation._schema.arguments]
    makes = [str(each.type) for each in operation._schema.returns]
    return "Tensor" in makes and any("Generator" in each for each in takes)


def test_no_operation_that_can_take_a_generator_is_computed_again():
    each = [operation for name in names_of_pytorch() for operation in operations_to_compute(name)]
    assert len(each) > 1000
    assert not [str(operation) for operation in each if may_draw(operation)]


DRAWS = {
    "bernoulli": torch.bernoulli,
    "binomial": lambda p: torch.binomial(torch.full_like(p, 9), p) + p,
    "dropout": functional.dropout,
    "attention": lambda p: functional.scaled_dot_product_attention(p, p, p, dropout_p=0.5),
    "exponential": lambda p: p + torch.empty_like(p).exponential_(),
    "gamma": lambda p: torch.distributions.Gamma(p, p).rsample(),
    "gumbel": functional.gumbel_softmax,
    "multinomial": lambda p: p * torch.multinomial(p, 4),
    "normal": lambda p: torch.normal(p, p) + p,
    "poisson": torch.poisson,
    "rrelu": lambda p: functional.rrelu(p - 0.5, training=True),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_reading_a_graph_that_draws_leaves_the_random_numbers(draw):
    chances = torch.rand(4, 4, requires_grad=True).sigmoid()
    made = draw(chances).sum()
    loss = made + (made * 0 - 1).log()
    watch, before = GraphWatch(None), torch.get_rng_state()
    watch.see(loss)
    watch.stop()
    assert watch.located.operation == "log"
    assert torch.equal(torch.get_rng_state(), before)
