import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "paddle_fleet.py"
RARE = pytest.mark.rare("tests/examples learns nothing without loss scaling, with the same layers")


@pytest.mark.parametrize(
    ("scaling", "steps"), [(True, "100"), pytest.param(False, "50", marks=RARE)]
)
def test_two_processes_learn_only_with_loss_scaling(scaling, steps, tmp_path):
    command = [sys.executable, SCRIPT, "--steps", steps, *([] if scaling else ["--no-scaling"])]
    result = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=300
    )
    table = [line.split() for line in result.stdout.splitlines()]
    assert table[0] == ["step", "loss", "accuracy", "scale", "skipped", "overflowed", "here"]
    step, _, accuracy, scale, *_ = table[-1]
    assert step == steps
    assert (
        float(accuracy.rstrip("%")) > 50.0 if scaling else float(accuracy.rstrip("%")) < 20.0
    )  # chance is 10
    assert float(scale) > 1e5 if scaling else scale == "1"
