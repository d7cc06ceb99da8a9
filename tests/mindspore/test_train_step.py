"""The train step: MindSpore's contract, on the CPU, in both modes."""

import math

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, amp, nn, ops

import gradscaler.mindspore as ours

INF = float("inf")
SCALE = ("scale_sense", "current_iterator_step", "last_overflow_iterator_step")


class NativeStep(nn.TrainOneStepWithLossScaleCell):
    """MindSpore's own, except for its check, an Ascend kernel that the CPU does not have."""

    def get_overflow_status(self, status, compute_output):
        return ops.logical_not(amp.all_finite(compute_output))


@pytest.fixture
def make_step(line, make_optimizer):
    def make_step(step=ours.TrainOneStepWithLossScaleCell, scale_sense=None):
        if scale_sense is None:
            scale_sense = ours.DynamicLossScaleUpdateCell(2**10, 2, 2)
        network = line()
        return step(network, make_optimizer(network.trainable_params()), scale_sense).set_train()

    return make_step


@pytest.fixture
def make_sgd_step(line):
    def make_step(scale_sense, step=ours.TrainOneStepWithLossScaleCell, **options):
        network = line(options.pop("dtype", mindspore.float32))
        return step(network, nn.SGD(network.trainable_params(), **options), scale_sense)

    return make_step


def host(outputs):
    return [(str(o.dtype), o.shape, o.asnumpy().tolist()) for o in outputs]


def test_it_trains_as_mindspores_does(mode, make_step, inputs, bits):
    mine = make_step()
    native = make_step(NativeStep, nn.DynamicLossScaleUpdateCell(2**10, 2, 2))
    assert bits(mine) == bits(native)
    for seed, overflow in enumerate([None, None, None, INF, None, -INF, None, None]):
        results = [host(step(inputs(seed, overflow))) for step in (mine, native)]
        assert repr(results[0]) == repr(results[1])
        assert results[0][1] == ("Bool", (), overflow is not None)
        assert bits(mine) == bits(native)


@pytest.mark.parametrize("overflow", [INF, -INF, math.nan])
def test_a_step_that_overflows_leaves_parameters_and_optimizer_alone(
    mode, make_step, inputs, bits, overflow
):
    step = make_step()
    for seed in range(3):
        step(inputs(seed))
    before = bits(step)
    found = step(inputs(3, overflow))[1]
    after = bits(step)
    assert bool(found)
    assert step.scale_sense.asnumpy() == 2**10
    assert {name for name in before if before[name] != after[name]} == set(SCALE)


def test_training_goes_on_after_a_skip_as_without_it(mode, make_step, inputs, bits):
    """The scales differ, but as powers of two they do not change the gradients."""
    interrupted, whole = make_step(), make_step()
    for seed in range(4):
        whole(inputs(seed))
        interrupted(inputs(seed))
        interrupted(inputs(seed, INF))
    ends = [bits(step) for step in (interrupted, whole)]
    assert all(ends[0].pop(name) and ends[1].pop(name) for name in SCALE)
    assert ends[0] == ends[1]


def test_an_overflow_of_the_scaled_gradients_alone_is_found(mode, make_sgd_step, inputs):
    """The loss and its gradients are finite, and times the scale they are not."""
    loss, overflow, _ = make_sgd_step(Tensor(2.0**127))(inputs(0) * 64)
    assert np.isfinite(loss.asnumpy())
    assert bool(overflow)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_the_scale_may_be_a_tensor(mode, make_step, inputs, shape):
    step = make_step(scale_sense=ops.full(shape, 8.0, dtype=mindspore.float32))
    for overflow in [None, INF, None]:
        _, found, scale = step(inputs(0, overflow))
        assert bool(found) is (overflow is not None)
        assert (scale.shape, scale.asnumpy()) == (shape, 8.0)


def test_a_scale_that_is_a_tensor_can_be_set(mode, make_step, inputs, count_compilations):
    step = make_step(scale_sense=Tensor(8.0))
    step(inputs(0))
    with count_compilations() as compiled:
        for sens in [Tensor(4.0), Tensor([2.0]), Tensor(16, mindspore.int32)]:
            step.set_sense_scale(sens)
            scale = step(inputs(0))[2]
            assert (scale.shape, scale.asnumpy()) == ((), sens.asnumpy())
    assert compiled == []


@pytest.mark.parametrize(
    ("sens", "error"),
    [
        (4.0, TypeError),
        (None, TypeError),
        (Tensor([1.0, 2.0]), ValueError),
        (Tensor(0.0), ValueError),
        (Tensor(-1.0), ValueError),
        (Tensor(INF), ValueError),
        (Tensor(math.nan), ValueError),
    ],
)
def test_a_bad_scale_is_refused_and_changes_nothing(make_sgd_step, sens, error):
    step = make_sgd_step(Tensor(8.0))
    with pytest.raises(error, match="sens must"):
        step.set_sense_scale(sens)
    assert step.scale_sense.asnumpy() == 8.0
    with pytest.raises(error, match="scale_sense"):
        make_sgd_step(sens)


def test_update_cells_and_train_steps_of_ours_and_of_mindspores_mix(mode, make_step, inputs, bits):
    native_cell = nn.DynamicLossScaleUpdateCell(2**10, 2, 2)
    mine, *mixed = make_step(), make_step(scale_sense=native_cell), make_step(NativeStep)
    fixed = make_step(scale_sense=nn.FixedLossScaleUpdateCell(2**10))
    for seed, overflow in enumerate([None, None, INF, None]):
        for step in (mine, *mixed, fixed):
            step(inputs(seed, overflow))
        assert [bits(step) for step in mixed] == [bits(mine)] * 2
    assert fixed.scale_sense.asnumpy() == 2**10


