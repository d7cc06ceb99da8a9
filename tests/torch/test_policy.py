"""The scaler under every policy, and the values that it refuses."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradscaler import DynamicScale, FixedScale, ScaleState
from gradscaler.policies.checks import LARGEST_SCALE
from gradscaler.torch import GradScaler
from gradscaler.torch.operations import TorchOperations, _is_torch_s

INF, NAN = math.inf, math.nan
PRESETS = {
    "torch": DynamicScale.torch(),
    "tensorplay": DynamicScale.tensorplay(),
    "paddle": DynamicScale.paddle(),
    "keras": DynamicScale.keras(),
    "mindspore": DynamicScale.mindspore(),
    "flax": DynamicScale.flax(),
    "jmp": DynamicScale.jmp(),
    "apex": DynamicScale.apex(),
    "megatron": DynamicScale.megatron(),
}


class Loop:
    """Iterations that overflow or do not."""

    def __init__(self, scaler):
        self.scaler = scaler
        self.parameter = torch.nn.Parameter(torch.ones(()))
        self.optimizer = torch.optim.SGD([self.parameter], lr=1e-3)

    def run(self, trace):
        """One iteration a letter, "x" for an overflow; the scale after each."""
        scales = []
        for letter in trace:
            self.optimizer.zero_grad()
            factor = INF if letter == "x" else 2.0**-30
            self.scaler.scale(self.parameter * factor).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            scales.append(self.scaler.get_scale())
        return scales


def placed(**options):
    scaler = GradScaler(**options)
    scaler.scale(torch.ones(()))
    return scaler


# The scale goes where the policy says.


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    policy=st.builds(
        DynamicScale,
        init_scale=st.sampled_from([1.0, 1024.0, 2.0**-3]),
        growth_factor=st.sampled_from([2.0, 1.1, 8.0]),
        backoff_factor=st.sampled_from([0.5, 0.3]),
        growth_interval=st.integers(1, 3),
        hysteresis=st.integers(1, 3),
        hysteresis_reset=st.sampled_from(["finite_step", "finite_step_only", "growth"]),
        min_scale=st.sampled_from([2.0**-126, 2.0**-4]),
        max_scale=st.sampled_from([2.0**12, 2.0**20, LARGEST_SCALE]),
    ),
    trace=st.text("ox", min_size=1, max_size=12),
)
@pytest.mark.parametrize("path", ["on the host", "on an accelerator"])
def test_the_scale_is_what_the_policy_makes_of_the_trace(policy, trace, path, request):
    if path == "on an accelerator":
        request.getfixturevalue("off_the_host")
    state, expected = policy.init(), []
    for letter in trace:
        state = policy.update(state, letter == "x")
        expected.append(float(state.scale))
    assert Loop(GradScaler(policy=policy)).run(trace) == expected


@settings(deadline=None)
@given(
    scale=st.floats(2.0**-126, LARGEST_SCALE, width=32),
    finite_steps=st.one_of(st.integers(0, 5), st.just(2**31 - 1)),
    growth_factor=st.sampled_from([1.5, 2.0, 2.0**100]),
    backoff_factor=st.sampled_from([0.5, 0.75, 2.0**-100]),
    growth_interval=st.sampled_from([1, 2, 4, 2**40]),
    min_scale=st.sampled_from([2.0**-126, 1.0]),
    found_inf=st.booleans(),
)
def test_torch_s_kernel_between_bounds_is_the_rule(
    scale, finite_steps, growth_factor, backoff_factor, growth_interval, min_scale, found_inf
):
    policy = DynamicScale(
        2.0**16, growth_factor, backoff_factor, growth_interval, min_scale=min_scale
    )
    operations, cpu = TorchOperations(), torch.device("cpu")
    state = ScaleState(np.float32(max(scale, min_scale)), finite_steps, 0)
    placed = operations.place(state, cpu)
    assert _is_torch_s(policy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operations, "on_host", lambda tensor: False)
        moved = operations.advance(policy, placed, [{cpu: operations.scalar(found_inf, cpu)}])
    assert operations.read(moved) == policy.update(state, found_inf)


@pytest.mark.parametrize("policy", [*PRESETS.values(), FixedScale(128.0)], ids=[*PRESETS, "fixed"])
def test_each_policy_s_first_scale_is_the_scaler_s(policy):
    scaler = GradScaler(policy=policy)
    assert scaler.get_scale() == float(policy.init().scale)
    assert scaler.scale(torch.ones(())) == float(policy.init().scale)


def test_the_rule_of_megatron_backs_off_at_the_second_overflow_however_far_apart():
    scaler = GradScaler(policy=DynamicScale.megatron(initial_scale=8.0, growth_interval=100))
    assert Loop(scaler).run("xooxoox") == [8.0, 8.0, 8.0, 4.0, 4.0, 4.0, 2.0]


def test_the_rule_of_paddle_backs_off_at_the_second_overflow_in_a_row():
    scaler = GradScaler(policy=DynamicScale.paddle(init_loss_scaling=8.0))
    assert Loop(scaler).run("xoxxxx") == [8.0, 8.0, 8.0, 4.0, 4.0, 2.0]


def test_the_rule_of_keras_stops_at_one():
    scaler = GradScaler(policy=DynamicScale.keras(initial_scale=2.0))
    assert Loop(scaler).run("xxx") == [1.0, 1.0, 1.0]


def test_growth_that_would_pass_the_maximum_is_not_made():
    policy = DynamicScale(init_scale=4.0, growth_interval=1, max_scale=12.0)
    assert Loop(GradScaler(policy=policy)).run("ooo") == [8.0, 8.0, 8.0]


def test_an_overflow_under_a_fixed_scale_skips_the_step_and_no_more():
    loop = Loop(GradScaler(policy=FixedScale(128.0)))
    assert loop.run("xox") == [128.0] * 3
    assert loop.scaler.last_step(loop.optimizer).skipped
    assert loop.parameter == 1.0 - 1e-3 * 2.0**-30


@pytest.mark.parametrize("policy", PRESETS.values(), ids=PRESETS)
def test_the_getters_give_the_policy_s_parameters(policy):
    scaler = GradScaler(policy=policy)
    got = scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
    assert got == (policy.growth_factor, policy.backoff_factor, policy.growth_interval)


def test_a_setter_keeps_the_rest_of_the_policy():
    scaler = GradScaler(policy=DynamicScale(init_scale=8.0, hysteresis=2, min_scale=8.0))
    scaler.set_backoff_factor(0.25)
    assert Loop(scaler).run("xx") == [8.0, 8.0]
    scaler.set_growth_interval(1)
    assert Loop(scaler).run("oxx") == [16.0, 16.0, 8.0]


def test_a_setter_leaves_the_policy_that_was_handed_over():
    policy = DynamicScale()
    GradScaler(policy=policy).set_growth_factor(4.0)
    assert policy == DynamicScale()


@pytest.mark.parametrize("setter", ["growth_factor", "backoff_factor", "growth_interval"])
def test_a_fixed_scale_has_nothing_to_set(setter):
    scaler = GradScaler(policy=FixedScale(8.0))
    with pytest.raises(TypeError, match=setter):
        getattr(scaler, f"set_{setter}")(2)


def test_scalers_of_one_policy_move_apart():
    policy = DynamicScale(init_scale=8.0)
    first, second = GradScaler(policy=policy), GradScaler(policy=policy)
    Loop(first).run("x")
    assert (first.get_scale(), second.get_scale()) == (4.0, 8.0)


# Checkpoints.

CHECKPOINTS = {
    "state dict": lambda scaler: (
        loaded := GradScaler(policy=DynamicScale(hysteresis=3)),
        loaded.load_state_dict(scaler.state_dict()),
    )[0],
    "pickle": lambda scaler: pickle.loads(pickle.dumps(scaler)),
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("through", CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_hysteresis_survives_a_checkpoint(through):
    scaler = GradScaler(policy=DynamicScale(init_scale=8.0, hysteresis=3))
    Loop(scaler).run("xx")
    assert Loop(through(scaler)).run("x") == [4.0]


def test_a_state_dict_with_hysteresis_loads_into_torch_s():
    scaler = GradScaler(policy=DynamicScale(init_scale=8.0, hysteresis=3))
    Loop(scaler).run("ox")
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(scaler.state_dict())
    assert theirs.get_scale() == 8.0


def test_a_state_dict_without_hysteresis_has_torch_s_five_keys():
    assert len(GradScaler(policy=DynamicScale.keras()).state_dict()) == 5


def test_a_fixed_scale_saved_into_torch_s_scaler_never_moves_there():
    theirs = torch.amp.GradScaler("cpu", growth_interval=1)
    theirs.load_state_dict(GradScaler(policy=FixedScale(8.0)).state_dict())
    assert Loop(theirs).run("oxo") == [8.0] * 3


def test_a_fixed_scale_survives_a_state_dict():
    scaler = GradScaler(policy=FixedScale(1.0))
    scaler.load_state_dict(GradScaler(policy=FixedScale(8.0)).state_dict())
    assert Loop(scaler).run("oxo") == [8.0] * 3


def test_loading_torch_s_state_keeps_the_bounds_and_the_hysteresis():
    scaler = GradScaler(policy=DynamicScale(4.0, hysteresis=2, min_scale=4.0, max_scale=16.0))
    theirs = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    scaler.load_state_dict(theirs.state_dict())
    assert Loop(scaler).run("xxxxoooo") == [8.0, 4.0, 4.0, 4.0, 8.0, 16.0, 16.0, 16.0]


# Values that cannot be.

BAD_SCALES = [
    (0.0, ValueError),
    (-1.0, ValueError),
    (INF, ValueError),
    (NAN, ValueError),
    (1e39, ValueError),
    (2.0**-127, ValueError),
    ("8", TypeError),
    (True, TypeError),
    ([8.0], TypeError),
]


@pytest.mark.parametrize(("new_scale", "error"), BAD_SCALES)
def test_a_new_scale_that_cannot_be_is_refused_and_changes_nothing(new_scale, error, everything):
    scaler = placed()
    loop = Loop(scaler)
    scaler.scale(loop.parameter * 1.0).backward()
    scaler.unscale_(loop.optimizer)
    before = everything(scaler, loop.optimizer)
    with pytest.raises(error, match="new_scale"):
        scaler.update(new_scale)
    assert everything(scaler, loop.optimizer) == before


@pytest.mark.parametrize(
    "new_scale",
    [
        torch.tensor([1.0, 2.0]),
        torch.tensor(INF),
        torch.tensor(0.0),
        torch.tensor(8.0, requires_grad=True),
        torch.tensor(8.0, device="meta"),
    ],
    ids=["two elements", "inf", "zero", "requires grad", "another device"],
)
def test_a_new_scale_tensor_that_cannot_be_is_refused(new_scale):
    scaler = placed()
    with pytest.raises(ValueError, match="new_scale"):
        scaler.update(new_scale)
    assert scaler.get_scale() == 2.0**16


@pytest.mark.parametrize(
    "new_scale", [torch.tensor([1.0, 2.0]), torch.tensor(8.0, requires_grad=True)]
)
def test_torch_refuses_such_a_tensor_with_an_exception_that_ours_is_too(new_scale):
    theirs = torch.amp.GradScaler("cpu")
    theirs.scale(torch.ones(()))
    with pytest.raises(AssertionError) as error:
        theirs.update(new_scale)
    with pytest.raises(type(error.value)):
        placed(device="cpu").update(new_scale)


@pytest.mark.parametrize("new_scale", [1.0, 32.0])
def test_a_new_scale_outside_the_policy_s_bounds_is_refused(new_scale):
    scaler = placed(policy=DynamicScale(init_scale=8.0, min_scale=4.0, max_scale=16.0))
    with pytest.raises(ValueError, match="new_scale"):
        scaler.update(new_scale)
    assert scaler.get_scale() == 8.0


def test_a_new_scale_under_a_fixed_scale_is_kept():
    loop = Loop(placed(policy=FixedScale(8.0)))
    loop.scaler.update(4.0)
    assert loop.run("ox") == [4.0, 4.0]


BAD_STATES = [
    *(("scale", value, error) for value, error in BAD_SCALES),
    ("scale", torch.ones(2), (ValueError, TypeError)),
    ("growth_factor", 0.5, ValueError),
    ("growth_factor", NAN, ValueError),
    ("growth_factor", "2", TypeError),
    ("backoff_factor", 1.5, ValueError),
    ("backoff_factor", 0.0, ValueError),
    ("backoff_factor", None, TypeError),
    ("growth_interval", 0, ValueError),
    ("growth_interval", 2000.5, TypeError),
    ("_growth_tracker", -1, ValueError),
    ("_growth_tracker", 0.5, TypeError),
    ("_growth_tracker", None, TypeError),
    ("_growth_tracker", 2**40, ValueError),
    ("_nonfinite_steps", -1, ValueError),
    ("_nonfinite_steps", "1", TypeError),
    ("_nonfinite_steps", 2**40, ValueError),
]


@pytest.mark.parametrize("make", [GradScaler, placed], ids=["lazy", "placed"])
@pytest.mark.parametrize(("key", "value", "error"), BAD_STATES)
def test_a_state_that_cannot_be_is_refused_by_key_and_changes_nothing(
    make, key, value, error, everything
):
    scaler = make(policy=DynamicScale(hysteresis=2))
    good = {**scaler.state_dict(), "scale": 8.0, "growth_interval": 7, "_growth_tracker": 3}
    before = everything(scaler)
    with pytest.raises(error, match=key):
        scaler.load_state_dict({**good, key: value})
    assert everything(scaler) == before
    assert scaler.scale(torch.ones(())) == 2.0**16


@pytest.mark.parametrize("make", [GradScaler, placed], ids=["lazy", "placed"])
@pytest.mark.parametrize("missing", [*GradScaler().state_dict()])
def test_a_state_without_one_of_the_keys_is_refused_by_key_and_changes_nothing(
    make, missing, everything
):
    scaler = make()
    state = {**scaler.state_dict(), "scale": 8.0, "growth_interval": 7, "_growth_tracker": 3}
    del state[missing]
    before = everything(scaler)
    with pytest.raises(KeyError, match=missing):
        scaler.load_state_dict(state)
    assert everything(scaler) == before


@pytest.mark.parametrize("state", [None, 8.0, [("scale", 8.0)]])
def test_what_is_no_state_dict_is_refused(state):
    with pytest.raises(TypeError, match="state_dict"):
        GradScaler().load_state_dict(state)


def test_a_state_outside_the_policy_s_bounds_is_refused():
    scaler = GradScaler(policy=DynamicScale(init_scale=8.0, min_scale=4.0))
    with pytest.raises(ValueError, match="scale"):
        scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0})
    assert scaler.get_scale() == 8.0


def test_a_state_of_tensors_and_numpy_numbers_is_taken():
    scaler = GradScaler()
    state = scaler.state_dict()
    scaler.load_state_dict({key: torch.tensor(value).numpy()[()] for key, value in state.items()})
    assert scaler.state_dict() == state
