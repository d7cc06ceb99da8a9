"""The same gradients through the framework's own wrapper: everything ends with the same bits."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support import keras_like
from tests.support.chosen import examples
from tests.support.keras_like import (
    BACKEND,
    FINITE,
    KERAS_3,
    NAMED,
    NATIVE,
    LossScaleOptimizer,
    Variable,
    drive,
    everything,
    keras,
    scale_of,
    trained,
)

SCHEDULE = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
INNER = {
    "sgd": lambda family: family.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda family: family.Adam(0.01),
    "clipnorm": lambda family: family.RMSprop(0.01, clipnorm=0.1),
    "global norm": lambda family: family.Adam(0.01, global_clipnorm=0.1),
    "schedule": lambda family: family.SGD(SCHEDULE, clipvalue=0.5),
}
if KERAS_3:
    INNER |= {
        "adamw, global norm": lambda family: family.AdamW(0.01, global_clipnorm=1.0),
        "decay": lambda family: family.RMSprop(0.01, clipvalue=0.1, weight_decay=0.1),
        "clipped schedule": lambda family: family.SGD(SCHEDULE, clipnorm=0.5),
        "ema": lambda family: family.Adam(0.01, use_ema=True, ema_overwrite_frequency=3),
        "accumulation": lambda family: family.Adam(0.01, gradient_accumulation_steps=2),
    }
BAD = [np.inf, -np.inf, np.nan]


def gradients(bad, seed):
    """Gradients of the two variables, one value of them replaced if bad."""
    rng = np.random.default_rng(seed)
    grads = [rng.normal(size=shape).astype("float32") for shape in ((2, 2), 2)]
    if bad is not None:
        grads[seed % 2].flat[seed % grads[seed % 2].size] = bad
    return grads


def scales_of_both(inner, steps, compiled=True, change=lambda variables: None, **arguments):
    """The scales after each step, once both wrappers have left the same bits."""
    ends = []
    for wrapper in (LossScaleOptimizer, NATIVE):
        variables = [
            Variable(np.ones((2, 2), "float32"), name="kernel"),
            Variable(np.zeros(2, "float32"), name="bias"),
        ]
        change(variables)
        optimizer = wrapper(inner(), **arguments, **NAMED)
        scales = drive(optimizer, variables, steps, compiled)
        ends.append((scales, everything(optimizer, variables)))
    assert ends[0] == ends[1]
    return ends[0][0]


@pytest.mark.parametrize("compiled", [True] if KERAS_3 else [True, False])
@pytest.mark.parametrize("inner", INNER)
def test_every_step_leaves_the_same_bits(inner, family, compiled):
    pattern = [None, None, np.inf, None, None, None, np.nan, -np.inf, None, None]
    steps = [gradients(bad, seed) for seed, bad in enumerate(pattern)]
    arguments = {"initial_scale": 1024.0, "dynamic_growth_steps": 2}
    scales = scales_of_both(lambda: INNER[inner](family), steps, compiled, **arguments)
    assert scales == [1024, 2048, 1024, 1024, 2048, 2048, 1024, 512, 512, 1024]


@settings(
    max_examples=examples(10),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    pattern=st.lists(st.sampled_from([None, None, *BAD]), min_size=1, max_size=8),
    growth_steps=st.integers(1, 4),
    scale=st.sampled_from([1.0, 3.0, 2.0**15, 1000.0, *([2.0**-60] if KERAS_3 else [2.0**126])]),
)
def test_any_run_of_steps_leaves_the_same_bits(family, pattern, growth_steps, scale):
    scales_of_both(
        lambda: family.Adam(0.01),
        [gradients(bad, seed) for seed, bad in enumerate(pattern)],
        compiled=KERAS_3,
        initial_scale=scale,
        dynamic_growth_steps=growth_steps,
    )


@pytest.mark.skipif(not KERAS_3, reason="Keras 2 has no such variables, and logs its warnings")
class TestKeras3:
    def test_a_variable_without_a_gradient_stays(self, family):
        steps = [[gradients(bad, 1)[0], None] for bad in (None, np.nan, None)]
        with pytest.warns(UserWarning, match="Gradients do not exist for variables"):
            scales_of_both(lambda: INNER["sgd"](family), steps, initial_scale=8.0)

    def test_a_gradient_that_overwrites_its_variable_is_not_divided(self, family):
        def overwrite(variables):
            variables[1].overwrite_with_gradient = True

        steps = [gradients(None, 0)]
        scales_of_both(lambda: INNER["sgd"](family), steps, change=overwrite, initial_scale=8.0)

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_low_precision_gradients_are_unscaled_in_the_same_way(self, dtype):
        ends = []
        for wrapper in (LossScaleOptimizer, NATIVE):
            variables = [keras.Variable(np.ones(3), dtype=dtype, name="kernel")]
            optimizer = wrapper(keras.optimizers.SGD(0.5), initial_scale=2.0**15, **NAMED)
            step = keras_like.stepper(optimizer, variables)
            for _ in range(3):
                step([keras_like.tensor(np.array([1.0, 1000.0, -3.0]), dtype)])
            ends.append(everything(optimizer, variables))
        assert ends[0] == ends[1]

    def test_the_variables_have_the_same_names_order_and_dtypes(self, variables):
        described = []
        for wrapper in (LossScaleOptimizer, NATIVE):
            optimizer = wrapper(keras.optimizers.Adam(name="adam"), **NAMED)
            optimizer.build(variables)
            described.append(
                [(v.path, v.dtype, tuple(v.shape), v.trainable) for v in optimizer.variables]
            )
        assert described[0] == described[1]


FIT = {"adam": lambda family: family.Adam(0.05)}
MODES = [{"jit_compile": True}, {"run_eagerly": True}]
if KERAS_3:
    FIT["sgd, clipped and decayed"] = lambda family: family.SGD(
        0.1, momentum=0.9, global_clipnorm=1.0, weight_decay=1e-3
    )
if BACKEND != "jax":  # where it is the same as run_eagerly
    MODES.append({"jit_compile": False} if KERAS_3 else {})
if BACKEND == "torch":
    MODES.remove({"jit_compile": True})  # takes a C++ compiler and minutes


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("inner", FIT)
def test_fit_in_float16_ends_as_with_the_framework_s_wrapper(inner, family, mode):
    arguments = {"initial_scale": 2.0**20, "dynamic_growth_steps": 3}
    optimizer, theirs = (w(FIT[inner](family), **arguments) for w in (LossScaleOptimizer, NATIVE))
    model, losses = trained(optimizer, **mode)
    assert model.optimizer is optimizer  # or the loss would be scaled twice
    reference, expected = trained(theirs, **mode)
    assert optimizer.loss_scale < 2.0**20  # some steps were skipped
    assert 0 < int(optimizer.iterations) <= (11 if KERAS_3 else 12)
    assert losses[-1] < losses[0]
    assert scale_of(optimizer) == scale_of(theirs)
    if BACKEND == "jax" and mode.get("run_eagerly"):  # XLA compiles Keras' branches, not ours
        assert np.allclose(losses, expected, rtol=1e-4)
    else:
        assert losses == expected
        found, wanted = (everything(m.optimizer, m.trainable_variables) for m in (model, reference))
        assert found == wanted


def test_a_checkpoint_goes_from_one_wrapper_to_the_other(family, variables, tmp_path):
    tf = pytest.importorskip("tensorflow")
    if BACKEND != "tensorflow":
        pytest.skip("of TensorFlow")
    wrappers = [LossScaleOptimizer, LossScaleOptimizer if KERAS_3 else NATIVE]
    for first, second in (wrappers, wrappers[::-1]):
        arguments = {"initial_scale": 8.0, "dynamic_growth_steps": 2}
        saved, restored = (each(family.Adam(), **arguments) for each in (first, second))
        drive(saved, variables, [FINITE] * 3)
        drive(restored, variables, [FINITE])
        tracked = {} if KERAS_3 else {"variables": variables}
        path = tf.train.Checkpoint(optimizer=saved, **tracked).save(tmp_path / "checkpoint")
        tf.train.Checkpoint(optimizer=restored, **tracked).restore(path).assert_consumed()
        assert (float(restored.loss_scale), int(restored.dynamic_counter)) == (16.0, 1)
        assert int(restored.iterations) == 3


@pytest.mark.parametrize(
    "arguments",
    [
        {"initial_scale": 4.0, "dynamic_growth_steps": 3},
        *([] if KERAS_3 else [{"dynamic": False, "initial_scale": 2.0}]),
    ],
)
def test_the_config_is_that_of_the_framework_s_wrapper(family, arguments):
    ours, theirs = (
        wrapper(family.SGD(0.5, name="inner"), **arguments, **NAMED).get_config()
        for wrapper in (LossScaleOptimizer, NATIVE)
    )
    assert ours == theirs


def test_every_public_name_of_the_wrapper_is_there(family):
    theirs, ours = NATIVE(family.Adam()), LossScaleOptimizer(family.Adam())
    assert {name for name in dir(theirs) if not name.startswith("_")} <= set(dir(ours))
    assert isinstance(ours, type(theirs))
    assert isinstance(ours, NATIVE)
    assert isinstance(ours, LossScaleOptimizer)
