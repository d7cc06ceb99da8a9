"""Mistakes that the losses of the first steps show in Paddle and TensorPlay."""

from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import gradscaler
from gradscaler.diagnose import locate
from tests.support.eager import library

fw = library.framework
IS_PADDLE = fw.__name__ == "paddle"
F = import_module(f"{fw.__name__}.nn.functional")
tensor = fw.to_tensor if IS_PADDLE else fw.tensor
DATA = np.random.default_rng(0).standard_normal((6, 4)).astype("float32")
FILE = Path(__file__).name
CLASSES, TARGETS = np.arange(6) % 3, DATA.sum(1)


@pytest.fixture
def watch(tmp_path):
    """A watch of this test's loop."""
    with gradscaler.watch(tmp_path) as watch:
        yield watch


def train(model, loss_of, scaler=None, num_steps=6, others=()):
    optimizer = library.sgd(list(model.parameters()), lr=1e-3)
    scaler = scaler or library.scaler(enabled=False)
    for _ in range(num_steps):
        scaler.scale(loss_of(model(tensor(DATA)))).backward()
        for each in (optimizer, *others):
            scaler.step(each)
        scaler.update()
        for each in (optimizer, *others):
            library.clear_gradients(each)


def classifier():
    return fw.nn.Linear(4, 3)


def regressor():
    return fw.nn.Linear(4, 1)


def sigmoid_twice(outputs):
    likely = F.sigmoid(outputs) if IS_PADDLE else fw.sigmoid(outputs)
    return F.binary_cross_entropy_with_logits(likely, fw.ones([6, 3]))


def softmax_twice(outputs):
    return F.cross_entropy(F.softmax(outputs, -1), tensor(CLASSES))


def in_a_sum(outputs):
    likely = F.softmax(outputs, -1).reshape([6, 3])
    return F.cross_entropy(likely, tensor(CLASSES)) * 2.0 + 0.1 * (outputs * outputs).mean()


@pytest.mark.parametrize("loss_of", [sigmoid_twice, softmax_twice, in_a_sum])
@pytest.mark.parametrize("is_scaled", [False, True])
def test_probabilities_in_place_of_logits_are_told(watch, loss_of, is_scaled):
    train(classifier(), loss_of, library.scaler(init_scale=8.0) if is_scaled else None)
    name = "sigmoid" if loss_of is sigmoid_twice else "softmax"
    line = loss_of.__code__.co_firstlineno + 1
    assert f"the output of {name} at tests/eager/seams/{FILE}:{line}" in watch.verdict.text


def of_logits(outputs):
    return F.cross_entropy(outputs, tensor(CLASSES))


def of_logarithms(outputs):
    return F.nll_loss(F.log_softmax(outputs, -1), tensor(CLASSES))


def of_probabilities(outputs):
    likely = F.softmax(outputs, -1)
    if IS_PADDLE:
        return F.cross_entropy(likely, tensor(CLASSES), use_softmax=False)
    return F.nll_loss(fw.log(likely), tensor(CLASSES))


@pytest.mark.parametrize("loss_of", [of_logits, of_logarithms, of_probabilities])
def test_losses_that_are_given_what_they_take_are_not_told(watch, loss_of):
    train(classifier(), loss_of)
    assert watch.verdict.kind == "normal"


def by_a_difference(outputs):
    return ((outputs - tensor(TARGETS)) ** 2).mean()


def by_the_other_difference(outputs):
    return fw.abs(tensor(TARGETS) - outputs).mean()


def by_targets_of_two_dimensions(outputs):
    return ((outputs.squeeze(-1) - tensor(TARGETS[:, None])) ** 2).sum() / 6


def by_mse_loss(outputs):
    return F.mse_loss(outputs, tensor(TARGETS))


BROADCAST = by_a_difference, by_the_other_difference, by_targets_of_two_dimensions, by_mse_loss


@pytest.mark.parametrize("loss_of", BROADCAST)
def test_outputs_that_are_compared_with_all_targets_are_told(watch, loss_of):
    train(regressor(), loss_of)
    text, line = watch.verdict.text, loss_of.__code__.co_firstlineno + 1
    assert "each output with each target" in text
    assert f"{FILE}:{line} makes [6, 6] of [6" in text


