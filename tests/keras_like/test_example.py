import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from keras_like import BACKEND, FRAMEWORK, KERAS_3, keras, numpy

SCRIPT = Path(__file__).parents[2] / "examples" / f"{FRAMEWORK}_digits.py"
spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)


@pytest.fixture(autouse=True)
def _float32_afterwards():
    yield
    keras.mixed_precision.set_global_policy("float32")


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    """On PyTorch, whose threads slow each other down on such small matrices."""
    if BACKEND == "torch":
        import torch

        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        yield
        torch.set_num_threads(threads)
    else:
        yield


def train(*arguments):
    example.main([str(argument) for argument in arguments])


def values(path):
    """All that a saved model holds."""
    model = keras.models.load_model(path)
    optimizer = model.optimizer
    scale = [optimizer.loss_scale, optimizer.dynamic_counter]
    return [numpy(value) for value in [*model.variables, *optimizer.variables, *scale]]


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_resumed_run_ends_with_the_bits_of_an_uninterrupted_one(tmp_path):
    whole, half, resumed = (tmp_path / f"{name}.keras" for name in ("whole", "half", "resumed"))
    train("--epochs", 4, "--checkpoint", whole)
    train("--epochs", 2, "--checkpoint", half)
    train("--epochs", 4, "--resume", half, "--checkpoint", resumed)
    assert same(values(resumed), values(whole))
    assert not same(values(half), values(whole))


def test_a_run_killed_in_a_save_goes_on_from_the_one_before(tmp_path, killed_in_its_second_save):
    run, first, whole = (tmp_path / f"{name}.keras" for name in ("run", "first", "whole"))
    command = ("--epochs", 3, "--save-every", 1, "--checkpoint", run, "--resume")
    killed_in_its_second_save(SCRIPT, *command)
    train("--epochs", 1, "--checkpoint", first)
    assert same(values(run), values(first))
    train(*command)
    train("--epochs", 3, "--checkpoint", whole)
    assert same(values(run), values(whole))
    assert set(tmp_path.iterdir()) == {run, first, whole}


@pytest.mark.skipif(not KERAS_3, reason="Keras 2 counts skipped steps")
def test_skipped_steps_do_not_make_a_resumed_run_longer(tmp_path, capsys):
    path = tmp_path / "run.keras"
    train("--epochs", 2, "--scale", 2.0**127, "--checkpoint", path)
    assert re.findall(r"\d+$", capsys.readouterr().out.strip()) == ["0"]
    train("--epochs", 2, "--resume", path)
    assert len(capsys.readouterr().out.splitlines()) == 1  # it was trained already


def test_a_loop_ends_as_fit_does(capsys):
    ends = []
    for how in ([], ["--loop"]):
        keras.backend.clear_session()
        train("--epochs", 30, *how)
        ends.append(capsys.readouterr().out)
    assert ends[0] == ends[1]


@pytest.mark.parametrize(("options", "low", "high"), [([], 80, 100), (["--scale", 1], 0, 20)])
def test_it_learns_only_with_loss_scaling(options, low, high, capsys):
    train("--epochs", 70, *options)
    accuracies = re.findall(r"([\d.]+)%", capsys.readouterr().out)
    assert low <= float(accuracies[-1]) <= high  # chance is 10


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


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[:999], lambda data: b"no"])
def test_a_damaged_checkpoint_is_refused_by_name(damage, tmp_path):
    path = tmp_path / "broken.keras"
    train("--epochs", 1, "--checkpoint", path)
    path.write_bytes(damage(path.read_bytes()))
    for resume in (["--resume", path], ["--checkpoint", path, "--resume"]):
        with pytest.raises(SystemExit, match=r"broken\.keras is damaged, or not a model of this"):
            train(*resume)


def test_a_missing_checkpoint_is_refused_by_name(tmp_path):
    with pytest.raises(SystemExit, match=r"cannot read .*none\.keras: No such file"):
        train("--resume", tmp_path / "none.keras")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--checkpoint", "none/out.keras"], "there is no folder none"),
        (["--checkpoint", "folder.keras"], r"folder\.keras is a folder"),
        (["--checkpoint", "out.pt"], "ends in .keras"),
        (["--scale", 0], "at least 1 and less than"),
        (["--save-every", 0, "--checkpoint", "out.keras"], "at least 1, got 0"),
        (["--resume"], "name a FILE, or a --checkpoint"),
    ],
)
def test_a_command_that_cannot_work_is_refused_before_training(
    arguments, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("folder.keras").mkdir()
    with pytest.raises(SystemExit):
        train(*arguments)
    printed = capsys.readouterr()
    assert re.search(message, printed.err)
    assert printed.out == ""
