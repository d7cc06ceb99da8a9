"""Loops of Paddle and TensorPlay under ``gradscaler run``: a failure has its cause."""

from pathlib import Path

import pytest

from gradscaler.diagnose import read_run
from tests.support.scripts import alone, lines_of, watched

SCRIPT = Path(__file__).with_name("loops.py")
LINE = lines_of(SCRIPT, "sqrt", "log")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return alone(SCRIPT, tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def ran(plain, tmp_path_factory):
    return watched(SCRIPT, tmp_path_factory.mktemp("watched"))


@pytest.fixture(scope="module")
def in_step_13(plain, tmp_path_factory):
    return watched(SCRIPT, tmp_path_factory.mktemp("step"), "--watch", "13")


def test_the_weights_are_the_same_to_the_bit(plain, ran, in_step_13):
    assert plain == ran.printed == in_step_13.printed


def test_each_loop_has_a_run_file_and_a_verdict(ran):
    runs = [read_run(file) for file in ran.files]
    assert [run.num_steps for run in runs] == [24] * 5
    assert [run.bad_steps[0].step for run in runs if run.bad_steps] == [13] * 3
    assert [len(run.skipped) for run in runs] == [0, 0, 0, 0, 1]
    healthy, *_ = ran.verdicts
    assert healthy.startswith("after 24 steps: None of 24 steps had a gradient of NaN or Inf.")


def test_the_first_bad_step_is_told_and_how_to_find_its_operation(ran):
    for verdict in ran.verdicts[1:4]:
        assert "step 13 was applied with" in verdict
        assert "--watch 13 names what made it" in verdict


def test_a_watched_step_names_the_operation_and_the_line(in_step_13):
    _, root, logarithm, batch, _ = in_step_13.verdicts
    for verdict, name in ((root, "sqrt"), (logarithm, "log")):
        assert f"{name} at {SCRIPT}:{LINE[name]}" in verdict
    assert "holds Inf or NaN" in batch
    assert f"{SCRIPT}:" in batch
