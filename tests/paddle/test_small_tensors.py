"""Which tensors are taken together."""

import numpy as np
import pytest

from gradscaler.paddle._small_tensors import batches_of_small

MIXES = {
    "none": [],
    "few": [(4,)] * 7,
    "alike": [(64, 64)] * 2000,
    "alike, and too few to copy 8 of them within 1/128": [(64, 64)] * 700,
    "two shapes of one size by turns": [(8, 4), (4, 8)] * 900,
    "scalars beside a large one": [(), (1000, 1000)] * 50,
    "without elements": [(0, 3)] * 1000,
    "large": [(2**14,)] * 1000,
}


@pytest.mark.parametrize("shapes", MIXES.values(), ids=MIXES)
def test_each_tensor_is_in_one_list_and_batches_are_small(shapes):
    tensors = [np.empty(shape, np.float32) for shape in shapes]
    batches, others = batches_of_small(tensors)
    found = [tensor for batch in batches for tensor in batch] + others
    assert sorted(map(id, found)) == sorted(map(id, tensors))
    for batch in batches:
        assert len({tensor.shape for tensor in batch}) == 1
        assert len(batch) >= 8
        assert sum(tensor.size for tensor in batch) <= min(
            2**17, sum(tensor.size for tensor in tensors) / 128
        )


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        ("alike", {15}),
        ("two shapes of one size by turns", {14}),
        ("scalars beside a large one", {50}),
        ("alike, and too few to copy 8 of them within 1/128", set()),
        ("large", set()),
    ],
)
def test_batches_hold_as_many_tensors_as_they_may(name, lengths):
    batches, _ = batches_of_small([np.empty(shape, np.float32) for shape in MIXES[name]])
    assert {len(batch) for batch in batches} == lengths
