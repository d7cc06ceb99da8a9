"""The sample of a large gradient, of which only a part is looked at."""

import numpy as np
import pytest

from gradscaler.diagnose._findings import Evidence, judge
from gradscaler.diagnose._monitor.gradient_sample import fields_of, measure
from gradscaler.diagnose._run.lines import Sample

ROWS = 2**16  # four times as many elements as are looked at


@pytest.mark.parametrize(("value", "zero"), [(1.0, 1 - 1 / ROWS), (0.0, 1.0)])
def test_a_part_of_zeros_is_a_gradient_of_zero_only_if_the_rest_is(value, zero):
    embedding = np.zeros(ROWS, np.float32)
    embedding[1] = value  # every fourth element is looked at
    fields = fields_of([measure({"embedding": embedding}, "float16", 1.0, scaled=False)])
    assert fields["parameters"]["embedding"].zero == zero


@pytest.mark.parametrize(("value", "kind"), [(1.0, "normal"), (0.0, "dead")])
def test_embeddings_of_which_few_rows_are_used_are_not_dead(value, kind):
    embedding = np.zeros(ROWS, np.float32)
    embedding[1] = value
    gradients = {"head": np.ones(8, np.float32), "tokens": embedding, "places": embedding}
    fields = fields_of([measure(gradients, "float16", 2.0**12, scaled=False)])
    sample = Sample(1, 2.0**12, (), 1, (), **fields)
    assert judge(Evidence(1, 0, sample=sample)).kind == kind
