"""One rule for the host and for every tensor library: the same bits, and no value read."""

import struct
import sys
import types
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradscaler import DynamicScale, ScaleState

RESETS = ("finite_step", "finite_step_only", "growth")

# Factors that float32 has to round, and scales up to either end, where moves are cut short.
policies = st.builds(
    DynamicScale,
    init_scale=st.floats(2.0**-125, 2.0**127),
    growth_factor=st.floats(1 + 2.0**-20, 2.0**20),
    backoff_factor=st.floats(2.0**-20, 1 - 2.0**-20),
    growth_interval=st.integers(1, 4),
    hysteresis=st.integers(1, 4),
    hysteresis_reset=st.sampled_from(RESETS),
)
traces = st.lists(st.booleans(), max_size=30)
batches = st.integers(1, 4).flatmap(
    lambda n: st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=1, max_size=30)
)


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


def bits(scale):
    return struct.pack("<f", float(scale))


def as_bits(state):
    """A state as the bytes of its scale and two integers."""
    return bits(state.scale), int(state.finite_steps), int(state.nonfinite_steps)


def on_host(policy, trace):
    state = policy.init()
    visited = []
    for found_inf in trace:
        state = policy.update(state, found_inf)
        visited.append(as_bits(state))
    return visited


def torch_state(torch, policy, shape=(), counter=None):
    return ScaleState(
        torch.full(shape, policy.init_scale, dtype=torch.float32),
        torch.zeros(shape, dtype=counter or torch.int32),
        torch.zeros(shape, dtype=counter or torch.int32),
    )


def numpy_state(policy, shape, counter=np.int32):
    return ScaleState(
        np.full(shape, policy.init_scale, np.float32),
        np.zeros(shape, counter),
        np.zeros(shape, counter),
    )


def columns(states):
    """For each element of a batch, what it went through."""
    return [
        [as_bits(ScaleState(*(part[column] for part in state))) for state in states]
        for column in range(len(states[0].scale))
    ]


class Traced:
    """A tensor of no known library, as a tracer is: arithmetic and comparisons alone.

    A product with a Python float is rounded once, from float64: a library may do that.
    """

    def __init__(self, value):
        self.value = value

    def __add__(self, other):
        return Traced(self.value + untraced(other))

    def __mul__(self, other):
        with np.errstate(over="ignore"):
            return Traced(np.float32(float(self.value) * untraced(other)))

    def __ge__(self, other):
        return Traced(self.value >= untraced(other))

    def __le__(self, other):
        return Traced(self.value <= untraced(other))

    def __gt__(self, other):
        return Traced(self.value > untraced(other))

    def __bool__(self):
        raise AssertionError("a value was read on the host")

    __float__ = __int__ = __index__ = __bool__


def untraced(value):
    return value.value if isinstance(value, Traced) else value


def traced_where(condition, a, b):
    assert isinstance(condition, Traced)
    return Traced(untraced(a) if condition.value else untraced(b))


# PyTorch.


@settings(deadline=None)
@given(policies, traces)
def test_torch_gives_the_bits_of_the_host(torch, policy, trace):
    state = torch_state(torch, policy)
    visited = []
    for found_inf in trace:
        state = policy.update(state, torch.tensor(found_inf))
        visited.append(as_bits(state))
    assert visited == on_host(policy, trace)


@settings(deadline=None)
@given(policies, batches)
def test_a_batch_of_torch_scales_gives_each_the_bits_of_the_host(torch, policy, trace):
    state = torch_state(torch, policy, (len(trace[0]),))
    visited = []
    for found_inf in trace:
        state = policy.update(state, torch.tensor(found_inf))
        visited.append(state)
    assert columns(visited) == [on_host(policy, column) for column in zip(*trace, strict=True)]


@pytest.mark.parametrize("counter", ["int32", "int64"])
@pytest.mark.parametrize("reset", RESETS)
@pytest.mark.parametrize("found_inf", [True, False])
def test_torch_keeps_the_types_of_a_state(torch, counter, reset, found_inf):
    policy = DynamicScale(growth_interval=1, hysteresis_reset=reset)
    state = torch_state(torch, policy, counter=getattr(torch, counter))
    moved = policy.update(state, torch.tensor(found_inf))
    assert [part.dtype for part in moved] == [part.dtype for part in state]
    assert [part.shape for part in moved] == [(), (), ()]


