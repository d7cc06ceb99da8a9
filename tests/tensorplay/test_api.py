"""The surface of tensorplay.amp.GradScaler: signature, getters and setters, state, pickling."""

import collections
import copy
import inspect
import pickle

import pytest
import tensorplay as tp

import gradscaler.tensorplay
from gradscaler.tensorplay import GradScaler, OptState

KEYS = ["scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"]
OTHER_RULE = {
    "init_scale": 512.0,
    "growth_factor": 4.0,
    "backoff_factor": 0.25,
    "growth_interval": 3,
}
DOCUMENTED = {  # as the reference documentation has them
    "__init__": {
        "device": "cpu",
        "init_scale": 65536.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "enabled": True,
    },
    "get_backoff_factor": {},
    "get_growth_factor": {},
    "get_growth_interval": {},
    "get_scale": {},
    "is_enabled": {},
    "load_state_dict": {"state_dict": inspect.Parameter.empty},
    "scale": {"outputs": inspect.Parameter.empty},
    "set_backoff_factor": {"new_factor": inspect.Parameter.empty},
    "set_growth_factor": {"new_factor": inspect.Parameter.empty},
    "set_growth_interval": {"new_interval": inspect.Parameter.empty},
    "state_dict": {},
    "step": {"optimizer": inspect.Parameter.empty},  # and *args, **kwargs
    "unscale_": {"optimizer": inspect.Parameter.empty},
    "update": {"new_scale": None},
}


def native(**options):
    return tp.amp.GradScaler("cpu", **options)


# The class.


def test_it_is_a_tensorplay_grad_scaler():
    assert isinstance(GradScaler(), tp.amp.GradScaler)


def test_the_stages_are_tensorplay_s():
    assert OptState is tp.amp.grad_scaler.OptState


def test_the_module_offers_the_two_documented_classes():
    assert sorted(gradscaler.tensorplay.__all__) == ["GradScaler", "OptState"]


@pytest.mark.parametrize("method", DOCUMENTED)
def test_each_method_has_its_documented_arguments(method):
    parameters = inspect.signature(getattr(GradScaler, method)).parameters.values()
    positional = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert positional.pop("self") is inspect.Parameter.empty
    assert positional == DOCUMENTED[method]
    assert list(positional) == list(DOCUMENTED[method])


def test_what_is_not_documented_is_optional_and_keyword_only():
    for method, documented in DOCUMENTED.items():
        parameters = inspect.signature(getattr(GradScaler, method)).parameters.values()
        added = [p for p in parameters if p.name not in (*documented, "self", "args", "kwargs")]
        assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in added), method


def test_step_takes_any_further_arguments():
    parameters = inspect.signature(GradScaler.step).parameters
    assert parameters["args"].kind is inspect.Parameter.VAR_POSITIONAL
    assert parameters["kwargs"].kind is inspect.Parameter.VAR_KEYWORD


def test_everything_tensorplay_s_own_class_has_is_there():
    scaler = GradScaler()
    assert [name for name in dir(native()) if not hasattr(scaler, name)] == []


def test_every_method_of_tensorplay_s_own_class_is_documented_or_private():
    """So that no public method goes untested here."""
    public = [name for name in vars(tp.amp.GradScaler) if not name.startswith("_")]
    assert sorted(public) == sorted(name for name in DOCUMENTED if name != "__init__")


# The device.


def test_the_default_device_needs_no_cuda_and_warns_of_nothing(recwarn):
    assert GradScaler().is_enabled()
    assert recwarn.list == []


