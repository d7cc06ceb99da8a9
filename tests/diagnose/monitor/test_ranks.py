"""A monitor of one simulated rank: launchers name the rank in the environment."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from gradscaler import DynamicScale
from gradscaler.diagnose import Monitor, StuckWarning, read_run

FINITE, INF = np.float32([1.0, 0.5]), np.float32([1.0, np.inf])


@pytest.fixture
def as_rank(monkeypatch):
    def as_rank(rank, world_size):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world_size))

    return as_rank


def scaler_of(state, policy):
    return SimpleNamespace(policy=policy, state=state)


def trained(path, gradients, flags, **options):
    """The monitor of a training whose steps overflow, on some rank, where ``flags`` says "!"."""
    policy = DynamicScale(init_scale=4.0)
    state = policy.init()
    options = {"every": 5, "stuck_after": 4, **options}
    with Monitor(scaler_of(state, policy), path=path, **options) as monitor:
        for flag in flags:
            state = policy.update(state, flag == "!")
            found = gradients if flag == "!" else FINITE
            monitor.record(scaler=scaler_of(state, policy), gradients={"layer.weight": found})
    return monitor


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("run.{rank}.jsonl", "run.3.jsonl"),
        ("{rank}/{other}-{}-{rank}.jsonl", "3/{other}-{}-3.jsonl"),
        ("{Rank}.jsonl", "{Rank}.jsonl"),
    ],
)
def test_the_rank_is_put_into_the_path_and_other_braces_stay(tmp_path, as_rank, name, written):
    as_rank(3, 4)
    (tmp_path / "3").mkdir()
    trained(tmp_path / name, FINITE, "....")
    start = read_run(tmp_path / written).starts[0]
    assert (start.rank, start.world_size) == (3, 4)


@pytest.mark.parametrize("rank", [None, "", "captain", "-1"])
def test_without_a_launcher_the_rank_is_0_and_is_not_recorded(tmp_path, monkeypatch, rank):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    trained(tmp_path / "run.{rank}.jsonl", FINITE, "....")
    first = (tmp_path / "run.0.jsonl").read_text().splitlines()[0]
    assert not {"rank", "world_size"} & set(json.loads(first))


def test_two_monitors_of_one_file_are_refused_until_one_is_closed(path):
    pytest.importorskip("fcntl", reason="files are not locked here")
    policy = DynamicScale()
    scaler = scaler_of(policy.init(), policy)
    with Monitor(scaler, path=path), pytest.raises(ValueError, match=r'path="run\.\{rank\}'):
        Monitor(scaler, path=path)
    Monitor(scaler, path=path).close()
    assert len(read_run(path).starts) == 2


def test_the_rank_whose_gradients_overflow_is_named_and_the_others_blame_none(tmp_path, as_rank):
    path, flags, paths, kinds = tmp_path / "run.{rank}.jsonl", "..!....!!!!!!!", [], []
    for rank, gradients in enumerate((FINITE, FINITE, INF)):
        as_rank(rank, 3)
        with pytest.warns(StuckWarning):
            monitor = trained(path, gradients, flags)
        paths.append(tmp_path / f"run.{rank}.jsonl")
        kinds.append(monitor.verdict.kind)
        assert read_run(paths[-1]).verdict.kind == monitor.verdict.kind
    assert kinds == ["elsewhere", "elsewhere", "floor"]
    run = read_run(*paths)
    assert (run.verdict.kind, run.verdict.where) == ("floor", "layer.weight")
    assert run.verdict.text.startswith("rank 2: The gradients overflow in layer.weight")


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("..!....", "1 of 7 steps was skipped, because another rank's gradients overflowed while"),
        ("..!.!!.", "3 of 7 steps were skipped, because another rank's gradients overflowed while"),
    ],
)
def test_a_monitor_and_its_file_know_that_another_rank_overflowed(path, as_rank, flags, text):
    as_rank(0, 2)
    monitor = trained(path, FINITE, flags)
    assert monitor.verdict.text.startswith(text)
    assert read_run(path).verdict == monitor.verdict


def test_while_the_scale_falls_another_ranks_overflow_is_no_alarm(path, as_rank, recwarn):
    as_rank(0, 2)
    monitor = trained(path, FINITE, "!!", stuck_after=2)
    assert monitor.verdict.kind == "normal"
    assert "Another rank's gradients, but not this one's" in monitor.verdict.text
    assert not recwarn.list


def test_each_rank_gives_its_verdict_at_the_same_step(tmp_path, as_rank):
    steps = []
    for rank, gradients in enumerate((FINITE, INF)):
        as_rank(rank, 2)
        trained(tmp_path / f"{rank}", gradients, "!" * 12, on_stuck="continue")
        steps.append([line.step for line in read_run(tmp_path / f"{rank}").verdicts])
    assert steps[0] == steps[1]


def test_ranks_that_do_not_decide_together_are_told_so(tmp_path, as_rank):
    for rank, flags in enumerate(("..........", "....!.....")):
        as_rank(rank, 2)
        trained(tmp_path / f"{rank}", INF, flags)
    verdict = read_run(tmp_path / "0", tmp_path / "1").verdict
    assert verdict.kind == "ranks"
    assert "from step 6 on: 4 on rank 0, 2 on rank 1. Step 5 was skipped on rank 1" in verdict.text
