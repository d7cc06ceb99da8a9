"""The judge of where an Inf or NaN began, on operations of NumPy."""

from inspect import currentframe

import numpy as np
import pytest

from gradscaler.diagnose._graph.site import Site
from gradscaler.diagnose._seams.judge import Judge, Owned
from tests.support.marked_lines import lines_marked_in

LOG, EXP = Site("log", "train.py:3"), Site("exp", "train.py:4")


def run(judge, site, function, *inputs, kind="forward"):
    values = judge.before(inputs, site)
    with np.errstate(all="ignore"):
        output = function(*inputs)
    judge.see(site, kind, inputs, values, [output])
    return output


def test_the_operation_that_made_it_is_named_not_the_one_that_passed_it_on():
    judge = Judge({}, [])
    made = run(judge, EXP, np.exp, np.float32([1, 1000]))
    judge.end_in([run(judge, LOG, np.log, made)])
    assert (judge.located.operation, judge.located.line) == ("exp", "train.py:4")
    assert judge.located.largest_input == 1000


def test_what_reaches_no_result_does_no_harm():
    judge = Judge({}, [])
    run(judge, EXP, np.exp, np.float32([1000]))
    judge.end_in([run(judge, LOG, np.log, np.float32([1]))])
    assert judge.located is None


def test_a_parameter_and_a_batch_are_given():
    weight = np.float32([np.nan, 1])
    judge = Judge({}, [Owned(weight, "head", "Linear", "weight")])
    judge.end_in([run(judge, LOG, np.multiply, weight, np.float32([1, 1]))])
    assert judge.located.bad_parameter == "head.weight"
    judge = Judge({}, [Owned(weight, "head", "Linear", "weight")])
    judge.end_in([run(judge, LOG, np.log, np.float32([[1], [np.nan], [1]]))])
    assert (judge.located.kind, judge.located.rows) == ("input", "row 1 of 3")


LOWEST = np.finfo(np.float32).min


def hidden(x):
    """The maxima of columns, of which one starts at the lowest number, as NaN is not larger."""
    return np.nanmax(x, axis=0, initial=LOWEST)


def filled(x):
    return np.where(np.isnan(x), LOWEST, x)[0]


@pytest.mark.parametrize(
    ("operation", "function", "batch", "is_bad"),
    [
        ("max_pool", hidden, [[np.nan, 1]], True),
        ("where", filled, [[np.nan, 1]], False),  # as a mask is meant
        ("max_pool", hidden, [[LOWEST, 1]], False),
        ("max_pool", hidden, [[np.nan, 1], [3, 1]], False),
    ],
)
def test_a_nan_that_a_maximum_hides_is_followed(operation, function, batch, is_bad):
    judge = Judge({}, [])
    pooled = run(judge, Site(operation, "train.py:5"), function, np.float32(batch))
    made = run(judge, Site("mul", "train.py:6"), np.multiply, pooled, np.float32([-4, 4]))
    judge.end_in([made])
    located = judge.located
    if is_bad:
        assert (located.kind, located.line) == ("input", "train.py:5")
    else:
        assert located is None or (located.kind, located.line) == ("forward", "train.py:6")


def test_a_parameter_is_told_from_what_had_its_memory_before():
    weight = np.float32([np.nan])
    judge = Judge({}, [Owned(weight, "head", "Linear", "weight")], identity=lambda array: 0)
    run(judge, EXP, np.exp, np.float32([1000]))
    judge.end_in([run(judge, LOG, np.multiply, weight, np.float32([1]))])
    assert judge.located.bad_parameter == "head.weight"


def test_a_mask_is_healthy_until_an_operation_makes_more_of_it():
    judge = Judge({}, [])
    masked = run(judge, Site("masked_fill"), lambda x: np.where(x > 0, -np.inf, x), np.ones(2))
    judge.end_in([masked])
    assert judge.located is None
    judge.end_in([run(judge, Site("mul", "train.py:9"), np.multiply, masked, np.zeros(2))])
    assert judge.located.line == "train.py:9"


def test_a_gradient_of_minus_inf_is_no_mask():
    judge = Judge({}, [])
    slope = run(judge, LOG, lambda x: x / 0, np.float32([-1, -2]), kind="backward")
    judge.end_in([slope])
    assert (judge.located.kind, judge.located.operation) == ("backward", "log")


def test_a_finite_view_of_a_bad_array_does_not_hide_where_it_began():
    judge = Judge({}, [], identity=lambda array: array.__array_interface__["data"][0])
    made = run(judge, EXP, np.exp, np.float32([1, 1000]))
    run(judge, Site("view"), lambda x: x[:1], made)
    assert judge.origin_of(made).operation == "exp"


def test_a_copy_that_was_not_seen_is_that_of_its_values():
    judge = Judge({}, [])
    made = run(judge, EXP, np.exp, np.float32([1, 2, 1000]))
    assert judge.origin_of_copy(made[1:].copy()).operation == "exp"
    assert judge.origin_of_copy(np.concatenate([made, np.float32([7])])).operation == "exp"
    assert judge.origin_of_copy(np.float32([5, np.inf])) is None


def test_a_line_of_an_installed_package_has_the_users_line_that_led_to_it():
    installed = "/usr/lib/site-packages/their.py"
    package = {}
    exec(compile("def call(function):\n    return function()", installed, "exec"), package)
    judge = Judge({}, [])
    site = package["call"](lambda: judge.site_at(currentframe().f_back, "log"))  # calls
    assert site.line == f"{installed}:2 (called from {lines_marked_in(__file__)('calls')})"
