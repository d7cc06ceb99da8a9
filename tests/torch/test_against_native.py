"""gradscaler and torch.amp.GradScaler through the same traces, bit for bit after every step."""

import math
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradscaler.torch import GradScaler
from tests.support.chosen import examples
from tests.support.eager import library
from tests.support.eager.traces import PAIRED_TRACES, TRACES, TorchTurn, rules, run_by_rule

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


RULES = rules(largest_scale=2.0**126)


@settings(max_examples=examples(10))
@given(rule=RULES, trace=TRACES)
@pytest.mark.parametrize("kind", KINDS)
def test_one_optimizer_goes_as_with_torch(kind, rule, trace):
    run_by_rule([KINDS[kind]], rule, trace)


@settings(max_examples=examples(8))
@given(rule=RULES, trace=PAIRED_TRACES)
@pytest.mark.parametrize("kinds", PAIRS, ids=" and ".join)
def test_two_optimizers_go_as_with_torch(kinds, rule, trace):
    run_by_rule([KINDS[kind] for kind in kinds], rule, trace)


@settings(
    max_examples=examples(8),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(rule=RULES, trace=TRACES)
@pytest.mark.parametrize("kind", ["loop-SGD", "foreach-Adam", "fused-AdamW", "fused-SGD"])
def test_the_code_for_accelerators_goes_as_torch_too(kind, rule, trace, off_the_host):
    run_by_rule([KINDS[kind]], rule, trace)


@settings(max_examples=examples(8))
@given(rule=RULES, trace=TRACES, exchange=st.sets(st.integers(0, 7)))
def test_state_dicts_exchanged_on_the_way_change_nothing(rule, trace, exchange):
    run_by_rule([KINDS["foreach-Adam"]], rule, trace, exchange=exchange)


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

    def everything(self):
        stepped = [library.stepped(optimizer) for optimizer in self.optimizers]
        return library.exact(self.scaler.state_dict()), stepped


@settings(max_examples=examples(60))
@given(calls=st.lists(CALLS, max_size=25))
def test_calls_in_any_order_go_or_raise_as_with_torch(calls):
    ours, native = (
        AnyOrder(kind("cpu", init_scale=64.0, growth_interval=2), ["loop-SGD", "fused-Adam"])
        for kind in (GradScaler, torch.amp.GradScaler)
    )
    pending = set()  # native divides these by the next scale, or twice
    for call in calls:
        if call[0] == "update" and pending:
            return
        if call[0] in ("backward", "unscale"):
            pending.add(call[1])
        elif call[0] == "step":
            pending.discard(call[1])
        mine, theirs = ours.raised_by(call), native.raised_by(call)
        assert isinstance(mine, type(theirs))
        assert ours.everything() == native.everything()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("kind", KINDS)
def test_one_optimizer_goes_as_with_torch_on_cuda(kind):
    rule = {"init_scale": 1024.0, "growth_interval": 2}
    overflows = [None, math.inf, None, None, None, math.nan]
    trace = [
        [TorchTurn(i, overflow, i % 3, None, 1, unscale=i % 2 == 0, clip=False, step=True)]
        for i, overflow in enumerate(overflows)
    ]
    with torch.device("cuda"):
        run_by_rule([KINDS[kind]], rule, trace, device="cuda")
