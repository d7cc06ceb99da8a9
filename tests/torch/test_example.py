"""The training script, killed again and again, ends as if it had not been."""

import importlib.util
import os
import random
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


def soon_growing(device, growth_interval, enabled):
    """A scaler that skips its first steps, and more later, however slow the machine is."""
    return GradScaler(device, 2.0**30, growth_interval=2, enabled=enabled)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="runs are forked")
@pytest.mark.rare("tests/examples kills this script in a save, and compares its file")
def test_a_run_killed_again_and_again_ends_with_the_bits_of_an_uninterrupted_one(tmp_path):
    from tests.support.eager import library  # not found where this file runs as a script

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
    assert library.exact(run) == library.exact(whole)


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
    """When a file was last written to; None if it does not exist."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


if __name__ == "__main__":
    kill_again_and_again(Path(sys.argv[1]))
