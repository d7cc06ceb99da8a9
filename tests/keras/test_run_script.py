"""Keras' ``fit`` under ``gradscaler run``: nothing changes, and a bad batch is named."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gradscaler.diagnose import read_run

SCRIPT = str(Path(__file__).with_name("fits.py"))


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What the script prints with and without, what is said of it, and the run files."""
    started, folders = [], []
    for under in (("-m", "gradscaler", "run", "--"), ()):
        folders.append(folder := tmp_path_factory.mktemp("fits"))
        started.append(
            subprocess.Popen(
                [sys.executable, *under, SCRIPT, folder],
                cwd=folder,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
    (ours, said), (theirs, _) = (process.communicate(timeout=300) for process in started)
    assert [process.returncode for process in started] == [0, 0], said
    said = [" ".join(part.split()) for part in said.split("gradscaler: ")[1:]]
    return (
        ours.splitlines(),
        theirs.splitlines(),
        said,
        sorted((folders[0] / "gradscaler-runs").iterdir()),
    )


def test_weights_optimizers_and_saved_models_are_equal(printed):
    ours, theirs, *_ = printed
    assert len(set(theirs)) == 4
    assert ours == theirs


def test_the_batch_of_a_nan_is_named_with_the_weights_and_no_operation(printed):
    *_, said, _ = printed
    found = [each for each in said if each.startswith("The loss is nan at batch")]
    assert len(found) == 2
    assert [each for each in found if " by matmul" in each] == []
    ends = [each for each in said if each.startswith("after 2 epochs of fit: ")]
    healthy, plain, scaled = [end.partition(": ")[2] for end in ends]
    nan = "The loss is nan at batch 3 of epoch 1, the first that is not finite; "
    assert healthy == "the losses are finite."
    assert re.fullmatch(rf"{nan}\S*kernel was not finite at the end of the epoch\.", plain)
    assert scaled.startswith(f"{nan}all weights were finite at the end of the epoch.")


def test_a_loss_scale_optimizer_of_keras_has_a_run_file(printed):
    *_, said, files = printed
    runs = [read_run(file) for file in files]
    steps = 2 * 5  # a quarter of the samples is for validation
    assert [run.num_steps for run in runs] == [steps, steps]
    assert max(len(run.skipped) for run in runs) >= 2
    assert runs[0].starts[0].policy["name"] == "DynamicScale"
    assert sum(each.startswith(f"after {steps} steps: ") for each in said) == 2
