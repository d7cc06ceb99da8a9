"""Bad parameters and bad state: errors that name what is wrong, and nothing lost."""

import math
import re

import pytest
import tensorplay as tp

from gradscaler import DynamicScale, FixedScale
from gradscaler.tensorplay import GradScaler

INF, NAN = math.inf, math.nan

# Parameters.


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("init_scale", 0.0, ValueError),
        ("init_scale", -1.0, ValueError),
        ("init_scale", INF, ValueError),
        ("init_scale", NAN, ValueError),
        ("init_scale", 1e39, ValueError),
        ("init_scale", 1e-39, ValueError),
        ("init_scale", "65536", TypeError),
        ("init_scale", None, TypeError),
        ("growth_factor", 1.0, ValueError),
        ("growth_factor", 0.5, ValueError),
        ("growth_factor", NAN, ValueError),
        ("growth_factor", INF, ValueError),
        ("growth_factor", "2", TypeError),
        ("backoff_factor", 1.0, ValueError),
        ("backoff_factor", 0.0, ValueError),
        ("backoff_factor", -0.5, ValueError),
        ("backoff_factor", NAN, ValueError),
        ("growth_interval", 0, ValueError),
        ("growth_interval", -5, ValueError),
        ("growth_interval", 2.5, TypeError),
        ("growth_interval", True, TypeError),
        ("max_retries", -1, ValueError),
        ("max_retries", 1.5, TypeError),
        ("max_retries", True, TypeError),
    ],
)
def test_a_bad_parameter_is_named_with_its_value(name, value, error):
    with pytest.raises(error, match=rf"{name}.*{re.escape(str(value))}"):
        GradScaler(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"), [("growth_factor", 1.0), ("growth_factor", 0.5), ("backoff_factor", 1.0)]
)
def test_a_bad_factor_can_be_caught_as_tensorplay_s_error(name, value):
    with pytest.raises(AssertionError) as theirs:
        tp.amp.GradScaler("cpu", **{name: value})
    with pytest.raises(type(theirs.value), match=name):
        GradScaler(**{name: value})


def test_a_policy_beside_a_parameter_is_refused():
    with pytest.raises(ValueError, match=r"policy.*init_scale"):
        GradScaler(init_scale=8.0, policy=FixedScale(8.0))


@pytest.mark.parametrize("policy", [8.0, "dynamic", FixedScale, DynamicScale])
def test_a_policy_that_is_none_is_refused(policy):
    with pytest.raises(TypeError, match="policy must be"):
        GradScaler(policy=policy)


# Calls.


@pytest.mark.parametrize(
    "outputs", [1.0, None, "loss", b"loss", {"loss": tp.ones(())}, [tp.ones(()), None]], ids=repr
)
def test_what_is_no_tensor_cannot_be_scaled(outputs):
    with pytest.raises(ValueError, match="Tensor"):
        GradScaler().scale(outputs)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("growth_factor", 0.5, ValueError),
        ("growth_factor", "2", TypeError),
        ("backoff_factor", 2.0, ValueError),
        ("growth_interval", 0, ValueError),
        ("growth_interval", 2.5, TypeError),
    ],
)
def test_a_setter_refuses_a_bad_value_and_changes_nothing(name, value, error):
    scaler = GradScaler()
    before = scaler.state_dict()
    with pytest.raises(error, match=name):
        getattr(scaler, f"set_{name}")(value)
    assert scaler.state_dict() == before


@pytest.mark.parametrize("name", ["growth_factor", "backoff_factor", "growth_interval"])
def test_a_fixed_scale_has_nothing_to_set(name):
    with pytest.raises(TypeError, match=f"FixedScale.*{name}"):
        getattr(GradScaler(policy=FixedScale(8.0)), f"set_{name}")(3)


BAD_SCALES = [
    (0.0, ValueError),
    (-1.0, ValueError),
    (INF, ValueError),
    (NAN, ValueError),
    (1e39, ValueError),
    (1e-39, ValueError),
    ("8", TypeError),
    (True, TypeError),
    (tp.tensor([8.0, 8.0]), ValueError),
    (tp.tensor(-1.0), ValueError),
    (tp.tensor(8.0, requires_grad=True), ValueError),
]


@pytest.mark.parametrize(("new_scale", "error"), BAD_SCALES, ids=repr)
def test_a_bad_new_scale_is_refused_and_the_iteration_goes_on(
    new_scale, error, scaler, backward, parameters, finite
):
    scaler.set_growth_interval(1)
    optimizer = tp.optim.SGD(parameters)
    backward(scaler, parameters, finite)
    scaler.step(optimizer)
    with pytest.raises(error, match="new_scale"):
        scaler.update(new_scale)
    scaler.update()
    assert scaler.get_scale() == 2048.0


