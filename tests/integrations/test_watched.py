"""Trainers under ``gradscaler run``: the user's line is named, and nothing changes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.trainers import TRAINERS
from tests.support.marked_lines import lines_marked_in

SCRIPT = Path(__file__).with_name("trainers.py")
LINE = Path(lines_marked_in(str(SCRIPT))("fails")).name


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What the script prints with and without, and what is said of it."""
    started = [
        subprocess.Popen(
            [sys.executable, *under, str(SCRIPT)],
            cwd=tmp_path_factory.mktemp("trainers"),
            env={**os.environ, "PYTHONHASHSEED": "0"},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for under in (("-m", "gradscaler", "run"), ())
    ]
    (ours, said), (theirs, _) = (process.communicate(timeout=300) for process in started)
    assert [process.returncode for process in started] == [0, 0], said
    return ours, theirs, said


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
