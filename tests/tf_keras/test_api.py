import copy
import re

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tensorflow.python.platform import tf_logging

from gradscaler import DynamicScale, FixedScale
from gradscaler.tf_keras import LossScaleOptimizer, LossScaleOptimizerV2, LossScaleOptimizerV3


def test_the_document_s_first_example(family):
    optimizer = LossScaleOptimizer(family.SGD(0.25))
    variable = tf.Variable(1.0)

    def loss():
        return variable**2

    optimizer.minimize(loss, var_list=variable)
    assert variable.numpy() == 0.5
    with tf.GradientTape() as tape:
        scaled_loss = optimizer.get_scaled_loss(loss())
    scaled_grad = tape.gradient(scaled_loss, variable)
    (grad,) = optimizer.get_unscaled_gradients([scaled_grad])
    optimizer.apply_gradients([(grad, variable)])
    assert variable.numpy() == 0.25
    assert int(optimizer.dynamic_counter) == 2


def test_the_document_s_hyperparameters(family):
    optimizer = LossScaleOptimizer(family.Adam(beta_1=0.8, epsilon=1e-5))
    inner = optimizer.inner_optimizer
    assert np.isclose(float(optimizer.beta_1), 0.8)
    optimizer.beta_1 = 0.7
    assert np.isclose(float(optimizer.beta_1), 0.7)
    assert np.isclose(float(inner.beta_1), 0.7)
    assert {"beta_1", "lr", "learning_rate", "loss_scale", "minimize"} <= set(dir(optimizer))
    with pytest.raises(
        AttributeError, match="'LossScaleOptimizer' object has no attribute 'epsilon'"
    ):
        _ = optimizer.epsilon
    optimizer.epsilon = 1e-4
    assert (optimizer.epsilon, inner.epsilon) == (1e-4, 1e-5)
    optimizer.lr = 0.25
    assert float(optimizer.lr) == float(inner.learning_rate) == 0.25


def test_the_defaults_are_the_document_s(family):
    optimizer = LossScaleOptimizer(family.SGD())
    assert optimizer.dynamic is True
    assert (optimizer.initial_scale, optimizer.dynamic_growth_steps) == (2.0**15, 2000)
    assert isinstance(optimizer.initial_scale, float)
    assert isinstance(optimizer.loss_scale, tf.Tensor)
    assert optimizer.loss_scale.dtype == tf.float32
    assert (optimizer.dynamic_counter.dtype, int(optimizer.dynamic_counter)) == (tf.int64, 0)


def test_a_static_scale_has_no_counter(family):
    optimizer = LossScaleOptimizer(family.SGD(), dynamic=False, initial_scale=128)
    assert (optimizer.dynamic, optimizer.dynamic_counter, optimizer.dynamic_growth_steps) == (
        False,
        None,
        None,
    )
    assert optimizer.initial_scale == float(optimizer.loss_scale) == 128.0
    assert isinstance(optimizer.loss_scale, tf.Tensor)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"dynamic": "dynamic"},
            TypeError,
            '"dynamic" argument .* must be a bool, but got: .dynamic.',
        ),
        ({"dynamic": 2.0**15}, TypeError, r"write initial_scale=32768\.0"),
        ({"dynamic": False}, ValueError, '"initial_scale" must be specified if "dynamic" is False'),
        (
            {"dynamic": False, "initial_scale": 1, "dynamic_growth_steps": 2},
            ValueError,
            '"dynamic_growth_steps" must be None if "dynamic" is False, but got: 2',
        ),
        ({"initial_scale": 0}, ValueError, "initial_scale must be positive"),
        ({"dynamic_growth_steps": 2.5}, TypeError, "dynamic_growth_steps must be an integer"),
        ({"policy": DynamicScale(), "initial_scale": 2.0}, ValueError, "policy= already says"),
        ({"policy": 2.0}, TypeError, "policy must be a DynamicScale or a FixedScale"),
    ],
)
def test_a_bad_argument_is_refused_by_name_and_the_optimizer_stays_free(
    family, arguments, error, message
):
    inner = family.SGD()
    with pytest.raises(error, match=message):
        LossScaleOptimizer(inner, **arguments)
    LossScaleOptimizer(inner)


def test_steps_may_be_an_integral_float(family):
    assert LossScaleOptimizer(family.SGD(), dynamic_growth_steps=3.0).dynamic_growth_steps == 3


