"""The surface of the framework's own scaler: signature, scaling, getters and setters, minimize."""

import inspect

import numpy as np
import pytest

from gradscaler import DynamicScale
from tests.support.eager import library

NATIVE = library.framework.amp.GradScaler
ON_THE_CPU = {} if library.name == "paddle" else {"device": "cpu"}
CHANGES = {"growth_factor": 3.0, "backoff_factor": 0.125, "growth_interval": 7, "hysteresis": 2}
CHANGES = {library.spelling[name]: CHANGES[name] for name in CHANGES if name in library.spelling}


# The class.


def test_it_is_one_of_the_framework_s_scalers():
    assert isinstance(library.GradScaler(), NATIVE)


def test_what_the_framework_does_not_have_is_keyword_only():
    theirs = inspect.signature(NATIVE).parameters
    ours = inspect.signature(library.GradScaler).parameters
    added = {name: parameter.kind for name, parameter in ours.items() if name not in theirs}
    assert set(added.values()) == {inspect.Parameter.KEYWORD_ONLY}
    assert "policy" in added


@pytest.mark.parametrize("name", [name for name, value in vars(NATIVE).items() if callable(value)])
def test_each_method_is_called_as_the_framework_s(name):
    """Its own arguments bind in its own order; any of ours come after and are optional."""
    ours, theirs = (
        [
            parameter
            for parameter in inspect.signature(getattr(kind, name)).parameters.values()
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
        for kind in (library.GradScaler, NATIVE)
    )
    assert [p.name for p in ours][: len(theirs)] == [p.name for p in theirs]
    assert {p.kind for p in ours[: len(theirs)]} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    assert all(parameter.default is not parameter.empty for parameter in ours[len(theirs) :])


def test_every_attribute_of_the_framework_s_instances_is_there(native):
    scaler = library.scaler()
    assert [name for name in dir(native()) if not hasattr(scaler, name)] == []


@pytest.mark.parametrize("rule", [{}, library.other_rule], ids=["defaults", "other rule"])
def test_a_new_scaler_s_private_values_are_the_framework_s(rule, native):
    ours, theirs = library.scaler(**ON_THE_CPU, **rule), native(**rule)
    private = {name: value for name, value in vars(theirs).items() if not callable(value)}
    assert len(private) >= 9
    assert library.exact({name: getattr(ours, name) for name in private}) == library.exact(private)


@pytest.mark.skipif(library.name == "paddle", reason="it takes the scale first too")
@pytest.mark.parametrize("value", [1024.0, 65536, True])
def test_a_scale_given_as_the_first_argument_is_refused_by_its_right_name(value):
    """PyTorch's former class took the scale first."""
    meant = r"(True|65536\.0)" if value is True else repr(value)
    with pytest.raises(TypeError, match=rf"got {value!r};.* init_scale={meant}$"):
        library.GradScaler(value)


def test_the_repr_shows_scale_counts_and_policy():
    policy = DynamicScale(init_scale=8.0)
    scaler = library.scaler(policy=policy)
    assert repr(scaler) == f"GradScaler(scale=8.0, finite_steps=0, nonfinite_steps=0, {policy=!r})"
    changes = {library.state_keys["scale"]: 4.0, library.state_keys["finite_steps"]: 7}
    scaler.load_state_dict({**scaler.state_dict(), **changes})
    assert repr(scaler).startswith("GradScaler(scale=4.0, finite_steps=7, nonfinite_steps=0, ")
    assert repr(library.scaler(enabled=False)) == "<GradScaler disabled>"


# Scaling.


@pytest.mark.parametrize("dtype", library.dtypes)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (0,)])
def test_a_scaled_tensor_is_the_framework_s_to_the_bit(dtype, shape, native):
    output = library.tensor(np.full(shape, 0.1), dtype)
    ours, theirs = (make().scale(output) for make in (library.scaler, native))
    assert library.exact(ours) == library.exact(theirs)


def test_a_float16_loss_does_not_overflow_when_it_is_scaled():
    scaled = library.scaler().scale(library.tensor(3.0, "float16"))
    assert library.numpy(scaled) == 3.0 * 2.0**16


