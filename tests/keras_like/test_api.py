import json

import numpy as np
import pytest

from gradscaler import DynamicScale, FixedScale
from tests.support.keras_like import (
    IMAGES,
    KERAS_3,
    LABELS,
    NATIVE,
    LossScaleOptimizer,
    Variable,
    dtype,
    everything,
    keras,
    numpy,
    tensor,
    trained,
)


def test_the_document_s_first_example(family):
    optimizer = LossScaleOptimizer(family.SGD(0.25))
    variable = Variable(1.0)
    optimizer.minimize(lambda: variable * variable, var_list=variable)
    assert numpy(variable) == 0.5
    scaled_grad = 2 * numpy(variable) * optimizer.get_scaled_loss(tensor(1.0))
    (grad,) = optimizer.get_unscaled_gradients([scaled_grad])
    assert float(grad) == 1.0
    optimizer.apply_gradients([(grad, variable)])
    assert numpy(variable) == 0.25
    assert int(optimizer.dynamic_counter) == 2
    assert int(optimizer.iterations) == 2


def test_hyperparameters_are_the_inner_optimizer_s(family):
    optimizer = LossScaleOptimizer(family.Adam(0.5, beta_1=0.8))
    inner = optimizer.inner_optimizer
    assert np.isclose(float(optimizer.beta_1), 0.8)
    optimizer.beta_1 = 0.7
    assert np.allclose([float(optimizer.beta_1), float(inner.beta_1)], 0.7)
    optimizer.lr = 0.25
    for rate in (optimizer.lr, optimizer.learning_rate, inner.learning_rate):
        assert float(rate) == 0.25
    names = {"beta_1", "beta_2", "lr", "learning_rate", "clipnorm", "loss_scale", "minimize"}
    assert names <= set(dir(optimizer))
    assert "momentum" not in dir(optimizer)


def test_other_attributes_are_the_wrapper_s(family):
    optimizer = LossScaleOptimizer(family.Adam(epsilon=1e-5))
    message = f"'{type(optimizer).__name__}' object has no attribute 'epsilon'"
    with pytest.raises(AttributeError, match=message):
        _ = optimizer.epsilon
    optimizer.epsilon = 1e-4
    assert (optimizer.epsilon, optimizer.inner_optimizer.epsilon) == (1e-4, 1e-5)


def test_an_attribute_error_of_a_property_is_the_one_that_is_raised(family):
    class Advising(family.SGD):
        @property
        def iterations(self):
            raise AttributeError("read them on the parts")

    class Advised(type(LossScaleOptimizer(family.SGD()))):
        @property
        def advice(self):
            return self.inner_optimizer.iterations

    optimizer = Advised(Advising())
    for name in ("advice", "iterations"):
        assert not hasattr(optimizer, name)
        with pytest.raises(AttributeError, match=r"^read them on the parts$"):
            getattr(optimizer, name)


def test_the_defaults_are_the_document_s(family):
    optimizer = LossScaleOptimizer(family.SGD())
    assert optimizer.dynamic is True
    assert (optimizer.initial_scale, optimizer.dynamic_growth_steps) == (2.0**15, 2000)
    assert isinstance(optimizer.initial_scale, float)
    assert int(optimizer.dynamic_counter) == 0
    assert dtype(optimizer.dynamic_counter) in ({"int32", "int64"} if KERAS_3 else {"int64"})


@pytest.mark.parametrize("arguments", [{}, {"dynamic": False, "initial_scale": 2**15}])
def test_the_loss_scale_is_a_float32_scalar(family, arguments):
    scale = LossScaleOptimizer(family.SGD(), **arguments).loss_scale
    assert type(scale) is type(tensor(1.0))  # not a variable, which would move
    assert (dtype(scale), tuple(scale.shape), float(scale)) == ("float32", (), 2.0**15)


@pytest.mark.parametrize("dynamic", [False, np.bool_(False)])
def test_a_static_scale_has_no_counter(family, dynamic):
    optimizer = LossScaleOptimizer(family.SGD(), dynamic, 128)
    assert optimizer.dynamic is False
    assert optimizer.dynamic_counter is None
    assert optimizer.dynamic_growth_steps is None
    assert optimizer.initial_scale == float(optimizer.loss_scale) == 128.0


def test_the_arguments_take_numpy_s_booleans_and_integral_floats(family):
    optimizer = LossScaleOptimizer(family.SGD(), np.bool_(True), 8.0, dynamic_growth_steps=3.0)
    assert (optimizer.dynamic, optimizer.dynamic_growth_steps) == (True, 3)


def fixed_variable(value):
    return Variable(value, trainable=False)


