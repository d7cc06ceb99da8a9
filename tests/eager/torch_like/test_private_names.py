"""The private names of PyTorch's scaler that other people's code reads, sets and overrides."""

import importlib
import pickle
from collections import defaultdict

import numpy as np
import pytest

from tests.support.eager import library

native_module = importlib.import_module(f"{library.name}.amp.grad_scaler")
OptState = native_module.OptState
GradScaler = library.GradScaler
CPU = library.framework.device("cpu")


@pytest.fixture
def optimizer(parameters):
    return library.sgd(parameters)


@pytest.fixture
def both(native):
    """The same call on ours and on the framework's, each after a backward pass of its own."""

    def call(function, gradients):
        results = []
        for make_scaler in (library.scaler, native):
            scaler, parameters = make_scaler(init_scale=1024.0), library.parameters()
            optimizer = library.sgd(parameters)
            library.backward(scaler, parameters, gradients)
            results.append(function(scaler, optimizer))
        return results

    return call


@pytest.fixture(params=["finite", "overflowed"])
def gradients(request):
    return request.getfixturevalue(request.param)


def stage(scaler, optimizer):
    return scaler._per_optimizer_states[id(optimizer)]["stage"]


def gradients_of(optimizer):
    return library.exact([parameter.grad for parameter in library.owned(optimizer)])


def norm(optimizer, norm_type=2.0):
    grads = [parameter.grad for parameter in library.owned(optimizer)]
    return library.framework.nn.utils.get_total_norm(grads, norm_type).item()


# Reading.


def test_a_record_equals_the_framework_s_dict(scaler, optimizer, parameters, finite):
    fresh = scaler._per_optimizer_states["no optimizer"]
    assert fresh == {"stage": OptState.READY, "found_inf_per_device": {}}
    assert dict(fresh) == fresh
    library.backward(scaler, parameters, finite)
    scaler.unscale_(optimizer)
    record = scaler._per_optimizer_states[id(optimizer)]
    assert sorted(record) == ["found_inf_per_device", "stage"]
    assert record["stage"] is OptState.UNSCALED
    assert record != fresh
    with pytest.raises(TypeError, match="stage"):
        del record["stage"]


def test_a_dict_that_a_framework_puts_in_does_not_stop_the_next_update(
    scaler, optimizer, parameters, finite
):
    library.backward(scaler, parameters, finite)
    scaler.step(optimizer)
    scaler._per_optimizer_states["its own"] = {}
    scaler.update()


def test_the_stages_are_the_framework_s():
    ours = importlib.import_module(f"gradscaler.{library.name}")
    assert ours.OptState is OptState
    assert {"GradScaler", "OptState"} <= set(ours.__all__)


def test_the_stage_follows_the_calls_as_the_framework_s_does(both, finite):
    def stages(scaler, optimizer):
        seen = [stage(scaler, optimizer)]
        for call in (scaler.unscale_, scaler.step, lambda _: scaler.update()):
            call(optimizer)
            seen.append(stage(scaler, optimizer))
        return seen

    ours, theirs = both(stages, finite)
    assert ours == theirs == [OptState.READY, OptState.UNSCALED, OptState.STEPPED, OptState.READY]


def test_found_inf_is_by_device_as_the_framework_s(both, gradients):
    def found_inf(scaler, optimizer):
        scaler.unscale_(optimizer)
        record = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        return library.exact([record, scaler._found_inf_per_device(optimizer)])

    ours, theirs = both(found_inf, gradients)
    assert ours == theirs


def test_checking_returns_the_framework_s_flags_and_leaves_the_gradients(both, gradients):
    def check(scaler, optimizer):
        flags = library.exact(scaler._check_inf_per_device(optimizer))
        return flags, gradients_of(optimizer), stage(scaler, optimizer)

    ours, theirs = both(check, gradients)
    assert ours == theirs


def test_unscaling_by_hand_is_the_framework_s_and_leaves_the_flag_it_was_handed(both, gradients):
    def unscale(scaler, optimizer):
        found_inf = library.tensor(0.0)
        flags = scaler._unscale_grads_(optimizer, library.tensor(0.5), found_inf, False)
        return library.exact(flags), found_inf.item(), gradients_of(optimizer)

    ours, theirs = both(unscale, gradients)
    assert ours[:2] == theirs[:2]
    if library.name == "torch" or np.isfinite(gradients[-1]).all():
        assert ours[2] == theirs[2]  # TensorPlay's kernel leaves all scaled after an overflow


