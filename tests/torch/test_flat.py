"""Gradients that lie side by side: laid so by flat_gradients, or found so, and used as before."""

import copy
import io
import math
import random
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gradscaler._on_torch.flat import side_by_side
from gradscaler.torch import GradScaler, flat_gradients
from tests.support.eager import library

INF = math.inf


class Model(torch.nn.Module):
    """Dense layers of two dtypes, and parameters that need care or must be left alone."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 5)
        self.wide = torch.nn.Linear(5, 3, dtype=torch.float64)
        self.frozen = torch.nn.Linear(5, 5).requires_grad_(False)
        self.unused = torch.nn.Linear(5, 5)
        self.tied = self.first.bias
        self.conv = torch.nn.Conv2d(3, 2, 2).to(memory_format=torch.channels_last)
        self.sparse = torch.nn.Embedding(6, 5, sparse=True)
        self.last = torch.nn.Linear(5, 1)

    def forward(self, x):
        x = self.frozen(self.first(x)) + self.sparse(torch.tensor([1, 3, 1, 2])) + self.tied
        image = torch.linspace(-1, 1, 3 * 9).view(1, 3, 3, 3)
        return self.last(x).sum() + self.wide(x.double()).sum() + self.conv(image).square().sum()


def made():
    torch.manual_seed(0)
    return Model()


def batch(step):
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(step))


def in_a_buffer(tensor, flat):
    """Whether a tensor lies in one of the buffers as a whole."""
    return any(
        buffer.data_ptr() <= tensor.data_ptr()
        and tensor.data_ptr() + tensor.nbytes <= buffer.data_ptr() + buffer.nbytes
        for buffer in flat.buffers
    )


def described(parameter):
    grad = parameter.grad
    if grad is None:
        return None
    layout = (grad.is_sparse, None if grad.is_sparse else grad.stride(), grad.requires_grad)
    return (layout, *library.exact([grad.to_dense()]))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_what_they_were(set_to_none):
    flat_model, model = made(), made()
    flat = flat_gradients(flat_model)
    for step in range(3):
        for each in (flat_model, model):
            each.zero_grad(set_to_none)
            each(batch(step)).backward()
            each(batch(step + 10)).backward()  # accumulates
        assert [*map(described, flat_model.parameters())] == [*map(described, model.parameters())]
    names = {
        name
        for name, p in flat_model.named_parameters()
        if p.grad is not None and not p.grad.is_sparse
    }
    laid = {
        name
        for name, p in flat_model.named_parameters()
        if name in names and in_a_buffer(p.grad, flat)
    }
    assert laid == names
    assert {b.dtype for b in flat.buffers} == {torch.float32, torch.float64}
    assert flat_model.unused.weight.grad is None
    assert flat_model.sparse.weight.grad.is_sparse


def test_the_buffers_are_as_large_as_the_gradients():
    model = torch.nn.Linear(100, 100)
    flat = flat_gradients(model)
    assert [buffer.nbytes for buffer in flat.buffers] == [sum(p.nbytes for p in model.parameters())]
    model(torch.ones(1, 100)).sum().backward()
    storages = {parameter.grad.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert storages == {flat.buffers[0].data_ptr()}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_empty_parameters_alone_get_an_empty_buffer(dtype):
    empty = [torch.nn.Parameter(torch.empty(shape, dtype=dtype)) for shape in (0, (3, 0))]
    model = torch.nn.ParameterList(empty)
    (buffer,) = flat_gradients(model).buffers
    sum(parameter.sum() for parameter in model).backward()
    assert (buffer.shape, buffer.dtype) == ((0,), dtype)
    assert [parameter.grad.shape for parameter in model] == [(0,), (3, 0)]


def test_gradients_that_are_there_are_laid_at_once():
    model = torch.nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    before = library.exact([parameter.grad for parameter in model.parameters()])
    flat = flat_gradients(model)
    assert library.exact([parameter.grad for parameter in model.parameters()]) == before
    assert all(in_a_buffer(parameter.grad, flat) for parameter in model.parameters())


class Seen(TorchDispatchMode):
    """Notes how many tensors each list operation gets."""

    def __init__(self):
        super().__init__()
        self.lists = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if args and isinstance(args[0], (list, tuple)):
            self.lists.setdefault(function.overloadpacket.__name__, []).append(len(args[0]))
        return function(*args, **(kwargs or {}))


def trained(flat, kind, sequence, set_to_none, max_norm):
    """All that a training leaves, with an overflow in the fourth of its steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(4)))
    optimizer = library.optimizers[kind](list(model.parameters()))
    if flat:
        flat_gradients(optimizer)
    scaler = GradScaler(init_scale=2.0**8, growth_interval=2)
    left = []
    for step in range(8):
        optimizer.zero_grad(set_to_none)
        scaler.scale(model(batch(step).repeat(1, 2)[:, :6]).square().mean()).backward()
        if step == 3:
            model[2].weight.grad[1, 2] = INF
        if "unscale" in sequence:
            scaler.unscale_(optimizer)
        norm = scaler.clip_grad_norm_(optimizer, max_norm).item() if "clip" in sequence else 0.0
        scaler.step(optimizer)
        scaler.update()
        left.append((norm, scaler.state_dict(), repr(scaler.last_step(optimizer))))
        left.append(library.exact([parameter.grad for parameter in model.parameters()]))
        left.append(library.exact([parameter.detach() for parameter in model.parameters()]))
    return left


