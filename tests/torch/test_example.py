import importlib.util
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from gradscaler.torch import GradScaler

SCRIPT = Path(__file__).parents[2] / "examples" / "torch_digits.py"
spec = importlib.util.spec_from_file_location("torch_digits", SCRIPT)
torch_digits = importlib.util.module_from_spec(spec)
spec.loader.exec_module(torch_digits)

KILLS = 30

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


def soon_growing(device, growth_interval, enabled):
    """A scaler that skips steps soon, so the comparison includes skips."""
    return GradScaler(device, growth_interval=2, enabled=enabled)


def test_a_resumed_run_ends_with_the_bits_of_an_uninterrupted_one(tmp_path, monkeypatch):
    monkeypatch.setattr(torch_digits, "GradScaler", soon_growing)
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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="runs are forked")
def test_a_run_killed_again_and_again_ends_with_the_bits_of_an_uninterrupted_one(tmp_path):
    killing = subprocess.run(
        [sys.executable, __file__, tmp_path],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert killing.returncode == 0, killing.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"run.pt", "whole.pt"}
    run, whole = (torch.load(tmp_path / name) for name in ("run.pt", "whole.pt"))
    assert whole["skipped"] > 0
    assert same_bits(run, whole)


def kill_again_and_again(folder):
    """Kill one run ``KILLS`` times and complete it; then train as long without a stop.

    A test runs this in its own process. A run takes seconds to start, most of them to import
    PyTorch, so this process imports it once and forks each run. It has a single thread: pytest may
    have more, and they do not survive a fork. Every other kill comes when the file of a save
    appears, the others at a random moment after a save. The outcome never depends on the moment.
    """
    torch.set_num_threads(1)
    train("--steps", 1)  # PyTorch imports some modules only when they are used
    torch_digits.GradScaler = soon_growing
    delays = random.Random(0)
    checkpoint, temporary = folder / "run.pt", folder / "run.tmp.pt"
    command = ("--save-every", 1, "--checkpoint", checkpoint, "--resume")
    kills = kills_in_a_save = 0
    while kills < KILLS or kills_in_a_save < KILLS // 3:
        awaited, delay = (temporary, 0) if kills % 2 else (checkpoint, delays.uniform(0, 0.2))
        before = written(awaited), written(temporary)
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # it never outlives the test
            train("--steps", 10**9, *command)
        while written(awaited) in (None, before[0]):
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "the run ended by itself"
            time.sleep(0.0001)
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        kills += 1
        kills_in_a_save += written(temporary) not in (None, before[1])
    steps = torch.load(checkpoint)["step"] + 3
    train("--steps", steps, *command)
    train("--steps", steps, "--checkpoint", folder / "whole.pt")


def written(path):
    """When a file was last written to; None if there is none."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


@pytest.mark.parametrize(("option", "low", "high"), [(None, 80, 100), ("--no-scaling", 0, 20)])
def test_it_learns_only_with_loss_scaling(option, low, high, capsys):
    train("--steps", 200, *filter(None, [option]))
    accuracies = re.findall(r"([\d.]+)%", capsys.readouterr().out)
    assert low <= float(accuracies[-1]) <= high  # chance is 10


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
    for resume in (["--resume", path], ["--checkpoint", path, "--resume"]):
        with pytest.raises(SystemExit, match=r"broken\.pt is damaged, or not a checkpoint of this"):
            train("--steps", 2, *resume)


def test_a_missing_checkpoint_is_refused_by_name(tmp_path):
    with pytest.raises(SystemExit, match=r"cannot read .*none\.pt: No such file"):
        train("--steps", 2, "--resume", tmp_path / "none.pt")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--checkpoint", "none/out.pt"], "there is no folder none"),
        (["--checkpoint", "folder.pt"], r"folder\.pt is a folder"),
        (["--save-every", 0, "--checkpoint", "out.pt"], "at least 1, got 0"),
        (["--resume"], "name a FILE, or a --checkpoint"),
    ],
)
def test_a_command_that_cannot_work_is_refused_before_training(
    arguments, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("folder.pt").mkdir()
    with pytest.raises(SystemExit):
        train(*arguments)
    printed = capsys.readouterr()
    assert re.search(message, printed.err)
    assert printed.out == ""


if __name__ == "__main__":
    kill_again_and_again(Path(sys.argv[1]))
