"""gradscaler and tensorplay.amp.GradScaler through the same traces, bit for bit at every step."""

import math

import pytest
import tensorplay as tp
from hypothesis import given, settings
from hypothesis import strategies as st

from gradscaler import FixedScale
from gradscaler.tensorplay import GradScaler
from tests.support.chosen import examples
from tests.support.eager.traces import PAIRED_TRACES, TRACES, NativeSide, rules, run, run_by_rule

PAIRS = [
    ("loop-SGD", "loop-Adam"),
    ("foreach-AdamW", "fused-AdamW"),
    ("fused-SGD", "loop-RMSprop"),
    ("fused-Adagrad", "Muon"),
]
EXAMPLES = settings(max_examples=examples(6))


RULES = rules(largest_scale=2.0**100)  # clear of the bounds, which TensorPlay's scaler lacks


class FixedNativeSide(NativeSide):
    """TensorPlay's, its scale set by hand where it would have moved."""

    def update(self):
        self.scaler.update(self.scaler.get_scale())


@EXAMPLES
@given(rule=RULES, trace=TRACES)
def test_one_optimizer_goes_as_with_tensorplay(kind, rule, trace):
    run_by_rule([kind], rule, trace)


@EXAMPLES
@given(rule=RULES, trace=PAIRED_TRACES)
@pytest.mark.parametrize("names", PAIRS, ids=" and ".join)
def test_two_optimizers_go_as_with_tensorplay(names, rule, trace, kinds):
    run_by_rule([kinds[name] for name in names], rule, trace)


@EXAMPLES
@given(scale=st.sampled_from([1.0, 0.1, 3.0, 2.0**16, 2.0**100]), trace=TRACES)
def test_a_fixed_scale_goes_as_tensorplay_s_that_is_set_again_each_time(kind, scale, trace):
    ours = GradScaler(policy=FixedScale(scale))
    run([kind], trace, ours, tp.amp.GradScaler("cpu", init_scale=scale), FixedNativeSide)


@settings(max_examples=examples(15))
@given(rule=RULES, trace=TRACES, exchange=st.sets(st.integers(0, 7)))
def test_state_dicts_exchanged_on_the_way_change_nothing(rule, trace, exchange, kinds):
    run_by_rule([kinds["loop-Adam"]], rule, trace, exchange=exchange)


@settings(max_examples=examples(60))
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
    ours, native = (kind("cpu", **rule) for kind in (GradScaler, tp.amp.GradScaler))
    parameter = tp.nn.Parameter(tp.ones(()))
    optimizer = tp.optim.SGD([parameter], lr=0.0)
    for overflow in overflows:
        for scaler in (ours, native):
            scaler.scale(parameter * 1.0)
            parameter.grad = tp.full((), math.nan if overflow else 1.0)
            scaler.step(optimizer)
            scaler.update()
        assert ours.state_dict() == native.state_dict()
