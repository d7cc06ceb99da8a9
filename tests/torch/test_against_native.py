"""gradscaler and torch.amp.GradScaler through the same traces, bit for bit after every step."""

import math
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradscaler.torch import GradScaler

SHAPES = [(2, 3), (4,), ()]
BASES = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
}
WAYS = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
KINDS = {
    f"{way}-{name}": partial(optimizer, **options, **WAYS[way])
    for name, (optimizer, options) in BASES.items()
    for way in WAYS
    if (name, way) != ("RMSprop", "fused")
}
PAIRS = [
    ("loop-SGD", "loop-Adam"),
    ("foreach-AdamW", "fused-AdamW"),
    ("fused-Adam", "fused-Adagrad"),
    ("fused-SGD", "loop-RMSprop"),
]


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


RULES = st.fixed_dictionaries(
    {
        "init_scale": st.sampled_from([2.0**16, 1.0, 0.1, 3.0, 2.0**126]),
        "growth_factor": st.sampled_from([2.0, 4.0, 1.5]),
        "backoff_factor": st.sampled_from([0.5, 0.25, 0.75]),
        "growth_interval": st.integers(1, 3),
    }
)
TURNS = st.builds(
    Turn,
    seed=st.integers(0, 2**16),
    overflow=st.sampled_from([None, None, None, math.inf, -math.inf, math.nan]),
    where=st.integers(0, len(SHAPES) - 1),
    left_out=st.sampled_from([None, None, *range(len(SHAPES))]),
    passes=st.integers(1, 2),
    unscale=st.booleans(),
    clip=st.booleans(),
    step=st.sampled_from([True, True, True, False]),
)


class Side:
    """One of the two scalers, with parameters and optimizers of its own."""

    def __init__(self, scaler, kinds):
        self.scaler = scaler
        self.owned = []
        for kind in kinds:
            torch.manual_seed(0)
            owned = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
            self.owned.append((kind, owned, returning(KINDS[kind](owned))))

    def iterate(self, turns):
        """One iteration; what the calls returned."""
        for _, _, optimizer in self.owned:
            optimizer.zero_grad()
        for (kind, parameters, _), turn in zip(self.owned, turns, strict=True):
            for part in range(turn.passes):
                self.scaler.scale(loss(parameters, turn, part, kind)).backward()
        returned = []
        for (kind, parameters, optimizer), turn in zip(self.owned, turns, strict=True):
            if turn.unscale or turn.clip or not turn.step:
                self.scaler.unscale_(optimizer)
            if turn.clip:
                returned.append(torch.nn.utils.clip_grad_norm_(parameters, 0.5))
            if turn.step:
                returned.append(self.step(kind, optimizer, turn))
        self.scaler.update()
        return returned

    def step(self, kind, optimizer, turn):
        return self.scaler.step(optimizer)

    def everything(self, exact):
        scaler = self.scaler
        return exact(
            {
                "parameters": [parameters for _, parameters, _ in self.owned],
                "gradients": [[p.grad for p in parameters] for _, parameters, _ in self.owned],
                "optimizers": [optimizer.state_dict() for _, _, optimizer in self.owned],
                "scaler": scaler.state_dict(),
                "tensors": [scaler._scale, scaler._growth_tracker],
                "records": len(scaler._per_optimizer_states),
            }
        )


class NativeSide(Side):
    """Torch's, but for what its fused SGD does when its first step overflows.

    It then leaves the momentum uninitialised. gradscaler leaves it out, and so does not call
    ``optimizer.step``.
    """

    def step(self, kind, optimizer, turn):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        first = not optimizer.state
        overflow = not all(p.grad.isfinite().all() for p in parameters if p.grad is not None)
        returned = super().step(kind, optimizer, turn)
        if kind == "fused-SGD" and first and overflow:
            optimizer.state.clear()
            return None
        return returned


def returning(optimizer):
    """Make ``step`` return something, as it does a closure's loss."""
    step = optimizer.step
    optimizer.step = lambda *args, **kwargs: (step(*args, **kwargs), "stepped")[1]
    return optimizer


def loss(parameters, turn, part, kind):
    """A loss with random gradients, into one of which the first part puts what the turn says."""
    torch.manual_seed(turn.seed + part)
    total = torch.zeros(())
    for i, parameter in enumerate(parameters):
        gradient = torch.randn(parameter.shape)
        if i == turn.where and part == 0 and turn.overflow is not None:
            gradient.view(-1)[-1] = turn.overflow
        if i != turn.left_out or kind == "fused-SGD":  # which wants all gradients at its first step
            total = total + (parameter * gradient).sum()
    return total / turn.passes


def run(kinds, rule, trace, exact):
    device = torch.get_default_device().type
    ours = Side(GradScaler(device, **rule), kinds)
    native = NativeSide(torch.amp.GradScaler(device, **rule), kinds)
    for turns in trace:
        assert exact(ours.iterate(turns)) == exact(native.iterate(turns))
        assert ours.everything(exact) == native.everything(exact)


