"""MindSpore: manager, update cell, train step and functional scaler, in both modes."""

import copy
import dataclasses
from functools import cache, partial

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

import gradscaler.mindspore as ours
from gradscaler import DynamicScale
from tests.conformance import rules
from tests.conformance.replay import COMMON, INTERVAL, RATE, SCALE, Mode


class Manager:
    """A manager, which does not show its count of finite steps."""

    def __init__(self, make, policy):
        self.manager = make(policy)

    def step(self, overflows):
        self.manager.update_loss_scale(any(overflows))

    def set_scale(self, scale):
        self.manager.loss_scale = scale

    def set_interval(self, interval):
        self.manager.scale_window = interval

    def resume(self):
        self.manager = copy.deepcopy(self.manager)

    def state(self):
        return float(self.manager.get_loss_scale()), None, None


class Line(nn.Cell):
    """A weight times its input."""

    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor([1.0], mindspore.float32), name="weight")

    def construct(self, x):
        return (self.weight * x).sum()


class Held:
    """A mode of a scaler that holds its state in parameters, which are put into a new one."""

    def __init__(self, make, mode, policy):
        self.make, self.mode, self.policy = make, mode, policy
        self.start()
        self.first = self.values()

    def begun(self):
        """One that begins again, with what this one has compiled."""
        begun = copy.copy(self)
        begun.set_values(self.first)
        return begun

    def values(self):
        return [parameter.asnumpy().copy() for parameter in self.parameters()]

    def set_values(self, values):
        for parameter, value in zip(self.parameters(), values, strict=True):
            parameter.set_data(Tensor(value))

    def set_scale(self, scale):
        self.scale.set_data(Tensor(scale, mindspore.float32))

    def set_interval(self, interval):
        self.policy = dataclasses.replace(self.policy, growth_interval=interval)
        self.resume()  # the window is the constructor's

    def resume(self):
        saved = self.values()
        self.start()
        self.set_values(saved)

    def step(self, overflows):
        mindspore.set_context(mode=self.mode)
        self.advance(Tensor(np.float32("inf" if any(overflows) else 1)))

    def bad_steps(self):
        held = getattr(self.scaler, "nonfinite_steps", None)
        return int(held.asnumpy()) if isinstance(held, Parameter) else None


class Cell(Held):
    """An update cell."""

    def start(self):
        self.scaler = self.make(self.policy)
        self.scale = Parameter(Tensor(self.policy.init_scale, mindspore.float32), name="scale")

    def parameters(self):
        return [self.scale, *self.scaler.get_parameters()]

    def advance(self, value):
        self.scaler(self.scale, ops.isinf(value))

    def state(self):
        step, overflowed = (
            int(count.asnumpy()) for count in (self.scaler.cur_iter, self.scaler.last_overflow_iter)
        )
        return float(self.scale.asnumpy()), step - 1 - overflowed, self.bad_steps()


class TrainStep(Cell):
    """A train step of a network, with an update cell."""

    def start(self):
        self.scaler = self.make(self.policy)
        network = Line()
        optimizer = nn.SGD(network.trainable_params(), learning_rate=0.0)
        self.train_step = ours.TrainOneStepWithLossScaleCell(network, optimizer, self.scaler)
        self.scale = self.train_step.scale_sense

    def advance(self, value):
        self.train_step(value.reshape(1))


# MindSpore caches compiled code by the ids of objects, which later ones may have again.
KEPT = []


class Functional(Held):
    """A functional scaler, around a function that is differentiated."""

    def __init__(self, make, mode, compiled, policy):
        self.compiled = compiled
        super().__init__(make, mode, policy)

    def start(self):
        self.scaler = self.make(self.policy)
        self.scale = self.scaler.scale_value
        scaler, weight = self.scaler, Tensor(1.0, mindspore.float32)

        def scaled(weight, value):
            return scaler.scale(weight * value)

        gradient = mindspore.grad(scaled)

        def advance(weight, value):
            grads = scaler.unscale((gradient(weight, value),))
            return scaler.adjust(ours.all_finite(grads))

        KEPT.extend([scaler, scaled, gradient, advance])
        self.advance = partial(mindspore.jit(advance) if self.compiled else advance, weight)

    def parameters(self):
        counters = [self.scaler.counter, getattr(self.scaler, "nonfinite_steps", None)]
        return [self.scale, *(count for count in counters if isinstance(count, Parameter))]

    def state(self):
        return float(self.scale.asnumpy()), int(self.scaler.counter.asnumpy()), self.bad_steps()


