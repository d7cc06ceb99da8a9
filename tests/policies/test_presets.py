"""Each preset against its framework's documented defaults, and against that framework's own rule.

The rules are written out here one by one, as each framework states its own: in plain Python, with
its own counters, and blind to gradscaler's.
"""

import dataclasses
import functools
import inspect
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradscaler import DynamicScale

SMALLEST_NORMAL = 2.0**-126
LARGEST = (2.0 - 2.0**-23) * 2.0**127

# The documented values that differ from the first entry.
RULES = {
    "torch": {
        "init_scale": 65536.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "hysteresis": 1,
        "hysteresis_reset": "finite_step",
        "min_scale": SMALLEST_NORMAL,
        "max_scale": LARGEST,
        "growth_tiers": (),
    },
    "tensorplay": {},
    "paddle": {"init_scale": 32768.0, "growth_interval": 1000, "hysteresis": 2},
    "keras": {"init_scale": 32768.0},
    "tf_keras": {"init_scale": 32768.0, "min_scale": 1.0},
    "mindspore": {"init_scale": 16777216.0, "min_scale": 1.0},
    "flax": {"growth_interval": 2001},
    "jmp": {"init_scale": 32768.0, "min_scale": 1.0},
    "apex": {"hysteresis_reset": "finite_step_only"},
    "megatron": {
        "init_scale": 4294967296.0,
        "growth_interval": 1000,
        "hysteresis": 2,
        "hysteresis_reset": "growth",
        "min_scale": 1.0,
    },
    "deepspeed": {
        "growth_interval": 1001,
        "hysteresis": 2,
        "hysteresis_reset": "growth",
        "min_scale": 1.0,
    },
}

# The parameters in the frameworks' own spelling and order, each with a value that cannot work.
RULE = {"growth_factor": 1.0, "backoff_factor": 1.5, "growth_interval": 0}
TORCH = {"init_scale": -1.0, **RULE}
BAD_PARAMETERS = {
    "torch": TORCH,
    "tensorplay": TORCH,
    "paddle": {
        "init_loss_scaling": -1.0,
        "incr_ratio": 1.0,
        "decr_ratio": 1.5,
        "incr_every_n_steps": 0,
        "decr_every_n_nan_or_inf": 0,
    },
    "keras": {"initial_scale": -1.0, "dynamic_growth_steps": 0},
    "tf_keras": {"initial_scale": -1.0, "dynamic_growth_steps": 0},
    "mindspore": {"init_loss_scale": -1.0, "scale_factor": 1.0, "scale_window": 0},
    "flax": {**RULE, "scale": -1.0, "minimum_scale": 0.0},
    "jmp": {"loss_scale": -1.0, "period": 0, "factor": 1.0, "min_loss_scale": 0.0},
    "apex": {**TORCH, "hysteresis": 0},
    "megatron": {"initial_scale": -1.0, "min_scale": 0.0, **RULE, "hysteresis": 0},
    "deepspeed": {
        "init_scale": -1.0,
        "scale_window": 0,
        "min_scale": 0.0,
        "delayed_shift": 0,
        "consecutive_hysteresis": "no",
    },
}

runs = st.tuples(st.sampled_from(".x"), st.integers(1, 12)).map(lambda run: run[0] * run[1])
traces = st.lists(runs, max_size=8).map("".join)
intervals = st.integers(1, 6)
hystereses = st.integers(1, 4)
powers_of_two = st.integers(0, 30).map(lambda exponent: 2.0**exponent)


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


def scales(policy, trace):
    state = policy.init()
    visited = []
    for step in trace:
        state = policy.update(state, step == "x")
        visited.append(float(state.scale))
    return visited


@pytest.mark.parametrize("name", RULES)
def test_a_preset_has_the_defaults_that_its_framework_documents(name):
    assert dataclasses.asdict(getattr(DynamicScale, name)()) == RULES["torch"] | RULES[name]


@pytest.mark.parametrize("name", RULES)
def test_a_presets_parameters_are_its_frameworks_in_the_frameworks_order(name):
    assert list(inspect.signature(getattr(DynamicScale, name)).parameters) == list(
        BAD_PARAMETERS[name]
    )


