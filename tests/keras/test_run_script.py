"""Keras' ``fit`` under ``gradscaler run``: nothing changes, and a bad batch is named."""

import io
import re
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import gradscaler
from gradscaler._run_script import voice
from gradscaler.diagnose import read_run
from gradscaler.keras import LossScaleOptimizer

# Fit makes the same calls on each backend; tests/diagnose/monitor/test_frameworks.py has them all.
pytestmark = pytest.mark.one_backend

RUN = "-m", "gradscaler", "run"
SCRIPT = str(Path(__file__).with_name("fits.py"))


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What the script prints with and without, what is said of it in two runs, and run files."""
    started, folders = [], []
    for under in (RUN, (), (*RUN, "--watch", "3")):
        folders.append(folder := tmp_path_factory.mktemp("fits"))
        started.append(
            subprocess.Popen(
                [sys.executable, *under, SCRIPT, folder],
                cwd=folder,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
    ended = [process.communicate(timeout=600) for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], ended
    (ours, said), (theirs, _), (watched, watch) = ended
    assert ours == watched
    said, in_step = (
        [" ".join(part.split()) for part in each.split("gradscaler: ")[1:]]
        for each in (said, watch)
    )
    return (
        ours.splitlines(),
        theirs.splitlines(),
        said,
        in_step,
        sorted((folders[0] / "gradscaler-runs").iterdir()),
    )


def test_weights_optimizers_and_saved_models_are_equal(printed):
    ours, theirs, *_ = printed
    assert len(set(theirs)) == 4
    assert ours == theirs


def test_the_batch_of_a_nan_is_named_with_the_weights_and_no_operation(printed):
    _, _, said, *_ = printed
    found = [each for each in said if each.startswith("The loss is nan at batch")]
    assert len(found) == 2
    assert [each for each in found if " by matmul" in each] == []
    ends = [each for each in said if each.startswith("after 2 epochs of fit: ")]
    healthy, plain, scaled = [end.partition(": ")[2] for end in ends]
    nan = "The loss is nan at batch 3 of epoch 1, the first that is not finite; "
    assert re.fullmatch(
        r"the losses are finite, and the mean of an epoch went from \S+ to \S+\.", healthy
    )
    assert re.fullmatch(rf"{nan}\S*kernel was not finite at the end of the epoch\.", plain)
    assert scaled.startswith(f"{nan}all weights were finite at the end of the epoch.")
    assert [each for each in said if "steps were skipped" in each and "with a loss of nan" in each]
    assert [each for each in said if "not seen" in each] == []
    hints = [each for each in said if re.search("with --watch [34] names what made it", each)]
    assert len(hints) == 1  # where no scaler names it


def test_a_watched_step_names_the_row_of_the_batch_and_the_layer(printed):
    *_, in_step, _ = printed
    seen = [each for each in in_step if each.startswith("step watched: ")]
    nothing, plain, _, scaled = seen
    assert nothing == "step watched: no operation made an Inf or NaN"
    for each in (plain, scaled):
        assert "holds Inf or NaN in row 8 of 16" in each
    assert "step 3 was applied" in plain
    assert "step 3 left the weights as they were" in scaled
    ends = [each for each in in_step if "the first that is not finite" in each]
    assert ["in row 8 of 16" in each for each in ends] == [True, True]
    assert [each for each in in_step if "clip gradients" in each] == []


def test_a_loss_scale_optimizer_of_keras_has_a_run_file(printed):
    _, _, said, _, files = printed
    runs = [read_run(file) for file in files]
    steps = 2 * 5  # a quarter of the samples is for validation
    assert [run.num_steps for run in runs] == [steps, steps]
    assert max(len(run.skipped) for run in runs) >= 2
    assert runs[0].starts[0].policy["name"] == "DynamicScale"
    ends = [each for each in said if re.match(rf"after {steps} steps(, as said above)?: ", each)]
    assert len(ends) == 2


def test_a_watch_from_inside_sees_a_fit_of_a_model_that_is_there_and_is_undone(tmp_path):
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), "mse")
    theirs = keras.callbacks.CallbackList.__init__
    inputs = np.full((32, 4), np.nan, "float32")
    with gradscaler.watch(tmp_path) as watch:
        model.fit(inputs, inputs[:, :1], verbose=0, batch_size=8)
    assert watch.verdict.findings[0].steps
    assert keras.callbacks.CallbackList.__init__ is theirs


def test_a_quiet_watch_says_the_bad_batch_and_what_to_do_at_the_end_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(voice, "_STDERR", io.StringIO())
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    inputs = np.full((32, 4), np.nan, "float32")
    with gradscaler.watch(tmp_path, quiet=True):
        model.fit(inputs, inputs[:, :1], verbose=0, batch_size=8)
        assert voice._STDERR.getvalue() == ""
    said = " ".join(voice._STDERR.getvalue().split())
    assert said.count("The loss is nan at batch 1 of epoch 1, the first that is not finite") == 1
    assert "The first batch holds" in said
    assert "divisions by 0. origin: gradscaler.watch(step=2) names what made it" in said


class OwnStep(keras.Model):
    """Takes batches of four parts, and gives a loss for each row."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        tensorflow = sys.modules["tensorflow"]
        x, factor, shift, target = data
        with tensorflow.GradientTape() as tape:
            losses = (self(x) * factor + shift - target) ** 2
            scaled = self.optimizer.scale_loss(tensorflow.reduce_mean(losses))
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": losses}