@pytest.fixture
def without_cuda(monkeypatch):
    monkeypatch.setattr(tp.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("without_cuda")
def test_cuda_without_cuda_warns_of_it_where_it_was_called():
    with pytest.warns(UserWarning, match=r"CUDA is not available\. Disabling") as warned:
        GradScaler("cuda")
    assert [each.filename for each in warned] == [__file__]


@pytest.mark.usefixtures("without_cuda")
@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
def test_cuda_without_cuda_disables_the_scaler_as_it_does_tensorplay_s():
    assert GradScaler("cuda").is_enabled() is tp.amp.GradScaler("cuda").is_enabled() is False


@pytest.mark.usefixtures("without_cuda")
def test_disabled_on_purpose_cuda_is_no_matter(recwarn):
    assert not GradScaler("cuda", enabled=False).is_enabled()
    assert recwarn.list == []


# Scaling.


@pytest.mark.parametrize("dtype", [tp.float16, tp.bfloat16, tp.float32, tp.float64])
@pytest.mark.parametrize("shape", [(), (3,), (0,)])
def test_a_scaled_tensor_is_tensorplay_s_to_the_bit(dtype, shape, exact):
    output = tp.full(shape, 0.1, dtype=dtype)
    assert exact(GradScaler().scale(output)) == exact(native().scale(output))


def test_nested_lists_and_tuples_keep_their_structure(exact):
    one = tp.ones(())
    scaled = GradScaler(init_scale=8.0).scale([one, (one, [one])])
    assert exact(scaled) == exact(native(init_scale=8.0).scale([one, (one, [one])]))
    assert isinstance(scaled[1], tuple)


def test_a_namedtuple_keeps_its_type():
    losses = collections.namedtuple("losses", "real fake")
    scaled = GradScaler(init_scale=8.0).scale(losses(tp.ones(()), tp.zeros(())))
    assert type(scaled) is losses
    assert (scaled.real.item(), scaled.fake.item()) == (8.0, 0.0)


def test_any_other_iterable_becomes_an_iterator():
    scaled = GradScaler(init_scale=8.0).scale(loss for loss in (tp.ones(()), tp.zeros(())))
    assert next(scaled).item() == 8.0
    assert next(scaled).item() == 0.0


# Getters and setters.


def test_getters_give_what_the_constructor_took():
    scaler = GradScaler("cpu", *OTHER_RULE.values())
    got = scaler.get_scale(), scaler.get_growth_factor(), scaler.get_backoff_factor()
    assert (*got, scaler.get_growth_interval()) == tuple(OTHER_RULE.values())


@pytest.mark.parametrize(
    ("name", "value"), [("growth_factor", 3.0), ("backoff_factor", 0.1), ("growth_interval", 7)]
)
def test_a_setter_sets_what_the_getter_gets(name, value):
    scaler = GradScaler()
    getattr(scaler, f"set_{name}")(value)
    assert getattr(scaler, f"get_{name}")() == value
    assert scaler.state_dict()[name] == value


def one_step(scaler, factor=1.0):
    parameter = tp.nn.Parameter(tp.ones(()))
    optimizer = tp.optim.SGD([parameter], lr=0.1)
    scaler.scale(parameter * factor).backward()
    scaler.step(optimizer)
    scaler.update()


def test_a_new_growth_factor_takes_effect_at_the_next_update():
    scaler = GradScaler(init_scale=8.0, growth_interval=1)
    scaler.set_growth_factor(4.0)
    one_step(scaler)
    assert scaler.get_scale() == 32.0


def test_a_new_backoff_factor_takes_effect_at_the_next_update():
    scaler = GradScaler(init_scale=8.0)
    scaler.set_backoff_factor(0.25)
    one_step(scaler, factor=float("inf"))
    assert scaler.get_scale() == 2.0


def test_an_interval_lowered_below_the_count_grows_at_the_next_finite_step():
    """TensorPlay's own compares with ``==`` and would not grow before the next overflow."""
    scaler = GradScaler(init_scale=8.0, growth_interval=10)
    for _ in range(5):
        one_step(scaler)
    scaler.set_growth_interval(3)
    one_step(scaler)
    assert scaler.get_scale() == 16.0


@pytest.mark.parametrize("new_scale", [4.0, 4, tp.tensor(4.0), tp.tensor([4.0])], ids=repr)
def test_update_takes_a_new_scale_and_leaves_the_growth_tracker(new_scale):
    scaler = GradScaler()
    scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": 5})
    scaler.scale(tp.ones(()))
    scaler.update(new_scale)
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (4.0, 5)


def test_a_new_scale_given_as_a_tensor_is_copied():
    scaler, new_scale = GradScaler(), tp.tensor(4.0)
    scaler.scale(tp.ones(()))
    scaler.update(new_scale)
    new_scale.fill_(5.0)
    assert scaler.get_scale() == 4.0


# Private names.


@pytest.mark.parametrize("name", sorted(vars(native())))
def test_a_new_scaler_s_private_values_are_tensorplay_s(name):
    assert getattr(GradScaler("cpu"), name) == getattr(native(), name)


def stages(scaler, optimizer):
    """The stage after each call of an iteration, under the private name that holds it."""

    def stage():
        return scaler._per_optimizer_states[id(optimizer)]["stage"]

    seen = [stage()]
    for call in (scaler.unscale_, scaler.step, lambda _: scaler.update()):
        call(optimizer)
        seen.append(stage())
    return seen


def test_the_stage_follows_the_calls_as_tensorplay_s_does(backward, finite):
    seen = []
    for scaler in (GradScaler(), native()):
        parameters = [tp.nn.Parameter(tp.ones((2, 3))), tp.nn.Parameter(tp.ones(4))]
        backward(scaler, parameters, finite)
        seen.append(stages(scaler, tp.optim.SGD(parameters)))
    assert seen[0] == seen[1] == [OptState(stage) for stage in (0, 1, 2, 0)]


@pytest.mark.parametrize("gradients", ["finite", "overflowed"])
def test_found_inf_is_by_device_as_tensorplay_s(gradients, backward, exact, request):
    flags = []
    for scaler in (GradScaler(), native()):
        parameters = [tp.nn.Parameter(tp.ones((2, 3))), tp.nn.Parameter(tp.ones(4))]
        optimizer = tp.optim.SGD(parameters)
        backward(scaler, parameters, request.getfixturevalue(gradients))
        flags.append(exact(scaler._check_inf_per_device(optimizer)))
        scaler.unscale_(optimizer)
        flags.append(exact(scaler._found_inf_per_device(optimizer)))
    assert flags[:2] == flags[2:]


def test_unscaling_by_hand_is_tensorplay_s_and_leaves_the_flag_it_was_handed(exact):
    results = []
    for scaler in (GradScaler(), native()):
        parameter = tp.nn.Parameter(tp.ones(2))
        parameter.grad = tp.tensor([1.0, float("inf")])
        flag, optimizer = tp.zeros(()), tp.optim.SGD([parameter])
        flags = scaler._unscale_grads_(optimizer, tp.full((), 0.5), flag, False)
        results.append((exact(flags), flag.item()))
    assert results[0] == results[1] == ({("cpu", -1): exact(tp.ones(()))}, 0.0)


def test_asking_for_a_stage_first_does_not_disturb_clipping(
    scaler, backward, parameters, finite, exact
):
    twin = GradScaler(init_scale=1024.0)
    for each, asks in ((scaler, True), (twin, False)):
        optimizer = tp.optim.SGD(parameters, lr=0.0)
        optimizer.zero_grad()
        backward(each, parameters, finite)
        if asks:
            assert each._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY
        each.clip_grad_norm_(optimizer, 0.01)
        each.step(optimizer)
        each.gradients = exact([parameter.grad for parameter in parameters])
    assert scaler.gradients == twin.gradients


def test_the_scale_tensor_stays_the_same_object():
    scaler = GradScaler()
    one_step(scaler)
    tensors = scaler._scale, scaler._growth_tracker
    one_step(scaler)
    assert (scaler._scale is tensors[0], scaler._growth_tracker is tensors[1]) == (True, True)


def test_a_scale_capped_from_outside_is_the_scale():
    scaler = GradScaler()
    scaler.scale(tp.ones(()))
    scaler._scale = tp.full((), 64.0)
    assert scaler.scale(tp.ones(())).item() == scaler.get_scale() == 64.0


def test_an_unscaling_that_a_subclass_overrides_is_called_with_tensorplay_s_arguments(
    backward, parameters, finite
):
    calls = []

    class Logged(GradScaler):
        def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
            calls.append((optimizer, inv_scale.item(), found_inf.item(), allow_fp16))
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)

    optimizer = tp.optim.SGD(parameters)
    scaler = Logged(init_scale=1024.0)
    backward(scaler, parameters, finite)
    scaler.step(optimizer)
    assert calls == [(optimizer, 2.0**-10, 0.0, False)]


