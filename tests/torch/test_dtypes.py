"""Gradients that PyTorch alone has: complex, sparse and of any layout, and the memory they take."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from gradscaler.torch import GradScaler
from tests.support.eager import library

INF, NAN = float("inf"), float("nan")
SCALE = 8.0
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def placed(kind=GradScaler, **options):
    """A scaler whose scale is placed, so that gradients can be set by hand."""
    scaler = kind("cpu", init_scale=SCALE, **options)
    scaler.scale(torch.ones(()))
    return scaler


def with_gradients(gradients):
    """An optimizer whose parameters have these gradients."""
    parameters = []
    for gradient in gradients:
        parameters.append(torch.nn.Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype)))
        parameters[-1].grad = gradient
    return torch.optim.SGD(parameters, lr=1.0), parameters


def unscaled(gradients, kind=GradScaler, **options):
    """The gradients after unscale_, and whether an overflow was found."""
    scaler = placed(kind, **options)
    optimizer, parameters = with_gradients(gradients)
    scaler.unscale_(optimizer)
    flags = scaler._found_inf_per_device(optimizer).values()
    return [parameter.grad for parameter in parameters], any(flag.item() for flag in flags)


# Fused optimizers.


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_optimizers_take_each_dtype_as_with_torch(dtype):
    results = []
    for kind in (GradScaler, torch.amp.GradScaler):
        parameter = torch.nn.Parameter(torch.ones(3, dtype=dtype))
        parameter.grad = torch.tensor([0.5, -8.0, 3.0], dtype=dtype)
        optimizer = torch.optim.AdamW([parameter], fused=True)
        scaler = placed(kind)
        scaler.step(optimizer)
        scaler.update()
        results.append(library.exact([parameter, parameter.grad, optimizer.state_dict()]))
    assert results[0] == results[1]


# Complex gradients.


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_gradients_are_unscaled(dtype):
    gradients = torch.tensor([3 + 4j, -1j, 2], dtype=dtype)
    (result,), found_inf = unscaled([SCALE * gradients])
    assert torch.equal(result, gradients)
    assert not found_inf


@pytest.mark.parametrize("value", [complex(INF, 0), complex(0, -INF), complex(0, NAN)])
def test_an_overflow_in_either_part_of_a_complex_gradient_is_found(value):
    assert unscaled([torch.tensor([1j, value])])[1]


def test_a_complex_gradient_that_is_a_conjugate_view_is_unscaled():
    """Autograd leaves such a view where the parameter was conjugated."""
    parameter = torch.nn.Parameter(torch.tensor([1 + 2j, 3j]))
    weight = torch.tensor([1 - 1j, 2 + 5j])
    optimizer = torch.optim.SGD([parameter])
    scaler = GradScaler(init_scale=SCALE)
    (parameter.conj() * weight).sum().real.backward()
    plain, parameter.grad = parameter.grad, None
    scaler.scale((parameter.conj() * weight).sum().real).backward()
    assert parameter.grad.is_conj()
    scaler.unscale_(optimizer)
    assert torch.equal(parameter.grad, plain)


# Sparse gradients.


def sparse(values, dtype=torch.float32):
    """A gradient of 4 rows; row 1 occurs twice, so that its values add up."""
    rows = torch.tensor([[1, 3, 1]])
    values = torch.tensor(values, dtype=dtype)
    return torch.sparse_coo_tensor(rows, values, (4,), check_invariants=True)


@pytest.mark.parametrize("coalesced", [False, True], ids=["uncoalesced", "coalesced"])
@pytest.mark.parametrize("value", [8.0, INF, NAN])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sparse_gradients_are_unscaled_as_by_torch(dtype, value, coalesced):
    gradients = [sparse([value, 2.0, 3.0], dtype) for _ in range(2)]
    if coalesced:
        gradients = [gradient.coalesce() for gradient in gradients]
    ours = unscaled([gradients[0]])
    theirs = unscaled([gradients[1]], torch.amp.GradScaler)
    assert library.exact(ours) == library.exact(theirs)


def test_a_mix_of_sparse_and_dense_gradients_is_unscaled():
    results, found_inf = unscaled([torch.ones(2), sparse([8.0, 16.0, 24.0]), torch.ones(2)])
    assert [result.to_dense().tolist() for result in results] == [
        [0.125, 0.125],
        [0.0, 4.0, 0.0, 2.0],
        [0.125, 0.125],
    ]
    assert not found_inf


def test_sparse_complex_gradients_are_unscaled():
    (result,), found_inf = unscaled([sparse([8j, 16.0, -8j], torch.complex64)])
    assert result.to_dense().tolist() == [0, 0, 0, 2]
    assert not found_inf


def test_duplicates_in_float16_are_added_before_they_are_checked():
    """Each is finite, and their sum, which the optimizer would see, is not."""
    scaler = placed(allow_fp16_gradients=True)
    gradient = sparse([60000.0, 1.0, 60000.0], torch.float16)
    optimizer, (parameter,) = with_gradients([gradient])
    scaler.unscale_(optimizer)
    assert parameter.grad.is_coalesced()
    scaler.step(optimizer)
    assert scaler.last_step(optimizer).skipped


def test_an_optimizer_for_sparse_gradients_goes_as_with_torch():
    results = []
    for kind in (GradScaler, torch.amp.GradScaler):
        torch.manual_seed(0)
        embedding = torch.nn.Embedding(5, 3, sparse=True)
        optimizer = torch.optim.SparseAdam(embedding.parameters())
        scaler = kind("cpu", growth_interval=1)
        for rows, factor in (([1, 2, 1], 1.0), ([0], INF), ([4, 4], 2.0)):
            optimizer.zero_grad()
            scaler.scale((embedding(torch.tensor(rows)) * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append(
            library.exact([embedding.weight, optimizer.state_dict(), scaler.state_dict()])
        )
    assert results[0] == results[1]


# Layouts and memory.


def layouts():
    """Gradients whose elements lie in memory in all kinds of ways, fresh at each call."""
    base = torch.arange(1.0, 25.0)
    return [
        base.clone(),
        base.reshape(4, 6).t(),
        base.clone()[::3],
        base.reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
        torch.tensor(2.0),
        torch.empty(0),
        torch.empty(3, 0, 2),
        base.double().reshape(2, 12)[:, 1:5],
        base.bfloat16(),
        sparse([8.0, 16.0, 24.0]),
        torch.empty(0, dtype=torch.bfloat16),
    ]


def test_a_mix_of_layouts_is_unscaled_as_by_torch():
    ours, theirs = unscaled(layouts()), unscaled(layouts(), torch.amp.GradScaler)
    assert library.exact(ours) == library.exact(theirs)
    assert not ours[1]


@pytest.mark.parametrize("where", [i for i, g in enumerate(layouts()) if g.numel()])
@pytest.mark.parametrize("value", [INF, NAN])
def test_an_overflow_in_any_of_them_is_found_and_the_rest_unscaled(where, value):
    sides = []
    for kind in (GradScaler, torch.amp.GradScaler):
        gradients = layouts()
        dense = gradients[where]._values() if gradients[where].is_sparse else gradients[where]
        dense[(-1,) * dense.dim()] = value
        sides.append(unscaled(gradients, kind))
    assert sides[0][1]
    assert library.exact(sides[0]) == library.exact(sides[1])


def test_unscaling_keeps_tensors_and_memory():
    optimizer, parameters = with_gradients(layouts())
    grads = [parameter.grad for parameter in parameters]
    dense = [grad._values() if grad.is_sparse else grad for grad in grads]
    pointers = [grad.data_ptr() for grad in dense]
    scaler = placed()
    scaler.unscale_(optimizer)
    assert [parameter.grad is grad for parameter, grad in zip(parameters, grads, strict=True)] == (
        [True] * len(grads)
    )
    assert [grad.data_ptr() for grad in dense] == pointers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("path", ["on the host", "on an accelerator"])
def test_no_memory_of_a_gradient_s_size_is_asked_for(path, dtype, request):
    if path == "on an accelerator":
        request.getfixturevalue("off_the_host")
    optimizer, _ = with_gradients([torch.ones(1 << 16, dtype=dtype) for _ in range(3)])
    scaler = placed()
    scaler.step(optimizer)  # clipping copies a few parameters of an optimizer that never stepped
    scaler.update()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        scaler.unscale_(optimizer)
        scaler.clip_grad_norm_(optimizer, 0.5)
        scaler.step(optimizer)
        scaler.update()
    asked_for = [event.self_cpu_memory_usage for event in profiler.events()]
    assert 0 < max(asked_for) < 1024
