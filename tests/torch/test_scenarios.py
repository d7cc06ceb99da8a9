"""Whole training loops, as the documentation and the tests of torch's scaler have them.

Each runs with ours, with torch's, and in float32 without scaling: the first two agree to the bit,
and the third agrees with them where the loss scale is a power of two and nothing overflows.
"""

from dataclasses import dataclass

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from gradscaler.torch import GradScaler

INF = float("inf")
SCALERS = {
    "ours": lambda **options: GradScaler(**options),
    "native": lambda **options: torch.amp.GradScaler("cpu", **options),
    "unscaled": lambda **options: torch.amp.GradScaler("cpu", enabled=False),
}
WAYS = [{"foreach": False}, {"foreach": True}, {"fused": True}]


class Task:
    """A regression of a few batches, one model and optimizer or two."""

    def __init__(self, make_optimizer, models=1, dtype=None):
        torch.manual_seed(0)
        self.models = [
            torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
            for _ in range(models)
        ]
        self.optimizers = [make_optimizer(model.parameters()) for model in self.models]
        self.model, self.optimizer = self.models[0], self.optimizers[0]
        self.batches = [(torch.randn(4, 8), torch.randn(4, 8)) for _ in range(4)]
        self.dtype = dtype

    def loss(self, model, batch):
        inputs, targets = batch
        with torch.autocast("cpu", dtype=self.dtype, enabled=self.dtype is not None):
            return torch.nn.functional.mse_loss(model(inputs), targets)

    def parameters(self):
        return [parameter for model in self.models for parameter in model.parameters()]


@pytest.fixture
def compare(exact):
    """Run a training loop thrice; ours is the same to the bit as ``same_as`` say."""

    def compare(loop, *, same_as=("native", "unscaled"), init_scale=1024.0, **task):
        ends = {}
        for name, make in SCALERS.items():
            each = Task(**task)
            scaler = make(init_scale=init_scale, growth_interval=2)
            loop(scaler, each)
            ends[name] = exact(each.parameters()), exact(scaler.state_dict())
        assert ends["ours"][1] == ends["native"][1]
        for name in same_as:
            assert ends["ours"][0] == ends[name][0]
        assert ends["ours"][0] != exact(Task(**task).parameters())

    return compare


def make_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_autocast_with_an_overflow_on_the_way(compare, optimizer, way, dtype):
    def loop(scaler, task):
        for index, batch in enumerate(task.batches):
            task.optimizer.zero_grad()
            scaler.scale(task.loss(task.model, batch)).backward()
            if index == 2 and scaler.is_enabled():
                task.model[2].weight.grad[0, 0] = INF
            scaler.step(task.optimizer)
            scaler.update()

    compare(
        loop,
        same_as=["native"],
        make_optimizer=lambda parameters: optimizer(parameters, lr=0.01, **way),
        dtype=dtype,
    )


def test_float16_autocast_at_a_scale_that_is_too_large_finds_one_that_is_not(exact):
    task = Task(make_sgd, dtype=torch.float16)
    scaler = GradScaler(init_scale=2.0**30)
    for _ in range(10):
        for batch in task.batches:
            task.optimizer.zero_grad()
            scaler.scale(task.loss(task.model, batch)).backward()
            scaler.step(task.optimizer)
            scaler.update()
    assert 2.0**10 < scaler.get_scale() < 2.0**24
    assert scaler.last_step(task.optimizer).applied


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_clipping_by_hand_between_unscaling_and_step(compare, way):
    def loop(scaler, task):
        for batch in task.batches:
            task.optimizer.zero_grad()
            scaler.scale(task.loss(task.model, batch)).backward()
            scaler.unscale_(task.optimizer)
            clip_grad_norm_(task.model.parameters(), 0.1)
            scaler.step(task.optimizer)
            scaler.update()

    compare(loop, make_optimizer=lambda parameters: torch.optim.Adam(parameters, **way))


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_clipping_scaled_gradients_to_a_scaled_norm(compare, way):
    def loop(scaler, task):
        for batch in task.batches:
            task.optimizer.zero_grad()
            scaler.scale(task.loss(task.model, batch)).backward()
            clip_grad_norm_(task.model.parameters(), 0.1 * scaler.get_scale())
            scaler.step(task.optimizer)
            scaler.update()

    compare(
        loop,
        same_as=["native"],
        make_optimizer=lambda parameters: torch.optim.Adam(parameters, **way),
    )


