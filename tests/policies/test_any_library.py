"""One rule for the host and for every tensor library: the same bits, and no value read."""

import struct
import sys
import types
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradscaler import AmaxScale, AmaxState, DynamicScale, ScaleState

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
    growth_tiers=st.sampled_from([(), ((1.0, 1),), ((2.0**-20, 3), (2.0**20, 1))]),
)
traces = st.lists(st.booleans(), max_size=30)
batches = st.integers(1, 4).flatmap(
    lambda n: st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=1, max_size=30)
)


amax_policies = st.builds(
    AmaxScale,
    init_scale=st.floats(2.0**-125, 2.0**127),
    growth_factor=st.floats(1 + 2.0**-20, 2.0**20),
    backoff_factor=st.floats(2.0**-20, 1 - 2.0**-20),
    growth_interval=st.integers(1, 7),
    margin=st.integers(3, 40),
    patience=st.integers(0, 3),
    half_life=st.floats(0.25, 100.0),
    amax_interval=st.integers(1, 3),
)
amaxes = st.one_of(
    st.sampled_from([0.0, np.inf, np.nan, 1e-45, 2.0**-126]),
    st.floats(2.0**-12, 1.0, width=32),
)
amax_traces = st.lists(st.tuples(st.booleans(), amaxes), max_size=30)


class Library:
    """Makes states and flags of NumPy's arrays, or of PyTorch's tensors."""

    def __init__(self, name):
        self.module = pytest.importorskip(name)
        self.tensor = self.module.asarray if name == "numpy" else self.module.tensor

    def state(self, policy, shape=(), counter="int32"):
        counts = self.module.zeros(shape, dtype=getattr(self.module, counter))
        scale = self.module.full(shape, policy.init_scale, dtype=self.module.float32)
        return ScaleState(scale, counts, counts)

    def amax_state(self, policy, shape=()):
        """As on a device: every leaf a tensor."""
        kinds = (self.module.float32, *[self.module.int32] * 2, *[self.module.float32] * 2)
        leaves = zip(policy.init(), kinds, strict=True)
        return AmaxState(*(self.module.full(shape, leaf, dtype=kind) for leaf, kind in leaves))

    def visited(self, policy, flags, shape=(), **where):
        """The bits of each state of the batch after each step."""
        state = self.state(policy, shape)
        for flag in flags:
            state = ScaleState(*map(self.module.asarray, policy.update(state, flag, **where)))
            assert state.scale.dtype == self.module.float32
            batch = zip(*state, strict=True) if shape else [state]
            yield [as_bits(ScaleState(*each)) for each in batch]


@pytest.fixture(scope="module", params=["torch", "numpy"])
def library(request):
    return Library(request.param)


@pytest.fixture(scope="module")
def torch():
    return Library("torch")


def as_bits(state):
    """A state as the bytes of its scale and two integers, and of further floats."""
    floats = (struct.pack("<f", float(value)) for value in (state.scale, *state[3:]))
    return *map(int, state[1:3]), *floats


def on_host(policy, trace):
    state = policy.init()
    visited = []
    for found_inf in trace:
        state = policy.update(state, found_inf)
        visited.append(as_bits(state))
    return visited


def amax_on_host(policy, trace):
    state = policy.init()
    for found_inf, amax in trace:
        state = policy.update(state, found_inf, amax=amax)
        yield as_bits(state)


class Traced:
    """A tensor of no known library, as a tracer is: arithmetic and comparisons alone.

    A product with a Python float is rounded once, from float64: a library may do that.
    """

    def __init__(self, value):
        self.value = value

    def __add__(self, other):
        return Traced(self.value + untraced(other))

    def __sub__(self, other):
        return Traced(self.value - untraced(other))

    def __mod__(self, other):
        return Traced(self.value % untraced(other))

    def __eq__(self, other):
        return Traced(self.value == untraced(other))

    def __mul__(self, other):
        if isinstance(self.value, int):
            return Traced(self.value * untraced(other))
        with np.errstate(over="ignore", invalid="ignore"):
            return Traced(np.float32(float(self.value) * untraced(other)))

    def __ge__(self, other):
        return Traced(self.value >= untraced(other))

    def __lt__(self, other):
        return Traced(self.value < untraced(other))

    def __le__(self, other):
        return Traced(self.value <= untraced(other))

    def __gt__(self, other):
        return Traced(self.value > untraced(other))

    __hash__ = None

    def __bool__(self):
        raise AssertionError("a value was read on the host")

    __float__ = __int__ = __index__ = __bool__


def untraced(value):
    return value.value if isinstance(value, Traced) else value


def traced_where(condition, a, b):
    assert isinstance(condition, Traced)
    return Traced(untraced(a) if condition.value else untraced(b))


# PyTorch and NumPy.


@given(policies, traces)
def test_scalars_have_the_bits_of_the_host(library, policy, trace):
    expected = [[bits] for bits in on_host(policy, trace)]
    assert list(library.visited(policy, map(library.tensor, trace))) == expected


