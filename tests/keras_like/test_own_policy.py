"""A policy that is nobody's moves the scale, compiled or not, and comes back from files."""

import numpy as np
import pytest

from tests.support.keras_like import (
    KERAS_3,
    LossScaleOptimizer,
    drive,
    keras,
    numpy,
    scale_of,
    trained,
)
from tests.support.own_policy import PROVEN, SCALES, TRACE, Proven

STEPS = [
    [np.full((2, 2), np.inf if letter == "x" else 0.5, np.float32), np.ones(2, np.float32)]
    for letter in TRACE
]


def proven_of(optimizer):
    """The policy's own field."""
    return float(numpy(optimizer.proven if KERAS_3 else optimizer._loss_scale.variables["proven"]))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_it_moves_the_scale(family, variables, compiled):
    optimizer = LossScaleOptimizer(family.SGD(), policy=Proven())
    assert (optimizer.dynamic, optimizer.initial_scale) == (True, 8.0)
    assert optimizer.dynamic_growth_steps is None
    assert drive(optimizer, variables, STEPS, compiled) == SCALES
    assert proven_of(optimizer) == PROVEN[-1]


def test_its_parameters_need_not_be_fields(family, variables):
    class Attributes(Proven):
        init_scale, growth_interval = 8.0, 1

    optimizer = LossScaleOptimizer(family.SGD(), policy=Attributes())
    assert (optimizer.initial_scale, optimizer.dynamic_growth_steps) == (8.0, 1)
    assert drive(optimizer, variables, STEPS) == SCALES


def test_a_config_brings_it_back_as_it_brings_any_object_of_a_user(family):
    optimizer = LossScaleOptimizer(family.SGD(), policy=Proven(limit=2.0))
    loaded = LossScaleOptimizer.from_config(optimizer.get_config(), {"Proven": Proven})
    assert loaded.policy == Proven(limit=2.0)


def test_a_model_file_brings_back_the_policy_and_its_state(tmp_path):
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.01), policy=Proven())
    model, _ = trained(optimizer, epochs=1)
    model.save(tmp_path / "model.keras")
    objects = {"Proven": Proven, "LossScaleOptimizer": type(optimizer)}
    loaded = keras.models.load_model(tmp_path / "model.keras", objects).optimizer
    assert type(loaded) is type(optimizer)
    assert loaded.policy == Proven()
    assert scale_of(loaded) == scale_of(optimizer) > 8.0
    assert proven_of(loaded) == proven_of(optimizer) >= 8.0


def test_one_without_a_config_cannot_be_saved_and_the_framework_says_why(family):
    class Unsaved(Proven):
        get_config = None

    optimizer = LossScaleOptimizer(family.SGD(), policy=Unsaved())
    with pytest.raises(TypeError):
        optimizer.get_config()
