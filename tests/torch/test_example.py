import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "examples" / "torch_digits.py"
spec = importlib.util.spec_from_file_location("torch_digits", SCRIPT)
torch_digits = importlib.util.module_from_spec(spec)
spec.loader.exec_module(torch_digits)


pytestmark = pytest.mark.usefixtures("own_random_numbers_and_one_thread")


def train(*arguments):
    torch_digits.main([str(argument) for argument in arguments])


def same_bits(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_bits(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same_bits, a, b))
    return type(a) is type(b) and a == b


def test_a_resumed_run_ends_with_the_bits_of_an_uninterrupted_one(tmp_path, monkeypatch):
    growing = torch_digits.GradScaler
    monkeypatch.setattr(  # so soon that both halves skip steps, too
        torch_digits, "GradScaler", lambda growth_interval: growing(growth_interval=3)
    )
    train("--steps", 60, "--checkpoint", tmp_path / "whole.pt")
    train("--steps", 31, "--checkpoint", tmp_path / "half.pt")
    torch.manual_seed(1)
    train("--steps", 60, "--resume", tmp_path / "half.pt", "--checkpoint", tmp_path / "resumed.pt")
    whole, half, resumed = (
        torch.load(tmp_path / f"{name}.pt") for name in ("whole", "half", "resumed")
    )
    assert 0 < half["skipped"] < whole["skipped"]
    assert whole["scheduler"]["last_epoch"] == 60 - whole["skipped"]
    assert not same_bits(half["model"], whole["model"])
    for part in whole:
        assert same_bits(whole[part], resumed[part]), part
    assert whole.keys() == resumed.keys()


def test_it_learns(capsys):
    train("--steps", 400)
    accuracies = re.findall(r"([\d.]+)%", capsys.readouterr().out)
    assert float(accuracies[-1]) > 30  # chance is 10


def test_it_runs_as_a_script(tmp_path):
    result = subprocess.run(
        [sys.executable, "-W", "error", SCRIPT, "--steps", "2", "--checkpoint", "out.pt"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stderr == ""
    assert result.stdout.splitlines()[-1].split()[0] == "2"
    assert (tmp_path / "out.pt").exists()


def write_junk(path):
    path.write_text("no checkpoint")


def write_nothing(path):
    path.write_bytes(b"")


def write_half_of_one(path):
    train("--steps", 1, "--checkpoint", path)
    path.write_bytes(path.read_bytes()[:5000])


def write_one_without_a_scaler(path):
    train("--steps", 1, "--checkpoint", path)
    checkpoint = torch.load(path)
    del checkpoint["scaler"]
    torch.save(checkpoint, path)


@pytest.mark.parametrize(
    "write", [write_junk, write_nothing, write_half_of_one, write_one_without_a_scaler]
)
def test_a_damaged_checkpoint_is_refused_by_name(tmp_path, write):
    path = tmp_path / "broken.pt"
    write(path)
    with pytest.raises(SystemExit, match=r"broken\.pt is damaged, or no checkpoint of this script"):
        train("--steps", 2, "--resume", path)


def test_a_missing_checkpoint_is_refused_by_name(tmp_path):
    with pytest.raises(SystemExit, match=r"cannot read .*none\.pt: No such file"):
        train("--steps", 2, "--resume", tmp_path / "none.pt")


def test_a_place_that_cannot_be_written_to_is_refused_before_training(tmp_path, capsys):
    with pytest.raises(SystemExit):
        train("--steps", 10**9, "--checkpoint", tmp_path / "none" / "out.pt")
    assert "there is no folder" in capsys.readouterr().err