# State dicts.


def trained(scaler, overflow=False):
    """A scaler three steps on."""
    for step in range(3):
        one_step(scaler, factor=float("inf") if overflow and step == 0 else 1.0)
    return scaler


AGES = pytest.mark.parametrize("age", [lambda scaler: scaler, trained], ids=["new", "trained"])


@AGES
def test_the_state_dict_has_the_five_documented_keys_and_tensorplay_s_values(age):
    ours, theirs = age(GradScaler(**OTHER_RULE)), age(native(**OTHER_RULE))
    state = ours.state_dict()
    assert list(state) == KEYS
    assert state == theirs.state_dict()
    assert [type(value) for value in state.values()] == [float, float, float, int, int]


@AGES
def test_tensorplay_s_state_dict_loads(age):
    state = trained(native(**OTHER_RULE), overflow=True).state_dict()
    scaler = age(GradScaler())
    scaler.load_state_dict(state)
    assert scaler.state_dict() == state


@AGES
def test_tensorplay_s_scaler_loads_ours(age):
    state = trained(GradScaler(**OTHER_RULE), overflow=True).state_dict()
    theirs = age(native())
    theirs.load_state_dict(state)
    assert theirs.state_dict() == state


@AGES
def test_a_loaded_state_is_in_force_at_the_next_step(age):
    state = {
        "scale": 8.0,
        "growth_factor": 4.0,
        "backoff_factor": 0.5,
        "growth_interval": 3,
        "_growth_tracker": 2,
    }
    scaler = age(GradScaler())
    scaler.load_state_dict(state)
    one_step(scaler)
    assert scaler.get_scale() == 32.0


