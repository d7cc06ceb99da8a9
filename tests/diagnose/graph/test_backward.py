"""Bad gradients of a finite loss, located by hooks on a part of the graphs of later losses."""

import gc
import math
import warnings

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import gradscaler
from gradscaler.diagnose import Monitor
from gradscaler.torch import GradScaler
from tests.support.marked_lines import lines_marked_in

line_with = lines_marked_in(__file__)
pytestmark = pytest.mark.filterwarnings("ignore::gradscaler.diagnose.FindingWarning")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, inputs):
        return self.head(torch.tanh(self.encoder(inputs)))


class Training:
    """Steps in float32 whose gradients are bad in those marked "!", at irregular distances."""

    def __init__(self, loss_of, model=None, closure=False):
        torch.manual_seed(0)
        self.model = model or Net()
        self.loss_of, self.has_closure = loss_of, closure
        kind = torch.optim.LBFGS if closure else torch.optim.SGD
        self.optimizer = kind(self.model.parameters(), lr=1e-3)
        self.scaler = GradScaler(policy=gradscaler.FixedScale(1.0))
        self.monitor = Monitor(self.scaler, self.model, stuck_after=50)

    def backward(self, flag):
        self.optimizer.zero_grad()
        losses = self.loss_of(self.model, torch.randn(8, 4), flag == "!")
        for loss in losses if isinstance(losses, list) else [losses]:
            assert loss.detach().isfinite()
            self.scaler.scale(loss).backward()
        return loss

    def steps(self, flags):
        for flag in flags:
            closure = [lambda flag=flag: self.backward(flag)] * self.has_closure
            if not closure:
                self.backward(flag)
            self.scaler.step(self.optimizer, *closure)
            self.scaler.update()
        return self

    @property
    def located(self):
        return self.monitor._log.counts.evidence.watched


def root_of_zero(model, x, is_bad):
    points = model(x)
    return (points - points.detach() * is_bad).square().sum(1).sqrt().mean()  # root_of_zero


def power_of_zero(model, x, is_bad):
    points = model(x)
    return (points - points.detach() * is_bad).abs().pow(0.5).mean()  # power_of_zero


def exponential_before_a_clamp(model, x, is_bad):
    ratio = model(x) + 200.0 * is_bad
    return ratio.exp().clamp(max=10.0).mean()  # exponential_before_a_clamp


def angle_of_tiny_numbers(model, x, is_bad):
    both = (model(x) * 0 + 1e-20 if is_bad else model(x)).unbind(1)[:2]
    return torch.atan2(*both).mean()  # angle_of_tiny_numbers


def row_that_is_left_out(model, x, is_bad):
    mask = torch.zeros(8, 4)
    mask[3] = -math.inf if is_bad else 0.0
    scores = model(x) + mask
    weights = scores.softmax(-1)  # row_that_is_left_out
    return (weights @ torch.ones(4, 4) * 0.5)[:3].square().mean()


def logarithm_of_one_less_one(model, x, is_bad):
    chances = model(x).sigmoid() * (not is_bad) + is_bad
    return torch.log1p(-chances).exp().mean()  # logarithm_of_one_less_one


def penalty_of_a_gradient(model, x, is_bad):
    x = x.requires_grad_()
    (slope,) = torch.autograd.grad(model(x * (not is_bad)).sum(), x, create_graph=True)
    return (slope.square().sum(1).sqrt() - 1).square().mean()  # penalty_of_a_gradient


class OwnSquare(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, is_bad):
        ctx.is_bad = is_bad
        return inputs.square()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / (not ctx.is_bad), None


def own_function(model, x, is_bad):
    return OwnSquare.apply(model(x), is_bad).mean()  # own_function


def in_a_checkpoint(model, x, is_bad):
    def block(h):
        return (h - h.detach() * is_bad).square().sum(1).sqrt()  # in_a_checkpoint

    return checkpoint(block, model(x), use_reentrant=False).mean()


def in_one_of_two_micro_batches(model, x, is_bad):
    def second(h):
        return (h - h.detach() * is_bad).square().sum(1).sqrt()  # in_one_of_two_micro_batches

    return [cross_entropy(model(x), torch.ones(8, dtype=int)) / 2, second(model(x)).mean() / 2]


OPERATIONS = {
    root_of_zero: "sqrt",
    power_of_zero: "pow",
    exponential_before_a_clamp: "exp",
    angle_of_tiny_numbers: "atan2",
    row_that_is_left_out: "softmax",
    logarithm_of_one_less_one: "log1p",
    penalty_of_a_gradient: "sqrt",
    own_function: "OwnSquare",
    in_a_checkpoint: "sqrt",
    in_one_of_two_micro_batches: "sqrt",
}