@settings(deadline=None)
@given(policies, traces)
def test_torch_takes_a_bool_of_python_s(torch, policy, trace):
    state = torch_state(torch, policy)
    visited = []
    for found_inf in trace:
        state = policy.update(state, found_inf)
        assert state.scale.dtype == torch.float32
        visited.append(as_bits(state))
    assert visited == on_host(policy, trace)


def test_torch_tensors_are_not_changed_in_place(torch):
    policy = DynamicScale(growth_interval=1)
    state = torch_state(torch, policy)
    policy.update(state, torch.tensor(False))
    assert [part.item() for part in state] == [65536.0, 0, 0]


@settings(deadline=None)
@given(policies, traces)
def test_torchs_where_handed_from_outside_gives_what_is_found_by_type(torch, policy, trace):
    found = handed = torch_state(torch, policy)
    for found_inf in map(torch.tensor, trace):
        found = policy.update(found, found_inf)
        handed = policy.update(handed, found_inf, where=torch.where)
        assert as_bits(found) == as_bits(handed)


@pytest.mark.parametrize("reset", RESETS)
def test_torch_compiles_the_update_as_one_graph(torch, reset):
    policy = DynamicScale(8.0, growth_interval=2, hysteresis=2, hysteresis_reset=reset)
    compiled = torch.compile(policy.update, backend="eager", fullgraph=True)
    state = torch_state(torch, policy)
    visited = []
    for found_inf in (True, True, False, False, True):
        state = compiled(state, torch.tensor(found_inf))
        visited.append(as_bits(state))
    assert visited == on_host(policy, (True, True, False, False, True))


# NumPy.


@settings(deadline=None)
@given(policies, batches)
def test_a_batch_of_numpy_scales_gives_each_the_bits_of_the_host(policy, trace):
    state = numpy_state(policy, len(trace[0]))
    visited = []
    for found_inf in trace:
        state = policy.update(state, np.array(found_inf))
        visited.append(state)
    assert columns(visited) == [on_host(policy, column) for column in zip(*trace, strict=True)]


def test_growth_of_a_numpy_array_past_the_largest_float32_is_not_made_and_warns_of_nothing():
    policy = DynamicScale(2.0**127, growth_interval=1)
    moved = policy.update(numpy_state(policy, 3), np.zeros(3, bool))
    assert moved.scale.tolist() == [2.0**127] * 3


@pytest.mark.parametrize("scale", [2.0**-126, 2.0**-125, 2.0**127, 1.0])
@pytest.mark.parametrize("as_array", [np.float32, np.asarray], ids=["scalar", "array"])
@pytest.mark.parametrize("found_inf", [True, False])
def test_numpy_s_own_errors_are_not_raised_at_either_end(scale, as_array, found_inf):
    policy = DynamicScale(backoff_factor=2.0**-20, growth_factor=2.0**20, growth_interval=1)
    state = ScaleState(as_array(np.float32(scale)), np.int32(0), np.int32(0))
    with np.errstate(all="raise"):
        assert policy.update(state, found_inf).scale >= 2.0**-126


@settings(deadline=None)
@given(policies, traces)
def test_numpy_arrays_of_no_dimension_give_the_bits_of_the_host(policy, trace):
    state = numpy_state(policy, ())
    visited = []
    for found_inf in trace:
        state = policy.update(ScaleState(*map(np.asarray, state)), np.array(found_inf))
        visited.append(as_bits(state))
    assert visited == on_host(policy, trace)


@pytest.mark.parametrize("counter", [np.int32, np.int64])
@pytest.mark.parametrize("reset", RESETS)
@pytest.mark.parametrize("found_inf", [True, False])
def test_numpy_keeps_the_types_of_a_state(counter, reset, found_inf):
    policy = DynamicScale(growth_interval=1, hysteresis_reset=reset)
    moved = policy.update(numpy_state(policy, 2, counter), np.array([found_inf, found_inf]))
    assert [part.dtype for part in moved] == [np.float32, counter, counter]


def test_numpy_arrays_are_not_changed_in_place():
    policy = DynamicScale(growth_interval=1)
    state = numpy_state(policy, 2)
    policy.update(state, np.array([True, False]))
    assert [part.tolist() for part in state] == [[65536.0] * 2, [0, 0], [0, 0]]


@settings(deadline=None)
@given(policies, batches)
def test_numpys_where_handed_from_outside_gives_what_is_found_by_type(policy, trace):
    found = handed = numpy_state(policy, len(trace[0]))
    for found_inf in map(np.array, trace):
        found = policy.update(found, found_inf)
        handed = policy.update(handed, found_inf, where=np.where)
        assert [part.tolist() for part in found] == [part.tolist() for part in handed]


