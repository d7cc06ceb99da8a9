"""clip_grad_norm_ against torch's unscale_, torch.nn.utils.clip_grad_norm_ and step."""

import copy
import itertools
import math
from collections import Counter
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from gradscaler.torch import GradScaler

INF = math.inf
OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "foreach Adam": (torch.optim.Adam, {"foreach": True}),
    "fused AdamW": (torch.optim.AdamW, {"fused": True}),
}


def plain_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.fixture(params=OPTIMIZERS)
def kind(request):
    optimizer, options = OPTIMIZERS[request.param]
    return lambda parameters: optimizer(parameters, **options)


class Side:
    """A scaler, and an optimizer with copies of the parameters."""

    def __init__(self, scaler, kind, parameters, backward):
        self.scaler = scaler
        self.parameters = copy.deepcopy(parameters)
        self.optimizer = kind(self.parameters)
        self.fused = bool(self.optimizer.defaults.get("fused"))
        self._backward = backward

    def backward(self, gradients):
        self.optimizer.zero_grad()
        self._backward(self.scaler, self.parameters, gradients)
        return self

    def unscale(self):
        self.scaler.unscale_(self.optimizer)
        return self

    def finish(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Ours(Side):
    def __init__(self, kind, parameters, backward, **options):
        super().__init__(GradScaler(**options), kind, parameters, backward)

    def clip(self, *args, **kwargs):
        return self.scaler.clip_grad_norm_(self.optimizer, *args, **kwargs)


class Native(Side):
    """Clips as the documentation of torch's scaler says to: after unscale_."""

    def __init__(self, kind, parameters, backward):
        super().__init__(torch.amp.GradScaler("cpu"), kind, parameters, backward)

    def clip(self, *args, **kwargs):
        return clip_grad_norm_(self.parameters, *args, **kwargs)


@pytest.fixture
def ours(kind, parameters, backward):
    return Ours(kind, parameters, backward)


@pytest.fixture
def native(kind, parameters, backward):
    return Native(kind, parameters, backward)


# Every order of calls.


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, INF, "inf"])
@pytest.mark.parametrize("max_norm", [0.5, 100.0, 0.0, INF])
def test_norm_and_step_are_torch_s(ours, native, max_norm, norm_type, finite, exact, stepped):
    mine = ours.backward(finite).clip(max_norm, norm_type)
    theirs = native.backward(finite).unscale().clip(max_norm, norm_type)
    assert exact(mine) == exact(theirs)
    ours.finish()
    native.finish()
    if ours.fused and norm_type == 2 and mine > max_norm > 0:
        assert_close(ours, native)  # it divides once, by scale / coefficient
    else:
        assert stepped(ours.optimizer) == stepped(native.optimizer)


