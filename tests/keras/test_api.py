import copy
import json

import keras
import numpy as np
import pytest

import gradscaler.keras
from gradscaler import DynamicScale, FixedScale
from gradscaler.keras import LossScaleOptimizer

SGD = keras.optimizers.SGD


def test_it_is_what_keras_looks_for(native):
    optimizer = LossScaleOptimizer(SGD())
    assert isinstance(optimizer, native)
    assert gradscaler.keras.__all__ == ["LossScaleOptimizer"]


def test_the_defaults_are_the_document_s():
    optimizer = LossScaleOptimizer(SGD())
    assert optimizer.dynamic is True
    assert optimizer.initial_scale == 2.0**15
    assert optimizer.dynamic_growth_steps == 2000
    assert int(optimizer.dynamic_counter) == 0
    assert float(optimizer.loss_scale) == 2.0**15
    assert keras.backend.standardize_dtype(optimizer.loss_scale.dtype) == "float32"
    assert keras.ops.is_tensor(optimizer.loss_scale)
    assert type(optimizer.loss_scale) is type(keras.ops.ones(()))  # no variable that would move
    assert optimizer.loss_scale.shape == ()
    assert optimizer.name.startswith("loss_scale_optimizer")


def test_a_static_scale_has_no_counter():
    optimizer = LossScaleOptimizer(SGD(), dynamic=False, initial_scale=128)
    assert optimizer.dynamic is False
    assert optimizer.dynamic_counter is None
    assert optimizer.dynamic_growth_steps is None
    assert optimizer.initial_scale == float(optimizer.loss_scale) == 128.0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dynamic": 2.0**15}, TypeError, r"must be a bool.*initial_scale=32768\.0"),
        ({"dynamic": "dynamic"}, TypeError, "must be a bool, but got: 'dynamic'"),
        ({"dynamic": False}, ValueError, "must be specified if .dynamic. is False"),
        (
            {"dynamic": False, "initial_scale": 1.0, "dynamic_growth_steps": 2},
            ValueError,
            "must be None",
        ),
        ({"initial_scale": -1.0}, ValueError, "initial_scale must be positive"),
        ({"initial_scale": 0.5}, ValueError, "initial_scale must lie between 1.0"),
        ({"initial_scale": "8"}, TypeError, "initial_scale must be a number"),
        (
            {"dynamic": False, "initial_scale": float("nan")},
            ValueError,
            "initial_scale must be positive",
        ),
        ({"dynamic_growth_steps": 0}, ValueError, "dynamic_growth_steps must be at least 1"),
        ({"dynamic_growth_steps": 1.5}, TypeError, "dynamic_growth_steps must be an integer"),
        ({"policy": DynamicScale(), "initial_scale": 2.0}, ValueError, "policy= already says"),
        ({"policy": 2.0}, TypeError, "policy must be a DynamicScale or a FixedScale, got 2.0"),
        ({"clipnorm": 1.0}, ValueError, "set `clipnorm` on the `inner_optimizer`"),
        ({"foo": 1}, ValueError, "does not support arguments: `foo`"),
    ],
)
def test_a_bad_argument_is_refused_by_name(arguments, error, message):
    with pytest.raises(error, match=message):
        LossScaleOptimizer(SGD(), **arguments)


@pytest.mark.parametrize("dynamic", [True, False])
def test_numpy_s_booleans_are_booleans(dynamic):
    optimizer = LossScaleOptimizer(SGD(), np.bool_(dynamic), 8.0)
    assert optimizer.dynamic is dynamic


@pytest.mark.parametrize("inner", [None, "adam", 1.0, LossScaleOptimizer(SGD())])
def test_only_an_unwrapped_optimizer_can_be_wrapped(inner):
    with pytest.raises(TypeError, match=r"must be an instance of|cannot wrap another"):
        LossScaleOptimizer(inner)


