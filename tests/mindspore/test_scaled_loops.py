"""PyNative loops with a scaler under a watch: nothing changes, and a failing step has its cause."""

import io
from pathlib import Path

import mindspore
import numpy as np
import pytest
from mindspore import amp, nn, ops

import gradscaler
import gradscaler.mindspore
from gradscaler._run_script import voice
from tests.support.marked_lines import lines_marked_in

NUM_STEPS, BAD = 12, 7  # the step that is bad


def scaler_named(name):
    if name == "static":
        return amp.StaticLossScaler(2.0**10)
    package = amp if name == "native" else gradscaler.mindspore
    return package.DynamicLossScaler(2.0**10, 2, 50)


def trained(name, skips=True, unscales=True, scales=True, in_place=False):
    """The weights, and the scale, of a training whose root has a slope of Inf in one step.

    Gradients may be left scaled, or divided in place, and the loss may not be scaled.
    """
    mindspore.set_seed(0)
    model = nn.Dense(4, 1, weight_init=mindspore.common.initializer.One(), has_bias=False)
    optimizer = nn.SGD(model.trainable_params(), 1e-3)
    scaler = scaler_named(name)

    def forward(inputs):
        outputs = model(inputs)
        loss = ops.sqrt((outputs**2).mean())  # the root
        return (scaler.scale(loss) if scales else loss), outputs

    take = mindspore.value_and_grad(forward, None, optimizer.parameters, has_aux=True)
    for step in range(1, NUM_STEPS + 1):
        inputs = np.random.default_rng(step).normal(size=(8, 4)).astype("float32")
        (_, _), gradients = take(mindspore.Tensor(inputs * (step != BAD)))
        if unscales:
            gradients = scaler.unscale(gradients)
        if in_place:
            for each in gradients:
                each.assign_value(each / 2.0**10)
        is_finite = amp.all_finite(gradients)
        if is_finite or not skips:
            optimizer(gradients)
        scaler.adjust(is_finite)
    return model.weight.asnumpy().tobytes(), scaler.scale_value.asnumpy().tobytes()


def watched(monkeypatch, folder, *case):
    """What is said of a training, whose bits stay the same."""
    native = trained(*case)
    monkeypatch.setattr(voice, "_STDERR", io.StringIO())
    with gradscaler.watch(folder) as watch:
        assert trained(*case) == native
    return watch.verdict, " ".join(voice._STDERR.getvalue().split())


ROOT = f"sqrt at {Path.cwd()}/{lines_marked_in(__file__)('the root')}"


@pytest.mark.parametrize("name", ["native", "ours"])
def test_a_step_that_a_scaler_skips_is_run_again_unscaled(name, monkeypatch, tmp_path):
    verdict, said = watched(monkeypatch, tmp_path, name)
    assert f"after {NUM_STEPS} steps" in said
    assert ROOT in said
    assert "a lower scale cured" not in said
    assert verdict.kind == "nan"


def test_a_step_of_a_fixed_scale_is_told_by_what_became_of_it(monkeypatch, tmp_path):
    _, said = watched(monkeypatch, tmp_path, "static")
    assert ROOT in said
    assert f"step {BAD} left the weights as they were" in said
    assert "of which 1 left the weights as they were" in said
    _, said = watched(monkeypatch, tmp_path, "static", False)
    assert ROOT in said
    assert f"step {BAD} was applied" in said


@pytest.mark.parametrize("name", ["native", "ours"])
def test_a_step_that_is_applied_in_spite_of_a_scaler_is_told_with_its_operation(
    name, monkeypatch, tmp_path
):
    verdict, said = watched(monkeypatch, tmp_path, name, False)
    assert verdict.kind == "nan"
    assert ROOT in said
    assert f"step {BAD} was applied" in said
    assert "skipped" not in said


def overflowing(scaler, skips):
    """A training in which the loss scale alone makes a gradient in float16 Inf in one step."""
    model = nn.Dense(4, 1, weight_init=mindspore.common.initializer.One(), has_bias=False)
    optimizer = nn.SGD(model.trainable_params(), 1e-3)

    def forward(inputs):
        outputs = model(inputs).astype(mindspore.float16).astype(mindspore.float32)
        return scaler.scale(outputs.mean())

    take = mindspore.value_and_grad(forward, None, optimizer.parameters)
    for step in range(1, NUM_STEPS + 1):
        scaler.scale_value.assign_value(mindspore.Tensor(2.0 ** (30 if step == BAD else 10)))
        _, gradients = take(mindspore.Tensor(np.ones((8, 4), "float32")))
        gradients = scaler.unscale(gradients)
        if amp.all_finite(gradients) or not skips:
            optimizer(gradients)


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("name", ["native", "static"])
def test_an_overflow_of_the_scale_that_is_applied_is_told(name, skips, monkeypatch, tmp_path):
    monkeypatch.setattr(voice, "_STDERR", io.StringIO())
    with gradscaler.watch(tmp_path):
        overflowing(scaler_named(name), skips)
    said = " ".join(voice._STDERR.getvalue().split())
    only = "call optimizer(gradients) only if amp.all_finite(gradients), and lower the scale."
    assert (f"Without the loss scale, the gradients are finite: {only}" in said) != skips
    assert ("No loss scale fixes" in said) is False


UNDIVIDED = "they are still multiplied by the loss scale"


@pytest.mark.parametrize("name", ["native", "ours", "static"])
def test_gradients_that_are_not_unscaled_are_told(name, monkeypatch, tmp_path):
    verdict, said = watched(monkeypatch, tmp_path, name, True, False)
    assert verdict.kind == "misuse"
    assert UNDIVIDED in said
    assert "Call gradients = scaler.unscale(gradients)" in said


@pytest.mark.parametrize("how", [{"scales": False}, {"in_place": True}])
def test_gradients_that_are_not_scaled_any_more_are_no_mistake(how, monkeypatch, tmp_path):
    case = {"skips": True, "unscales": False} | how
    native = trained("native", **case)
    monkeypatch.setattr(voice, "_STDERR", io.StringIO())
    with gradscaler.watch(tmp_path):
        assert trained("native", **case) == native
    assert UNDIVIDED not in " ".join(voice._STDERR.getvalue().split())