@given(policies, batches)
def test_each_scale_of_a_batch_has_the_bits_of_the_host(library, policy, trace):
    shape = (len(trace[0]),)
    visited = library.visited(policy, map(library.tensor, trace), shape)
    columns = [on_host(policy, column) for column in zip(*trace, strict=True)]
    assert list(visited) == [list(row) for row in zip(*columns, strict=True)]


@given(policies, batches)
def test_where_as_an_argument_gives_the_same_as_where_found_by_type(library, policy, trace):
    flags, shape = list(map(library.tensor, trace)), (len(trace[0]),)
    handed = library.visited(policy, flags, shape, where=library.module.where)
    assert list(library.visited(policy, flags, shape)) == list(handed)


@given(policies, traces)
def test_torch_takes_a_bool_of_python_s(torch, policy, trace):
    assert list(torch.visited(policy, trace)) == [[bits] for bits in on_host(policy, trace)]


def test_torch_takes_a_bool_of_python_s_with_amax(torch):
    policy = AmaxScale(8.0, patience=0)
    on_host, state = policy.init(), torch.amax_state(policy)
    for found_inf in (False, True, False):
        on_host = policy.update(on_host, found_inf, amax=None if found_inf else 0.25)
        state = policy.update(state, found_inf, amax=None if found_inf else torch.tensor(0.25))
        assert [value.item() for value in state] == list(on_host)


@pytest.mark.parametrize("counter", ["int32", "int64"])
@pytest.mark.parametrize("reset", RESETS)
@pytest.mark.parametrize("found_inf", [True, False])
def test_a_state_keeps_its_types_and_shapes(library, counter, reset, found_inf):
    shape = (2,) if library.module is np else ()  # a NumPy array without dimensions is a scalar
    policy = DynamicScale(growth_interval=1, hysteresis_reset=reset)
    state = library.state(policy, shape, counter)
    moved = policy.update(state, library.module.full(shape, found_inf))
    assert [part.dtype for part in moved] == [part.dtype for part in state]
    assert [part.shape for part in moved] == [shape] * 3


@pytest.mark.parametrize("policy", [DynamicScale.megatron(), AmaxScale()])
@pytest.mark.parametrize("found_inf", [True, False])
@pytest.mark.parametrize("given", [np.asarray, lambda value: np.asarray(value)[()]])
def test_a_state_of_arrays_without_dimensions_becomes_float32_and_ints(policy, found_inf, given):
    first = policy.init()
    state = type(first)(*(given(np.array(value)) for value in first))
    moved = policy.update(state, given(np.array(found_inf)))
    assert list(map(type, moved)) == [np.float32, int, int, *[np.float32] * (len(first) - 3)]
    assert moved == policy.update(first, found_inf)


def test_a_state_is_not_changed_in_place(library):
    policy = DynamicScale(growth_interval=1)
    state = library.state(policy, (2,))
    policy.update(state, library.tensor([True, False]))
    assert [part.tolist() for part in state] == [[65536.0] * 2, [0, 0], [0, 0]]


@pytest.mark.parametrize("reset", RESETS)
def test_torch_compiles_the_update_as_one_graph(torch, reset):
    policy = DynamicScale(8.0, growth_interval=2, hysteresis=2, hysteresis_reset=reset)
    compiled = torch.module.compile(policy.update, backend="eager", fullgraph=True)
    state = torch.state(policy)
    visited = []
    for found_inf in (True, True, False, False, True):
        state = compiled(state, torch.tensor(found_inf))
        visited.append(as_bits(state))
    assert visited == on_host(policy, (True, True, False, False, True))


def test_numpy_arrays_do_not_grow_past_the_largest_float32_and_nothing_warns():
    policy = DynamicScale(2.0**127, growth_interval=1)
    moved = policy.update(Library("numpy").state(policy, (3,)), np.zeros(3, bool))
    assert moved.scale.tolist() == [2.0**127] * 3


@pytest.mark.parametrize("scale", [2.0**-126, 2.0**-125, 2.0**127, 1.0])
@pytest.mark.parametrize("as_array", [np.float32, np.asarray], ids=["scalar", "array"])
@pytest.mark.parametrize("found_inf", [True, False])
@pytest.mark.parametrize("where", [None, np.where])
def test_numpy_s_own_errors_are_not_raised_at_either_end(scale, as_array, found_inf, where):
    policy = DynamicScale(backoff_factor=2.0**-20, growth_factor=2.0**20, growth_interval=1)
    state = ScaleState(as_array(np.float32(scale)), np.int32(0), np.int32(0))
    with np.errstate(all="raise"):
        moved = policy.update(state, found_inf, where)
    assert moved.scale >= 2.0**-126
    assert moved.scale.dtype == np.float32


# A policy that looks at the largest gradient.