def test_keras_own_wrapper_cannot_be_wrapped(native):
    with pytest.raises(TypeError, match="cannot wrap another"):
        LossScaleOptimizer(native(SGD()))


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), ("2", TypeError), (None, TypeError)])
def test_a_setter_that_raises_changes_nothing(value, error):
    optimizer = LossScaleOptimizer(SGD(), dynamic_growth_steps=5)
    with pytest.raises(error, match="dynamic_growth_steps"):
        optimizer.dynamic_growth_steps = value
    assert optimizer.dynamic_growth_steps == 5


def test_the_document_s_examples(numpy):
    optimizer = LossScaleOptimizer(SGD(0.25))
    variable = keras.Variable(1.0)
    optimizer.minimize(lambda: variable * variable, var_list=variable)
    assert numpy(variable) == 0.5
    scaled_grad = keras.ops.multiply(2 * numpy(variable), optimizer.get_scaled_loss(1.0))
    (grad,) = optimizer.get_unscaled_gradients([scaled_grad])
    assert float(grad) == 1.0
    optimizer.apply_gradients([(grad, variable)])
    assert numpy(variable) == 0.25
    assert int(optimizer.dynamic_counter) == 2
    assert int(optimizer.iterations) == 2


@pytest.mark.parametrize("var_list", [None, 3, [None], lambda: None])
def test_minimize_takes_variables_alone(var_list):
    variable = keras.Variable(1.0)
    with pytest.raises(TypeError, match=r"var_list must be .* but holds: (None|3)"):
        LossScaleOptimizer(SGD()).minimize(lambda: variable * variable, var_list)


def test_minimize_without_variables_is_no_step():
    variable = keras.Variable(1.0)
    optimizer = LossScaleOptimizer(SGD())
    optimizer.minimize(lambda: variable * variable, [])
    assert int(optimizer.dynamic_counter) == 0


def test_an_update_step_is_the_inner_optimizer_s(numpy):
    variable = keras.Variable(1.0)
    optimizer = LossScaleOptimizer(SGD())
    optimizer.build([variable])
    optimizer.update_step(keras.ops.ones(()), variable, 0.25)
    assert numpy(variable) == 0.75


class ScaledInACall(keras.layers.Layer):
    def __init__(self, optimizer):
        super().__init__(dtype="mixed_float16")
        self.optimizer = optimizer

    def call(self, inputs):
        return self.optimizer.scale_loss(keras.ops.mean(inputs)) / self.optimizer.loss_scale


def test_the_scale_is_not_autocast_within_a_layer():
    optimizer = LossScaleOptimizer(SGD(), initial_scale=2.0**17)
    assert float(ScaledInACall(optimizer)(np.ones((2, 2), "float32"))) == 1.0


def test_a_scaled_callable_is_a_callable():
    optimizer = LossScaleOptimizer(SGD(), initial_scale=8.0)
    scaled = optimizer.get_scaled_loss(lambda: keras.ops.convert_to_tensor(2.0))
    assert float(scaled()) == 16.0
    assert float(optimizer.scale_loss(2.0)) == 16.0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_unscaling_keeps_none_and_dtypes(dtype):
    optimizer = LossScaleOptimizer(SGD(), initial_scale=2.0)
    grad = keras.ops.convert_to_tensor(np.array([3.0, -4.0]), dtype)
    none, unscaled = optimizer.get_unscaled_gradients([None, grad])
    assert none is None
    assert keras.backend.standardize_dtype(unscaled.dtype) == dtype
    assert [float(value) for value in unscaled] == [1.5, -2.0]


SHAPES = pytest.mark.parametrize("shape", [(), (3,)])


@SHAPES
def test_gradients_are_unscaled_in_float32(shape, numpy):
    """2**30 is no float16, nor is 2**-30."""
    optimizer = LossScaleOptimizer(SGD(1.0), initial_scale=2.0**30)
    grad = keras.ops.full(shape, 2.0**15, "float16")
    assert (numpy(optimizer.get_unscaled_gradients([grad])[0]) == 2.0**-15).all()
    variable = keras.Variable(np.zeros(shape), dtype="float16")
    optimizer.apply([grad], [variable])
    assert (numpy(variable) == -(2.0**-15)).all()


