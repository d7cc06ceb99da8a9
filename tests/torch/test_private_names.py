"""The private names of torch.amp.GradScaler that other people's code reads, sets and overrides."""

import pickle
from collections import defaultdict

import pytest
import torch
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from gradscaler.torch import GradScaler


@pytest.fixture
def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.fixture
def both(backward):
    """The same call on ours and on torch's, each after a backward pass of its own."""

    def call(function, gradients, shapes=((2, 3), (4,))):
        results = []
        for kind in (GradScaler, torch.amp.GradScaler):
            scaler = kind("cpu", init_scale=1024.0)
            parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
            optimizer = torch.optim.SGD(parameters, lr=0.1)
            backward(scaler, parameters, gradients)
            results.append(function(scaler, optimizer))
        return results

    return call


def stage(scaler, optimizer):
    return scaler._per_optimizer_states[id(optimizer)]["stage"]


# Reading.


def test_the_stage_follows_the_calls_as_torch_s_does(both, finite):
    def stages(scaler, optimizer):
        seen = [stage(scaler, optimizer)]
        scaler.unscale_(optimizer)
        seen.append(stage(scaler, optimizer))
        scaler.step(optimizer)
        seen.append(stage(scaler, optimizer))
        scaler.update()
        return [*seen, stage(scaler, optimizer)]

    ours, theirs = both(stages, finite)
    assert ours == theirs == [OptState.READY, OptState.UNSCALED, OptState.STEPPED, OptState.READY]


@pytest.mark.parametrize("gradients", ["finite", "overflowed"])
def test_found_inf_is_by_device_as_torch_s(both, gradients, exact, request):
    def found_inf(scaler, optimizer):
        scaler.unscale_(optimizer)
        record = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        return exact(record), exact(scaler._found_inf_per_device(optimizer))

    ours, theirs = both(found_inf, request.getfixturevalue(gradients))
    assert ours == theirs


@pytest.mark.parametrize("gradients", ["finite", "overflowed"])
def test_checking_returns_torch_s_flags_and_leaves_the_gradients(both, gradients, exact, request):
    def check(scaler, optimizer):
        flags = scaler._check_inf_per_device(optimizer)
        grads = [p.grad for p in optimizer.param_groups[0]["params"]]
        return exact(flags), exact(grads), stage(scaler, optimizer)

    ours, theirs = both(check, request.getfixturevalue(gradients))
    assert ours == theirs


@pytest.mark.parametrize("gradients", ["finite", "overflowed"])
def test_unscaling_by_hand_is_torch_s(both, gradients, exact, request):
    def unscale(scaler, optimizer):
        found_inf = torch.tensor(0.0)
        flags = scaler._unscale_grads_(optimizer, torch.tensor(0.5), found_inf, False)
        grads = [p.grad for p in optimizer.param_groups[0]["params"]]
        return exact(flags), exact(found_inf), exact(grads)

    ours, theirs = both(unscale, request.getfixturevalue(gradients))
    assert ours == theirs


def test_the_scale_is_read_without_waiting(scaler):
    assert scaler._get_scale_async() is None
    scaler.scale(torch.ones(()))
    assert scaler._get_scale_async() is scaler._scale


def test_the_scale_tensor_stays_the_same_object(scaler, optimizer, backward, parameters, finite):
    backward(scaler, parameters, finite)
    tensors = scaler._scale, scaler._growth_tracker
    scaler.step(optimizer)
    scaler.update()
    assert (scaler._scale is tensors[0], scaler._growth_tracker is tensors[1]) == (True, True)


def test_asking_for_a_stage_first_does_not_disturb_what_follows(
    scaler, optimizer, backward, parameters, finite
):
    backward(scaler, parameters, finite)
    assert stage(scaler, optimizer) is OptState.READY
    scaler.clip_grad_norm_(optimizer, 1e-3)
    scaler.step(optimizer)
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
    assert norm.item() == pytest.approx(1e-3, rel=1e-2)


def test_placing_the_scale_by_hand(scaler):
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    assert scaler._scale == 1024.0
    assert scaler._scale.dtype is torch.float32
    assert scaler._growth_tracker == 0
    assert scaler._growth_tracker.dtype is torch.int32


