"""The surface of torch.amp.GradScaler: signature, getters and setters, state, pickling."""

import collections
import copy
import inspect
import pickle

import pytest
import torch

from gradscaler import DynamicScale, FixedScale
from gradscaler.torch import GradScaler, OptState

KEYS = ["scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"]
OTHER_RULE = {
    "init_scale": 512.0,
    "growth_factor": 4.0,
    "backoff_factor": 0.25,
    "growth_interval": 3,
}


def native(**options):
    return torch.amp.GradScaler("cpu", **options)


# The class.


def test_it_is_a_torch_grad_scaler():
    assert isinstance(GradScaler(), torch.amp.GradScaler)


def test_the_stages_are_torch_s():
    assert OptState is torch.amp.grad_scaler.OptState


def test_parameters_have_torch_s_names_order_and_defaults_but_for_the_device():
    ours = list(inspect.signature(GradScaler).parameters.values())
    theirs = list(inspect.signature(torch.amp.GradScaler).parameters.values())
    assert [p.name for p in ours[: len(theirs)]] == [p.name for p in theirs]
    assert [p.default for p in ours[1 : len(theirs)]] == [p.default for p in theirs[1:]]
    assert {p.kind for p in ours[: len(theirs)]} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


def test_what_torch_does_not_have_is_keyword_only():
    theirs = inspect.signature(torch.amp.GradScaler).parameters
    added = [p for n, p in inspect.signature(GradScaler).parameters.items() if n not in theirs]
    assert {p.kind for p in added} == {inspect.Parameter.KEYWORD_ONLY}
    assert "policy" in [p.name for p in added]


@pytest.mark.parametrize(
    "name", [name for name, value in vars(torch.amp.GradScaler).items() if callable(value)]
)
def test_each_method_is_called_as_torch_s(name):
    """Torch's own arguments bind in torch's own order; any of ours come after and are optional."""
    ours = inspect.signature(getattr(GradScaler, name)).parameters.values()
    theirs = inspect.signature(getattr(torch.amp.GradScaler, name)).parameters.values()
    positional = [p.name for p in theirs if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in ours if p.kind is p.POSITIONAL_OR_KEYWORD][: len(positional)] == (
        positional
    )


def test_every_attribute_of_torch_s_instances_is_there():
    scaler = GradScaler()
    assert [name for name in dir(native()) if not hasattr(scaler, name)] == []


@pytest.mark.parametrize("name", sorted(vars(native())))
def test_a_new_scaler_s_private_values_are_torch_s(name):
    assert getattr(GradScaler("cpu"), name) == getattr(native(), name)


@pytest.mark.parametrize(
    ("name", "value"), [("growth_factor", 1.0), ("growth_factor", 0.5), ("backoff_factor", 1.0)]
)
def test_a_bad_factor_raises_what_torch_raises_and_names_it(name, value):
    with pytest.raises(AssertionError) as theirs:
        native(**{name: value})
    with pytest.raises(type(theirs.value), match=f"{name}.*{value}") as ours:
        GradScaler(**{name: value})
    assert isinstance(ours.value, ValueError)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("init_scale", 0.0, ValueError),
        ("init_scale", -1.0, ValueError),
        ("init_scale", float("inf"), ValueError),
        ("init_scale", "65536", TypeError),
        ("backoff_factor", 0.0, ValueError),
        ("growth_factor", float("nan"), ValueError),
        ("growth_interval", 0, ValueError),
        ("growth_interval", 2.5, TypeError),
        ("growth_interval", True, TypeError),
        ("max_retries", -1, ValueError),
        ("max_retries", 1.5, TypeError),
    ],
)
def test_a_bad_parameter_is_named_with_its_value(name, value, error):
    with pytest.raises(error, match=rf"{name}.*{value}"):
        GradScaler(**{name: value})


# The device.


def test_without_a_device_it_works_where_the_first_loss_lives():
    scaler = GradScaler()
    scaler.scale(torch.ones((), device="meta"))
    assert scaler._scale.device.type == scaler._growth_tracker.device.type == "meta"


def test_a_device_that_is_named_works_on_the_cpu_as_torch_s_does():
    assert GradScaler("cpu").scale(torch.ones(())) == native().scale(torch.ones(()))


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without CUDA")
def test_cuda_without_cuda_warns_and_disables():
    with pytest.warns(UserWarning, match="CUDA is not available") as ours:
        scaler = GradScaler("cuda")
    with pytest.warns(UserWarning, match="CUDA is not available") as theirs:
        torch.amp.GradScaler("cuda")
    assert not scaler.is_enabled()
    assert ours[0].category is theirs[0].category
    assert ours[0].filename == __file__


def test_cuda_is_not_asked_for_when_scaling_is_disabled():
    assert not GradScaler("cuda", enabled=False).is_enabled()


# Scaling.


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (3,), (0,)])
def test_a_scaled_tensor_is_torch_s_to_the_bit(dtype, shape, exact):
    output = torch.full(shape, 0.1, dtype=dtype)
    assert exact(GradScaler().scale(output)) == exact(native().scale(output))


