"""DeepSpeed's engine with gradscaler's scalers, beside the same engine with its own."""

from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from gradscaler.torch import GradScaler, install
from gradscaler.torch.deepspeed import DynamicLossScaler, LossScaler
from tests.support.engines import (
    batches,
    deepspeed_config,
    deepspeed_engine,
    deepspeed_weights,
    network,
    zero,
    zero_with_fp16,
)

OVERFLOWS = [False, True, True, False, False, False]
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "fp16"}}
STAGES = [1, 2, 3]


def whose(ours, name="deepspeed"):
    return install(name) if ours else nullcontext()


def steps(engine, overflows, first=0, rank_that_overflows=0):
    """After each step, the scale, the skipped steps and the weights."""
    rows = []
    for batch in list(batches(overflows, dist.get_rank(), rank_that_overflows))[first:]:
        loss = engine(batch.to(next(engine.parameters()).dtype)).float().pow(2).mean()
        engine.backward(loss)
        engine.step()
        rows.append((engine.optimizer.cur_scale, engine.skipped_steps, deepspeed_weights(engine)))
    return rows


def train(stage, ours, rank_that_overflows=0):
    with whose(ours):
        engine = zero(stage)
    rows = steps(engine, OVERFLOWS, rank_that_overflows=rank_that_overflows)
    return isinstance(engine.optimizer.loss_scaler, DynamicLossScaler), rows


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [1, 2])
def test_a_training_with_ours_is_deepspeed_s_to_the_bit(ranks, world, stage):
    ours = ranks(world).run(train, stage, True, world - 1)
    theirs = ranks(world).run(train, stage, False, world - 1)
    assert [made_ours for made_ours, _ in ours] == [True] * world
    assert [made_ours for made_ours, _ in theirs] == [False] * world
    assert [rows for _, rows in ours] == [rows for _, rows in theirs]


@pytest.mark.parametrize("stage", STAGES)
def test_an_overflow_in_one_rank_skips_the_step_of_both(ranks, stage):
    (_, first), (_, second) = ranks(2).run(train, stage, True, 1)
    assert first == second
    assert [row[:2] for row in first] == [
        (1024.0, 0),
        (1024.0, 1),  # which the hysteresis tolerates
        (512.0, 2),
        (512.0, 2),
        (512.0, 2),
        (1024.0, 2),
    ]
    weights = [row[2] for row in first]
    assert weights[0] == weights[1] == weights[2] != weights[3]


def resume(stage, folder, ours_saves, ours_loads):
    with whose(ours_saves):
        engine = zero(stage)
        before = steps(engine, OVERFLOWS[:3])
        engine.save_checkpoint(folder)
    with whose(ours_loads):
        engine = zero(stage)
        engine.load_checkpoint(folder)
    made_ours = isinstance(engine.optimizer.loss_scaler, DynamicLossScaler)
    return made_ours, before + steps(engine, OVERFLOWS, first=3)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.parametrize("loads", [True, False])
def test_a_checkpoint_of_either_goes_on_in_either(ranks, tmp_path, stage, saves, loads):
    uninterrupted = ranks(2).run(train, stage, False)
    resumed = ranks(2).run(resume, stage, str(tmp_path), saves, loads)
    assert [made_ours for made_ours, _ in resumed] == [loads] * 2
    assert [rows for _, rows in resumed] == [rows for _, rows in uninterrupted]


def ratio_of_two_updates(stage, fixed_scale):
    with install("deepspeed"):
        engine = zero(stage, loss_scale=fixed_scale, loss_scale_window=1)
    (batch,) = batches([False], 0)
    biases = [deepspeed_weights(engine)[-1][0]]  # whose gradient is always 2
    for _ in range(2):
        engine.backward(engine(batch.half()).float().sum())
        engine.step()
        biases.append(deepspeed_weights(engine)[-1][0])
    first, second = (after - before for before, after in pairwise(biases))
    assert engine.optimizer.cur_scale == (fixed_scale or 2048.0)
    return second / first


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("fixed", "ratio"), [(0.0, 0.5), (1024.0, 1.0)])
def test_deepspeed_halves_the_update_of_a_step_that_doubles_the_scale(ranks, stage, fixed, ratio):
    """docs/engines.md says so: once DeepSpeed changes it, this fails."""
    assert ranks(1).run(ratio_of_two_updates, stage, fixed) == [pytest.approx(ratio, abs=0.01)]


