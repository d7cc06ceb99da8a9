"""Parameters under a framework's names, and ``policy=`` in their place."""

import re

import pytest

from gradscaler import DynamicScale, FixedScale, ParameterError, ScaleState
from gradscaler.policies import Rule
from gradscaler.policies._spelling import changed, check_alone, check_policy, spelled


class Custom:
    def init(self):
        return ScaleState(1.0, 0, 0)

    def update(self, state, found_inf, where=None):
        return state


def test_parameters_reach_the_fields_that_their_names_stand_for():
    fields = {"ratio": "growth_factor"}
    assert spelled(DynamicScale, fields, ratio=4.0, hysteresis=3) == DynamicScale(
        growth_factor=4.0, hysteresis=3
    )


def test_values_are_those_of_the_fields_in_their_order():
    fields = {"ratio": "growth_factor", "steps": "growth_interval"}
    assert spelled(DynamicScale, fields, 4.0, 3, hysteresis=2) == DynamicScale(
        growth_factor=4.0, growth_interval=3, hysteresis=2
    )


def test_an_error_keeps_its_type_and_names_every_parameter_as_the_caller_does():
    fields = {"floor": "min_scale", "ceiling": "max_scale"}
    message = "floor must not be above ceiling, got 8.0 > 4.0"
    with pytest.raises(ParameterError, match=f"^{message}$"):
        spelled(DynamicScale, fields, floor=8.0, ceiling=4.0)


def test_an_error_leaves_the_names_of_parameters_that_were_not_given():
    fields = {"floor": "min_scale", "ceiling": "max_scale"}
    with pytest.raises(ParameterError, match=r"^floor must not be above max_scale"):
        changed(DynamicScale(init_scale=2.0, max_scale=4.0), fields, floor=8.0)


def test_a_changed_policy_keeps_the_rest():
    policy = DynamicScale(init_scale=8.0, hysteresis=3)
    assert changed(policy, {"ratio": "growth_factor"}, ratio=4.0) == DynamicScale(
        init_scale=8.0, growth_factor=4.0, hysteresis=3
    )


@pytest.mark.parametrize("name", ["torch", "apex", "megatron"])
def test_a_tuple_given_to_a_preset_is_refused_under_the_parameters_name(name):
    with pytest.raises(TypeError, match=re.escape("growth_factor must be a number, got ('a', 4")):
        getattr(DynamicScale, name)(growth_factor=("a", 4.0))


def test_parameters_at_their_defaults_may_stand_beside_a_policy():
    check_alone(FixedScale(8.0), (2.0, 2000), ratio=2.0, steps=2000)


def test_parameters_beside_a_policy_are_refused_with_their_names_and_values():
    message = "leave out ratio, steps, got (4.0, 2000) beside FixedScale(scale=8.0)"
    with pytest.raises(ParameterError, match=re.escape(message)):
        check_alone(FixedScale(8.0), (2.0, 2000), ratio=4.0, steps=2000)


@pytest.mark.parametrize("policy", [DynamicScale(), FixedScale(8.0), Custom()])
def test_anything_with_the_methods_of_a_policy_is_a_policy(policy):
    check_policy(policy)


@pytest.mark.parametrize("policy", [None, 8.0, "dynamic", DynamicScale, Custom])
def test_anything_else_is_refused_and_so_is_a_class(policy):
    with pytest.raises(TypeError, match="a DynamicScale, an AmaxScale or a FixedScale, got"):
        check_policy(policy)


def test_a_policy_of_the_users_own_is_refused_where_its_parameters_are_read():
    with pytest.raises(TypeError, match="a DynamicScale, an AmaxScale or a FixedScale, got"):
        check_policy(Custom(), Rule)
