import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from flax import serialization

from gradscaler import DynamicScale
from gradscaler.jax import GradScaler, loss_scaled

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where a dataclass looks for itself
    spec.loader.exec_module(module)
    return module


jax_digits = load("jax_digits")


def train(*arguments):
    jax_digits.main([str(argument) for argument in arguments])


def test_a_resumed_run_ends_with_the_bits_of_an_uninterrupted_one(tmp_path, monkeypatch):
    monkeypatch.setattr(  # so soon that both halves skip steps, too
        jax_digits, "DynamicScale", lambda growth_interval: DynamicScale(growth_interval=2)
    )
    whole, half, resumed = (tmp_path / name for name in ("whole", "half", "resumed"))
    train("--steps", 60, "--checkpoint", whole)
    train("--steps", 41, "--checkpoint", half)
    train("--steps", 60, "--resume", half, "--checkpoint", resumed)
    assert resumed.read_bytes() == whole.read_bytes()
    skipped = [serialization.msgpack_restore(f.read_bytes())["skipped"] for f in (half, whole)]
    assert 0 < skipped[0] < skipped[1]


def test_a_run_killed_in_a_save_goes_on_from_the_one_before(tmp_path, killed_in_its_second_save):
    run, first, whole = (tmp_path / name for name in ("run.msgpack", "first", "whole"))
    command = ("--steps", 6, "--save-every", 2, "--checkpoint", run, "--resume")
    killed_in_its_second_save(jax_digits.__file__, *command)
    train("--steps", 2, "--checkpoint", first)
    assert run.read_bytes() == first.read_bytes()
    train(*command)
    train("--steps", 6, "--checkpoint", whole)
    assert run.read_bytes() == whole.read_bytes()
    assert set(tmp_path.iterdir()) == {run, first, whole}


@pytest.mark.parametrize(("option", "low", "high"), [(None, 80, 100), ("--no-scaling", 0, 20)])
def test_it_learns_only_with_loss_scaling(option, low, high, capsys):
    train("--steps", 200, *filter(None, [option]))
    accuracies = re.findall(r"([\d.]+)%", capsys.readouterr().out)
    assert low <= float(accuracies[-1]) <= high  # chance is 10


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[:999], lambda data: b"no"])
def test_a_damaged_checkpoint_is_named_and_not_used(damage, tmp_path):
    checkpoint = tmp_path / "damaged"
    train("--steps", 1, "--checkpoint", checkpoint)
    checkpoint.write_bytes(damage(checkpoint.read_bytes()))
    for resume in (["--resume", checkpoint], ["--checkpoint", checkpoint, "--resume"]):
        with pytest.raises(SystemExit, match="damaged"):
            train(*resume)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--checkpoint", "none/out.msgpack"], "there is no folder none"),
        (["--checkpoint", "folder.msgpack"], r"folder\.msgpack is a folder"),
        (["--save-every", 0, "--checkpoint", "out.msgpack"], "at least 1, got 0"),
        (["--resume"], "name a FILE, or a --checkpoint"),
    ],
)
def test_a_command_that_cannot_work_is_refused_before_training(
    arguments, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("folder.msgpack").mkdir()
    with pytest.raises(SystemExit):
        train(*arguments)
    printed = capsys.readouterr()
    assert re.search(message, printed.err)
    assert printed.out == ""


def test_it_runs_as_a_script(tmp_path):
    command = [sys.executable, "-W", "error", jax_digits.__file__, "--steps", "2"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert result.stderr == ""
    assert result.stdout.splitlines()[-1].split()[0] == "2"


@pytest.mark.parametrize("name", ["jax_linen", "jax_nnx", "jax_equinox"])
def test_the_small_examples_learn_and_skip_what_overflows(name, monkeypatch, capsys):
    module = load(name)
    policy = DynamicScale(init_scale=2.0**30)
    if name == "jax_equinox":
        monkeypatch.setattr(module, "OPTIMIZER", loss_scaled(module.optax.adam(0.01), policy))
    else:
        monkeypatch.setattr(module, "GradScaler", lambda: GradScaler(policy))
    assert module.main(steps=60) < 0.3  # chance is 2.3
    printed = capsys.readouterr().out
    taken_or_skipped = int(re.search(r"(\d+) of 60 steps", printed)[1])
    assert 0 < taken_or_skipped < 60
    assert float(printed.split()[-1]) < 2.0**30
