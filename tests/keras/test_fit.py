"""Keras' own training loop, in real float16, beside Keras' own wrapper."""

import keras
import numpy as np
import pytest

from gradscaler.keras import LossScaleOptimizer

BACKEND = keras.backend.backend()
RNG = np.random.default_rng(0)
IMAGES = RNG.random((96, 8)).astype("float32")
LABELS = IMAGES[:, :3].argmax(1)
INNER = {
    "adam": lambda: keras.optimizers.Adam(0.05),
    "sgd, clipped and decayed": lambda: keras.optimizers.SGD(
        0.1, momentum=0.9, global_clipnorm=1.0, weight_decay=1e-3
    ),
}
MODES = [
    {"jit_compile": True},
    {"run_eagerly": True},
    *([] if BACKEND == "jax" else [{"jit_compile": False}]),  # which is run_eagerly there
]
if BACKEND == "torch":
    MODES.remove({"jit_compile": True})  # takes a C++ compiler and minutes


@pytest.fixture(autouse=True)
def _float16():
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy("float32")


def trained(optimizer, epochs=2, **arguments):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(8, "relu", name="hidden"),
            keras.layers.Dense(3, dtype="float32", name="logits"),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, **arguments)
    history = model.fit(IMAGES, LABELS, batch_size=16, epochs=epochs, shuffle=False, verbose=0)
    return model, history.history["loss"]


def state(model, numpy):
    return [numpy(v).tolist() for v in [*model.trainable_variables, *model.optimizer.variables]]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: " ".join(mode) + str(*mode.values()))
@pytest.mark.parametrize("inner", INNER)
def test_fit_ends_as_with_keras_wrapper(inner, mode, native, numpy):
    arguments = {"initial_scale": 2.0**20, "dynamic_growth_steps": 3}
    optimizer = LossScaleOptimizer(INNER[inner](), **arguments)
    model, losses = trained(optimizer, **mode)
    assert model.optimizer is optimizer  # or the loss would be scaled twice
    reference, expected = trained(native(INNER[inner](), **arguments), **mode)
    assert 0 < int(optimizer.iterations) < 12  # some steps were skipped
    assert losses[-1] < losses[0]
    if BACKEND == "jax" and mode.get("run_eagerly"):  # XLA compiles Keras' branches, not ours
        assert np.allclose(losses, expected, rtol=1e-4)
        assert float(optimizer.loss_scale) == numpy(reference.optimizer.dynamic_scale)
    else:
        assert losses == expected
        assert state(model, numpy) == state(reference, numpy)


def test_a_static_scale_learns_as_a_constant_factor_does(numpy):
    model, losses = trained(LossScaleOptimizer(INNER["adam"](), dynamic=False, initial_scale=64.0))
    factor = keras.optimizers.Adam(0.05, loss_scale_factor=64.0)
    reference, expected = trained(factor, auto_scale_loss=False)
    assert np.allclose(losses, expected, rtol=1e-6)
    assert all(map(np.allclose, model.get_weights(), reference.get_weights()))
    assert float(model.optimizer.loss_scale) == 64.0


@pytest.mark.parametrize("policy", ["dynamic", "static"])
def test_a_saved_model_goes_on_as_if_it_had_not_stopped(policy, tmp_path, numpy):
    arguments = {"initial_scale": 2.0**12}
    arguments |= {"dynamic_growth_steps": 5} if policy == "dynamic" else {"dynamic": False}
    model, _ = trained(LossScaleOptimizer(INNER["adam"](), **arguments))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is LossScaleOptimizer
    assert state(loaded, numpy) == state(model, numpy)
    if policy == "dynamic":
        assert float(loaded.optimizer.loss_scale) != 2.0**12
        assert int(loaded.optimizer.dynamic_counter) > 0
    for each in (model, loaded):
        each.fit(IMAGES, LABELS, batch_size=16, shuffle=False, verbose=0)
    assert state(loaded, numpy) == state(model, numpy)


def test_an_h5_file_keeps_the_scale_and_the_counters(native, tmp_path, numpy):
    def loaded(wrapper):
        model, _ = trained(wrapper(INNER["adam"](), dynamic_growth_steps=5))
        model.save(tmp_path / "model.h5")
        optimizer = keras.models.load_model(tmp_path / "model.h5").optimizer
        assert type(optimizer) is wrapper
        return [numpy(variable).tolist() for variable in optimizer.variables]

    ours = loaded(LossScaleOptimizer)
    assert ours[:4] == loaded(native)[:4]
    assert ours[2:5] == [2, 2.0**17, 12]  # the last is the inner optimizer's: Keras' loses it


def test_a_model_saved_with_keras_wrapper_is_loaded_into_ours(native, tmp_path, numpy):
    reference, _ = trained(native(INNER["adam"](), initial_scale=2.0**18, dynamic_growth_steps=4))
    reference.save_weights(tmp_path / "all.weights.h5")
    model, _ = trained(LossScaleOptimizer(INNER["adam"](), dynamic_growth_steps=4))
    model.load_weights(tmp_path / "all.weights.h5")
    assert state(model, numpy) == state(reference, numpy)
    assert float(model.optimizer.loss_scale) == numpy(reference.optimizer.dynamic_scale)


def test_a_static_optimizer_keeps_its_scale_when_it_loads_a_moving_one(tmp_path):
    moving, _ = trained(LossScaleOptimizer(INNER["adam"](), dynamic_growth_steps=2))
    moving.save_weights(tmp_path / "all.weights.h5")
    model, _ = trained(LossScaleOptimizer(INNER["adam"](), dynamic=False, initial_scale=4.0))
    model.load_weights(tmp_path / "all.weights.h5")
    assert float(model.optimizer.loss_scale) == 4.0
    assert int(model.optimizer.iterations) == int(moving.optimizer.iterations)


def test_swap_ema_weights_finds_the_averages(numpy):
    keras.utils.set_random_seed(0)
    inner = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
    optimizer = LossScaleOptimizer(inner, initial_scale=8.0)
    model, _ = trained(optimizer, epochs=1)
    average = numpy(inner._model_variables_moving_average[0]).copy()
    swap = keras.callbacks.SwapEMAWeights()
    swap.set_model(model)
    swap.on_test_begin()
    assert np.array_equal(numpy(model.trainable_variables[0]), average)


def test_gradient_accumulation_counts_finite_steps_alone(numpy):
    inner = keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)
    model, _ = trained(LossScaleOptimizer(inner, initial_scale=2.0**20), epochs=1)
    assert numpy(inner._iterations) < 6
    assert int(numpy(model.optimizer.iterations)) == int(numpy(inner._iterations)) // 3