@pytest.mark.parametrize("new_scale", [tp.tensor([8.0, 8.0]), tp.tensor(8.0, requires_grad=True)])
def test_a_bad_new_scale_tensor_can_be_caught_as_tensorplay_s_error(new_scale):
    raised = []
    for scaler in (tp.amp.GradScaler("cpu"), GradScaler()):
        scaler.scale(tp.ones(()))
        with pytest.raises(AssertionError) as error:
            scaler.update(new_scale)
        raised.append(type(error.value))
    assert issubclass(raised[1], raised[0])


def test_a_bad_max_retries_of_a_call_is_named(scaler, parameters, stepped):
    optimizer = tp.optim.SGD(parameters)
    before = stepped(optimizer)
    with pytest.raises(ValueError, match=r"max_retries.*-1"):
        scaler.step(optimizer, lambda: pytest.fail("the closure was called"), max_retries=-1)
    assert stepped(optimizer) == before


# State dicts.


GOOD = {
    "scale": 8.0,
    "growth_factor": 4.0,
    "backoff_factor": 0.25,
    "growth_interval": 3,
    "_growth_tracker": 2,
}
BAD = [
    ("scale", 0.0, ValueError),
    ("scale", -1.0, ValueError),
    ("scale", INF, ValueError),
    ("scale", NAN, ValueError),
    ("scale", 1e39, ValueError),
    ("scale", "8", TypeError),
    ("scale", None, TypeError),
    ("scale", [8.0], TypeError),
    ("scale", tp.tensor([8.0, 8.0]), ValueError),
    ("growth_factor", 1.0, ValueError),
    ("growth_factor", NAN, ValueError),
    ("growth_factor", None, TypeError),
    ("backoff_factor", 0.0, ValueError),
    ("backoff_factor", 1.5, ValueError),
    ("growth_interval", 0, ValueError),
    ("growth_interval", 3.5, TypeError),
    ("_growth_tracker", -1, ValueError),
    ("_growth_tracker", 1.5, TypeError),
    ("_growth_tracker", 2**40, ValueError),  # more than the tensor that holds it can
]


@pytest.fixture(params=["new", "used"])
def used_or_new(request, backward, parameters, finite):
    scaler = GradScaler(init_scale=1024.0)
    if request.param == "used":
        backward(scaler, parameters, finite)
        scaler.step(tp.optim.SGD(parameters))
        scaler.update()
    return scaler


@pytest.mark.parametrize(("key", "value", "error"), BAD)
def test_a_bad_value_is_named_by_its_key_and_nothing_changes(key, value, error, used_or_new):
    before = used_or_new.state_dict()
    with pytest.raises(error, match=key):
        used_or_new.load_state_dict({**GOOD, key: value})
    assert used_or_new.state_dict() == before


@pytest.mark.parametrize("key", GOOD)
def test_a_missing_key_is_named_and_nothing_changes(key, used_or_new):
    before = used_or_new.state_dict()
    with pytest.raises(KeyError, match=key):
        used_or_new.load_state_dict({name: GOOD[name] for name in GOOD if name != key})
    assert used_or_new.state_dict() == before


def test_the_empty_state_of_a_disabled_scaler_is_tensorplay_s_error(used_or_new):
    empty, before = GradScaler(enabled=False).state_dict(), used_or_new.state_dict()
    with pytest.raises(RuntimeError, match="disabled") as theirs:
        tp.amp.GradScaler("cpu").load_state_dict(empty)
    with pytest.raises(type(theirs.value), match="disabled"):
        used_or_new.load_state_dict(empty)
    assert used_or_new.state_dict() == before


@pytest.mark.parametrize("state", [None, 8.0, "scale", [("scale", 8.0)]])
def test_what_is_no_dict_is_refused(state, used_or_new):
    before = used_or_new.state_dict()
    with pytest.raises(TypeError, match="dict"):
        used_or_new.load_state_dict(state)
    assert used_or_new.state_dict() == before


def test_a_state_outside_the_policy_s_bounds_is_refused_and_nothing_changes():
    scaler = GradScaler(policy=DynamicScale(init_scale=64.0, min_scale=16.0))
    before = scaler.state_dict()
    with pytest.raises(ValueError, match=r"scale.*16\.0"):
        scaler.load_state_dict(GOOD)
    assert scaler.state_dict() == before


def test_values_may_be_tensors_of_one_element(used_or_new):
    used_or_new.load_state_dict({key: tp.tensor(value) for key, value in GOOD.items()})
    assert used_or_new.state_dict() == GOOD


def test_keys_that_are_not_known_do_no_harm(used_or_new):
    used_or_new.load_state_dict({**GOOD, "of the future": 1})
    assert used_or_new.state_dict() == GOOD