@SHAPES
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_loss_is_scaled_in_float32(dtype, shape, numpy):
    """2**17 is no float16."""
    optimizer = LossScaleOptimizer(SGD(), initial_scale=2.0**17)
    for scale_loss in (optimizer.scale_loss, optimizer.get_scaled_loss):
        scaled = scale_loss(keras.ops.ones(shape, dtype))
        assert keras.backend.standardize_dtype(scaled.dtype) == "float32"
        assert (numpy(scaled) == 2.0**17).all()


def _pairs(grad, variable):
    return [(keras.ops.convert_to_tensor(grad), variable)]


def test_unscaling_by_hand_lasts(numpy):
    """Compiled code unscales in its first run alone, as far as Python can see."""
    optimizer = LossScaleOptimizer(SGD(1.0), initial_scale=4.0)
    variable = keras.Variable(10.0)
    optimizer.get_scaled_loss(1.0)
    optimizer.get_unscaled_gradients([keras.ops.ones(())])
    optimizer.apply_gradients(_pairs(1.0, variable))
    assert numpy(variable) == 9.0
    optimizer.minimize(lambda: 1.0 * variable, [variable])
    assert numpy(variable) == 8.0
    optimizer.apply_gradients(_pairs(1.0, variable))
    assert numpy(variable) == 7.0


def test_scaling_the_loss_as_the_trainer_does_is_for_one_step(numpy):
    optimizer = LossScaleOptimizer(SGD(1.0), initial_scale=4.0)
    variable = keras.Variable(10.0)
    optimizer.get_unscaled_gradients([])
    optimizer.scale_loss(1.0)
    optimizer.apply_gradients(_pairs(1.0, variable))
    assert numpy(variable) == 9.75
    optimizer.apply_gradients(_pairs(1.0, variable))
    assert numpy(variable) == 8.75
    optimizer.scale_loss(1.0)
    optimizer.get_unscaled_gradients([])
    optimizer.apply_gradients(_pairs(1.0, variable))
    assert numpy(variable) == 7.75


def test_a_step_that_raises_leaves_how_gradients_come(numpy):
    optimizer = LossScaleOptimizer(SGD(1.0), initial_scale=4.0)
    variable = keras.Variable(10.0)
    optimizer.build([variable])
    optimizer.get_unscaled_gradients([])
    optimizer.scale_loss(1.0)
    with pytest.raises(ValueError, match=r"^Unknown variable"):
        optimizer.apply_gradients(_pairs(1.0, keras.Variable(1.0)))
    optimizer.apply_gradients(_pairs(1.0, variable))
    assert numpy(variable) == 9.75


def test_apply_divides_whatever_was_called_before(numpy):
    """As Keras' own; a look at the unscaled gradients, to log their norm, changes nothing."""
    optimizer = LossScaleOptimizer(SGD(1.0), initial_scale=4.0)
    variable = keras.Variable(10.0)
    ones = [keras.ops.ones(())]
    optimizer.scale_loss(1.0)
    optimizer.get_unscaled_gradients(ones)
    optimizer.apply(ones, [variable])
    assert numpy(variable) == 9.75
    optimizer.apply(ones, [variable])
    assert numpy(variable) == 9.5


def test_a_loss_that_was_never_scaled_is_warned_of_once(recwarn):
    optimizer = LossScaleOptimizer(SGD())
    pairs = [(keras.ops.ones(()), keras.Variable(1.0))]
    with pytest.warns(UserWarning, match="The loss was never scaled") as warned:
        optimizer.apply_gradients(pairs)
    assert warned[0].filename == __file__
    optimizer.apply_gradients(pairs)
    assert not recwarn.list


