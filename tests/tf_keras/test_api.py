import re

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tensorflow.python.platform import tf_logging

from gradscaler.tf_keras import LossScaleOptimizer, LossScaleOptimizerV2, LossScaleOptimizerV3
from tests.support.keras_like import trained


def test_an_optimizer_can_be_wrapped_once(family):
    inner = family.SGD()
    LossScaleOptimizer(inner)
    with pytest.raises(ValueError, match="already wrapped"):
        LossScaleOptimizer(inner)


def test_a_float64_loss_stays_one(family):
    loss = LossScaleOptimizer(family.SGD()).get_scaled_loss(tf.constant(1.0, "float64"))
    assert loss.dtype == tf.float64


def test_numpy_s_losses_and_gradients_are_scaled(family):
    optimizer = LossScaleOptimizer(family.SGD(), initial_scale=4.0)
    assert float(optimizer.get_scaled_loss(np.float32(2.0))) == 8.0
    assert float(optimizer.get_scaled_loss(lambda: np.float32(2.0))()) == 8.0
    (unscaled,) = optimizer.get_unscaled_gradients([np.array([8.0, 2.0], "float16")])
    assert unscaled.dtype == tf.float16
    assert unscaled.numpy().tolist() == [2.0, 0.5]


def test_ragged_losses_and_gradients_are_scaled_as_such(family):
    optimizer = LossScaleOptimizer(family.SGD(), initial_scale=4.0)
    ragged = tf.ragged.constant([[1.0, 2.0], [3.0]])
    scaled = optimizer.get_scaled_loss(ragged)
    assert scaled.to_list() == [[4.0, 8.0], [12.0]]
    assert optimizer.get_unscaled_gradients([scaled])[0].to_list() == ragged.to_list()


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
def test_a_forgotten_call_warns_once(family, calls, message, monkeypatch):
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


def test_minimize_does_not_warn(family, monkeypatch):
    monkeypatch.setattr(tf_logging, "warning", lambda message, *args: pytest.fail(message))
    variable = tf.Variable(1.0)
    LossScaleOptimizer(family.SGD()).minimize(lambda: variable**2, [variable])


@pytest.mark.parametrize("arguments", [{}, {"dynamic": False}], ids=str)
def test_a_model_without_trainable_weights_is_not_a_step(family, arguments):
    """tf-keras counts one of the legacy family as finite, and refuses one of the new family."""
    model = tf_keras.Sequential([tf_keras.Input((2,)), tf_keras.layers.Dense(1)])
    model.trainable = False
    optimizer = LossScaleOptimizer(family.SGD(), initial_scale=8.0, **arguments)
    assert optimizer.apply_gradients(iter([])) is None
    assert optimizer.minimize(lambda: tf.constant(1.0), []) is None
    model.compile(optimizer, "mse")
    before = model.get_weights()
    model.fit(np.ones((4, 2)), np.ones((4, 1)), batch_size=2, verbose=0)
    assert all(map(np.array_equal, model.get_weights(), before))
    assert (float(optimizer.loss_scale), int(optimizer.iterations)) == (8.0, 0)
    assert optimizer.dynamic_counter is None or int(optimizer.dynamic_counter) == 0


def test_a_config_of_tf_2_3_is_understood():
    config = {
        "optimizer": {"class_name": "SGD", "config": {"learning_rate": 2.0, "name": "SGD"}},
        "loss_scale": {"class_name": "FixedLossScale", "config": {"loss_scale_value": 2.0}},
    }
    optimizer = LossScaleOptimizer.from_config(config)
    assert (optimizer.dynamic, optimizer.initial_scale) == (False, 2.0)


def test_saved_weights_keep_the_scale_and_the_counter(family, tmp_path):
    (saved, _), (loaded, _) = (
        trained(LossScaleOptimizer(family.Adam(), True, 8.0, 5), epochs) for epochs in (2, 1)
    )
    saved.save_weights(tmp_path / "weights")
    loaded.load_weights(tmp_path / "weights").assert_consumed()
    optimizer = loaded.optimizer
    assert (float(optimizer.loss_scale), int(optimizer.dynamic_counter)) == (32.0, 2)


def test_the_new_family_delegates_what_its_base_class_would_not_do(variables):
    inner = tf_keras.optimizers.SGD(1.0, weight_decay=0.5, clipnorm=2.0)
    optimizer = LossScaleOptimizer(inner)
    assert (optimizer.clipnorm, optimizer.weight_decay) == (2.0, 0.5)
    optimizer.exclude_from_weight_decay(var_names=["kernel"])
    before = [variable.numpy() for variable in variables]
    optimizer.minimize(lambda: tf.reduce_sum(variables[0]) * 0, variables[:1])
    assert np.array_equal(variables[0].numpy(), before[0])
    optimizer.set_weights([weight.numpy() + 1 for weight in inner.variables])
    assert int(optimizer.iterations) == 2
    pairs = [(tf.constant(1.0), variables[0])]
    assert float(optimizer.aggregate_gradients(pairs)[0][0]) == 1.0


def test_the_new_family_delegates_what_its_optimizers_offer_subclasses():
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


class OfTheNew(LossScaleOptimizerV3):
    def __init__(self, inner_optimizer, more=1, **arguments):
        super().__init__(inner_optimizer, **arguments)
        self.more = more

    def get_config(self):
        return {**super().get_config(), "more": self.more}


def test_the_classes_of_the_families_can_be_subclassed():
    class OfTheLegacy(LossScaleOptimizerV2):
        pass

    variable = tf.Variable(1.0)
    optimizer = OfTheNew(tf_keras.optimizers.SGD(0.25), 2, initial_scale=8.0)
    restored = OfTheNew.from_config(optimizer.get_config())
    assert (type(restored), restored.more, restored.initial_scale) == (OfTheNew, 2, 8.0)
    for each in (restored, OfTheLegacy(tf_keras.optimizers.legacy.SGD(0.25))):
        each.minimize(lambda: variable**2, [variable])
    assert float(variable) == 0.25


def test_the_class_of_both_families_cannot_be_subclassed(family):
    class OfNeitherFamily(LossScaleOptimizer):
        pass

    with pytest.raises(
        TypeError, match=r"OfNeitherFamily belongs to neither family: subclass .*V3, for"
    ):
        OfNeitherFamily(family.SGD())


@pytest.mark.parametrize(
    "name",
    [
        "set_weights",
        "exclude_from_weight_decay",
        "add_variable",
        "add_variable_from_reference",
        "update_step",
        "aggregate_gradients",
    ],
)
def test_what_the_inner_optimizer_does_is_a_method_of_the_class(name):
    assert callable(getattr(LossScaleOptimizerV3, name))
