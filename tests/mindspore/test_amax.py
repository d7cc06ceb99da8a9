"""A policy that looks at the largest gradient is handed it, in both modes, by every way there."""

import mindspore
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mindspore import Parameter, Tensor, amp, nn, ops
from mindspore.common.sparse_tensor import RowTensorInner

import gradscaler.mindspore as ours
from gradscaler import DynamicScale
from gradscaler.mindspore import _operations
from tests.support.amax import INF, NAN, TRACE, policy
from tests.support.chosen import examples

MISSING = "policy needs the largest gradient"


POLICIES = {
    "an interval": policy(amax_interval=2),
    "a long interval": policy(amax_interval=2**40, growth_interval=2**40),
    "factors that float32 rounds, and bounds": policy(
        growth_factor=1.7, backoff_factor=0.3, margin=3, min_scale=512.0, max_scale=4096.0
    ),
}


def as_bits(leaves):
    leaves = (leaf.asnumpy() if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return [np.asarray(leaf, np.float32).tobytes() for leaf in leaves]


class Weights(nn.Cell):
    """The gradients are ``size``, ``-size / 2`` and zeros."""

    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(np.ones((2, 2), np.float32)), name="weight")
        self.bias = Parameter(Tensor(np.ones(2, np.float32)), name="bias")
        self.signs = Tensor(np.float32([[0.0, 1.0], [0.0, 0.0]]))

    def construct(self, size):
        return (self.weight * self.signs).sum() * size - self.bias[0] * size / 2


def make_step(scale_sense, step=ours.TrainOneStepWithLossScaleCell):
    network = Weights()
    optimizer = nn.SGD(network.trainable_params(), learning_rate=2.0**-20)
    return step(network, optimizer, scale_sense).set_train()


def leaves_of(scale, cell):
    finite_steps = cell.cur_iter - 1 - cell.last_overflow_iter
    return scale, finite_steps, cell.nonfinite_steps, cell.peak, cell.reach


# The same bits as on the host.


@pytest.mark.parametrize("compiled", [False, True], ids=["called", "compiled"])
@pytest.mark.parametrize("rule", POLICIES.values(), ids=POLICIES)
def test_any_trace_gives_the_bits_of_the_host(mode, rule, compiled):
    scaler, cell = ours.DynamicLossScaler(policy=rule), ours.DynamicLossScaleUpdateCell(policy=rule)
    scale = Parameter(Tensor(cell.get_loss_scale(), mindspore.float32), name="scale")
    owned = [scaler.scale_value, scaler.counter, scaler.nonfinite_steps, scaler.peak, scaler.reach]
    moved = [*owned, scale, *cell.get_parameters()]
    initial = [parameter.asnumpy().copy() for parameter in moved]

    @mindspore.jit
    def jitted(finite, amax):
        return scaler.adjust(finite, amax)

    adjust = jitted if compiled else scaler.adjust

    @settings(max_examples=examples(12))
    @given(
        trace=st.lists(
            st.tuples(
                st.booleans(),
                st.floats(2.0**-30, 2.0**30, width=32) | st.sampled_from([INF, NAN, 0.0, 1e-45]),
            ),
            max_size=15,
        )
    )
    def compare(trace):
        for parameter, value in zip(moved, initial, strict=True):
            ops.assign(parameter, Tensor(value))  # MindSpore's large graphs miss a set_data()
        manager, state = ours.DynamicLossScaleManager(policy=rule), rule.init()
        for overflow, amax in trace:
            assert adjust(Tensor(not overflow), Tensor(amax, mindspore.float32)) is True
            cell(scale, Tensor(overflow), Tensor(amax, mindspore.float32))
            manager.update_loss_scale(overflow, amax)
            state = rule.update(state, overflow, amax=np.float32(amax))
            assert as_bits(owned) == as_bits(state)
            assert as_bits(leaves_of(scale, cell)) == as_bits(state)
            assert as_bits([manager.loss_scale, *manager._state[1:]]) == as_bits(state)
        assert [str(p.dtype) for p in owned] == ["Float32", *["Int32"] * 2, *["Float32"] * 2]

    compare()


@pytest.mark.parametrize("interval", [1, 2])
def test_a_train_step_hands_the_cell_the_largest_unscaled_gradient(mode, interval):
    rule = policy(amax_interval=interval)
    step, state = make_step(ours.DynamicLossScaleUpdateCell(policy=rule)), rule.init()
    for size in TRACE:
        overflow = step(Tensor(size, mindspore.float32))[1]
        state = rule.update(state, not np.isfinite(size), amax=np.float32(abs(size)))
        assert bool(overflow) != np.isfinite(size)
        leaves = leaves_of(step.scale_sense, step.loss_scaling_manager)
        assert as_bits(leaves) == as_bits(state)
    assert state.peak > 0


class Functional:
    """A training loop in functions."""

    def __init__(self, scaler):
        self.network, self.scaler = Weights(), scaler
        self.grad = mindspore.grad(self.forward, None, self.network.trainable_params())

    def forward(self, size):
        return self.scaler.scale(self.network(size))

    def step(self, size):
        grads = self.scaler.unscale(self.grad(size))
        return self.scaler.adjust(ours.all_finite(grads), ours.amax(grads))


