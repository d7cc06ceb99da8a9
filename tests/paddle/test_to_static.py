"""A whole training step under ``paddle.jit.to_static``, bit for bit as in eager mode."""

from pathlib import Path

import numpy as np
import paddle
import pytest
from paddle.jit.sot.opcode_translator.executor import executor_cache

import gradscaler
from gradscaler.paddle import GradScaler
from tests.support.eager import library

OVERFLOWS = (2, 5)  # after a growth, and at a scale that has backed off
PACKAGE = str(Path(gradscaler.__file__).parent)


class Subclass(GradScaler):
    def step(self, optimizer):
        return super().step(optimizer)

    def _unscale(self, optimizer):
        super()._unscale(optimizer)


# Steps, each code of its own. They have no free variables: SOT breaks no graph in a closure.


def step_and_update(model, optimizer, scaler, inputs):
    loss = (model(inputs) ** 2).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.clear_grad()
    return loss * 2, scaler.last_step(optimizer).applied, scaler.get_scale()


def unscale_first(model, optimizer, scaler, inputs):
    loss = (model(inputs) ** 2).mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    optimizer.clear_grad()
    return loss * 2, scaler.last_step(optimizer).applied, scaler.get_scale()


def clip_first(model, optimizer, scaler, inputs):
    loss = (model(inputs) ** 2).mean()
    scaler.scale(loss).backward()
    scaler.clip_grad_norm_(optimizer, 0.1)
    scaler.step(optimizer)
    scaler.update()
    optimizer.clear_grad()
    return loss * 2, scaler.last_step(optimizer).applied, scaler.get_scale()


def minimize(model, optimizer, scaler, inputs):
    loss = (model(inputs) ** 2).mean()
    scaled = scaler.scale(loss)
    scaled.backward()
    scaler.minimize(optimizer, scaled)
    optimizer.clear_grad()
    return loss * 2, scaler.last_step(optimizer).applied, scaler.get_scale()


def with_a_subclass(model, optimizer, scaler, inputs):
    loss = (model(inputs) ** 2).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.clear_grad()
    return loss * 2, scaler.last_step(optimizer).applied, scaler.get_scale()


class Closure:
    def __init__(self, *parts):
        self.parts = parts

    def __call__(self):
        model, optimizer, scaler, inputs = self.parts
        optimizer.clear_grad()
        loss = (model(inputs) ** 2).mean()
        scaler.scale(loss).backward()
        return loss


def with_a_closure(model, optimizer, scaler, inputs):
    loss = (model(inputs) ** 2).mean()
    scaler.step(optimizer, Closure(model, optimizer, scaler, inputs))
    scaler.update()
    return loss * 2, scaler.last_step(optimizer).applied, scaler.get_scale()


STEPS = {
    step_and_update: GradScaler,
    unscale_first: GradScaler,
    clip_first: GradScaler,
    minimize: GradScaler,
    with_a_subclass: Subclass,
    with_a_closure: GradScaler,
}


@pytest.fixture
def traced(monkeypatch):
    """The code that SOT has traced and compiled since the test began."""
    codes = []
    translate = executor_cache.start_translate

    def spy(frame, **options):
        result = translate(frame, **options)
        if result[0].code is not None:
            codes.append(frame.f_code)
        return result

    monkeypatch.setattr(executor_cache, "start_translate", spy)
    return codes


def run(step, kind, compiled):
    """The results of each of seven steps."""
    model = library.model()
    make = library.closure_optimizers["SGD"] if step is with_a_closure else library.adamw
    optimizer = make(model.parameters())
    scaler = kind(init_loss_scaling=1024.0, incr_every_n_steps=2, decr_every_n_nan_or_inf=1)
    call = paddle.jit.to_static(step) if compiled else step
    random = np.random.default_rng(0)
    for number in range(7):
        inputs = random.standard_normal((5, 4)).astype(np.float32)
        if number in OVERFLOWS:
            inputs[0, 0] = np.inf
        loss, applied, scale = call(model, optimizer, scaler, paddle.to_tensor(inputs))
        assert applied is (number not in OVERFLOWS)
        yield scale, library.exact([loss, model.parameters(), scaler.state_dict()])


@pytest.mark.parametrize("step", STEPS)
def test_a_compiled_step_goes_as_an_eager_one(step, traced):
    eager = list(run(step, STEPS[step], compiled=False))
    assert traced == []
    assert list(run(step, STEPS[step], compiled=True)) == eager
    assert step.__code__ in traced
    assert any("resume" in code.co_name for code in traced)  # the code after a call of the scaler
    assert not [code for code in traced if code.co_filename.startswith(PACKAGE)]
