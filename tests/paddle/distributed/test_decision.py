"""One all-reduce decides for all processes: the flag, whether there are gradients, the scale."""

import copy
from unittest import mock

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

from gradscaler import ScaleMismatchError
from gradscaler.errors import ParameterError
from gradscaler.paddle import GradScaler

INF = float("inf")


def counted():
    """A context that counts the all-reduces of this process."""
    return mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce)


def scaler_of(**kwargs):
    kwargs = {"incr_every_n_steps": 2, "decr_every_n_nan_or_inf": 1, **kwargs}
    return GradScaler(init_loss_scaling=1024.0, group=dist.get_group(0), **kwargs)


def of_ones(size=4):
    return paddle.create_parameter(
        [size], "float32", default_initializer=paddle.nn.initializer.Constant(1.0)
    )


def overflow(parameter, value=INF):
    gradient = parameter.grad.numpy()
    gradient[-1] = value
    parameter.grad.set_value(gradient)


def own_parameter(kind, minimize, clip, unscale, value, bad):
    """A parameter of each rank alone; a gradient of rank ``bad`` is not finite."""
    parameter = of_ones()
    optimizer = getattr(paddle.optimizer, kind)(0.1, parameters=[parameter])
    scaler = scaler_of()
    results = []
    for step in range(4):
        optimizer.clear_grad()
        scaled = scaler.scale((parameter * (dist.get_rank() + 1)).sum())
        scaled.backward()
        if step == 1 and dist.get_rank() == bad:
            overflow(parameter, value)
        before = parameter.numpy()
        with counted() as all_reduces:
            if unscale:
                scaler.unscale_(optimizer)
            if clip:
                scaler.clip_grad_norm_(optimizer, 1.0)
            if minimize:
                scaler.minimize(optimizer, scaled)
            else:
                scaler.step(optimizer)
                scaler.update()
        outcome = scaler.last_step(optimizer)
        state = scaler.state_dict()
        moved = bool((parameter.numpy() != before).all())
        results.append((outcome.reason, outcome.scale, state, all_reduces.call_count, moved))
        assert bool(scaler._found_inf) == scaler._cache_found_inf == (step == 1)
    return results


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("value", [INF, float("nan")], ids=str)
@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_"])
@pytest.mark.parametrize("clip", [False, True], ids=["", "clip"])
@pytest.mark.parametrize("minimize", [False, True], ids=["step", "minimize"])
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_all_skip_what_one_finds(ranks, kind, minimize, clip, unscale, value, bad):
    first, second = ranks(2).run(own_parameter, kind, minimize, clip, unscale, value, bad)
    assert first == second
    reasons, _, states, counts, moved = zip(*first, strict=True)
    assert reasons == ("finite", "overflow", "finite", "finite")
    assert counts == (1, 1, 1, 1)
    assert moved == (True, False, True, True)
    assert [state["scale"].item() for state in states] == [1024.0, 512.0, 512.0, 1024.0]


def without_gradients(has, minimize):
    """Only the ranks in ``has`` have gradients."""
    parameter = of_ones()
    optimizer = paddle.optimizer.AdamW(0.1, parameters=[parameter])
    scaler = scaler_of()
    reasons = []
    for _ in range(6):
        optimizer.clear_grad(set_to_zero=False)
        scaled = scaler.scale(parameter.sum())
        if dist.get_rank() in has:
            scaled.backward()
        if minimize:
            scaler.minimize(optimizer, scaled)
        else:
            scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
        reasons.append(scaler.last_step(optimizer).reason)
    return reasons, scaler.state_dict()


@pytest.mark.parametrize("minimize", [False, True], ids=["step", "minimize"])
def test_one_process_with_gradients_makes_it_a_step_of_all(ranks, minimize):
    first, second = ranks(2).run(without_gradients, [1], minimize)
    assert first == second
    assert first[0] == ["finite"] * 6
    assert first[1]["scale"] == [8192.0]