def test_placing_the_scale_twice_is_torch_s_error(scaler):
    theirs = torch.amp.GradScaler("cpu")
    for each in (scaler, theirs):
        each._lazy_init_scale_growth_tracker(torch.device("cpu"))
        with pytest.raises(AssertionError):
            each._lazy_init_scale_growth_tracker(torch.device("cpu"))


def test_a_loaded_growth_tracker_waits_under_torch_s_name(scaler):
    scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": 7})
    assert scaler._init_growth_tracker == 7
    scaler.scale(torch.ones(()))
    assert scaler._growth_tracker == 7


# Setting.


def test_a_scale_capped_from_outside_is_the_scale(scaler, backward, parameters, finite, optimizer):
    scaler.scale(torch.ones(()))
    scaler._scale = torch.tensor(min(scaler._scale.item(), 64.0))
    backward(scaler, parameters, finite)
    scaler.unscale_(optimizer)
    assert scaler.get_scale() == 64.0
    for parameter, gradient in zip(parameters, finite, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_a_scale_capped_after_each_update_goes_on_growing_from_the_cap(
    backward, parameters, finite
):
    scales = []
    for kind in (GradScaler, torch.amp.GradScaler):
        scaler = kind("cpu", init_scale=1024.0, growth_interval=1)
        for _ in range(3):
            optimizer = torch.optim.SGD(parameters, lr=0.0)
            optimizer.zero_grad()
            backward(scaler, parameters, finite)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            scaler._scale = torch.tensor(min(scaler._scale.item(), 1024.0))
    assert scales == [2048.0] * 6


def test_the_initial_scale_can_be_set_before_the_first_loss():
    scaler = GradScaler()
    scaler._init_scale = 8.0
    assert scaler.scale(torch.ones(())) == 8.0


def test_the_growth_tracker_can_be_set(scaler):
    scaler.scale(torch.ones(()))
    scaler._growth_tracker = torch.tensor(5, dtype=torch.int32)
    assert scaler.state_dict()["_growth_tracker"] == 5


@pytest.mark.parametrize(
    ("name", "value"), [("growth_factor", 3.0), ("backoff_factor", 0.1), ("growth_interval", 7)]
)
def test_a_private_parameter_that_is_set_counts(scaler, name, value):
    setattr(scaler, f"_{name}", value)
    assert getattr(scaler, f"_{name}") == scaler.state_dict()[name] == value


def test_the_records_can_be_replaced_by_torch_s_empty_ones(
    scaler, optimizer, backward, parameters, finite
):
    backward(scaler, parameters, finite)
    scaler.unscale_(optimizer)
    scaler._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
    assert stage(scaler, optimizer) is OptState.READY
    scaler.unscale_(optimizer)
    assert stage(scaler, optimizer) is OptState.UNSCALED


def test_a_stage_that_is_set_counts(scaler, optimizer, backward, parameters, finite):
    backward(scaler, parameters, finite)
    scaler.unscale_(optimizer)
    scaler._per_optimizer_states[id(optimizer)]["stage"] = OptState.READY
    scaler.unscale_(optimizer)
    for parameter, gradient in zip(parameters, finite, strict=True):
        assert torch.allclose(parameter.grad * 1024.0, gradient)


def test_found_inf_that_is_set_skips_the_step(
    scaler, optimizer, backward, parameters, finite, exact
):
    before = exact(parameters)
    backward(scaler, parameters, finite)
    scaler.unscale_(optimizer)
    for flag in scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
        flag.fill_(1.0)  # as an all-reduce over ranks does
    scaler.step(optimizer)
    scaler.update()
    assert exact(parameters) == before
    assert scaler.get_scale() == 512.0


# Overriding.


class Logged(GradScaler):
    """Overrides what subclasses of torch's class override, and writes down each call."""

    def __init__(self, *args, **kwargs):
        self.calls = []
        super().__init__(*args, **kwargs)

    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
        self.calls.append(("unscale", inv_scale.item(), found_inf.item(), allow_fp16))
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)

    def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
        self.calls.append(("step", optimizer_state["stage"], args, kwargs))
        return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)

    def _lazy_init_scale_growth_tracker(self, dev):
        self.calls.append(("place", dev))
        super()._lazy_init_scale_growth_tracker(dev)


