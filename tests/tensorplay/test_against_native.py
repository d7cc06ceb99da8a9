"""gradscaler and tensorplay.amp.GradScaler through the same traces, bit for bit at every step."""

import math
from dataclasses import dataclass

import pytest
import tensorplay as tp
from hypothesis import given, settings
from hypothesis import strategies as st

from gradscaler import FixedScale
from gradscaler.tensorplay import GradScaler

PAIRS = [
    ("loop-SGD", "loop-Adam"),
    ("foreach-AdamW", "fused-AdamW"),
    ("fused-SGD", "loop-RMSprop"),
    ("fused-Adagrad", "Muon"),
]
EXAMPLES = settings(max_examples=6, deadline=None)


@dataclass(frozen=True)
class Turn:
    """What one optimizer goes through in one iteration."""

    seed: int
    overflow: float | None  # what is put into a gradient
    where: int  # into which parameter's
    left_out: int | None  # the parameter without a gradient
    passes: int  # backward passes
    unscale: bool
    clip: bool
    step: bool


# Factors that float32 holds exactly: gradscaler rounds any other to float32 before it multiplies.
# Scales that stay clear of the bounds, which TensorPlay's scaler does not have.
RULES = st.fixed_dictionaries(
    {
        "init_scale": st.sampled_from([2.0**16, 1.0, 0.1, 3.0, 2.0**100]),
        "growth_factor": st.sampled_from([2.0, 4.0, 1.5]),
        "backoff_factor": st.sampled_from([0.5, 0.25, 0.75]),
        "growth_interval": st.integers(1, 3),
    }
)
TURNS = st.builds(
    Turn,
    seed=st.integers(0, 2**16),
    overflow=st.sampled_from([None, None, None, math.inf, -math.inf, math.nan]),
    where=st.integers(0, 2),
    left_out=st.sampled_from([None, None, 0, 1, 2]),
    passes=st.integers(1, 2),
    unscale=st.booleans(),
    clip=st.booleans(),
    step=st.sampled_from([True, True, True, False]),
)


class Side:
    """One of the two scalers, with parameters and optimizers of its own."""

    def __init__(self, scaler, kinds, randn):
        self.scaler = scaler
        self.randn = randn
        self.owned = []
        for kind in kinds:
            owned = [tp.nn.Parameter(value) for value in randn(0, *kind.shapes)]
            self.owned.append((kind, owned, returning(kind(owned))))

    def iterate(self, turns):
        """One iteration; what the calls returned, and the gradients that a step was taken with."""
        for _, _, optimizer in self.owned:
            optimizer.zero_grad()
        for (kind, parameters, _), turn in zip(self.owned, turns, strict=True):
            for part in range(turn.passes):
                self.scaler.scale(self.loss(kind, parameters, turn, part)).backward()
        seen = []
        for (kind, parameters, optimizer), turn in zip(self.owned, turns, strict=True):
            if turn.unscale or turn.clip or not turn.step:
                self.scaler.unscale_(optimizer)
            if turn.clip:
                seen.append(tp.nn.utils.clip_grad_norm_(parameters, 0.5))
            if turn.step:
                seen.append(self.step(kind, optimizer))
            if turn.overflow is None:
                seen.append([parameter.grad for parameter in parameters])
        self.update()
        return seen

    def loss(self, kind, parameters, turn, part):
        """A loss with random gradients, into one of which the first part puts an overflow."""
        total = tp.zeros(())
        gradients = self.randn([turn.seed, part], *kind.shapes)
        for i, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            if i == turn.where and part == 0 and turn.overflow is not None:
                gradient.view(-1)[-1] = turn.overflow
            if i != turn.left_out or is_fused_sgd(kind):  # it takes no late parameters
                total = total + (parameter * gradient).sum()
        return total / turn.passes

    def step(self, kind, optimizer):
        return self.scaler.step(optimizer)

    def update(self):
        self.scaler.update()

    def everything(self, exact, stepped):
        scaler = self.scaler
        return (
            [stepped(optimizer) for _, _, optimizer in self.owned],
            exact([scaler._scale, scaler._growth_tracker, scaler.get_scale()]),
            len(scaler._per_optimizer_states),
        )


class NativeSide(Side):
    """TensorPlay's, but for what its fused SGD does when its first step overflows.

    It then leaves the momentum uninitialised. gradscaler leaves it out, and so does not call
    ``optimizer.step``.
    """

    def step(self, kind, optimizer):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        first = not optimizer.state
        overflow = not all(tp.isfinite(p.grad).all() for p in parameters if p.grad is not None)
        returned = super().step(kind, optimizer)
        if is_fused_sgd(kind) and first and overflow:
            optimizer.state.clear()
            return None
        return returned


