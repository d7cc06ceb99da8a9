"""Trainings with packages of trainers under ``gradscaler run``: equal bits, and the line named."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.trainings import TRAININGS
from tests.support.marked_lines import lines_marked_in

SCRIPT = Path(__file__).with_name("trainings.py")
line_with = lines_marked_in(str(SCRIPT))


@pytest.mark.parametrize("name", [train.__name__ for train in TRAININGS])
def test_a_healthy_training_has_the_same_bits_and_a_failing_one_its_line_named(name, tmp_path):
    processes = [
        subprocess.Popen(
            [sys.executable, *under, str(SCRIPT), name],
            cwd=tmp_path,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for under in (("-m", "gradscaler", "run"), ())
    ]
    (ours, said), (theirs, _) = (process.communicate(timeout=300) for process in processes)
    assert [process.returncode for process in processes] == [0, 0], said
    digests = [re.findall(r"^digest (\w+)$", out, re.MULTILINE) for out in (ours, theirs)]
    assert digests[0] == digests[1]
    assert len(digests[0]) == 1
    healthy, failing = " ".join(said.split()).split("gradscaler: after")[-2:]
    assert "None of " in healthy
    assert f"at {SCRIPT.parent}/{Path(line_with(name)).name}" in failing
