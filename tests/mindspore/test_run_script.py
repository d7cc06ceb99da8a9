"""Loops of MindSpore under ``gradscaler run``: nothing changes, and a failure has its cause."""

from pathlib import Path

import mindspore
import numpy as np
import pytest

import gradscaler
from gradscaler.diagnose import read_run
from tests.support.scripts import alone, fixtures_of, lines_of

SCRIPT = Path(__file__).with_name("loops.py")
LINE = lines_of(SCRIPT, "sqrt", "log")
_, ran, _ = fixtures_of(SCRIPT)
GRAPHS = Path(__file__).with_name("graph_loops.py")
GRAPH_LINE = lines_of(GRAPHS, "sqrt", "log")
_, graphs, graphs_in_step_13 = fixtures_of(GRAPHS)


def test_weights_are_the_same_to_the_bit(ran, tmp_path):
    assert alone(SCRIPT, tmp_path) == ran.printed


def test_each_training_has_a_run_file_and_a_verdict(ran):
    runs = [read_run(file) for file in ran.files]
    assert [run.num_steps for run in runs] == [24] * 5
    assert [run.bad_steps[0].step for run in runs if run.bad_steps] == [13] * 4
    healthy, *_ = ran.verdicts
    assert healthy.startswith("after 24 steps: None of 24 steps had a gradient of NaN or Inf.")


def test_the_first_bad_step_names_operation_and_line(ran):
    _, root, logarithm, batch, model = ran.verdicts
    for verdict, name in ((root, "sqrt"), (logarithm, "log"), (model, "sqrt")):
        assert f"{name} at {SCRIPT}:{LINE[name]}" in verdict
    assert "holds Inf or NaN" in batch
    assert "--watch" not in batch  # it would show no more


def test_a_watch_from_inside_sees_gradients_of_a_function_that_is_there_and_is_undone(tmp_path):
    base = mindspore.ops.composite.base
    model = mindspore.nn.Dense(4, 4, has_bias=False)
    take = mindspore.value_and_grad(
        lambda inputs: model(inputs).square().sum().sqrt(), None, model.trainable_params()
    )
    theirs = base._pynative_forward_run, base._pynative_func_grad_backward
    with gradscaler.watch(tmp_path) as watch:
        for factor in (1.0, 0.0):
            take(mindspore.Tensor(np.full((2, 4), factor, "float32")))
    assert "test_run_script.py:" in watch.verdict.findings[0].line
    assert (base._pynative_forward_run, base._pynative_func_grad_backward) == theirs


def test_a_gradient_that_is_weighted_is_taken_again_without_its_weight(mode, tmp_path):
    """``sens_param``: the weight comes after the inputs, and the function takes them alone."""
    model = mindspore.nn.Dense(4, 4, has_bias=False)
    weights = model.trainable_params()

    def root(inputs):
        return model(inputs).square().sum().sqrt()

    take = mindspore.grad(root, None, weights, sens_param=True)
    with gradscaler.watch(tmp_path) as watch:
        for factor in (1.0, 0.0):
            take(mindspore.Tensor(np.full((2, 4), factor, "float32")), mindspore.Tensor(1.0))
    assert "sqrt" in watch.verdict.text


@pytest.mark.parametrize("has_aux", [False, True])
@pytest.mark.parametrize("returns", ["logits", "another loss"])
def test_a_gradient_of_more_than_the_loss_is_told(mode, has_aux, returns, tmp_path):
    model = mindspore.nn.Dense(4, 4, has_bias=False)

    def loss_and_more(inputs):
        outputs = model(inputs)
        loss = outputs.square().mean()
        return loss, (outputs if returns == "logits" else 0.5 * loss)

    weights = model.trainable_params()
    take = mindspore.value_and_grad(loss_and_more, None, weights, has_aux=has_aux)
    optimizer = mindspore.nn.SGD(weights, 1e-3)
    with gradscaler.watch(tmp_path) as watch:
        for _ in range(8):
            _, gradients = take(mindspore.Tensor(np.ones((2, 4), "float32")))
            optimizer(gradients)
    is_told = "without has_aux=True" in watch.verdict.text
    assert is_told == (returns == "logits" and not has_aux)


