"""Loops of Paddle and TensorPlay under ``gradscaler run``: a failure has its cause."""

import re
from pathlib import Path

import numpy as np
import pytest

import gradscaler
from gradscaler.diagnose import read_run
from tests.support import threads
from tests.support.eager import library
from tests.support.scripts import fixtures_of, lines_of

SCRIPT = Path(__file__).with_name("loops.py")
LINE = lines_of(SCRIPT, "sqrt", "log", "first")
plain, ran, in_step_13 = fixtures_of(SCRIPT)


def test_the_weights_are_the_same_to_the_bit(plain, ran, in_step_13):
    assert plain == ran.printed == in_step_13.printed


def test_each_loop_has_a_run_file_and_a_verdict(ran):
    runs = [read_run(file) for file in ran.files]
    assert [run.num_steps for run in runs] == [24] * 7
    assert [run.bad_steps[0].step for run in runs if run.bad_steps] == [13] * 4
    assert [len(run.skipped) for run in runs] == [0, 0, 0, 0, 0, 0, 1]
    healthy, *_ = ran.verdicts
    assert healthy.startswith("after 24 steps: None of 24 steps had a gradient of NaN or Inf.")


def test_the_first_bad_step_is_told_and_how_to_find_its_operation(ran):
    *failing, constant, _ = ran.verdicts[1:]
    for verdict in failing:
        assert "step 13 was applied with" in verdict
    assert "the loss itself was NaN or Inf in step 13" in constant  # its gradients are finite
    for verdict in (*failing, constant):
        assert "--watch 13 names what made it" in verdict


def test_a_watched_step_names_the_operation_and_the_line(in_step_13):
    _, root, logarithm, *batches, constant, _ = in_step_13.verdicts
    for verdict, name in ((root, "sqrt"), (logarithm, "log")):
        assert f"{name} at {SCRIPT}:{LINE[name]}" in verdict
    assert f"first seen in log at {SCRIPT}:" in constant
    for verdict in batches:  # the rectified one has a finite loss
        assert re.search("holds Inf or NaN in row.* before the forward pass of first,", verdict)
        assert f"{SCRIPT}:{LINE['first']}" in verdict


def test_a_watch_from_inside_sees_an_optimizer_that_is_there_and_is_undone(tmp_path):
    model = library.model()
    parameters = list(model.parameters())
    optimizer = library.sgd(parameters)
    kinds = library.framework.Tensor, type(optimizer)
    theirs = kinds[0].backward, kinds[1].step
    with gradscaler.watch(tmp_path, step=3) as watch:
        for step in range(3):
            loss = sum((each * each * float(step < 2)).sum() for each in parameters).sqrt()
            library.clear_gradients(optimizer)
            loss.backward()
            optimizer.step()
    assert "test_run_script.py:" in watch.verdict.findings[0].line
    assert (kinds[0].backward, kinds[1].step) == theirs


@pytest.fixture
def watch(tmp_path):
    """A watch of this test's loop."""
    with gradscaler.watch(tmp_path) as watch:
        yield watch


def loss_of(parameters):
    return sum((each * each).sum() for each in parameters)


def scaler_of(is_scaled):
    return library.scaler(**({"init_scale": 8.0} if is_scaled else {"enabled": False}))


@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize(("zeroed_after", "is_told"), [(100, True), (2, False)])
def test_gradients_that_are_not_zeroed_are_told(watch, is_scaled, zeroed_after, is_told):
    parameters = library.parameters()
    optimizer, scaler = library.sgd(parameters, lr=1e-3), scaler_of(is_scaled)
    for step in range(1, 25):
        scaler.scale(loss_of(parameters)).backward()
        if step % zeroed_after in (0, step):  # one step of two, where they are zeroed after two
            scaler.step(optimizer)
            scaler.update()
        if step % zeroed_after == 0:
            library.clear_gradients(optimizer)
    assert ("that the step before had used" in watch.verdict.text) == is_told


def test_gradients_that_add_up_are_told_as_the_cause_of_a_divergence(watch):
    parameters = library.parameters()
    optimizer = library.sgd(parameters, lr=3.0)
    for _ in range(90):
        loss_of(parameters).backward()
        optimizer.step()
    kinds = [each.kind for each in watch.verdict.findings]
    assert kinds[:2] == ["misuse", "divergence"]
    assert "the sum of all gradients so far" in watch.verdict.text


def test_a_model_of_before_keeps_its_gradients_and_is_not_told(tmp_path):
    earlier = library.model()
    loss_of(earlier.parameters()).backward()
    kept = library.sgd(list(earlier.parameters()), lr=1e-3)
    with gradscaler.watch(tmp_path) as watch:
        parameters = library.parameters()
        optimizer, scaler = library.sgd(parameters, lr=1e-3), scaler_of(is_scaled=True)
        for _ in range(24):
            scaler.scale(loss_of(parameters)).backward()
            scaler.step(optimizer)
            scaler.update()
            library.clear_gradients(optimizer)
    assert watch.verdict.kind == "normal", kept


