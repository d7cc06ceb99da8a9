"""Keras' own training loop, in real float16."""

import keras
import numpy as np

from gradscaler.keras import LossScaleOptimizer
from tests.support.keras_like import NATIVE, everything, numpy, scale_of, trained


def adam():
    return keras.optimizers.Adam(0.05)


def state(model):
    return everything(model.optimizer, model.trainable_variables)


def test_a_static_scale_learns_as_a_constant_factor_does():
    model, losses = trained(LossScaleOptimizer(adam(), dynamic=False, initial_scale=64.0))
    factor = keras.optimizers.Adam(0.05, loss_scale_factor=64.0)
    reference, expected = trained(factor, auto_scale_loss=False)
    assert np.allclose(losses, expected, rtol=1e-6)
    assert all(map(np.allclose, model.get_weights(), reference.get_weights()))
    assert float(model.optimizer.loss_scale) == 64.0


def test_an_h5_file_keeps_the_scale_and_the_counters(tmp_path):
    def loaded(wrapper):
        model, _ = trained(wrapper(adam(), dynamic_growth_steps=5))
        model.save(tmp_path / "model.h5")
        optimizer = keras.models.load_model(tmp_path / "model.h5").optimizer
        assert type(optimizer) is wrapper
        return [numpy(variable).tolist() for variable in optimizer.variables]

    ours = loaded(LossScaleOptimizer)
    assert ours[:4] == loaded(NATIVE)[:4]
    assert ours[2:5] == [2, 2.0**17, 12]  # the last is the inner optimizer's: Keras' loses it


def test_weights_saved_with_keras_wrapper_are_loaded_into_ours(tmp_path):
    reference, _ = trained(NATIVE(adam(), initial_scale=2.0**18, dynamic_growth_steps=4))
    reference.save_weights(tmp_path / "all.weights.h5")
    model, _ = trained(LossScaleOptimizer(adam(), dynamic_growth_steps=4))
    model.load_weights(tmp_path / "all.weights.h5")
    assert state(model) == state(reference)
    assert float(model.optimizer.loss_scale) == scale_of(reference.optimizer)


def test_a_static_optimizer_keeps_its_scale_when_it_loads_a_moving_one(tmp_path):
    moving, _ = trained(LossScaleOptimizer(adam(), dynamic_growth_steps=2))
    moving.save_weights(tmp_path / "all.weights.h5")
    model, _ = trained(LossScaleOptimizer(adam(), dynamic=False, initial_scale=4.0))
    model.load_weights(tmp_path / "all.weights.h5")
    assert float(model.optimizer.loss_scale) == 4.0
    assert int(model.optimizer.iterations) == int(moving.optimizer.iterations)


def test_swap_ema_weights_finds_the_averages():
    inner = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
    model, _ = trained(LossScaleOptimizer(inner, initial_scale=8.0), epochs=1)
    average = numpy(inner._model_variables_moving_average[0])
    swap = keras.callbacks.SwapEMAWeights()
    swap.set_model(model)
    swap.on_test_begin()
    assert np.array_equal(numpy(model.trainable_variables[0]), average)


def test_gradient_accumulation_counts_only_finite_steps():
    inner = keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)
    model, _ = trained(LossScaleOptimizer(inner, initial_scale=2.0**20), epochs=1)
    assert numpy(inner._iterations) < 6
    assert int(numpy(model.optimizer.iterations)) == int(numpy(inner._iterations)) // 3