def assert_close(ours, native):
    """The same parameters, gradients and state to within a few roundings."""
    for mine, theirs in zip(ours.parameters, native.parameters, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
        torch.testing.assert_close(mine, theirs)
        for name, value in state_of(native, theirs).items():
            torch.testing.assert_close(state_of(ours, mine)[name], value)


def state_of(side, parameter):
    return side.optimizer.state[parameter]


@pytest.mark.parametrize("unscaled_first", [False, True], ids=["alone", "after unscale_"])
def test_several_iterations_are_torch_s_to_the_bit(ours, native, unscaled_first, finite, stepped):
    for factor in (1.0, 0.1, 10.0):
        gradients = [factor * gradient for gradient in finite]
        ours.backward(gradients)
        if unscaled_first:
            ours.unscale()
        ours.clip(0.5)
        native.backward(gradients).unscale().clip(0.5)
        ours.finish()
        native.finish()
    if ours.fused and not unscaled_first:
        assert_close(ours, native)
    else:
        assert stepped(ours.optimizer) == stepped(native.optimizer)


def test_unscaling_after_clipping_is_in_order_too(ours, native, finite, stepped):
    ours.backward(finite).clip(0.5)
    ours.unscale().finish()
    native.backward(finite).unscale().clip(0.5)
    native.finish()
    assert stepped(ours.optimizer) == stepped(native.optimizer)


@pytest.mark.parametrize("norm_type", [2.0, INF])
def test_unscaling_twice_after_clipping_is_not_in_order(norm_type, ours, finite):
    ours.backward(finite)
    ours.scaler.clip_grad_norm_(ours.optimizer, 0.5, norm_type)
    ours.unscale()
    with pytest.raises(RuntimeError, match="already been called"):
        ours.unscale()


CLIPS = st.tuples(st.floats(0.01, 10.0), st.sampled_from([1.0, 2.0, 3.0, INF]))


@settings(max_examples=40, deadline=None)
@given(clips=st.lists(CLIPS, min_size=2, max_size=4), unscale_before=st.integers(0, 1))
def test_clipping_repeatedly_is_torch_s(clips, unscale_before, backward):
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(3, 4)), torch.nn.Parameter(torch.randn(5))]
    gradients = [torch.randn(3, 4), torch.randn(5)]
    ours, native = (side(plain_sgd, parameters, backward) for side in (Ours, Native))
    ours.backward(gradients)
    native.backward(gradients).unscale()
    if unscale_before:
        ours.unscale()
    for max_norm, norm_type in clips:
        torch.testing.assert_close(ours.clip(max_norm, norm_type), native.clip(max_norm, norm_type))
    ours.finish()
    native.finish()
    for mine, theirs in zip(ours.parameters, native.parameters, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
        torch.testing.assert_close(mine, theirs)


def test_the_gradients_are_unscaled_and_clipped_in_step_and_not_before(ours, finite, exact):
    ours.backward(finite).clip(0.5)
    scaled = [gradient * 2.0**16 for gradient in finite]
    assert exact([parameter.grad for parameter in ours.parameters]) == exact(scaled)
    ours.finish()
    norm = get_total_norm([parameter.grad for parameter in ours.parameters])
    assert norm.item() == pytest.approx(0.5, rel=1e-5)


def test_the_next_iteration_is_not_clipped(ours, native, finite, stepped):
    for side in (ours, native):
        side.backward(finite).unscale().clip(0.5)
        side.finish()
        side.backward(finite).finish()
    assert stepped(ours.optimizer) == stepped(native.optimizer)


def test_one_optimizer_s_clipping_is_not_the_other_s(parameters, finite, backward, exact):
    first, second = (torch.optim.SGD([parameter]) for parameter in parameters)
    scaler = GradScaler()
    backward(scaler, parameters, finite)
    scaler.clip_grad_norm_(first, 0.01)
    scaler.step(first)
    scaler.step(second)
    assert get_total_norm([parameters[0].grad]).item() == pytest.approx(0.01, rel=1e-3)
    assert exact(parameters[1].grad) == exact(finite[1])


def test_disabled_it_is_torch_s_at_once(parameters, finite, exact):
    twins = copy.deepcopy(parameters)
    for parameter, gradient in zip([*parameters, *twins], [*finite, *finite], strict=True):
        parameter.grad = gradient.clone()
    optimizer = torch.optim.SGD(parameters)
    mine = GradScaler(enabled=False).clip_grad_norm_(optimizer, 0.5)
    assert exact(mine) == exact(clip_grad_norm_(twins, 0.5))
    assert exact([p.grad for p in parameters]) == exact([p.grad for p in twins])


def test_nothing_is_read_from_the_device(asking_optimizer):
    parameter = torch.nn.Parameter(torch.ones(3, device="meta"))
    optimizer = asking_optimizer([parameter])
    scaler = GradScaler()
    scaler.scale(parameter.sum()).backward()
    scaler.clip_grad_norm_(optimizer, 1.0)
    norm = scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert norm.device.type == "meta"


# Gradients of every kind.


def test_zero_gradients_stay_zero(ours, native, finite, stepped):
    zero = [torch.zeros_like(gradient) for gradient in finite]
    assert ours.backward(zero).clip(0.5) == native.backward(zero).unscale().clip(0.5) == 0.0
    ours.finish()
    native.finish()
    assert stepped(ours.optimizer) == stepped(native.optimizer)


def test_without_any_gradient_the_norm_is_zero(parameters):
    scaler = GradScaler()
    optimizer = torch.optim.SGD(parameters)
    scaler.scale(torch.ones(()))
    assert scaler.clip_grad_norm_(optimizer, 1.0) == 0.0
    scaler.step(optimizer)
    assert scaler.last_step(optimizer).reason == "no_gradients"


def test_parameters_without_a_gradient_are_passed_by(ours, native, finite, stepped):
    gradients = [None, finite[1]]
    assert ours.backward(gradients).clip(0.5) == native.backward(gradients).unscale().clip(0.5)
    ours.finish()
    native.finish()
    assert stepped(ours.optimizer) == stepped(native.optimizer)


def test_all_parameter_groups_count(parameters, finite, backward, stepped):
    def two_groups(owned):
        return torch.optim.SGD([{"params": [owned[0]], "lr": 0.5}, {"params": [owned[1]]}], lr=0.1)

    ours, native = (side(two_groups, parameters, backward) for side in (Ours, Native))
    assert ours.backward(finite).clip(0.5) == native.backward(finite).unscale().clip(0.5)
    ours.finish()
    native.finish()
    assert stepped(ours.optimizer) == stepped(native.optimizer)


def test_a_mix_of_dtypes_is_torch_s_to_the_bit(backward, exact, stepped):
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float32]
    parameters = [torch.nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in dtypes]
    gradients = [torch.arange(1.0, 4.0, dtype=dtype) / 3 for dtype in dtypes]
    ours, native = (side(plain_sgd, parameters, backward) for side in (Ours, Native))
    mine = ours.backward(gradients).clip(0.5)
    theirs = native.backward(gradients).unscale().clip(0.5)
    assert exact(mine) == exact(theirs)
    ours.finish()
    native.finish()
    assert stepped(ours.optimizer) == stepped(native.optimizer)


