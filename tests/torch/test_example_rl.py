"""The mechanism of the reinforcement learning example, on other seeds than its page's."""

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.support import programs

SCRIPT = Path(__file__).parents[2] / "examples" / "torch_rl.py"
spec = importlib.util.spec_from_file_location("torch_rl", SCRIPT)
torch_rl = importlib.util.module_from_spec(spec)
spec.loader.exec_module(torch_rl)

pytestmark = pytest.mark.usefixtures("own_random_numbers_and_one_thread")


@pytest.mark.parametrize("seed", [11, 12, 13])
@pytest.mark.some(1, "a fault moves the paths of each seed")
def test_the_paths_differ_at_least_four_times_less_in_fp16_than_in_bf16(seed):
    fp16, bf16 = (
        list(torch_rl.train(dtype, steps=8, seed=seed)) for dtype in (torch.float16, torch.bfloat16)
    )
    for name, factor in (("difference", 4), ("kl", 16)):
        small, large = (sum(getattr(step, name) for step in steps) for steps in (fp16, bf16))
        assert 0 < factor * small < large


def test_the_paths_are_the_same_but_for_rounding():
    policy = torch_rl.Policy().double()
    prompts = torch.randint(torch_rl.DIGITS, (256, torch_rl.LENGTH))
    answers, sampled = torch_rl.sample(policy, prompts, torch.float64)
    logits = policy(torch.cat([prompts, answers], 1))[:, torch_rl.LENGTH - 1 : -1]
    difference, kl = torch_rl.mismatch(logits, sampled, answers)
    assert difference < 1e-14
    assert abs(kl) < 1e-14


def test_the_mismatch_is_that_of_the_two_distributions():
    logits = torch.tensor([[[0.75, 0.25]]]).log()
    sampled = torch.tensor([[[0.5, 0.5]]]).log()
    difference, kl = torch_rl.mismatch(logits, sampled, torch.tensor([[1]]))
    assert difference == pytest.approx(0.6931472)  # log 2
    assert kl == pytest.approx(0.1438410)  # 0.5 log(4/3)


def test_advantages_are_rewards_less_their_mean_over_their_std():
    advantages, useful = torch_rl.advantages_of(torch.tensor([[0.0, 0.0, 1.0, 1.0]]))
    torch.testing.assert_close(advantages, torch.tensor([[-1.0, -1.0, 1.0, 1.0]]) * 0.75**0.5)
    assert useful.tolist() == [True]


def test_a_group_of_equal_rewards_has_no_advantage_even_if_their_mean_is_rounded():
    rewards = torch.full((1, 7), 0.1)
    assert rewards.std(1) > 0
    advantages, useful = torch_rl.advantages_of(rewards)
    assert not advantages.any()
    assert useful.tolist() == [False]


def test_answers_of_zero_advantage_get_no_gradient():
    logits = torch.randn(4, torch_rl.LENGTH, torch_rl.DIGITS, requires_grad=True)
    answers = torch.randint(torch_rl.DIGITS, (4, torch_rl.LENGTH))
    advantages, _ = torch_rl.advantages_of(torch.tensor([[1.0, 1.0], [0.0, 1.0]]))
    torch_rl.loss_of(logits, logits.detach(), answers, advantages.flatten()).backward()
    assert not logits.grad[:2].any()
    assert all(answer.any() for answer in logits.grad[2:])


def test_a_batch_without_a_useful_group_takes_no_step_and_leaves_the_scale(monkeypatch):
    advantages_of = torch_rl.advantages_of
    monkeypatch.setattr(torch_rl, "advantages_of", lambda rewards: advantages_of(0 * rewards))
    updates = []
    monkeypatch.setattr(torch_rl.GradScaler, "update", lambda scaler: updates.append(scaler))
    steps = list(torch_rl.train(torch.float16, steps=12, seed=11))  # beyond the growth interval
    assert {step[3:] for step in steps} == {(1.0, 2.0**16, False)}
    assert not updates


@pytest.mark.rare("each of its parts is tested above, and skips are tested in tests/eager")
def test_it_learns_while_the_scale_falls_and_recovers():
    steps = list(torch_rl.train(torch.float16, steps=60, seed=14))
    early, late = steps[:10], steps[-10:]
    assert sum(step.reward for step in late) > 3 * sum(step.reward for step in early)
    scales = [step.scale for step in steps]
    fall = next(i for i, step in enumerate(steps) if step.skipped)
    assert scales[fall + 1] == scales[fall] / 2
    assert max(scales[fall + 1 :]) >= scales[fall]
    assert any(0 < step.zero_groups < 1 for step in steps)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.some(1, "the tests above train with both")
def test_it_runs_as_a_script(dtype, tmp_path):
    command = [SCRIPT, "--dtype", dtype, "--steps", "3", "--every", "2", "--seed", "11"]
    result = programs.run(*command, cwd=tmp_path, is_strict=True)
    assert (result.returncode, result.stderr) == (0, "")
    header, *rows = result.stdout.splitlines()
    assert [row.split()[0] for row in rows] == ["2", "all"]
    assert header.split()[-1] == "skipped"
    assert {row.split()[5] for row in rows} == {"65536" if dtype == "float16" else "1"}


@pytest.mark.parametrize("option", ["--steps", "--every"])
def test_a_number_of_steps_below_one_is_refused(option, capsys):
    with pytest.raises(SystemExit):
        torch_rl.main([option, "0"])
    assert "--steps and --every must be at least 1" in capsys.readouterr().err