def test_gradients_of_another_network_may_be_added_to_before_they_are_zeroed(watch):
    critic, generator = library.parameters(), library.parameters()
    optimizers = [library.sgd(each, lr=1e-3) for each in (critic, generator)]
    for _ in range(20):
        for optimizer in optimizers:
            library.clear_gradients(optimizer)
            loss_of([*critic, *generator]).backward()
            optimizer.step()
    assert watch.verdict.kind == "normal"


def test_a_parameter_without_a_gradient_is_named(watch):
    model = library.model()
    optimizer, data = library.sgd(list(model.parameters()), lr=1e-3), library.tensor([[1.0] * 4])
    for _ in range(20):
        loss_of([model[1](model[0](data))]).backward()
        optimizer.step()
        library.clear_gradients(optimizer)
    assert "2.weight and 1 more should be trained" in watch.verdict.text


@pytest.mark.parametrize("moves", [False, True])
def test_a_layer_that_no_optimizer_holds_is_named(watch, moves):
    model, late = library.model(), library.model()
    optimizer = library.sgd(list(model.parameters()), lr=1e-3)
    model.late = late  # as layers are that the first forward pass makes
    for _ in range(20):
        with library.framework.no_grad():
            for each in late.parameters() if moves else ():
                each.add_(0 * each + 0.01)
        loss_of([*model.parameters(), *late.parameters()]).backward()
        optimizer.step()
        library.clear_gradients(optimizer)
    assert ("In no optimizer that is stepped: " in watch.verdict.text) == (not moves)
    assert moves or "late.0.weight first" in watch.verdict.text


@pytest.mark.parametrize("rate", [1e-3, 1.05])
def test_weights_that_run_away_and_stay_finite_are_told(watch, rate):
    parameters = list(library.model().parameters())
    optimizer = library.sgd(parameters, lr=rate)
    for _ in range(100):
        loss_of(parameters).backward()
        optimizer.step()
        library.clear_gradients(optimizer)
    assert ("the weights' norm from" in watch.verdict.text) == (rate > 1)


def test_an_optimizer_that_finds_no_gradient_is_told(watch):
    used, unused = library.parameters(), library.parameters()
    optimizer = library.sgd(unused)
    for _ in range(10):
        loss_of(used).backward()
        optimizer.step()
    assert "found no gradient in 10 calls, so nothing is trained" in watch.verdict.text


@pytest.mark.parametrize("num_good", [0, 3])
@pytest.mark.parametrize("clears", [False, True])
def test_gradients_that_are_kept_where_a_step_is_left_out_are_told(watch, num_good, clears):
    model = library.model()
    parameters = list(model.parameters())
    optimizer = library.sgd(parameters, lr=1e-3)
    for step in range(60):
        (loss_of(parameters) * (float("inf") if step == num_good else 1.0)).backward()
        is_good = all(np.isfinite(library.numpy(each.grad)).all() for each in parameters)
        if is_good:
            optimizer.step()
        if is_good or clears:
            library.clear_gradients(optimizer)
    after = "50 backward passes after step 3: before" if num_good else "60 backward passes: before"
    assert (f"No step was taken in {after}" in watch.verdict.text) == (not clears)


def test_an_idle_optimizer_beside_another_is_told(watch):
    used, unused = library.parameters(), library.model()
    optimizers = [library.sgd(used, lr=1e-3), library.sgd(list(unused.parameters()))]
    for _ in range(12):
        loss_of(used).backward()
        for optimizer in optimizers:
            optimizer.step()
            library.clear_gradients(optimizer)
    assert "found no gradient in its first" in watch.verdict.text


def test_the_first_step_can_be_watched(tmp_path):
    with gradscaler.watch(tmp_path, step=1) as watch:
        model = library.model()
        optimizer = library.sgd(list(model.parameters()))
        for _ in range(3):
            (model(library.tensor([[1.0] * 4])).sum() * 0).sqrt().backward()
            optimizer.step()
    assert "by the gradient of sqrt" in watch.verdict.text
    assert "test_run_script.py:" in watch.verdict.findings[0].line
    assert "step 1 was applied" in watch.verdict.text


def train():
    model = library.model()
    optimizer = library.sgd(list(model.parameters()), lr=1e-3)
    for _ in range(30):
        library.clear_gradients(optimizer)
        loss_of(model.parameters()).backward()
        optimizer.step()


def test_trainings_in_threads_end_the_watch(tmp_path):
    threads.check_that_the_watch_ends(train, tmp_path)


def test_threads_that_train_nothing_or_in_turn_do_not_end_the_watch(tmp_path):
    def evaluate():
        with library.framework.no_grad():
            loss_of(model.parameters())

    model = library.model()
    threads.check_that_others_do_not_end_it(train, evaluate, tmp_path)
