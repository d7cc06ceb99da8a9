"""Fleet's ways to spread a model over processes: all decide alike, and train as one process does.

Fleet's own layers do not run on a CPU where they slice a weight (``c_identity`` is "not supported
for cpu kernel"), so two layers here stand in for them. Its pipeline needs one function that gloo
does not have, and the number of a device.
"""

from unittest import mock

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from paddle import nn
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import LayerDesc, PipelineLayer
from paddle.distributed.fleet.meta_parallel.pp_utils import p2p_communication

from gradscaler import ScaleMismatchError
from gradscaler.paddle import GradScaler

INF = float("inf")
STEPS = 5
OVERFLOWS = 2
SIZES = [4, 6, 4, 1]
LAYERS = range(len(SIZES) - 1)
random = np.random.RandomState(0)
WEIGHTS = [random.normal(0, 0.5, SIZES[i : i + 2]).astype("float32") for i in LAYERS]
BIASES = [random.normal(0, 0.5, SIZES[i + 1]).astype("float32") for i in LAYERS]
INPUTS = random.normal(0, 1, [8, SIZES[0]]).astype("float32")
TARGETS = random.normal(0, 3, [8, 1]).astype("float32")


def of_value(value):
    return paddle.ParamAttr(initializer=nn.initializer.Assign(value))


class Dense(nn.Linear):
    """One of the three layers, tanh between them."""

    def __init__(self, index):
        weight, bias = WEIGHTS[index], BIASES[index]
        super().__init__(*weight.shape, of_value(weight), of_value(bias))
        self.index = index

    def forward(self, inputs):
        outputs = super().forward(inputs)
        return outputs if self.index == LAYERS[-1] else outputs.tanh()

    def whole(self):
        """Its parameters by name, and the axis that each is split along."""
        return {
            (self.index, "weight"): (self.weight.numpy(), None),
            (self.index, "bias"): (self.bias.numpy(), None),
        }


def sum_over(group):
    class Sum(paddle.autograd.PyLayer):
        """The sum over a group, whose gradient each process has already."""

        @staticmethod
        def forward(ctx, inputs):
            outputs = inputs.clone()
            dist.all_reduce(outputs, group=group)
            return outputs

        @staticmethod
        def backward(ctx, gradient):
            return gradient.clone()

    return Sum.apply


def copy_to(group):
    class Copy(paddle.autograd.PyLayer):
        """A copy for each process of a group; their gradients add up."""

        @staticmethod
        def forward(ctx, inputs):
            return inputs.clone()

        @staticmethod
        def backward(ctx, gradient):
            gradient = gradient.clone()
            dist.all_reduce(gradient, group=group)
            return gradient

    return Copy.apply


class Sliced(nn.Layer):
    """The first two layers, each process with some of the units between them."""

    def __init__(self, group):
        super().__init__()
        units = np.array_split(np.arange(SIZES[1]), group.nranks)[group.rank]
        self.column = self.create_parameter(
            [SIZES[0], len(units)], of_value(WEIGHTS[0][:, units].copy())
        )
        self.bias = self.create_parameter([len(units)], of_value(BIASES[0][units].copy()))
        self.row = self.create_parameter([len(units), SIZES[2]], of_value(WEIGHTS[1][units].copy()))
        for parameter in (self.column, self.bias, self.row):
            parameter.is_distributed = True
        self.last = self.create_parameter([SIZES[2]], of_value(BIASES[1]))
        self.sum, self.copy = sum_over(group), copy_to(group)

    def forward(self, inputs):
        units = (self.copy(inputs) @ self.column + self.bias).tanh()
        return (self.sum(units @ self.row) + self.last).tanh()

    def whole(self):
        return {
            (0, "weight"): (self.column.numpy(), 1),
            (0, "bias"): (self.bias.numpy(), 0),
            (1, "weight"): (self.row.numpy(), 0),
            (1, "bias"): (self.last.numpy(), None),
        }


