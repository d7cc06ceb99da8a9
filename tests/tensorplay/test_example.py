"""The training script: it learns, it resumes as if it had not stopped, and it needs its scaler."""

import contextlib
import importlib.util
import io
import re
from pathlib import Path

import pytest
import tensorplay as tp

SCRIPT = Path(__file__).parents[2] / "examples" / "tensorplay_digits.py"
STEPS = 240  # the first skips, at about 200, come before the end
COLUMNS = ["step", "loss", "accuracy", "scale", "skipped"]


@pytest.fixture(scope="module")
def main():
    specification = importlib.util.spec_from_file_location("tensorplay_digits", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module.main


@pytest.fixture(scope="module")
def run(main):
    """The rows that the script prints."""

    def run(*arguments):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            main([str(argument) for argument in arguments])
        header, *rows = printed.getvalue().splitlines()
        assert header.split() == COLUMNS
        values = ([float(value.rstrip("%")) for value in row.split()] for row in rows)
        return [dict(zip(COLUMNS, row, strict=True)) for row in values]

    return run


@pytest.fixture(scope="module")
def whole(run, tmp_path_factory):
    """A run without a stop: what it printed, and its checkpoint."""
    checkpoint = tmp_path_factory.mktemp("digits") / "whole.pt"
    return run("--steps", STEPS, "--checkpoint", checkpoint), checkpoint


def test_it_learns(whole):
    assert whole[0][-1]["accuracy"] > 85.0


def test_it_skips_some_steps(whole):
    """So that what is resumed and compared includes skips."""
    assert whole[0][-1]["skipped"] > 0


def test_a_resumed_run_ends_with_the_same_bits(run, whole, tmp_path, exact):
    half, resumed = tmp_path / "half.pt", tmp_path / "resumed.pt"
    run("--steps", STEPS // 2, "--checkpoint", half)
    rows = run("--steps", STEPS, "--resume", half, "--checkpoint", resumed)
    assert rows[-1] == whole[0][-1]
    assert exact(tp.load(resumed)) == exact(tp.load(whole[1]))


def test_a_run_killed_in_a_save_goes_on_from_the_one_before(
    run, tmp_path, exact, killed_in_its_second_save
):
    path, first, whole = (tmp_path / f"{name}.pt" for name in ("run", "first", "whole"))
    command = ("--steps", 6, "--save-every", 2, "--checkpoint", path, "--resume")
    killed_in_its_second_save(SCRIPT, *command)
    run("--steps", 2, "--checkpoint", first)
    assert exact(tp.load(path)) == exact(tp.load(first))
    run(*command)
    run("--steps", 6, "--checkpoint", whole)
    assert exact(tp.load(path)) == exact(tp.load(whole))
    assert set(tmp_path.iterdir()) == {path, first, whole}


def test_without_scaling_it_learns_next_to_nothing(run, whole):
    scaled = next(row for row in whole[0] if row["step"] == 100)
    unscaled = run("--steps", 100, "--no-scaling")[-1]
    assert (unscaled["step"], unscaled["scale"], unscaled["skipped"]) == (100, 1.0, 0)
    assert unscaled["accuracy"] < 30.0 < 60.0 < scaled["accuracy"]


def test_resume_without_a_file_reads_the_checkpoint(main, tmp_path):
    path = tmp_path / "run.pt"
    path.write_bytes(b"no checkpoint")
    with pytest.raises(SystemExit, match=r"run\.pt is damaged"):
        main(["--checkpoint", str(path), "--resume"])


@pytest.mark.parametrize("content", [None, b"", b"no checkpoint"], ids=["none", "empty", "other"])
def test_a_checkpoint_that_cannot_be_read_is_named(main, tmp_path, content):
    path = tmp_path / "half.pt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SystemExit, match=r"half\.pt"):
        main(["--resume", str(path)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--checkpoint", "none/out.pt"], "there is no folder none"),
        (["--checkpoint", "folder.pt"], r"folder\.pt is a folder"),
        (["--checkpoint", "out"], "ends in .pt"),
        (["--save-every", 0, "--checkpoint", "out.pt"], "at least 1, got 0"),
        (["--resume"], "name a FILE, or a --checkpoint"),
    ],
)
def test_a_command_that_cannot_work_is_refused_before_training(
    main, arguments, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("folder.pt").mkdir()
    with pytest.raises(SystemExit):
        main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    assert re.search(message, printed.err)
    assert printed.out == ""