def test_gradients_that_were_never_unscaled_are_warned_of():
    optimizer = LossScaleOptimizer(SGD())
    optimizer.get_scaled_loss(1.0)
    with pytest.warns(UserWarning, match=r"get_unscaled_gradients\(\) was never called"):
        optimizer.apply_gradients([(keras.ops.ones(()), keras.Variable(1.0))])


def test_nothing_is_warned_of_when_the_calls_are_right(recwarn):
    variable = keras.Variable(1.0)
    by_hand, as_the_trainer = LossScaleOptimizer(SGD()), LossScaleOptimizer(SGD())
    by_hand.get_scaled_loss(1.0)
    by_hand.apply_gradients(
        zip(by_hand.get_unscaled_gradients([keras.ops.ones(())]), [variable], strict=True)
    )
    as_the_trainer.scale_loss(1.0)
    for _ in range(2):  # as if scale_loss were compiled
        as_the_trainer.apply_gradients([(keras.ops.ones(()), variable)])
    assert not recwarn.list


def test_hyperparameters_are_the_inner_optimizer_s():
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(0.5, beta_1=0.8, epsilon=1e-5))
    inner = optimizer.inner_optimizer
    assert optimizer.beta_1 == 0.8
    optimizer.beta_1 = 0.7
    assert (optimizer.beta_1, inner.beta_1) == (0.7, 0.7)
    optimizer.lr = 0.25
    assert (
        float(optimizer.lr) == float(optimizer.learning_rate) == float(inner.learning_rate) == 0.25
    )
    assert {"beta_1", "beta_2", "lr", "clipnorm", "loss_scale"} <= set(dir(optimizer))
    assert "momentum" not in dir(optimizer)


def test_other_attributes_are_not():
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(epsilon=1e-5))
    with pytest.raises(
        AttributeError, match="'LossScaleOptimizer' object has no attribute 'epsilon'"
    ):
        _ = optimizer.epsilon
    optimizer.epsilon = 1e-4
    assert (optimizer.epsilon, optimizer.inner_optimizer.epsilon) == (1e-4, 1e-5)