def test_a_state_dict_goes_through_tensorplay_s_save(tmp_path):
    tp.save(trained(GradScaler(**OTHER_RULE)).state_dict(), tmp_path / "scaler.pt")
    scaler = GradScaler()
    scaler.load_state_dict(tp.load(tmp_path / "scaler.pt", weights_only=True))
    assert scaler.state_dict() == trained(GradScaler(**OTHER_RULE)).state_dict()


# Copies.


COPIES = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda scaler: pickle.loads(pickle.dumps(scaler)),
}


@AGES
@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
def test_a_copy_goes_on_as_the_original(age, duplicate):
    original = age(GradScaler(**OTHER_RULE))
    duplicated = duplicate(original)
    assert type(duplicated) is GradScaler
    assert duplicated.state_dict() == original.state_dict()
    assert trained(duplicated).state_dict() == trained(original).state_dict()


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
def test_a_copy_moves_by_itself(duplicate):
    original = trained(GradScaler())
    trained(duplicate(original), overflow=True)
    assert original.get_scale() == 2.0**16


def test_a_copy_can_be_asked_what_its_own_steps_did(backward, parameters, finite):
    scaler = copy.deepcopy(trained(GradScaler()))
    optimizer = tp.optim.SGD(parameters)
    backward(scaler, parameters, finite)
    scaler.step(optimizer)
    assert scaler.last_step(optimizer).applied


# Disabled.


def test_disabled_every_call_passes_through(parameters, finite, stepped):
    scaler = GradScaler(enabled=False)
    twins = copy.deepcopy(parameters)
    optimizer, twin = tp.optim.SGD(parameters), tp.optim.SGD(twins)
    for parameter, gradient in zip([*parameters, *twins], [*finite, *finite], strict=True):
        parameter.grad = gradient.clone()
    loss = tp.ones(())
    assert scaler.scale(loss) is loss
    for _ in range(2):
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        twin.step()
    scaler.update()
    assert stepped(optimizer) == stepped(twin)


def test_disabled_an_overflow_is_not_looked_for(parameters, overflowed):
    optimizer = tp.optim.SGD(parameters)
    for parameter, gradient in zip(parameters, overflowed, strict=True):
        parameter.grad = gradient
    GradScaler(enabled=False).step(optimizer)
    assert not tp.isfinite(parameters[1]).any()


def test_disabled_the_state_is_tensorplay_s():
    ours, theirs = GradScaler(enabled=False), native(enabled=False)
    assert ours.state_dict() == theirs.state_dict() == {}
    assert ours.get_scale() == theirs.get_scale() == 1.0
    assert ours._get_growth_tracker() == theirs._get_growth_tracker() == 0
    assert ours.is_enabled() is theirs.is_enabled() is False


def test_disabled_loading_a_state_does_nothing():
    scaler = GradScaler(enabled=False)
    scaler.load_state_dict({"any": "thing"})
    assert scaler.get_scale() == 1.0


def test_disabled_copies_go_through():
    assert not pickle.loads(pickle.dumps(copy.deepcopy(GradScaler(enabled=False)))).is_enabled()


def test_disabled_a_closure_is_the_optimizer_s_own(parameters):
    assert GradScaler(enabled=False).step(tp.optim.SGD(parameters), lambda: 5.0) == 5.0


def test_a_scale_given_as_the_device_is_refused_by_its_right_name():
    with pytest.raises(TypeError, match=r"init_scale=1024\.0"):
        GradScaler(1024.0)


def test_the_repr_shows_scale_counts_and_policy():
    assert repr(GradScaler()).startswith("GradScaler(scale=65536.0, finite_steps=0, ")