Functional = mindspore.jit_class(Functional)
KEPT = []  # MindSpore caches compiled code by the ids of objects, so they must live on


@pytest.mark.parametrize("in_jit", [False, True], ids=["called", "compiled"])
def test_a_functional_loop_hands_the_scaler_the_largest_gradient(mode, in_jit):
    rule = policy()
    loop, state = Functional(ours.DynamicLossScaler(policy=rule)), rule.init()

    @mindspore.jit
    def jitted(size):
        return loop.step(size)

    KEPT.extend([loop, jitted])
    for size in TRACE:
        (jitted if in_jit else loop.step)(Tensor(size, mindspore.float32))
        state = rule.update(state, not np.isfinite(size), amax=np.float32(abs(size)))
        scaler = loop.scaler
        leaves = scaler.scale_value, scaler.counter, scaler.nonfinite_steps
        assert as_bits([*leaves, scaler.peak, scaler.reach]) == as_bits(state)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_the_scale_and_amax_may_have_the_shape_1(mode, shape):
    rule = policy()
    cell, state = ours.DynamicLossScaleUpdateCell(policy=rule), rule.init()
    scale = Parameter(ops.full(shape, 1024.0, dtype=mindspore.float32), name="scale")
    for overflow, size in [(False, 0.5), (True, 0.5), (False, 3.0)]:
        cell(scale, Tensor([overflow]), ops.full(shape, size, dtype=mindspore.float32))
        state = rule.update(state, overflow, amax=np.float32(size))
    assert (scale.shape, cell.peak.shape, cell.reach.shape) == (shape, (), ())
    assert as_bits(leaves_of(scale.reshape(()), cell)) == as_bits(state)


# Model and build_train_network.


def test_a_model_trains_by_the_policy_and_its_manager_follows(mode, layer, dataset):
    rule = policy()
    manager = ours.DynamicLossScaleManager(policy=rule)
    network = layer()
    optimizer = nn.SGD(network.trainable_params(), learning_rate=0.01)
    model = ours.Model(network, nn.MSELoss(), optimizer, loss_scale_manager=manager)
    seen = []

    class Watch(mindspore.train.Callback):
        def on_train_step_end(self, run_context):
            scale = model.train_network.scale_sense.asnumpy().item()
            seen.append((manager.get_loss_scale(), scale))

    overflows = [None, None, INF, None, NAN, None]
    model.train(1, dataset(*overflows), callbacks=Watch())
    step = model.train_network
    assert [of_manager for of_manager, _ in seen] == [of_step for _, of_step in seen]
    assert len({scale for scale, _ in seen}) > 2
    assert (manager.cur_iter, manager.last_overflow_iter) == (7, 5)
    assert step.loss_scaling_manager.peak.asnumpy() > 0
    with pytest.raises(TypeError, match=MISSING):  # the training is over
        manager.update_loss_scale(False)


def test_other_devices_train_by_the_policy_too(monkeypatch, layer):
    """MindSpore could build a train step there, but not one that measures gradients."""
    module = __import__("gradscaler.mindspore.train", fromlist=["train"])
    monkeypatch.setattr(module, "on_cpu", lambda: False)
    network = layer()
    optimizer = nn.SGD(network.trainable_params(), learning_rate=0.01)
    manager = ours.DynamicLossScaleManager(policy=policy())
    step = ours.build_train_network(network, optimizer, nn.MSELoss(), loss_scale_manager=manager)
    assert type(step) is ours.TrainOneStepWithLossScaleCell


# Code that cannot see the gradients says so.


class NativeStep(nn.TrainOneStepWithLossScaleCell):
    """MindSpore's own, except for its check, an Ascend kernel that the CPU does not have."""

    def get_overflow_status(self, status, compute_output):
        return ops.logical_not(amp.all_finite(compute_output))


def test_mindspores_train_step_is_refused_with_what_to_use(mode):
    step = make_step(ours.DynamicLossScaleUpdateCell(policy=policy()), NativeStep)
    with pytest.raises(TypeError, match=f"{MISSING}.*TrainOneStepWithLossScaleCell"):
        step(Tensor(1.0))
    assert step.scale_sense.asnumpy() == 1024.0


class Custom(ours.TrainOneStepWithLossScaleCell):
    """A construct of its own, as MindSpore's model zoo has, that hands over the gradient's size."""

    def construct(self, size):
        loss = self.network(size)
        status, scale = self.start_overflow_check(loss, self.scale_sense)
        grads = self.grad(self.network, self.weights)(size, ops.ones_like(loss) * scale)
        grads = (grads[0] / scale, grads[1] / scale)
        overflow = self.get_overflow_status(status, grads)
        return self.process_loss_scale(overflow, self.get_amax(grads))


def test_a_custom_train_step_can_hand_it_over(mode):
    rule = policy()
    step, state = make_step(ours.DynamicLossScaleUpdateCell(policy=rule), Custom), rule.init()
    for size in (0.5, INF, 3.0):
        assert bool(step(Tensor(size))) == np.isinf(size)
        state = rule.update(state, np.isinf(size), amax=np.float32(size))
    assert as_bits(leaves_of(step.scale_sense, step.loss_scaling_manager)) == as_bits(state)


