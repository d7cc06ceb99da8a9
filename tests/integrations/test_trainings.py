"""Trainings with packages of trainers under ``gradscaler run``: equal bits, and the line named."""

import re
from pathlib import Path

import pytest

from tests.integrations.trainings import TRAININGS
from tests.support.both import run_both
from tests.support.marked_lines import lines_marked_in

SCRIPT = Path(__file__).with_name("trainings.py")
line_with = lines_marked_in(str(SCRIPT))


@pytest.mark.parametrize("name", [train.__name__ for train in TRAININGS])
def test_a_healthy_training_has_the_same_bits_and_a_failing_one_its_line_named(name, tmp_path):
    ours, theirs, said = run_both(SCRIPT, name, folder=tmp_path, HF_HUB_OFFLINE="1")
    digests = [re.findall(r"^digest (\w+)$", out, re.MULTILINE) for out in (ours, theirs)]
    assert digests[0] == digests[1]
    assert len(digests[0]) == 1
    healthy, failing = " ".join(said.split()).split("gradscaler: after")[-2:]
    assert "None of " in healthy
    assert f"at {SCRIPT.parent}/{Path(line_with(name)).name}" in failing
