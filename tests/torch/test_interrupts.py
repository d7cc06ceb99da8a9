"""A post-step hook that raises: a step is not taken again where its kernel has unscaled."""

import pytest

from gradscaler import CallOrderError
from tests.support.eager import library


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_a_step_whose_hook_raised_after_it_is_refused_or_right(
    fused, scaler, backward, parameters, finite
):
    def begin():
        optimizer.zero_grad()
        backward(scaler, parameters, finite)

    optimizer = library.sgd(parameters, lr=1.0, fused=fused)
    twice = [p.detach() - g - g for p, g in zip(parameters, finite, strict=True)]
    hook = optimizer.register_step_post_hook(lambda *_: 1 / 0)
    begin()
    with pytest.raises(ZeroDivisionError):
        scaler.step(optimizer)
    hook.remove()
    if fused:
        with pytest.raises(CallOrderError):
            scaler.step(optimizer)
        begin()
    scaler.step(optimizer)
    assert library.exact(parameters) == library.exact(twice)
