"""Which dtypes a backward pass computes in, by hooks on PyTorch's graph."""

import pytest

pytest.importorskip("torch")

import torch

from gradscaler.diagnose import Monitor, read_run
from gradscaler.torch import GradScaler


@pytest.mark.parametrize(
    ("kept_in", "computed_in"),
    [(torch.float32, torch.float16), (torch.float16, torch.float32)],
    ids=["as under autocast", "float16 weights in float32"],
)
def test_the_dtype_that_a_parameter_is_kept_in_does_not_count(path, kept_in, computed_in):
    weight = torch.ones(2, dtype=kept_in, requires_grad=True)
    optimizer, scaler = (
        torch.optim.SGD([weight], lr=0.1),
        GradScaler(init_scale=8.0, allow_fp16_gradients=True),
    )
    with Monitor(scaler, path=path, every=1, on_stuck="continue"):
        scaler.scale((weight.to(computed_in) * 2).sum()).backward()
        assert weight.grad.dtype == kept_in
        scaler.step(optimizer)
        scaler.update()
    (sample,) = read_run(path).samples
    assert sample.backward == (str(computed_in).removeprefix("torch."),)
