import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "keras_digits.py"
spec = importlib.util.spec_from_file_location("keras_digits", SCRIPT)
keras_digits = importlib.util.module_from_spec(spec)
spec.loader.exec_module(keras_digits)


@pytest.fixture(autouse=True)
def _policy():
    yield
    keras.config.set_dtype_policy("float32")


def train(*arguments):
    keras_digits.main([str(argument) for argument in arguments])


def test_a_resumed_run_ends_with_the_bits_of_an_uninterrupted_one(tmp_path, numpy):
    train("--epochs", 4, "--checkpoint", tmp_path / "whole.keras")
    train("--epochs", 2, "--checkpoint", tmp_path / "half.keras")
    train(
        "--epochs",
        2,
        "--resume",
        tmp_path / "half.keras",
        "--checkpoint",
        tmp_path / "resumed.keras",
    )
    whole, half, resumed = (
        keras.models.load_model(tmp_path / f"{name}.keras") for name in ("whole", "half", "resumed")
    )
    values = [
        [numpy(variable) for variable in [*model.variables, *model.optimizer.variables]]
        for model in (whole, half, resumed)
    ]
    assert all(map(np.array_equal, values[0], values[2]))
    assert not all(map(np.array_equal, values[0], values[1]))


def test_a_loop_ends_as_fit_does(capsys):
    ends = []
    for how in ([], ["--loop"]):
        train("--epochs", 4, *how)
        ends.append(capsys.readouterr().out.splitlines()[-1])
    assert ends[0] == ends[1]


def test_it_learns(capsys):
    train("--epochs", 16)
    accuracies = re.findall(r"([\d.]+)%", capsys.readouterr().out)
    assert float(accuracies[-1]) > 20  # chance is 10


def test_it_runs_as_a_script(tmp_path):
    result = subprocess.run(
        [sys.executable, SCRIPT, "--epochs", "1", "--scale", "8", "--checkpoint", "out.keras"],
        cwd=tmp_path,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.splitlines()[-1].split()[3] == "8"
    assert (tmp_path / "out.keras").exists()


def test_a_damaged_checkpoint_is_refused_by_name(tmp_path):
    (tmp_path / "broken.keras").write_text("no model")
    with pytest.raises(SystemExit, match=r"broken\.keras is damaged, or no model of this script"):
        train("--resume", tmp_path / "broken.keras")


def test_a_place_that_cannot_be_written_to_is_refused_before_training(tmp_path, capsys):
    with pytest.raises(SystemExit):
        train("--checkpoint", tmp_path / "none" / "out.keras")
    assert "there is no folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        train("--checkpoint", tmp_path / "out.pt")
    assert "ends in .keras" in capsys.readouterr().err
