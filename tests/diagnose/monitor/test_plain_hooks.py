"""What a monitor without a scaler hooks, which optimizers it watches, and what it leaves behind."""

import _thread
import gc
import json
import math
import threading
import weakref
from contextlib import nullcontext

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from gradscaler.diagnose import Monitor, read_run

# How a launcher begins a run is not public.
from gradscaler.diagnose._monitor import backward_calls
from gradscaler.torch import GradScaler

pytestmark = pytest.mark.usefixtures("own_random_numbers_and_one_thread")


def training(**options):
    model = nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), Monitor(model=model, **options)


def backward(model, factor=1.0):
    model.zero_grad()
    (model(torch.randn(8, 4)).square().mean() * factor).backward()


def step(model, *optimizers, factor=1.0):
    backward(model, factor)
    for optimizer in optimizers:
        optimizer.step()


def hooks():
    gc.collect()  # the monitors that other tests left have hooks, too
    return len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)


def test_a_closed_monitor_leaves_pytorch_as_it_was():
    before = torch.autograd.backward, hooks()
    model, optimizer, monitor = training()
    step(model, optimizer)
    with Monitor(model=model):
        monitor.close()
        step(model, optimizer)
        assert torch.autograd.backward is not before[0]
    assert (torch.autograd.backward, hooks()) == before
    step(model, optimizer)
    assert len(monitor.history) == 1


def test_a_monitor_that_is_dropped_is_collected_and_leaves_pytorch_as_it_was():
    before = torch.autograd.backward, hooks()
    model, optimizer, monitor = training()
    step(model, optimizer)
    alive = weakref.ref(monitor)
    del monitor
    gc.collect()
    assert alive() is None
    assert (torch.autograd.backward, hooks()) == before


class Launcher:
    """Begins to watch a model in the first backward pass."""

    def __init__(self, model):
        self.model, self.monitor = model, None
        backward_calls.listen(self)

    def before_backward(self, losses):
        self.monitor = Monitor(model=self.model)
        backward_calls.ignore(self)

    def after_backward(self):
        pass


