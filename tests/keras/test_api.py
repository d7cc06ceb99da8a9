import subprocess
import sys

import keras
import numpy as np
import pytest

import gradscaler.keras
from gradscaler._keras_like.wrapper import HYPERPARAMETERS
from gradscaler.keras import LossScaleOptimizer
from tests.support.keras_like import FINITE, drive, everything, numpy

SGD = keras.optimizers.SGD
ONE = keras.ops.ones(())


def test_the_public_names():
    assert gradscaler.keras.__all__ == ["LossScaleOptimizer", "load_model"]
    assert LossScaleOptimizer(SGD()).name.startswith("loss_scale_optimizer")


def test_a_missing_backend_is_named():
    backend = keras.backend.backend()
    code = f"import sys; sys.modules[{backend!r}] = None; import gradscaler.keras"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    wanted = f"Keras' backend is missing: pip install {backend}, or set KERAS_BACKEND"
    assert result.stderr.rstrip().endswith(f"ModuleNotFoundError: {wanted}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clipnorm": 1.0}, "set `clipnorm` on the `inner_optimizer`"),
        ({"foo": 1}, "does not support arguments: `foo`"),
    ],
)
def test_arguments_of_other_optimizers_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        LossScaleOptimizer(SGD(), **arguments)


def test_fewer_growth_steps_than_the_counter_do_not_freeze_growth(variables):
    optimizer = LossScaleOptimizer(SGD(), initial_scale=8.0, dynamic_growth_steps=10)
    assert drive(optimizer, variables, [FINITE] * 4) == [8.0] * 4
    optimizer.dynamic_growth_steps = 3
    assert drive(optimizer, variables, [FINITE]) == [16.0]


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), ("2", TypeError), (None, TypeError)])
def test_a_setter_that_raises_changes_nothing(value, error):
    optimizer = LossScaleOptimizer(SGD(), dynamic_growth_steps=5)
    with pytest.raises(error, match="dynamic_growth_steps"):
        optimizer.dynamic_growth_steps = value
    assert optimizer.dynamic_growth_steps == 5


@pytest.mark.parametrize("var_list", [None, 3, [None], lambda: None])
def test_minimize_takes_only_variables(var_list):
    variable = keras.Variable(1.0)
    with pytest.raises(TypeError, match=r"var_list must be .* but holds: (None|3)"):
        LossScaleOptimizer(SGD()).minimize(lambda: variable * variable, var_list)


@pytest.mark.parametrize("name", ["learning_rate", "lr"])
def test_a_multi_optimizer_says_where_its_learning_rates_are(name):
    parts = keras.optimizers.OptimizerMap(SGD(0.5))
    optimizer = LossScaleOptimizer(keras.optimizers.MultiOptimizer(parts))
    with pytest.raises(AttributeError, match="Access the learning rate on the individual sub-opt"):
        getattr(optimizer, name)
    with pytest.raises(AttributeError, match="Set the learning rate on the individual sub-opt"):
        setattr(optimizer, name, 0.1)


def test_a_python_number_is_scaled():
    assert float(LossScaleOptimizer(SGD(), initial_scale=8.0).scale_loss(2.0)) == 16.0


def test_numpy_s_gradients_are_applied():
    variable = keras.Variable(np.ones(2, "float32"))
    optimizer = LossScaleOptimizer(SGD(0.5), initial_scale=2.0)
    optimizer.build(var_list=[variable])
    assert float(optimizer.scale_loss(np.float32(3.0))) == 6.0
    optimizer.apply([np.array([1.0, 2.0], "float32")], [variable])
    assert numpy(variable).tolist() == [0.75, 0.5]
    optimizer.apply([np.array([1.0, np.inf], "float32")], [variable])
    assert numpy(variable).tolist() == [0.75, 0.5]


def test_minimize_without_variables_is_not_a_step():
    variable = keras.Variable(1.0)
    optimizer = LossScaleOptimizer(SGD())
    optimizer.minimize(lambda: variable * variable, [])
    assert int(optimizer.dynamic_counter) == 0


def test_an_update_step_is_the_inner_optimizer_s():
    variable = keras.Variable(1.0)
    optimizer = LossScaleOptimizer(SGD())
    optimizer.build([variable])
    optimizer.update_step(ONE, variable, 0.25)
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


@pytest.mark.parametrize("shape", [(), (3,)])
def test_apply_unscales_in_float32(shape):
    """2**30 is not a float16, nor is 2**-30."""
    optimizer = LossScaleOptimizer(SGD(1.0), initial_scale=2.0**30)
    variable = keras.Variable(np.zeros(shape), dtype="float16")
    optimizer.scale_loss(1.0)
    optimizer.apply([keras.ops.full(shape, 2.0**15, "float16")], [variable])
    assert (numpy(variable) == -(2.0**-15)).all()