def test_a_gradient_penalty(compare):
    def loop(scaler, task):
        for batch in task.batches:
            task.optimizer.zero_grad()
            loss = task.loss(task.model, batch)
            scaled = torch.autograd.grad(
                scaler.scale(loss), task.model.parameters(), create_graph=True
            )
            gradients = [gradient / scaler.get_scale() for gradient in scaled]
            penalty = sum(gradient.square().sum() for gradient in gradients).sqrt()
            scaler.scale(loss + penalty).backward()
            scaler.step(task.optimizer)
            scaler.update()

    compare(loop, make_optimizer=make_sgd)


def test_accumulation_over_batches(compare):
    def loop(scaler, task):
        for index, batch in enumerate(task.batches):
            scaler.scale(task.loss(task.model, batch) / 2).backward()
            if index % 2:
                scaler.step(task.optimizer)
                scaler.update()
                task.optimizer.zero_grad()

    compare(loop, make_optimizer=make_sgd)


@pytest.mark.parametrize("overflow", [None, 0, 1], ids=["none", "first", "second"])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_several_models_optimizers_and_losses(compare, overflow, way):
    def loop(scaler, task):
        for index, batch in enumerate(task.batches):
            for optimizer in task.optimizers:
                optimizer.zero_grad()
            first, second = (task.loss(model, batch) for model in task.models)
            scaler.scale(first + 2 * second).backward(retain_graph=True)
            scaler.scale(second - first / 4).backward()
            if index == 1 and overflow is not None:
                task.models[overflow][0].bias.grad[3] = INF
            scaler.unscale_(task.optimizers[0])
            for optimizer in task.optimizers:
                scaler.step(optimizer)
            scaler.update()

    compare(
        loop,
        same_as=["native"] if overflow is not None else ["native", "unscaled"],
        make_optimizer=lambda parameters: torch.optim.AdamW(parameters, **way),
        models=2,
    )


def test_two_losses_are_scaled_as_a_list(compare):
    def loop(scaler, task):
        for batch in task.batches:
            task.optimizer.zero_grad()
            losses = scaler.scale([task.loss(task.model, batch), task.loss(task.model, batch) / 2])
            torch.autograd.backward(losses)
            scaler.step(task.optimizer)
            scaler.update()

    compare(loop, make_optimizer=make_sgd)


def test_a_learning_rate_schedule_that_counts_applied_steps():
    task = Task(make_sgd)
    schedule = torch.optim.lr_scheduler.ExponentialLR(task.optimizer, 0.5)
    scaler = GradScaler()
    for index, batch in enumerate(task.batches):
        task.optimizer.zero_grad()
        scaler.scale(task.loss(task.model, batch)).backward()
        if index == 1:
            task.model[0].bias.grad[0] = INF
        scaler.step(task.optimizer)
        scaler.update()
        if scaler.last_step(task.optimizer).applied:
            schedule.step()
    assert task.optimizer.param_groups[0]["lr"] == 0.5 * 0.5**3


def test_a_patched_step_is_looked_up_at_the_time_of_the_call(backward, parameters, finite):
    """As Accelerate patches it, to learn whether it was called."""
    scaler, calls = GradScaler(), []
    optimizer = torch.optim.SGD(parameters)
    backward(scaler, parameters, finite)
    scaler.unscale_(optimizer)
    optimizer.step = lambda *args: calls.append(args) or "patched"
    assert scaler.step(optimizer, None) == "patched"
    assert calls == [(None,)]


def test_the_optimizer_s_arguments_are_handed_on(backward, parameters, finite):
    class Curious(torch.optim.SGD):
        def step(self, *args, **kwargs):
            return args, kwargs

    scaler = GradScaler()
    backward(scaler, parameters, finite)
    assert scaler.step(Curious(parameters), 1, "two", three=3) == ((1, "two"), {"three": 3})