class FixedNativeSide(NativeSide):
    """TensorPlay's, its scale set by hand where it would have moved."""

    def update(self):
        self.scaler.update(self.scaler.get_scale())


def is_fused_sgd(kind):
    return kind.optimizer is tp.optim.SGD and kind.options.get("fused", False)


def returning(optimizer):
    """Make ``step`` return something, as it does a closure's loss."""
    step = optimizer.step
    optimizer.step = lambda *args, **kwargs: (step(*args, **kwargs), "stepped")[1]
    return optimizer


@pytest.fixture(scope="module")
def run(randn, exact, stepped):
    def run(kinds, trace, ours, native, native_side=NativeSide):
        mine, theirs = Side(ours, kinds, randn), native_side(native, kinds, randn)
        for turns in trace:
            assert exact(mine.iterate(turns)) == exact(theirs.iterate(turns))
            assert mine.everything(exact, stepped) == theirs.everything(exact, stepped)
            if native_side is NativeSide:
                assert exact(ours.state_dict()) == exact(native.state_dict())

    return run


def both(rule):
    return GradScaler("cpu", **rule), tp.amp.GradScaler("cpu", **rule)


@EXAMPLES
@given(rule=RULES, trace=st.lists(TURNS, min_size=1, max_size=8))
def test_one_optimizer_goes_as_with_tensorplay(kind, rule, trace, run):
    run([kind], [[turn] for turn in trace], *both(rule))


@EXAMPLES
@given(rule=RULES, trace=st.lists(st.tuples(TURNS, TURNS), min_size=1, max_size=6))
@pytest.mark.parametrize("names", PAIRS, ids=" and ".join)
def test_two_optimizers_go_as_with_tensorplay(names, rule, trace, run, kinds):
    run([kinds[name] for name in names], trace, *both(rule))


@EXAMPLES
@given(
    scale=st.sampled_from([1.0, 0.1, 3.0, 2.0**16, 2.0**100]),
    trace=st.lists(TURNS, min_size=1, max_size=6),
)
def test_a_fixed_scale_goes_as_tensorplay_s_that_is_set_again_each_time(kind, scale, trace, run):
    ours = GradScaler(policy=FixedScale(scale))
    native = tp.amp.GradScaler("cpu", init_scale=scale)
    run([kind], [[turn] for turn in trace], ours, native, FixedNativeSide)


@settings(max_examples=15, deadline=None)
@given(
    rule=RULES,
    trace=st.lists(TURNS, min_size=2, max_size=6),
    exchange=st.lists(st.booleans(), min_size=6, max_size=6),
)
def test_state_dicts_exchanged_on_the_way_change_nothing(
    rule, trace, exchange, randn, exact, stepped, kinds
):
    ours, native = both(rule)
    mine, theirs = (
        Side(ours, [kinds["loop-Adam"]], randn),
        Side(native, [kinds["loop-Adam"]], randn),
    )
    for turn, exchanged in zip(trace, exchange, strict=False):
        assert exact(mine.iterate([turn])) == exact(theirs.iterate([turn]))
        if exchanged:
            our_state, native_state = ours.state_dict(), native.state_dict()
            ours.load_state_dict(native_state)
            native.load_state_dict(our_state)
        assert mine.everything(exact, stepped) == theirs.everything(exact, stepped)


@settings(max_examples=60, deadline=None)
@given(
    scale=st.floats(2.0**-100, 2.0**100, width=32),
    growth=st.floats(1.125, 64.0, width=32),
    backoff=st.floats(2.0**-6, 0.875, width=32),
    overflows=st.lists(st.booleans(), min_size=1, max_size=4),
)
def test_scales_and_factors_of_any_float32_move_as_tensorplay_s(scale, growth, backoff, overflows):
    rule = {
        "init_scale": scale,
        "growth_factor": growth,
        "backoff_factor": backoff,
        "growth_interval": 1,
    }
    ours, native = both(rule)
    parameter = tp.nn.Parameter(tp.ones(()))
    optimizer = tp.optim.SGD([parameter], lr=0.0)
    for overflow in overflows:
        for scaler in (ours, native):
            scaler.scale(parameter * 1.0)
            parameter.grad = tp.full((), math.nan if overflow else 1.0)
            scaler.step(optimizer)
            scaler.update()
        assert ours.state_dict() == native.state_dict()
