"""A model of 16 bits trains as one with float32 parameters under autocast, to the bit."""

import pytest
import torch

from gradscaler import FixedScale
from gradscaler.torch import GradScaler, MasterWeights
from gradscaler.torch._weights.rounding import random_bits
from gradscaler.torch._weights.stores import mixed

pytestmark = pytest.mark.usefixtures("own_random_numbers_and_one_thread")

EXACT = ("float32", "remainder16")
OPTIONS = {
    "as it comes": {},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "one by one": {"foreach": False},
    "amsgrad": {"amsgrad": True, "weight_decay": 0.1},
}


def clip(scaler, optimizer, model):
    scaler.clip_grad_norm_(optimizer, 0.3)


def assert_equal(ours, theirs):
    assert ours.losses == theirs.losses
    for own, other in zip(ours.values, theirs.values, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=0)
    assert {parameter.dtype for parameter in ours.model.parameters()} <= {
        torch.float16,
        torch.bfloat16,
    }


@pytest.mark.parametrize("name", ["mlp", "gpt"])
@pytest.mark.parametrize("store", EXACT)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_float16_parameters_train_as_float32_ones_under_autocast(trainings, name, store, options):
    ours = trainings.trained({"store": store}, name, options=options)
    theirs = trainings.trained(None, name, options=options)
    assert_equal(ours, theirs)
    assert ours.losses[-1] < 0.9 * ours.losses[0]


@pytest.mark.parametrize("name", ["mlp", "gpt"])
@pytest.mark.parametrize("store", EXACT)
def test_so_they_do_where_steps_overflow_and_gradients_are_clipped(trainings, name, store):
    how = {"overflow": (3, 4, 11), "clip": clip}
    ours = trainings.trained({"store": store}, name, **how)
    theirs = trainings.trained(None, name, **how)
    assert_equal(ours, theirs)
    assert [each.applied for each in ours.scaler.history].count(False) >= 3
    assert ours.losses != trainings.trained({"store": store}, name).losses


@pytest.mark.parametrize("fused", [False, True])
def test_so_they_do_where_the_scale_is_not_a_power_of_two(trainings, fused):
    def make_scaler(init_scale, growth_interval):
        return GradScaler(init_scale=1000.0, growth_factor=1.5, growth_interval=growth_interval)

    how = {"make_scaler": make_scaler, "clip": clip, "options": {"fused": fused}}
    assert_equal(trainings.trained({}, **how), trainings.trained(None, **how))


@pytest.mark.parametrize("store", EXACT)
@pytest.mark.parametrize("how", [{}, {"clip": clip, "overflow": (2, 9)}], ids=["", "clipped"])
def test_so_they_do_with_gradients_that_are_accumulated_in_float32(trainings, store, how):
    how = {**how, "micro_batches": 3}
    ours = trainings.trained({"store": store, "fp32_gradients": True}, **how)
    assert_equal(ours, trainings.trained(None, **how))


def test_gradients_accumulated_in_float16_are_rounded_on_the_way(trainings):
    def make_scaler(**options):
        return GradScaler(policy=FixedScale(1024.0))

    how = {"micro_batches": 3, "make_scaler": make_scaler}
    ours, theirs = trainings.trained({}, **how), trainings.trained(None, **how)
    assert ours.losses != theirs.losses
    torch.testing.assert_close(ours.losses, theirs.losses, rtol=1e-3, atol=0)


def test_so_they_do_with_the_scaler_of_pytorch(trainings):
    def make_scaler(**options):
        return torch.amp.GradScaler("cpu", **options)

    how = {"make_scaler": make_scaler, "overflow": (3, 4, 11)}
    assert_equal(trainings.trained({}, **how), trainings.trained(None, **how))


def test_bfloat16_parameters_need_no_scaler(trainings):
    def disabled(**options):
        return GradScaler(enabled=False)

    how = {"make_scaler": disabled, "dtype": torch.bfloat16}
    ours = trainings.trained({"dtype": torch.bfloat16, "store": "float32"}, **how)
    assert_equal(ours, trainings.trained(None, **how))


