"""A ``train_step`` of the model's own, and ``train_on_batch``: the operation is named."""

import io
import sys

import keras
import numpy as np
import pytest
from keras import ops

import gradscaler
from gradscaler._run_script import voice
from tests.support.marked_lines import lines_marked_in

BACKEND = keras.backend.backend()
LINE = lines_marked_in(__file__)("the root")
BAD = 3  # the first batch whose root has a slope of Inf


class Root(keras.layers.Layer):
    """The norm of each row."""

    def call(self, x):
        return ops.sqrt(ops.sum(x * x, -1, keepdims=True))  # the root


class OnTensorFlow(keras.Sequential):
    """As in Keras' guide."""

    def train_step(self, data):
        x, y = data
        with sys.modules["tensorflow"].GradientTape() as tape:
            loss = ops.mean((self(x, training=True) - y) ** 2)
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class OnJax(keras.Sequential):
    """As in Keras' guide."""

    def loss_of(self, trained, others, state, x, y):
        outputs, others = self.stateless_call(trained, others, x, training=True)
        loss = ops.mean((outputs - y) ** 2)
        with keras.StatelessScope(zip(self.optimizer.variables, state, strict=True)):
            return self.optimizer.scale_loss(loss), (loss, others)

    def train_step(self, state, data):
        trained, others, optimizer, metrics = state
        take = sys.modules["jax"].value_and_grad(self.loss_of, has_aux=True)
        (_, (loss, others)), gradients = take(trained, others, optimizer, *data)
        trained, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trained)
        return {"loss": loss}, (trained, others, optimizer, metrics)


class OnTorch(keras.Sequential):
    """As in Keras' guide."""

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        loss = ops.mean((self(x, training=True) - y) ** 2)
        self.optimizer.scale_loss(loss).backward()
        with sys.modules["torch"].no_grad():
            self.optimizer.apply([each.value.grad for each in self.trainable_weights])
        return {"loss": loss}


OWN = {"tensorflow": OnTensorFlow, "jax": OnJax, "torch": OnTorch}[BACKEND]


def trained(kind, is_scaled=False, by_batch=False):
    """The variables of a model and of its optimizer, after two rounds of four batches."""
    keras.utils.set_random_seed(0)
    layers = keras.layers.Dense(4, use_bias=False), Root(), keras.layers.Dense(1)
    model = kind([keras.Input((4,)), *layers])
    optimizer = keras.optimizers.SGD(1e-3)
    if is_scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    model.compile(optimizer, "mse")
    x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
    x[8 * BAD - 4 : 8 * BAD - 3] = 0
    y = x.sum(1, keepdims=True)
    if by_batch:
        for first in (*range(0, 32, 8), *range(0, 32, 8)):
            model.train_on_batch(x[first : first + 8], y[first : first + 8])
    else:
        model.fit(x, y, 8, 2, shuffle=False, verbose=0)
    numbers = *model.variables, *optimizer.variables
    return [ops.convert_to_numpy(each).tobytes() for each in numbers]


def said(monkeypatch, folder, *case, step=None):
    """What is said of a training, whose bits stay the same."""
    native = trained(*case)
    monkeypatch.setattr(voice, "_STDERR", io.StringIO())
    with gradscaler.watch(folder, step=step):
        assert trained(*case) == native
    return " ".join(voice._STDERR.getvalue().split())


def test_a_skipped_step_of_one_s_own_is_run_again_at_once(monkeypatch, tmp_path):
    told = said(monkeypatch, tmp_path, OWN, True)
    assert "2 of 8 steps were skipped" in told
    assert "the gradient of sqrt in root" in told
    assert f"{LINE}, though the loss is finite" in told


def test_a_watched_step_of_one_s_own_names_operation_line_and_parameter(monkeypatch, tmp_path):
    told = said(monkeypatch, tmp_path, OWN, step=BAD + 1)
    assert "kernel is NaN, by the gradient of sqrt" in told
    assert f"{LINE}, though the loss is finite, and step {BAD} was applied" in told
    assert f"The loss is nan at batch {BAD + 1} of epoch 1" in told


@pytest.mark.one_backend
def test_calls_of_train_on_batch_are_steps(monkeypatch, tmp_path):
    told = said(monkeypatch, tmp_path, keras.Sequential, False, True, step=BAD)
    assert f"{LINE}, though the loss is finite, and step {BAD} was applied" in told
    assert f"after 8 calls of train_on_batch: The loss is nan at call {BAD + 1}, the first" in told
    told = said(monkeypatch, tmp_path, keras.Sequential, True, True)
    assert "2 of 8 steps were skipped" in told
    assert f"{LINE}, though the loss is finite" in told


class Adding(OnTorch):
    """Whose gradients add up over so many steps; None if nothing zeroes them."""

    num = None
    count = 0

    def zero_grad(self):
        if self.num is not None and self.count % self.num == 0:
            super().zero_grad()

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        self.count += 1
        loss = ops.mean((self(x, training=True) - y) ** 2)
        self.optimizer.scale_loss(loss).backward()
        if self.num is None or self.count % self.num == 0:
            with sys.modules["torch"].no_grad():
                self.optimizer.apply([each.value.grad for each in self.trainable_weights])
        return {"loss": loss}


@pytest.mark.skipif(BACKEND != "torch", reason="PyTorch alone adds gradients up")
@pytest.mark.parametrize(
    ("is_scaled", "num"),
    [(False, None), (True, None), (False, 1), (True, 1), (False, 2), (True, 2)],
)
def test_gradients_that_are_not_zeroed_are_told(is_scaled, num, monkeypatch, tmp_path):
    monkeypatch.setattr(Adding, "num", num)
    monkeypatch.setattr(sys.modules[__name__], "BAD", 9)  # none
    told = said(monkeypatch, tmp_path, Adding, is_scaled)
    assert ("that the step before had used" in told) == (num is None)
    assert ("(self.zero_grad() on PyTorch)" in told) == (num is None)
