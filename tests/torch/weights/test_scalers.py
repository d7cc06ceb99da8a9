"""Scalers hand over scale, flag and clip coefficient, and 16-bit gradients stay as they are."""

import math

import pytest
import torch

from gradscaler import FixedScale
from gradscaler._on_torch import widening
from gradscaler.torch import GradScaler, MasterWeights

SCALE = 1024.0
STORES = ("float32", "remainder16", "stochastic")
TINY = 2.0**-30  # a gradient that float16 can hold only times the scale


def linear(store="remainder16", size=4, **options):
    torch.manual_seed(0)
    model = torch.nn.Linear(size, 1, bias=False)
    options = {"lr": 1.0, **options}
    return model, MasterWeights(torch.optim.SGD, model, store=store, **options)


def native():
    return torch.amp.GradScaler("cpu", init_scale=SCALE)


def scaler_of(kind):
    return native() if kind == "torch's" else GradScaler(init_scale=SCALE)


def backward(scaler, model, gradient):
    """Leave the gradient, times the scale."""
    weight = model.weight
    gradient = torch.as_tensor(gradient, dtype=torch.float32).expand(weight.shape)
    scaler.scale((weight.float() * gradient).sum()).backward()


@pytest.mark.parametrize("kind", ["ours", "torch's"])
@pytest.mark.parametrize("store", ["float32", "remainder16"])
def test_gradients_that_float16_cannot_hold_unscaled_are_stepped_by(kind, store):
    model, optimizer = linear(store)
    before = optimizer.wide(model.weight)
    scaler = scaler_of(kind)
    gradient = TINY * torch.arange(64.0, 68.0)
    for group in optimizer.param_groups:
        group["lr"] = 2.0**12
    backward(scaler, model, gradient)
    scaler.step(optimizer)
    assert torch.equal(optimizer.wide(model.weight), before - 2.0**12 * gradient)
    assert (gradient.half() != gradient).any()


@pytest.mark.parametrize("kind", ["ours", "torch's"])
def test_float16_gradients_stay_as_they_are(kind):
    model, optimizer = linear()
    scaler = scaler_of(kind)
    backward(scaler, model, 0.1)
    before = model.weight.grad.clone()
    scaler.step(optimizer)
    assert torch.equal(model.weight.grad, before)


@pytest.mark.parametrize("kind", ["ours", "torch's"])
@pytest.mark.parametrize("store", STORES)
def test_a_skipped_step_changes_nothing(kind, store, exact):
    model, optimizer = linear(store, lr=0.1, momentum=0.9)
    scaler = scaler_of(kind)
    for gradient in (0.5, 0.25):
        optimizer.zero_grad()
        backward(scaler, model, gradient)
        scaler.step(optimizer)
        scaler.update()
    before = exact([optimizer.state_dict(), model.state_dict()])
    optimizer.zero_grad()
    backward(scaler, model, torch.tensor([1.0, math.inf, math.nan, 0.0]))
    scaler.step(optimizer)
    assert exact([optimizer.state_dict(), model.state_dict()]) == before
    scaler.update()
    assert scaler.get_scale() == SCALE / 2


def test_a_skip_after_clipping_widens_no_gradients():
    model, optimizer = linear()
    scaler = GradScaler(init_scale=SCALE)
    backward(scaler, model, math.inf)
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert model.weight.grad.dtype is torch.float16
    assert not scaler.last_step(optimizer).applied
    optimizer.zero_grad()
    before = optimizer.wide(model.weight)
    backward(scaler, model, 0.5)
    scaler.step(optimizer)
    assert torch.equal(optimizer.wide(model.weight), before - 0.5)


