"""The demo command, through the entry point that a user calls."""

import re

import numpy as np
import pytest
import torch
from sklearn.datasets import load_sample_images

from gradscaler.__main__ import main
from gradscaler.demo import _training
from gradscaler.diagnose import read_run


@pytest.fixture(scope="module")
def photographs():
    return _training.Photographs.load("cpu")


def train(photographs, mode, seed=0, steps=3):
    return _training.train(mode, photographs, seed, steps, lambda loss: None)


@pytest.mark.rare("the example in tests/examples learns with loss scaling only, too")
@pytest.mark.usefixtures("own_random_numbers_and_one_thread")
def test_fp16_flushes_gradients_and_learns_nothing_and_with_gradscaler_as_much_as_fp32(photographs):
    fp32, fp16, scaled = (train(photographs, mode, steps=150) for mode in _training.MODES)
    assert fp32.explained > 0.7
    assert fp16.explained < fp32.explained - 0.2
    assert abs(scaled.explained - fp32.explained) < 0.015
    assert scaled.skipped > 0  # the scale found its limit
    assert fp16.flushed_share > 0.3
    assert scaled.flushed_share < 0.01


class Restoring(torch.nn.Module):
    """Restores patches by a function, and has a parameter without effect, to train."""

    def __init__(self, function):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.function = function

    def forward(self, patches):
        return self.function(patches) + 0 * self.weight


def test_a_short_demo_prints_the_table_and_writes_a_png_and_a_report(tmp_path, capsys):
    output = tmp_path / "out.png"
    arguments = ["--threads", "1", "2", "--steps", "3", "--device", "cpu"]
    for seeds in ("2", "1"):  # each begins a new run
        assert main(["demo", *arguments, "--seeds", seeds, "--output", str(output)]) == 0
    assert output.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    printed = capsys.readouterr().out
    assert all(mode in printed for mode in _training.MODES)
    rows = re.findall(r"│ +(\d) │ +(\d) │ +-?\d", printed)
    assert rows == [("0", "1"), ("1", "1"), ("0", "2"), ("1", "2"), ("0", "1"), ("0", "2")]
    recorded = read_run(tmp_path / "out.jsonl")
    assert recorded.num_steps == 3
    assert {sample.step for sample in recorded.samples} == {1, 2, 3}
    assert "Nothing unusual" in (tmp_path / "out.html").read_text(encoding="utf-8")
    assert all(path.name in printed for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--steps", "0"], "--steps"),
        (["--steps", "many"], "whole number"),
        (["--seed", "x"], "--seed"),
        (["--seeds", "0"], "--seeds"),
        (["--threads", "0"], "--threads"),
        (["--threads", "100000"], "at most 256"),
        (["--seed", "99999999999999999999"], "2**32"),
        (["--seed", "-1"], "2**32"),
        (["--output", "nowhere/out.png"], "no folder"),
        (["--output", "out.txt"], ".png"),
        (["--device", "abacus"], "abacus"),
        (["--fast"], "--fast"),
    ],
)
def test_a_bad_argument_is_named_with_exit_status_2(arguments, complaint, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["demo", *arguments])
    assert stopped.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for CUDA where there is none")
def test_cuda_without_cuda_is_refused_with_exit_status_2(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["demo", "--device", "cuda"])
    assert stopped.value.code == 2
    assert "CUDA" in capsys.readouterr().err


def test_checking_the_output_leaves_no_file_behind(tmp_path):
    output = tmp_path / "out.png"
    with pytest.raises(SystemExit):
        main(["demo", "--output", str(output), "--steps", "0"])
    assert not output.exists()


def test_a_file_that_holds_no_run_is_not_replaced(tmp_path, capsys):
    precious = tmp_path / "out.jsonl"
    precious.write_text('{"mine": 1}\n')
    with pytest.raises(SystemExit) as stopped:
        main(["demo", "--output", str(tmp_path / "out.png"), "--steps", "1"])
    assert stopped.value.code == 2
    assert "out.jsonl" in capsys.readouterr().err
    assert precious.read_text() == '{"mine": 1}\n'
    assert list(tmp_path.iterdir()) == [precious]


def test_ctrl_c_ends_with_exit_status_130(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("gradscaler.demo.run", interrupted)
    assert main(["demo", "--steps", "1"]) == 130


def test_all_runs_start_from_the_same_weights():
    first, second = _training.make_network(3), _training.make_network(3)
    assert all(map(torch.equal, first.parameters(), second.parameters()))


def test_one_seed_gives_one_result_and_another_another(photographs):
    mode = _training.MODES[2]
    runs = [train(photographs, mode, seed).losses for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_measuring_changes_nothing_in_the_training(photographs, monkeypatch):
    measured = train(photographs, _training.MODES[1]).losses
    left_out = []
    monkeypatch.setattr(_training, "_measure", lambda *_: left_out.append(1))
    assert train(photographs, _training.MODES[1]).losses == measured
    assert left_out


def test_the_held_out_square_is_a_part_of_the_photograph_and_not_trained_on(photographs):
    image = load_sample_images().images[0] / 255
    square = _training.picture(photographs.held_out.numpy())
    assert np.allclose(square, image[96:256, 224:384], atol=1e-7)
    patches = sum(
        photo.shape[0] // 4 * (photo.shape[1] // 4) for photo in load_sample_images().images
    )
    assert len(photographs.patches) == patches - len(photographs.held_out)


def test_explained_is_1_for_a_perfect_copy_and_0_for_the_mean_patch(photographs, monkeypatch):
    mean = photographs.patches.mean(dim=0)
    for restore, explained in ((lambda x: x, 1.0), (lambda x: x * 0 + mean, 0.0)):
        monkeypatch.setattr(_training, "make_network", lambda _, f=restore: Restoring(f))
        monkeypatch.setattr(_training, "_measure", lambda *_: None)
        assert train(photographs, _training.MODES[0]).explained == pytest.approx(
            explained, abs=1e-6
        )


def test_the_flushed_share_counts_what_fp16_cannot_hold():
    true = torch.tensor([2.0**-26, -(2.0**-30), 2.0**-20, 1.0, 0.0])
    assert _training.flushed_share(true, true.half().float()) == 0.5
    assert _training.flushed_share(torch.zeros(2), torch.zeros(2)) == 0.0