def of_one_shape(outputs):
    return F.mse_loss(outputs.squeeze(-1), tensor(TARGETS))


def of_meant_pairs(outputs):
    return ((outputs.squeeze(-1).unsqueeze(1) - tensor(TARGETS)) ** 2).mean()


def of_outputs(outputs):
    return ((outputs - outputs.squeeze(-1)) ** 2).mean()


def of_weighted_pairs(outputs):
    return (((outputs - tensor(TARGETS)) ** 2) * tensor(np.eye(6, dtype="float32"))).mean()


def of_a_constant(outputs):
    return ((outputs - 1.0) ** 2).mean()


MEANT = of_one_shape, of_meant_pairs, of_outputs, of_weighted_pairs, of_a_constant


@pytest.mark.parametrize("loss_of", MEANT)
def test_pairs_that_may_be_meant_are_not_told(watch, loss_of):
    train(regressor(), loss_of)
    assert watch.verdict.kind == "normal"


def test_two_steps_must_show_it(watch):
    train(classifier(), softmax_twice, num_steps=3)
    assert watch.verdict.kind == "normal"


def test_calls_are_seen_in_two_steps_alone(watch):
    softmax, seen = F.softmax, []
    operations = fw._C_ops if IS_PADDLE else fw._C
    theirs = operations.softmax

    def noting(outputs):
        seen.append(operations.softmax is not theirs)
        return softmax_twice(outputs)

    train(classifier(), noting, num_steps=8)
    assert seen == [False, False, True, True, False, False, False, False]
    assert F.softmax is softmax
    assert operations.softmax is theirs


class Listed(fw.nn.Module):
    """A model that keeps a layer where the framework does not look."""

    def __init__(self, hide):
        super().__init__()
        self.first, self.last = fw.nn.Linear(4, 4), fw.nn.Linear(4, 1)
        self.held = hide(fw.nn.Linear(4, 4))

    def forward(self, x):
        held = self.held["a"] if isinstance(self.held, dict) else self.held
        return self.last(fw.tanh(held[0](self.first(x))))


def in_a_list(layer):
    return [layer]


def in_a_tuple(layer):
    return (layer,)


def in_a_dict(layer):
    return {"a": [layer]}


def mean_square(outputs):
    return (outputs * outputs).mean()


@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize(
    ("hide", "name"), [(in_a_list, "[0]"), (in_a_tuple, "[0]"), (in_a_dict, "['a'][0]")]
)
def test_layers_that_the_model_does_not_know_are_told(watch, hide, name, is_scaled):
    train(Listed(hide), mean_square, library.scaler(init_scale=8.0) if is_scaled else None)
    assert f"held{name}.weight first), in a list or dict" in watch.verdict.text


@pytest.mark.parametrize("why", ["registered", "frozen", "optimizer", "script", "unused"])
def test_layers_in_a_list_that_are_meant_so_are_not_told(watch, why):
    listed = getattr(fw.nn, "ModuleList", None) or fw.nn.LayerList
    model = Listed((lambda layer: listed([layer])) if why == "registered" else in_a_list)
    parameters = list(model.held[0].parameters())
    for each in parameters:
        each.requires_grad = why != "frozen"
    if why == "unused":
        model.held = [*model.held, fw.nn.Linear(4, 4)]
        parameters = [*parameters, *model.held[1].parameters()]
    others = [library.sgd(parameters, lr=1e-3)] if why in ("optimizer", "unused") else []

    def move(_, inputs):
        for each in parameters if why == "script" else ():
            with fw.no_grad():
                each.add_(fw.ones_like(each))

    model.register_forward_pre_hook(move)
    train(model, mean_square, others=others)
    assert "does not know" not in watch.verdict.text


def test_a_search_after_a_watch_has_ended_sees_all(tmp_path):
    model = classifier()
    with gradscaler.watch(tmp_path):
        train(model, softmax_twice)

    def fails():
        loss = fw.log((model(tensor(DATA)) * 0).sum())
        loss.backward()

    found = locate(model, fails)
    assert (found.kind, found.operation) == ("forward", "log")
