"""The functional scalers beside MindSpore's, called from either mode and inside mindspore.jit."""

import gc
import importlib
import math

import mindspore
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mindspore import Tensor, amp, jit_class

import gradscaler.mindspore as ours
from tests.support.chosen import examples

INF = float("inf")
TRACES = st.lists(st.booleans(), max_size=20)
DTYPES = {
    "float16": mindspore.float16,
    "bfloat16": mindspore.bfloat16,
    "float32": mindspore.float32,
    "float64": mindspore.float64,
}


def state(scaler):
    return [
        (str(p.dtype), p.shape, p.asnumpy().tolist()) for p in (scaler.scale_value, scaler.counter)
    ]


def rewound(scaler, scale):
    """The scaler as it was at first, without another compilation."""
    scaler.scale_value.set_data(Tensor(scale, mindspore.float32))
    scaler.counter.set_data(Tensor(0, mindspore.int32))
    return scaler


def compile_adjust(scaler):
    @mindspore.jit
    def adjust(grads_finite):
        return scaler.adjust(grads_finite)

    return adjust


@pytest.mark.parametrize("compiled", [False, True], ids=["called", "compiled"])
@pytest.mark.parametrize(("scale", "factor"), [(1.0, 2), (3, 4), (2**24, 2), (2.0**127, 2)])
def test_the_dynamic_scaler_goes_through_every_trace_as_mindspores_does(
    mode, scale, factor, compiled
):
    scalers = [s(scale, factor, 3) for s in (ours.DynamicLossScaler, amp.DynamicLossScaler)]
    adjusts = [compile_adjust(scaler) if compiled else scaler.adjust for scaler in scalers]

    @given(trace=TRACES)
    @settings(max_examples=examples(8))
    def compare(trace):
        mine, native = (rewound(scaler, scale) for scaler in scalers)
        for grads_finite in map(Tensor, trace):
            assert [adjust(grads_finite) for adjust in adjusts] == [True, True]
            assert state(mine) == state(native)

    compare()


def values_in(dtype, *values):
    return Tensor(np.array(values, np.float32)).astype(dtype)


def bits(value):
    if isinstance(value, (tuple, list)):
        return type(value), [bits(item) for item in value]
    array = value.astype(mindspore.float64).asnumpy()
    return str(value.dtype), value.shape, array.tobytes()


SCALERS = {
    "static": (ours.StaticLossScaler, amp.StaticLossScaler, (2**10,)),
    "dynamic": (ours.DynamicLossScaler, amp.DynamicLossScaler, (2**10, 2, 3)),
}


@pytest.fixture(params=SCALERS)
def scalers(request):
    mine, native, arguments = SCALERS[request.param]
    return mine(*arguments), native(*arguments)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_scaling_and_unscaling_are_mindspores_to_the_bit(mode, scalers, dtype):
    mine, native = scalers
    one, two = values_in(dtype, 1.5, -3e-5, 0.0), values_in(dtype, INF)
    for inputs in [one, (one, two), [one, two], (one,), ()]:
        assert bits(mine.scale(inputs)) == bits(native.scale(inputs))
        assert bits(mine.unscale(inputs)) == bits(native.unscale(inputs))


def test_tuples_lists_and_dicts_may_mix_dtypes_and_nest(mode):
    scaler = ours.StaticLossScaler(4)
    half, double = values_in(mindspore.float16, 1.0), values_in(mindspore.float64, 1.0)
    scaled = scaler.scale((half, (double, [half])))
    assert bits(scaled) == bits((half * 4, (double * 4, [half * 4])))
    scaled = scaler.scale({"a": Tensor(2.0)})
    assert (list(scaled), scaled["a"].asnumpy()) == (["a"], 8.0)


def test_gradients_flow_through_scale(mode):
    scaler = ours.DynamicLossScaler(2**10, 2, 3)

    def loss(x):
        return scaler.scale((x * 3).sum())

    assert mindspore.grad(loss)(Tensor([1.0, 2.0])).asnumpy().tolist() == [3 * 2**10] * 2


@pytest.mark.parametrize(
    ("method", "scale", "value", "mine", "native"),
    [("unscale", 2.0**26, 2.0**12, 2.0**-14, 0), ("scale", 2.0**17, 2.0**-8, 2.0**9, INF)],
)
def test_float16_survives_scales_that_it_cannot_hold(mode, method, scale, value, mine, native):
    """MindSpore casts the scale and its reciprocal to float16: 2**17 to inf, and 2**-26 to 0."""
    value = values_in(mindspore.float16, value)
    for module, expected in ((ours, mine), (amp, native)):
        scaler = module.StaticLossScaler(scale)
        assert getattr(scaler, method)(value).asnumpy() == expected
        assert getattr(scaler, method)((value,))[0].asnumpy() == expected


STATIC = ours.StaticLossScaler(1.0)


