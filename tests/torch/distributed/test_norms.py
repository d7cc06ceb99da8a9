"""The norm of gradients that lie on several processes is that of one process, on each of them."""

import math
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from gradscaler import ParameterError
from gradscaler.torch import GradScaler

INF = float("inf")
NAN = float("nan")
SCALE = 1024.0
NORMS = [1.0, 2.0, 3.0, INF]
RTOL = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-6, torch.float64: 1e-14}

S0, S1, R, P = Shard(0), Shard(1), Replicate(), Partial()
STRIDED = _StridedShard(0, split_factor=2)  # FSDP2 over tensor parallelism

# Each parameter of a layout: its mesh, None if it is plain; its placements; its gradient's.
LAYOUTS = {
    2: {
        "sharded": [("x", [S0], [S0]), ("x", [S1], [S1])],
        "replicated": [("x", [R], [R])],
        "replicated first": [("x", [R], [R]), ("x", [S0], [S0])],
        "replicated last": [("x", [S0], [S0]), ("x", [R], [R])],
        "plain beside": [("x", [S0], [S0]), (None, [], []), ("x", [R], [R])],
        "partial": [("x", [R], [P]), ("x", [S0], [S0]), ("x", [R], [P])],
        "partial first": [("x", [R], [P]), ("x", [S0], [S0])],
        "displaced": [("x", [S0], [R]), ("x", [R], [S1]), ("x", [S1], [S0]), ("x", [S0], [P])],
        "two meshes": [("x", [S0], [S0]), ("y", [S1], [S1])],
    },
    4: {
        "sharded twice": [("xy", [S0, S1], [S0, S1]), ("xy", [S0, S0], [S0, S0])],
        "strided": [("xy", [STRIDED, S0], [STRIDED, S0])],
        "sharded once": [("xy", [R, S0], [R, S0]), ("xy", [S1, R], [S1, R])],
        "mixed": [("xy", [S0, R], [S0, P]), ("xy", [R, R], [R, R]), ("xy", [S0, S1], [S0, S1])],
        "two meshes": [("x", [S0], [S0]), ("y", [S1], [S1])],
        "three meshes": [("y", [R], [R]), ("xy", [S1, S0], [S1, S0]), ("x", [S0], [S0])],
        "plain beside": [(None, [], []), ("xy", [S0, S1], [S0, S1]), ("y", [S0], [S0])],
    },
}
CASES = [(world, layout) for world, layouts in LAYOUTS.items() for layout in layouts]


@cache
def mesh_of(world, name):
    if world == 2:  # two meshes of the same ranks
        return init_device_mesh("cpu", (2,), mesh_dim_names=(name,))
    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    return root if name == "xy" else mesh_of(world, "xy")[name]


def gradients(layout, dtype, special=()):
    """One process' gradients; each of ``special`` is in one shard of the last one alone."""
    generator = torch.Generator().manual_seed(7)
    whole = [torch.randn(4, 8, generator=generator).to(dtype) for _ in layout]
    for place, value in zip([(0, 0), (3, 7)], special, strict=False):
        whole[-1][place] = value
    return whole


def distributed(tensor, mesh, placements):
    """A DTensor of this value, with partial sums that are different on each process."""
    whole = [Replicate() if p.is_partial() else p for p in placements]
    local = distribute_tensor(tensor, mesh, whole).to_local()
    for i, placement in enumerate(placements):
        if placement.is_partial():
            local = local * (0.25 if mesh.get_local_rank(i) == 0 else 0.75)
    return DTensor.from_local(local, mesh, placements)


def laid_out(layout, whole):
    """Parameters of ones whose gradients have been scaled."""
    parameters = []
    for (name, placements, of_gradient), grad in zip(layout, whole, strict=True):
        ones, grad = torch.ones_like(grad), grad * SCALE
        if name is not None:
            mesh = mesh_of(dist.get_world_size(), name)
            ones = distribute_tensor(ones, mesh, placements)
            grad = distributed(grad, mesh, of_gradient)
        parameters.append(torch.nn.Parameter(ones))
        parameters[-1].grad = grad
    return parameters


def scaled_by(scaler):
    scaler.scale(torch.ones(()))
    return scaler