@pytest.mark.parametrize(
    ("name", "parameter"),
    [(name, parameter) for name in BAD_PARAMETERS for parameter in BAD_PARAMETERS[name]],
)
def test_a_presets_error_names_the_parameter_as_the_caller_spelt_it(name, parameter):
    value = BAD_PARAMETERS[name][parameter]
    error = TypeError if isinstance(value, str) else ValueError
    with pytest.raises(error, match=rf"(?<!\w){parameter}\b") as caught:
        getattr(DynamicScale, name)(**{parameter: value})
    assert repr(value) in str(caught.value)


def test_a_presets_error_shows_a_value_that_reads_like_a_parameter_as_it_is():
    value = "growth_factor, got init_scale"
    with pytest.raises(TypeError) as caught:
        DynamicScale.paddle(incr_ratio=value)
    assert str(caught.value) == f"incr_ratio must be a number, got {value!r} (str)"


@given(st.sampled_from(sorted(RULES)), traces)
def test_every_presets_scale_stays_finite_and_within_its_bounds(name, trace):
    policy = getattr(DynamicScale, name)()
    for scale in scales(policy, trace * 12):
        assert math.isfinite(scale)
        assert policy.min_scale <= scale <= policy.max_scale


# PyTorch and TensorPlay.


def test_torchs_preset_has_the_defaults_of_torchs_own_scaler(torch):
    theirs = inspect.signature(torch.amp.GradScaler).parameters
    for name, ours in inspect.signature(DynamicScale.torch).parameters.items():
        assert ours.default == theirs[name].default


def torchs_own(torch, policy, trace):
    """Scale and growth tracker after each step, by the operator that torch's scaler calls."""
    scale = torch.tensor(policy.init_scale, dtype=torch.float32)
    tracker = torch.zeros((), dtype=torch.int32)
    visited = []
    for step in trace:
        torch._amp_update_scale_(
            scale,
            tracker,
            torch.tensor(float(step == "x")),
            policy.growth_factor,
            policy.backoff_factor,
            policy.growth_interval,
        )
        visited.append((scale.item(), tracker.item()))
    return visited


@given(
    init=st.floats(1.0, 2.0**127, width=32),
    growth=st.floats(1.0, 2.0**40, width=32, exclude_min=True),
    backoff=st.floats(0.125, 1.0, width=32, exclude_max=True),
    interval=intervals,
    trace=st.text(".x", max_size=40),
)
def test_torchs_preset_moves_the_scale_as_torchs_own_operator(
    torch, init, growth, backoff, interval, trace
):
    policy = DynamicScale.torch(init, growth, backoff, interval)
    state, visited = policy.init(), []
    for step in trace:
        state = policy.update(state, step == "x")
        visited.append((float(state.scale), state.finite_steps))
    assert visited == torchs_own(torch, policy, trace)


@given(
    init=st.floats(2.0**-60, 2.0**60),
    growth=st.floats(1 + 2.0**-20, 8.0),
    backoff=st.floats(0.125, 1 - 2.0**-20),
    step=st.sampled_from(".x"),
)
def test_a_factor_that_float32_has_to_round_moves_the_scale_within_rounding_of_torchs(
    torch, init, growth, backoff, step
):
    policy = DynamicScale.torch(init, growth, backoff, 1)
    ((theirs, _),) = torchs_own(torch, policy, step)
    # Two roundings of ours and one of theirs, each by at most one part in 2**24.
    assert scales(policy, step) == pytest.approx([theirs], rel=3.01 * 2.0**-24, abs=0)


def test_tensorplays_preset_is_torchs():
    assert DynamicScale.tensorplay(8.0, 4.0, 0.25, 3) == DynamicScale.torch(8.0, 4.0, 0.25, 3)


# Paddle.


def paddles_rule(init, every_n_steps, every_n_nan_or_inf, trace):
    scale, good, bad, visited = init, 0, 0, []
    for step in trace:
        if step == "x":
            good, bad = 0, bad + 1
            if bad == every_n_nan_or_inf:
                scale, bad = scale * 0.5, 0
        else:
            good, bad = good + 1, 0
            if good == every_n_steps:
                scale, good = scale * 2.0, 0
        visited.append(scale)
    return visited


# Keras.


def keras_rule(init, growth_steps, trace, floor=0.0):
    scale, counter, visited = init, 0, []
    for step in trace:
        if step == "x":
            scale, counter = max(scale / 2, floor), 0
        elif counter + 1 >= growth_steps:
            scale, counter = scale * 2, 0
        else:
            counter += 1
        visited.append(scale)
    return visited


# MindSpore.