def unscaled_and_clipped(parameters, gradients, *clip):
    """Norm and gradients as torch clips gradients that never were scaled."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    norm = clip_grad_norm_(parameters, *clip)
    return norm, [parameter.grad for parameter in parameters]


@pytest.mark.parametrize("norm_type", [2.0, 1.0, INF])
def test_float16_gradients_are_clipped_where_they_are_allowed(norm_type, backward):
    dtypes = [torch.float16, torch.float32]
    parameters = [torch.nn.Parameter(torch.ones(4, dtype=dtype)) for dtype in dtypes]
    gradients = [torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=dtype) for dtype in dtypes]
    ours = Ours(plain_sgd, parameters, backward, init_scale=64.0, allow_fp16_gradients=True)
    norm, clipped = unscaled_and_clipped(parameters, gradients, 0.5, norm_type)
    torch.testing.assert_close(ours.backward(gradients).clip(0.5, norm_type), norm)
    ours.finish()
    torch.testing.assert_close([parameter.grad for parameter in ours.parameters], clipped)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, INF])
def test_complex_gradients_are_clipped_by_their_magnitudes(norm_type, dtype):
    parameters = [torch.nn.Parameter(torch.ones(2, dtype=dtype)) for _ in range(2)]
    gradients = [torch.tensor([3 + 4j, 1 - 1j], dtype=dtype), torch.tensor([2j, -3], dtype=dtype)]
    norm, clipped = unscaled_and_clipped(parameters, gradients, 0.5, norm_type)
    scaler = GradScaler(init_scale=8.0)
    scaler.scale(torch.ones(()))
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = 8.0 * gradient
    optimizer = torch.optim.SGD(parameters)
    torch.testing.assert_close(scaler.clip_grad_norm_(optimizer, 0.5, norm_type), norm)
    scaler.step(optimizer)
    torch.testing.assert_close([parameter.grad for parameter in parameters], clipped)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, INF])
def test_sparse_gradients_are_clipped_as_the_dense_ones_they_stand_for(norm_type):
    """Row 1 occurs twice, so its gradients add up."""
    weight = torch.nn.Parameter(torch.ones(4, 2))
    scaler = GradScaler()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    rows = torch.nn.functional.embedding(torch.tensor([1, 3, 1]), weight, sparse=True)
    factors = torch.tensor([[1.0, 2.0], [3.0, -4.0], [5.0, -2.0]])
    scaler.scale((rows * factors).sum()).backward()
    assert weight.grad.is_sparse
    dense = torch.tensor([[0.0, 0.0], [6.0, 0.0], [0.0, 0.0], [3.0, -4.0]])
    norm, clipped = unscaled_and_clipped(
        [torch.nn.Parameter(torch.ones(4, 2))], [dense], 0.5, norm_type
    )
    torch.testing.assert_close(scaler.clip_grad_norm_(optimizer, 0.5, norm_type), norm)
    scaler.step(optimizer)
    torch.testing.assert_close(weight.grad.to_dense(), clipped[0])
    torch.testing.assert_close(weight.detach(), 1.0 - 0.1 * clipped[0])


# Norms that are not finite, and bad arguments.


def test_the_norm_of_millions_of_gradients_is_exact_to_float32():
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.zeros(2**22 + 5))
    optimizer, scaler = plain_sgd([parameter]), GradScaler(init_scale=2.0**16)
    gradient = torch.randn(parameter.shape)
    scaler.scale((parameter * gradient).sum()).backward()
    norm = scaler.clip_grad_norm_(optimizer, 1.0).item()
    exact = gradient.double().norm().item()
    assert norm == pytest.approx(exact, rel=1e-6)
    assert get_total_norm([gradient]).item() != pytest.approx(exact, rel=1e-6)  # torch's own


def test_a_norm_that_is_not_finite_is_returned_and_the_step_skipped(ours, overflowed, exact):
    before = exact(ours.parameters)
    assert ours.backward(overflowed).clip(0.5) == INF
    ours.finish()
    assert exact(ours.parameters) == before
    assert ours.scaler.get_scale() == 2.0**15


def test_a_norm_that_is_not_finite_can_be_an_error(ours, native, overflowed, stepped):
    before = stepped(ours.backward(overflowed).optimizer)
    with pytest.raises(RuntimeError, match=r"norm.*inf"):
        ours.clip(0.5, error_if_nonfinite=True)
    assert stepped(ours.optimizer) == before
    ours.finish()
    assert ours.scaler.last_step(ours.optimizer).skipped


# One reading of the gradients.


class Calls(TorchDispatchMode):
    """Counts what is done to every tensor of a list at once."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def test_clipping_reads_the_gradients_once_and_step_multiplies_them_once_or_not_at_all(
    ours, finite
):
    until_step = Counter()
    ours.optimizer.register_step_pre_hook(lambda *_: until_step.update(calls.counts))
    ours.backward(finite)
    with Calls() as calls:
        ours.clip(0.5)
        ours.finish()
    assert until_step["_foreach_norm"] == 1
    assert until_step["_foreach_mul_"] == (0 if ours.fused else 1)
    assert until_step["_amp_foreach_non_finite_check_and_unscale_"] == 0


