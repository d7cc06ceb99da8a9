"""The adapters of one framework, named by GRADSCALER_FRAMEWORK, on every recorded trace."""

import importlib
import os

import pytest

from tests.conformance.replay import SCALES, STEPS, TRACES, TRAINING, network, replay

pytestmark = pytest.mark.one_backend  # the rule is written once, by keras.ops

on_framework = importlib.import_module(f"tests.conformance.on_{os.environ['GRADSCALER_FRAMEWORK']}")


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("mode", on_framework.MODES, ids=lambda mode: mode.name)
def test_a_trace_has_the_states_of_the_host_s_policy_or_a_known_difference(mode, trace):
    replay(mode, trace)


@pytest.mark.parametrize("name", on_framework.TRAIN)
def test_real_gradients_overflow_in_the_same_steps_everywhere(name):
    assert on_framework.TRAIN[name](TRAINING, STEPS, network()) == SCALES