@pytest.mark.parametrize("dtype", [mindspore.float16, mindspore.bfloat16])
@given(value=st.floats(-4, 4, width=16), scale=st.floats(1, 2**20, width=32))
@settings(max_examples=examples(60))
def test_halves_are_unscaled_in_float32_and_rounded_once(dtype, value, scale):
    STATIC.scale_value.set_data(Tensor(scale, mindspore.float32))
    value = values_in(dtype, value)
    reciprocal = np.float32(1) / np.float32(scale)
    expected = Tensor(value.astype(mindspore.float32).asnumpy() * reciprocal).astype(dtype)
    assert bits(STATIC.unscale(value)) == bits(expected)


def test_the_static_scaler_never_moves(mode):
    scaler, native = ours.StaticLossScaler(2**10), amp.StaticLossScaler(2**10)
    assert scaler.adjust(Tensor(False)) is native.adjust(Tensor(False)) is False
    assert scaler.scale_value.asnumpy() == native.scale_value.asnumpy() == 2**10


def test_flags_may_be_bools_or_of_shape_1(mode):
    scaler = ours.DynamicLossScaler(64, 2, 2)
    for grads_finite in [False, Tensor([False]), True, Tensor([True])]:
        assert scaler.adjust(grads_finite) is True
    assert scaler.scale_value.asnumpy() == 32


def test_a_scaler_is_never_mistaken_for_one_that_is_gone(mode):
    """MindSpore caches compiled methods by the id of their object: nothing here may be one."""
    gone = set()
    for i in range(1, 6):
        scaler = ours.DynamicLossScaler(4.0 * i, 2, 3)
        gone.add(id(scaler))
        scaler.adjust(Tensor(False))
        assert scaler.scale_value.asnumpy() == 2.0 * i
        del scaler
        gc.collect()
    alive = []  # these fill free memory, until one has the place of a scaler that is gone
    while not alive or id(alive[-1]) not in gone:
        if len(alive) == 10_000:
            pytest.skip("other objects have the places of the scalers that are gone")
        alive.append(ours.DynamicLossScaler(100.0, 2, 3))
    alive[-1].adjust(Tensor(False))
    assert alive[-1].scale_value.asnumpy() == 50.0


def test_nothing_compiles_again_while_the_scale_moves(mode, count_compilations):
    scaler = ours.DynamicLossScaler(64, 2, 1)

    def iterate(grads_finite):
        scaler.scale(Tensor(1.0))
        ours.all_finite(scaler.unscale((Tensor([1.0]), Tensor(2.0))))
        scaler.adjust(Tensor(grads_finite))

    iterate(True)
    with count_compilations() as compiled:
        for grads_finite in [True, False, False, True]:
            iterate(grads_finite)
    assert compiled == []


def test_nothing_compiles_again_for_another_scaler(mode, count_compilations):
    def iterate(scaler):
        scaler.unscale((scaler.scale(Tensor(1.0)), Tensor([2.0])))
        scaler.adjust(Tensor(True))
        return scaler.counter.asnumpy().item()

    first, second = ours.DynamicLossScaler(64, 2, 3), ours.DynamicLossScaler(64, 2, 3)
    iterate(first)
    with count_compilations() as compiled:
        assert [iterate(second), iterate(second), iterate(first)] == [1, 2, 2]
    assert compiled == []


def test_the_parameters_have_mindspores_names():
    mine, native = ours.DynamicLossScaler(64, 2, 3), amp.DynamicLossScaler(64, 2, 3)
    for name in ("scale_value", "counter"):
        assert getattr(mine, name).name == getattr(native, name).name
    assert (mine.scale_factor, mine.scale_window) == (native.scale_factor, native.scale_window)


# all_finite


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("where", [None, 0, 1, 2])
@pytest.mark.parametrize("value", [INF, -INF, math.nan])
def test_all_finite_finds_every_inf_and_nan(mode, dtype, where, value):
    values = np.array([6e4, -1e-7, 0.0], np.float32)
    if where is not None:
        values[where] = value
    tensors = (values_in(dtype, 1.0, 2.0), values_in(dtype, *values), values_in(dtype, 3.0))
    finite = ours.all_finite(tensors)
    assert (str(finite.dtype), finite.shape) == ("Bool", ())
    assert bool(finite) is (where is None)
    if dtype != mindspore.bfloat16:  # MindSpore's own has no kernel for it on the CPU
        native = amp.all_finite(tensors)
        assert (str(native.dtype), native.shape, bool(native)) == ("Bool", (), where is None)


LARGEST_BFLOAT16 = values_in(mindspore.bfloat16, 3.38953139e38)
MANY = tuple(Tensor(np.ones((i % 7 + 1, i % 5 + 1), np.float32)) for i in range(120))


