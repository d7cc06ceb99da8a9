import math
from collections import OrderedDict, namedtuple
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradscaler import NonfiniteGradient
from gradscaler.diagnose import exponents, inspect

# Users see neither whether an array is copied, nor which of its elements are sampled.
from gradscaler.diagnose._gradients.arrays import sample_of, to_numpy

Pair = namedtuple("Pair", ["weight", "bias"])
A, B = np.ones(2, np.float32), np.zeros(3, np.float32)


class Module:
    """A module with a dtype, which some modules have."""

    dtype = "float32"

    def __init__(self, **gradients):
        self.parameters = {name: SimpleNamespace(grad=grad) for name, grad in gradients.items()}

    def named_parameters(self):
        return self.parameters.items()


# Names.


@pytest.mark.parametrize(
    ("gradients", "expected"),
    [
        (A, {"": A}),
        (2.5, {"": 2.5}),
        ({"w": A, "b": B}, {"w": A, "b": B}),
        ({"layer": {"w": A}, "rest": [B, {"x": A}]}, {"layer.w": A, "rest.0": B, "rest.1.x": A}),
        ({0: {1: A}}, {"0.1": A}),
        ([A, B], {"0": A, "1": B}),
        ((A, None, B), {"0": A, "2": B}),
        (Pair(A, [B]), {"weight": A, "bias.0": B}),
        (iter([A, B]), {"0": A, "1": B}),
        ([("w", A), ("layer.b", B), ("c", None)], {"w": A, "layer.b": B}),
        (OrderedDict(z=A, a=B).items(), {"z": A, "a": B}),
        (Module(w=A, frozen=None), {"w": A}),
        ([Module(w=A)], {"0.w": A}),
        (None, {}),
        ([], {}),
        ({"w": None}, {}),
        ({"a.b": A, "a": {"b": B}}, {"a.b": A, "a.b (2)": B}),
        (
            [("w", A), ("w (2)", B), ("w", B), ("w", A)],
            {"w": A, "w (2)": B, "w (3)": B, "w (4)": A},
        ),
    ],
)
def test_every_array_has_the_path_to_it_for_a_name(gradients, expected):
    found = exponents(gradients).parameters
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert (found[name].size, found[name].num_zero) == (np.size(array), np.sum(array == 0))


@pytest.mark.parametrize(
    ("gradients", "message"),
    [
        ("weights", "what was given is 'weights' \\(str\\)"),
        (object, "what was given is .* \\(type\\)"),
        ({"layer": [A, "w"]}, "layer.1 is 'w'"),
    ],
)
def test_what_holds_no_arrays_is_refused_by_its_name(gradients, message):
    with pytest.raises(TypeError, match=message):
        exponents(gradients)


# Elements.


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int32])
def test_numpy_arrays_are_not_copied(dtype):
    array = np.ones((2, 3), dtype)
    assert to_numpy(array) is array


@pytest.mark.parametrize("look", [exponents, inspect])
@pytest.mark.parametrize("array", [["a"], [b"a"], [None], np.zeros(1, "M8[s]")])
def test_an_array_without_numbers_is_refused(look, array):
    with pytest.raises(TypeError, match="holds no numbers"):
        look({"w": np.array(array)})


def test_a_complex_array_is_seen_as_real_numbers():
    found = exponents(np.array([[1 + 2j], [3 - 4j]], np.complex64)).total
    assert (found.size, found.first, found.counts.tolist()) == (4, 0, [1, 2, 1])
    assert (found.smallest, found.largest) == (1, 4)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_the_dtypes_that_ml_dtypes_adds_are_read(name):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.array([1.5, -0.0, math.nan, 2.0**-6], getattr(ml_dtypes, name))
    found = exponents(array).total
    assert (found.num_zero, found.num_nan, found.smallest, found.largest) == (1, 1, 2.0**-6, 1.5)
    assert inspect(array) == (NonfiniteGradient("", (4,), name, 0, 1, 1.5),)


def test_rows_of_one_index_are_added():
    """As TensorFlow's IndexedSlices and MindSpore's RowTensor hold them."""
    indices, values = np.array([4, 1, 4]), np.float32([[1, 2], [3, 4], [5, 6]])
    rows = SimpleNamespace(indices=indices, values=values, dense_shape=(9, 2))
    found = exponents([rows]).parameters
    assert list(found) == ["0"]
    assert (found["0"].first, found["0"].counts.tolist()) == (1, [1, 2, 1])  # 3, 4, 6 and 8
    rows.values = np.float32([[1, 2], [3, 4], [5, np.inf]])
    assert inspect([rows]) == (NonfiniteGradient("0", (9, 2), "float32", 1, 0, 6.0),)
    rows.dense_shape = None  # of a table of unknown size
    assert inspect([rows])[0].shape == (3, 2)


def test_a_number_is_an_array():
    assert exponents(1.5).total.largest == 1.5
    (found,) = inspect(math.inf)
    assert (found.name, found.shape, found.dtype, found.num_inf) == ("", (), "float64", 1)


# Samples.


@given(shape=st.lists(st.integers(0, 40), min_size=0, max_size=3), limit=st.integers(1, 200))
def test_a_sample_is_evenly_strided_and_no_larger_than_asked(shape, limit):
    array = np.arange(math.prod(shape)).reshape(shape)
    sample = sample_of(array, limit)
    if array.size <= limit:
        assert sample is array
        return
    assert 0 < sample.size <= limit
    assert sample[0] == 0
    assert set(np.diff(sample)) <= {sample[1]} if sample.size > 1 else True
    assert array.size - sample[-1] <= (sample[1] if sample.size > 1 else array.size)
    assert sample.size >= limit // 3


def test_a_sample_of_a_matrix_is_not_of_a_few_columns():
    matrix = np.broadcast_to(np.arange(1024), (1024, 1024))
    assert len(set(sample_of(matrix, 4096).tolist())) == 1024