def norm_and_step(layout, dtype, norm_type, special, max_norm=INF, unscale=False):
    layout = LAYOUTS[dist.get_world_size()][layout]
    whole = gradients(layout, dtype, special)
    parameters = laid_out(layout, whole)
    optimizer = torch.optim.SGD(parameters, lr=0.125, foreach=False)
    scaler = scaled_by(GradScaler(init_scale=SCALE, allow_fp16_gradients=True))
    if unscale:
        scaler.unscale_(optimizer)
    norm = scaler.clip_grad_norm_(optimizer, max_norm, norm_type)
    expected = torch.nn.utils.get_total_norm([grad.double() for grad in whole], norm_type)
    torch.testing.assert_close(norm.double(), expected, rtol=RTOL[dtype], atol=0, equal_nan=True)
    scaler.step(optimizer)
    scaler.update()
    finite = math.isfinite(expected)
    factor = min(1.0, max_norm / (expected + 1e-6)) if finite else 0.0
    for parameter, grad in zip(parameters, whole, strict=True):
        value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        after = 1 - 0.125 * factor * grad.double() if finite else torch.ones(4, 8).double()
        torch.testing.assert_close(value.double(), after, rtol=RTOL[dtype], atol=RTOL[dtype])
    return repr(norm.item()), scaler.last_step(optimizer).reason, scaler.state_dict()


@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize(("world", "layout"), CASES)
def test_norm_is_that_of_one_process(ranks, world, layout, norm_type):
    first, *others = ranks(world).run(norm_and_step, layout, torch.float32, norm_type, ())
    assert others == [first] * (world - 1)
    assert first[1] == "finite"


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("norm_type", [2.0, INF])
@pytest.mark.parametrize(("world", "layout"), CASES)
def test_step_is_clipped_by_it(ranks, world, layout, norm_type, unscale):
    args = layout, torch.float32, norm_type, (), 0.5, unscale
    first, *others = ranks(world).run(norm_and_step, *args)
    assert others == [first] * (world - 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize(
    ("world", "layout"), [(2, "plain beside"), (2, "partial"), (4, "sharded twice"), (4, "mixed")]
)
def test_norm_of_other_dtypes(ranks, world, layout, norm_type, dtype):
    first, *others = ranks(world).run(norm_and_step, layout, dtype, norm_type, (), 0.5)
    assert others == [first] * (world - 1)


@pytest.mark.parametrize("special", [(NAN,), (1, NAN), (INF,), (1, -INF), (INF, NAN)])
@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize(
    ("world", "layout"), [(2, "sharded"), (2, "two meshes"), (4, "sharded twice"), (4, "mixed")]
)
def test_value_that_is_not_finite_in_one_shard_is_in_the_norm_of_all(
    ranks, world, layout, norm_type, special
):
    first, *others = ranks(world).run(norm_and_step, layout, torch.float32, norm_type, special)
    assert others == [first] * (world - 1)
    assert first[:2] == ("nan" if any(map(math.isnan, special)) else "inf", "overflow")


def empty_shard(norm_type):
    mesh = mesh_of(2, "x")
    grad = torch.tensor([[3.0, -4.0]])
    parameter = torch.nn.Parameter(distribute_tensor(torch.ones(1, 2), mesh, [S0]))
    parameter.grad = distribute_tensor(grad * SCALE, mesh, [S0])
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = scaled_by(GradScaler(init_scale=SCALE))
    norm = scaler.clip_grad_norm_(optimizer, INF, norm_type).item()
    scaler.step(optimizer)
    assert torch.equal(parameter.full_tensor(), torch.tensor([[-2.0, 5.0]]))
    return norm, scaler.last_step(optimizer).reason


@pytest.mark.parametrize(("norm_type", "norm"), [(1.0, 7.0), (2.0, 5.0), (INF, 4.0)])
def test_process_without_elements_adds_nothing(ranks, norm_type, norm):
    assert ranks(2).run(empty_shard, norm_type) == [(norm, "finite")] * 2


def overflow_on_one(layout, large, bad):
    """The scaled gradients of one process alone are so large that their squares overflow."""
    layout = LAYOUTS[2][layout]
    whole = gradients(layout, torch.float32)
    whole[-1].chunk(2, dim=layout[-1][2][0].dim)[bad].fill_(large)
    parameters = laid_out(layout, whole)
    optimizer = torch.optim.SGD(parameters, lr=0.0, foreach=False)
    scaler = scaled_by(GradScaler(init_scale=SCALE))
    norms = []
    for factor in (1.0, 0.0, 1.0):  # a process that is one collective behind shows in the next
        parameters = laid_out(layout, [grad * factor for grad in whole])
        for old, new in zip(optimizer.param_groups[0]["params"], parameters, strict=True):
            old.grad = new.grad
        norms.append(scaler.clip_grad_norm_(optimizer, 1.0).item())
        scaler.step(optimizer)
        scaler.update()
        assert scaler.last_step(optimizer).reason == "finite"
    expected = torch.nn.utils.get_total_norm([grad.double() for grad in whole]).item()
    assert norms == [pytest.approx(expected, rel=1e-6), 0.0, pytest.approx(expected, rel=1e-6)]
    return norms


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("layout", ["sharded", "two meshes", "replicated first", "partial first"])
def test_norm_that_overflows_on_one_process_leaves_collectives_paired(ranks, layout, bad):
    first, second = ranks(2).run(overflow_on_one, layout, 1e17, bad)
    assert first == second


def own_norm(large, clip_first):
    """Parameters of each process alone, whose norms are its own."""
    parameter = torch.nn.Parameter(torch.ones(4))
    parameter.grad = torch.full((4,), SCALE * (large if dist.get_rank() == 0 else 1.0))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = scaled_by(GradScaler(init_scale=SCALE, group=dist.group.WORLD))
    if not clip_first:
        scaler.unscale_(optimizer)
    try:
        return scaler.clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True).item()
    except RuntimeError as error:
        assert torch.equal(parameter, torch.ones(4))
        return str(error)