@pytest.mark.parametrize("max_norm", [0.25, 100.0])
def test_clipping_measures_in_float32_and_clips_in_the_step(max_norm):
    model, optimizer = linear(size=10_000)
    scaler = GradScaler(init_scale=2.0**20)
    before = optimizer.wide(model.weight)
    gradient = TINY * torch.arange(1.0, 10_001.0)
    backward(scaler, model, gradient)
    sent = model.weight.grad.clone()
    seen = sent.double() / 2.0**20
    norm = scaler.clip_grad_norm_(optimizer, max_norm * 1e-3)
    torch.testing.assert_close(norm.double(), seen.norm(), rtol=1e-6, atol=0)
    scaler.step(optimizer)
    assert torch.equal(model.weight.grad, sent)
    factor = min(1.0, max_norm * 1e-3 / seen.norm().item())
    moved = (before - optimizer.wide(model.weight)).double()
    torch.testing.assert_close(moved, factor * seen, rtol=1e-5, atol=2e-8)


def test_unscaled_gradients_are_float32_and_nothing_is_flushed():
    model, optimizer = linear()
    scaler = GradScaler(init_scale=SCALE)
    backward(scaler, model, TINY * 64)
    scaler.unscale_(optimizer)
    assert model.weight.grad.dtype is torch.float32
    assert model.weight.grad.tolist() == [[TINY * 64] * 4]
    before = optimizer.wide(model.weight)
    optimizer.param_groups[0]["lr"] = 2.0**12
    scaler.step(optimizer)
    assert torch.equal(optimizer.wide(model.weight), before - 2.0**12 * TINY * 64)


def test_pytorch_s_clipping_after_unscaling_is_right(trainings):
    def clip(scaler, optimizer, model):
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)

    ours, theirs = trainings.trained({}, clip=clip), trainings.trained(None, clip=clip)
    assert ours.losses == theirs.losses
    assert ours.losses != trainings.trained(None).losses


@pytest.mark.parametrize("set_to_none", [True, False])
def test_after_unscaling_the_next_gradients_are_right(set_to_none):
    model, optimizer = linear()
    scaler = GradScaler(init_scale=SCALE)
    for gradient in (0.5, 0.25):
        before = optimizer.wide(model.weight)
        backward(scaler, model, gradient)
        if gradient == 0.5:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(optimizer.wide(model.weight), before - gradient)
        model.zero_grad(set_to_none)
    assert (model.weight.grad is None) == set_to_none
    backward(scaler, model, 0.5)
    assert model.weight.grad.dtype is (torch.float16 if set_to_none else torch.float32)


def test_two_clips_clip_to_the_lower_norm():
    model, optimizer = linear()
    scaler = GradScaler(init_scale=SCALE)
    before = optimizer.wide(model.weight)
    backward(scaler, model, 1.0)
    scaler.clip_grad_norm_(optimizer, 1.0)
    assert scaler.clip_grad_norm_(optimizer, 0.5).item() == pytest.approx(1.0, rel=1e-5)
    scaler.step(optimizer)
    moved = before - optimizer.wide(model.weight)
    torch.testing.assert_close(moved.norm(), torch.tensor(0.5))


@pytest.mark.parametrize("norm_type", [1.0, 3.0, math.inf])
def test_other_norms_are_those_of_the_unscaled_gradients(norm_type):
    model, optimizer = linear()
    scaler = GradScaler(init_scale=SCALE)
    gradient = TINY * torch.tensor([64.0, -128.0, 512.0, 1024.0])
    backward(scaler, model, gradient)
    norm = scaler.clip_grad_norm_(optimizer, math.inf, norm_type)
    torch.testing.assert_close(norm, torch.linalg.vector_norm(gradient, norm_type))


def test_a_parameter_that_stays_wide_is_clipped_with_the_others():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    wide = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = MasterWeights(torch.optim.SGD, model, lr=1.0)
    assert [p.dtype for p in model.parameters()] == [torch.float16] * 2 + [torch.float32] * 2
    scaler = GradScaler(init_scale=SCALE)
    scaler.scale(sum(parameter.float().sum() for parameter in model.parameters())).backward()
    norm = scaler.clip_grad_norm_(optimizer, 0.5)
    count = sum(parameter.numel() for parameter in model.parameters())
    torch.testing.assert_close(norm, torch.tensor(count**0.5))
    scaler.step(optimizer)
    for parameter, before in zip(model.parameters(), wide, strict=True):
        moved = optimizer.wide(parameter) - before
        torch.testing.assert_close(moved, torch.full_like(moved, -0.5 / count**0.5))


