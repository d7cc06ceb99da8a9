"""What a monitor says of the gradients that a loop of one's own records."""

import keras
import numpy as np
import pytest

from gradscaler.diagnose import Monitor, read_run
from gradscaler.keras import LossScaleOptimizer


def recorded(path, gradients, scaled=False, steps=60):
    """A run whose step ``n`` has the gradients ``gradients(n)``, recorded as they are or scaled."""
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.0))
    variables = [keras.Variable(np.zeros(4, "float32"), name=name) for name in ("kernel", "bias")]
    optimizer.build(variables)
    with Monitor(optimizer, path=path, on_stuck="continue") as monitor:
        for number in range(1, steps + 1):
            values = np.full((2, 4), gradients(number), "float32")
            values[0, 0] = 0.0 if np.isnan(values[0, 0]) else values[0, 0]
            times = keras.ops.convert_to_numpy(optimizer.scale_loss(np.float32(1.0)))
            given = [keras.ops.convert_to_tensor(row * times) for row in values]
            optimizer.apply(given, variables)
            known = values * times if scaled else values
            monitor.record(loss=1.0, gradients=dict(zip(("kernel", "bias"), known, strict=True)))
    assert read_run(path).verdict.text == monitor.verdict.text
    return monitor.verdict


def every_sixth_is_nan(size):
    return lambda number: np.nan if number % 6 == 0 else size


# At the first scale, 32768, the second is close to float16's largest number.
@pytest.mark.parametrize("size", [1e-3, 1.5])
def test_a_nan_in_every_sixth_step_is_never_cured_whatever_the_norms(size, tmp_path):
    verdict = recorded(tmp_path / "run.jsonl", every_sixth_is_nan(size))
    assert verdict.kind == "data"
    assert "every 6 steps" in verdict.text
    assert "NaN and no Inf in the gradient of kernel" in verdict.text


def test_a_single_nan_is_not_called_cured_either(tmp_path):
    verdict = recorded(tmp_path / "run.jsonl", every_sixth_is_nan(1.5), steps=11)
    assert verdict.kind == "normal"
    assert "in step 6 with NaN and no Inf in the gradient of kernel" in verdict.text
    assert "cured" not in verdict.text


@pytest.mark.parametrize("size", [0.01, 1.5])
def test_gradients_that_are_still_scaled_are_noticed(size, tmp_path):
    verdict = recorded(tmp_path / "run.jsonl", every_sixth_is_nan(size), scaled=True)
    assert [found.kind for found in verdict.findings] == ["misuse", "data"]
    assert "Give record() unscaled gradients" in verdict.text


@pytest.mark.parametrize("size", [1e-3, 1.9])
def test_unscaled_gradients_that_a_scale_fits_are_not(size, tmp_path):
    verdict = recorded(tmp_path / "run.jsonl", lambda number: size)
    assert "misuse" not in [found.kind for found in verdict.findings]
