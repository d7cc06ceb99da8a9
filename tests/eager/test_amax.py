"""A policy that looks at the largest gradient is handed it; others cost nothing more for it."""

import copy
import math
import pickle
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradscaler import DynamicScale, FixedScale
from gradscaler.policies.state import host_where
from tests.support.amax import INF, NAN, TRACE, as_bits, policy
from tests.support.chosen import examples
from tests.support.eager import library

WAYS = {
    "step": lambda scaler, optimizer: None,
    "unscale_": lambda scaler, optimizer: scaler.unscale_(optimizer),
    "clip": lambda scaler, optimizer: scaler.clip_grad_norm_(optimizer, 0.5),
    "clip by another norm": lambda scaler, optimizer: scaler.clip_grad_norm_(
        optimizer, 0.5, norm_type=math.inf
    ),
    "clip twice": lambda scaler, optimizer: [
        scaler.clip_grad_norm_(optimizer, norm) for norm in (0.5, 0.1)
    ],
    "clip, then unscale_": lambda scaler, optimizer: (
        scaler.clip_grad_norm_(optimizer, 0.5),
        scaler.unscale_(optimizer),
    ),
}

each_way = pytest.mark.parametrize("prepare", WAYS.values(), ids=WAYS)
START = policy(init_scale=2.0)


class AsThePolicy:
    """A training loop of one or two optimizers, and the same policy on the host."""

    def __init__(self, rule, make=library.sgd, optimizers=1, **options):
        self.policy, self.expected = rule, rule.init()
        self.scaler = library.scaler(policy=rule)
        self.owned = [library.parameters() for _ in range(optimizers)]
        self.optimizers = [make(parameters, lr=1e-3, **options) for parameters in self.owned]

    def step(self, *largest, prepare=WAYS["step"]):
        """Take one iteration; ``largest`` are the largest gradients, one for each optimizer."""
        for parameters, optimizer, most in zip(self.owned, self.optimizers, largest, strict=True):
            library.clear_gradients(optimizer)
            gradients = [np.full(tuple(p.shape), most / 4, np.float32) for p in parameters]
            gradients[1].flat[-1] = -most
            library.backward(self.scaler, parameters, gradients)
        for optimizer in self.optimizers:
            prepare(self.scaler, optimizer)
            self.scaler.step(optimizer)
        self.scaler.update()
        self.expect(max(np.float32(abs(most)) for most in largest), not np.isfinite(largest).all())

    def expect(self, amax, found_inf):
        self.expected = self.policy.update(self.expected, found_inf, amax=amax)
        assert as_bits(self.scaler.observed.state) == as_bits(self.expected)


@each_way
@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.usefixtures("place")
def test_the_state_is_what_the_policy_makes_of_the_gradients(prepare, interval, fused):
    loop = AsThePolicy(policy(amax_interval=interval), library.adamw, fused=fused)
    for most in TRACE:
        loop.step(most, prepare=prepare)
    assert loop.scaler.observed.state.peak > 0


@settings(
    max_examples=examples(25),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    rule=st.builds(
        policy,
        growth_factor=st.sampled_from([2.0, 8.0]),
        backoff_factor=st.sampled_from([0.5, 0.25]),
        margin=st.integers(3, 20),
        patience=st.integers(0, 3),
        half_life=st.sampled_from([0.5, 10.0]),
        amax_interval=st.integers(1, 4),
    ),
    trace=st.lists(
        st.tuples(*[st.floats(2.0**-30, 2.0**30, width=32) | st.sampled_from([INF, NAN, 0.0])] * 2),
        min_size=1,
        max_size=8,
    ),
    prepare=st.sampled_from(list(WAYS.values())),
)
@pytest.mark.usefixtures("place")
def test_the_largest_gradient_is_that_of_all_optimizers(rule, trace, prepare):
    loop = AsThePolicy(rule, optimizers=2)
    for largest in trace:
        loop.step(*largest, prepare=prepare)


