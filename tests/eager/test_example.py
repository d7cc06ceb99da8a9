"""The training script: it learns, it resumes as if it had not stopped, and it needs its scaler."""

import contextlib
import importlib.util
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
from libraries import library

SCRIPT = Path(__file__).parents[2] / "examples" / f"{library.name}_digits.py"
COLUMNS = ["step", "loss", "accuracy", "scale", "skipped"]
SUFFIX = ".pdckpt" if library.name == "paddle" else ".pt"
own_names = contextlib.nullcontext
if library.name == "paddle":  # parameters have the names that they have in a process of their own
    own_names = library.framework.utils.unique_name.guard
if library.name == "torch":
    pytestmark = pytest.mark.usefixtures("own_random_numbers_and_one_thread")


@pytest.fixture(scope="module")
def script():
    specification = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def run(script):
    """Run the script; the rows that it prints."""

    def run(*arguments):
        with own_names(), contextlib.redirect_stdout(io.StringIO()) as printed:
            script.main([str(argument) for argument in arguments])
        header, *rows = printed.getvalue().splitlines()
        assert header.split() == COLUMNS
        values = ([float(value.rstrip("%")) for value in row.split()] for row in rows)
        return [dict(zip(COLUMNS, row, strict=True)) for row in values]

    return run


@pytest.fixture
def soon_growing(script, monkeypatch):
    """The script's scaler grows so soon that it skips steps all along."""
    soon = {library.spelling["growth_interval"]: 2}
    monkeypatch.setattr(
        script, "GradScaler", lambda *args, **given: library.GradScaler(*args, **{**given, **soon})
    )


def content(path):
    """A checkpoint to the bit, without the addresses of Paddle's random generators."""
    return re.sub(r"0x\w+", "address", str(library.exact(library.framework.load(str(path)))))


def test_it_learns_only_with_loss_scaling(run):
    scaled, unscaled = (run("--steps", 200, *more)[-1] for more in ((), ("--no-scaling",)))
    assert (unscaled["step"], unscaled["scale"], unscaled["skipped"]) == (200, 1.0, 0)
    assert unscaled["accuracy"] < 20.0 < 80.0 < scaled["accuracy"]  # chance is 10


def test_a_resumed_run_ends_with_the_bits_of_an_uninterrupted_one(run, soon_growing, tmp_path):
    whole, half, resumed = (tmp_path / f"{name}{SUFFIX}" for name in ("whole", "half", "resumed"))
    end = run("--steps", 60, "--checkpoint", whole)[-1]
    middle = run("--steps", 31, "--checkpoint", half)[-1]
    assert run("--steps", 60, "--resume", half, "--checkpoint", resumed)[-1] == end
    assert 0 < middle["skipped"] < end["skipped"]
    assert content(resumed) == content(whole) != content(half)


def test_a_schedule_counts_the_steps_that_were_not_skipped(run, soon_growing, tmp_path):
    path = tmp_path / f"run{SUFFIX}"
    skipped = run("--steps", 60, "--checkpoint", path)[-1]["skipped"]
    checkpoint = library.framework.load(str(path))
    schedule = checkpoint.get("scheduler") or checkpoint["optimizer"]["LR_Scheduler"]
    assert schedule["last_epoch"] == 60 - skipped < 60


def test_a_run_killed_in_a_save_goes_on_from_the_one_before(
    run, tmp_path, killed_in_its_second_save
):
    path, first, whole = (tmp_path / f"{name}{SUFFIX}" for name in ("run", "first", "whole"))
    command = ("--steps", 6, "--save-every", 2, "--checkpoint", path, "--resume")
    killed_in_its_second_save(SCRIPT, *command)
    run("--steps", 2, "--checkpoint", first)
    assert content(path) == content(first)
    run(*command)
    run("--steps", 6, "--checkpoint", whole)
    assert content(path) == content(whole)
    assert set(tmp_path.iterdir()) == {path, first, whole}


def test_it_runs_as_a_script(tmp_path):
    path = tmp_path / f"out{SUFFIX}"
    warnings = "default" if library.name == "paddle" else "error"  # Paddle's import may warn
    command = [sys.executable, "-W", warnings, SCRIPT, "--steps", "2", "--checkpoint", path.name]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert warnings == "default" or result.stderr == ""
    assert result.stdout.splitlines()[-1].split()[0] == "2"
    assert path.exists()


def write_half_of_one(run, path):
    run("--steps", 1, "--checkpoint", path)
    path.write_bytes(path.read_bytes()[:5000])


def write_one_without_a_scaler(run, path):
    run("--steps", 1, "--checkpoint", path)
    checkpoint = library.framework.load(str(path))
    del checkpoint["scaler"]
    library.framework.save(checkpoint, str(path))


@pytest.mark.parametrize(
    "write",
    [
        lambda run, path: path.write_text("no checkpoint"),
        lambda run, path: path.write_bytes(b""),
        write_half_of_one,
        write_one_without_a_scaler,
    ],
    ids=["junk", "empty", "half", "without a scaler"],
)
def test_a_damaged_checkpoint_is_refused_by_name(run, tmp_path, write):
    path = tmp_path / f"broken{SUFFIX}"
    write(run, path)
    for resume in (["--resume", path], ["--checkpoint", path, "--resume"]):
        with pytest.raises(
            SystemExit, match=f"{re.escape(path.name)} is (missing, )?damaged, or no"
        ):
            run("--steps", 2, *resume)


def test_a_missing_checkpoint_is_refused_by_name(run, tmp_path):
    path = tmp_path / f"none{SUFFIX}"
    with pytest.raises(SystemExit, match=f"{re.escape(path.name)}(: .*No such file| is missing)"):
        run("--steps", 2, "--resume", path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--checkpoint", f"none/out{SUFFIX}"], "there is no folder none"),
        (["--checkpoint", f"folder{SUFFIX}"], f"folder{re.escape(SUFFIX)} is a folder"),
        (["--save-every", "0", "--checkpoint", f"out{SUFFIX}"], "at least 1, got 0"),
        (["--resume"], "name a FILE, or a --checkpoint"),
        *([(["--checkpoint", "out"], "ends in .pt")] if library.name == "tensorplay" else []),
    ],
)
def test_a_command_that_cannot_work_is_refused_before_training(
    script, arguments, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path(f"folder{SUFFIX}").mkdir()
    with pytest.raises(SystemExit):
        script.main(arguments)
    printed = capsys.readouterr()
    assert re.search(message, printed.err)
    assert printed.out == ""