def test_a_norm_that_overflows_though_the_gradients_are_finite_skips_nothing(ours, native):
    huge = [torch.full((2, 3), 2.0**50), torch.full((4,), 2.0**51)]
    mine = ours.backward(huge).clip(1.0)
    theirs = native.backward(huge).unscale().clip(1.0)
    assert mine.item() == theirs.item()
    ours.finish()
    native.finish()
    assert ours.scaler.last_step(ours.optimizer).applied
    assert_close(ours, native)


def test_a_skipped_step_leaves_gradients_unscaled_as_torch_s_sequence_does(
    ours, native, overflowed, exact
):
    ours.backward(overflowed).clip(0.5)
    ours.finish()
    native.backward(overflowed).unscale().finish()
    mine, theirs = ([p.grad for p in side.parameters] for side in (ours, native))
    assert exact(mine) == exact(theirs)


def test_without_clipping_every_bit_is_torch_s(ours, native, finite, stepped):
    for gradients in (finite, [gradient / 3 for gradient in finite]):
        ours.backward(gradients).clip(INF)
        native.backward(gradients).unscale()
        ours.finish()
        native.finish()
    assert stepped(ours.optimizer) == stepped(native.optimizer)


@pytest.mark.parametrize("name", ["unscale_", "_unscale_grads_"])
def test_a_subclass_that_unscales_in_its_own_way_is_asked_to(name, kind, parameters, finite):
    calls = []

    class Sharded(GradScaler):
        pass

    def method(self, *args, **kwargs):
        calls.append(name)
        return getattr(super(Sharded, self), name)(*args, **kwargs)

    setattr(Sharded, name, method)
    scaler, optimizer = Sharded(), kind(parameters)
    scaler.scale(sum((p * g).sum() for p, g in zip(parameters, finite, strict=True))).backward()
    scaler.clip_grad_norm_(optimizer, 0.5)
    scaler.step(optimizer)
    assert calls == [name]


