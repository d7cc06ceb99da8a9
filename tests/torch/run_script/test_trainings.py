"""Trainings of many kinds are the same to the bit under ``gradscaler run``."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradscaler.diagnose import read_run

SCRIPT = str(Path(__file__).with_name("trainings.py"))
RUN = "-m", "gradscaler", "run"
TORCHRUN = "-m", "torch.distributed.run", "--nproc-per-node", "2"


def printed(*commands, cwd, variables=({}, {})):
    """The lines that commands print, which run at the same time, and what is on their stderr."""
    started = [
        subprocess.Popen(
            [sys.executable, *command],
            cwd=cwd,
            env={**os.environ, "OMP_NUM_THREADS": "1", **own},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for command, own in zip(commands, variables, strict=True)
    ]
    ended = [process.communicate(timeout=200) for process in started]
    assert [process.returncode for process in started] == [0] * len(started), ended
    return [(out.splitlines(), error) for out, error in ended]


@pytest.fixture(scope="module")
def trainings(tmp_path_factory):
    """The digests of all trainings with and without, and their files in order."""
    folder = tmp_path_factory.mktemp("trainings")
    (ours, _), (theirs, _) = printed(("-W", "error", *RUN, SCRIPT), (SCRIPT,), cwd=folder)
    files = sorted((folder / "gradscaler-runs").iterdir(), key=lambda file: file.stat().st_ctime)
    return ours, theirs, files


def test_weights_optimizers_and_random_states_are_equal(trainings):
    ours, theirs, _ = trainings
    assert len(theirs) == 9
    assert ours == theirs


def test_new_optimizers_begin_a_new_file(trainings):
    *_, files = trainings
    runs = {file.name: read_run(file) for file in files}
    steps = {name.split(".")[1]: run.num_steps for name, run in runs.items()}
    # Two networks that take turns make a step each.
    assert steps == {"jsonl": 6, "2": 6, "3": 4, "4": 8, "5": 8, "6": 2, "7": 4, "8": 3, "9": 4}


def test_only_a_loop_with_a_scaler_has_a_scale(trainings):
    *_, files = trainings
    assert [bool(read_run(file).scales) for file in files].count(True) == 1


def test_several_models_have_the_names_of_variables(trainings):
    *_, files = trainings
    (file,) = (each for each in files if ".5." in each.name)
    text = file.read_text()
    assert "generator.0.weight" in text
    assert "critic.0.weight" in text


def test_each_rank_of_torchrun_has_a_file(tmp_path):
    port = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29671", "WORLD_SIZE": "2"}
    ranks = [{**port, "RANK": rank} for rank in "01"]
    theirs = printed(*2 * [(SCRIPT, "processes")], cwd=tmp_path, variables=ranks)
    command = *TORCHRUN, "--master-port", "29672", *RUN, SCRIPT, "processes"
    ((ours, said),) = printed(command, cwd=tmp_path, variables=[{}])
    assert sorted(ours) == sorted(line for lines, _ in theirs for line in lines)
    assert ours[0] != ours[1]
    files = sorted((tmp_path / "gradscaler-runs").iterdir())
    first, second = (file.name.rpartition(".rank") for file in files)
    assert first[0] == second[0]
    assert (first[2], second[2]) == ("0.jsonl", "1.jsonl")
    starts = [json.loads(file.read_text().splitlines()[0]) for file in files]
    assert [start["rank"] for start in starts] == [0, 1]
    assert [read_run(file).num_steps for file in files] == [4, 4]
    assert said.count("(rank 0): after 4 steps: ") == said.count("after 4 steps: ") == 1
    assert f"/{files[0].name.replace('rank0', 'rank*')} -o report.html" in said