def test_gradients_are_measured_in_pieces(monkeypatch):
    monkeypatch.setattr(widening, "_ON_CPU", 3)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(5)))
    optimizer = MasterWeights(torch.optim.SGD, model, lr=1.0)
    scaler = GradScaler(init_scale=SCALE)
    gradients = [torch.randn(p.shape, dtype=torch.float16) for p in model.parameters()]
    scaler.scale(torch.zeros(()))
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    expected = torch.cat([gradient.flatten() for gradient in gradients]).double().norm() / SCALE
    norm = scaler.clip_grad_norm_(optimizer, math.inf).double()
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)


def test_no_full_copy_of_the_gradients_exists(monkeypatch):
    """A step of 16 parameters in 8 chunks holds an eighth of their float32 gradients at most."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(16)))
    optimizer = MasterWeights(torch.optim.SGD, model, lr=1.0, chunk_elements=2 * 64 * 64)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    seen = []
    step = torch.optim.SGD.step

    def counting(inner, *args):
        with_gradients = [p for group in inner.param_groups for p in group["params"]]
        seen.append([(p.dtype, p.numel(), p.grad.dtype) for p in with_gradients])
        storages = {p.grad.untyped_storage().data_ptr(): p.grad for p in with_gradients}
        assert sum(each.untyped_storage().nbytes() for each in storages.values()) == 4 * 8192
        return step(inner, *args)

    monkeypatch.setattr(torch.optim.SGD, "step", counting)
    optimizer.step()
    assert seen == [[(torch.float32, 2 * 4096, torch.float32)]] * 8  # two are joined
    _, chunks = optimizer._chunks
    assert all(storage.nbytes() == 0 for storage, _ in chunks._storages)


def test_without_grad_dtype_unscaling_is_refused_and_changes_nothing(no_grad_dtype):
    model, optimizer = linear()
    scaler = GradScaler(init_scale=SCALE)
    backward(scaler, model, 0.5)
    before = optimizer.wide(model.weight)
    with pytest.raises(ValueError, match=r"clip by scaler.clip_grad_norm_\(optimizer, max_norm\)"):
        scaler.unscale_(optimizer)
    scaler.clip_grad_norm_(optimizer, 0.5)
    scaler.step(optimizer)
    torch.testing.assert_close(before - optimizer.wide(model.weight), torch.full((1, 4), 0.25))


def test_pytorch_s_scaler_unscales_gradients_that_were_widened_before():
    model, optimizer = linear()
    scaler = native()
    backward(scaler, model, TINY * 64)
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.unscale_(optimizer)
    optimizer.widen_gradients_()
    scaler.unscale_(optimizer)
    assert model.weight.grad.tolist() == [[TINY * 64] * 4]


def test_a_closure_is_evaluated_once():
    model, optimizer = linear()
    scaler = GradScaler(init_scale=SCALE)
    before = optimizer.wide(model.weight)
    calls = []

    def closure():
        calls.append(0)
        optimizer.zero_grad()
        loss = (model.weight.float() * 0.5).sum()
        scaler.scale(loss).backward()
        return loss

    scaler.step(optimizer, closure)
    assert len(calls) == 1
    assert torch.equal(optimizer.wide(model.weight), before - 0.5)


@pytest.mark.parametrize(
    ("store", "steps"), [("float32", 1), ("remainder16", 1), ("remainder16", 0)]
)
def test_a_step_that_raises_in_a_closure_s_step_is_undone(store, steps, exact):
    class Broken(torch.optim.SGD):
        breaks = False

        def step(self, closure=None):
            super().step(closure)
            if self.breaks:
                raise KeyboardInterrupt

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1, bias=False)
    optimizer = MasterWeights(Broken, model, lr=0.5, momentum=0.9, store=store)
    scaler = GradScaler(init_scale=SCALE)

    def closure():
        optimizer.zero_grad()
        loss = (model.weight.float() * 0.5).sum()
        scaler.scale(loss).backward()
        return loss

    for _ in range(steps):
        scaler.step(optimizer, closure)
        scaler.update()
    before = exact([optimizer.state_dict(), model.state_dict()])
    Broken.breaks = True
    with pytest.raises(KeyboardInterrupt):
        scaler.step(optimizer, closure)
    assert exact([optimizer.state_dict(), model.state_dict()]) == before


def test_attempts_repeat_an_overflow(trainings):
    model, optimizer = linear()
    scaler = GradScaler(init_scale=SCALE)
    before = optimizer.wide(model.weight)
    for attempt in scaler.attempts(optimizer):
        backward(scaler, model, math.inf if attempt == 0 else 0.5)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(optimizer.wide(model.weight), before - 0.5)
    assert scaler.get_scale() == SCALE / 2


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("fused", [False, True])
def test_flags_that_stay_on_a_device_skip_there(off_the_host, store, fused, exact):
    model = torch.nn.Linear(4, 1, bias=False)
    optimizer = MasterWeights(torch.optim.AdamW, model, store=store, lr=0.1, fused=fused)
    scaler = GradScaler(policy=FixedScale(SCALE))
    for gradient in (0.5, math.inf):
        before = exact([optimizer.wide(model.weight), model.state_dict()])
        optimizer.zero_grad()
        backward(scaler, model, gradient)
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        is_same = exact([optimizer.wide(model.weight), model.state_dict()]) == before
        assert is_same == math.isinf(gradient)


def test_a_disabled_scaler_clips_bfloat16_in_float32():
    torch.manual_seed(0)
    model = torch.nn.Linear(1000, 1, bias=False)
    optimizer = MasterWeights(torch.optim.SGD, model, dtype=torch.bfloat16, lr=1.0)
    before = optimizer.wide(model.weight)
    scaler = GradScaler(enabled=False)
    model.weight.grad = torch.randn(1, 1000).bfloat16()
    true = model.weight.grad.double()
    norm = scaler.clip_grad_norm_(optimizer, 1.0)
    torch.testing.assert_close(norm.double(), true.norm(), rtol=1e-6, atol=0)
    scaler.step(optimizer)
    moved = (before - optimizer.wide(model.weight)).double()
    torch.testing.assert_close(moved, true / true.norm(), rtol=1e-4, atol=1e-7)


def test_an_optimizer_that_unscales_by_itself_is_handed_scale_and_flag(asking_optimizer):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1, bias=False)
    optimizer = MasterWeights(asking_optimizer, model, lr=1.0)
    before = optimizer.wide(model.weight)
    scaler = GradScaler(init_scale=SCALE)
    backward(scaler, model, 0.5)
    scaler.step(optimizer)
    assert torch.equal(optimizer.wide(model.weight), before - 0.5)
    ((scale, flag),) = optimizer._wrapped._optimizer.seen
    assert (scale, flag) == (SCALE, 0.0)


class Wrapper:
    """As trainers make them."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def step(self, *args):
        return self.optimizer.step(*args)


@pytest.mark.parametrize("clips", [False, True])
def test_a_trainer_s_wrapper_is_stepped_by_float32_gradients(clips):
    model, optimizer = linear()
    wrapper = Wrapper(optimizer)
    scaler = GradScaler(init_scale=SCALE)
    before = optimizer.wide(model.weight)
    optimizer.param_groups[0]["lr"] = 2.0**12
    backward(scaler, model, TINY * 64)
    if clips:
        scaler.clip_grad_norm_(wrapper, 1.0)
    scaler.step(wrapper)
    assert torch.equal(optimizer.wide(model.weight), before - 2.0**12 * TINY * 64)