@pytest.mark.parametrize("value", [INF, -INF, math.nan])
def test_a_fused_step_skips_what_is_found_in_large_gradients_and_in_small(value):
    for overflowing in (0, 1):
        parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((200, 100), (4,))]
        optimizer = torch.optim.AdamW(parameters, fused=True)
        scaler = GradScaler()
        scaler.scale(sum(parameter.sum() for parameter in parameters)).backward()
        parameters[overflowing].grad.view(-1)[3] = value
        scaler.step(optimizer)
        scaler.update()
        assert scaler.last_step(optimizer).skipped
        assert scaler.get_scale() == 2.0**15
        assert all((parameter == 0).all() for parameter in parameters)


@pytest.mark.parametrize(
    ("first", "second", "finite"), [(3e38, 3e38, True), (INF, -INF, False), (3e38, -INF, False)]
)
def test_a_fused_step_is_not_skipped_for_a_sum_that_overflows(first, second, finite):
    parameter = torch.nn.Parameter(torch.zeros(200, 100))
    optimizer, scaler = torch.optim.AdamW([parameter], fused=True), GradScaler(init_scale=1.0)
    scaler.scale(torch.ones(()))
    parameter.grad = torch.zeros_like(parameter)
    parameter.grad[0, 0], parameter.grad[-1, -1] = first, second
    scaler.step(optimizer)
    assert scaler.last_step(optimizer).applied == finite


def test_after_that_error_the_step_is_not_clipped(ours, native, finite, stepped):
    ours.backward(finite)
    first = ours.parameters[0].grad
    good = first[0, 0].item()
    ours.unscale()
    first[0, 0] = INF
    with pytest.raises(RuntimeError, match="norm"):
        ours.clip(0.5, error_if_nonfinite=True)
    first[0, 0] = good / 2.0**16
    ours.finish()
    native.backward(finite).finish()
    assert stepped(ours.optimizer) == stepped(native.optimizer)


def test_a_step_that_raised_can_be_taken_again(ours, native, finite, stepped):
    def refuse(*_):
        raise ZeroDivisionError

    for side in (ours, native):
        side.backward(finite)
        if side is native:
            side.unscale()
        side.clip(100.0)
        hook = side.optimizer.register_step_pre_hook(refuse)
        with pytest.raises(ZeroDivisionError):
            side.scaler.step(side.optimizer)
        hook.remove()
        side.finish()
    assert stepped(ours.optimizer) == stepped(native.optimizer)