# Counters of 32 bits.


@pytest.mark.parametrize("reset", RESETS)
@pytest.mark.parametrize("found_inf", [True, False])
def test_counts_longer_than_32_bits_fit_numpys_32_bit_counters(reset, found_inf):
    policy = DynamicScale(growth_interval=2**40, hysteresis=2**40, hysteresis_reset=reset)
    full = np.full(2, 2**31 - 2, np.int32)
    state = ScaleState(np.full(2, 8.0, np.float32), full, full)
    moved = policy.update(state, np.full(2, found_inf))
    assert [part.dtype for part in moved] == [np.float32, np.int32, np.int32]
    assert moved.scale.tolist() == [4.0 if found_inf else 16.0] * 2


@pytest.mark.parametrize("reset", RESETS)
@pytest.mark.parametrize("found_inf", [True, False])
def test_counts_longer_than_32_bits_fit_torchs_32_bit_counters(torch, reset, found_inf):
    policy = DynamicScale(growth_interval=2**40, hysteresis=2**40, hysteresis_reset=reset)
    full = torch.tensor(2**31 - 2, dtype=torch.int32)
    moved = policy.update(ScaleState(torch.tensor(8.0), full, full), torch.tensor(found_inf))
    assert [part.dtype for part in moved] == [torch.float32, torch.int32, torch.int32]
    assert moved.scale.item() == (4.0 if found_inf else 16.0)


@pytest.mark.parametrize("reset", RESETS)
def test_a_full_hysteresis_count_does_not_overflow_at_further_non_finite_steps(reset):
    policy = DynamicScale(hysteresis=2**40, hysteresis_reset=reset)
    full = np.full(2, 2**31 - 2, np.int32)
    state = ScaleState(np.full(2, 8.0, np.float32), np.zeros(2, np.int32), full)
    for _ in range(3):
        state = policy.update(state, np.ones(2, bool))
        assert (state.nonfinite_steps >= 0).all()


# Any other library.


@settings(deadline=None)
@given(policies, traces)
def test_a_library_that_has_but_arithmetic_and_comparisons_gives_the_bits_of_the_host(
    policy, trace
):
    state = ScaleState(*map(Traced, policy.init()))
    visited = []
    for found_inf in trace:
        state = policy.update(state, Traced(found_inf), where=traced_where)
        visited.append(as_bits(ScaleState(*map(untraced, state))))
    assert visited == on_host(policy, trace)


@pytest.mark.parametrize(
    ("home_of_type", "home_of_where"),
    [
        ("toytensors.core", "toytensors"),
        ("jaxlib._jax", "jax.numpy"),
        ("jax._src.interpreters.partial_eval", "jax.numpy"),
        ("mindspore.common.tensor", "mindspore.ops"),
    ],
)
def test_where_is_found_by_the_type_of_the_scale(home_of_type, home_of_where, monkeypatch):
    library = types.ModuleType(home_of_where)
    library.where = traced_where
    monkeypatch.setitem(sys.modules, home_of_where, library)
    tensor = type("Tensor", (Traced,), {"__module__": home_of_type})
    moved = DynamicScale().update(
        ScaleState(tensor(np.float32(8.0)), Traced(0), Traced(0)), Traced(True)
    )
    assert moved.scale.value == 4.0


def test_looking_for_where_imports_nothing(monkeypatch):
    monkeypatch.delitem(sys.modules, "jax.numpy", raising=False)
    tensor = type("ArrayImpl", (Traced,), {"__module__": "jaxlib._jax"})
    with pytest.raises(TypeError, match="ArrayImpl"):
        DynamicScale().update(ScaleState(tensor(8.0), Traced(0), Traced(0)), Traced(True))
    assert "jax.numpy" not in sys.modules


@pytest.mark.parametrize(
    ("scale", "named"),
    [
        (Decimal(8), r"decimal\.Decimal"),
        ([8.0], r"builtins\.list"),
        ("8.0", r"builtins\.str"),
        (None, r"builtins\.NoneType"),
        (Traced(8.0), r"Traced"),
    ],
)
def test_a_scale_of_an_unknown_type_is_a_type_error_that_says_what_to_do(scale, named):
    with pytest.raises(TypeError, match=rf"{named}.*where="):
        DynamicScale().update(ScaleState(scale, 0, 0), True)
