"""Whole training loops, as the documentation and the tests of torch's scaler have them.

Each runs with ours, with torch's, and in float32 without scaling: the first two agree to the bit,
and the third agrees with them where the loss scale is a power of two and nothing overflows.
"""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.utils import clip_grad_norm_

from gradscaler import CallOrderError
from gradscaler.torch import GradScaler
from tests.support.eager import library

INF = float("inf")
SCALERS = {
    "ours": GradScaler,
    "native": partial(torch.amp.GradScaler, "cpu"),
    "unscaled": lambda **options: torch.amp.GradScaler("cpu", enabled=False),
}
WAYS = [{"foreach": False}, {"foreach": True}, {"fused": True}]
each_way = pytest.mark.parametrize("way", WAYS, ids=str)
make_sgd = partial(torch.optim.SGD, lr=0.5)


class Task:
    """A regression of a few batches, one model and optimizer or two."""

    def __init__(self, make_optimizer=make_sgd, models=1, dtype=None):
        torch.manual_seed(0)
        self.models = [
            torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
            for _ in range(models)
        ]
        self.optimizers = [make_optimizer(model.parameters()) for model in self.models]
        self.model, self.optimizer = self.models[0], self.optimizers[0]
        self.batches = [(torch.randn(4, 8), torch.randn(4, 8)) for _ in range(4)]
        self.dtype = dtype

    def iterations(self, scaler):
        """The batches, each between ``zero_grad()`` and ``step()``."""
        for batch in self.batches:
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            yield batch
            for optimizer in self.optimizers:
                scaler.step(optimizer)
            scaler.update()

    def loss(self, batch, model=None):
        inputs, targets = batch
        with torch.autocast("cpu", dtype=self.dtype, enabled=self.dtype is not None):
            return torch.nn.functional.mse_loss((model or self.model)(inputs), targets)

    def parameters(self):
        return [parameter for model in self.models for parameter in model.parameters()]


def compare(loop, *, same_as=("native", "unscaled"), **task):
    """Run a training loop thrice; ours is the same to the bit as ``same_as`` say."""
    ends = {}
    for name, make in SCALERS.items():
        each = Task(**task)
        scaler = make(init_scale=1024.0, growth_interval=2)
        loop(scaler, each)
        ends[name] = library.exact(each.parameters()), library.exact(scaler.state_dict())
    assert ends["ours"][1] == ends["native"][1]
    for name in same_as:
        assert ends["ours"][0] == ends[name][0]
    assert ends["ours"][0] != library.exact(Task(**task).parameters())


def compare_with_native(run):
    """Call ``run`` with ours and with torch's scaler: it returns the same to the bit."""
    ours, native = (library.exact(run(kind)) for kind in (GradScaler, torch.amp.GradScaler))
    assert ours == native