def test_an_amax_that_is_missing_or_bad_is_refused_and_nothing_changes(mode):
    scaler = ours.DynamicLossScaler(policy=policy(amax_interval=3))
    for arguments, message in [((), MISSING), ((Tensor([1.0, 2.0]),), "amax must be a number")]:
        with pytest.raises(TypeError, match=message):
            scaler.adjust(Tensor(True), *arguments)
    assert (scaler.scale_value.asnumpy(), scaler.counter.asnumpy()) == (1024.0, 0)


def test_0_leaves_out_a_step_that_needs_no_measurement(mode):
    rule = policy(amax_interval=2)
    measured, spared = (ours.DynamicLossScaler(policy=rule) for _ in range(2))
    for finite, amax in [(True, 0.5), (True, 8.0), (True, 3.0), (False, 1.0), (True, 0.25)]:
        needed = spared.counter.asnumpy() % 2 == 0 and finite
        measured.adjust(finite, Tensor(amax))
        spared.adjust(finite, amax if needed else 0.0)
    leaves = [(s.scale_value, s.counter, s.peak, s.reach) for s in (measured, spared)]
    assert as_bits(leaves[0]) == as_bits(leaves[1])


def test_a_manager_needs_it_only_where_the_policy_looks(mode):
    manager = ours.DynamicLossScaleManager(policy=policy(amax_interval=2))
    with pytest.raises(TypeError, match=rf"{MISSING}.*update_loss_scale\(overflow, amax"):
        manager.update_loss_scale(False)
    assert (manager.cur_iter, manager.loss_scale) == (1, 1024.0)
    manager.update_loss_scale(True)
    manager.update_loss_scale(False, Tensor([0.5]))
    manager.update_loss_scale(False)
    assert manager.cur_iter == 4
    with pytest.raises(TypeError, match="amax must be a number"):
        manager.update_loss_scale(False, "1")


# amax itself.


@pytest.mark.parametrize(
    ("inputs", "largest"),
    [
        ((), 0.0),
        (Tensor([1.0, -2.5]), 2.5),
        ([Tensor([1.0]), Tensor([[-3.0]])], 3.0),
        ((Tensor([-9, 4]), Tensor(np.zeros((0, 2), np.float32)), Tensor([True])), 0.0),
        ((Tensor([-60000.0], mindspore.float16), Tensor([1.0], mindspore.float64)), 60000.0),
        ((Tensor([-3.0, 2.0], mindspore.bfloat16),), 3.0),
    ],
)
def test_amax_is_the_largest_magnitude_of_floating_tensors(mode, inputs, largest):
    found = ours.amax(inputs)
    assert (str(found.dtype), found.shape, found.asnumpy()) == ("Float32", (), largest)


@pytest.mark.parametrize("inputs", [None, 1.0, (1.0,), (Tensor(1.0), None)])
def test_amax_refuses_what_is_no_tensor(mode, inputs):
    with pytest.raises(TypeError, match=r"^inputs must"):
        ours.amax(inputs)


@pytest.mark.parametrize("mode", ["graph"], indirect=True)  # only there MindSpore has them
def test_a_sparse_gradient_counts_by_its_values(mode):
    @mindspore.jit
    def largest(values):
        return _operations.largest(RowTensorInner(Tensor([1, 3]), values, (5, 2)))

    assert largest(Tensor([[1.0, 2.0], [-4.0, 0.0]])).asnumpy() == 4.0


# Saving, and policies that do not want it.


def test_a_checkpoint_brings_every_leaf_back(mode, tmp_path):
    rule = policy()
    whole, resumed = (make_step(ours.DynamicLossScaleUpdateCell(policy=rule)) for _ in range(2))
    for size in TRACE[:8]:
        whole(Tensor(size, mindspore.float32))
    mindspore.save_checkpoint(whole, str(tmp_path / "half.ckpt"))
    loaded = mindspore.load_checkpoint(str(tmp_path / "half.ckpt"))
    assert mindspore.load_param_into_net(resumed, loaded, strict_load=True) == ([], [])
    for size in TRACE[8:]:
        for step in (whole, resumed):
            step(Tensor(size, mindspore.float32))
    ends = [leaves_of(s.scale_sense, s.loss_scaling_manager) for s in (whole, resumed)]
    assert as_bits(ends[0]) == as_bits(ends[1])


def test_no_other_policy_costs_a_measurement(mode, monkeypatch):
    def refuse(self, grads):
        raise AssertionError("called for a policy that does not look at it")

    monkeypatch.setattr(ours.TrainOneStepWithLossScaleCell, "get_amax", refuse)
    make_step(ours.DynamicLossScaleUpdateCell(policy=DynamicScale()))(Tensor(1.0))
    make_step(Tensor(8.0))(Tensor(1.0))
    with pytest.raises(AssertionError):
        make_step(ours.DynamicLossScaleUpdateCell(policy=policy()))(Tensor(1.0))
