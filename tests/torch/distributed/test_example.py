"""The training script for FSDP2: it learns, and resumes on any number of processes."""

import contextlib
import importlib.util
import io
import re
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from gradscaler.torch import GradScaler
from tests.support.ranks import output_of

SCRIPT = Path(__file__).parents[3] / "examples" / "torch_fsdp2.py"
COLUMNS = ["step", "loss", "accuracy", "scale", "skipped"]


def script():
    specification = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def train(skipping, *arguments):
    """The output of a run, or the message that it exits with."""
    module = script()
    if skipping:
        module.GradScaler = lambda: GradScaler(init_scale=2.0**26, growth_interval=2)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            module.main([str(argument) for argument in arguments])
        except SystemExit as error:
            return str(error)
    return printed.getvalue()


def run(ranks, world, steps, *arguments, skipping=True):
    """The last row that the first process prints; the others print nothing."""
    first, *others = ranks(world).run(train, skipping, "--steps", steps, *arguments)
    assert others == [""] * (world - 1)
    return row(first)


def row(printed):
    header, *rows = printed.splitlines()
    assert header.split() == COLUMNS
    values = [float(value.rstrip("%")) for value in rows[-1].split()]
    return dict(zip(COLUMNS, values, strict=True))


def content(folder):
    """A checkpoint of the only step in a folder, by name, as one process holds it."""
    (step,) = folder.iterdir()
    whole = folder.with_suffix(".whole")
    dcp_to_torch_save(step, whole)
    checkpoint = torch.load(whole)
    state = checkpoint["optimizer"]["state"]
    tensors = {**checkpoint["model"], "rng": checkpoint["rng"]}
    tensors |= {f"{n}.{key}": t for n, each in state.items() for key, t in each.items()}
    return tensors, {name: checkpoint[name] for name in ("scaler", "step", "skipped")}


@pytest.mark.rare("the example of one process in tests/examples learns with loss scaling only, too")
def test_two_processes_learn_only_with_loss_scaling(ranks):
    scaled = run(ranks, 2, 100, skipping=False)
    unscaled = run(ranks, 2, 50, "--no-scaling", skipping=False)
    assert unscaled["accuracy"] < 20.0  # chance is 10
    assert scaled["accuracy"] > 75.0
    assert (unscaled["scale"], unscaled["skipped"]) == (1.0, 0)


def test_a_resumed_run_ends_with_the_bits_of_an_uninterrupted_one(ranks, tmp_path):
    whole, half, resumed = (tmp_path / name for name in ("whole", "half", "resumed"))
    end = run(ranks, 2, 16, "--checkpoint", whole)
    middle = run(ranks, 2, 11, "--checkpoint", half)
    assert run(ranks, 2, 16, "--resume", half, "--checkpoint", resumed) == end
    assert 0 < middle["skipped"] < end["skipped"]
    (tensors, numbers), (expected, expected_numbers) = content(resumed), content(whole)
    assert numbers == expected_numbers
    assert all(torch.equal(tensors[name], expected[name]) for name in tensors.keys() | expected)


def test_other_numbers_of_processes_take_the_same_next_step(ranks, tmp_path):
    half, *ends = (tmp_path / name for name in ("half", "two", "three", "one"))
    run(ranks, 2, 11, "--checkpoint", half)
    for world, end in zip((2, 3, 1), ends, strict=True):
        run(ranks, world, 12, "--resume", half, "--checkpoint", end)
    (expected, expected_numbers), *others = map(content, ends)
    for tensors, numbers in others:
        assert numbers == expected_numbers
        for name in tensors.keys() | expected:
            # Each process rounds the gradient of its part of the batch to float16.
            torch.testing.assert_close(tensors[name], expected[name], rtol=1e-2, atol=1e-4)


@pytest.mark.rare("the other tests of this file train, save and resume it in ranks of their own")
def test_it_runs_by_torchrun_and_goes_on_with_three_processes_and_one(ranks, tmp_path):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, SCRIPT, "--steps", "2", "--checkpoint", "run"]
    assert row(output_of(*command, cwd=tmp_path))["step"] == 2
    path = tmp_path / "run"
    for world, steps in ((3, 3), (1, 4)):
        assert run(ranks, world, steps, "--checkpoint", path, "--resume")["step"] == steps
        assert [each.name for each in path.iterdir()] == [f"step-{steps}"]


def test_a_save_that_was_not_completed_does_not_count(ranks, tmp_path):
    path = tmp_path / "run"
    run(ranks, 2, 2, "--checkpoint", path)
    shutil.copytree(path / "step-2", path / "step-10", ignore=lambda *_: {".metadata"})
    assert run(ranks, 2, 3, "--checkpoint", path, "--resume")["step"] == 3
    assert [each.name for each in path.iterdir()] == ["step-3"]


def truncate(step):
    for file in step.glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:99])


@pytest.mark.parametrize(
    "damage", [truncate, lambda step: (step / ".metadata").write_bytes(b"none")]
)
def test_a_damaged_checkpoint_is_refused_by_name(ranks, tmp_path, damage):
    path = tmp_path / "broken"
    run(ranks, 2, 1, "--checkpoint", path)
    damage(path / "step-1")
    messages = ranks(2).run(train, True, "--steps", 2, "--resume", path)
    assert all("step-1 is damaged, or not a checkpoint" in message for message in messages)


def test_a_missing_checkpoint_is_refused_by_name(ranks, tmp_path):
    messages = ranks(2).run(train, True, "--resume", tmp_path / "none")
    assert all("there is no checkpoint in " in message for message in messages)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--checkpoint", __file__], "is a file"),
        (["--save-every", "0", "--checkpoint", "run"], "at least 1, got 0"),
        (["--resume"], "name a FOLDER, or a --checkpoint"),
    ],
)
def test_a_command_that_cannot_work_is_refused_before_training(arguments, message, capsys):
    with pytest.raises(SystemExit):
        script().main(arguments)
    printed = capsys.readouterr()
    assert re.search(message, printed.err)
    assert printed.out == ""
