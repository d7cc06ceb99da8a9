"""Loops of TensorFlow in threads, under ``gradscaler run``."""

import pytest

from tests.support import threads
from tests.support.keras_like import BACKEND, keras

if BACKEND != "tensorflow":
    pytest.skip("of TensorFlow", allow_module_level=True)

import tensorflow as tf


def training(is_compiled):
    """Trains by an optimizer of Keras; each call defines its step anew."""

    def train():
        variable, optimizer = tf.Variable([1.0, 2.0]), keras.optimizers.SGD(1e-3)

        def step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variable**2)
            optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])
            return loss

        step = tf.function(step) if is_compiled else step
        for _ in range(30):
            step()

    return train


@pytest.mark.parametrize("is_compiled", [False, True])
def test_trainings_in_threads_end_the_watch(is_compiled, tmp_path):
    threads.check_that_the_watch_ends(training(is_compiled), tmp_path)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_threads_that_train_nothing_or_in_turn_do_not_end_the_watch(is_compiled, tmp_path):
    evaluate = tf.function(lambda: tf.reduce_sum(tf.ones(3)))
    threads.check_that_others_do_not_end_it(training(is_compiled), evaluate, tmp_path)