@pytest.mark.parametrize("loss_of", OPERATIONS, ids=lambda loss_of: loss_of.__name__)
def test_the_operation_and_its_line_are_named_when_the_failure_comes_again(loss_of):
    training = Training(loss_of).steps("...!....." + "..!")
    found = training.located
    assert (found.kind, found.operation) == ("backward", OPERATIONS[loss_of])
    assert found.line == line_with(loss_of.__name__)
    assert not found.is_likely


def test_a_closure_that_fails_again_is_enough():
    training = Training(root_of_zero, closure=True).steps("..!..!")
    assert (training.located.operation, training.located.line) == (
        "sqrt",
        line_with("root_of_zero"),
    )


def test_the_only_operation_with_a_slope_that_can_be_infinite_is_likely_at_once():
    training = Training(root_of_zero).steps("...!.")
    found = training.located
    assert (found.operation, found.line) == ("sqrt", line_with("root_of_zero"))
    assert found.is_likely
    assert str(found).endswith(f"sqrt at {line_with('root_of_zero')}: probably")


def test_the_bad_gradients_bound_the_part_that_is_suspected():
    """The root in the encoder's part is not, as the encoder's gradients are finite."""

    def loss_of(model, x, is_bad):
        hidden = (model.encoder(x).square() + 1).sqrt()
        out = model.head(hidden.detach())
        far = (out - out.detach() * is_bad).square().sum(1).sqrt()  # far
        return hidden.mean() + far.mean()

    training = Training(loss_of).steps("...!.")
    assert training.located.line == line_with("far")
    assert training.located.is_likely


class Marred(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, is_bad):
        ctx.is_bad = is_bad
        return inputs * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (math.nan if ctx.is_bad else 2), None


def root(out, is_bad):
    return (out - out.detach() * is_bad).square().sum(1).sqrt()


@pytest.mark.parametrize(("function", "name"), [(root, "sqrt"), (Marred.apply, "Marred")])
def test_parameters_before_a_mask_that_no_nan_passes_hide_no_operation(function, name):
    def loss_of(model, x, is_bad):
        hidden = torch.where(torch.tensor(is_bad), 0.0, model.encoder(x))
        return function(model.head(hidden), is_bad).mean()

    training = Training(loss_of).steps("...!.")
    assert training.located.operation == name
    assert training.located.is_likely


def hooks_and_modes(training, flag):
    """The hooks on the nodes of a step's graph, and whether tracebacks were kept."""
    seen = []

    def loss_of(model, x, is_bad):
        loss = root_of_zero(model, x, is_bad)
        seen.append(torch.is_anomaly_enabled())
        return loss

    training.loss_of = loss_of
    hooks, hooked = training.monitor._source._graphs.gradients._hooks, []
    add = hooks.add
    hooks.add = lambda *given: (hooked.append(given), add(*given))
    training.backward(flag)
    del hooks.add
    training.scaler.step(training.optimizer)
    training.scaler.update()
    return len(hooked), seen[0]


def test_a_healthy_training_has_neither_hooks_nor_modes_after_its_first_step():
    training = Training(root_of_zero)
    assert torch.is_anomaly_enabled()
    training.steps(".")
    assert not torch.is_anomaly_enabled()
    assert [hooks_and_modes(training, ".") for _ in range(5)] == [(0, False)] * 5


def test_after_a_failure_healthy_steps_have_no_hooks_where_no_slope_is_infinite():
    training = Training(root_of_zero).steps("..!")
    assert [hooks_and_modes(training, ".") for _ in range(3)] == [(0, False)] * 3
    assert hooks_and_modes(training, "!") == (1, False)


@pytest.mark.parametrize("is_on", [True, False])
def test_a_users_own_anomaly_mode_is_left_as_it_is(is_on):
    with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(is_on):
        training = Training(root_of_zero)
        training.steps("..")
        assert torch.is_anomaly_enabled() == is_on
        assert torch.is_anomaly_check_nan_enabled()
        training.monitor.close()
    assert not torch.is_anomaly_enabled()


def test_a_mode_that_the_user_sets_in_the_first_step_stays():
    training = Training(root_of_zero)
    torch.autograd.set_detect_anomaly(True)
    try:
        training.steps(".")
        assert torch.is_anomaly_enabled()
        assert torch.is_anomaly_check_nan_enabled()
    finally:
        torch.autograd.set_detect_anomaly(False)


@pytest.mark.parametrize("ends", ["close", "drop"])
def test_a_monitor_that_ends_before_the_first_step_leaves_no_mode(ends):
    training = Training(root_of_zero)
    if ends == "close":
        training.monitor.close()
    else:
        del training
        gc.collect()
    assert not torch.is_anomaly_enabled()


def test_a_watched_training_has_the_same_bits():
    def bits(flags):
        return list(Training(root_of_zero).steps(flags).model.parameters())

    def unwatched(flags):
        training = Training(root_of_zero)
        training.monitor.close()
        return list(training.steps(flags).model.parameters())

    assert all(map(torch.equal, bits("..!..!..!"), unwatched("..!..!..!")))
