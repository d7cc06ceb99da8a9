import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import mindspore
import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "mindspore_digits.py"
specification = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
mindspore_digits = importlib.util.module_from_spec(specification)
sys.modules[SCRIPT.stem] = mindspore_digits  # where MindSpore looks for what it compiles
specification.loader.exec_module(mindspore_digits)

WAYS = pytest.mark.parametrize("way", [[], ["--loop"]], ids=["Model", "loop"])


@pytest.fixture(autouse=True)
def _put_back_the_mode():
    mode = mindspore.get_context("mode")
    yield
    mindspore.set_context(mode=mode)


def train(*arguments):
    mindspore_digits.main([str(argument) for argument in arguments])


def test_model_and_loop_learn_the_same(capsys):
    tables = []
    for way in [[], ["--loop"]]:
        train("--epochs", 70, *way)
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1]
    *_, accuracy, _, steps = tables[0].split()
    assert float(accuracy.rstrip("%")) > 80
    assert 200 < int(steps) < 210  # it skips some


@WAYS
def test_without_scaling_it_learns_nothing(way, capsys):
    train("--epochs", 70, "--scale", 1, *way)
    assert float(re.findall(r"([\d.]+)%", capsys.readouterr().out)[-1]) < 20  # chance is 10


@WAYS
def test_a_resumed_run_ends_with_the_bits_of_an_uninterrupted_one(way, tmp_path):
    whole, half, resumed = (tmp_path / f"{name}.ckpt" for name in ("whole", "half", "resumed"))
    train("--epochs", 3, "--checkpoint", whole, *way)
    train("--epochs", 2, "--checkpoint", half, *way)
    train("--epochs", 3, "--resume", half, "--checkpoint", resumed, *way)
    assert content(resumed) == content(whole) != content(half)


def test_a_run_killed_in_a_save_goes_on_from_the_one_before(tmp_path, killed_in_its_second_save):
    run, first, whole = (tmp_path / f"{name}.ckpt" for name in ("run", "first", "whole"))
    command = ("--epochs", 3, "--save-every", 1, "--checkpoint", run, "--resume")
    killed_in_its_second_save(SCRIPT, *command)
    train("--epochs", 1, "--checkpoint", first)
    assert content(run) == content(first)
    train(*command)
    train("--epochs", 3, "--checkpoint", whole)
    assert content(run) == content(whole)
    assert set(tmp_path.iterdir()) == {run, first, whole}


def content(path):
    """The bits of each parameter in a checkpoint."""
    values = mindspore.load_checkpoint(str(path))
    return {name: value.asnumpy().tobytes() for name, value in values.items()}


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[:999], lambda data: b"no"])
def test_a_damaged_checkpoint_is_named_and_not_used(damage, tmp_path):
    checkpoint = tmp_path / "damaged.ckpt"
    train("--epochs", 1, "--checkpoint", checkpoint)
    checkpoint.chmod(0o600)  # MindSpore's are read-only
    checkpoint.write_bytes(damage(checkpoint.read_bytes()))
    for resume in (["--resume", checkpoint], ["--checkpoint", checkpoint, "--resume"]):
        with pytest.raises(SystemExit, match="damaged"):
            train(*resume)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--checkpoint", "none/out.ckpt"], "there is no folder none"),
        (["--checkpoint", "folder.ckpt"], r"folder\.ckpt is a folder"),
        (["--checkpoint", "out.pt"], "ends in .ckpt"),
        (["--scale", 0], "at least 1 and less than"),
        (["--save-every", 0, "--checkpoint", "out.ckpt"], "at least 1, got 0"),
        (["--resume"], "name a FILE, or a --checkpoint"),
    ],
)
def test_a_command_that_cannot_work_is_refused_before_training(
    arguments, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("folder.ckpt").mkdir()
    with pytest.raises(SystemExit):
        train(*arguments)
    printed = capsys.readouterr()
    assert re.search(message, printed.err)
    assert printed.out == ""


def test_it_runs_as_a_script(tmp_path):
    command = [sys.executable, "-W", "error", SCRIPT, "--epochs", "2"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1].split()[0] == "2"
    assert "Error" not in result.stderr
    assert not list(tmp_path.iterdir())