def train_at_a_fixed_scale():
    with install("deepspeed"):
        engine = zero(1, loss_scale=128.0)
    rows = steps(engine, OVERFLOWS)
    return isinstance(engine.optimizer.loss_scaler, LossScaler), [row[:2] for row in rows]


def test_a_fixed_scale_stays_and_overflows_are_skipped(ranks):
    expected = [(128.0, skipped) for skipped in (0, 1, 2, 2, 2, 2)]
    assert ranks(1).run(train_at_a_fixed_scale) == [(True, expected)]


def overflow_at_the_floor():
    with install("deepspeed"):
        engine = zero(1, initial_scale_power=0, hysteresis=1)
    with pytest.raises(RuntimeError, match="Current loss scale already at minimum"):
        steps(engine, [True])


def test_an_overflow_at_the_lowest_scale_ends_the_training_as_deepspeed_s_does(ranks):
    ranks(1).run(overflow_at_the_floor)


def without_zero():
    with install("deepspeed"):
        engine = zero(0)
    return hasattr(engine.optimizer, "loss_scaler")


def test_without_zero_deepspeed_keeps_a_rule_of_its_own(ranks):
    assert ranks(1).run(without_zero) == [False]


def train_with_autocast(stage, ours):
    with whose(ours, "torch"):
        engine = deepspeed_engine(zero_optimization={"stage": stage}, **AUTOCAST)
    scaler = engine.torch_autocast_z0_gradscaler or engine.optimizer.torch_autocast_gradscaler
    rows = []
    for batch in batches([True, True, False], 0):
        engine.backward(engine(batch).float().pow(2).mean())
        engine.step()
        rows.append((scaler.get_scale(), deepspeed_weights(engine)))
    return isinstance(scaler, GradScaler), rows


def test_autocast_without_zero_trains_with_ours_as_with_torch_s(ranks):
    ((made_ours, ours),) = ranks(1).run(train_with_autocast, 0, True)
    ((not_ours, theirs),) = ranks(1).run(train_with_autocast, 0, False)
    assert (made_ours, not_ours) == (True, False)
    assert ours == theirs
    assert [scale for scale, _ in ours] == [32768.0, 16384.0, 16384.0]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("ours", [True, False])
def test_autocast_with_zero_never_lowers_the_scale(ranks, stage, ours):
    """docs/engines.md says so: once DeepSpeed changes it, this fails."""
    ((made_ours, rows),) = ranks(1).run(train_with_autocast, stage, ours)
    assert made_ours is ours
    assert [scale for scale, _ in rows] == [65536.0] * 3


def first_update_with_autocast(stage, **settings):
    with install():
        engine = deepspeed_engine(zero_optimization={"stage": stage}, **AUTOCAST, **settings)
    before = deepspeed_weights(engine)[-1][0]
    (batch,) = batches([False], 0)
    engine.backward(engine(batch * 0.1).float().sum() / 4)  # no overflow at 65536
    engine.step()
    return abs(deepspeed_weights(engine)[-1][0] - before)


def clipped_and_not(stage):
    clipped = first_update_with_autocast(stage, gradient_clipping=1.0)
    return clipped, first_update_with_autocast(stage)


@pytest.mark.parametrize("stage", STAGES)
def test_autocast_with_zero_clips_gradients_that_are_still_scaled(ranks, stage):
    """docs/engines.md says so: once DeepSpeed changes it, this fails."""
    ((clipped, not_clipped),) = ranks(1).run(clipped_and_not, stage)
    assert not_clipped == pytest.approx(0.05, rel=0.01)
    assert clipped < 1e-4


def fp16_after_autocast():
    config = deepspeed_config(**zero_with_fp16(1))
    deepspeed_engine(zero_optimization={"stage": 1}, **AUTOCAST)
    import deepspeed

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return type(engine.optimizer.torch_autocast_gradscaler) is torch.amp.GradScaler


def test_an_fp16_engine_after_one_with_autocast_scales_by_torch_s_scaler(ranks):
    """docs/engines.md says so: once DeepSpeed changes it, this fails."""
    assert ranks(1).run(fp16_after_autocast) == [True]
