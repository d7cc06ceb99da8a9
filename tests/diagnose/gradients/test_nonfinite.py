import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra.numpy import array_shapes, arrays, floating_dtypes

from gradscaler import NonfiniteGradient
from gradscaler.diagnose import inspect


def test_finite_gradients_give_nothing():
    largest = np.finfo(np.float16).max
    assert inspect({"w": np.float16([largest, -largest, 0.0, 6e-8]), "empty": np.zeros(0)}) == ()
    assert inspect([np.arange(3)]) == ()


def test_each_that_is_not_finite_is_named_with_shape_and_dtype_in_order():
    gradients = {
        "z": np.float16([[math.inf, -math.inf], [math.nan, -3.0]]),
        "fine": np.ones(3),
        "a": np.float64([2.0, -math.inf]),
        "complex": np.array([complex(math.inf, math.nan), 3 - 5j], np.complex64),  # two parts each
    }
    found = inspect(gradients)
    assert found == (
        NonfiniteGradient("z", (2, 2), "float16", 2, 1, 3.0),
        NonfiniteGradient("a", (2,), "float64", 1, 0, 2.0),
        NonfiniteGradient("complex", (2,), "complex64", 1, 1, 5.0),
    )
    types = type(found[0].num_inf), type(found[0].num_nan), type(found[0].largest_finite)
    assert types == (int, int, float)  # not NumPy's


def test_the_largest_is_nan_if_nothing_is_finite():
    (found,) = inspect(np.float32([math.nan, math.inf]))
    assert math.isnan(found.largest_finite)


@given(arrays(floating_dtypes(endianness="="), array_shapes(min_dims=0)))
def test_the_counts_are_those_of_a_loop(gradient):
    numbers = [float(number) for number in gradient.reshape(-1)]
    num_inf, num_nan = sum(map(math.isinf, numbers)), sum(map(math.isnan, numbers))
    found = inspect(gradient)
    assert bool(found) == bool(num_inf + num_nan)
    if found:
        rest = [abs(number) for number in numbers if math.isfinite(number)]
        assert (found[0].num_inf, found[0].num_nan) == (num_inf, num_nan)
        assert found[0].largest_finite == pytest.approx(max(rest, default=math.nan), 0, 0, True)