def test_only_an_unwrapped_optimizer_can_be_wrapped(family):
    inner = family.SGD()
    wrapper = LossScaleOptimizer(inner)
    with pytest.raises(TypeError, match="cannot wrap another LossScaleOptimizer"):
        LossScaleOptimizer(wrapper)
    with pytest.raises(ValueError, match="already wrapped"):
        LossScaleOptimizer(inner)
    with pytest.raises(
        TypeError, match=r"must be an instance of `tf\.keras\.optimizers\.Optimizer`.*got: 1"
    ):
        LossScaleOptimizer(1)


def test_unscaling_keeps_none_kinds_and_dtypes(family):
    optimizer = LossScaleOptimizer(family.SGD(), dynamic=False, initial_scale=2)
    slices = tf.IndexedSlices(
        tf.constant([[4.0, 2.0], [8.0, 5.0]], "float16"), tf.constant([1, 3]), tf.constant([5, 2])
    )
    full, none, half, sparse = optimizer.get_unscaled_gradients(
        [tf.constant(3.0), None, tf.constant(-4.0, "bfloat16"), slices]
    )
    assert none is None
    assert (full.dtype, float(full)) == (tf.float32, 1.5)
    assert (half.dtype, float(half)) == (tf.bfloat16, -2.0)
    assert isinstance(sparse, tf.IndexedSlices)
    assert sparse.values.dtype == tf.float16
    assert sparse.values.numpy().tolist() == [[2.0, 1.0], [4.0, 2.5]]
    assert sparse.dense_shape.numpy().tolist() == [5, 2]


@pytest.mark.parametrize("bad", [1.0, np.nan])
def test_sparse_gradients_are_checked_and_applied(family, bad):
    optimizer = LossScaleOptimizer(family.SGD(1.0), initial_scale=4.0)
    table = tf.Variable(np.zeros((5, 2), "float32"))
    weights = tf.constant([[1.0, bad], [1.0, 1.0]])
    optimizer.minimize(lambda: tf.reduce_sum(tf.gather(table, [1, 3]) * weights), [table])
    assert float(tf.reduce_sum(table)) == (-4.0 if bad == 1.0 else 0.0)
    assert float(optimizer.loss_scale) == (4.0 if bad == 1.0 else 2.0)


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ((), r"You forgot to call LossScaleOptimizer.get_scaled_loss\(\) and"),
        (("get_scaled_loss",), r"You forgot to call LossScaleOptimizer.get_unscaled_gradients\(\)"),
        (
            ("get_unscaled_gradients",),
            r"You forgot to call LossScaleOptimizer.get_scaled_loss\(\) before",
        ),
    ],
)
def test_a_forgotten_call_is_warned_of_once(family, calls, message, monkeypatch):
    warned = []
    monkeypatch.setattr(tf_logging, "warning", lambda message, *args: warned.append(message))
    optimizer = LossScaleOptimizer(family.SGD())
    for call in calls:
        getattr(optimizer, call)(tf.constant(1.0) if call == "get_scaled_loss" else [])
    variable = tf.Variable(1.0)
    for _ in range(3):
        optimizer.apply_gradients([(tf.constant(1.0), variable)])
    assert len(warned) == 1
    assert re.match(message, warned[0])


def test_nothing_is_warned_of_after_minimize(family, monkeypatch):
    monkeypatch.setattr(tf_logging, "warning", lambda message, *args: pytest.fail(message))
    variable = tf.Variable(1.0)
    LossScaleOptimizer(family.SGD()).minimize(lambda: variable**2, [variable])


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
    config = tf_keras.optimizers.serialize(optimizer)
    revived = (
        tf_keras.optimizers.deserialize(copy.deepcopy(config)),
        LossScaleOptimizer.from_config(optimizer.get_config()),
        type(optimizer).from_config(optimizer.get_config()),
    )
    for each in revived:
        assert type(each) is type(optimizer)
        assert each.get_config() == optimizer.get_config()
        assert each._policy == optimizer._policy


def test_a_config_of_tf_2_3_is_understood():
    config = {
        "optimizer": {"class_name": "SGD", "config": {"learning_rate": 2.0, "name": "SGD"}},
        "loss_scale": {"class_name": "FixedLossScale", "config": {"loss_scale_value": 2.0}},
    }
    optimizer = LossScaleOptimizer.from_config(config)
    assert (optimizer.dynamic, optimizer.initial_scale) == (False, 2.0)


