"""The training script: it learns, it resumes as if it had not stopped, and it needs its scaler."""

import contextlib
import importlib.util
import io
import re
import subprocess
import sys
from pathlib import Path

import paddle
import pytest
from paddle.utils import unique_name

SCRIPT = Path(__file__).parents[2] / "examples" / "paddle_digits.py"
COLUMNS = ["step", "loss", "accuracy", "scale", "skipped"]


@pytest.fixture(scope="module")
def script():
    specification = importlib.util.spec_from_file_location("paddle_digits", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def run(script):
    """The rows that the script prints."""

    def run(*arguments):
        # Parameters have the names that they have in a process of their own.
        with unique_name.guard(), contextlib.redirect_stdout(io.StringIO()) as printed:
            script.main([str(argument) for argument in arguments])
        header, *rows = printed.getvalue().splitlines()
        assert header.split() == COLUMNS
        values = ([float(value.rstrip("%")) for value in row.split()] for row in rows)
        return [dict(zip(COLUMNS, row, strict=True)) for row in values]

    return run


def test_it_learns_and_without_scaling_it_does_not(run):
    scaled = run("--steps", 100)[-1]
    unscaled = run("--steps", 100, "--no-scaling")[-1]
    assert (unscaled["step"], unscaled["scale"], unscaled["skipped"]) == (100, 1.0, 0)
    assert unscaled["accuracy"] < 20.0 < 50.0 < scaled["accuracy"]


def test_a_resumed_run_ends_with_the_same_bits(run, script, tmp_path, monkeypatch, exact):
    growing = script.GradScaler
    monkeypatch.setattr(  # so soon that both halves skip steps, too
        script, "GradScaler", lambda enable, incr_every_n_steps: growing(incr_every_n_steps=2)
    )
    whole, half, resumed = (tmp_path / name for name in ("whole", "half", "resumed"))
    rows = run("--steps", 60, "--checkpoint", whole)
    middle = run("--steps", 31, "--checkpoint", half)[-1]
    paddle.seed(1)
    assert run("--steps", 60, "--resume", half, "--checkpoint", resumed)[-1] == rows[-1]
    assert 0 < middle["skipped"] < rows[-1]["skipped"]
    contents = [paddle.load(str(path)) for path in (whole, resumed, half)]
    for each in contents:
        each["rng"] = [re.sub(r"0x\w+", "address", str(state)) for state in each["rng"]]
    assert exact(contents[0]) == exact(contents[1]) != exact(contents[2])


def test_it_runs_as_a_script(tmp_path):
    path = tmp_path / "out.pdckpt"
    command = [sys.executable, SCRIPT, "--steps", "2", "--checkpoint", path]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1].split()[0] == "2"
    assert path.exists()


@pytest.mark.parametrize("content", [None, b"", b"no checkpoint"], ids=["none", "empty", "other"])
def test_a_checkpoint_that_cannot_be_read_is_named(script, tmp_path, content):
    path = tmp_path / "half.pdckpt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SystemExit, match=r"half\.pdckpt"):
        script.main(["--resume", str(path)])


def test_a_checkpoint_without_a_part_is_refused_by_name(run, script, tmp_path):
    path = tmp_path / "half.pdckpt"
    run("--steps", 1, "--checkpoint", path)
    checkpoint = paddle.load(str(path))
    del checkpoint["scaler"]
    paddle.save(checkpoint, str(path))
    with pytest.raises(SystemExit, match=r"half\.pdckpt.*scaler"):
        script.main(["--resume", str(path)])


def test_where_no_checkpoint_can_be_saved_is_told_before_training(script, tmp_path, capsys):
    with pytest.raises(SystemExit):
        script.main(["--checkpoint", str(tmp_path / "nowhere" / "half.pdckpt")])
    printed = capsys.readouterr()
    assert "there is no folder" in printed.err
    assert printed.out == ""