@given(amax_policies, amax_traces)
@pytest.mark.parametrize("handed", [True, False])
def test_amax_as_a_tensor_has_the_bits_of_the_host(library, handed, policy, trace):
    as_tensor, where = library.module.asarray, library.module.where if handed else None
    start = state = library.amax_state(policy)
    visited = []
    for found_inf, amax in trace:
        moved = policy.update(state, as_tensor(found_inf), where, as_tensor(np.float32(amax)))
        state = AmaxState(*map(as_tensor, moved))
        if handed or library.module is not np:  # NumPy's scalars are the host's
            kept = (0, 3, 4) if library.module is np else range(5)  # NumPy 1 widens the counts
            assert [state[i].dtype for i in kept] == [start[i].dtype for i in kept]
        visited.append(as_bits(state))
    assert visited == list(amax_on_host(policy, trace))


@given(amax_policies, st.lists(st.lists(st.tuples(st.booleans(), amaxes), min_size=2, max_size=2)))
def test_each_amax_of_a_batch_has_the_bits_of_the_host(library, policy, trace):
    state, rows = library.amax_state(policy, (2,)), []
    for row in trace:
        flags, sizes = zip(*row, strict=True)
        amax = library.module.asarray(np.array(sizes, np.float32))
        state = policy.update(state, library.module.asarray(flags), amax=amax)
        rows.append([as_bits(AmaxState(*each)) for each in zip(*state, strict=True)])
    columns = [list(amax_on_host(policy, column)) for column in zip(*trace, strict=True)]
    assert rows == [list(row) for row in zip(*columns, strict=True)]


@given(amax_policies, amax_traces)
def test_amax_in_a_library_of_arithmetic_and_comparisons_has_the_bits_of_the_host(policy, trace):
    state = AmaxState(*map(Traced, policy.init()))
    visited = []
    for found_inf, amax in trace:
        amax = Traced(np.float32(amax))
        state = policy.update(state, Traced(found_inf), traced_where, amax)
        visited.append(as_bits(AmaxState(*map(untraced, state))))
    assert visited == list(amax_on_host(policy, trace))


def test_amax_may_be_left_out_where_it_does_not_count(torch):
    policy = AmaxScale(amax_interval=2, growth_interval=3)
    always = sometimes = torch.amax_state(policy)
    for step, found_inf in enumerate([False, False, True, False, False, False, False]):
        flag, amax = torch.tensor(found_inf), torch.tensor(0.5**step)
        counts = int(sometimes.finite_steps) % 2 == 0
        always = policy.update(always, flag, amax=amax)
        sometimes = policy.update(sometimes, flag, amax=amax if counts else None)
        assert as_bits(always) == as_bits(sometimes)


def test_torch_compiles_the_update_with_amax_as_one_graph(torch):
    policy = AmaxScale(8.0, growth_interval=2, patience=1)
    compiled = torch.module.compile(policy.update, backend="eager", fullgraph=True)
    trace = [(False, 0.5), (True, 0.0), (True, 0.0), (True, 0.0), (False, 2.0), (False, 1.0)]
    state, visited = torch.amax_state(policy), []
    for found_inf, amax in trace:
        state = compiled(state, torch.tensor(found_inf), amax=torch.tensor(amax))
        visited.append(as_bits(state))
    assert visited == list(amax_on_host(policy, trace))


# Counters of 32 bits.


def test_amax_s_counts_do_not_overflow(library):
    policy = AmaxScale(growth_interval=2**40, patience=2**31 - 2)
    state = library.amax_state(policy, (2,))
    full = state._replace(
        finite_steps=state.finite_steps + (2**31 - 2),
        nonfinite_steps=state.nonfinite_steps + (2**31 - 2),
    )
    moved = policy.update(full, library.tensor([True, False]))
    assert moved.finite_steps.tolist() == [0, 1]
    assert moved.nonfinite_steps.tolist() == [0, 2**31 - 2]


@pytest.mark.parametrize("reset", RESETS)
@pytest.mark.parametrize("found_inf", [True, False])
def test_counts_longer_than_32_bits_fit_32_bit_counters(library, reset, found_inf):
    policy = DynamicScale(8.0, growth_interval=2**40, hysteresis=2**40, hysteresis_reset=reset)
    scale, counts, _ = library.state(policy, (2,))
    full = counts + (2**31 - 2)
    moved = policy.update(ScaleState(scale, full, full), library.tensor([found_inf] * 2))
    assert [part.dtype for part in moved] == [scale.dtype, counts.dtype, counts.dtype]
    assert moved.scale.tolist() == [4.0 if found_inf else 16.0] * 2


@pytest.mark.parametrize("reset", RESETS)
def test_a_full_hysteresis_count_does_not_overflow_at_further_non_finite_steps(reset):
    policy = DynamicScale(hysteresis=2**40, hysteresis_reset=reset)
    full = np.full(2, 2**31 - 2, np.int32)
    state = ScaleState(np.full(2, 8.0, np.float32), np.zeros(2, np.int32), full)
    for _ in range(3):
        state = policy.update(state, np.ones(2, bool))
        assert (state.nonfinite_steps >= 0).all()


# Any other library.


@given(policies, traces)
def test_a_library_of_arithmetic_and_comparisons_alone_has_the_bits_of_the_host(policy, trace):
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
