"""Random trainings, which a test runs with gradscaler's scaler and with the framework's own.

PyTorch's and TensorPlay's tests use the whole module. Paddle's scaler differs more, so its tests
use only the turns and the losses.
"""

import math
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from tests.support.eager import library
from tests.support.eager.base import normal

SHAPES = (2, 3), (4,), ()


@dataclass(frozen=True)
class Turn:
    """The events of one optimizer in one iteration."""

    seed: int
    overflow: float | None  # the Inf or NaN in a gradient, if any
    where: int  # the parameter with that gradient
    left_out: int | None  # the parameter without a gradient
    passes: int  # backward passes
    unscale: bool


@dataclass(frozen=True)
class TorchTurn(Turn):
    clip: bool
    step: bool


def turns(kind, **more):
    return st.builds(
        kind,
        seed=st.integers(0, 2**16),
        overflow=st.sampled_from([None, None, None, math.inf, -math.inf, math.nan]),
        where=st.integers(0, len(SHAPES) - 1),
        left_out=st.sampled_from([None, None, *range(len(SHAPES))]),
        passes=st.integers(1, 2),
        unscale=st.booleans(),
        **more,
    )


TURNS = turns(TorchTurn, clip=st.booleans(), step=st.sampled_from([True, True, True, False]))
TRACES = st.lists(TURNS, min_size=1, max_size=8).map(lambda trace: [[turn] for turn in trace])
PAIRED_TRACES = st.lists(st.tuples(TURNS, TURNS), min_size=1, max_size=6)


def rules(largest_scale):
    """Rules with factors that float32 holds exactly, because gradscaler rounds all others."""
    return st.fixed_dictionaries(
        {
            "init_scale": st.sampled_from([2.0**16, 1.0, 0.1, 3.0, largest_scale]),
            "growth_factor": st.sampled_from([2.0, 4.0, 1.5]),
            "backoff_factor": st.sampled_from([0.5, 0.25, 0.75]),
            "growth_interval": st.integers(1, 3),
        }
    )


def loss(parameters, turn, part, complete=False):
    """A loss with random gradients; in the first part, one of them may overflow."""
    gradients = normal([turn.seed, part], *[tuple(p.shape) for p in parameters])
    if part == 0 and turn.overflow is not None:
        gradients[turn.where].flat[-1] = turn.overflow
    pairs = enumerate(zip(parameters, gradients, strict=True))
    used = [(p, g) for i, (p, g) in pairs if complete or i != turn.left_out]
    return sum((p * library.tensor(g)).sum() for p, g in used) / turn.passes


class Side:
    """One of the two scalers, with parameters and optimizers of its own.

    Each of ``kinds`` is a function from parameters to an optimizer. Its attribute ``shapes``, if
    any, gives the shapes of the parameters that the optimizer takes.
    """

    def __init__(self, scaler, kinds):
        self.scaler = scaler
        self.owned = []
        for kind in kinds:
            parameters = library.parameters(*getattr(kind, "shapes", SHAPES))
            self.owned.append((parameters, returning(kind(parameters))))

    def iterate(self, turns):
        """Run one iteration; return the results of the calls, and the finite gradients."""
        for (parameters, optimizer), turn in zip(self.owned, turns, strict=True):
            optimizer.zero_grad()
            for part in range(turn.passes):  # fused SGD takes no late parameters
                scaled = self.scaler.scale(loss(parameters, turn, part, is_fused_sgd(optimizer)))
                scaled.backward()
        seen = []
        for (parameters, optimizer), turn in zip(self.owned, turns, strict=True):
            if turn.unscale or turn.clip or not turn.step:
                self.scaler.unscale_(optimizer)
            if turn.clip:
                seen.append(library.framework.nn.utils.clip_grad_norm_(parameters, 0.5))
            if turn.step:
                seen.append(self.step(optimizer))
            if turn.overflow is None or library.name == "torch":
                seen.append([parameter.grad for parameter in parameters])
        self.update()
        return library.exact(seen)

    def step(self, optimizer):
        return self.scaler.step(optimizer)

    def update(self):
        self.scaler.update()

    def everything(self):
        scaler = self.scaler
        return (
            [library.kept(optimizer) for _, optimizer in self.owned],
            library.exact([scaler._scale, scaler._growth_tracker, scaler.get_scale()]),
            len(scaler._per_optimizer_states),
        )


class NativeSide(Side):
    """The framework's side, without a fault of its fused SGD.

    If that optimizer's first step overflows, it leaves an uninitialised momentum. gradscaler does
    not call ``optimizer.step`` then, so this side removes the momentum and returns None.
    """

    def step(self, optimizer):
        gradients = [p.grad for p in library.owned(optimizer) if p.grad is not None]
        first = not optimizer.state
        overflow = not all(np.isfinite(library.numpy(gradient)).all() for gradient in gradients)
        returned = super().step(optimizer)
        if is_fused_sgd(optimizer) and first and overflow:
            optimizer.state.clear()
            return None
        return returned


def is_fused_sgd(optimizer):
    return isinstance(optimizer, library.framework.optim.SGD) and optimizer.defaults["fused"]


def returning(optimizer):
    """Make ``step`` return a value, as it returns a closure's loss."""
    step = optimizer.step
    optimizer.step = lambda *args, **kwargs: (step(*args, **kwargs), "stepped")[1]
    return optimizer


def run(kinds, trace, ours, native, native_side=NativeSide, exchange=()):
    """Run a trace with both scalers, which exchange state dicts after the turns ``exchange``."""
    mine, theirs = Side(ours, kinds), native_side(native, kinds)
    for index, turns in enumerate(trace):
        assert mine.iterate(turns) == theirs.iterate(turns)
        states = ours.state_dict(), native.state_dict()
        if index in exchange:
            ours.load_state_dict(states[1])
            native.load_state_dict(states[0])
        assert mine.everything() == theirs.everything()
        if native_side is NativeSide:
            assert library.exact(states[0]) == library.exact(states[1])


def run_by_rule(kinds, rule, trace, device="cpu", **options):
    """Like ``run``, with scalers that have the parameters in ``rule``."""
    native = library.framework.amp.GradScaler(device, **rule)
    run(kinds, trace, library.GradScaler(device, **rule), native, **options)