def test_an_optimizer_that_cannot_be_hashed_is_taken(backward, parameters, finite, exact):
    """A dataclass has no hash; torch asks no more of an optimizer than groups and a step."""

    @dataclass
    class Wrapped:
        optimizer: torch.optim.Optimizer

        @property
        def param_groups(self):
            return self.optimizer.param_groups

        def step(self):
            self.optimizer.step()

    before = exact(parameters)
    scaler = GradScaler()
    optimizer = Wrapped(torch.optim.SGD(parameters))
    backward(scaler, parameters, finite)
    scaler.step(optimizer)
    scaler.update()
    assert exact(parameters) != before
    assert scaler.last_step(optimizer).applied


# Optimizers that take part in loss scaling.


@pytest.mark.parametrize("unscaled", [False, True], ids=["scaled", "unscaled"])
@pytest.mark.parametrize("gradients", ["finite", "overflowed"])
def test_an_optimizer_reads_scale_and_flag_from_its_attributes(
    gradients, unscaled, asking_optimizer, parameters, backward, exact, request
):
    gradients = request.getfixturevalue(gradients)
    seen = []
    for kind in (GradScaler, torch.amp.GradScaler):
        optimizer = asking_optimizer(parameters, lr=0.0)
        scaler = kind("cpu", init_scale=64.0)
        optimizer.zero_grad()
        backward(scaler, parameters, gradients)
        if unscaled:
            scaler.unscale_(optimizer)
        assert scaler.step(optimizer) == "asked"
        scaler.update()
        seen.append(exact([*optimizer.seen[0], scaler.get_scale()]))
        assert not hasattr(optimizer, "grad_scale")
        assert not hasattr(optimizer, "found_inf")
    assert seen[0] == seen[1]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_torch_s_own_optimizer_is_handed_no_flag_where_none_is_set(
    kind, parameters, finite, overflowed, backward
):
    class Subclass(kind):
        pass

    for optimizer_type in (kind, Subclass):
        optimizer, scaler, seen = optimizer_type(parameters, fused=True), GradScaler(), []
        optimizer.register_step_pre_hook(
            lambda *_, o=optimizer, seen=seen: seen.append(o.found_inf)
        )
        for gradients in (finite, overflowed):
            optimizer.zero_grad()
            backward(scaler, parameters, gradients)
            scaler.step(optimizer)
            scaler.update()
        without, with_one = seen
        assert with_one == 1.0
        assert without is None if optimizer_type is kind else without == 0.0


@pytest.mark.parametrize("unscaled", [False, True], ids=["scaled", "unscaled"])
def test_a_grad_scale_of_the_user_s_own_is_multiplied(
    unscaled, asking_optimizer, parameters, finite, backward, exact
):
    seen = []
    for kind in (GradScaler, torch.amp.GradScaler):
        optimizer = asking_optimizer(parameters, lr=0.0)
        optimizer.grad_scale = torch.tensor(3.0)
        scaler = kind("cpu", init_scale=64.0)
        optimizer.zero_grad()
        backward(scaler, parameters, finite)
        if unscaled:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        seen.append(exact(optimizer.seen[0]))
        assert not hasattr(optimizer, "grad_scale")
    assert seen[0] == seen[1]


def test_a_grad_scale_of_the_user_s_own_does_not_outlive_a_skipped_step(
    parameters, overflowed, finite, backward, exact
):
    """Fused SGD's first step, when it overflows, is skipped without calling the optimizer."""
    scaler = GradScaler()
    optimizer = torch.optim.SGD(parameters, lr=0.0, momentum=0.9, fused=True)
    optimizer.grad_scale = torch.tensor(2.0)
    backward(scaler, parameters, overflowed)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    backward(scaler, parameters, finite)
    scaler.step(optimizer)
    momentum = [optimizer.state[parameter]["momentum_buffer"] for parameter in parameters]
    assert exact(momentum) == exact(finite)


