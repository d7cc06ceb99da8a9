"""JAX: gradscaler's own, and the names of jmp and flax."""

import dataclasses
import pickle
from functools import partial

import jax
import jax.numpy as jnp
import jmp
import optax
from flax.training import dynamic_scale

import gradscaler.jax
from gradscaler import DynamicScale
from gradscaler.jax import GradScaler, loss_scaled
from tests.conformance import rules
from tests.conformance.replay import INTERVAL, RATE, SCALE, Mode, ours


def product(weight, value):
    return weight * value


class Driver:
    """A step is ``advance(scaler, value)``, where value is the gradient: 1 or inf."""

    def __init__(self, advance, compiled, policy):
        self.advance = jax.jit(advance) if compiled else advance
        self.scaler = self.make(policy)

    def step(self, overflows):
        self.scaler = self.advance(self.scaler, jnp.float32("inf" if any(overflows) else 1))

    def resume(self):
        self.scaler = pickle.loads(pickle.dumps(self.scaler))

    def state(self):
        return float(self.scale()), *map(int, self.counts()), *self.rest


class Native(Driver):
    """``GradScaler``."""

    make, rest = GradScaler, ()

    def set_scale(self, scale):
        state = self.scaler.state._replace(scale=scale)
        self.scaler = GradScaler(self.scaler.policy, state)

    def set_interval(self, interval):
        policy = dataclasses.replace(self.scaler.policy, growth_interval=interval)
        self.scaler = GradScaler(policy, self.scaler.state)

    def scale(self):
        return self.scaler.loss_scale

    def counts(self):
        return self.scaler.state[1:]


class Wrapped(Native):
    """``loss_scaled``, which keeps the scaler in its state."""

    def __init__(self, policy):
        @jax.jit
        def advance(state, value):
            grads = jax.grad(lambda weight: state.scaler.scale(weight * value))(1.0)
            return optimizer.update(grads, state)[1]

        optimizer = loss_scaled(optax.sgd(0.1), policy)
        self.wrapped_advance = advance
        self.wrapped = optimizer.init(1.0)
        self.scaler = self.wrapped.scaler

    def step(self, overflows):
        value = jnp.float32("inf" if any(overflows) else 1)
        self.wrapped = self.wrapped_advance(self.wrapped._replace(scaler=self.scaler), value)
        self.scaler = self.wrapped.scaler


class Jmp(Driver):
    """``DynamicLossScale``, ours or jmp's own."""

    rest = (None,)

    def __init__(self, module, compiled, policy):
        self.module = module
        super().__init__(self.adjusted, compiled, policy)

    def make(self, policy):
        return self.module.DynamicLossScale(
            jnp.float32(policy.init_scale),
            period=policy.growth_interval,
            min_loss_scale=jnp.float32(policy.min_scale),
        )

    @staticmethod
    def adjusted(scale, value):
        grads = jax.grad(lambda weight: scale.scale(weight * value))(1.0)
        return scale.adjust(jmp.all_finite(scale.unscale(grads)))

    def set_scale(self, scale):
        self.scaler = dataclasses.replace(self.scaler, loss_scale=jnp.float32(scale))

    def set_interval(self, interval):
        self.scaler = dataclasses.replace(self.scaler, period=interval)

    def scale(self):
        return self.scaler.loss_scale

    def counts(self):
        return (self.scaler.counter,)


class Flax(Driver):
    """``DynamicScale``, ours or flax's own."""

    rest = (None,)

    def __init__(self, module, compiled, policy):
        self.module = module
        super().__init__(self.stepped, compiled, policy)

    def make(self, policy):
        return self.module.DynamicScale(
            growth_interval=policy.growth_interval - 1,
            scale=jnp.float32(policy.init_scale),
            minimum_scale=policy.min_scale,
        )

    @staticmethod
    def stepped(scale, value):
        return scale.value_and_grad(product)(1.0, value).dynamic_scale

    def set_scale(self, scale):
        self.scaler = self.scaler.replace(scale=jnp.float32(scale))

    def set_interval(self, interval):
        self.scaler = self.scaler.replace(growth_interval=interval)

    def scale(self):
        return self.scaler.scale

    def counts(self):
        return (self.scaler.fin_steps,)


def stepped(scaler, value):
    return scaler.value_and_grad(product)(1.0, value).scaler


OURS = {
    "eager": partial(Native, stepped, False),
    "jit": partial(Native, stepped, True),
    "loss_scaled, jit": Wrapped,
}
PRESET = DynamicScale(SCALE, growth_interval=INTERVAL)
JMP = DynamicScale.jmp(SCALE, period=INTERVAL, min_loss_scale=4.0)
FLAX = DynamicScale.flax(growth_interval=INTERVAL, scale=SCALE)
ours_of_jmp, ours_of_flax = partial(Jmp, gradscaler.jax), partial(Flax, gradscaler.jax)
FREEZES = {"interval lowered": rules.FREEZES}
WRAPS = {"interval lowered": "a count past a lowered period starts again, without growth"}
NOT_UNDER_JIT = "under jit the floor is 1 again"

MODES = [
    *(mode for name, make in OURS.items()
      for mode in ours(f"gradscaler.jax, {name}", make, PRESET)),
    *(Mode(f"gradscaler.jax as jmp, {name}", partial(ours_of_jmp, name == "jit"), JMP)
      for name in ("eager", "jit")),
    Mode("gradscaler.jax as flax, jit", partial(ours_of_flax, True), FLAX, late=1),
    Mode("jmp, eager", partial(Jmp, jmp, False), JMP, rules.jmp, WRAPS),
    Mode(
        "jmp, jit",
        partial(Jmp, jmp, True),
        JMP,
        rules.jmp_under_jit,
        {**WRAPS, "overflow at every scale": NOT_UNDER_JIT,
            "several optimizers": NOT_UNDER_JIT, "scale set by hand": NOT_UNDER_JIT,
         "everything": NOT_UNDER_JIT},
    ),
    Mode(
        "flax, jit",
        partial(Flax, dynamic_scale, True),
        FLAX,
        rules.flax,
        {**FREEZES, "towards the largest": "growth is clamped to the largest float32"},
        late=1,
    ),
]  # fmt: skip


def train(policy, steps, network):
    *weights, inputs, targets = map(jnp.asarray, network)
    optimizer = loss_scaled(optax.sgd(RATE), policy)

    @jax.jit
    def step(weights, state):
        def scaled_loss(weights):
            hidden, output = weights
            loss = ((jnp.tanh(inputs @ hidden) @ output - targets) ** 2).mean()
            return state.scaler.scale(loss)

        grads = jax.tree.map(
            lambda grad: grad.astype(jnp.float16).astype(jnp.float32),
            jax.grad(scaled_loss)(weights),
        )
        updates, state = optimizer.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state

    state = optimizer.init(weights)
    scales = []
    for _ in range(steps):
        weights, state = step(weights, state)
        scales.append(float(state.scaler.loss_scale))
    return scales


TRAIN = {"gradscaler.jax, loss_scaled": train}