def test_nothing_compiles_again_while_the_scale_moves(mode, make_step, inputs, count_compilations):
    step = make_step()
    step(inputs(0))
    step(inputs(0, INF))  # in PyNative, the first call of each kind compiles
    with count_compilations() as compiled:
        for seed, overflow in enumerate([None, None, INF, None]):
            step(inputs(seed, overflow))
    assert compiled == []


class FromFloat16(nn.Cell):
    """A loss in float32: float16 could not hold the scale that its gradient begins with."""

    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, x):
        return self.network(x.astype(mindspore.float16)).astype(mindspore.float32) * 2.0**-14


@pytest.mark.parametrize(
    ("cell", "trains"), [(ours.TrainOneStepWithLossScaleCell, True), (NativeStep, False)]
)
def test_float16_parameters_are_trained_at_a_scale_whose_reciprocal_float16_cannot_hold(
    mode, make_sgd_step, inputs, cell, trains
):
    """MindSpore casts 2**-26 to float16, which makes it and every gradient 0."""
    step = make_sgd_step(Tensor(2.0**26), cell, dtype=mindspore.float16, learning_rate=256.0)
    network, before = step.network, step.network.bias.asnumpy().copy()
    step.network = FromFloat16(network)
    assert not bool(step(inputs(0))[1])
    assert ((network.bias.asnumpy() != before) == trains).all()


class Embedded(nn.Cell):
    """A network whose embedding has sparse gradients, in graph mode."""

    def __init__(self):
        super().__init__()
        weight = Tensor(np.random.default_rng(0).standard_normal((5, 4)), mindspore.float32)
        self.embedding = nn.EmbeddingLookup(5, 4, weight, sparse=True)
        self.scale = Parameter(Tensor(2.0), name="scale")

    def construct(self, tokens, factor):
        return (self.embedding(tokens) * factor).mean() + self.scale


@pytest.mark.parametrize("mode", ["graph"], indirect=True)  # only there MindSpore has them
def test_sparse_gradients_are_unscaled_and_checked(mode, bits):
    def make_step(cell, *scale_sense):
        network = Embedded()
        optimizer = nn.LazyAdam(network.trainable_params(), learning_rate=0.1)
        return cell(network, optimizer, *scale_sense).set_train()

    mine = make_step(ours.TrainOneStepWithLossScaleCell, Tensor(8.0))
    unscaled = make_step(nn.TrainOneStepCell)
    tokens = Tensor([1, 3, 1])
    for _ in range(3):
        mine(tokens, Tensor(1.0))
        unscaled(tokens, Tensor(1.0))
    before = bits(mine)
    assert {k: v for k, v in before.items() if k != "scale_sense"} == bits(unscaled)
    assert bool(mine(tokens, Tensor(INF))[1])
    assert bits(mine) == before


def test_a_custom_train_step_can_use_its_methods(mode, make_sgd_step, inputs):
    """As MindSpore's model zoo does: a construct of its own, and the base's check and update."""
    step = make_sgd_step(ours.DynamicLossScaleUpdateCell(64, 2, 2), Custom)
    before = step.network.bias.asnumpy().copy()
    assert bool(step(inputs(0, INF)))
    assert (step.network.bias.asnumpy() == before).all()
    assert not bool(step(inputs(0)))
    assert (step.network.bias.asnumpy() != before).all()
    assert step.scale_sense.asnumpy() == 32


class Custom(ours.TrainOneStepWithLossScaleCell):
    def construct(self, x):
        loss = self.network(x)
        status, scale = self.start_overflow_check(loss, self.scale_sense)
        grads = self.grad(self.network, self.weights)(x, ops.ones_like(loss) * scale)
        overflow = self.process_loss_scale(self.get_overflow_status(status, grads))
        if not overflow:
            self.optimizer(self.hyper_map(ops.partial(divided, scale), grads))
        return overflow


def divided(scale, grad):
    return grad / scale


@pytest.mark.parametrize(
    ("scale_sense", "message"),
    [
        (ours.DynamicLossScaleManager(), r"pass the result of get_update_cell\(\) of this"),
        (nn.ReLU(), r"got a ReLU, which has no get_loss_scale\(\)"),
    ],
)
def test_a_manager_or_another_cell_is_refused_with_what_to_do(make_sgd_step, scale_sense, message):
    with pytest.raises(TypeError, match=f"scale_sense must be an update cell or .*{message}"):
        make_sgd_step(scale_sense)


@pytest.mark.parametrize("dtype", [mindspore.int32, mindspore.float16, mindspore.float32])
def test_a_scale_of_any_dtype_is_kept_in_a_float32_copy(make_sgd_step, dtype):
    given = Tensor(8, dtype)
    step = make_sgd_step(given)
    assert isinstance(step, nn.TrainOneStepWithLossScaleCell)
    assert step.scale_sense.dtype == mindspore.float32
    for value in (Tensor(0.5), Tensor(2.0**20)):
        step.set_sense_scale(value)
        assert step.scale_sense.asnumpy() == value.asnumpy()
    value = Tensor(32.0)
    step.set_sense_scale(value)
    step.scale_sense.set_data(Tensor(64.0))
    assert (value.asnumpy(), given.asnumpy()) == (32, 8)