@pytest.mark.parametrize("clip_first", [False, True])
def test_error_about_a_norm_is_raised_on_all_processes_or_on_none(ranks, clip_first):
    first, second = ranks(2).run(own_norm, 1e25, clip_first)  # finite, and its square is not
    assert "are inf" in first or "is inf" in first
    assert "is 2.0 here, and not finite on another process" in second
    assert ranks(2).run(own_norm, 3.0, clip_first) == [6.0, 2.0]


def stages(order):
    """Two stages of a pipeline, one with fewer kinds of parameters than the other."""
    mesh = mesh_of(4, "xy")
    stage, tensor_parallel = mesh["x"].get_local_rank(), mesh["y"]
    whole = gradients([0] * 3, torch.float32)
    mine = [(whole[0], [S0])] if stage == 1 else [(whole[1], [R]), (whole[2], [S1])][::order]
    parameters = []
    for grad, placements in mine:
        ones = distribute_tensor(torch.ones_like(grad), tensor_parallel, placements)
        parameters.append(torch.nn.Parameter(ones))
        parameters[-1].grad = distribute_tensor(grad * SCALE, tensor_parallel, placements)
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    scaler = scaled_by(GradScaler(init_scale=SCALE, group=dist.group.WORLD))
    norms = []
    for norm_type in NORMS:
        shards = mesh["x"].get_group()
        norms.append(scaler.clip_grad_norm_(optimizer, INF, norm_type, shards=shards).item())
        expected = torch.nn.utils.get_total_norm([grad.double() for grad in whole], norm_type)
        assert norms[-1] == pytest.approx(expected.item(), rel=1e-6)
    return norms


@pytest.mark.parametrize("order", [1, -1])
def test_processes_with_fewer_kinds_of_parameters_take_part_in_the_same_sums(ranks, order):
    first, *others = ranks(4).run(stages, order)
    assert others == [first] * 3


def refused(what):
    mesh = mesh_of(2, "x")
    parameter = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [S0]))
    parameter.grad = distribute_tensor(torch.ones(4), mesh, [S0])
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = scaled_by(GradScaler())
    shards = {"mesh": mesh, "name": "x", "same": dist.group.WORLD}[what]
    with pytest.raises((TypeError, ParameterError)) as raised:
        scaler.clip_grad_norm_(optimizer, 1.0, shards=shards)
    scaler.step(optimizer)  # nothing was measured or unscaled
    if what != "same":
        with pytest.raises(TypeError, match="group must be a process group"):
            GradScaler(group=shards)
    return f"{raised.type.__name__}: {raised.value}"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("mesh", "TypeError: shards must be a process group"),
        ("name", "TypeError: shards must be a process group"),
        ("same", "ParameterError: shards has ranks of"),
    ],
)
def test_what_cannot_be_shards_is_refused(ranks, what, message):
    assert all(answer.startswith(message) for answer in ranks(2).run(refused, what))