@pytest.mark.usefixtures("place")
def test_a_closure_s_last_evaluation_is_what_counts():
    loop = AsThePolicy(policy())
    (optimizer,), (parameters,) = loop.optimizers, loop.owned
    for most in (0.25, 3.0, 2.0**-10):

        def closure(most=most):
            library.clear_gradients(optimizer)
            gradients = [np.full(tuple(p.shape), most, np.float32) for p in parameters]
            return library.backward(loop.scaler, parameters, gradients)

        loop.scaler.step(optimizer, closure)
        loop.scaler.update()
        loop.expect(most, found_inf=False)


def test_an_optimizer_without_gradients_counts_for_nothing():
    loop = AsThePolicy(policy(), optimizers=2)
    for most in (0.25, 3.0):
        for optimizer in loop.optimizers:
            library.clear_gradients(optimizer)
        gradients = [np.full(tuple(p.shape), most, np.float32) for p in loop.owned[0]]
        library.backward(loop.scaler, loop.owned[0], gradients)
        for optimizer in loop.optimizers:
            loop.scaler.step(optimizer)
        loop.scaler.update()
        loop.expect(most, found_inf=False)


def by_state_dict(scaler, rule=START):
    other = library.scaler(policy=rule)
    other.load_state_dict(scaler.state_dict())
    return other


def by_a_used_scaler_s_state_dict(scaler, rule=START):
    other = library.scaler(policy=rule)
    library.train(other, "ox")
    other.load_state_dict(scaler.state_dict())
    return other


@pytest.mark.parametrize(
    "duplicate",
    [
        copy.copy,
        copy.deepcopy,
        lambda scaler: pickle.loads(pickle.dumps(scaler)),
        by_state_dict,
        by_a_used_scaler_s_state_dict,
    ],
    ids=["copy", "deepcopy", "pickle", "state dict", "state dict, used"],
)
@pytest.mark.usefixtures("place")
def test_a_copy_goes_on_where_the_scaler_was(duplicate):
    loop = AsThePolicy(policy())
    for most in (3.0, 0.5, NAN):
        loop.step(most)
    peak, original = loop.scaler.observed.state.peak, loop.scaler
    assert peak > 0
    loop.scaler = duplicate(original)
    for most in (NAN, 0.1, 2.0):
        loop.step(most)
    assert original.observed.state.peak == peak


def test_the_framework_s_own_scaler_ignores_the_peak_and_the_reach(native):
    loop = AsThePolicy(policy())
    loop.step(3.0)
    saved = loop.scaler.state_dict()
    theirs = native()
    theirs.load_state_dict(saved)
    assert theirs.state_dict()[library.state_keys["scale"]] == saved[library.state_keys["scale"]]


def test_a_file_without_them_loads_and_nothing_is_known(native):
    loop = AsThePolicy(policy())
    loop.step(3.0)
    loop.scaler.load_state_dict(native(init_scale=8.0).state_dict())
    assert loop.scaler.observed.policy.margin == policy().margin
    assert as_bits(loop.scaler.observed.state) == as_bits((8.0, 0, 0, 0.0, 0.0))


@pytest.mark.parametrize("value", [-1.0, NAN, INF, 2.0**128, "large"])
@pytest.mark.parametrize("key", ["_peak", "_reach"])
def test_a_size_that_cannot_be_one_changes_nothing(key, value):
    scaler = library.scaler(policy=policy())
    library.train(scaler, "ox")
    before = scaler.observed.state
    with pytest.raises((ValueError, TypeError), match=f"{key} must be"):
        scaler.load_state_dict({**scaler.state_dict(), key: value})
    assert scaler.observed.state == before


@pytest.mark.parametrize("other", [DynamicScale(init_scale=8.0), FixedScale(8.0)])
@pytest.mark.usefixtures("place")
def test_a_scaler_takes_the_state_dict_of_another_policy_and_goes_on(other):
    scaler = library.scaler(policy=policy())
    library.train(scaler, "ox")
    scaler.load_state_dict(library.scaler(policy=other).state_dict())
    assert library.train(scaler, "o")[0] in (8.0, 16.0)