@pytest.mark.parametrize(
    ("inner", "names"),
    [
        (SGD(), {"momentum"}),
        (keras.optimizers.RMSprop(), {"momentum", "rho"}),
        (keras.optimizers.Adadelta(), {"rho"}),
        (keras.optimizers.Adagrad(), set()),
        (keras.optimizers.Nadam(), {"beta_1", "beta_2"}),
        (keras.optimizers.AdamW(), {"beta_1", "beta_2"}),
        (keras.optimizers.Lion(), {"beta_1", "beta_2"}),
        (
            keras.optimizers.Ftrl(),
            {
                "learning_rate_power",
                "l1_regularization_strength",
                "l2_regularization_strength",
                "beta",
            },
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_optimizer_has_the_hyperparameters_of_keras_2(inner, names):
    from gradscaler._keras_like.wrapper import HYPERPARAMETERS

    optimizer = LossScaleOptimizer(inner)
    assert {name for name in HYPERPARAMETERS if hasattr(optimizer, name)} == names


def test_options_of_every_optimizer_are_the_inner_optimizer_s(variables):
    inner = keras.optimizers.Adam(clipnorm=1.0, use_ema=True, weight_decay=0.1)
    optimizer = LossScaleOptimizer(inner)
    assert (optimizer.clipnorm, optimizer.use_ema, optimizer.weight_decay) == (1.0, True, 0.1)
    optimizer.build(variables)
    own = len(optimizer.variables) - len(inner.variables)
    assert own == 4  # iteration, learning_rate, step_counter and dynamic_scale: no averages
    optimizer.ema_momentum = 0.5
    assert inner.ema_momentum == 0.5


def test_weight_decay_is_excluded_from_in_the_inner_optimizer(variables, drive, numpy):
    optimizer = LossScaleOptimizer(SGD(1.0, weight_decay=0.5), initial_scale=1.0)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    before = [numpy(variable).copy() for variable in variables]
    drive(optimizer, variables, [[np.zeros((2, 2), "float32"), np.zeros(2, "float32")]])
    assert np.allclose(numpy(variables[0]), before[0] / 2)
    assert np.array_equal(numpy(variables[1]), before[1])


def test_weights_are_set_in_the_order_of_the_variables(variables, numpy):
    first, second = (LossScaleOptimizer(keras.optimizers.Adam()) for _ in range(2))
    with pytest.raises(ValueError, match="build"):
        first.set_weights([])
    first.build(variables)
    second.build(variables)
    first.dynamic_scale.assign(64.0)
    first.inner_optimizer.variables[2].assign(np.ones((2, 2)))
    weights = [numpy(variable) for variable in first.variables]
    second.set_weights(weights)
    assert [numpy(v).tolist() for v in second.variables] == [w.tolist() for w in weights]
    first.dynamic_scale.assign(32.0)
    with pytest.raises(ValueError, match=r"kernel.* has the shape \(2, 2\), its weight \(2,\)"):
        first.set_weights([*weights[:6], *weights[7:]])
    assert float(first.loss_scale) == 32.0
    first.set_weights([*weights, np.ones(3)])  # as Keras does for an .h5 file
    assert float(first.loss_scale) == 64.0


def test_the_config_is_what_keras_wrapper_is_made_from(native):
    optimizer = LossScaleOptimizer(
        keras.optimizers.Adam(0.5), initial_scale=8.0, dynamic_growth_steps=3, name="wrapper"
    )
    config = optimizer.get_config()
    assert config == native.from_config(copy.deepcopy(config)).get_config()
    assert set(config) == {"name", "inner_optimizer", "initial_scale", "dynamic_growth_steps"}
    assert LossScaleOptimizer.from_config(config).get_config() == config


@pytest.mark.parametrize(
    "arguments",
    [
        {"dynamic": False, "initial_scale": 8.0},
        {"policy": FixedScale(8.0)},
        {"policy": DynamicScale(hysteresis=2, hysteresis_reset="growth")},
        {"policy": DynamicScale(init_scale=0.5)},
    ],
)
def test_a_config_says_how_the_scale_moves(arguments):
    optimizer = LossScaleOptimizer(SGD(), **arguments)
    config = json.loads(json.dumps(keras.optimizers.serialize(optimizer)))
    revived = keras.optimizers.deserialize(config)
    assert type(revived) is LossScaleOptimizer
    assert revived.get_config() == optimizer.get_config()
    assert revived._policy == optimizer._policy


def test_calls_that_cannot_work_leave_everything_as_it_was(variables, everything):
    optimizer = LossScaleOptimizer(SGD())
    ones = [keras.ops.ones((2, 2)), keras.ops.ones(2)]
    with pytest.raises(ValueError, match="needs variables"):
        optimizer.apply(ones)
    optimizer.build(variables)
    before = everything(optimizer, variables)
    with pytest.raises(ValueError, match="1 gradients for 2 trainable variables"):
        optimizer.apply(ones[:1], variables)
    with pytest.raises(ValueError, match="No gradients provided"):
        optimizer.apply([None, None], variables)
    with pytest.raises(ValueError, match=r"^Unknown variable"):
        optimizer.apply(ones[:1], [keras.Variable(np.ones((2, 2)))])
    optimizer.apply([], [])
    assert everything(optimizer, variables) == before


def test_the_initial_scale_can_be_changed_before_the_first_step():
    optimizer = LossScaleOptimizer(SGD())
    optimizer.initial_scale = 8.0
    assert float(optimizer.loss_scale) == optimizer.get_config()["initial_scale"] == 8.0


def test_check_finite_is_a_boolean_scalar(numpy):
    optimizer = LossScaleOptimizer(SGD())
    for value, finite in ((1.0, True), (np.inf, False), (np.nan, False)):
        found = optimizer.check_finite(
            [keras.ops.ones(3), None, keras.ops.convert_to_tensor(value)]
        )
        assert numpy(found).dtype == bool
        assert bool(found) is finite
