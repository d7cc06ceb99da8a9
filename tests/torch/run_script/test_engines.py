"""A monitor of an engine that scales its losses, and skips steps, by itself."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from gradscaler._run_script.engines import Engines
from gradscaler._run_script.undo import on_stop
from gradscaler.diagnose import Monitor
from gradscaler.diagnose._monitor.engine_scaler import EngineScaler
from tests.support.marked_lines import lines_marked_in

line_with = lines_marked_in(__file__)

RULE = {
    "init_scale": 1024.0,
    "scale_window": 100,
    "delayed_shift": 1,
    "consecutive_hysteresis": False,
    "min_scale": 1.0,
}


class Optimizer:
    def __init__(self, loss_scale):
        self.loss_scale, self.param_groups, self.state = loss_scale, [], {}


class Engine:
    """What is public of DeepSpeed's engine; its optimizer shows no gradient, as that of ZeRO."""

    def __init__(self, stage=1, is_fp16=True, micro_batches=1):
        torch.manual_seed(0)
        self.module = torch.nn.Linear(2, 1)
        self.optimizer = Optimizer(RULE["init_scale"] if is_fp16 else 1.0)
        self.global_steps = self.num_passes = 0
        self.given = stage, is_fp16, micro_batches
        self.is_applied = False

    def zero_optimization_stage(self):
        return self.given[0]

    def fp16_enabled(self):
        return self.given[1]

    def dynamic_loss_scale(self):
        return True  # DeepSpeed's own looks at the settings of fp16, also where that is off

    def dynamic_loss_scale_args(self):
        return RULE

    def is_gradient_accumulation_boundary(self):
        return self.num_passes % self.given[2] == 0

    def was_step_applied(self):
        return self.is_applied

    def scale(self, loss):
        return loss * self.optimizer.loss_scale

    def backward(self, loss):
        (loss * self.optimizer.loss_scale).backward()

    def step(self):
        self.num_passes += 1
        if not self.is_gradient_accumulation_boundary():
            return
        gradients = [p.grad for p in self.module.parameters()]
        self.is_applied = all(each.isfinite().all() for each in gradients)
        if not self.is_applied and self.given[1]:
            self.optimizer.loss_scale /= 2
        self.module.zero_grad()
        self.global_steps += 1


@pytest.fixture
def engines(monkeypatch):
    """Watches engines of the class above; the scalers that begin and whose steps end, in order."""
    monkeypatch.setattr(Engine, "step", Engine.step)  # puts all back
    module = ModuleType("deepspeed.runtime.engine")
    module.DeepSpeedEngine = Engine
    monkeypatch.setitem(sys.modules, module.__name__, module)
    seen = SimpleNamespace(begun=[], ended=[], monitors={})

    def begin(scaler):
        seen.begun.append(scaler)
        if scaler not in seen.monitors:
            seen.monitors[scaler] = Monitor(scaler, scaler.model, tell=bool)

    Engines(begin, seen.ended.append).watch()
    yield seen
    for monitor in seen.monitors.values():
        monitor.close()
    on_stop.close()


def train(engine, factors):
    for factor in factors:
        engine.backward(engine.module(torch.ones(2)).sum() * factor)
        engine.step()


def steps_of(seen):
    (monitor,) = seen.monitors.values()
    return [(step.scale, step.skipped, step.nonfinite) for step in monitor.history]


def test_skipped_steps_and_scales_are_the_engine_s(engines):
    train(Engine(), [1, 3e38, 1])
    assert steps_of(engines) == [(1024, False, None), (1024, True, None), (512, False, None)]
    assert len(engines.begun) == len(engines.ended) == 3


def test_the_rule_of_the_scale_is_that_of_the_engine():
    assert EngineScaler(Engine()).policy.backoff_factor == 0.5
    assert EngineScaler(Engine()).policy.init().scale == 1024
    assert EngineScaler(Engine(is_fp16=False)).policy.scale == 1


def test_the_loss_is_not_scaled(engines):
    train(engine := Engine(), [1])
    (monitor,) = engines.monitors.values()
    assert monitor.history[0].loss == engine.module(torch.ones(2)).item()


def test_the_operation_of_a_bad_loss_is_named(engines):
    engine = Engine(stage=3, is_fp16=False)
    for number in range(6):
        squares = engine.module(torch.ones(2)).sum().square() * (number < 3)
        engine.backward(squares.log())  # fails
        engine.step()
    (monitor,) = engines.monitors.values()
    assert "3 of 6 steps were skipped" in monitor.verdict.text
    assert f"log at {line_with('fails')}" in monitor.verdict.text


def test_micro_batches_are_one_step(engines):
    train(Engine(micro_batches=2), [1, 3e38, 1, 1])
    assert [skipped for _, skipped, _ in steps_of(engines)] == [True, False]


def test_a_loss_that_the_script_scales_itself_counts_too(engines):
    engine = Engine()
    engine.scale(engine.module(torch.ones(2)).sum()).backward()
    engine.step()
    assert len(steps_of(engines)) == 1


@pytest.mark.parametrize(
    ("stage", "is_fp16", "is_own"), [(1, True, 1), (3, False, 1), (2, False, 0)]
)
def test_an_engine_whose_optimizer_shows_its_steps_is_left_to_the_watch_of_loops(
    engines, stage, is_fp16, is_own
):
    train(Engine(stage, is_fp16), [1])
    assert len(engines.begun) == is_own
