"""Policies of a user's own, in the framework's state dict and under its setters."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest

from gradscaler import AmaxScale, DynamicScale, FixedScale, ScaleState
from gradscaler.policies.state import host_where
from tests.support.eager import library

if library.name == "paddle":
    pytest.skip("it takes this package's policies", allow_module_level=True)

RULE = "growth_factor", "backoff_factor", "growth_interval"


class OwnState(NamedTuple):
    scale: Any
    finite_steps: Any
    nonfinite_steps: Any
    survived: Any


class Own:
    """Doubles at each finite step and halves at an overflow, without a parameter."""

    def init(self):
        return OwnState(np.float32(8), 0, 0, np.float32(0))

    def update(self, state, found_inf, where=host_where):
        return state._replace(scale=where(found_inf, state.scale / 2, state.scale * 2))


class OfThreeFields(Own):
    """The same, with no field of its own in its state."""

    def init(self):
        return ScaleState(np.float32(8), 0, 0)


class Growing(Own):
    growth_factor = 2.0


class BackingOff(Own):
    backoff_factor = 0.5


class OfOnes(Own):
    """Says 1.0 of both factors, and moves all the same."""

    growth_factor = backoff_factor = 1.0


class Still(Own):
    """A fixed scale of a user's own, which says that it is one."""

    fixed = True

    def update(self, state, found_inf, where=host_where):
        return state


MOVING = [Own, OfThreeFields, Growing, BackingOff]
TARGETS = {
    "the default": library.scaler,
    "a fixed scale": lambda: library.scaler(policy=FixedScale(2.0)),
    "a hysteresis": lambda: library.scaler(policy=DynamicScale(hysteresis=2)),
    "an AmaxScale": lambda: library.scaler(policy=AmaxScale()),
}


def saved_by(policy):
    scaler = library.scaler(policy=policy)
    library.train(scaler, "oo")
    return scaler.state_dict()


@pytest.mark.parametrize("kind", MOVING)
def test_the_framework_s_scaler_goes_on_by_its_default_rule(kind, native):
    loaded, expected = native(), native(init_scale=32.0)
    loaded.load_state_dict(saved_by(kind()))
    assert library.train(loaded, "xxox") == library.train(expected, "xxox") == [16, 8, 8, 4]


@pytest.mark.parametrize("kind", [*MOVING, OfOnes])
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_no_scaler_that_loads_it_keeps_its_scale_through_every_overflow(kind, target):
    scaler = target()
    scaler.load_state_dict(saved_by(kind()))
    assert library.scale_of(scaler) == 32.0
    assert library.train(scaler, "x" * 4)[-1] < 32.0


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_a_file_with_factors_of_one_for_those_that_a_moving_policy_lacks_still_moves(target):
    scaler, rule = target(), dict.fromkeys(RULE[:2], 1.0)
    scaler.load_state_dict({**saved_by(Own()), **rule})
    assert library.scale_of(scaler) == 32.0
    assert library.train(scaler, "x" * 4)[-1] < 32.0


def test_such_a_file_leaves_the_rule_of_the_scaler_that_loads_it():
    scaler = library.scaler(growth_factor=4.0, backoff_factor=0.25)
    scaler.load_state_dict({**saved_by(Own()), **dict.fromkeys(RULE, 1)})
    assert library.train(scaler, "xo") == [8.0, 32.0]


@pytest.mark.parametrize("policy", [Still(), FixedScale(8.0)])
def test_a_policy_that_says_it_is_fixed_is_fixed_wherever_it_is_loaded(policy, native):
    for scaler in (native(), *(make() for make in TARGETS.values())):
        scaler.load_state_dict(saved_by(policy))
        assert library.train(scaler, "oxxx") == [8.0] * 4


def test_the_state_dict_of_a_fixed_scale_survives_the_framework_s_own_scaler(native):
    theirs, scaler = native(), library.scaler()
    theirs.load_state_dict(saved_by(FixedScale(8.0)))
    scaler.load_state_dict(theirs.state_dict())
    assert library.train(scaler, "oxxx") == [8.0] * 4


@pytest.mark.parametrize("name", RULE)
def test_the_getters_give_the_framework_s_default_of_a_parameter_that_a_policy_lacks(name, native):
    ours, theirs = library.scaler(policy=Own()), native()
    assert getattr(ours, f"get_{name}")() == getattr(theirs, f"get_{name}")()


@pytest.mark.parametrize("scale", [1e39, 1e-46, 0.0, np.float32(np.nan), np.float64(1e39)])
def test_a_first_scale_that_float32_cannot_hold_is_refused(scale):
    class Beyond(Own):
        def init(self):
            return ScaleState(scale, 0, 0)

    with pytest.raises(
        ValueError, match=r"the scale of policy.init\(\) must be positive and finite"
    ):
        library.scaler(policy=Beyond())


# Setters.


@dataclass(frozen=True)
class Waiting:
    """Doubles after some finite steps in a row; its other parameter is not to be set."""

    growth_interval: int = 3
    growth_factor: ClassVar[float] = 2.0

    def init(self):
        return ScaleState(np.float32(8), 0, 0)

    def update(self, state, found_inf, where=host_where):
        steps = where(found_inf, state.finite_steps * 0, state.finite_steps + 1)
        grow = steps >= self.growth_interval
        scale = where(grow, state.scale * self.growth_factor, state.scale)
        return ScaleState(scale, where(grow, steps * 0, steps), state.nonfinite_steps)


class WithoutFields(Own):
    growth_interval = 2000


def test_a_parameter_that_a_dataclass_has_can_be_set_and_the_original_stays():
    policy = Waiting()
    scaler = library.scaler(policy=policy)
    library.train(scaler, "o")
    scaler.set_growth_interval(2)
    assert library.train(scaler, "ooo") == [16.0, 16.0, 32.0]
    assert (scaler.get_growth_interval(), policy) == (2, Waiting(3))


def test_a_parameter_that_the_policy_lacks_is_said_to_be_missing():
    for policy in (Own(), Waiting(), FixedScale(8.0)):
        with pytest.raises(TypeError, match="has no backoff_factor to set"):
            library.scaler(policy=policy).set_backoff_factor(0.25)


@pytest.mark.parametrize(
    ("policy", "name"), [(WithoutFields(), "growth_interval"), (Waiting(), "growth_factor")]
)
def test_a_parameter_that_the_policy_has_but_cannot_be_copied_with_is_said_to_be_that(policy, name):
    scaler = library.scaler(policy=policy)
    with pytest.raises(TypeError, match=rf"no field {name} of a dataclass.*GradScaler\(policy="):
        getattr(scaler, f"set_{name}")(4)
    assert scaler.observed.policy is policy
