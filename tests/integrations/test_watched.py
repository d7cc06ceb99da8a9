"""Trainers under ``gradscaler run``: the user's line is named, and nothing changes."""

import re
from pathlib import Path

import pytest

from tests.integrations.trainers import TRAINERS
from tests.support.both import run_both
from tests.support.marked_lines import lines_marked_in

SCRIPT = Path(__file__).with_name("trainers.py")
LINE = Path(lines_marked_in(str(SCRIPT))("fails")).name


@pytest.fixture(scope="module", params=["1", "3"])
def printed(request, tmp_path_factory):
    """What the script prints with and without, and what is said of it, if a step fails."""
    folder = tmp_path_factory.mktemp("trainers")
    return run_both(SCRIPT, request.param, folder=folder, PYTHONHASHSEED="0")


def test_weights_and_random_numbers_are_equal(printed):
    ours, theirs = (re.findall(r"^digest .*", out, re.MULTILINE) for out in printed[:2])
    assert len(set(theirs)) >= 2
    assert len(theirs) == len(TRAINERS)
    assert ours == theirs


@pytest.mark.parametrize("number", range(len(TRAINERS)), ids=lambda n: TRAINERS[n].__name__)
def test_the_users_line_is_named_and_not_one_of_the_trainer(printed, number):
    verdict = " ".join(printed[2].split("gradscaler: after")[1:][number].split())
    assert f"by sqrt at {SCRIPT.parent}/{LINE}," in verdict
    assert "applied with gradients of Inf or NaN" in verdict