def test_nested_lists_and_tuples_keep_their_structure():
    one = torch.ones(())
    scaled = GradScaler(init_scale=8.0).scale([one, (one, [one])])
    assert scaled == [8.0, (8.0, [8.0])]
    assert isinstance(scaled[1], tuple)


def test_a_namedtuple_keeps_its_type():
    losses = collections.namedtuple("losses", "real fake")
    scaled = GradScaler(init_scale=8.0).scale(losses(torch.ones(()), torch.zeros(())))
    assert scaled == losses(8.0, 0.0)
    assert type(scaled) is losses


def test_any_other_iterable_becomes_an_iterator():
    scaled = GradScaler(init_scale=8.0).scale(loss for loss in (torch.ones(()), torch.zeros(())))
    assert next(scaled) == 8.0
    assert next(scaled) == 0.0


@pytest.mark.parametrize(
    ("outputs", "kind"),
    [
        (1.0, "float"),
        ("loss", "str"),
        ({"loss": torch.ones(())}, "dict"),
        ([torch.ones(()), None], "NoneType"),
    ],
)
def test_what_is_no_tensor_is_refused(outputs, kind):
    with pytest.raises(ValueError, match=f"Tensors, got {kind}$"):
        GradScaler().scale(outputs)


def test_tensors_of_several_devices_are_scaled_where_they_are():
    here, there = GradScaler(init_scale=8.0).scale([torch.ones(()), torch.ones((), device="meta")])
    assert here == 8.0
    assert there.device.type == "meta"


# Getters and setters.


def test_getters_give_what_the_constructor_took():
    scaler = GradScaler(**OTHER_RULE)
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


@pytest.mark.parametrize(
    ("name", "value"), [("growth_factor", 0.5), ("backoff_factor", 2.0), ("growth_interval", 0)]
)
def test_a_setter_refuses_a_bad_value_and_changes_nothing(name, value):
    scaler = GradScaler()
    before = scaler.state_dict()
    with pytest.raises(ValueError, match=name):
        getattr(scaler, f"set_{name}")(value)
    assert scaler.state_dict() == before


def test_new_factors_take_effect_at_the_next_update(backward, parameters, finite):
    optimizer = torch.optim.SGD(parameters)
    scaler = GradScaler(init_scale=8.0, growth_interval=1)
    scaler.set_growth_factor(4.0)
    backward(scaler, parameters, finite)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 32.0


@pytest.mark.parametrize("new_scale", [4.0, 4, torch.tensor(4.0), torch.tensor([4.0])])
def test_update_takes_a_new_scale_and_leaves_the_growth_tracker(new_scale):
    scaler = GradScaler("cpu")
    scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": 5})
    scaler.scale(torch.ones(()))
    scaler.update(new_scale)
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (4.0, 5)


def test_a_new_scale_given_as_a_tensor_is_copied():
    scaler, new_scale = GradScaler(), torch.tensor(4.0)
    scaler.scale(torch.ones(()))
    scaler.update(new_scale)
    new_scale.fill_(5.0)
    assert scaler.get_scale() == 4.0


# State dicts and pickling.


def trained(scaler, overflow=False):
    """A scaler three steps on."""
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter])
    for step in range(3):
        optimizer.zero_grad()
        factor = float("inf") if overflow and step == 0 else 1.0
        scaler.scale((parameter * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler


@pytest.mark.parametrize("make", [lambda scaler: scaler, trained], ids=["lazy", "placed"])
def test_the_state_dict_has_torch_s_keys_types_and_values(make):
    ours, theirs = (make(kind("cpu", **OTHER_RULE)) for kind in (GradScaler, torch.amp.GradScaler))
    state = ours.state_dict()
    assert list(state) == KEYS
    assert state == theirs.state_dict()
    assert [type(value) for value in state.values()] == [float, float, float, int, int]


@pytest.mark.parametrize("source", [lambda scaler: scaler, trained], ids=["lazy", "placed"])
@pytest.mark.parametrize("target", [lambda scaler: scaler, trained], ids=["lazy", "placed"])
def test_state_dicts_load_both_ways(source, target):
    ours, theirs = source(GradScaler(**OTHER_RULE)), source(native(**OTHER_RULE))
    into_ours, into_theirs = target(GradScaler()), target(native())
    into_ours.load_state_dict(theirs.state_dict())
    into_theirs.load_state_dict(ours.state_dict())
    assert into_ours.state_dict() == into_theirs.state_dict() == ours.state_dict()


def test_a_loaded_state_is_in_force_at_the_next_loss():
    scaler = GradScaler()
    scaler.load_state_dict(native(init_scale=8.0).state_dict())
    assert scaler.scale(torch.ones(())) == 8.0


def test_loading_keeps_the_scale_tensor():
    scaler = trained(GradScaler())
    tensor = scaler._scale
    scaler.load_state_dict(native(init_scale=8.0).state_dict())
    assert scaler._scale is tensor
    assert tensor == 8.0


def test_a_state_dict_goes_through_torch_save(tmp_path):
    torch.save(trained(GradScaler()).state_dict(), tmp_path / "scaler.pt")
    scaler = GradScaler()
    scaler.load_state_dict(torch.load(tmp_path / "scaler.pt", weights_only=True))
    assert scaler._get_growth_tracker() == 3


def test_the_state_dict_of_a_disabled_scaler_is_torch_s_error():
    empty = GradScaler(enabled=False).state_dict()
    with pytest.raises(RuntimeError, match="disabled") as theirs:
        native().load_state_dict(empty)
    with pytest.raises(type(theirs.value), match="disabled"):
        GradScaler().load_state_dict(empty)


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, copy.copy, lambda scaler: pickle.loads(pickle.dumps(scaler))]
)
@pytest.mark.parametrize("make", [lambda scaler: scaler, trained], ids=["lazy", "placed"])
def test_a_copy_goes_on_as_the_original(make, duplicate):
    original = make(GradScaler(**OTHER_RULE))
    duplicated = duplicate(original)
    assert type(duplicated) is GradScaler
    assert duplicated.state_dict() == original.state_dict()
    assert trained(duplicated).state_dict() == trained(original).state_dict()


