"""Loops of TensorFlow under ``gradscaler run``: nothing changes, and a failure has its cause."""

import io
import sys
from pathlib import Path

import pytest

import gradscaler
from gradscaler._run_script import voice
from gradscaler.diagnose import read_run
from tests.support.keras_like import FRAMEWORK
from tests.support.scripts import fixtures_of, lines_of

pytestmark = pytest.mark.skipif(FRAMEWORK != "tf_keras", reason="one script trains by both Keras")

SCRIPT = Path(__file__).with_name("loops.py")
LINE = lines_of(SCRIPT, "sqrt", "log")
plain, ran, in_step_13 = fixtures_of(SCRIPT)


def in_order(ran):
    """The verdicts in the order of the runs, as each package ends its own."""
    return [next(each for each in ran.verdicts if f"/{file.name} " in each) for file in ran.files]


def test_variables_traces_and_random_numbers_are_the_same(plain, ran, in_step_13):
    assert plain == ran.printed == in_step_13.printed


def test_each_optimizer_has_a_run_file_and_a_verdict(ran):
    runs = [read_run(file) for file in ran.files]
    assert [run.num_steps for run in runs] == [24] * 10
    assert [run.bad_steps[0].step for run in runs if run.bad_steps] == [13] * 4
    assert all({13, 15, 17} <= set(run.skipped) for run in runs[6:])
    healthy, *_ = in_order(ran)
    assert healthy.startswith("after 24 steps: None of 24 steps had a gradient of NaN or Inf.")


def test_the_first_bad_step_is_told_with_loss_and_variable(ran):
    _, keras_3, keras_2, logarithm, *_ = in_order(ran)
    assert "gradient of sequential_1/dense_2/kernel is NaN, though the loss is finite" in keras_3
    assert "gradient of dense/kernel is NaN, though the loss is finite" in keras_2
    assert "The loss is itself inf" in logarithm
    for verdict in (keras_3, keras_2, logarithm):
        assert "step 13 was applied with" in verdict
        assert "--watch 13 names what made it" in verdict


def test_a_compiled_step_whose_weights_are_there_is_run_again_at_once(ran):
    batch, constant, *scaled = in_order(ran)[4:6] + in_order(ran)[8:]
    assert "holds Inf or NaN in row 2 of 16" in batch
    assert f"first seen in log at {SCRIPT}:" in constant
    for verdict in scaled:
        assert f"first seen in the gradient of sqrt at {SCRIPT}:{LINE['sqrt']}" in verdict


def test_an_overflow_while_the_scale_settles_is_no_failure(ran):
    causes = [each for each in ran.said if "No loss scale fixes this" in each]
    assert len(causes) == 2
    for each in causes:
        assert "the gradient of sqrt" in each


def test_a_watched_step_names_the_operation_and_the_line(in_step_13):
    verdicts = in_order(in_step_13)
    for verdict in (*verdicts[1:3], *verdicts[6:]):
        assert f"the gradient of sqrt at {SCRIPT}:{LINE['sqrt']}" in verdict
    assert f"log at {SCRIPT}:{LINE['log']}" in verdicts[3]
    assert "holds Inf or NaN in row 2 of 16" in verdicts[4]


def test_a_call_that_loops_over_a_dataset_is_one_step_and_it_is_said(monkeypatch, tmp_path):
    tf_keras = pytest.importorskip("tf_keras")
    tensorflow = sys.modules["tensorflow"]
    model, optimizer = tf_keras.layers.Dense(1), tf_keras.optimizers.SGD(0.1)
    model.build((None, 2))
    data = tensorflow.data.Dataset.from_tensor_slices(tensorflow.ones((12, 2))).batch(4)

    @tensorflow.function
    def epoch():
        for batch in data:
            with tensorflow.GradientTape() as tape:
                loss = tensorflow.reduce_mean(model(batch) ** 2)
            found = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(found, model.trainable_variables))  # noqa: B905 # traced

    monkeypatch.setattr(voice, "_STDERR", io.StringIO())
    with gradscaler.watch(tmp_path):
        for _ in range(3):
            epoch()
    said = " ".join(voice._STDERR.getvalue().split())
    assert said.count("a call of epoch() takes 3 steps and is counted as one.") == 1
    assert "after 3 steps" in said