class OwnState(NamedTuple):
    scale: Any
    finite_steps: Any
    nonfinite_steps: Any
    largest: Any
    seen: Any


class Own:
    """A policy of a user's own, which remembers the largest gradient and never forgets it."""

    amax_interval = 1

    def init(self):
        return OwnState(np.float32(8), 0, 0, np.float32(0), 0)

    def update(self, state, found_inf, where=host_where, amax=0.0):
        scale, finite, nonfinite, largest, seen = state
        return OwnState(
            where(found_inf, scale / 2, scale),
            where(found_inf, finite, finite + 1),
            where(found_inf, nonfinite + 1, nonfinite),
            where(found_inf, largest, where(amax > largest, amax, largest)),
            seen + 1,
        )


@pytest.mark.skipif(library.name == "paddle", reason="it takes this package's policies")
@pytest.mark.parametrize("duplicate", [by_state_dict, by_a_used_scaler_s_state_dict])
@pytest.mark.usefixtures("place")
def test_a_policy_of_one_s_own_and_all_leaves_of_its_state_survive_a_file(duplicate):
    rule = Own()
    loop = AsThePolicy(rule)
    for most in (3.0, 0.5, NAN):
        loop.step(most)
    loop.scaler = duplicate(loop.scaler, rule)
    assert loop.scaler.observed.policy is rule
    for most in (0.25, NAN, 7.0):
        loop.step(most)


@pytest.mark.skipif(library.name == "paddle", reason="it takes this package's policies")
def test_a_policy_of_one_s_own_takes_the_scale_and_the_count_of_the_framework_s_file(native):
    rule = Own()
    scaler = library.scaler(policy=rule)
    scaler.load_state_dict(native(init_scale=4.0).state_dict())
    assert scaler.observed.policy is rule
    assert as_bits(scaler.observed.state) == as_bits((4.0, 0, 0, 0.0, 0))


class Counting:
    """A policy of a user's own, which takes no amax."""

    def init(self):
        return DynamicScale(init_scale=8.0).init()

    def update(self, state, found_inf, where=None):
        return state._replace(finite_steps=state.finite_steps + 1)


@each_way
@pytest.mark.parametrize("rule", [DynamicScale(), FixedScale(8.0), Counting()])
@pytest.mark.usefixtures("place")
def test_no_other_policy_costs_a_measurement(rule, prepare, fused, monkeypatch):
    if library.name == "paddle" and isinstance(rule, Counting):
        pytest.skip("it takes this package's policies")

    def refuse(*args):
        raise AssertionError("called for a policy that does not look at it")

    monkeypatch.setattr(library.GradScaler._operations, "amax", refuse)
    monkeypatch.setattr(library.GradScaler._operations, "finite_steps", refuse)
    scaler = library.scaler(policy=rule)
    parameters = library.parameters()
    optimizer = library.adamw(parameters, fused=fused)
    for most in (1.0, INF, 1.0):
        library.clear_gradients(optimizer)
        gradients = [np.full(tuple(p.shape), most, np.float32) for p in parameters]
        library.backward(scaler, parameters, gradients)
        prepare(scaler, optimizer)
        scaler.step(optimizer)
        scaler.update()


def test_on_the_host_only_every_nth_finite_step_is_measured(monkeypatch):
    operations = library.GradScaler._operations
    amax, calls, measured = operations.amax, [], []

    def counted(*args):
        calls.append(args)
        return amax(*args)

    loop = AsThePolicy(policy(amax_interval=3, growth_interval=100, init_scale=2.0**15))
    monkeypatch.setattr(operations, "amax", counted)
    for most in [1.0] * 7 + [NAN] + [1.0] * 4:
        calls.clear()
        loop.step(most)
        measured.append(len(calls))
    # The count starts again after the overflow, which is not measured.
    assert measured == [1, 0, 0, 1, 0, 0, 1, 0, 1, 0, 0, 1]