def test_the_scale_is_read_without_waiting(scaler):
    assert scaler._get_scale_async() is None
    scaler.scale(library.tensor(1.0))
    assert scaler._get_scale_async() is scaler._scale


def test_the_scale_tensor_stays_the_same_object(scaler, optimizer, parameters, finite):
    library.backward(scaler, parameters, finite)
    tensors = scaler._scale, scaler._growth_tracker
    scaler.step(optimizer)
    scaler.update()
    scaler.load_state_dict({**scaler.state_dict(), "scale": 8.0, "_growth_tracker": 5})
    assert (scaler._scale is tensors[0], scaler._growth_tracker is tensors[1]) == (True, True)
    assert (tensors[0].item(), tensors[1].item()) == (8.0, 5)


def test_asking_for_a_stage_first_does_not_disturb_what_follows(
    scaler, optimizer, parameters, finite
):
    library.backward(scaler, parameters, finite)
    assert stage(scaler, optimizer) is OptState.READY
    scaler.clip_grad_norm_(optimizer, 1e-3)
    scaler.step(optimizer)
    assert norm(optimizer) == pytest.approx(1e-3, rel=1e-2)


def test_placing_the_scale_by_hand(scaler):
    scaler._lazy_init_scale_growth_tracker(CPU)
    placed = [scaler._scale, scaler._growth_tracker]
    expected = [library.tensor(1024.0), library.tensor(0, "int32")]
    assert library.exact(placed) == library.exact(expected)


def test_placing_the_scale_again_leaves_it_where_it_is(scaler):
    """Accelerate places it whenever it loads a checkpoint; the framework's own scaler raises."""
    scaler.scale(library.tensor(1.0))
    placed = scaler._scale, scaler._growth_tracker
    scaler.load_state_dict({**scaler.state_dict(), "scale": 8.0, "_growth_tracker": 7})
    scaler._lazy_init_scale_growth_tracker(CPU)
    assert (scaler._scale is placed[0], scaler._growth_tracker is placed[1]) == (True, True)
    assert (scaler.get_scale(), scaler._growth_tracker.item()) == (8.0, 7)


def test_a_loaded_growth_tracker_waits_under_the_framework_s_name(scaler):
    scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": 7})
    assert scaler._init_growth_tracker == 7
    scaler.scale(library.tensor(1.0))
    assert scaler._growth_tracker.item() == 7


# Setting.


def test_a_scale_capped_from_outside_is_the_scale(scaler, parameters, finite, optimizer):
    scaler.scale(library.tensor(1.0))
    scaler._scale = library.tensor(min(scaler._scale.item(), 64.0))
    library.backward(scaler, parameters, finite)
    scaler.unscale_(optimizer)
    assert scaler.get_scale() == 64.0
    assert gradients_of(optimizer) == library.exact(list(map(library.tensor, finite)))


def test_a_scale_capped_after_each_update_goes_on_growing_from_the_cap(native):
    for make_scaler in (library.scaler, native):
        scaler = make_scaler(init_scale=1024.0, growth_interval=1)
        for _ in range(3):
            assert library.train(scaler, "o") == [2048.0]
            scaler._scale = library.tensor(min(scaler._scale.item(), 1024.0))


def test_the_initial_state_can_be_set_before_the_first_loss(scaler):
    scaler._init_scale, scaler._init_growth_tracker = 8.0, 5
    assert scaler.scale(library.tensor(1.0)).item() == 8.0
    assert scaler._growth_tracker.item() == 5


def test_the_growth_tracker_can_be_set(scaler):
    scaler.scale(library.tensor(1.0))
    scaler._growth_tracker = library.tensor(5, "int32")
    assert scaler.state_dict()["_growth_tracker"] == 5


@pytest.mark.parametrize(
    ("name", "value"), [("growth_factor", 3.0), ("backoff_factor", 0.1), ("growth_interval", 7)]
)
def test_a_private_parameter_that_is_set_counts(scaler, name, value):
    setattr(scaler, f"_{name}", value)
    assert getattr(scaler, f"_{name}") == scaler.state_dict()[name] == value