@pytest.mark.parametrize("kind", ["SGD", "foreach Adam", "fused AdamW"])
@pytest.mark.parametrize("sequence", ["step", "unscale, step", "clip, step", "unscale, clip, step"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_training_is_the_same_to_the_bit(kind, sequence, set_to_none):
    """Norms may differ in the last bit, so only overflows are clipped here."""
    flat, plain = (trained(lay, kind, sequence, set_to_none, INF) for lay in (True, False))
    norms, others = ([first for first, *_ in left[::3]] for left in (flat, plain))
    assert norms == pytest.approx(others, rel=1e-6, nan_ok=True)
    assert [each[1:] for each in flat[::3]] == [each[1:] for each in plain[::3]]
    assert flat[1::3] == plain[1::3]
    assert flat[2::3] == plain[2::3]


@pytest.mark.parametrize("kind", ["SGD", "fused AdamW"])
def test_clipping_is_the_same_but_for_the_norm_s_last_bit(kind):
    def parameters(flat):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6))
        optimizer = library.optimizers[kind](list(model.parameters()))
        if flat:
            flat_gradients(model)
        scaler = GradScaler(init_scale=2.0**8)
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(model(batch(step).repeat(1, 2)[:, :6]).square().sum()).backward()
            scaler.clip_grad_norm_(optimizer, 0.5)
            scaler.step(optimizer)
            scaler.update()
        return [parameter.detach() for parameter in model.parameters()]

    torch.testing.assert_close(parameters(True), parameters(False), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_scaler_takes_them_as_one_tensor(set_to_none):
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(5)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    flat_gradients(optimizer)
    scaler = GradScaler()
    for clip in (False, True):
        for _ in range(2):
            optimizer.zero_grad(set_to_none)
            scaler.scale(model(torch.ones(1, 8)).sum()).backward()
            with Seen() as seen:
                if clip:
                    scaler.clip_grad_norm_(optimizer, 0.5)
                scaler.step(optimizer)
            scaler.update()
            names = {"_foreach_norm", "_foreach_mul_"} if clip else set()
            names |= set() if clip else {"_amp_foreach_non_finite_check_and_unscale_"}
            assert {name: set(seen.lists[name]) for name in names} == {name: {1} for name in names}


def test_each_optimizer_of_a_flat_model_takes_its_own_alone():
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    flat_gradients(model)
    weights = torch.optim.SGD([layer.weight for layer in model], lr=0.1)
    biases = torch.optim.SGD([layer.bias for layer in model], lr=0.1)
    scaler = GradScaler(init_scale=4.0)
    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    scaled = [layer.bias.grad.clone() for layer in model]
    model[1].bias.grad[2] = INF
    scaler.unscale_(weights)
    assert [layer.bias.grad[0] for layer in model] == [grad[0] for grad in scaled]
    scaler.step(weights)
    scaler.step(biases)
    assert (scaler.last_step(weights).applied, scaler.last_step(biases).applied) == (True, False)


def test_what_takes_place_in_the_backward_pass_sees_gradients_in_their_place():
    model = torch.nn.Linear(3, 1, bias=False)
    flat = flat_gradients(model)
    seen = []
    model.weight.register_hook(lambda grad: grad * 2)
    model.weight.register_post_accumulate_grad_hook(
        lambda p: seen.append(in_a_buffer(p.grad, flat))
    )
    model(torch.ones(1, 3)).sum().backward()
    assert seen == [True]
    assert model.weight.grad.tolist() == [[2.0, 2.0, 2.0]]


def test_gradients_to_be_differentiated_stay_as_they_are():
    model = torch.nn.Linear(3, 1)
    flat = flat_gradients(model)
    loss = model(torch.ones(1, 3)).square().sum()
    with pytest.warns(UserWarning, match="create_graph"):
        loss.backward(create_graph=True)
    assert not in_a_buffer(model.weight.grad, flat)
    assert model.weight.grad.grad_fn is not None


def test_a_model_can_be_saved_and_copied():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    flat_gradients(model)
    model(torch.ones(1, 3)).sum().backward()
    file = io.BytesIO()
    torch.save(model, file)
    assert len(file.getvalue()) < 10_000
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        other(torch.ones(1, 3)).sum().backward()
        mine, its = (library.exact([p.grad for p in each.parameters()]) for each in (model, other))
        assert mine == its


def test_a_model_that_is_moved_has_ordinary_gradients():
    model = torch.nn.Linear(3, 2)
    flat_gradients(model)
    model.double()
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
        assert model.weight.grad.dtype == torch.float64
        assert model.weight.grad.tolist() == [[1.0] * 3] * 2


def test_a_gradient_whose_data_are_replaced_is_read_where_they_are():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    flat_gradients(optimizer)
    scaler = GradScaler(init_scale=4.0)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.update()
    scaler.scale(torch.ones(()))
    grad = model[0].weight.grad
    grad.data = torch.full_like(grad, 8.0)
    others = model[1].weight.grad.clone()
    scaler.unscale_(optimizer)
    assert grad.tolist() == [[2.0, 2.0]] * 2
    assert model[1].weight.grad.tolist() == (others / 4).tolist()


def test_a_second_call_lays_what_has_no_place_yet():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).requires_grad_(False))
    first = flat_gradients(model)
    model[1].requires_grad_(True)
    second = flat_gradients(model)
    model(torch.ones(1, 2)).sum().backward()
    assert all(in_a_buffer(p.grad, first) for p in model[0].parameters())
    assert all(in_a_buffer(p.grad, second) for p in model[1].parameters())
    assert flat_gradients(model).buffers == []