def mindspores_rule(init, factor, window, trace):
    """It keeps no count of finite steps: it looks at when the last overflow was."""
    scale, last_overflow, visited = init, 0, []
    for iteration, step in enumerate(trace, start=1):
        if step == "x":
            scale, last_overflow = max(scale / factor, 1), iteration
        elif (iteration - last_overflow) % window == 0:
            scale *= factor
        visited.append(scale)
    return visited


# flax.


def flaxs_rule(init, interval, trace):
    scale, fin_steps, visited = init, 0, []
    for step in trace:
        grow = fin_steps == interval
        if step == "x":
            scale *= 0.5
        elif grow:
            scale *= 2.0
        fin_steps = 0 if grow or step == "x" else fin_steps + 1
        visited.append(scale)
    return visited


# jmp.


def jmps_rule(init, period, factor, trace):
    scale, counter, visited = init, 0, []
    for step in trace:
        if step == "x":
            counter = 0
            scale = max(1, scale / factor)
        else:
            counter += 1
            if counter == period:
                counter = 0
                scale = scale * factor if scale * factor <= LARGEST else scale
        visited.append(scale)
    return visited


# Apex and Megatron.


def apex_rule(init, interval, hysteresis, trace):
    scale, growth_tracker, hysteresis_tracker, visited = init, 0, hysteresis, []
    for step in trace:
        if step == "x":
            growth_tracker = 0
            hysteresis_tracker -= 1
            if hysteresis_tracker <= 0:
                scale *= 0.5
        else:
            hysteresis_tracker = hysteresis
            growth_tracker += 1
            if growth_tracker == interval:
                scale, growth_tracker = scale * 2.0, 0
        visited.append(scale)
    return visited


def megatrons_rule(init, interval, hysteresis, trace):
    scale, growth_tracker, hysteresis_tracker, visited = init, 0, hysteresis, []
    for step in trace:
        if step == "x":
            growth_tracker = 0
            hysteresis_tracker -= 1
            if hysteresis_tracker <= 0:
                scale = max(scale * 0.5, 1.0)
        else:
            growth_tracker += 1
            if growth_tracker == interval:
                scale, growth_tracker, hysteresis_tracker = scale * 2.0, 0, hysteresis
        visited.append(scale)
    return visited


# DeepSpeed.


def deepspeeds_rule(init, window, delayed_shift, consecutive, trace):
    """Like MindSpore's, but it divides the steps after the one that followed the last overflow."""
    scale, last_overflow, tolerated, visited = init, -1, delayed_shift - 1, []
    for iteration, step in enumerate(trace):
        stable = iteration - last_overflow - 1
        grows = stable > 0 and stable % window == 0
        if step == "x":
            last_overflow = iteration
            if tolerated == 0:
                scale = max(scale / 2, 1.0)
            tolerated = max(tolerated - 1, 0)
        else:
            if consecutive or grows:
                tolerated = delayed_shift - 1
            if grows:
                scale *= 2
        visited.append(scale)
    return visited


# The presets beside those rules.


def with_hysteresis(preset):
    return lambda init, interval, hysteresis: preset(
        init, growth_interval=interval, hysteresis=hysteresis
    )


# Windows, and traces with at most twice as many finite steps in a row: one growth without an
# overflow. The second would come one step sooner in DeepSpeed.
WINDOWS = st.integers(6, 12)
ONE_GROWTH_A_RUN = st.lists(
    st.tuples(st.integers(0, 12), st.integers(1, 5)).map(lambda run: "." * run[0] + "x" * run[1]),
    max_size=8,
).map("".join)
THREE = (powers_of_two, intervals, hystereses)
SIXTY = st.text(".x", max_size=60)
# A preset, the framework's rule, the arguments of both, and traces without an overflowing scale.
FOLLOWED = {
    "paddle": (
        lambda init, *counts: DynamicScale.paddle(init, 2.0, 0.5, *counts),
        paddles_rule,
        THREE,
        SIXTY,
    ),
    "keras": (DynamicScale.keras, keras_rule, (powers_of_two, intervals), traces),
    "tf_keras": (
        DynamicScale.tf_keras,
        functools.partial(keras_rule, floor=1.0),
        (powers_of_two, intervals),
        traces,
    ),
    "mindspore": (
        DynamicScale.mindspore,
        mindspores_rule,
        (powers_of_two, st.sampled_from([2, 4, 8]), intervals),
        st.text(".x", max_size=30),
    ),
    "flax": (
        lambda init, interval: DynamicScale.flax(growth_interval=interval, scale=init),
        flaxs_rule,
        (powers_of_two, intervals),
        traces,
    ),
    "jmp": (
        DynamicScale.jmp,
        jmps_rule,
        (powers_of_two, intervals, st.sampled_from([2, 16])),
        traces,
    ),
    "apex": (with_hysteresis(DynamicScale.apex), apex_rule, THREE, SIXTY),
    "megatron": (with_hysteresis(DynamicScale.megatron), megatrons_rule, THREE, SIXTY),
    "deepspeed": (
        lambda init, window, *hysteresis: DynamicScale.deepspeed(init, window, 1.0, *hysteresis),
        deepspeeds_rule,
        (powers_of_two, WINDOWS, hystereses, st.booleans()),
        ONE_GROWTH_A_RUN,
    ),
}