def test_a_saved_model_keeps_the_scale_and_the_counter(tmp_path):
    """tf-keras starts from the initial scale again."""
    images = np.random.default_rng(0).random((40, 4)).astype("float32")
    model = tf_keras.Sequential([tf_keras.layers.Dense(1)])
    model.compile(
        LossScaleOptimizer(
            tf_keras.optimizers.Adam(0.1), initial_scale=8.0, dynamic_growth_steps=4
        ),
        "mse",
    )
    model.fit(images, images.sum(1), batch_size=8, shuffle=False, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = tf_keras.models.load_model(tmp_path / "model.keras")
    assert (float(loaded.optimizer.loss_scale), int(loaded.optimizer.dynamic_counter)) == (16.0, 1)
    for each in (model, loaded):
        each.fit(images, images.sum(1), batch_size=8, shuffle=False, verbose=0)
    assert all(map(np.array_equal, model.get_weights(), loaded.get_weights()))
    assert float(loaded.optimizer.loss_scale) == float(model.optimizer.loss_scale) == 32.0


def test_saved_weights_keep_the_scale_and_the_counter(family, tmp_path):
    images = np.random.default_rng(0).random((40, 4)).astype("float32")
    models = [tf_keras.Sequential([tf_keras.layers.Dense(1)]) for _ in range(2)]
    for model in models:
        model.compile(
            LossScaleOptimizer(family.Adam(), initial_scale=8.0, dynamic_growth_steps=4), "mse"
        )
        model.train_on_batch(images, images.sum(1))
    models[0].fit(images, images.sum(1), batch_size=8, shuffle=False, verbose=0)
    models[0].save_weights(tmp_path / "weights")
    models[1].load_weights(tmp_path / "weights").assert_consumed()
    optimizer = models[1].optimizer
    assert (float(optimizer.loss_scale), int(optimizer.dynamic_counter)) == (16.0, 2)


def test_what_the_new_family_s_base_would_not_do_is_delegated(variables):
    inner = tf_keras.optimizers.SGD(1.0, weight_decay=0.5, clipnorm=2.0)
    optimizer = LossScaleOptimizer(inner)
    assert (optimizer.clipnorm, optimizer.weight_decay) == (2.0, 0.5)
    optimizer.exclude_from_weight_decay(var_names=["Variable"])
    before = [variable.numpy() for variable in variables]
    optimizer.minimize(lambda: tf.reduce_sum(variables[0]) * 0, variables[:1])
    assert np.array_equal(variables[0].numpy(), before[0])
    optimizer.set_weights([weight.numpy() + 1 for weight in inner.variables])
    assert int(optimizer.iterations) == 2
    pairs = [(tf.constant(1.0), variables[0])]
    assert float(optimizer.aggregate_gradients(pairs)[0][0]) == 1.0


def test_what_new_optimizers_offer_their_subclasses_is_the_inner_optimizer_s():
    inner = tf_keras.optimizers.SGD(0.25, name="inner")
    optimizer = LossScaleOptimizer(inner)
    variable = tf.Variable(1.0)
    optimizer.build([variable])
    assert optimizer.name == "inner"
    optimizer.name = "other"
    assert inner.name == "other"
    added = [
        optimizer.add_variable((2,), name="added"),
        optimizer.add_variable_from_reference(variable, "like"),
    ]
    assert [added_variable.shape for added_variable in added] == [(2,), ()]
    assert all(any(each is one for one in inner.variables) for each in added)
    optimizer.update_step(tf.constant(1.0), variable)
    assert float(variable) == 0.75


class OfNoFamily(LossScaleOptimizer):
    pass


class OfTheNew(LossScaleOptimizerV3):
    def __init__(self, inner_optimizer, more=1, **arguments):
        super().__init__(inner_optimizer, **arguments)
        self.more = more

    def get_config(self):
        return {**super().get_config(), "more": self.more}


class OfTheLegacy(LossScaleOptimizerV2):
    pass


def test_the_classes_of_the_families_can_be_subclassed():
    variable = tf.Variable(1.0)
    optimizer = OfTheNew(tf_keras.optimizers.SGD(0.25), 2, initial_scale=8.0)
    restored = OfTheNew.from_config(optimizer.get_config())
    assert (type(restored), restored.more, restored.initial_scale) == (OfTheNew, 2, 8.0)
    for each in (restored, OfTheLegacy(tf_keras.optimizers.legacy.SGD(0.25))):
        each.minimize(lambda: variable**2, [variable])
    assert float(variable) == 0.25


def test_the_class_of_both_families_cannot(family):
    with pytest.raises(TypeError, match=r"OfNoFamily belongs to neither family: subclass .*V3, for"):
        OfNoFamily(family.SGD())


def test_a_tensor_needs_its_tape():
    optimizer = LossScaleOptimizer(tf_keras.optimizers.SGD(0.25))
    variable = tf.Variable(1.0)
    with tf.GradientTape() as tape:
        loss = variable**2
    with pytest.raises(ValueError, match="`tape` is required"):
        optimizer.minimize(loss, [variable])
    optimizer.minimize(loss, [variable], tape)
    assert float(variable) == 0.5