def test_a_deep_copy_moves_by_itself():
    original = trained(GradScaler())
    trained(copy.deepcopy(original), overflow=True)
    assert original.get_scale() == 2.0**16


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickle.dumps])
def test_a_copy_in_mid_iteration_is_torch_s_error(duplicate, backward, parameters, finite):
    raised = []
    for scaler in (native(), GradScaler()):
        optimizer = torch.optim.SGD(parameters)
        optimizer.zero_grad()
        backward(scaler, parameters, finite)
        scaler.unscale_(optimizer)
        with pytest.raises(Exception, match=r"update\(\)") as error:
            duplicate(scaler)
        raised.append(error.value)
    assert isinstance(raised[1], type(raised[0]))


# Disabled.


def test_disabled_every_call_passes_through(parameters, finite, stepped):
    scaler = GradScaler(enabled=False)
    twins = copy.deepcopy(parameters)
    optimizer, twin = torch.optim.SGD(parameters), torch.optim.SGD(twins)
    for parameter, gradient in zip([*parameters, *twins], [*finite, *finite], strict=True):
        parameter.grad = gradient.clone()
    loss = torch.ones(())
    assert scaler.scale(loss) is loss
    for _ in range(2):
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        twin.step()
    scaler.update()
    assert stepped(optimizer) == stepped(twin)


def test_disabled_state_is_torch_s():
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
    scaler = pickle.loads(pickle.dumps(copy.deepcopy(GradScaler(enabled=False))))
    assert not scaler.is_enabled()


def test_disabled_a_closure_is_the_optimizer_s_own():
    parameter = torch.nn.Parameter(torch.ones(()))
    parameter.grad = torch.ones(())
    scaler, optimizer = GradScaler(enabled=False), torch.optim.SGD([parameter])
    assert scaler.step(optimizer, lambda: 5.0) == scaler.step(optimizer, closure=lambda: 5.0) == 5.0


# Ours alone.


def test_minimize_is_a_step_and_an_update(backward, parameters, finite, stepped):
    optimizer = torch.optim.SGD(parameters)
    twin_parameters = copy.deepcopy(parameters)
    twin_optimizer = torch.optim.SGD(twin_parameters)
    scaler, twin = GradScaler(growth_interval=1), GradScaler(growth_interval=1)
    backward(scaler, parameters, finite)
    backward(twin, twin_parameters, finite)
    scaler.minimize(optimizer, torch.ones(()))
    twin.step(twin_optimizer)
    twin.update()
    assert stepped(optimizer) == stepped(twin_optimizer)
    assert scaler.state_dict() == twin.state_dict()


def test_a_policy_beside_a_parameter_is_refused():
    with pytest.raises(ValueError, match="init_scale"):
        GradScaler(init_scale=8.0, policy=FixedScale(8.0))


def test_a_policy_that_is_none_of_ours_is_refused():
    with pytest.raises(TypeError, match="policy"):
        GradScaler(policy=8.0)


@pytest.mark.parametrize("device", [1024.0, 65536, True, 2.0**16])
def test_a_scale_given_as_the_device_is_refused_by_its_right_name(device):
    with pytest.raises(TypeError, match=f"got {device!r}; give the scale .* by name: init_scale="):
        GradScaler(device)


def test_a_device_may_be_a_torch_device():
    scaler = GradScaler(torch.device("cpu"))
    scaled = scaler.scale(torch.ones(()))
    scaler.update(torch.tensor(8.0))
    assert scaled == 65536.0
    assert scaler.get_scale() == 8.0


def test_the_repr_shows_scale_counts_and_policy():
    policy = DynamicScale(init_scale=8.0)
    scaler = GradScaler(policy=policy)
    assert repr(scaler) == f"GradScaler(scale=8.0, finite_steps=0, nonfinite_steps=0, {policy=!r})"
    scaler.load_state_dict({**scaler.state_dict(), "scale": 4.0, "_growth_tracker": 7})
    assert repr(scaler).startswith("GradScaler(scale=4.0, finite_steps=7, nonfinite_steps=0, ")
    assert repr(GradScaler(enabled=False)) == "GradScaler(disabled)"
