"""Which findings are reported, and again."""

import pytest

# A training cannot choose when the line of a failure is found.
from gradscaler.diagnose._monitor.warning_filter import WarningFilter
from gradscaler.diagnose._record.finding import Finding

UNPLACED = Finding("nan", "x", "y", count=3)
PLACED = Finding("nan", "x", "y", line="train.py:7", count=3)


@pytest.mark.parametrize(
    ("first", "then", "is_reported"),
    [(UNPLACED, PLACED, True), (UNPLACED, UNPLACED, False), (PLACED, PLACED, False)],
)
@pytest.mark.parametrize("in_streak", [False, True])
def test_a_kind_is_reported_again_once_its_line_is_known(first, then, is_reported, in_streak):
    reported = WarningFilter(0)
    if in_streak:
        reported.note(first)
    else:
        assert reported.select([first], 100, 100, is_last=False) == [first]
    assert reported.select([then], 200, 200, is_last=False) == [then] * is_reported
    assert reported.select([then], 300, 300, is_last=False) == []


@pytest.mark.parametrize(("then", "is_reported"), [(109, False), (110, True)])
def test_an_uncertain_finding_that_must_last_is_reported_once_it_has(then, is_reported):
    reported, lasting = WarningFilter(0), Finding("dead", "x", "y", is_certain=False, lasts=100)
    assert reported.select([lasting], 10, 10, is_last=False) == []
    assert reported.select([lasting], 20, 20, is_last=False) == []
    assert reported.select([lasting], then, then, is_last=False) == [lasting] * is_reported
    assert reported.select([lasting], 111, 111, is_last=True) == [lasting] * (not is_reported)