@settings(max_examples=10, deadline=None)
@given(rule=RULES, trace=st.lists(TURNS, min_size=1, max_size=8))
@pytest.mark.parametrize("kind", KINDS)
def test_one_optimizer_goes_as_with_torch(kind, rule, trace, exact):
    run([kind], rule, [[turn] for turn in trace], exact)


@settings(max_examples=8, deadline=None)
@given(rule=RULES, trace=st.lists(st.tuples(TURNS, TURNS), min_size=1, max_size=6))
@pytest.mark.parametrize("kinds", PAIRS, ids=" and ".join)
def test_two_optimizers_go_as_with_torch(kinds, rule, trace, exact):
    run(kinds, rule, trace, exact)


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(rule=RULES, trace=st.lists(TURNS, min_size=1, max_size=8))
@pytest.mark.parametrize("kind", ["loop-SGD", "foreach-Adam", "fused-AdamW", "fused-SGD"])
def test_the_code_for_accelerators_goes_as_torch_too(kind, rule, trace, exact, off_the_host):
    run([kind], rule, [[turn] for turn in trace], exact)


@settings(max_examples=8, deadline=None)
@given(
    rule=RULES,
    trace=st.lists(TURNS, min_size=2, max_size=6),
    exchange=st.lists(st.booleans(), min_size=6, max_size=6),
)
def test_state_dicts_exchanged_on_the_way_change_nothing(rule, trace, exchange, exact):
    ours = Side(GradScaler("cpu", **rule), ["foreach-Adam"])
    native = NativeSide(torch.amp.GradScaler("cpu", **rule), ["foreach-Adam"])
    for turn, exchanged in zip(trace, exchange, strict=False):
        assert exact(ours.iterate([turn])) == exact(native.iterate([turn]))
        if exchanged:
            mine, theirs = ours.scaler.state_dict(), native.scaler.state_dict()
            ours.scaler.load_state_dict(theirs)
            native.scaler.load_state_dict(mine)
        assert ours.everything(exact) == native.everything(exact)


CALLS = st.one_of(
    st.tuples(st.just("backward"), st.integers(0, 1), st.sampled_from([1.0, -0.5, math.inf])),
    st.tuples(st.sampled_from(["zero", "unscale", "step", "step"]), st.integers(0, 1)),
    st.tuples(st.just("update")),
    st.tuples(st.just("update"), st.sampled_from([8.0, 0.5])),
    st.tuples(st.just("growth"), st.sampled_from([4.0, 2.0])),
    st.tuples(st.just("reload")),
)


class AnyOrder:
    """A scaler and two optimizers whose methods are called in whatever order."""

    def __init__(self, scaler, kinds):
        torch.manual_seed(0)
        self.scaler = scaler
        self.parameters = [torch.nn.Parameter(torch.randn(3)) for _ in kinds]
        for parameter in self.parameters:
            parameter.grad = torch.zeros(3)
        self.optimizers = [KINDS[k]([p]) for k, p in zip(kinds, self.parameters, strict=True)]

    def call(self, name, *arguments):
        if name == "backward":
            index, factor = arguments
            self.scaler.scale((self.parameters[index] * factor).sum()).backward()
        elif name == "zero":
            self.parameters[arguments[0]].grad.zero_()
        elif name == "unscale":
            self.scaler.unscale_(self.optimizers[arguments[0]])
        elif name == "step":
            self.scaler.step(self.optimizers[arguments[0]])
        elif name == "growth":
            self.scaler.set_growth_factor(*arguments)
        elif name == "reload":
            self.scaler.load_state_dict(self.scaler.state_dict())
        else:
            self.scaler.update(*arguments)

    def raised_by(self, call):
        try:
            self.call(*call)
        except (RuntimeError, AssertionError) as error:
            return error
        return None

    def everything(self, exact):
        gradients = [parameter.grad for parameter in self.parameters]
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        return exact([self.parameters, gradients, optimizers, self.scaler.state_dict()])


@settings(max_examples=60, deadline=None)
@given(calls=st.lists(CALLS, max_size=25))
def test_calls_in_any_order_go_or_raise_as_with_torch(calls, exact):
    ours, native = (
        AnyOrder(kind("cpu", init_scale=64.0, growth_interval=2), ["loop-SGD", "fused-Adam"])
        for kind in (GradScaler, torch.amp.GradScaler)
    )
    for call in calls:
        mine, theirs = ours.raised_by(call), native.raised_by(call)
        assert isinstance(mine, type(theirs))
        assert ours.everything(exact) == native.everything(exact)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("kind", KINDS)
def test_one_optimizer_goes_as_with_torch_on_cuda(kind, exact):
    rule = {"init_scale": 1024.0, "growth_interval": 2}
    overflows = [None, math.inf, None, None, None, math.nan]
    trace = [
        [Turn(i, overflow, i % 3, None, 1, unscale=i % 2 == 0, clip=False, step=True)]
        for i, overflow in enumerate(overflows)
    ]
    with torch.device("cuda"):
        run([kind], rule, trace, exact)