def test_the_scaled_loss_can_be_differentiated(scaler):
    (weight,) = library.make_parameters(np.float32([3.0]))
    scaler.scale(weight * weight).backward()
    assert library.numpy(weight.grad) == [6.0 * 1024.0]


# Getters and setters.


@pytest.mark.parametrize("name", CHANGES)
def test_a_setter_sets_what_the_getter_gets_as_the_framework_s_does(name, native):
    rule = library.spelled(library.other_rule)
    scalers = library.scaler(**library.other_rule), native(**library.other_rule)
    for scaler in scalers:
        assert getattr(scaler, f"get_{name}")() == rule[name]
        getattr(scaler, f"set_{name}")(CHANGES[name])
        assert getattr(scaler, f"get_{name}")() == scaler.state_dict()[name] == CHANGES[name]
    ours, theirs = (library.exact(scaler.state_dict()) for scaler in scalers)
    assert ours == theirs


@pytest.mark.parametrize(
    ("name", "value", "trace", "scale"),
    [("growth_factor", 4.0, "o", 32.0), ("backoff_factor", 0.25, "x", 2.0)],
)
def test_a_new_factor_takes_effect_at_the_next_update(name, value, trace, scale):
    scaler = library.scaler(init_scale=8.0, growth_interval=1)
    getattr(scaler, f"set_{library.spelling[name]}")(value)
    assert library.train(scaler, trace) == [scale]


def test_an_interval_lowered_below_the_count_grows_at_the_next_finite_step():
    """The frameworks' own compare with ``==`` and would not grow before the next overflow."""
    scaler = library.scaler(init_scale=8.0, growth_interval=10)
    library.train(scaler, "ooooo")
    getattr(scaler, f"set_{library.spelling['growth_interval']}")(3)
    assert library.train(scaler, "o") == [16.0]


# minimize.


def test_minimize_is_a_step_and_an_update(finite):
    results = []
    for minimize in (False, True):
        scaler, parameters = library.scaler(growth_interval=1), library.parameters()
        optimizer = library.sgd(parameters)
        scaled = library.backward(scaler, parameters, finite)
        if minimize:
            scaler.minimize(optimizer, scaled)
        else:
            scaler.step(optimizer)
            scaler.update()
        results.append(library.everything(scaler, optimizer))
        assert library.scale_of(scaler) == 2.0**17
    assert results[0] == results[1]


# Disabled.


@pytest.fixture
def disabled():
    return library.scaler(enabled=False)


@pytest.mark.parametrize("minimize", [False, True], ids=["step", "minimize"])
@pytest.mark.parametrize("gradients", ["finite", "overflowed"])
def test_disabled_every_call_passes_through(minimize, gradients, disabled, request):
    """An overflow too, which is left to the optimizer."""
    gradients = request.getfixturevalue(gradients)
    sides = [library.parameters() for _ in range(2)]
    optimizer, plain = map(library.sgd, sides)
    for parameters in sides:
        loss = library.backward(disabled, parameters, gradients)
    assert disabled.scale(loss) is loss
    for _ in range(2):
        disabled.unscale_(optimizer)
        if minimize:
            disabled.minimize(optimizer, loss)
        else:
            disabled.step(optimizer)
            disabled.update()
        plain.step()
    assert library.stepped(optimizer) == library.stepped(plain)
    outcome = disabled.last_step(optimizer)
    assert (outcome.applied, outcome.reason) == (True, "disabled")


@pytest.mark.parametrize(
    "name",
    [
        *("is_enabled", "is_enable", "is_use_dynamic_loss_scaling", "state_dict"),
        *("get_scale", "get_init_loss_scaling", "_get_growth_tracker"),
    ],
)
def test_disabled_it_says_what_the_framework_s_says(name, disabled, native):
    theirs = native(enabled=False)
    if hasattr(theirs, name):
        assert getattr(disabled, name)() == getattr(theirs, name)()


def test_disabled_a_closure_is_the_optimizer_s_own(disabled, parameters):
    library.set_gradients(parameters, [np.zeros((2, 3)), np.zeros(4)])
    optimizer = library.sgd(parameters)
    assert disabled.step(optimizer, lambda: 5.0) == 5.0
    assert disabled.step(optimizer, closure=lambda: 5.0) == 5.0
