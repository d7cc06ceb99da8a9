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
        train("--epochs", 14, *way)
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1]
    assert float(re.findall(r"([\d.]+)%", tables[0])[-1]) > 75
    assert any(int(skipped) for skipped in re.findall(r" (\d+)\n", tables[0]))


@WAYS
def test_without_scaling_nothing_is_learnt(way, capsys):
    train("--epochs", 14, "--scale", 1, *way)
    assert float(re.findall(r"([\d.]+)%", capsys.readouterr().out)[-1]) < 20  # chance is 10


@WAYS
def test_a_resumed_run_ends_with_the_bits_of_an_uninterrupted_one(way, tmp_path):
    whole, half, resumed = (tmp_path / f"{name}.ckpt" for name in ("whole", "half", "resumed"))
    train("--epochs", 3, "--checkpoint", whole, *way)
    train("--epochs", 2, "--checkpoint", half, *way)
    train("--epochs", 1, "--resume", half, "--checkpoint", resumed, *way)
    ends = [mindspore.load_checkpoint(str(path)) for path in (whole, resumed)]
    assert list(ends[0]) == list(ends[1])
    for name, parameter in ends[0].items():
        assert parameter.asnumpy().tobytes() == ends[1][name].asnumpy().tobytes(), name


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[:999], lambda data: b"no"])
def test_a_damaged_checkpoint_is_named_and_not_used(damage, tmp_path):
    checkpoint = tmp_path / "damaged.ckpt"
    train("--epochs", 1, "--checkpoint", checkpoint)
    checkpoint.chmod(0o600)  # MindSpore's are read-only
    checkpoint.write_bytes(damage(checkpoint.read_bytes()))
    with pytest.raises(SystemExit, match="damaged"):
        train("--resume", checkpoint)


@pytest.mark.parametrize("name", ["file.pt", "nowhere/file.ckpt"])
def test_a_checkpoint_that_could_not_be_written_is_refused_before_training(name, capsys):
    with pytest.raises(SystemExit):
        train("--checkpoint", name)
    assert "--checkpoint: " in capsys.readouterr().err


def test_it_runs_as_a_script(tmp_path):
    result = subprocess.run(
        [sys.executable, "-W", "error", SCRIPT, "--epochs", "2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.splitlines()[-1].split()[0] == "2"
    assert "Error" not in result.stderr
    assert not list(tmp_path.iterdir())