@pytest.mark.parametrize("gradients", ["finite", "overflowed"])
def test_an_optimizer_that_takes_the_scaler_is_handed_it_with_a_warning(
    gradients, parameters, backward, exact, request
):
    gradients = request.getfixturevalue(gradients)

    class Handed(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure=None, *, grad_scaler):
            grad_scaler.unscale_(self)
            flags = grad_scaler._found_inf_per_device(self)
            if not any(flag.item() for flag in flags.values()):
                super().step()
            return grad_scaler

    ends = []
    for kind in (GradScaler, torch.amp.GradScaler):
        owned = [torch.nn.Parameter(torch.ones_like(parameter)) for parameter in parameters]
        optimizer = Handed(owned, lr=0.1)
        scaler = kind("cpu", init_scale=64.0)
        backward(scaler, owned, gradients)
        with pytest.warns(FutureWarning, match="grad_scaler|keyword argument") as warned:
            assert scaler.step(optimizer) is scaler
        assert warned[0].filename == __file__
        scaler.update()
        ends.append(exact([owned, scaler.get_scale()]))
    assert ends[0] == ends[1]


def test_each_step_method_is_asked_for_itself_whatever_kind_of_callable_it_is(
    parameters, finite, backward
):
    class Step:
        __slots__ = ("calls",)  # nothing can refer to it weakly

        def __call__(self, *, grad_scaler):
            self.calls.append(grad_scaler)
            return grad_scaler.unscale_(optimizer)

    optimizer = torch.optim.AdamW(parameters, fused=True)
    scaler = GradScaler()

    def iteration():
        optimizer.zero_grad()
        backward(scaler, parameters, finite)
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
def test_gradients_that_have_a_graph_leave_none_behind(fused, clip, exact):
    ends = []
    for kind in (GradScaler, torch.amp.GradScaler):
        torch.manual_seed(0)
        parameter = torch.nn.Parameter(torch.randn(3))
        optimizer = torch.optim.SGD([parameter], lr=0.1, fused=fused)
        scaler = kind("cpu", init_scale=1024.0)
        scaler.scale((parameter**3).sum()).backward(create_graph=True)
        assert parameter.grad.requires_grad
        history = parameter.grad.grad_fn
        if clip and kind is GradScaler:
            scaler.clip_grad_norm_(optimizer, 100.0)
        elif clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameter, 100.0)
        scaler.step(optimizer)
        assert parameter.grad.grad_fn is history
        scaler.update()
        ends.append(exact([parameter, parameter.grad]))
    assert ends[0] == ends[1]


# What only a test would do.


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_gradients_spoilt_after_unscaling_are_stepped_with_as_by_torch(way, compare, exact):
    """unscale_ checks, step does not check again: what is done in between is the user's."""

    def loop(scaler, task):
        for batch in task.batches:
            task.optimizer.zero_grad()
            scaler.scale(task.loss(task.model, batch)).backward()
            scaler.unscale_(task.optimizer)
            for index, parameter in enumerate(task.model.parameters()):
                parameter.grad.fill_(INF if index % 2 else float("nan"))
            scaler.step(task.optimizer)
            scaler.update()
        assert not any(parameter.isfinite().any() for parameter in task.model.parameters())

    compare(
        loop,
        same_as=["native"],
        make_optimizer=lambda parameters: torch.optim.AdamW(parameters, **way),
    )


def test_gradients_mended_after_unscaling_are_not_stepped_with(
    backward, parameters, overflowed, exact
):
    scaler = GradScaler()
    optimizer = torch.optim.SGD(parameters)
    before = exact(parameters)
    backward(scaler, parameters, overflowed)
    scaler.unscale_(optimizer)
    for parameter in parameters:
        parameter.grad.zero_()
    scaler.step(optimizer)
    scaler.update()
    assert exact(parameters) == before
    assert scaler.get_scale() == 2.0**15


def test_growing_from_the_largest_float32_does_not_overflow():
    largest = torch.finfo(torch.float32).max
    scales = []
    for kind in (GradScaler, torch.amp.GradScaler):
        parameter = torch.nn.Parameter(torch.ones(()))
        optimizer = torch.optim.SGD([parameter])
        scaler = kind("cpu", init_scale=largest, growth_interval=1)
        scaler.scale(parameter * 1e-20).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [largest, largest]


def test_a_new_scale_drops_the_iteration_s_records(backward, parameters, overflowed):
    scaler = GradScaler()
    optimizer = torch.optim.SGD(parameters)
    backward(scaler, parameters, overflowed)
    scaler.step(optimizer)
    scaler.update(4.0)
    assert scaler.get_scale() == 4.0
    assert len(scaler._per_optimizer_states) == 0
    scaler.unscale_(optimizer)