def loss_of(outputs, targets):
    return ((outputs - targets) ** 2).mean()


def send(tensor, group, peer, *_):
    dist.send(tensor.contiguous(), group.ranks[peer] if peer < group.nranks else peer, group)


def receive(tensor, group, peer, *_):
    dist.recv(tensor, group.ranks[peer] if peer < group.nranks else peer, group)


def make(topology):
    """The model as fleet has it, and its layers of this process."""
    if topology is None:
        model = nn.Sequential(*map(Dense, LAYERS))
        return model, list(model)
    if topology.get_pipe_parallel_world_size() > 1:
        p2p_communication._send_on_calc_stream = send
        p2p_communication._recv_on_calc_stream = receive
        type(dist.ParallelEnv()).device_id = 0
        layers = [LayerDesc(Dense, index) for index in LAYERS]
        model = PipelineLayer(layers, topology=topology.topology(), loss_fn=loss_of)
        return fleet.distributed_model(model), list(model.run_function)
    if topology.get_model_parallel_world_size() > 1:
        model = nn.Sequential(Sliced(topology.get_model_parallel_group()), Dense(2))
        fleet.distributed_model(model)  # it broadcasts weights; its forward asks for a GPU
        return model, list(model)
    model = nn.Sequential(*map(Dense, LAYERS))
    return fleet.distributed_model(model), list(model)


def own_part(topology, values):
    """The samples of this process."""
    if topology is None:
        return paddle.to_tensor(values)
    repeats = topology.get_data_parallel_world_size(), topology.get_sharding_parallel_world_size()
    place = topology.get_data_parallel_rank() * repeats[1] + topology.get_sharding_parallel_rank()
    return paddle.to_tensor(np.split(values, repeats[0] * repeats[1])[place])


def train(bad, scaling, clip, distributed=True):
    """Five steps; in the third, gradients of rank ``bad`` overflow."""
    topology = fleet.get_hybrid_communicate_group() if distributed else None
    model, layers = make(topology)
    inputs, targets = own_part(topology, INPUTS), own_part(topology, TARGETS)
    grad_clip = nn.ClipGradByGlobalNorm(0.5) if clip == "grad_clip" else None
    optimizer = paddle.optimizer.Momentum(0.1, parameters=model.parameters(), grad_clip=grad_clip)
    scaler = GradScaler(init_loss_scaling=1024.0, incr_every_n_steps=2, decr_every_n_nan_or_inf=1)
    if distributed:
        optimizer = fleet.distributed_optimizer(optimizer)
        if scaling == "fleet":
            scaler = fleet.distributed_scaler(scaler)
    step, rank = 0, dist.get_rank() if distributed else bad
    next(iter(model.parameters())).register_hook(
        lambda gradient: gradient * (INF if (step, rank) == (OVERFLOWS, bad) else 1.0)
    )
    pipeline = distributed and topology.get_pipe_parallel_world_size() > 1
    results, norms = [], []
    for step in range(STEPS):  # noqa: B007 # the hook reads it
        before = [parameter.numpy() for parameter in model.parameters()]
        if pipeline and not clip:
            model.train_batch([inputs, targets], optimizer, scaler=scaler)
        else:
            if pipeline:
                model._prepare_training([inputs, targets], optimizer, None)
                model.forward_backward_pipeline([inputs, targets], scaler)
            else:
                scaler.scale(loss_of(model(inputs), targets)).backward()
            if clip == "clip_grad_norm_":
                norm = scaler.clip_grad_norm_(optimizer, 0.5).item()
                norms.append(norm if np.isfinite(norm) else INF)  # Inf - Inf is NaN
            scaler.step(optimizer)
            scaler.update()
            optimizer.clear_grad()
        after = [parameter.numpy() for parameter in model.parameters()]
        moved = any((one != other).any() for one, other in zip(before, after, strict=True))
        outcome = scaler.last_step(optimizer)
        results.append((outcome.reason, outcome.scale, moved, scaler.state_dict()))
    parameters = {}
    for layer in layers:
        parameters.update(layer.whole() if hasattr(layer, "whole") else {})
    return results, norms, parameters


