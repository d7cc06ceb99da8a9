"""Megatron's optimizers with gradscaler's scalers, on the CPU.

Its own scalers need CUDA, so the recorded values are those that its rule gives by hand.
"""

import pytest
import torch
import torch.distributed as dist

from gradscaler.torch import install
from gradscaler.torch.megatron import ConstantGradScaler, DynamicGradScaler
from tests.support.engines import MEGATRON_S_FP16, batches, megatron, megatron_parts

OVERFLOWS = [False, True, True, False, False, False]


def steps(model, optimizer, overflows, first=0, rank_that_overflows=0):
    """After each step, whether it was applied, the scale, the norm and the weights."""
    rows = []
    for batch in list(batches(overflows, dist.get_rank(), rank_that_overflows))[first:]:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        optimizer.scale_loss(model(batch.half()).float().pow(2).mean()).backward()
        model.finish_grad_sync()
        applied, norm, _ = optimizer.step()
        weights = [parameter.tolist() for parameter in model.parameters()]
        rows.append((applied, optimizer.get_loss_scale().item(), norm, weights))
    return rows


def scaler_of(optimizer):
    (inner,) = optimizer.chained_optimizers
    return inner.grad_scaler


def train(sharded, rank_that_overflows=0):
    with megatron(), install("megatron"):
        model, optimizer = megatron_parts(sharded, **MEGATRON_S_FP16)
        rows = steps(model, optimizer, OVERFLOWS, rank_that_overflows=rank_that_overflows)
    return isinstance(scaler_of(optimizer), DynamicGradScaler), rows


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_an_overflow_in_one_rank_skips_the_step_of_all(ranks, world, sharded):
    answers = ranks(world).run(train, sharded, world - 1)
    assert all(made_ours for made_ours, _ in answers)
    assert all(rows == answers[0][1] for _, rows in answers)
    assert [row[:2] for row in answers[0][1]] == [
        (True, 1024.0),
        (False, 1024.0),  # which the hysteresis tolerates
        (False, 512.0),
        (True, 512.0),
        (True, 1024.0),
        (True, 1024.0),
    ]
    weights = [row[3] for row in answers[0][1]]
    assert weights[0] == weights[1] == weights[2] != weights[3]


def train_at(scale):
    with megatron(), install("megatron"):
        model, optimizer = megatron_parts(False, loss_scale=scale, clip_grad=0.1)
        rows = steps(model, optimizer, [False] * 3)
    return isinstance(scaler_of(optimizer), ConstantGradScaler), rows


def test_norms_and_weights_do_not_depend_on_a_fixed_scale(ranks):
    """Megatron unscales the gradients before it clips them."""
    ((made_ours, rows),) = ranks(1).run(train_at, 1.0)
    ((_, scaled),) = ranks(1).run(train_at, 1024.0)
    assert made_ours
    assert [scale for _, scale, *_ in scaled] == [1024.0] * 3
    for (_, _, norm, weights), (_, _, scaled_norm, scaled_weights) in zip(
        rows, scaled, strict=True
    ):
        assert scaled_norm == pytest.approx(norm, rel=1e-2)
        assert scaled_norm > 0.1
        for each, of_scaled in zip(weights, scaled_weights, strict=True):
            torch.testing.assert_close(
                torch.tensor(of_scaled), torch.tensor(each), atol=1e-2, rtol=1e-2
            )


def resume():
    with megatron(), install("megatron"):
        model, optimizer = megatron_parts(False, **MEGATRON_S_FP16)
        before = steps(model, optimizer, OVERFLOWS[:4])
        saved = optimizer.state_dict()
        weights = model.state_dict()
        model, optimizer = megatron_parts(False, **MEGATRON_S_FP16)
        model.load_state_dict(weights)
        optimizer.load_state_dict(saved)
        return scaler_of(optimizer).state_dict(), before + steps(
            model, optimizer, OVERFLOWS, first=4
        )


def test_a_resumed_training_goes_on_at_its_scale_and_counts(ranks):
    """It grows after two finite steps, one before the checkpoint and one after it."""
    _, uninterrupted = ranks(1).run(train, False)[0]
    state, rows = ranks(1).run(resume)[0]
    assert set(state) == {"scale", "growth_tracker", "hysteresis_tracker"}
    assert rows == uninterrupted


def train_two():
    from megatron.core.optimizer import ChainedOptimizer

    with megatron(), install("megatron"):
        (first, one), (second, other) = (
            megatron_parts(False, **MEGATRON_S_FP16),
            megatron_parts(False, **MEGATRON_S_FP16),
        )
        both = ChainedOptimizer([*one.chained_optimizers, *other.chained_optimizers])
        for _ in range(2):
            for model, (batch,) in (first, batches([False], 0)), (second, batches([True], 0)):
                both.scale_loss(model(batch.half()).float().pow(2).mean()).backward()
                model.finish_grad_sync()
            applied, *_ = both.step()
    scales = [optimizer.get_loss_scale().item() for optimizer in both.chained_optimizers]
    return applied, both.get_loss_scale().item(), scales


def test_optimizers_in_a_chain_each_move_a_scale_of_their_own(ranks):
    """docs/engines.md says so: once Megatron changes it, this fails."""
    ((applied, of_the_loss, scales),) = ranks(1).run(train_two)
    assert not applied
    assert scales == [2048.0, 512.0]
    assert of_the_loss == 2048.0


def without_install():
    with megatron():
        _, optimizer = megatron_parts(False, **MEGATRON_S_FP16)
    return type(scaler_of(optimizer)).__module__


def test_megatron_makes_its_own_without_install(ranks):
    assert ranks(1).run(without_install) == ["megatron.core.optimizer.grad_scaler"]


def saved_and_loaded():
    with megatron(), install("megatron"):
        model, optimizer = megatron_parts(True, **MEGATRON_S_FP16)
        steps(model, optimizer, OVERFLOWS[:4])
        saved = optimizer.state_dict()
        _, resumed = megatron_parts(True, **MEGATRON_S_FP16)
        resumed.load_state_dict(saved)
    states = scaler_of(optimizer).state_dict(), scaler_of(resumed).state_dict()
    return [{name: int(value) for name, value in state.items()} for state in states]


def test_a_sharded_optimizer_s_state_dict_holds_the_scale_and_counts(ranks):
    state = {"scale": 512, "growth_tracker": 1, "hysteresis_tracker": 0}
    assert ranks(2).run(saved_and_loaded) == [[state, state]] * 2