@pytest.fixture(params=["finite", "overflowed"])
def gradients(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@each_way
@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_autocast_with_an_overflow_on_the_way(optimizer, way, dtype):
    def loop(scaler, task):
        for index, batch in enumerate(task.iterations(scaler)):
            scaler.scale(task.loss(batch)).backward()
            if index == 2 and scaler.is_enabled():
                task.model[2].weight.grad[0, 0] = INF

    make_optimizer = partial(optimizer, lr=0.01, **way)
    compare(loop, same_as=["native"], make_optimizer=make_optimizer, dtype=dtype)


def test_float16_autocast_at_a_scale_that_is_too_large_finds_one_that_is_not():
    task, scaler = Task(dtype=torch.float16), GradScaler(init_scale=2.0**30)
    for _ in range(10):
        for batch in task.iterations(scaler):
            scaler.scale(task.loss(batch)).backward()
    assert 2.0**10 < scaler.get_scale() < 2.0**24
    assert scaler.last_step(task.optimizer).applied


@each_way
def test_clipping_by_hand_between_unscaling_and_step(way):
    def loop(scaler, task):
        for batch in task.iterations(scaler):
            scaler.scale(task.loss(batch)).backward()
            scaler.unscale_(task.optimizer)
            clip_grad_norm_(task.model.parameters(), 0.1)

    compare(loop, make_optimizer=partial(torch.optim.Adam, **way))


@each_way
def test_clipping_scaled_gradients_to_a_scaled_norm(way):
    def loop(scaler, task):
        for batch in task.iterations(scaler):
            scaler.scale(task.loss(batch)).backward()
            clip_grad_norm_(task.model.parameters(), 0.1 * scaler.get_scale())

    compare(loop, same_as=["native"], make_optimizer=partial(torch.optim.Adam, **way))


def test_a_gradient_penalty():
    def loop(scaler, task):
        for batch in task.iterations(scaler):
            loss = task.loss(batch)
            scaled = torch.autograd.grad(
                scaler.scale(loss), task.model.parameters(), create_graph=True
            )
            gradients = [gradient / scaler.get_scale() for gradient in scaled]
            penalty = sum(gradient.square().sum() for gradient in gradients).sqrt()
            scaler.scale(loss + penalty).backward()

    compare(loop)


def test_accumulation_over_batches():
    def loop(scaler, task):
        for index, batch in enumerate(task.batches):
            scaler.scale(task.loss(batch) / 2).backward()
            if index % 2:
                scaler.step(task.optimizer)
                scaler.update()
                task.optimizer.zero_grad()

    compare(loop)


@pytest.mark.parametrize("overflow", [None, 0, 1], ids=["none", "first", "second"])
@each_way
def test_several_models_optimizers_and_losses(overflow, way):
    def loop(scaler, task):
        for index, batch in enumerate(task.iterations(scaler)):
            first, second = (task.loss(batch, model) for model in task.models)
            scaler.scale(first + 2 * second).backward(retain_graph=True)
            scaler.scale(second - first / 4).backward()
            if index == 1 and overflow is not None:
                task.models[overflow][0].bias.grad[3] = INF
            scaler.unscale_(task.optimizers[0])

    same_as = ["native"] if overflow is not None else ["native", "unscaled"]
    make_optimizer = partial(torch.optim.AdamW, **way)
    compare(loop, same_as=same_as, make_optimizer=make_optimizer, models=2)


def test_two_losses_are_scaled_as_a_list():
    def loop(scaler, task):
        for batch in task.iterations(scaler):
            torch.autograd.backward(scaler.scale([task.loss(batch), task.loss(batch) / 2]))

    compare(loop)


def test_a_learning_rate_schedule_that_counts_applied_steps():
    task, scaler = Task(), GradScaler()
    schedule = torch.optim.lr_scheduler.ExponentialLR(task.optimizer, 0.5)
    for index, batch in enumerate(task.iterations(scaler)):
        if index and scaler.last_step(task.optimizer).applied:
            schedule.step()
        scaler.scale(task.loss(batch)).backward()
        if index == 1:
            task.model[0].bias.grad[0] = INF
    assert task.optimizer.param_groups[0]["lr"] == 0.5 * 0.5**2


def test_a_patched_step_is_looked_up_at_the_time_of_the_call(scaler, parameters, finite):
    """As Accelerate patches it, to learn whether it was called."""
    optimizer, calls = torch.optim.SGD(parameters), []
    library.backward(scaler, parameters, finite)
    scaler.unscale_(optimizer)
    optimizer.step = lambda *args: calls.append(args) or "patched"
    assert scaler.step(optimizer, None) == "patched"
    assert calls == [(None,)]


def test_the_optimizer_s_arguments_are_handed_on(scaler, parameters, finite):
    optimizer = torch.optim.SGD(parameters)
    optimizer.step = lambda *args, **kwargs: (args, kwargs)
    library.backward(scaler, parameters, finite)
    assert scaler.step(optimizer, 1, "two", three=3) == ((1, "two"), {"three": 3})


def test_an_optimizer_that_cannot_be_hashed_is_taken(scaler, parameters, finite):
    """A dataclass has no hash; torch asks no more of an optimizer than groups and a step."""

    @dataclass
    class Wrapped:
        optimizer: torch.optim.Optimizer

        @property
        def param_groups(self):
            return self.optimizer.param_groups

        def step(self):
            self.optimizer.step()

    before = library.exact(parameters)
    optimizer = Wrapped(torch.optim.SGD(parameters))
    library.backward(scaler, parameters, finite)
    scaler.step(optimizer)
    scaler.update()
    assert library.exact(parameters) != before
    assert scaler.last_step(optimizer).applied


# Optimizers that take part in loss scaling.


@pytest.mark.parametrize("unscaled", [False, True], ids=["scaled", "unscaled"])
@pytest.mark.parametrize("grad_scale", [None, 3.0], ids=["plain", "its own grad_scale"])
def test_an_optimizer_reads_scale_and_flag_from_its_attributes(
    grad_scale, gradients, unscaled, asking_optimizer, parameters
):
    """A grad_scale of the user's own is multiplied by the loss scale."""

    def run(kind):
        optimizer, scaler = asking_optimizer(parameters, lr=0.0), kind("cpu", init_scale=64.0)
        if grad_scale is not None:
            optimizer.grad_scale = torch.tensor(grad_scale)
        optimizer.zero_grad()
        library.backward(scaler, parameters, gradients)
        if unscaled:
            scaler.unscale_(optimizer)
        assert scaler.step(optimizer) == "asked"
        scaler.update()
        assert not hasattr(optimizer, "grad_scale")
        assert not hasattr(optimizer, "found_inf")
        return [*optimizer.seen[0], scaler.get_scale()]

    compare_with_native(run)


def test_a_grad_scale_of_the_user_s_own_does_not_outlive_a_skipped_step(
    scaler, parameters, overflowed, finite
):
    """Fused SGD's first step, when it overflows, is skipped without calling the optimizer."""
    optimizer = torch.optim.SGD(parameters, lr=0.0, momentum=0.9, fused=True)
    optimizer.grad_scale = torch.tensor(2.0)
    for gradients in (overflowed, finite):
        optimizer.zero_grad()
        library.backward(scaler, parameters, gradients)
        scaler.step(optimizer)
        scaler.update()
    momentum = [optimizer.state[parameter]["momentum_buffer"] for parameter in parameters]
    assert library.exact(momentum) == library.exact(finite)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_torch_s_own_optimizer_is_handed_no_flag_where_none_is_set(
    kind, parameters, finite, overflowed
):
    for optimizer_type in (kind, type("Subclass", (kind,), {})):
        optimizer, scaler, seen = optimizer_type(parameters, fused=True), GradScaler(), []
        optimizer.register_step_pre_hook(
            lambda *_, o=optimizer, seen=seen: seen.append(o.found_inf)
        )
        for gradients in (finite, overflowed):
            optimizer.zero_grad()
            library.backward(scaler, parameters, gradients)
            scaler.step(optimizer)
            scaler.update()
        without, with_one = seen
        assert with_one == 1.0
        assert without is None if optimizer_type is kind else without == 0.0


class Handed(torch.optim.SGD):
    """An optimizer whose step is handed the scaler, and calls it if it is one that unscales."""

    _step_supports_amp_scaling = True

    def __init__(self, params, unscales=True):
        super().__init__(params, lr=0.1)
        self.unscales = unscales

    def step(self, closure=None, *, grad_scaler):
        if self.unscales:
            grad_scaler.unscale_(self)
            flags = grad_scaler._found_inf_per_device(self)
            if not any(flag.item() for flag in flags.values()):
                super().step()
        return grad_scaler


def test_an_optimizer_that_takes_the_scaler_is_handed_it_with_a_warning(gradients):
    def run(kind):
        parameters = library.parameters()
        optimizer, scaler = Handed(parameters), kind("cpu", init_scale=64.0)
        library.backward(scaler, parameters, gradients)
        with pytest.warns(FutureWarning, match="grad_scaler|keyword argument") as warned:
            assert scaler.step(optimizer) is scaler
        assert warned[0].filename == __file__
        scaler.update()
        return [parameters, scaler.get_scale()]

    compare_with_native(run)


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself:FutureWarning")
def test_the_outcome_of_an_optimizer_that_is_handed_the_scaler(scaler, parameters, overflowed):
    optimizer = Handed(parameters)
    library.backward(scaler, parameters, overflowed)
    scaler.step(optimizer)
    outcome = scaler.last_step(optimizer)
    scaler.update()
    assert (outcome.found_inf, outcome.scale, scaler.get_scale()) == (True, 1024.0, 512.0)


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself:FutureWarning")
def test_an_optimizer_that_is_handed_the_scaler_and_does_not_unscale_steps_once(
    scaler, parameters, finite
):
    optimizer = Handed(parameters, unscales=False)
    library.backward(scaler, parameters, finite)
    scaler.step(optimizer)
    with pytest.raises(CallOrderError, match="already been called"):
        scaler.step(optimizer)


def test_nothing_is_read_from_the_device_before_it_is_asked_for(asking_optimizer):
    """On the meta device every read raises."""
    parameter = torch.nn.Parameter(torch.ones(3, device="meta"))
    optimizer, scaler = asking_optimizer([parameter]), GradScaler()
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    outcome = scaler.last_step(optimizer)
    for name in ("applied", "scale"):
        with pytest.raises(RuntimeError, match="meta"):
            getattr(outcome, name)


def test_each_step_method_is_asked_for_itself_whatever_kind_of_callable_it_is(
    scaler, parameters, finite
):
    class Step:
        __slots__ = ("calls",)  # nothing can refer to it weakly

        def __call__(self, *, grad_scaler):
            self.calls.append(grad_scaler)
            return grad_scaler.unscale_(optimizer)

    optimizer = torch.optim.AdamW(parameters, fused=True)

    def iteration():
        optimizer.zero_grad()
        library.backward(scaler, parameters, finite)
        scaler.step(optimizer)
        scaler.update()

    iteration()
    iteration()
    step = Step()
    step.calls = []
    optimizer.step = step
    with pytest.warns(FutureWarning):
        iteration()
    assert step.calls == [scaler]
    del optimizer.step
    iteration()
    assert optimizer.state[parameters[0]]["step"] == 3


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")  # is what this is about
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [False, True])
def test_gradients_that_have_a_graph_leave_none_behind(fused, clip):
    def run(kind):
        (parameter,) = library.parameters((3,))
        optimizer = torch.optim.SGD([parameter], lr=0.1, fused=fused)
        scaler = kind("cpu", init_scale=1024.0)
        scaler.scale((parameter**3).sum()).backward(create_graph=True)
        assert parameter.grad.requires_grad
        history = parameter.grad.grad_fn
        if clip and kind is GradScaler:
            scaler.clip_grad_norm_(optimizer, 100.0)
        elif clip:
            scaler.unscale_(optimizer)
            clip_grad_norm_(parameter, 100.0)
        scaler.step(optimizer)
        assert parameter.grad.grad_fn is history
        scaler.update()
        return [parameter, parameter.grad]

    compare_with_native(run)