def test_the_records_can_be_replaced_by_the_framework_s_empty_ones(
    scaler, optimizer, parameters, finite
):
    library.backward(scaler, parameters, finite)
    scaler.unscale_(optimizer)
    scaler._per_optimizer_states = defaultdict(native_module._refresh_per_optimizer_state)
    assert stage(scaler, optimizer) is OptState.READY
    scaler.unscale_(optimizer)
    assert stage(scaler, optimizer) is OptState.UNSCALED
    stepped = {"stage": OptState.STEPPED, "found_inf_per_device": {}}
    scaler._per_optimizer_states = {id(optimizer): stepped}
    assert stage(scaler, optimizer) is OptState.STEPPED


def test_a_stage_that_is_set_counts(scaler, optimizer, parameters, finite):
    library.backward(scaler, parameters, finite)
    scaler.unscale_(optimizer)
    scaler._per_optimizer_states[id(optimizer)]["stage"] = OptState.READY
    scaler.unscale_(optimizer)
    for parameter, gradient in zip(parameters, finite, strict=True):
        np.testing.assert_allclose(library.numpy(parameter.grad) * 1024.0, gradient, rtol=1e-6)


def test_found_inf_that_is_set_skips_the_step(scaler, optimizer, parameters, finite):
    before = library.exact(parameters)
    library.backward(scaler, parameters, finite)
    scaler.unscale_(optimizer)
    for flag in scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
        flag.fill_(1.0)  # as an all-reduce over ranks does
    scaler.step(optimizer)
    scaler.update()
    assert library.exact(parameters) == before
    assert scaler.get_scale() == 512.0


def test_a_stage_without_flags_is_an_error(scaler, optimizer, parameters, finite):
    before = library.exact(parameters)
    library.backward(scaler, parameters, finite)
    scaler._per_optimizer_states[id(optimizer)]["stage"] = OptState.UNSCALED
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        scaler.step(optimizer)
    assert library.exact(parameters) == before


# Overriding.


class Logged(GradScaler):
    """Overrides the methods that subclasses of the framework's class do, and records each call."""

    def __init__(self, *args, **kwargs):
        self.calls = []
        super().__init__(*args, **kwargs)

    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
        arguments = optimizer, inv_scale.item(), found_inf.item(), allow_fp16
        self.calls.append(("unscale", *arguments))
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)

    def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
        self.calls.append(("step", optimizer_state["stage"], args, kwargs))
        return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)

    def _lazy_init_scale_growth_tracker(self, dev):
        self.calls.append(("place", dev.type))
        super()._lazy_init_scale_growth_tracker(dev)


def test_overridden_names_are_called_with_the_framework_s_arguments(parameters, finite, optimizer):
    scaler = Logged(init_scale=1024.0)
    library.backward(scaler, parameters, finite)
    scaler.step(optimizer)
    assert scaler.calls == [
        ("place", "cpu"),
        ("unscale", optimizer, 2.0**-10, 0.0, False),
        ("step", OptState.UNSCALED, (), {}),
    ]


def test_a_fused_optimizer_s_check_goes_through_the_overridden_name(parameters, finite):
    scaler = Logged(init_scale=1024.0)
    library.backward(scaler, parameters, finite)
    optimizer = library.sgd(parameters, fused=True)
    scaler.step(optimizer)
    assert scaler.calls[1:] == [("unscale", optimizer, 1.0, 0.0, True)]


def test_an_override_that_changes_its_inv_scale_changes_no_later_step(parameters, finite):
    class Halving(GradScaler):
        def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
            inv_scale.mul_(0.5)
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)

    for scaler, factor in ((Halving(init_scale=1024.0), 0.5), (GradScaler(init_scale=1024.0), 1.0)):
        library.backward(scaler, parameters, finite)
        scaled = [library.numpy(parameter.grad).copy() for parameter in parameters]
        scaler.unscale_(library.sgd(parameters))
        for parameter, before in zip(parameters, scaled, strict=True):
            assert (library.numpy(parameter.grad) == before * factor / 1024.0).all()
            parameter.grad = None


@pytest.mark.parametrize("name", ["unscale_", "_unscale_grads_"])
def test_clipping_asks_a_subclass_that_unscales_in_its_own_way(
    name, make_optimizer, parameters, finite
):
    calls = []

    class Sharded(GradScaler):
        pass

    def method(self, *args, **kwargs):
        calls.append(name)
        return getattr(super(Sharded, self), name)(*args, **kwargs)

    setattr(Sharded, name, method)
    scaler, optimizer = Sharded(), make_optimizer(parameters)
    library.backward(scaler, parameters, finite)
    scaler.clip_grad_norm_(optimizer, 0.5)
    scaler.step(optimizer)
    assert calls == [name]