@pytest.mark.parametrize("minimize", [False, True], ids=["step", "minimize"])
def test_without_gradients_anywhere_it_is_not_a_step(ranks, minimize):
    first, second = ranks(2).run(without_gradients, [], minimize)
    assert first == second
    assert first[0] == ["no_gradients"] * 6
    assert first[1]["scale"] == [1024.0]


def different(what, clip):
    scaler = scaler_of()
    parameter = of_ones()
    optimizer = paddle.optimizer.SGD(0.1, parameters=[parameter])
    if dist.get_rank() == 1:
        scaler.load_state_dict({**scaler.state_dict(), **what})
    scaler.scale(parameter.sum()).backward()
    with pytest.raises(ScaleMismatchError) as raised:
        scaler.clip_grad_norm_(optimizer, 1.0) if clip else scaler.step(optimizer)
    assert parameter.tolist() == [1.0] * 4
    same = {"scale": np.array([64.0], "float32"), "incr_count": 0, "decr_count": 0}
    scaler.load_state_dict({**scaler.state_dict(), **same})
    optimizer.clear_grad()
    if not clip:
        scaler.update()
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return str(raised.value), parameter.tolist()


@pytest.mark.parametrize("clip", [False, True], ids=["step", "clip"])
@pytest.mark.parametrize(
    ("what", "named"),
    [
        ({"scale": np.array([64.0], "float32")}, ["scale", "64", "1024"]),
        ({"incr_count": 7}, ["finite_steps is 0", "7"]),
        ({"decr_count": 3}, ["nonfinite_steps is 0", "3"]),
    ],
)
def test_processes_with_different_scales_all_raise_and_can_go_on(ranks, what, named, clip):
    first, second = ranks(2).run(different, what, clip)
    assert first == second
    assert all(word in first[0] for word in named)
    assert first[1] == [pytest.approx(0.9)] * 4


def order_of_two(orders, sizes, classes):
    """Step two optimizers in this rank's order of each iteration; return the error of each."""
    scaler = scaler_of()
    parameters = [paddle.create_parameter([size], "float32") for size in sizes[dist.get_rank()]]
    kinds = paddle.optimizer.SGD, paddle.optimizer.Adam if classes else paddle.optimizer.SGD
    optimizers = [kind(0.1, parameters=[p]) for kind, p in zip(kinds, parameters, strict=True)]
    errors = []
    for order in orders[dist.get_rank()]:
        scaler.scale(sum(parameter.sum() for parameter in parameters)).backward()
        try:
            for i in order:
                scaler.step(optimizers[i])
            errors.append(None)
        except ScaleMismatchError as error:
            errors.append(str(error))
        scaler.update()
        for optimizer in optimizers:
            optimizer.clear_grad()
    return errors


@pytest.mark.parametrize("same_at_first", [0, 1])
def test_optimizers_stepped_in_different_orders_raise_on_all(ranks, same_at_first):
    orders = [[(0, 1)] * 3, [(0, 1)] * same_at_first + [(1, 0)] * (3 - same_at_first)]
    classes = not same_at_first  # nothing else tells at the first step
    first, second = ranks(2).run(order_of_two, orders, [[3, 4], [3, 4]], classes)
    assert first == second
    assert first[:same_at_first] == [None] * same_at_first
    assert "different optimizers" in first[same_at_first]


@pytest.mark.parametrize("sizes", [[[3, 4], [3, 4]], [[3, 4], [5, 6]]], ids=["alike", "stages"])
def test_one_order_of_optimizers_is_no_mismatch(ranks, sizes):
    orders = [[(0, 1), (0, 1), (1,), (1, 0)]] * 2
    assert ranks(2).run(order_of_two, orders, sizes, False) == [[None] * 4] * 2


