"""The rows of a batch that hold an Inf or NaN."""

import math

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from gradscaler.diagnose._gradients.reading import rows_of
from gradscaler.diagnose._graph.watch import GraphWatch


@pytest.mark.parametrize(
    ("shape", "bad", "text"),
    [
        ((32, 4), [3], "row 3 of 32"),
        ((32,), [31], "row 31 of 32"),
        ((8, 2, 3, 3), [0, 5], "rows 0, 5 of 8"),
        ((16, 2), [1, 2, 3, 9, 12], "rows 1, 2, 3 and 2 more of 16"),
        ((4, 2), [0, 1, 2], None),  # no single sample
        ((4, 2), [], None),
        ((1, 4), [0], None),
    ],
)
def test_a_few_bad_rows_are_listed(shape, bad, text):
    tensor = torch.ones(shape)
    tensor.view(shape[0], -1)[bad, -1] = torch.tensor([math.nan, math.inf]).repeat(8)[: len(bad)]
    assert rows_of(tensor) == text


def image_model():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 1))


@pytest.mark.parametrize(
    ("model", "shape"),
    [(nn.Linear(4, 1), (8, 4)), (nn.Linear(4, 1), (8, 5, 4)), (image_model(), (8, 3, 8, 8))],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_row_is_that_of_the_batch_though_a_layer_reads_it_flattened(model, shape, dtype):
    batch = torch.randn(shape)
    batch[6].view(-1)[1] = math.nan
    watch = GraphWatch(model)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        loss = model(batch).float().mean()
    watch.see(loss)
    watch.stop()
    assert (watch.located.kind, watch.located.rows) == ("input", "row 6 of 8")
