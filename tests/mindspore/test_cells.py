"""The update cells beside MindSpore's, in both modes."""

import mindspore
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mindspore import Parameter, Tensor, nn, ops

import gradscaler.mindspore as ours
from gradscaler import DynamicScale
from tests.support.chosen import examples

TRACES = st.lists(st.booleans(), max_size=20)


class Step(nn.Cell):
    """The part of a train step that an update cell needs: the scale that the cell moves."""

    def __init__(self, cell, shape=()):
        super().__init__(auto_prefix=False)
        self.cell = cell
        value = ops.full(shape, cell.get_loss_scale(), dtype=mindspore.float32)
        self.scale_sense = Parameter(value, name="scale_sense")

    def construct(self, overflow):
        return self.cell(self.scale_sense, overflow)


def state(step):
    parameters = (step.scale_sense, step.cell.cur_iter, step.cell.last_overflow_iter)
    return [(str(p.dtype), p.shape, p.asnumpy().tolist()) for p in parameters]


def rewound(step):
    """The step as it was at first, without another compilation."""
    step.scale_sense.set_data(Tensor(step.cell.get_loss_scale(), mindspore.float32))
    step.cell.cur_iter.set_data(Tensor(1, mindspore.int32))
    step.cell.last_overflow_iter.set_data(Tensor(0, mindspore.int32))
    return step


@pytest.mark.parametrize("factor", [2, 4, 1.5])
@pytest.mark.parametrize("scale", [1.0, 3.0, 2**24])
def test_the_dynamic_cell_goes_through_every_trace_as_mindspores_does(mode, scale, factor):
    steps = [
        Step(cell(scale, factor, 3))
        for cell in (ours.DynamicLossScaleUpdateCell, nn.DynamicLossScaleUpdateCell)
    ]

    @given(overflows=TRACES)
    @settings(max_examples=examples(10))
    def compare(overflows):
        mine, native = map(rewound, steps)
        for overflow in map(Tensor, overflows):
            assert mine(overflow).asnumpy() == native(overflow).asnumpy() == overflow.asnumpy()
            assert state(mine) == state(native)

    compare()


def test_the_flag_may_be_a_bool(mode):
    """As MindSpore documents it; its own cell takes only a Tensor."""
    step = Step(ours.DynamicLossScaleUpdateCell(64, 2, 2))
    for overflow in [True, False, False]:
        assert step(overflow) is overflow
    assert step.scale_sense.asnumpy() == 64


@pytest.mark.parametrize("shape", [(), (1,)])
def test_the_scale_and_the_flag_may_have_the_shape_1(mode, shape):
    step = Step(ours.DynamicLossScaleUpdateCell(64, 2, 2), shape)
    for overflow in [True, False, False, False, False]:
        assert step(Tensor([overflow])).asnumpy() == [overflow]
    assert step.scale_sense.shape == shape
    assert step.scale_sense.asnumpy() == 128


def test_the_scale_does_not_grow_past_what_float32_holds(mode):
    step = Step(ours.DynamicLossScaleUpdateCell(2.0**126, 2, 1))
    for _ in range(3):
        step(Tensor(False))
    assert step.scale_sense.asnumpy() == 2.0**127


def test_a_cell_of_ours_has_the_parameters_of_mindspores(bits):
    cell, native = (
        c(64, 2, 3) for c in (ours.DynamicLossScaleUpdateCell, nn.DynamicLossScaleUpdateCell)
    )
    assert bits(cell) == bits(native)
    for name in ("scale_window", "scale_factor", "loss_scale_value"):
        assert getattr(cell, name) == getattr(native, name)


def test_a_hysteresis_adds_a_parameter():
    cell = ours.DynamicLossScaleUpdateCell(policy=DynamicScale(hysteresis=2))
    names = [parameter.name for parameter in cell.get_parameters()]
    assert names == ["current_iterator_step", "last_overflow_iterator_step", "nonfinite_steps"]


def test_a_checkpoint_of_mindspores_cell_is_taken_over(mode, tmp_path):
    native = Step(nn.DynamicLossScaleUpdateCell(2**10, 2, 3))
    for overflow in [False, True, False, False]:
        native(Tensor(overflow))
    mindspore.save_checkpoint(native, str(tmp_path / "native.ckpt"))
    step = Step(ours.DynamicLossScaleUpdateCell(2**10, 2, 3))
    loaded = mindspore.load_checkpoint(str(tmp_path / "native.ckpt"))
    assert mindspore.load_param_into_net(step, loaded) == ([], [])
    assert state(step) == state(native)
    for overflow in [False, True, False, False, False]:
        step(Tensor(overflow))
        native(Tensor(overflow))
        assert state(step) == state(native)


def test_the_cell_compiles_once_while_the_scale_moves(mode, count_compilations):
    step = Step(ours.DynamicLossScaleUpdateCell(64, 2, 1))
    step(Tensor(False))
    with count_compilations() as compiled:
        for overflow in [False, True, True, False, False]:
            step(Tensor(overflow))
    assert compiled == []
    assert step.scale_sense.asnumpy() == 256


def test_the_fixed_cell_returns_the_flag_and_leaves_the_scale(mode):
    step = Step(ours.FixedLossScaleUpdateCell(2**12))
    for overflow in [True, False]:
        assert step(Tensor(overflow)).asnumpy() == overflow
    assert step.scale_sense.asnumpy() == 2**12 == step.cell.get_loss_scale()
