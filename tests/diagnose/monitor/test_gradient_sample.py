"""The sample of a large gradient, of which only a part is looked at."""

from types import SimpleNamespace

import numpy as np
import pytest

from gradscaler import DynamicScale
from gradscaler.diagnose import Monitor, read_run

ROWS = 2**16  # sixteen times as many elements as are looked at


def run_with(path, gradients):
    """The run of a single step, which has these gradients."""
    policy = DynamicScale(2.0**12)
    scaler = SimpleNamespace(policy=policy, state=policy.init())
    with Monitor(scaler, path=path, every=1, on_stuck="continue") as monitor:
        monitor.record(gradients=gradients)
    return read_run(path)


def embedding_with(value):
    """A gradient that is 0 but for one element, which is not among those that are looked at."""
    embedding = np.zeros(ROWS, np.float32)
    embedding[1] = value
    return embedding


@pytest.mark.parametrize(("value", "zero"), [(1.0, 1 - 1 / ROWS), (0.0, 1.0)])
def test_a_part_of_zeros_is_a_gradient_of_zero_only_if_the_rest_is(path, value, zero):
    (sample,) = run_with(path, {"embedding": embedding_with(value)}).samples
    assert sample.parameters["embedding"].zero == zero


@pytest.mark.parametrize(("value", "kind"), [(1.0, "normal"), (0.0, "dead")])
def test_embeddings_of_which_few_rows_are_used_are_not_dead(path, value, kind):
    embedding = embedding_with(value)
    gradients = {"head": np.ones(8, np.float32), "tokens": embedding, "places": embedding}
    assert run_with(path, gradients).verdict.kind == kind
