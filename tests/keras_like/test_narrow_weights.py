"""What ``gradscaler run`` says of weights in float16 that Keras' Adam steps in ``fit``."""

import io
import math
import re
from argparse import Namespace

import numpy as np
import pytest

import gradscaler
from gradscaler._run_script import voice
from gradscaler._run_script.fit_weights import of_narrow_weights
from gradscaler._run_script.fits import Losses, _Bad
from gradscaler.diagnose._record.thresholds import LEAST_EPS
from tests.support.keras_like import BACKEND, keras

INPUTS = np.random.default_rng(0).normal(size=(64, 4)).astype("float16")
TARGETS = INPUTS[:, :1] / 4
BAD = INPUTS.copy()
BAD[1, 1] = np.nan  # in the first batch
TOLD = "The weights are float16, in which squares of small gradients are 0, so that"


@pytest.fixture
def said(monkeypatch, tmp_path):
    """A function that trains under a watch, and returns what was said."""

    def of(by, dtype="float16", inputs=INPUTS, **options):
        told = io.StringIO()
        monkeypatch.setattr(voice, "_STDERR", told)
        keras.utils.set_random_seed(0)
        with gradscaler.watch(tmp_path, **options):
            layers = keras.layers.Dense(8, "relu", dtype=dtype), keras.layers.Dense(1, dtype=dtype)
            model = keras.Sequential([keras.layers.Input((4,)), *layers])
            model.compile(by, "mse")
            model.fit(inputs.astype(dtype), TARGETS, 8, 2, verbose=0, shuffle=False)
        return " ".join(told.getvalue().split())

    return of


@pytest.mark.parametrize("name", ["Adam", "Nadam"])
def test_an_eps_that_float16_loses_is_told_where_the_loss_is_bad_or_rises(said, name):
    text = said(getattr(keras.optimizers, name)(0.3))
    assert "loss is" in text or "losses are finite, and" in text
    assert f"{TOLD} {name} divides by its epsilon of 1e-07" in text.partition("of fit: ")[2]
    assert 'set it to 1e-4, or keep the weights in float32 (the policy "mixed_float16").' in text


@pytest.mark.skipif(BACKEND == "torch", reason="its losses stay finite")
def test_an_eps_that_float16_loses_is_told_with_a_step_that_is_watched(said):
    step = int(re.findall(r"step=(\d+)", said(keras.optimizers.Adam(0.3)))[-1])
    text = said(keras.optimizers.Adam(0.3), step=step)
    assert "step watched: " in text
    assert TOLD in text.partition("step watched: ")[2]


@pytest.mark.parametrize(
    ("by", "dtype", "inputs"),
    [
        (lambda: keras.optimizers.Adam(0.01, epsilon=1e-4), "float16", INPUTS),
        (lambda: keras.optimizers.SGD(1e4), "float16", INPUTS),
        (lambda: keras.optimizers.Adam(0.3), "float32", BAD),
        (lambda: keras.optimizers.Adam(0.3), "float16", BAD),  # before the first step
    ],
)
def test_nothing_is_said_of_an_eps_that_is_none(said, by, dtype, inputs):
    assert "float16, in which" not in said(by(), dtype, inputs)


@pytest.mark.parametrize("eps", [0.9e-5, 1.1e-5])
def test_an_eps_is_too_small_below_a_limit(eps):
    layer = keras.layers.Dense(1, dtype="float16")
    model = keras.Sequential([keras.layers.Input((4,)), layer])
    model.compile(keras.optimizers.Adam(epsilon=eps), "mse")
    assert bool(of_narrow_weights(model)) is (eps < LEAST_EPS)


def test_a_batch_that_keras_tells_late_is_said_to_be_before_the_one_that_was_told(monkeypatch):
    told = io.StringIO()
    monkeypatch.setattr(voice, "_STDERR", told)
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    for order, is_late in (((3, 7), False), ((7, 3), True)):
        options = Namespace(stop=False, watch=None, again="--watch {}")
        losses = Losses(keras.__name__, False, options, None)
        losses._num_epochs = 1
        for batch in order:
            losses._see_bad(_Bad(1, batch, math.nan, "loss"), model)
        losses.end()
        said = " ".join(told.getvalue().split()).rpartition("after 1 epoch of fit: ")[2]
        assert said.startswith("The loss is nan at batch 3 of epoch 1, the first that is not")
        assert ("though Keras told a later one before" in said) is is_late