def with_policy(cls):
    return lambda policy: cls(policy=policy)


def with_numbers(cls):
    return lambda policy: cls(policy.init_scale, 2, policy.growth_interval)


PYNATIVE, GRAPH = mindspore.PYNATIVE_MODE, mindspore.GRAPH_MODE
PRESET = DynamicScale.mindspore(SCALE, scale_window=INTERVAL)
WINDOW = "growth comes at multiples of the window since the last overflow"
WINDOWS = {"interval lowered": WINDOW}
WRAPS = {"interval lowered": "a count past a lowered window starts again, without growth"}

WAYS = {
    "update cell, PyNative": (Cell, ours.DynamicLossScaleUpdateCell, PYNATIVE),
    "update cell, graph": (Cell, ours.DynamicLossScaleUpdateCell, GRAPH),
    "train step, PyNative": (TrainStep, ours.DynamicLossScaleUpdateCell, PYNATIVE),
    "train step, graph": (TrainStep, ours.DynamicLossScaleUpdateCell, GRAPH),
    "functional, PyNative": (Functional, ours.DynamicLossScaler, PYNATIVE, False),
    "functional, jit": (Functional, ours.DynamicLossScaler, PYNATIVE, True),
}


@cache
def compiled(make, way, policy):
    kind, cls, *rest = way
    return kind(make(cls), *rest, policy)


def driver(make, way, policy):
    return compiled(make, way, policy).begun()


MODES = [
    Mode(
        "gradscaler.mindspore, manager",
        partial(Manager, with_policy(ours.DynamicLossScaleManager)),
        PRESET,
        rules.mindspore_manager_in_float32,
        WINDOWS,
    ),
    *(
        Mode(f"gradscaler.mindspore, {name}{suffix}", partial(driver, with_policy, way), policy)
        for name, way in WAYS.items()
        for suffix, policy in {"": PRESET, ", common rule": COMMON}.items()
        if not (suffix and way[0] is TrainStep)  # the update cell's rule again, and slow
    ),
    Mode(
        "mindspore, manager",
        partial(Manager, with_numbers(mindspore.amp.DynamicLossScaleManager)),
        PRESET,
        rules.mindspore_manager,
        {**WINDOWS, "towards the largest": "the scale grows past the largest float32"},
    ),
    Mode(
        "mindspore, update cell",
        partial(Cell, with_numbers(nn.DynamicLossScaleUpdateCell), PYNATIVE),
        PRESET,
        rules.mindspore_cell,
        {"towards the largest": rules.TO_INF},
    ),
    Mode(
        "mindspore, functional",
        partial(Functional, with_numbers(mindspore.amp.DynamicLossScaler), PYNATIVE, False),
        PRESET,
        rules.jmp,
        WRAPS,
    ),
]


def train(make, policy, steps, network):
    mindspore.set_context(mode=PYNATIVE)
    scaler = make(policy)
    weights = mindspore.ParameterTuple(
        Parameter(Tensor(array), name=f"weight_{i}") for i, array in enumerate(network[:2])
    )
    inputs, targets = map(Tensor, network[2:])
    optimizer = nn.SGD(weights, learning_rate=RATE)

    def scaled_loss():
        error = ops.tanh(inputs @ weights[0]) @ weights[1] - targets
        return scaler.scale((error**2).mean())

    gradients = mindspore.value_and_grad(scaled_loss, None, weights)
    scales = []
    for _ in range(steps):
        grads = tuple(
            grad.astype(mindspore.float16).astype(mindspore.float32) for grad in gradients()[1]
        )
        grads = scaler.unscale(grads)
        finite = ours.all_finite(grads)
        if finite:
            optimizer(grads)
        scaler.adjust(finite)
        scales.append(float(scaler.scale_value.asnumpy()))
    return scales


TRAIN = {
    "gradscaler.mindspore, functional": partial(train, with_policy(ours.DynamicLossScaler)),
    "mindspore, functional": partial(train, with_numbers(mindspore.amp.DynamicLossScaler)),
}