def test_overridden_names_are_called_with_torch_s_arguments(
    backward, parameters, finite, optimizer
):
    scaler = Logged(init_scale=1024.0)
    backward(scaler, parameters, finite)
    scaler.step(optimizer)
    assert scaler.calls == [
        ("place", torch.device("cpu")),
        ("unscale", 2.0**-10, 0.0, False),
        ("step", OptState.UNSCALED, (), {}),
    ]


def test_a_fused_optimizer_s_check_goes_through_the_overridden_name(backward, parameters, finite):
    scaler = Logged(init_scale=1024.0)
    backward(scaler, parameters, finite)
    scaler.step(torch.optim.AdamW(parameters, fused=True))
    assert scaler.calls[1:] == [("unscale", 1.0, 0.0, True)]


def test_flags_that_an_overridden_unscaling_returns_decide(
    backward, parameters, finite, optimizer, exact
):
    class Pessimist(GradScaler):
        def _unscale_grads_(self, *args):
            return {torch.device("cpu"): torch.tensor(1.0)}

    before = exact(parameters)
    scaler = Pessimist(init_scale=1024.0)
    backward(scaler, parameters, finite)
    scaler.step(optimizer)
    scaler.update()
    assert exact(parameters) == before
    assert scaler.get_scale() == 512.0


class StepsByItself(GradScaler):
    """Decides in ``_maybe_opt_step``, as torch's own does, without calling it."""

    def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
        if sum(flag.item() for flag in optimizer_state["found_inf_per_device"].values()):
            return None
        return optimizer.step(*args, **kwargs)


def test_a_step_that_is_overridden_whole_is_taken(backward, parameters, finite, optimizer, exact):
    before = exact(parameters)
    scaler = StepsByItself()
    backward(scaler, parameters, finite)
    scaler.step(optimizer)
    assert exact(parameters) != before


def test_clipping_reaches_a_step_that_is_overridden_whole(backward, parameters, finite, optimizer):
    scaler = StepsByItself()
    backward(scaler, parameters, finite)
    scaler.clip_grad_norm_(optimizer, 1e-3)
    scaler.step(optimizer)
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
    assert norm.item() == pytest.approx(1e-3, rel=1e-2)


class UnscalesByItself(GradScaler):
    """Unscales as torch's own does, without calling it, as torch's scaler for FSDP does."""

    def unscale_(self, optimizer):
        record = self._per_optimizer_states[id(optimizer)]
        if record["stage"] is OptState.UNSCALED:
            raise RuntimeError
        inv_scale = self._scale.double().reciprocal().float()
        record["found_inf_per_device"] = self._unscale_grads_(
            optimizer, inv_scale, torch.tensor(0.0), False
        )
        record["stage"] = OptState.UNSCALED


@pytest.mark.parametrize("gradients", ["finite", "overflowed"])
def test_unscaling_can_be_overridden_whole(
    gradients, backward, parameters, optimizer, exact, request
):
    before = exact(parameters)
    scaler = UnscalesByItself(init_scale=1024.0)
    backward(scaler, parameters, request.getfixturevalue(gradients))
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
    outcome = scaler.last_step(optimizer)
    assert outcome.applied is (gradients == "finite") is (exact(parameters) != before)
    assert outcome.scale == 1024.0


def test_placing_can_be_overridden_whole():
    class PlacesByItself(GradScaler):
        def _lazy_init_scale_growth_tracker(self, dev):
            self._scale = torch.full((), 2 * self._init_scale, device=dev)
            self._growth_tracker = torch.full((), 3, dtype=torch.int32, device=dev)

    scaler = PlacesByItself(init_scale=8.0)
    assert scaler.scale(torch.ones(())) == 16.0
    assert scaler._growth_tracker == 3


def test_a_subclass_with_state_of_its_own_is_copied_with_it():
    scaler = Logged()
    scaler.scale(torch.ones(()))
    assert pickle.loads(pickle.dumps(scaler)).calls == scaler.calls