# What only a test would do.


@each_way
def test_gradients_spoilt_after_unscaling_are_stepped_with_as_by_torch(way):
    """unscale_ checks, step does not check again: what is done in between is the user's."""

    def loop(scaler, task):
        for batch in task.iterations(scaler):
            scaler.scale(task.loss(batch)).backward()
            scaler.unscale_(task.optimizer)
            for index, parameter in enumerate(task.model.parameters()):
                parameter.grad.fill_(INF if index % 2 else float("nan"))
        assert not any(parameter.isfinite().any() for parameter in task.model.parameters())

    compare(loop, same_as=["native"], make_optimizer=partial(torch.optim.AdamW, **way))


def test_gradients_made_finite_after_unscaling_are_not_stepped_with(scaler, parameters, overflowed):
    optimizer, before = torch.optim.SGD(parameters), library.exact(parameters)
    library.backward(scaler, parameters, overflowed)
    scaler.unscale_(optimizer)
    for parameter in parameters:
        parameter.grad.zero_()
    scaler.step(optimizer)
    scaler.update()
    assert library.exact(parameters) == before
    assert scaler.get_scale() == 512.0


def test_growing_from_the_largest_float32_does_not_overflow():
    largest = torch.finfo(torch.float32).max

    def run(kind):
        parameter = torch.nn.Parameter(torch.ones(()))
        scaler = kind("cpu", init_scale=largest, growth_interval=1)
        scaler.scale(parameter * 1e-20).backward()
        scaler.step(torch.optim.SGD([parameter]))
        scaler.update()
        assert scaler.get_scale() == largest

    compare_with_native(run)


