"""The same gradients through Keras' own wrapper: everything ends with the same bits."""

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradscaler.keras import LossScaleOptimizer

INNER = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw, global norm": lambda: keras.optimizers.AdamW(0.01, global_clipnorm=1.0),
    "clipvalue": lambda: keras.optimizers.RMSprop(0.01, clipvalue=0.1, weight_decay=0.1),
    "schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5), clipnorm=0.5
    ),
    "ema": lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=3),
    "accumulation": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
}
BAD = [np.inf, -np.inf, np.nan]


def gradients(bad, scale, seed):
    """Gradients of a scaled loss for the two variables, one value of them replaced if bad."""
    rng = np.random.default_rng(seed)
    grads = [rng.normal(size=shape).astype("float32") * np.float32(scale) for shape in ((2, 2), 2)]
    if bad is not None:
        grads[seed % 2].flat[seed % grads[seed % 2].size] = bad
    return grads


def compare(make_inner, steps, drive, everything, native, values, **arguments):
    ends = []
    for wrapper in (LossScaleOptimizer, native):
        variables = [keras.Variable(value, name=name) for name, value in values]
        optimizer = wrapper(make_inner(), name="wrapper", **arguments)
        scales = drive(optimizer, variables, steps)
        ends.append((scales, everything(optimizer, variables)))
    assert ends[0] == ends[1]
    return ends[0][0]


VALUES = [("kernel", np.ones((2, 2), "float32")), ("bias", np.zeros(2, "float32"))]


@pytest.mark.parametrize("inner", INNER)
def test_every_step_leaves_the_same_bits(inner, drive, everything, native):
    pattern = [None, None, np.inf, None, None, None, np.nan, -np.inf, None, None]
    steps = [gradients(bad, 1024, seed) for seed, bad in enumerate(pattern)]
    scales = compare(
        INNER[inner],
        steps,
        drive,
        everything,
        native,
        VALUES,
        initial_scale=1024.0,
        dynamic_growth_steps=2,
    )
    assert scales == [1024, 2048, 1024, 1024, 2048, 2048, 1024, 512, 512, 1024]


@settings(max_examples=10, deadline=None)
@given(
    pattern=st.lists(st.sampled_from([None, None, *BAD]), min_size=1, max_size=8),
    growth_steps=st.integers(1, 4),
    scale=st.sampled_from([3.0, 2.0**15, 1000.0]),
)
def test_any_run_of_steps_leaves_the_same_bits(
    pattern, growth_steps, scale, drive, everything, native
):
    steps = [gradients(bad, scale, seed) for seed, bad in enumerate(pattern)]
    if min(scale / 2 ** len(pattern), scale) < 1:  # Keras' wrapper has no floor
        scale = 2.0**20
    compare(
        INNER["adam"],
        steps,
        drive,
        everything,
        native,
        VALUES,
        initial_scale=scale,
        dynamic_growth_steps=growth_steps,
    )


def test_a_variable_without_a_gradient_stays(drive, everything, native):
    def step(bad):
        return [gradients(bad, 8, 1)[0], None]

    with pytest.warns(UserWarning, match="Gradients do not exist for variables"):
        compare(
            INNER["sgd"],
            [step(None), step(np.nan), step(None)],
            drive,
            everything,
            native,
            VALUES,
            initial_scale=8.0,
        )


def test_a_variable_that_is_overwritten_by_its_gradient_is_not_divided(drive, everything, native):
    ends = []
    for wrapper in (LossScaleOptimizer, native):
        variables = [keras.Variable(value, name=name) for name, value in VALUES]
        variables[1].overwrite_with_gradient = True
        optimizer = wrapper(INNER["sgd"](), initial_scale=8.0, name="wrapper")
        drive(optimizer, variables, [gradients(None, 8, 0)])
        ends.append(everything(optimizer, variables))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_low_precision_gradients_are_unscaled_as_keras_does(dtype, drive, everything, native):
    ends = []
    for wrapper in (LossScaleOptimizer, native):
        variables = [keras.Variable(np.ones(3), dtype=dtype, name="kernel")]
        optimizer = wrapper(keras.optimizers.SGD(0.5), initial_scale=2.0**15, name="wrapper")
        grads = keras.ops.cast(np.array([1.0, 1000.0, -3.0], "float32"), dtype)
        drive(optimizer, variables, [[grads]] * 3)
        ends.append(everything(optimizer, variables))
    assert ends[0] == ends[1]


def test_the_variables_have_keras_names_order_and_dtypes(native, variables):
    described = []
    for wrapper in (LossScaleOptimizer, native):
        optimizer = wrapper(keras.optimizers.Adam(name="adam"), name="wrapper")
        optimizer.build(variables)
        described.append(
            [(v.path, v.dtype, tuple(v.shape), v.trainable) for v in optimizer.variables]
        )
    assert described[0] == described[1]
