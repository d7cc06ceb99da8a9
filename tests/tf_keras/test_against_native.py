"""The same gradients through tf-keras' own wrapper: everything ends with the same bits."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradscaler.tf_keras import LossScaleOptimizer

BAD = [np.inf, -np.inf, np.nan]
INNER = {
    "sgd": lambda family: family.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda family: family.Adam(0.01),
    "clipnorm": lambda family: family.RMSprop(0.01, clipnorm=0.1),
    "global norm": lambda family: family.Adam(0.01, global_clipnorm=0.1),
    "schedule": lambda family: family.SGD(
        tf_keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5), clipvalue=0.5
    ),
}


def gradients(bad, seed):
    rng = np.random.default_rng(seed)
    grads = [rng.normal(size=shape).astype("float32") for shape in ((2, 2), 2)]
    if bad is not None:
        grads[seed % 2].flat[seed % grads[seed % 2].size] = bad
    return grads


def compare(make_inner, family, steps, drive, everything, native, compiled, **arguments):
    ends = []
    for wrapper in (LossScaleOptimizer, native):
        variables = [tf.Variable(np.ones((2, 2), "float32")), tf.Variable(np.zeros(2, "float32"))]
        optimizer = wrapper(make_inner(family), **arguments)
        scales = drive(optimizer, variables, steps, compiled)
        ends.append((scales, everything(optimizer, variables)))
    assert ends[0] == ends[1]
    return ends[0][0]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("inner", INNER)
def test_every_step_leaves_the_same_bits(inner, family, compiled, drive, everything, native):
    pattern = [None, None, np.inf, None, None, None, np.nan, -np.inf, None, None]
    steps = [gradients(bad, seed) for seed, bad in enumerate(pattern)]
    scales = compare(
        INNER[inner],
        family,
        steps,
        drive,
        everything,
        native,
        compiled,
        initial_scale=4.0,
        dynamic_growth_steps=2,
    )
    assert scales == [4, 8, 4, 4, 8, 8, 4, 2, 2, 4]


@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    pattern=st.lists(st.sampled_from([None, None, *BAD]), min_size=1, max_size=8),
    growth_steps=st.integers(1, 4),
    scale=st.sampled_from([1.0, 3.0, 2.0**15, 2.0**126, 1000.0]),
)
def test_any_run_of_steps_leaves_the_same_bits(
    family, pattern, growth_steps, scale, drive, everything, native
):
    compare(
        INNER["adam"],
        family,
        [gradients(bad, seed) for seed, bad in enumerate(pattern)],
        drive,
        everything,
        native,
        compiled=False,
        initial_scale=scale,
        dynamic_growth_steps=growth_steps,
    )


@pytest.mark.parametrize("mode", [{}, {"jit_compile": True}, {"run_eagerly": True}], ids=str)
def test_fit_in_float16_ends_as_with_keras_wrapper(family, mode, native):
    images = np.random.default_rng(0).random((96, 8)).astype("float32")
    labels = images[:, :3].argmax(1)
    tf_keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        ends = []
        for wrapper in (LossScaleOptimizer, native):
            tf_keras.utils.set_random_seed(0)
            model = tf_keras.Sequential(
                [
                    tf_keras.layers.Dense(8, "relu"),
                    tf_keras.layers.Dense(3, dtype="float32"),
                ]
            )
            optimizer = wrapper(family.Adam(0.05), initial_scale=2.0**20, dynamic_growth_steps=3)
            loss = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(optimizer, loss, **mode)
            assert model.optimizer is optimizer  # or the loss would be scaled twice
            history = model.fit(images, labels, batch_size=16, epochs=2, shuffle=False, verbose=0)
            weights = [weight.tolist() for weight in model.get_weights()]
            ends.append((weights, history.history["loss"], float(optimizer.loss_scale)))
    finally:
        tf_keras.mixed_precision.set_global_policy("float32")
    assert ends[0] == ends[1]
    assert ends[0][1][-1] < ends[0][1][0]
    assert ends[0][2] < 2.0**20


def test_a_checkpoint_goes_from_one_wrapper_to_the_other(
    family, native, variables, drive, tmp_path
):
    ones = [np.ones((2, 2), "float32"), np.ones(2, "float32")]
    for first, second in ((LossScaleOptimizer, native), (native, LossScaleOptimizer)):
        saved, restored = (
            each(family.Adam(), initial_scale=8.0, dynamic_growth_steps=2)
            for each in (first, second)
        )
        drive(saved, variables, [ones] * 3)
        drive(restored, variables, [ones])
        path = tf.train.Checkpoint(optimizer=saved, variables=variables).save(
            tmp_path / "checkpoint"
        )
        tf.train.Checkpoint(optimizer=restored, variables=variables).restore(path).assert_consumed()
        assert (float(restored.loss_scale), int(restored.dynamic_counter)) == (16.0, 1)
        assert int(restored.iterations) == 3


def test_the_config_is_tf_keras(family, native):
    for arguments in (
        {"initial_scale": 4.0, "dynamic_growth_steps": 3},
        {"dynamic": False, "initial_scale": 2.0},
    ):
        config = LossScaleOptimizer(family.SGD(0.5), **arguments).get_config()
        assert config == native(family.SGD(0.5), **arguments).get_config()


def test_every_public_name_of_the_wrapper_is_there(family, native):
    theirs, ours = native(family.Adam()), LossScaleOptimizer(family.Adam())
    assert {name for name in dir(theirs) if not name.startswith("_")} <= set(dir(ours))
    assert isinstance(ours, type(theirs))
    assert isinstance(ours, native)
    assert isinstance(ours, LossScaleOptimizer)
