"""Loops of PyTorch in which an optimizer of Keras steps, under ``gradscaler run``."""

import gc
import io
import weakref

import keras
import numpy as np
import pytest

import gradscaler
from gradscaler._run_script import voice
from tests.support import threads

if keras.backend.backend() != "torch":
    pytest.skip("of PyTorch", allow_module_level=True)

import torch

INPUTS = np.random.default_rng(0).normal(size=(64, 10)).astype("float32")
TARGETS = INPUTS.sum(1, keepdims=True)


@pytest.fixture
def said(monkeypatch, tmp_path):
    def of(train):
        told = io.StringIO()
        monkeypatch.setattr(voice, "_STDERR", told)
        keras.utils.set_random_seed(0)
        with gradscaler.watch(tmp_path):
            train()
        return " ".join(told.getvalue().split())

    return of


def made():
    layers = keras.layers.Dense(16, "relu"), keras.layers.Dense(1)
    return keras.Sequential([keras.Input((10,)), *layers])


def loop(scale, optimizer=None, num_steps=30):
    model, optimizer = made(), optimizer or keras.optimizers.SGD(0.01)
    for _ in range(num_steps):
        loss = torch.mean((model(torch.tensor(INPUTS * scale)) - torch.tensor(TARGETS)) ** 2)
        model.zero_grad()
        loss.backward()
        weights = list(model.trainable_weights)
        with torch.no_grad():
            optimizer.apply([each.value.grad for each in weights], weights)


def test_a_loop_that_trains_has_a_verdict_of_its_steps(said):
    text = said(lambda: loop(1.0))
    assert "after 30 steps: None of 30 steps had a gradient of NaN or Inf." in text
    assert "Nothing wrong was seen in numbers and calls: the loss went from" in text


def test_a_loop_of_inputs_that_are_not_scaled_is_told_by_its_losses(said):
    text = said(lambda: loop(1e6))
    assert "makes numbers that are too large from the start (the first loss is" in text
    assert "Look at inputs that are not normalized" in text


def test_a_fit_has_one_verdict(said):
    def train():
        model = made()
        model.compile(keras.optimizers.SGD(0.01), "mse")
        model.fit(INPUTS, TARGETS, epochs=2, verbose=0)
        model.train_on_batch(INPUTS, TARGETS)

    text = said(train)
    assert text.count("gradscaler: after") == 1
    assert "of fit: the losses are finite" in text


def test_an_optimizer_that_scales_losses_is_left_alone(said):
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01))
    text = said(lambda: loop(1.0, scaled))
    assert "after 30 steps" not in text
    assert "steps of Keras' LossScaleOptimizer in a loop of the script's own" in text


def test_a_watch_keeps_no_optimizer_alive(said):
    alive = []

    def train():
        optimizer = keras.optimizers.SGD(0.01)
        alive.append(weakref.ref(optimizer))
        loop(1.0, optimizer, num_steps=2)
        del optimizer
        gc.collect()
        alive.append(alive[0]())

    assert "after 2 steps" in said(train)
    assert alive[1] is None


def test_trainings_in_threads_end_the_watch(tmp_path):
    threads.check_that_the_watch_ends(lambda: loop(1.0), tmp_path)