def test_a_monitor_that_begins_in_a_backward_pass_sees_its_loss_and_its_step():
    before = torch.autograd.backward
    model = nn.Linear(4, 1)
    launcher = Launcher(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    optimizer.step()
    launcher.monitor.close()
    assert [each.loss for each in launcher.monitor.history] == [pytest.approx(loss.item())]
    assert torch.autograd.backward is before


def test_the_model_and_the_optimizer_are_not_kept_alive():
    model, optimizer, monitor = training()
    step(model, optimizer)
    monitor.close()
    alive = weakref.ref(optimizer)
    del optimizer, monitor
    gc.collect()
    assert alive() is None


def test_an_optimizer_of_another_model_is_not_watched():
    model, optimizer, monitor = training()
    other = nn.Linear(4, 1)
    of_other = torch.optim.SGD(other.parameters(), lr=0.1)
    step(model, optimizer)
    step(other, of_other, factor=torch.nan)
    assert len(monitor.history) == 1
    assert monitor.bad_step is None
    monitor.close()


def test_only_the_given_optimizers_are_watched():
    model = nn.Linear(4, 1)
    ours, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    monitor = Monitor(model=model, optimizers=[ours])
    for optimizer in (ours, other, ours):
        step(model, optimizer)
    assert len(monitor.history) == 2
    monitor.close()


class Wrapper(torch.optim.Optimizer):
    """An optimizer that steps another one, as Lookahead does."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure=None):
        self.inner.step(closure)


class Zeroes(Wrapper):
    """An optimizer that zeroes its gradients at the end of each step, as SAM does."""

    def step(self, closure):
        with torch.enable_grad():
            closure()
        self.inner.step()
        self.zero_grad()


@pytest.mark.parametrize("passes_before", [0, 1])
def test_a_step_that_zeroes_its_gradients_counts(passes_before):
    model = nn.Linear(4, 1)
    optimizer = Zeroes(torch.optim.SGD(model.parameters(), lr=0.1))

    def closure():
        model(torch.ones(2, 4)).sum().backward()

    with Monitor(model=model) as monitor:
        for _ in range(30):
            for _ in range(passes_before):
                closure()
            optimizer.step(closure)
    assert len(monitor.history) == 30
    assert "Nothing wrong was seen" in monitor.verdict.text


def test_an_optimizer_that_steps_another_counts_once():
    model, optimizer, monitor = training()
    wrapper = Wrapper(optimizer)
    for _ in range(5):
        step(model, wrapper)
    assert [each.step for each in monitor.history] == [1, 2, 3, 4, 5]
    monitor.close()


def test_a_step_that_raises_is_not_counted_and_later_ones_are():
    model, optimizer, monitor = training()
    step(model, optimizer)
    backward(model)
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    for _ in range(3):
        step(model, optimizer)
    assert len(monitor.history) == 4
    monitor.close()


class StoppedError(Exception):
    """Ends a training."""


def test_what_the_listener_raises_ends_the_training_in_the_bad_step():
    def stop(finding):
        assert monitor.bad_step == 3
        raise StoppedError(finding.kind)

    model, optimizer, monitor = training(tell=stop)
    for factor in (1.0, 1.0):
        step(model, optimizer, factor=factor)
    with pytest.raises(StoppedError, match="loss"):
        step(model, optimizer, factor=torch.nan)
    monitor.close()


def test_a_run_file_speaks_of_no_scale_and_is_read_again(path):
    model, optimizer, monitor = training(path=path, every=2)
    for factor in (1.0, 1.0, torch.nan, 1.0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(monitor._log.teller, "_tell", lambda finding: None)
            step(model, optimizer, factor=factor)
    monitor.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    keys = {key for line in lines for key in line}
    assert keys.isdisjoint({"scale", "scales", "skips", "nonfinite_steps"})
    assert lines[0]["policy"] == {}
    assert {line["dtype"] for line in lines if line["kind"] == "start"} == {"float32"}
    run = read_run(path)
    assert run.scales == {}
    assert [bad.step for bad in run.bad_steps] == [3]
    assert math.isnan(run.bad_steps[0].loss)
    assert sorted(run.losses) == [1, 2, 3, 4]
    assert run.verdict == monitor.verdict


def test_the_log_of_numbers_holds_no_scale():
    logged = []
    model, optimizer, monitor = training(every=1, log=lambda n, step: logged.append(n))
    step(model, optimizer)
    step(model, optimizer)
    monitor.close()
    assert "gradscaler/gradient_norm" in logged[0]
    assert all("scale" not in key.removeprefix("gradscaler/") for n in logged for key in n)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_file_says_in_which_dtype_the_first_backward_pass_computed(dtype, path):
    model, optimizer, monitor = training(path=path)
    for _ in range(3):
        model.zero_grad()
        with torch.autocast("cpu", getattr(torch, dtype)):
            loss = model(torch.randn(8, 4)).float().square().mean()
        loss.backward()
        optimizer.step()
    monitor.close()
    assert read_run(path).starts[-1].dtype == dtype
    assert len({start.step for start in read_run(path).starts}) == 1


def test_optimizers_are_for_a_loop_without_a_scaler():
    with pytest.raises(TypeError, match="optimizers"):
        Monitor(GradScaler(), nn.Linear(1, 1), optimizers=[])


def test_squares_of_finite_gradients_that_overflow_are_no_bad_step():
    model, optimizer, monitor = training()
    optimizer.param_groups[0]["lr"] = 1e-30
    step(model, optimizer, factor=1e25)
    step(model, optimizer)
    assert model.weight.isfinite().all()
    assert monitor.bad_step is None
    monitor.close()


def test_a_bad_gradient_is_named_though_clipping_makes_all_of_them_bad():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer, told = torch.optim.SGD(model.parameters(), lr=0.1), []
    monitor = Monitor(model=model, tell=told.append)
    for last in (0.0, torch.nan):
        model.zero_grad()
        loss = model(torch.randn(8, 4)).mean() + 0 * model[1].bias.sum()
        model[1].bias.register_hook(lambda grad, last=last: grad + last)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    monitor.close()
    assert "The gradient of 1.bias is NaN" in told[0].cause


def test_the_loop_of_a_disabled_scaler_in_bfloat16_tells_its_bad_step():
    model, told = nn.Linear(4, 1), []
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), GradScaler(enabled=False)
    monitor = Monitor(scaler, model, tell=told.append)
    for factor in (1.0, 1.0, torch.nan, 1.0):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(8, 4)).float().square().mean() * factor
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    monitor.close()
    assert monitor.bad_step == 3
    assert [finding.steps for finding in told] == [(3,)]
    assert "scale" not in monitor.verdict.text


def test_a_backward_pass_in_another_one_is_part_of_it_also_in_a_thread_of_pytorchs_own():
    inner, done = torch.nn.Parameter(torch.ones(())), threading.Semaphore(0)

    class Checkpoint(torch.autograd.Function):  # a reentrant one, on a device
        @staticmethod
        def forward(ctx, inputs):
            return inputs.clone()

        @staticmethod
        def backward(ctx, gradient):
            def compute():
                torch.autograd.backward(inner * 100)
                done.release()

            _thread.start_new_thread(compute, ())  # threading knows none that C++ has started
            assert done.acquire(timeout=60)
            return gradient

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD([*model.parameters(), inner], lr=0.0)
    monitor, losses = Monitor(model=model), []
    for _ in range(3):
        loss = Checkpoint.apply(model(torch.randn(4, 2))).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert [step.loss for step in monitor.history] == losses
    monitor.close()


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # PyTorch's own
def test_the_compiler_sees_nothing_of_a_monitor_in_a_compiled_step():
    def graphs_of(is_watched):
        torch._dynamo.reset()
        torch.manual_seed(0)
        graphs = []

        def backend(graph, inputs):
            graphs.append(graph)
            return graph.forward

        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        step = torch.compile(optimizer.step, backend=backend)
        with Monitor(model=model) if is_watched else nullcontext() as monitor:
            for _ in range(12):
                optimizer.zero_grad()
                model(torch.randn(2, 4)).square().mean().backward()
                step()
        assert not is_watched or len(monitor.history) == 12
        return [graph.code for graph in graphs], model.weight.detach()

    (graphs, weight), (alone, expected) = graphs_of(True), graphs_of(False)
    assert torch.equal(weight, expected)
    assert graphs == alone != []