class NoHash(keras.optimizers.SGD):
    """Compares by value, so Python gives it no hash."""

    __hash__ = None

    def __eq__(self, other):
        return self is other


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="the step is TensorFlow's")
@pytest.mark.parametrize("step", [None, 3])
@pytest.mark.parametrize("kind", [LossScaleOptimizer, NoHash])
def test_a_step_of_the_model_s_own_may_take_and_give_anything(kind, step, tmp_path):
    def trained():
        keras.utils.set_random_seed(0)
        model = OwnStep()
        optimizer = NoHash(0.01) if kind is NoHash else kind(keras.optimizers.SGD(0.01))
        model.compile(optimizer)
        x = np.ones((12, 4), np.float32)
        x[9] = np.inf
        ones = np.ones((12, 1), np.float32)
        data = sys.modules["tensorflow"].data.Dataset.from_tensor_slices((x, ones, ones, ones))
        model.fit(data.batch(3), shuffle=False, verbose=0)
        return [each.tobytes() for each in model.get_weights()]

    native = trained()
    with gradscaler.watch(tmp_path, step=step):
        assert trained() == native


def test_a_loss_that_grows_and_stays_finite_is_told(monkeypatch, tmp_path):
    told = io.StringIO()
    monkeypatch.setattr(voice, "_STDERR", told)
    with gradscaler.watch(tmp_path):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.9), "mse")
        model.fit(np.full((64, 2), 2.0), np.ones((64, 1)), 16, 2, verbose=0)
    assert "should have fallen, lower the learning rate" in " ".join(told.getvalue().split())


@pytest.mark.parametrize("is_nan", [False, True])
def test_a_watch_has_the_verdict_on_a_fit_without_a_loss_scale(is_nan, tmp_path):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1e-3), "mse")
    inputs = np.ones((32, 4), "float32")
    inputs[8:] *= np.nan if is_nan else 1.0
    with gradscaler.watch(tmp_path) as watch:
        assert watch.verdict is None
        model.fit(inputs, np.zeros((32, 1)), verbose=0, batch_size=8, shuffle=False)
        verdict = watch.verdict
        with pytest.raises(ValueError, match=r"no run file .* only with a LossScaleOptimizer"):
            watch.report(tmp_path / "report.html")
    assert verdict == watch.verdict
    assert str(verdict) in repr(watch)
    assert verdict.kind == ("loss" if is_nan else "normal")
    assert "No step was seen" not in watch._repr_html_()
    told = (
        "The loss is nan at batch 2 of epoch 1; " if is_nan else "The losses are finite, and went"
    )
    assert verdict.text.startswith(told)
    assert verdict.findings[0].text.strip() == verdict.text
    assert ("divisions by 0 in the loss" in verdict.text) == is_nan