def test_it_ends_on_demand():
    model = torch.nn.Linear(2, 2)
    flat = flat_gradients(model)
    buffer = flat.buffers[0]
    flat.remove()
    assert flat.buffers == []
    model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad.untyped_storage().data_ptr() != buffer.data_ptr()


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match=r"Module or an optimizer, got list"):
        flat_gradients([torch.nn.Parameter(torch.ones(1))])
    with pytest.raises(ValueError, match="run the model once"):
        flat_gradients(torch.nn.LazyLinear(2))


# Finding tensors that lie side by side.


def pieces(*sizes, memory=None):
    memory = torch.arange(float(sum(sizes))) if memory is None else memory
    return list(memory[: sum(sizes)].split(sizes))


def elements(tensors):
    return sorted(element for tensor in tensors for element in tensor.flatten().tolist())


def test_tensors_of_two_kinds_are_two_groups():
    one = torch.ones(2)
    for other in (torch.ones(2, device="meta"), torch.ones(2, dtype=torch.float64)):
        groups = GradScaler._operations.grouped([one, other, torch.ones(3)])
        assert sorted(len(group) for _, group in groups) == [1, 2]


def test_neighbours_become_one_in_whatever_order():
    tensors = pieces(3, 4, 5, 1)
    for _ in range(10):
        random.Random(0).shuffle(tensors)
        (joined,) = side_by_side(tensors)
        assert joined.tolist() == list(range(13))


def test_a_gap_is_neither_read_nor_changed():
    memory = torch.tensor([1.0, 2.0, INF, 3.0, 4.0, INF])
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(4)]
    for parameter, place in zip(parameters, (0, 1, 3, 4), strict=True):
        parameter.grad = memory[place : place + 1]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for clip in (False, True):
        scaler = GradScaler(init_scale=2.0)
        scaler.scale(torch.ones(()))
        if clip:
            assert scaler.clip_grad_norm_(optimizer, INF).item() < INF
        scaler.step(optimizer)
        assert scaler.last_step(optimizer).applied
        assert memory[[2, 5]].tolist() == [INF, INF]
    assert memory.tolist() == [0.25, 0.5, INF, 0.75, 1.0, INF]
    assert [each.tolist() for each in side_by_side([p.grad for p in parameters])] == [
        [0.25, 0.5],
        [0.75, 1.0],
    ]


def test_other_memory_stays_apart():
    a, b, c = pieces(4, 4, 4)
    other = torch.zeros(4)
    assert len(side_by_side([a, other, b, c])) == 2
    assert len(side_by_side([a, a, b])) == 2  # a twice, as a list of it would multiply it
    assert len(side_by_side([a, c])) == 2
    strided = torch.zeros(8)[1::2]
    assert [t.data_ptr() for t in side_by_side([strided])] == [strided.data_ptr()]
    assert side_by_side([]) == []