def with_closure(bad):
    """The first two evaluations of rank ``bad`` overflow."""
    parameter = of_ones()
    optimizer = paddle.optimizer.LBFGS(0.1, max_iter=1, parameters=[parameter])
    scaler = scaler_of()
    calls = []

    def closure():
        optimizer.clear_grad()
        loss = ((parameter - dist.get_rank()) ** 2).sum()
        scaler.scale(loss).backward()
        calls.append(1)
        if dist.get_rank() == bad and len(calls) <= 2:
            overflow(parameter)
        return loss

    scaler.step(optimizer, closure)
    scaler.update()
    outcome = scaler.last_step(optimizer)
    return len(calls), outcome.reason, outcome.scale, scaler.state_dict()


@pytest.mark.parametrize("bad", [0, 1])
def test_all_repeat_an_evaluation_that_overflows_on_one(ranks, bad):
    first, second = ranks(2).run(with_closure, bad)
    assert first == second
    calls, reason, scale, state = first
    assert calls >= 3
    assert (reason, scale, state["scale"].item()) == ("finite", 256.0, 256.0)


def exhausted(bad):
    parameter = of_ones()
    optimizer = paddle.optimizer.LBFGS(0.1, parameters=[parameter])
    scaler = scaler_of(max_retries=2)
    calls = []

    def closure():
        optimizer.clear_grad()
        loss = parameter.sum()
        scaler.scale(loss).backward()
        calls.append(1)
        if dist.get_rank() == bad:
            overflow(parameter)
        return loss

    scaler.step(optimizer, closure)
    scaler.update()
    return len(calls), scaler.last_step(optimizer).reason, parameter.tolist()


@pytest.mark.parametrize("bad", [0, 1])
def test_all_give_up_when_one_never_has_finite_gradients(ranks, bad):
    assert ranks(2).run(exhausted, bad) == [(3, "retries_exhausted", [1.0] * 4)] * 2


def norm_over_shards(norm_type, unscale):
    """Each rank holds one part of [3, 4], [0, 12], in one process group."""
    parameter = of_ones(2)
    optimizer = paddle.optimizer.SGD(1.0, parameters=[parameter])
    scaler = GradScaler(init_loss_scaling=1024.0, group=dist.get_group(0))
    part = paddle.to_tensor([[3.0, 4.0], [0.0, 12.0]][dist.get_rank()])
    scaler.scale((parameter * part).sum()).backward()
    if unscale:
        scaler.unscale_(optimizer)
    with counted() as all_reduces:
        norm = scaler.clip_grad_norm_(optimizer, 1.0, norm_type, shards=dist.get_group(0))
    scaler.step(optimizer)
    return norm.item(), (1 - parameter).tolist(), all_reduces.call_count


@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale_"])
@pytest.mark.parametrize(("norm_type", "norm"), [(2.0, 13.0), (1.0, 19.0), (INF, 12.0)])
def test_the_norm_is_that_of_all_parts(ranks, norm_type, norm, unscale):
    first, second = ranks(2).run(norm_over_shards, norm_type, unscale)
    assert first[0] == second[0] == pytest.approx(norm)
    assert first[1] + second[1] == pytest.approx([x / norm for x in (3, 4, 0, 12)], rel=1e-5)
    assert first[2] == second[2] == (1 if unscale else 2)


def not_finite_norm(norm_type, value, bad):
    parameter = of_ones()
    optimizer = paddle.optimizer.SGD(0.1, parameters=[parameter])
    scaler = scaler_of()
    scaler.scale(parameter.sum()).backward()
    if dist.get_rank() == bad:
        overflow(parameter, value)
    group = dist.get_group(0)
    norm = scaler.clip_grad_norm_(optimizer, 1.0, norm_type, shards=group).item()
    scaler.step(optimizer)
    return repr(norm), scaler.last_step(optimizer).reason, parameter.tolist()


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("value", [INF, float("nan")], ids=str)
@pytest.mark.parametrize("norm_type", [2.0, INF])
def test_a_norm_that_is_not_finite_is_so_on_all(ranks, norm_type, value, bad):
    expected = repr(value), "overflow", [1.0] * 4
    assert ranks(2).run(not_finite_norm, norm_type, value, bad) == [expected] * 2