@pytest.mark.parametrize(
    ("inputs", "finite"),
    [
        ((), True),
        ([], True),
        ([Tensor([1.0]), Tensor([[INF]])], False),
        (Tensor([1.0, 2.0]), True),
        (Tensor([1.0, INF]), False),
        ((Tensor(np.zeros((0, 3), np.float32)),), True),
        ((Tensor([1, 2]), Tensor([True])), True),
        ((LARGEST_BFLOAT16,), True),
        (MANY, True),
        ((*MANY, Tensor(np.float32("nan"))), False),
    ],
)
def test_all_finite_takes_any_number_of_tensors_of_any_kind(mode, inputs, finite):
    assert bool(ours.all_finite(inputs)) is finite


@pytest.mark.parametrize(
    "inputs", [None, "gradients", 1.0, {"a": Tensor(1.0)}, (1.0,), (Tensor(1.0), None), ((), ())]
)
def test_all_finite_refuses_anything_else(mode, inputs):
    with pytest.raises(TypeError, match=r"^inputs must"):
        ours.all_finite(inputs)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_all_finite_can_take_the_place_of_mindspores(monkeypatch, on_cpu):
    module = importlib.import_module(ours.all_finite.__module__)
    monkeypatch.setattr(module, "on_cpu", lambda: on_cpu)
    monkeypatch.setattr(amp, "all_finite", ours.all_finite)
    assert [bool(amp.all_finite((Tensor([1.0, value]),))) for value in (2.0, INF)] == [True, False]


# A whole step


class Functional:
    """A training loop in functions: MindSpore's documentation has it like this."""

    def __init__(self, line, scaler, all_finite, optimizer):
        self.line, self.scaler, self.all_finite = line, scaler, all_finite
        self.optimizer = optimizer
        self.grad = mindspore.value_and_grad(self.forward, None, optimizer.parameters)

    def forward(self, x):
        return self.scaler.scale(self.line(x))

    def step(self, x):
        loss, grads = self.grad(x)
        grads = self.scaler.unscale(grads)
        finite = self.all_finite(grads)
        if finite:
            self.optimizer(grads)
        self.scaler.adjust(finite)
        return self.scaler.unscale(loss), finite


def compiled(functional):
    @mindspore.jit
    def step(x):
        return functional.step(x)

    return step


Functional = jit_class(Functional)
# MindSpore finds the compiled code of a method by the id of its object. A later object may have the
# same id, and then computes with the scale of the earlier one, MindSpore's own scaler too.
KEPT = []


@pytest.mark.parametrize("in_jit", [False, True], ids=["called", "compiled"])
def test_a_functional_loop_trains_as_with_mindspores_scaler(
    mode, in_jit, line, inputs, make_optimizer
):
    sides = []
    for scaler, all_finite in [
        (ours.DynamicLossScaler(2**10, 2, 2), ours.all_finite),
        (amp.DynamicLossScaler(2**10, 2, 2), amp.all_finite),
    ]:
        network = line()
        optimizer = make_optimizer(network.trainable_params())
        functional = Functional(network, scaler, all_finite, optimizer)
        KEPT.append(functional)
        sides.append((functional, compiled(functional) if in_jit else functional.step))
    for seed, overflow in enumerate([None, None, INF, None, math.nan, None, None, None]):
        results = []
        for functional, step in sides:
            loss, finite = step(inputs(seed, overflow))
            assert bool(finite) is (overflow is None)
            parameters = (*functional.optimizer.get_parameters(),)
            results.append(
                (
                    bits(loss) if overflow is None else None,
                    state(functional.scaler),
                    [(p.name, p.asnumpy().tobytes()) for p in parameters],
                )
            )
        assert results[0] == results[1]


def test_window_and_factor_can_be_set():
    scaler = ours.DynamicLossScaler(2**10, 2, 5)
    scaler.scale_window = 1
    scaler.scale_factor = 4
    assert (scaler.scale_window, scaler.scale_factor) == (1, 4)
    scales = []
    for finite in (True, False, False):
        scaler.adjust(Tensor(finite))
        scales.append(float(scaler.scale_value.asnumpy()))
    assert scales == [2.0**12, 2.0**10, 2.0**8]


@pytest.mark.parametrize("flag", [1, None, "x", Tensor([True, False]), Tensor(1.0), Tensor(1)])
def test_anything_but_a_flag_is_refused_and_changes_nothing(flag):
    scaler = ours.DynamicLossScaler(2**10, 2, 1)
    with pytest.raises(TypeError, match="must be a bool, or a bool Tensor of shape"):
        scaler.adjust(flag)
    assert (scaler.scale_value.asnumpy(), scaler.counter.asnumpy()) == (2**10, 0)


@pytest.mark.parametrize("method", ["scale", "unscale"])
def test_a_number_is_not_a_tensor(method):
    with pytest.raises(TypeError, match="inputs must be a tensor, or tensors in"):
        getattr(ours.DynamicLossScaler(2**10, 2, 1), method)(2.0)