def test_flags_that_an_overridden_unscaling_returns_decide(parameters, finite, optimizer):
    class Pessimist(GradScaler):
        def _unscale_grads_(self, *args):
            return {CPU: library.tensor(1.0)}

    before = library.exact(parameters)
    scaler = Pessimist(init_scale=1024.0)
    library.backward(scaler, parameters, finite)
    scaler.step(optimizer)
    scaler.update()
    assert library.exact(parameters) == before
    assert scaler.get_scale() == 512.0


@pytest.mark.parametrize("norm_type", [None, 2.0, 3.0])
def test_a_step_that_is_overridden_whole_is_taken_and_clipped(
    norm_type, parameters, gradients, optimizer
):
    class StepsByItself(GradScaler):
        """Decides in ``_maybe_opt_step``, as the framework's does, without calling it."""

        def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
            if any(flag.item() for flag in optimizer_state["found_inf_per_device"].values()):
                return None
            return optimizer.step(*args, **kwargs)

    finite = np.isfinite(gradients[-1]).all()
    before = library.exact(parameters)
    scaler = StepsByItself()
    library.backward(scaler, parameters, gradients)
    if norm_type:
        scaler.clip_grad_norm_(optimizer, 1e-3, norm_type)
    scaler.step(optimizer)
    assert (library.exact(parameters) != before) == finite
    if norm_type and finite:
        assert norm(optimizer, norm_type) == pytest.approx(1e-3, rel=1e-2)


class UnscalesByItself(GradScaler):
    """Unscales as the framework's does, without calling it, as PyTorch's scaler for FSDP does."""

    def unscale_(self, optimizer):
        record = self._per_optimizer_states[id(optimizer)]
        if record["stage"] is OptState.UNSCALED:
            raise RuntimeError
        inv_scale = self._scale.double().reciprocal().float()
        record["found_inf_per_device"] = self._unscale_grads_(
            optimizer, inv_scale, library.tensor(0.0), False
        )
        record["stage"] = OptState.UNSCALED


def test_unscaling_can_be_overridden_whole(gradients, parameters, optimizer):
    before = library.exact(parameters)
    scaler = UnscalesByItself(init_scale=1024.0)
    library.backward(scaler, parameters, gradients)
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
    outcome = scaler.last_step(optimizer)
    assert (
        outcome.applied == np.isfinite(gradients[-1]).all() == (library.exact(parameters) != before)
    )
    assert outcome.scale == 1024.0


def test_unscaling_that_is_overridden_whole_divides_by_the_scale_of_the_gradients(
    parameters, finite
):
    """Which reads ``_scale``, where the scale in force is another one."""
    for way in ("step", "clip", "unscaled before", "closure", "attempts"):
        scaler = UnscalesByItself(init_scale=1024.0, growth_interval=1)
        first, second = (library.sgd([parameter], lr=0.0) for parameter in parameters)
        bad = [finite[0], np.full_like(finite[1], np.inf)]

        def body(scaler=scaler, values=(bad, finite)):
            is_first = scaler.get_scale() == 1024.0
            for parameter in parameters:
                parameter.grad = None
            library.backward(scaler, parameters, values[0] if is_first else values[1])

        if way in ("step", "clip", "unscaled before"):
            library.backward(scaler, parameters, finite)
            if way == "unscaled before":
                scaler.unscale_(second)
            scaler.step(first)
            scaler.update()
            if way == "clip":
                scaler.clip_grad_norm_(second, 1e6)
        elif way == "attempts":
            for _ in scaler.attempts(second):
                body()
        scaler.step(second, *([body] if way == "closure" else []))
        np.testing.assert_allclose(library.numpy(parameters[1].grad), finite[1], rtol=1e-6)
        parameters[0].grad = parameters[1].grad = None


def test_placing_can_be_overridden_whole():
    class PlacesByItself(GradScaler):
        def _lazy_init_scale_growth_tracker(self, dev):
            self._scale = library.tensor(2 * self._init_scale)
            self._growth_tracker = library.tensor(3, "int32")

    scaler = PlacesByItself(init_scale=8.0)
    assert scaler.scale(library.tensor(1.0)).item() == 16.0
    assert scaler._growth_tracker.item() == 3


def test_a_subclass_with_state_of_its_own_is_copied_with_it():
    scaler = Logged()
    scaler.scale(library.tensor(1.0))
    assert pickle.loads(pickle.dumps(scaler)).calls == scaler.calls