def together(of_ranks):
    """The whole parameters, where those of several processes agree to the bit."""
    whole = {}
    for name in sorted({name for parameters in of_ranks for name in parameters}):
        parts = [parameters[name] for parameters in of_ranks if name in parameters]
        axis = parts[0][1]
        slices = list({part.tobytes(): part for part, _ in parts}.values())
        whole[name] = slices[0] if axis is None else np.concatenate(slices, axis)
        assert axis is not None or len(slices) == 1, f"{name} differs between ranks"
    return whole


LAYOUTS = {
    "dp": (2, {"dp": 2}),
    "sharding": (2, {"sharding": 2}),
    "mp": (2, {"mp": 2}),
    "pp": (2, {"pp": 2}),
    "dp x mp": (4, {"dp": 2, "mp": 2}),
}


def assert_as_one_process(ranks, layout, bad, scaling, clip=None):
    world, degrees = LAYOUTS[layout]
    answers = ranks(world, **degrees).run(train, bad, scaling, clip)
    expected, expected_norms, one = train(bad, None, clip, distributed=False)
    for results, norms, _ in answers:
        assert results == expected
        assert norms == pytest.approx(expected_norms, rel=1e-5)
    whole = together([parameters for *_, parameters in answers])
    one = together([one])
    assert whole.keys() == one.keys()
    for name, value in one.items():
        np.testing.assert_allclose(whole[name], value, rtol=1e-4, atol=1e-6, err_msg=str(name))
    reasons, _, moved, states = zip(*expected, strict=True)
    assert reasons == ("finite", "finite", "overflow", "finite", "finite")
    assert moved == (True, True, False, True, True)
    assert [state["scale"].item() for state in states] == [1024, 2048, 1024, 1024, 2048]


every_rank = [(layout, bad) for layout, (world, _) in LAYOUTS.items() for bad in range(world)]


@pytest.mark.parametrize("scaling", ["fleet", "plain"])
@pytest.mark.parametrize(("layout", "bad"), every_rank)
def test_all_processes_train_as_one_does(ranks, layout, bad, scaling):
    assert_as_one_process(ranks, layout, bad, scaling)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_optimizer_s_own_clipping_goes_by_the_norm_of_all(ranks, layout):
    assert_as_one_process(ranks, layout, 0, "fleet", "grad_clip")


@pytest.mark.parametrize("scaling", ["fleet", "plain"])
@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("layout", ["dp", "mp", "pp"])
def test_the_scaler_clips_by_the_norm_of_all(ranks, layout, bad, scaling):
    assert_as_one_process(ranks, layout, bad, scaling, "clip_grad_norm_")


def clip_before_the_average(scaling):
    topology = fleet.get_hybrid_communicate_group()
    model, _ = make(topology)
    optimizer = paddle.optimizer.Momentum(0.1, parameters=model.parameters())
    optimizer = fleet.distributed_optimizer(optimizer)
    scaler = GradScaler(init_loss_scaling=1024.0)
    if scaling == "fleet":
        scaler = fleet.distributed_scaler(scaler)
    loss = loss_of(model(own_part(topology, INPUTS)), own_part(topology, TARGETS))
    scaler.scale(loss).backward()
    before = [parameter.grad.numpy() for parameter in model.parameters()]
    for norm_type in (2.0, 1.0):
        with pytest.raises(
            ValueError, match=r"with sharding, fleet averages.*grad_clip="
        ) as raised:
            scaler.clip_grad_norm_(optimizer, 1.0, norm_type)
    after = [parameter.grad.numpy() for parameter in model.parameters()]
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)
    scaler.step(optimizer)
    return str(raised.value), scaler.last_step(optimizer).reason