@pytest.mark.parametrize("scale", [2.0**-80, 2.0**-100, 0.5])
def test_a_scale_that_squares_of_gradients_underflow_at_is_no_hindrance(
    scale, kind, parameters, backward, finite, stepped
):
    sides = [
        Side(scaler(init_scale=scale), kind, parameters, backward)
        for scaler in (partial(GradScaler, "cpu"), partial(torch.amp.GradScaler, "cpu"))
    ]
    norms = []
    for side in sides:
        side.backward(finite)
        if isinstance(side.scaler, GradScaler):
            norms.append(side.scaler.clip_grad_norm_(side.optimizer, 0.5))
        else:
            norms.append(clip_grad_norm_(side.unscale().parameters, 0.5))
        side.finish()
    assert norms[0] == norms[1]
    assert stepped(sides[0].optimizer) == stepped(sides[1].optimizer)


def test_a_finite_norm_is_no_error(ours, native, finite):
    mine = ours.backward(finite).clip(0.5, error_if_nonfinite=True)
    assert mine == native.backward(finite).unscale().clip(0.5, error_if_nonfinite=True)


@pytest.mark.parametrize("max_norm", [-1.0, math.nan, -INF])
@pytest.mark.parametrize("unscaled", [False, True], ids=["scaled", "unscaled"])
def test_a_bad_max_norm_is_an_error_that_changes_nothing(
    ours, max_norm, unscaled, finite, everything
):
    ours.backward(finite)
    if unscaled:
        ours.unscale()
    before = everything(ours.scaler, ours.optimizer)
    with pytest.raises(ValueError, match=f"max_norm.*{max_norm}"):
        ours.clip(max_norm)
    assert everything(ours.scaler, ours.optimizer) == before


def test_clipping_before_a_step_with_a_closure_is_refused_not_lost():
    parameter = torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = GradScaler()
    scaler.scale(parameter * 10).backward()
    scaler.clip_grad_norm_(optimizer, 0.5)
    with pytest.raises(RuntimeError, match="in the closure"):
        scaler.step(optimizer, lambda: None)
    scaler.step(optimizer)
    assert parameter.item() == pytest.approx(0.5)


def test_a_second_clip_of_a_norm_that_overflowed_finds_zeros_as_torch_s_does(parameters):
    huge = [torch.full_like(parameter, 1e38) for parameter in parameters]
    for clip_first in (True, False):
        twins = copy.deepcopy(parameters)
        optimizer, scaler = plain_sgd(twins), GradScaler(init_scale=1.0)
        scaler.scale(torch.ones(()))
        for parameter, gradient in zip(twins, huge, strict=True):
            parameter.grad = gradient.clone()
        if not clip_first:
            scaler.unscale_(optimizer)
        norms = [scaler.clip_grad_norm_(optimizer, 1.0).item() for _ in range(2)]
        scaler.step(optimizer)
        assert norms == [INF, 0.0]
        assert all(map(torch.equal, twins, parameters))


MANY = {
    "large": [(1000, 1000)],
    "small": [(64, 64)] * 2000,
    "small of two shapes": [(64, 64), (64, 65)] * 1000,
}


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("value", [1.0, INF])
@pytest.mark.parametrize("shapes", MANY.values(), ids=MANY)
def test_no_copy_of_the_gradients_is_made(clip, value, shapes):
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    optimizer, scaler = torch.optim.SGD(parameters, fused=True), GradScaler()

    def iteration():
        scaler.scale(torch.ones(()))
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        parameters[-1].grad[0, 0] = value
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            if clip:
                scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
        scaler.update()
        return profiled

    iteration()
    events = iteration().profiler.kineto_results.events()
    changes = [event.nbytes() for event in events if event.name() == "[memory]"]
    assert max(itertools.accumulate(changes)) < sum(p.nbytes for p in parameters) / 100
