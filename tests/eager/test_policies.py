"""The scale goes where the policy says, in the code for each place."""

import inspect

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradscaler import DynamicScale, FixedScale
from gradscaler.policies._checks import LARGEST_SCALE
from gradscaler.policies._presets import Presets
from tests.support.chosen import examples
from tests.support.eager import library

PRESETS = {name: getattr(DynamicScale, name)() for name in vars(Presets) if "__" not in name}


def test_a_scaler_has_the_defaults_of_its_preset_so_that_a_policy_may_stand_beside_them():
    own = inspect.signature(library.GradScaler).parameters
    preset = inspect.signature(getattr(DynamicScale, library.name)).parameters
    defaults = {name: each.default for name, each in preset.items()}
    assert {name: own[name].default for name in defaults} == defaults


@settings(
    max_examples=examples(25),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    policy=st.builds(
        DynamicScale,
        init_scale=st.sampled_from([1.0, 1024.0, 2.0**-3]),
        growth_factor=st.sampled_from([2.0, 1.1, 8.0]),
        backoff_factor=st.sampled_from([0.5, 0.3]),
        growth_interval=st.integers(1, 3),
        hysteresis=st.integers(1, 3),
        hysteresis_reset=st.sampled_from(["finite_step", "finite_step_only", "growth"]),
        min_scale=st.sampled_from([2.0**-126, 2.0**-4]),
        max_scale=st.sampled_from([2.0**12, 2.0**20, LARGEST_SCALE]),
    ),
    trace=st.text("ox", min_size=1, max_size=12),
)
@pytest.mark.usefixtures("place")
def test_the_scale_is_what_the_policy_makes_of_the_trace(policy, trace):
    state, expected = policy.init(), []
    for letter in trace:
        state = policy.update(state, letter == "x")
        expected.append(float(state.scale))
    assert library.train(library.scaler(policy=policy), trace) == expected


@pytest.mark.parametrize(
    ("policy", "trace", "scales"),
    [
        # Megatron's backs off at the second overflow, however far apart.
        (
            DynamicScale.megatron(initial_scale=8.0, growth_interval=100),
            "xooxoox",
            [8.0, 8.0, 8.0, 4.0, 4.0, 4.0, 2.0],
        ),
        # Paddle's backs off at the second overflow in a row.
        (
            DynamicScale.paddle(init_loss_scaling=8.0),
            "xoxxxx",
            [8.0, 8.0, 8.0, 4.0, 4.0, 2.0],
        ),
        # Keras 2's stops at one.
        (DynamicScale.tf_keras(initial_scale=2.0), "xxx", [1.0] * 3),
        (DynamicScale(init_scale=8.0, min_scale=4.0), "xxx", [4.0] * 3),
        # Growth that would pass the maximum is not made.
        (DynamicScale(init_scale=4.0, growth_interval=1, max_scale=12.0), "ooo", [8.0] * 3),
        (FixedScale(128.0), "xox", [128.0] * 3),
    ],
    ids=["megatron", "paddle", "keras", "minimum", "maximum", "fixed"],
)
def test_the_scale_goes_where_the_rule_is_known_to_go(policy, trace, scales):
    assert library.train(library.scaler(policy=policy), trace) == scales


@pytest.mark.parametrize("policy", [*PRESETS.values(), FixedScale(128.0)], ids=[*PRESETS, "fixed"])
def test_each_policy_s_first_scale_is_the_scaler_s(policy):
    scaler = library.scaler(policy=policy)
    assert library.scale_of(scaler) == float(policy.init().scale)
    assert library.numpy(scaler.scale(library.tensor(1.0))) == float(policy.init().scale)


@pytest.mark.parametrize("policy", PRESETS.values(), ids=PRESETS)
def test_the_getters_give_the_policy_s_parameters(policy):
    scaler = library.scaler(policy=policy)
    for name in library.other_rule.keys() - {"init_scale"}:
        assert getattr(scaler, f"get_{library.spelling[name]}")() == getattr(policy, name)


def test_a_policy_stands_in_for_the_parameters():
    by_parameters = library.scaler(**library.other_rule)
    by_policy = library.scaler(policy=DynamicScale(**library.other_rule))
    assert library.exact(by_policy.state_dict()) == library.exact(by_parameters.state_dict())


def test_under_a_fixed_scale_an_overflow_still_skips_its_step(parameters, finite, overflowed):
    scaler, optimizer = library.scaler(policy=FixedScale(128.0)), library.sgd(parameters, lr=1.0)
    before = list(map(library.numpy, parameters))
    for gradients in (overflowed, finite, overflowed):
        library.clear_gradients(optimizer)
        library.backward(scaler, parameters, gradients)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.last_step(optimizer).skipped
    for parameter, start, gradient in zip(parameters, before, finite, strict=True):
        np.testing.assert_allclose(library.numpy(parameter), start - gradient, rtol=1e-6)


def test_a_setter_keeps_the_rest_of_the_policy():
    policy = DynamicScale(init_scale=8.0, hysteresis=2, min_scale=8.0)
    scaler = library.scaler(policy=policy)
    getattr(scaler, f"set_{library.spelling['backoff_factor']}")(0.25)
    assert library.train(scaler, "xx") == [8.0, 8.0]
    getattr(scaler, f"set_{library.spelling['growth_interval']}")(1)
    assert library.train(scaler, "oxx") == [16.0, 16.0, 8.0]
    assert policy == DynamicScale(init_scale=8.0, hysteresis=2, min_scale=8.0)


def test_scalers_of_one_policy_move_apart():
    policy = DynamicScale(init_scale=8.0)
    first, second = library.scaler(policy=policy), library.scaler(policy=policy)
    library.train(first, "x")
    assert (library.scale_of(first), library.scale_of(second)) == (4.0, 8.0)
