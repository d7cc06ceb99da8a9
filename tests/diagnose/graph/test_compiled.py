"""An Inf or NaN from compiled code, which is one node, and from buffers that it reads."""

import math

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gradscaler.diagnose._graph.watch import GraphWatch


class Unit(nn.Linear):
    def forward(self, inputs):
        hidden = super().forward(inputs)
        return hidden / hidden.norm(dim=1, keepdim=True)


READS = {
    "log_softmax": lambda z: cross_entropy(z + 0.1, torch.ones(6, dtype=torch.long)),
    "exp": lambda z: torch.cat([z, z]).exp().mean(),
    "matmul": lambda z: (z @ z.T).sum(),
    "sum": lambda z: (z - 1).sum(),
}


def located(model, loss_of):
    """The place of the Inf or NaN in the first loss that a watch sees."""
    watch = GraphWatch(model)
    try:
        loss = loss_of()
        assert not loss.detach().isfinite()
        watch.see(loss)
        return watch.located
    finally:
        watch.stop()


@pytest.mark.parametrize("reads", READS.values(), ids=READS)
def test_the_compiled_function_is_named_not_the_operation_after_it(reads):
    model = Unit(4, 4, bias=False)
    fast = torch.compile(model, backend="aot_eager")
    rows = torch.ones(6, 4) * (torch.arange(6) != 2)[:, None]
    found = located(model, lambda: reads(fast(rows)))
    assert found.operation == "CompiledFunction"


class Codebook(nn.Module):
    """An encoder, and a table of means that the forward pass reads by index."""

    def __init__(self):
        super().__init__()
        self.encoder, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("means", torch.ones(3, 4))
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))

    def forward(self, inputs):
        hidden = self.norm(self.encoder(inputs))
        return (hidden - self.means[torch.tensor([0, 1, 2, 0, 1, 2])]).square().mean()


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize(("name", "is_training"), [("means", True), ("norm.running_var", False)])
def test_a_buffer_that_is_nan_is_named_behind_what_was_read_from_it(name, is_training, is_compiled):
    model = Codebook().train(is_training)
    model.get_buffer(name).view(-1)[1] = math.nan
    run = torch.compile(model, backend="aot_eager") if is_compiled else model
    found = located(model, lambda: run(torch.randn(6, 4)))
    assert f"{found.module or ''}.{found.parameter}".lstrip(".") == name
    assert found.kind == "forward"


@pytest.mark.parametrize("bad", ["batch", "target"])
def test_statistics_that_a_bad_batch_made_nan_are_not_its_cause(bad):
    model, batch, target = Codebook(), torch.randn(6, 4), torch.ones(())
    if bad == "batch":
        batch[3, 2] = math.nan
    else:
        target = target * math.nan
    found = located(model, lambda: model(batch) - target)
    assert found.kind == "input"
    assert found.rows == ("row 3 of 6" if bad == "batch" else None)