def stranded(bad, shards):
    parameter = of_ones()
    optimizer = paddle.optimizer.SGD(0.1, parameters=[parameter])
    scaler = scaler_of()
    scaler.scale(parameter.sum()).backward()
    if dist.get_rank() == bad:
        overflow(parameter)
    with pytest.raises(RuntimeError, match=r"not|inf"):
        scaler.clip_grad_norm_(
            optimizer,
            1.0,
            error_if_nonfinite=True,
            shards=dist.get_group(0) if shards else None,
        )
    return True


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("shards", [False, True])
def test_gradients_that_are_not_finite_on_one_process_raise_on_all(ranks, bad, shards):
    assert ranks(2).run(stranded, bad, shards) == [True, True]


def copies():
    scaler = scaler_of()
    return all(make(scaler)._group is scaler._group for make in (copy.copy, copy.deepcopy))


def test_a_copy_decides_with_the_same_group(ranks):
    assert ranks(2).run(copies) == [True, True]


def refusals():
    alone = dist.new_group([0])
    parameter = of_ones()
    optimizer = paddle.optimizer.SGD(0.1, parameters=[parameter])
    scaler = GradScaler(init_loss_scaling=8.0)
    scaler.scale(parameter.sum()).backward()
    for wrong in (0, "nccl", True):
        with pytest.raises(TypeError, match=r"group must be a process group.*new_group"):
            GradScaler(group=wrong)
        with pytest.raises(TypeError, match=r"shards must be a process group.*new_group"):
            scaler.clip_grad_norm_(optimizer, 1.0, shards=wrong)
    assert parameter.grad.tolist() == [8.0] * 4
    if dist.get_rank() == 0:
        scaler = GradScaler(init_loss_scaling=8.0, group=alone)
        with counted() as all_reduces:
            assert scaler.clip_grad_norm_(optimizer, 1.0, shards=alone).item() == 2.0
            scaler.step(optimizer)
        return all_reduces.call_count
    with pytest.raises(ValueError, match=r"group has the ranks \[0\].*not one of them"):
        GradScaler(group=alone)
    with pytest.raises(ValueError, match=r"shards has the ranks \[0\].*not one of them"):
        scaler.clip_grad_norm_(optimizer, 1.0, shards=alone)
    return 0


def test_what_is_no_group_of_this_process_is_refused_by_name(ranks):
    assert ranks(2).run(refusals) == [0, 0]


def attempted(bad, has_group):
    """Two micro-batches; the second overflows twice on rank ``bad``."""
    parameter = of_ones()
    optimizer = paddle.optimizer.SGD(1.0, parameters=[parameter])
    scaler = scaler_of() if has_group else GradScaler(init_loss_scaling=1024.0)
    if not has_group:
        with pytest.raises(ParameterError, match=r"GradScaler\(group="):
            scaler.attempts(optimizer)
        return True
    attempts = []
    for factor, overflows in ((1.0, 0), (2.0, 2)):
        for attempt in scaler.attempts(optimizer):
            attempts.append(attempt)
            scaler.scale((parameter * factor * (dist.get_rank() + 1)).sum()).backward()
            if attempt < overflows and dist.get_rank() == bad:
                overflow(parameter)
    scaler.step(optimizer)
    scaler.update()
    return attempts, float(scaler.get_scale()), parameter.numpy().tolist()


@pytest.mark.parametrize("bad", [0, 1])
def test_all_repeat_the_micro_batch_that_overflows_in_one(ranks, bad):
    results = ranks(2).run(attempted, bad, True)
    assert results == [([0, 0, 1, 2], 256.0, [1.0 - 3.0 * n] * 4) for n in (1, 2)]


def test_without_a_group_nobody_is_left_to_repeat_alone(ranks):
    assert ranks(2).run(attempted, 0, False) == [True, True]