@pytest.mark.parametrize(("preset", "rule", "given_to", "traced"), FOLLOWED.values(), ids=FOLLOWED)
@given(data=st.data())
def test_a_preset_follows_its_frameworks_rule(preset, rule, given_to, traced, data):
    parameters, trace = data.draw(st.tuples(*given_to)), data.draw(traced)
    assert scales(preset(*parameters), trace) == rule(*parameters, trace)


ENDS = {
    "paddle halves at the second non-finite step in a row": (
        DynamicScale.paddle(), "x.xxxx", [32768.0, 32768.0, 32768.0, 16384.0, 16384.0, 8192.0]
    ),
    "paddle doubles at the 1000th finite step": (
        DynamicScale.paddle(), "." * 1000, [32768.0, 65536.0]
    ),
    "keras halves below 1": (DynamicScale.keras(2.0), "xxxx", [1.0, 0.5, 0.25, 0.125]),
    "keras' scale stays a normal float32": (
        DynamicScale.keras(2.0**-125), "xxx", [2.0**-126] * 3
    ),
    "tf_keras never halves below 1": (DynamicScale.tf_keras(4.0), "xxxx", [2.0, 1.0, 1.0, 1.0]),
    "tf_keras' floor holds for a scale that is not a power of two": (
        DynamicScale.tf_keras(3.0), "xx", [1.5, 1.0]
    ),
    "mindspore never falls below 1": (DynamicScale.mindspore(), "x" * 30, [1.0] * 7),
    "the example of mindspore.amp.DynamicLossScaler": (
        DynamicScale.mindspore(2**10, 2, 1), "x", [512.0]
    ),
    "flax grows one step late": (
        DynamicScale.flax(growth_interval=3, scale=8.0),
        "........", [8.0, 8.0, 8.0, 16.0, 16.0, 16.0, 16.0, 32.0]
    ),
    "flax never falls below its minimum_scale": (
        DynamicScale.flax(scale=8.0, minimum_scale=3.0), "xxx", [4.0, 3.0, 3.0]
    ),
    "megatron halves at the second non-finite step, however late it comes": (
        DynamicScale.megatron(), "x" + "." * 999 + "xx", [2.0**32, 2.0**31, 2.0**30]
    ),
    "megatron doubles after 1000 finite steps, and tolerates again": (
        DynamicScale.megatron(), "x" + "." * 1000 + "xx", [2.0**32, 2.0**33, 2.0**33, 2.0**32]
    ),
    "deepspeed doubles at the 1001st finite step": (
        DynamicScale.deepspeed(), "." * 1001, [2.0**16, 2.0**17]
    ),
    "deepspeed's preset doubles again 1001 steps later, where DeepSpeed takes 1000": (
        DynamicScale.deepspeed(), "." * 2002, [2.0**17, 2.0**18]
    ),
    "deepspeed halves at the second non-finite step, however late it comes": (
        DynamicScale.deepspeed(), "x" + "." * 1000 + "xx", [2.0**16, 2.0**15, 2.0**14]
    ),
    "deepspeed halves at the second in a row, with consecutive_hysteresis": (
        DynamicScale.deepspeed(consecutive_hysteresis=True),
        "x.xxx", [2.0**16, 2.0**16, 2.0**16, 2.0**15, 2.0**14]
    ),
}  # fmt: skip


@pytest.mark.parametrize(("policy", "trace", "last"), ENDS.values(), ids=ENDS)
def test_a_trace_ends_in_the_scales_that_the_framework_documents(policy, trace, last):
    assert scales(policy, trace)[-len(last) :] == last


def test_flax_takes_none_for_its_default_minimum_scale():
    assert DynamicScale.flax(minimum_scale=None) == DynamicScale.flax()