def test_memory_that_is_next_to_another_s_by_chance_stays_apart():
    memory = torch.zeros(32, dtype=torch.uint8)
    left, right = (
        torch.frombuffer(memory.numpy(), dtype=torch.float32, count=4, offset=offset)
        for offset in (0, 16)
    )
    assert left.data_ptr() + 16 == right.data_ptr()
    parts = [*left.split(2), *right.split(2)]
    assert [part.numel() for part in side_by_side(parts)] == [4, 4]


def test_random_layouts_keep_each_element_once():
    numbers = random.Random(0)
    for _ in range(200):
        # Each place holds another number, so that numbers stand for places.
        memories = [torch.arange(400.0), torch.arange(400.0, 800.0, dtype=torch.float64)]
        tensors = []
        for memory in memories:
            start = numbers.randrange(3)
            while start < 300:
                shape = [numbers.randrange(4) for _ in range(numbers.randrange(4))]
                size = math.prod(shape)
                tensor = memory[start : start + size].view(shape)
                tensors.append(tensor.mT if tensor.ndim > 1 and numbers.random() < 0.3 else tensor)
                start += size + numbers.choice([0, 0, 0, 1, 5])
        numbers.shuffle(tensors)
        joined = side_by_side(tensors)
        assert len(joined) < len(tensors)
        assert elements(joined) == elements(tensors)


def test_complex_and_channels_last_neighbours_become_one():
    memory = torch.zeros(48, dtype=torch.complex64)
    a = memory[:24].view(1, 2, 3, 4).permute(0, 3, 1, 2)
    assert not a.is_contiguous()
    (joined,) = side_by_side([memory[24:], a])
    assert joined.numel() == 48


def test_the_page_s_code_runs():
    page = (Path(__file__).parents[2] / "docs" / "speed.md").read_text(encoding="utf-8")
    _, code, _ = page.replace("```python", "```").split("```")
    exec(code, {})


def test_a_tensor_with_holes_stays_apart():
    memory = torch.arange(6.0)
    tensors = [memory[0:6:3], memory[2:3]]  # as many elements as lie before the second
    assert elements(side_by_side(tensors)) == [0.0, 2.0, 3.0]


def test_neighbours_of_two_dtypes_stay_apart():
    memory = torch.ones(8, dtype=torch.float16)
    tensors = [memory[:4], memory.view(torch.bfloat16)[4:]]
    joined = side_by_side(tensors)
    assert sorted(str(each.dtype) for each in joined) == ["torch.bfloat16", "torch.float16"]


# A layout that changes afterwards.


def channels_last(model):
    model.to(memory_format=torch.channels_last)


def transposed(model):
    for module in model:
        if isinstance(module, torch.nn.Linear):
            module.weight.data = module.weight.data.T.contiguous().T


def there_and_back(model):
    model.to(memory_format=torch.channels_last)
    model.to(memory_format=torch.contiguous_format)


@pytest.mark.parametrize(
    ("change", "set_to_none"),
    [
        (channels_last, True),
        (channels_last, False),
        (there_and_back, True),
        (there_and_back, False),
        (transposed, True),  # a gradient that stays keeps its own layout, of which PyTorch warns
    ],
)
@pytest.mark.parametrize("optimizer_type", [torch.optim.SGD, torch.optim.Adam])
def test_a_layout_that_changes_afterwards_changes_no_step(change, set_to_none, optimizer_type):
    weights = []
    for is_flat in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 2, 1), torch.nn.Flatten()
        )
        model.append(torch.nn.Linear(8, 8)).append(torch.nn.Linear(8, 1))
        optimizer = optimizer_type(model.parameters(), lr=0.1, fused=True)
        scaler = GradScaler(init_scale=1024.0)
        flat = flat_gradients(model) if is_flat else None
        for step in range(4):
            if step == 1:
                change(model)
            loss = model(torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(step)))
            scaler.scale(loss.square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=set_to_none)
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
        if flat is not None:
            flat.remove()
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-6)


def test_another_optimizer_s_loss_may_change_the_buffer_after_unscaling():
    """Gradients in one buffer share a count of changes, and one of them is not changed."""
    one, other = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    flat = flat_gradients(torch.nn.ParameterList([one, other]))
    optimizers = [torch.optim.SGD([parameter], lr=1.0) for parameter in (one, other)]
    scaler = GradScaler("cpu")
    (one.sum() + other.sum()).backward()  # both are in the buffer
    assert one.grad._base is other.grad._base is not None
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=False)
    scaler.scale(one.sum()).backward()
    scaler.unscale_(optimizers[0])
    scaler.scale(other.sum()).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
        assert scaler.last_step(optimizer).applied
    assert torch.equal(torch.cat([one.detach(), other.detach()]), torch.zeros(6))
    flat.remove()
