"""An Inf or NaN from outside of the model: from a batch, or from code that changed one."""

import inspect
import math
import threading
from pathlib import Path

import pytest

pytest.importorskip("torch")

import numpy as np
import torch
from torch import nn

from gradscaler.diagnose import Monitor, locate
from gradscaler.torch import GradScaler

NAN = math.nan


class Teacher(nn.Module):
    """Divides by 0 between two layers."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs):
        hidden = self.first(inputs)
        return self.last(hidden / (hidden - hidden))  # HERE


class Frozen(Teacher):
    """Has a parameter that is not finite."""

    def __init__(self):
        super().__init__()
        with torch.no_grad():
            self.last.bias[1] = NAN

    def forward(self, inputs):
        return self.last(inputs)  # HERE


def line_of(source):
    lines, first = inspect.getsourcelines(source)
    (number,) = (first + n for n, line in enumerate(lines) if line.rstrip().endswith("# HERE"))
    return f"{Path(__file__).relative_to(Path.cwd())}:{number}"


def teacher_without_gradients(student, batch, teacher):
    with torch.no_grad():
        target = teacher(batch)
    return (student(batch) - target).square().mean()


def teacher_in_inference_mode(student, batch, teacher):
    with torch.inference_mode():
        target = teacher(batch)
    return (student(batch) - target.clone()).square().mean()


def encoder_with_gradients(student, batch, teacher):
    return student(teacher(batch)).square().mean()


def compiled_encoder(student, batch, teacher):
    return student(torch.compile(teacher, backend="eager")(batch)).square().mean()


def normalised(student, batch, _):
    deviation = batch.std(0) * 0
    batch = (batch - batch.mean(0)) / deviation  # HERE
    return student(batch).square().mean()


def made_in_a_thread(student, batch, teacher):
    made = []
    thread = threading.Thread(target=lambda: made.append(teacher(batch)))
    thread.start()
    thread.join()
    return student(made[0].view(8, 4)).square().mean()


def by_locate(student, loss):
    return locate(student, lambda: loss().backward())


def by_monitor(student, loss):
    scaler = GradScaler(init_scale=4.0)
    optimizer = torch.optim.SGD(student.parameters(), 0.1)
    monitor = Monitor(scaler, student, stuck_after=5, on_stuck="continue")
    for _ in range(5):
        optimizer.zero_grad()
        scaler.scale(loss()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert monitor.verdict is not None
    return monitor._source.located


def found_in(how, function, teacher=Teacher, is_training=True):
    torch.manual_seed(0)
    student, other = nn.Sequential(nn.Linear(4, 4)), teacher()
    student.train(is_training)
    return how(student, lambda: function(student, torch.randn(8, 4), other))


HOWS = pytest.mark.parametrize("how", [by_locate, by_monitor])


@HOWS
@pytest.mark.parametrize(
    "function",
    [
        teacher_without_gradients,
        teacher_in_inference_mode,
        encoder_with_gradients,
        compiled_encoder,
    ],
)
def test_what_another_module_makes_is_its_operation_s(how, function):
    found = found_in(how, function)
    assert (found.kind, found.module, found.type) == ("forward", None, "Teacher")
    assert (found.operation, found.line) == ("div", line_of(Teacher))
    assert str(found).startswith("forward of another module (Teacher, float32), div at ")


@HOWS
@pytest.mark.parametrize("function", [teacher_without_gradients, encoder_with_gradients])
def test_a_parameter_of_another_module_that_is_not_finite_is_named(how, function):
    found = found_in(how, function, Frozen)
    assert (found.kind, found.module, found.type) == ("forward", None, "Frozen")
    assert (found.parameter, found.operation, found.line) == ("last.bias", None, line_of(Frozen))


@HOWS
def test_what_a_normalisation_makes_of_a_batch_is_its_division_s(how):
    found = found_in(how, normalised)
    assert (found.kind, found.module, found.type) == ("forward", None, "")
    assert (found.operation, found.line) == ("div", line_of(normalised))
    assert found.smallest_divisor == 0
    assert str(found).endswith("; smallest divisor 0")


def of_a_batch(batch):
    def loss(student, *_):
        return student(batch.view(4, 8).reshape(8, 4)).square().mean()  # HERE

    return loss


@HOWS
@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_bad_batch_is_an_input_that_nothing_computed(how, is_training, requires_grad):
    batch = torch.full((8, 4), NAN, requires_grad=requires_grad)
    found = found_in(how, of_a_batch(batch), is_training=is_training)
    assert (found.kind, found.module) == ("input", "0")
    assert (found.operation, found.line) == ("matmul", line_of(of_a_batch))


@HOWS
def test_what_was_computed_in_another_thread_is_found_in_the_graph_of_the_loss(how):
    found = found_in(how, made_in_a_thread)
    assert (found.kind, found.operation, found.line) == ("forward", "div", line_of(Teacher))


def test_a_teacher_beside_a_model_in_evaluation_mode_is_not_the_batch():
    found = found_in(by_locate, teacher_without_gradients, is_training=False)
    assert (found.kind, found.line) == ("forward", line_of(Teacher))
    # A monitor reads nothing in passes that may be an evaluation.
    found = found_in(by_monitor, teacher_without_gradients, is_training=False)
    assert (found.kind, found.operation) == ("input", "sub")


def logs_as_a_number(h, read):
    return h.mean() * read((h * 0).log().mean())


READ = {
    "item": torch.Tensor.item,
    "NumPy": lambda x: x.detach().numpy()[()],
    "float64": lambda x: np.float64(x.detach().numpy()),
}


@pytest.mark.parametrize("read", READ)
def test_a_number_that_was_read_from_a_tensor_is_followed(read):
    net = nn.Linear(4, 4)
    found = locate(net, lambda: logs_as_a_number(net(torch.ones(2, 4)), READ[read]))
    assert (found.kind, found.operation) == ("forward", "log")


@pytest.mark.parametrize("number", [NAN, math.inf, -math.inf, np.float32(NAN)])
def test_a_number_from_outside_of_pytorch_is_said(number):
    net = nn.Linear(4, 4)

    def closure():
        (net(torch.ones(2, 4)).mean() + number).backward()

    found = locate(net, closure)
    assert (found.kind, found.operation, found.is_number) == ("forward", "add", True)
    assert str(found).endswith("; a number from outside of the framework holds it already")


def test_an_inf_that_is_an_option_is_no_input():
    net = nn.Linear(4, 4)
    assert locate(net, lambda: net(torch.ones(2, 4)).norm(math.inf)) is None
    found = locate(net, lambda: (net(torch.ones(2, 4)) * 0).log().clamp(max=math.inf).sum())
    assert (found.kind, found.operation) == ("forward", "log")
