"""Trainings of many kinds are the same to the bit under ``gradscaler run``."""

import json
from pathlib import Path

import pytest

from gradscaler.diagnose import read_run
from tests.support import programs
from tests.support.ranks import output_of

SCRIPT = str(Path(__file__).with_name("trainings.py"))
RUN = "-m", "gradscaler", "run"


def lines_of(*processes):
    """The lines that processes printed, each of which ended well."""
    assert [done.returncode for done in processes] == [0] * len(processes), processes
    return [line for done in processes for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def trainings(tmp_path_factory):
    """The digests of all trainings with and without, and their files in order."""
    folder = tmp_path_factory.mktemp("trainings")
    ours = lines_of(programs.run(*RUN, SCRIPT, cwd=folder, is_strict=True))
    theirs = lines_of(programs.run(SCRIPT, cwd=folder))
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


@pytest.fixture
def theirs(tmp_path):
    """The lines of two ranks without."""
    lines = lines_of(*programs.run_ranks(2, SCRIPT, "processes", cwd=tmp_path))
    assert len(set(lines)) == 2
    return lines


def check_files(folder):
    """Each of two ranks has a file of its own, with one name before the rank."""
    files = sorted((folder / "gradscaler-runs").iterdir())
    first, second = (file.name.rpartition(".rank") for file in files)
    assert first[0] == second[0]
    assert (first[2], second[2]) == ("0.jsonl", "1.jsonl")
    starts = [json.loads(file.read_text().splitlines()[0]) for file in files]
    assert [start["rank"] for start in starts] == [0, 1]
    assert [read_run(file).num_steps for file in files] == [4, 4]
    return files


def test_each_rank_has_a_file_and_the_first_has_the_word(theirs, tmp_path):
    ranks = programs.run_ranks(2, *RUN, SCRIPT, "processes", cwd=tmp_path)
    assert lines_of(*ranks) == theirs
    files = check_files(tmp_path)
    said, nothing = (done.stderr for done in ranks)
    assert said.count("(rank 0): after 4 steps: ") == said.count("after 4 steps: ") == 1
    assert f"/{files[0].name.replace('rank0', 'rank*')} -o report.html" in said
    assert "gradscaler" not in nothing


@pytest.mark.rare("the test above starts ranks with the variables that torchrun sets")
def test_each_rank_of_torchrun_has_a_file(theirs, tmp_path):
    launch = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
    printed = output_of(*launch, *RUN, SCRIPT, "processes", cwd=tmp_path)
    assert sorted(printed.splitlines()) == sorted(theirs)
    check_files(tmp_path)