@pytest.mark.parametrize(
    "steps",
    [
        [
            ("get_scaled_loss get_unscaled_gradients apply_gradients", 9.0),
            ("minimize", 8.0),
            ("apply_gradients", 7.0),
        ],
        [
            ("get_unscaled_gradients scale_loss apply_gradients", 9.75),
            ("apply_gradients", 8.75),
            ("scale_loss get_unscaled_gradients apply_gradients", 7.75),
        ],
        [("scale_loss get_unscaled_gradients apply", 9.75), ("apply", 9.5)],
    ],
    ids=["unscaling by hand lasts", "scale_loss is for one step", "apply always divides"],
)
def test_calls_before_a_step_decide_whether_it_divides(steps):
    """Compiled code calls get_unscaled_gradients once, when it is traced."""
    optimizer = LossScaleOptimizer(SGD(1.0), initial_scale=4.0)
    variable = keras.Variable(10.0)
    arguments = {
        "get_scaled_loss": (1.0,),
        "scale_loss": (1.0,),
        "get_unscaled_gradients": ([ONE],),
        "minimize": (lambda: 1.0 * variable, [variable]),
        "apply_gradients": ([(ONE, variable)],),
        "apply": ([ONE], [variable]),
    }
    for calls, value in steps:
        for call in calls.split():
            getattr(optimizer, call)(*arguments[call])
        assert numpy(variable) == value


def test_a_step_that_raises_does_not_forget_these_calls():
    optimizer = LossScaleOptimizer(SGD(1.0), initial_scale=4.0)
    variable = keras.Variable(10.0)
    optimizer.build([variable])
    optimizer.get_unscaled_gradients([])
    optimizer.scale_loss(1.0)
    with pytest.raises(ValueError, match=r"^Unknown variable"):
        optimizer.apply_gradients([(ONE, keras.Variable(1.0))])
    optimizer.apply_gradients([(ONE, variable)])
    assert numpy(variable) == 9.75


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ([], "The loss was never scaled"),
        (["get_scaled_loss"], r"get_unscaled_gradients\(\) was never called"),
    ],
)
def test_a_forgotten_call_warns_once(calls, message, recwarn):
    optimizer = LossScaleOptimizer(SGD())
    for call in calls:
        getattr(optimizer, call)(1.0)
    pairs = [(ONE, keras.Variable(1.0))]
    with pytest.warns(UserWarning, match=message) as warned:
        optimizer.apply_gradients(pairs)
    assert warned[0].filename == __file__
    optimizer.apply_gradients(pairs)
    assert not recwarn.list


def test_the_right_calls_do_not_warn(recwarn):
    variable = keras.Variable(1.0)
    by_hand, as_the_trainer = LossScaleOptimizer(SGD()), LossScaleOptimizer(SGD())
    by_hand.get_scaled_loss(1.0)
    by_hand.apply_gradients([(*by_hand.get_unscaled_gradients([ONE]), variable)])
    as_the_trainer.scale_loss(1.0)
    for _ in range(2):  # as if scale_loss had been compiled
        as_the_trainer.apply_gradients([(ONE, variable)])
    assert not recwarn.list


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
    optimizer = LossScaleOptimizer(inner)
    assert {name for name in HYPERPARAMETERS if hasattr(optimizer, name)} == names


def test_the_options_of_every_optimizer_are_the_inner_optimizer_s(variables):
    inner = keras.optimizers.Adam(clipnorm=1.0, use_ema=True, weight_decay=0.1)
    optimizer = LossScaleOptimizer(inner)
    assert (optimizer.clipnorm, optimizer.use_ema, optimizer.weight_decay) == (1.0, True, 0.1)
    optimizer.build(variables)
    own = len(optimizer.variables) - len(inner.variables)
    assert own == 4  # iteration, learning_rate, step_counter and dynamic_scale: no averages
    optimizer.ema_momentum = 0.5
    assert inner.ema_momentum == 0.5


def test_the_inner_optimizer_excludes_variables_from_weight_decay(variables):
    optimizer = LossScaleOptimizer(SGD(1.0, weight_decay=0.5), initial_scale=1.0)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    before = [numpy(variable) for variable in variables]
    drive(optimizer, variables, [[grad * 0 for grad in FINITE]])
    assert np.allclose(numpy(variables[0]), before[0] / 2)
    assert np.array_equal(numpy(variables[1]), before[1])


def test_weights_are_set_in_the_order_of_the_variables(variables):
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


def test_calls_that_cannot_work_leave_everything_as_it_was(variables):
    optimizer = LossScaleOptimizer(SGD())
    ones = [keras.ops.ones((2, 2)), keras.ops.ones(2)]
    optimizer.scale_loss(1.0)
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


def test_check_finite_is_a_boolean_scalar():
    optimizer = LossScaleOptimizer(SGD())
    for value, finite in ((1.0, True), (np.inf, False), (np.nan, False)):
        found = optimizer.check_finite([ONE, None, keras.ops.convert_to_tensor([1.0, value])])
        assert numpy(found).dtype == bool
        assert bool(found) is finite