def test_a_new_scale_drops_the_iteration_s_records(scaler, parameters, overflowed):
    optimizer = torch.optim.SGD(parameters)
    library.backward(scaler, parameters, overflowed)
    scaler.step(optimizer)
    scaler.update(4.0)
    assert scaler.get_scale() == 4.0
    assert len(scaler._per_optimizer_states) == 0
    scaler.unscale_(optimizer)


class Accelerated(torch.optim.Optimizer):
    """Steps by the scaler, as Accelerate's wrapper does, whoever calls ``step``."""

    def __init__(self, optimizer, scaler):
        vars(self).update(vars(optimizer))
        self.optimizer, self.scaler = optimizer, scaler

    def step(self, closure=None):
        self.scaler.step(self.optimizer, closure)
        self.scaler.update()

    def load_state_dict(self, state_dict):
        self.optimizer.load_state_dict(state_dict)


@pytest.mark.parametrize("is_placed", [False, True])
def test_after_accelerate_s_load_state_under_fsdp2_the_scaler_is_loaded_again(is_placed):
    """Its calls one by one; in the third, PyTorch makes the optimizer's state by a step."""

    def start():
        task = Task(partial(torch.optim.AdamW, lr=0.1))
        scaler = GradScaler("cpu", 1024.0, growth_interval=5)
        return task, scaler, Accelerated(task.optimizer, scaler)

    task, scaler, optimizer = start()
    for inputs, targets in task.batches:
        optimizer.zero_grad()
        scaler.scale(task.model(inputs).sub(targets).square().mean()).backward()
        optimizer.step()
    saved, of_optimizer = scaler.state_dict(), get_optimizer_state_dict(task.model, task.optimizer)

    task, scaler, optimizer = start()
    if is_placed:
        scaler.scale(torch.ones(()))
    scaler.load_state_dict(saved)
    scaler._lazy_init_scale_growth_tracker(scaler._device)
    set_optimizer_state_dict(task.model, optimizer, of_optimizer)
    assert scaler.get_scale() == 2048.0  # the step was the fifth
    scaler.load_state_dict(saved)
    assert scaler.state_dict() == saved
    assert saved["scale"] == 1024.0
