"""Which dtypes a backward pass computes in, by hooks on PyTorch's graph."""

import pytest

pytest.importorskip("torch")

import torch

from gradscaler.diagnose._monitor.backward_graph import listen


@pytest.mark.parametrize(
    ("kept_in", "computed_in"),
    [(torch.float32, torch.float16), (torch.float16, torch.float32)],
    ids=["as under autocast", "float16 weights in float32"],
)
def test_the_dtype_that_a_parameter_is_kept_in_does_not_count(kept_in, computed_in):
    weight = torch.ones(2, dtype=kept_in, requires_grad=True)
    dtypes = set()
    loss = (weight.to(computed_in) * 2).sum()
    listen(loss, dtypes)
    loss.backward()
    assert weight.grad.dtype == kept_in
    assert dtypes == {str(computed_in).removeprefix("torch.")}
