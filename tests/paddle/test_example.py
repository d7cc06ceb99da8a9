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
    contents = [exact(content(path)) for path in (whole, resumed, half)]
    assert contents[0] == contents[1] != contents[2]


def test_a_run_killed_in_a_save_goes_on_from_the_one_before(
    run, tmp_path, exact, killed_in_its_second_save
):
    path, first, whole = (tmp_path / f"{name}.pdckpt" for name in ("run", "first", "whole"))
    command = ("--steps", 6, "--save-every", 2, "--checkpoint", path, "--resume")
    killed_in_its_second_save(SCRIPT, *command)
    run("--steps", 2, "--checkpoint", first)
    assert exact(content(path)) == exact(content(first))
    run(*command)
    run("--steps", 6, "--checkpoint", whole)
    assert exact(content(path)) == exact(content(whole))
    assert set(tmp_path.iterdir()) == {path, first, whole}


def content(path):
    """A checkpoint, without the addresses of the random generators."""
    checkpoint = paddle.load(str(path))
    checkpoint["rng"] = [re.sub(r"0x\w+", "address", str(state)) for state in checkpoint["rng"]]
    return checkpoint


def test_it_runs_as_a_script(tmp_path):
    path = tmp_path / "out.pdckpt"
    command = [sys.executable, SCRIPT, "--steps", "2", "--checkpoint", path]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1].split()[0] == "2"
    assert path.exists()


def test_resume_without_a_file_reads_the_checkpoint(script, tmp_path):
    path = tmp_path / "run.pdckpt"
    path.write_bytes(b"no checkpoint")
    with pytest.raises(SystemExit, match=r"run\.pdckpt is missing, damaged"):
        script.main(["--checkpoint", str(path), "--resume"])


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--checkpoint", "none/out.pdckpt"], "there is no folder none"),
        (["--checkpoint", "folder.pdckpt"], r"folder\.pdckpt is a folder"),
        (["--save-every", 0, "--checkpoint", "out.pdckpt"], "at least 1, got 0"),
        (["--resume"], "name a FILE, or a --checkpoint"),
    ],
)
def test_a_command_that_cannot_work_is_refused_before_training(
    script, arguments, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("folder.pdckpt").mkdir()
    with pytest.raises(SystemExit):
        script.main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    assert re.search(message, printed.err)
    assert printed.out == ""
