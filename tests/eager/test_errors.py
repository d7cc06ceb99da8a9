"""Bad parameters and bad state: errors name the mistake, and nothing is lost."""

import math
import re

import numpy as np
import pytest

from gradscaler import DynamicScale, FixedScale
from tests.support.eager import library
from tests.support.eager.base import SHAPES, normal

INF, NAN = math.inf, math.nan
FACTORS = "growth_factor", "backoff_factor"
INTERVALS = "growth_interval", "hysteresis"
STEPS = "finite_steps", "nonfinite_steps"
BAD_SCALES = [
    *((scale, ValueError) for scale in (0.0, -1.0, INF, NAN, 1e39, 2.0**-127)),
    *((scale, TypeError) for scale in ("8", None, True)),
]
BAD_RULES = [
    *(("growth_factor", value, ValueError) for value in (1.0, 0.5, NAN, INF)),
    *(("backoff_factor", value, ValueError) for value in (1.0, 1.5, 0.0, -0.5, NAN)),
    *((name, value, ValueError) for name in INTERVALS for value in (0, -5)),
    *((name, value, TypeError) for name in FACTORS for value in ("2", None)),
    *((name, value, TypeError) for name in INTERVALS for value in (2.5, True, None)),
]
BAD_RULES = [bad for bad in BAD_RULES if bad[0] in library.spelling]


def named(name, value=""):
    return rf"\b{name}\b.*{re.escape(str(value))}"


# Parameters.


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        *(("init_scale", *bad) for bad in BAD_SCALES),
        *BAD_RULES,
        ("max_retries", -1, ValueError),
        ("max_retries", 1.5, TypeError),
        ("max_retries", True, TypeError),
    ],
)
def test_a_bad_parameter_is_named_with_its_value(name, value, error):
    with pytest.raises(error, match=named(library.spelling.get(name, name), value)):
        library.scaler(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"), [("growth_factor", 1.0), ("growth_factor", 0.5), ("backoff_factor", 1.0)]
)
def test_a_bad_factor_can_be_caught_as_the_framework_s_error(name, value, native):
    with pytest.raises(AssertionError) as theirs:
        native(**{name: value})
    with pytest.raises(type(theirs.value)):
        library.scaler(**{name: value})


@pytest.mark.parametrize("parameter", library.other_rule.items())
def test_a_policy_beside_a_parameter_is_refused(parameter):
    with pytest.raises(ValueError, match=rf"policy.*{library.spelling[parameter[0]]}"):
        library.scaler(policy=FixedScale(8.0), **dict([parameter]))


@pytest.mark.parametrize("policy", [8.0, "dynamic", FixedScale, DynamicScale, object()])
def test_a_policy_that_is_not_one_of_ours_is_refused(policy):
    with pytest.raises(TypeError, match="policy must be"):
        library.scaler(policy=policy)


# Calls.


@pytest.mark.parametrize(("name", "value", "error"), BAD_RULES)
def test_a_setter_refuses_a_bad_value_and_changes_nothing(name, value, error):
    scaler, name = library.scaler(**library.other_rule), library.spelling[name]
    before = library.everything(scaler)
    with pytest.raises(error, match=named(name, value)):
        getattr(scaler, f"set_{name}")(value)
    assert library.everything(scaler) == before


def test_a_bad_max_retries_of_a_call_is_named(scaler, parameters):
    optimizer = library.sgd(parameters)
    before = library.everything(scaler, optimizer)
    with pytest.raises(ValueError, match=r"max_retries.*-1"):
        scaler.step(optimizer, lambda: pytest.fail("the closure was called"), max_retries=-1)
    assert library.everything(scaler, optimizer) == before


@pytest.mark.parametrize("call", ["clip_grad_norm_", "unscale_", "step"])
def test_what_is_not_an_optimizer_is_refused_with_the_call_to_write(call, parameters):
    scaler = library.scaler()
    library.train(scaler, "o")
    library.backward(scaler, parameters, normal(0, *SHAPES))
    before = library.everything(scaler)
    for other in (iter(parameters), library.framework.nn.Linear(1, 1)):
        with pytest.raises(TypeError, match=rf"{call}\(optimizer.* got {type(other).__name__}"):
            getattr(scaler, call)(other, *([1.0] if call == "clip_grad_norm_" else []))
    assert library.everything(scaler) == before


# State dicts.

BAD_STATES = [
    *(("scale", *bad) for bad in BAD_SCALES),
    *(("scale", np.float32([value]), ValueError) for value in (0.0, -1.0, INF, NAN)),
    *(("scale", np.ones(size, np.float32), ValueError) for size in (0, 2)),
    *(("scale", library.tensor([8.0] * size), ValueError) for size in (0, 2)),
    *(bad for bad in BAD_RULES if bad[1] is not True),
    *((name, -1, ValueError) for name in STEPS),
    *((name, value, TypeError) for name in STEPS for value in (1.5, "1", None)),
]
if library.name != "paddle":  # which keeps counts in Python's integers
    BAD_STATES += [(name, 2**40, ValueError) for name in STEPS]
    BAD_STATES += [("scale", [8.0, 8.0], TypeError)]


@pytest.fixture(params=["new", "used"])
def scaler_and_state(request):
    """A scaler, and another state that it could take."""
    policy = DynamicScale(hysteresis=2, min_scale=4.0)
    scaler = library.scaler(policy=policy)
    if request.param == "used":
        library.train(scaler, "o")
    changed = {"scale": 8.0, "growth_interval": 7, "finite_steps": 3}
    state = {library.state_keys[name]: value for name, value in changed.items()}
    return scaler, {**scaler.state_dict(), **state}


def assert_refused(scaler, state, error, match):
    before = library.everything(scaler)
    with pytest.raises(error, match=match):
        scaler.load_state_dict(state)
    assert library.everything(scaler) == before
    assert library.numpy(scaler.scale(library.tensor(1.0))) == 2.0**16


@pytest.mark.parametrize(("name", "value", "error"), BAD_STATES)
def test_a_bad_value_is_refused_by_its_key_and_nothing_changes(
    name, value, error, scaler_and_state
):
    scaler, state = scaler_and_state
    key = library.state_keys[name]
    assert_refused(scaler, {**state, key: value}, error, named(key))


@pytest.mark.parametrize("key", library.scaler().state_dict())
def test_a_missing_key_is_named_and_nothing_changes(key, scaler_and_state):
    scaler, state = scaler_and_state
    del state[key]
    assert_refused(scaler, state, KeyError, named(key))


@pytest.mark.parametrize("state", [None, 8.0, "scale", [("scale", 8.0)]])
def test_what_is_not_a_dict_is_refused(state, scaler_and_state):
    assert_refused(scaler_and_state[0], state, TypeError, "state_dict")


def test_a_scale_outside_the_policy_s_bounds_is_refused_and_nothing_changes(scaler_and_state):
    scaler, state = scaler_and_state
    assert_refused(scaler, {**state, library.state_keys["scale"]: 2.0}, ValueError, r"scale.*4\.0")