def test_bfloat16_remainders_lose_nothing_but_round_ties_upward(trainings):
    """So a weight may be the other of two that are equally near, and the training another one."""

    def disabled(**options):
        return GradScaler(enabled=False)

    how = {"make_scaler": disabled, "dtype": torch.bfloat16}
    ours = trainings.trained({"dtype": torch.bfloat16}, **how)
    theirs = trainings.trained(None, **how)
    torch.testing.assert_close(ours.losses, theirs.losses, rtol=1e-3, atol=0)
    for parameter, value in zip(ours.model.parameters(), ours.values, strict=True):
        error = (parameter.float() - value).abs()
        assert (error <= (parameter.float() - value.bfloat16().float()).abs() + error).all()


@pytest.mark.covering(1)  # all stores are read and written in the same chunks
@pytest.mark.parametrize("store", EXACT)
@pytest.mark.parametrize(("elements", "steps"), [(1, 6), (100, 30), (1000, 30)])  # 1 is slow
def test_chunks_of_any_size_give_the_same_bits(trainings, store, elements, steps):
    ours = trainings.trained({"store": store, "chunk_elements": elements}, steps=steps)
    assert_equal(ours, trainings.trained({"store": store}, steps=steps))


@pytest.mark.parametrize("elements", [100, 17])
def test_fused_steps_of_spans_round_as_those_of_whole_parameters(elements):
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(1000))
    native = torch.nn.Parameter(parameter.detach().clone())
    options = {"lr": 0.01, "weight_decay": 0.1, "fused": True}
    optimizer = MasterWeights(
        torch.optim.AdamW, [parameter], store="float32", chunk_elements=elements, **options
    )
    reference = torch.optim.AdamW([native], **options)
    for _ in range(20):
        parameter.grad = torch.randn(1000).half()
        native.grad = parameter.grad.float()
        optimizer.step()
        reference.step()
    assert torch.equal(optimizer.wide(parameter), native)
    with pytest.raises(ValueError, match="fused kernels round fewer than 16"):
        MasterWeights(torch.optim.AdamW, [parameter], chunk_elements=15, **options)


def test_updates_that_16_bits_would_lose_add_up(trainings):
    """A step of less than 1e-5 moves no float16 weight above 0.04: the next is 3e-5 away."""
    ours = trainings.trained({}, optimizer_class=torch.optim.SGD, lr=1e-4, steps=60)
    theirs = trainings.trained(None, optimizer_class=torch.optim.SGD, lr=1e-4, steps=60)
    assert_equal(ours, theirs)
    model = trainings.make().half()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    scaler = GradScaler(allow_fp16_gradients=True, init_scale=1024.0)
    trainings.train(optimizer, model, scaler, steps=60)
    first, *_ = trainings.make().parameters()
    is_large = first.abs() > 0.04
    assert torch.equal(model[0].weight[is_large], before[0][is_large])
    assert not torch.equal(ours.values[0][is_large], first[is_large])


@pytest.mark.parametrize(("dtype", "mantissa"), [(torch.float16, 10), (torch.bfloat16, 7)])
@pytest.mark.parametrize("size", [40, 7], ids=["whole", "in spans"])
def test_a_random_store_rounds_the_float32_step_by_its_random_numbers(dtype, mantissa, size):
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.rand(40) + 0.1)
    options = {"store": "stochastic", "chunk_elements": size, "dtype": dtype}
    optimizer = MasterWeights(torch.optim.Adam, [parameter], lr=1e-3, **options)
    native = torch.nn.Parameter(parameter.detach().float())
    reference = torch.optim.Adam([native], lr=1e-3)
    for step in range(2):
        gradient = torch.randn(40).to(dtype)
        parameter.grad, native.grad = gradient, gradient.float()
        native.data.copy_(parameter)
        optimizer.step()
        reference.step()
        drawn = random_numbers(optimizer.state[parameter]["rounding"], step, size if step else 40)
        value = native.detach().double()
        spacing = 2.0 ** (value.log2().floor() - mantissa)
        kept_bits = drawn // 2 ** (mantissa - 7) * 2 ** (mantissa - 7)
        rounded = (value / spacing + kept_bits / 2**16 + 0.5).floor() * spacing
        assert torch.equal(parameter.detach().double(), rounded)


def random_numbers(entry, count, size):
    """The int16 numbers of a parameter of 40 elements in the step after ``count`` steps."""
    begins = range(0, 40, size)
    spans = [() if size == 40 else (begin,) for begin in begins]
    drawn = []
    for begin, span in zip(begins, spans, strict=True):
        generator = torch.Generator().manual_seed(mixed(int(entry[0]), count, *span))
        drawn.append(random_bits(min(size, 40 - begin), generator))
    return torch.cat(drawn).double()