@pytest.mark.parametrize("scaling", ["fleet", "plain"])
def test_gradients_that_are_not_averaged_yet_are_not_clipped(ranks, scaling):
    first, second = ranks(2, sharding=2).run(clip_before_the_average, scaling)
    assert first == second
    assert first[1] == "finite"


def uneven(scaling, norm_type):
    """The first stage has slices alone, of [3, 0] and [0, 4]; the second has whole weights alone.

    One of those is shared with a stage that counts it.
    """
    topology = fleet.get_hybrid_communicate_group()
    gradients = [[12.0, 0.0], [100.0, 0.0]]
    if topology.is_first_stage:
        gradients = [[[3.0, 0.0], [0.0, 4.0]][topology.get_model_parallel_rank()]]
    parameters = [paddle.create_parameter([2], "float32") for _ in gradients]
    parameters[0].is_distributed = topology.is_first_stage
    parameters[-1].is_firstly_shared = topology.is_first_stage
    before = [parameter.numpy() for parameter in parameters]
    optimizer = paddle.optimizer.SGD(1.0, parameters=parameters)
    optimizer = fleet.distributed_optimizer(optimizer)
    scaler = GradScaler(init_loss_scaling=1024.0)
    if scaling == "fleet":
        scaler = fleet.distributed_scaler(scaler)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        scaler.scale((parameter * paddle.to_tensor(gradient)).sum()).backward()
    norm = scaler.clip_grad_norm_(optimizer, 1.0, norm_type).item()
    scaler.step(optimizer)
    for one, parameter, gradient in zip(before, parameters, gradients, strict=True):
        np.testing.assert_allclose(one - parameter.numpy(), np.array(gradient) / norm, atol=1e-5)
    return norm


@pytest.mark.parametrize(("norm_type", "norm"), [(2.0, 13.0), (1.0, 19.0), (INF, 12.0)])
@pytest.mark.parametrize("scaling", ["fleet", "plain"])
def test_stages_that_hold_different_kinds_of_weights_have_one_norm(ranks, scaling, norm_type, norm):
    assert ranks(4, mp=2, pp=2).run(uneven, scaling, norm_type) == [pytest.approx(norm)] * 4


def fleet_with_different_scales():
    scaler = GradScaler(init_loss_scaling=[64.0, 1024.0][dist.get_rank()], group=dist.get_group(0))
    scaler = fleet.distributed_scaler(scaler)
    parameter = paddle.create_parameter([2], "float32")
    before = parameter.tolist()
    optimizer = fleet.distributed_optimizer(paddle.optimizer.SGD(1.0, parameters=[parameter]))
    scaler.scale(parameter.sum()).backward()
    with pytest.raises(ScaleMismatchError) as raised:
        scaler.step(optimizer)
    assert parameter.tolist() == before
    return str(raised.value)


def test_a_group_compares_scales_where_fleet_does_not(ranks):
    first, second = ranks(2, mp=2).run(fleet_with_different_scales)
    assert first == second
    assert "scale is 64 on one and 1024 on another" in first


def counts(scaling):
    """The all-reduces of a step that decide: fleet's are maxima, and ours are of an integer."""
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        train(0, scaling, None)
    calls = all_reduce.call_args_list
    decisions = [
        dist.ReduceOp.MAX in (*call.args[1:], *call.kwargs.values())
        or call.args[0].dtype == paddle.int64
        for call in calls
    ]
    return sum(decisions) / STEPS


@pytest.mark.parametrize("scaling", ["fleet", "plain"])
@pytest.mark.parametrize(("layout", "expected"), [("dp", 0), ("sharding", 1), ("mp", 1), ("pp", 1)])
def test_one_all_reduce_decides_a_step_where_gradients_differ(ranks, layout, expected, scaling):
    world, degrees = LAYOUTS[layout]
    assert ranks(world, **degrees).run(counts, scaling) == [expected] * world