class Parts(mindspore.nn.Cell):
    """Four layers in a row, and another one of which the loss is taken, too."""

    def __init__(self, is_cut):
        super().__init__()
        self.body, self.mid, self.late, self.head, self.other = (
            mindspore.nn.Dense(4, 4) for _ in range(5)
        )
        self.is_cut = is_cut

    def construct(self, inputs):
        made = self.other(inputs)
        if self.is_cut:
            made = mindspore.ops.stop_gradient(made)
        return self.head(self.late(self.mid(self.body(inputs)))) + made


# Which layers of it an optimizer holds; it holds them all, and what else is with those left out.
HELD = {
    "left out": ("body mid late head", ""),
    "frozen": ("body mid late head", "freezes"),
    "without a gradient": ("body mid late head", "cuts"),
    "moved by hand": ("body mid late head", "moves"),
    "of another optimizer": ("body mid late head", "holds"),
    "a backbone": ("head other", ""),
    "most, as where a few are tuned": ("body mid", ""),
    "weights, where biases are tuned": ("body mid late head other", "biases"),
}


@pytest.mark.parametrize("case", HELD)
def test_a_layer_that_no_optimizer_holds_is_named(mode, case, tmp_path):
    held, how = HELD[case]
    model = Parts(how == "cuts")
    rest = model.other.trainable_params()
    weights = [p for name in held.split() for p in getattr(model, name).trainable_params()]
    if how == "biases":
        weights = [p for p in weights if p.name.endswith("bias")]
    for each in rest if how == "freezes" else ():
        each.requires_grad = False
    others = mindspore.nn.SGD(rest, 1e-3) if how == "holds" else None  # kept in memory

    def loss_of(inputs):
        return model(inputs).square().mean()

    take = mindspore.value_and_grad(loss_of, None, weights)
    optimizer = mindspore.nn.SGD(weights, 1e-3)
    with gradscaler.watch(tmp_path) as watch:
        for _ in range(20):
            _, gradients = take(mindspore.Tensor(np.ones((2, 4), "float32")))
            optimizer(gradients)
            for each in rest if how == "moves" else ():
                each.set_data(each + 0.01)
    is_told = "In no optimizer that is stepped: 2 parameters (other.weight first)"
    assert (is_told in watch.verdict.text) == (case == "left out")
    assert (watch.verdict.kind == "normal") == (case != "left out"), watch.verdict.text
    assert (others is not None) == (how == "holds")


def test_graphs_are_the_same_to_the_bit_and_compiled_once(graphs, graphs_in_step_13, tmp_path):
    assert alone(GRAPHS, tmp_path) == graphs.printed == graphs_in_step_13.printed
    compiled = [line.split()[-1] for line in graphs.printed.splitlines()]
    assert compiled == ["1", "2", "1", "1", "1"]  # a gradient has a graph, and its optimizer


def test_a_graph_tells_its_first_bad_step(graphs):
    model, gradient, jit, cell, scaled = graphs.verdicts
    assert [read_run(file).num_steps for file in graphs.files] == [24] * 5
    assert model.startswith("after 24 steps: None of 24 steps had a gradient of NaN or Inf.")
    assert f"sqrt at {GRAPHS}:{GRAPH_LINE['sqrt']}" in gradient  # the optimizer came after it
    assert f"log at {GRAPHS}:{GRAPH_LINE['log']}" in scaled  # its step was left out
    assert "The gradient of first.weight is NaN, though the loss is finite, and step 13" in jit
    assert "The loss is itself inf, so step 13 was applied" in cell
    for verdict in (jit, cell):
        assert "--watch 13 names what made it" in verdict


def test_a_watched_step_of_a_graph_names_operation_and_line(graphs_in_step_13):
    _, _, jit, cell, _ = graphs_in_step_13.verdicts
    assert f"sqrt at {GRAPHS}:{GRAPH_LINE['sqrt']}" in jit
    assert f"log at {GRAPHS}:{GRAPH_LINE['log']}" in cell