@pytest.mark.parametrize("make", [tensor, fixed_variable, np.array])
def test_the_arguments_take_scalar_tensors(family, make):
    moving = LossScaleOptimizer(family.SGD(), True, make(8.0), make(3.0))
    assert (moving.initial_scale, moving.dynamic_growth_steps) == (8.0, 3)
    assert float(moving.loss_scale) == 8.0
    static = LossScaleOptimizer(family.SGD(), False, make(8.0))
    for optimizer in (moving, static):
        config = json.dumps(optimizer.get_config()["initial_scale"])
        assert config == "8.0"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"dynamic": 2.0**15},
            TypeError,
            r'"dynamic" argument .* must be a bool.*write initial_scale=32768\.0',
        ),
        ({"dynamic": "dynamic"}, TypeError, "must be a bool, but got: 'dynamic'"),
        ({"dynamic": False}, ValueError, '"initial_scale" must be specified if "dynamic" is False'),
        (
            {"dynamic": False, "initial_scale": 1, "dynamic_growth_steps": 2},
            ValueError,
            '"dynamic_growth_steps" must be None if "dynamic" is False, but got: 2',
        ),
        ({"initial_scale": -1.0}, ValueError, "initial_scale must be positive"),
        ({"initial_scale": 0}, ValueError, "initial_scale must be positive"),
        *(
            []
            if KERAS_3
            else [({"initial_scale": 0.5}, ValueError, "initial_scale must lie between 1.0")]
        ),
        ({"initial_scale": "8"}, TypeError, "initial_scale must be a number"),
        ({"initial_scale": "x"}, ValueError, "initial_scale must be a number"),  # as float("x")
        ({"dynamic_growth_steps": "x"}, ValueError, "dynamic_growth_steps must be an integer"),
        ({"initial_scale": np.ones(1)}, TypeError, "initial_scale must be a number"),
        (
            {"dynamic": False, "initial_scale": float("nan")},
            ValueError,
            "initial_scale must be positive",
        ),
        ({"dynamic_growth_steps": 0}, ValueError, "dynamic_growth_steps must be at least 1"),
        ({"dynamic_growth_steps": 1.5}, TypeError, "dynamic_growth_steps must be an integer"),
        ({"policy": DynamicScale(), "initial_scale": 2.0}, ValueError, "policy= already says"),
        ({"policy": 2.0}, TypeError, "policy must be a DynamicScale, an AmaxScale or a"),
    ],
)
def test_a_bad_argument_is_refused_by_name_and_the_optimizer_stays_free(
    family, arguments, error, message
):
    inner = family.SGD()
    with pytest.raises(error, match=message):
        LossScaleOptimizer(inner, **arguments)
    LossScaleOptimizer(inner)


@pytest.mark.parametrize("inner", [None, "adam", 1.0])
def test_only_an_optimizer_can_be_wrapped(inner):
    with pytest.raises(TypeError, match=r"must be an instance of `.*Optimizer`.*, but got: "):
        LossScaleOptimizer(inner)


def test_an_optimizer_of_the_other_keras_is_sent_to_its_module():
    other = {"keras": "tf_keras", "tf_keras": "keras"}[LossScaleOptimizer.__module__.split(".")[1]]
    optimizer = type("SGD", (), {"__module__": f"{other}.src.optimizers.sgd"})()
    with pytest.raises(TypeError, match=rf"use gradscaler\.{other}\.LossScaleOptimizer\.$"):
        LossScaleOptimizer(optimizer)


@pytest.mark.parametrize("wrapper", [LossScaleOptimizer, NATIVE])
def test_a_wrapper_cannot_be_wrapped(family, wrapper):
    with pytest.raises(TypeError, match="cannot wrap another LossScaleOptimizer"):
        LossScaleOptimizer(wrapper(family.SGD()))


@pytest.mark.parametrize("given", ["float16", "bfloat16", "float32"])
def test_unscaling_keeps_none_and_dtypes(family, given):
    optimizer = LossScaleOptimizer(family.SGD(), dynamic=False, initial_scale=2)
    none, unscaled = optimizer.get_unscaled_gradients([None, tensor(np.array([3.0, -4.0]), given)])
    assert none is None
    assert dtype(unscaled) == given
    assert [float(value) for value in unscaled] == [1.5, -2.0]


@pytest.mark.parametrize(
    "arguments",
    [
        {"initial_scale": 4.0, "dynamic_growth_steps": 3},
        {"dynamic": False, "initial_scale": 8.0},
        {"policy": FixedScale(8.0)},
        {"policy": DynamicScale(hysteresis=2, hysteresis_reset="growth")},
        {"policy": DynamicScale(init_scale=0.5)},
    ],
)
def test_a_config_says_how_the_scale_moves(family, arguments):
    optimizer = LossScaleOptimizer(family.SGD(0.5), **arguments)
    config = json.loads(json.dumps(keras.optimizers.serialize(optimizer)))
    revived = (
        keras.optimizers.deserialize(config),
        LossScaleOptimizer.from_config(optimizer.get_config()),
        type(optimizer).from_config(optimizer.get_config()),
    )
    for each in revived:
        assert type(each) is type(optimizer)
        assert each.get_config() == optimizer.get_config()
        assert each._policy == optimizer._policy


@pytest.mark.parametrize("arguments", [{"dynamic_growth_steps": 5}, {"dynamic": False}], ids=str)
def test_a_saved_model_goes_on_as_if_it_had_not_stopped(arguments, tmp_path):
    """tf-keras' own wrapper starts from the initial scale again."""

    def state(model):
        return everything(model.optimizer, model.trainable_variables)

    adam = keras.optimizers.Adam(0.05)
    model, _ = trained(LossScaleOptimizer(adam, initial_scale=2.0**12, **arguments))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is type(model.optimizer)
    assert state(loaded) == state(model)
    if loaded.optimizer.dynamic:
        assert float(loaded.optimizer.loss_scale) != 2.0**12
        assert int(loaded.optimizer.dynamic_counter) > 0
    for each in (model, loaded):
        each.fit(IMAGES, LABELS, batch_size=16, shuffle=False, verbose=0)
    assert state(loaded) == state(model)
