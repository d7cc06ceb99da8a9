"""A class that is not PyTorch's steps as on float32 weights, however it finds what it keeps."""

import copy

import pytest
import torch
from torch import nn

from gradscaler import ParameterError
from gradscaler.torch import MasterWeights
from tests.support import own_optimizers as others

STORES = ("float32", "remainder16")


class Training:
    """Parameters of two groups and dtypes, and gradients that are missing in turn."""

    def __init__(self, kind, store=None):
        torch.manual_seed(0)
        self.kind, self.store = kind, store
        shapes = [(4, 6), (6,), (16, 16), (8,)]
        self.parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
        self.parameters.append(nn.Parameter(torch.randn(3, dtype=torch.float64)))
        self.parameters[1].rate = 0.5
        self.optimizer = self.make(self.parameters, torch.bfloat16)
        self.set_mode("train")

    def make(self, params, dtype=None):
        if self.store is None:
            return self.kind(params)
        return MasterWeights(self.kind, params, dtype=dtype, store=self.store)

    def set_mode(self, mode):
        if self.kind is others.ScheduleFree:
            getattr(self.optimizer, mode)()

    def step(self, step, is_missing):
        torch.manual_seed(step)
        for i, p in enumerate(self.parameters):
            gradient = torch.randn(p.shape).bfloat16().to(p.dtype)
            p.grad = None if is_missing(step, i) or not p.requires_grad else gradient
        self.optimizer.step()

    def add(self):
        more = [nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(2))]
        self.optimizer.add_param_group({"params": more, "lr": 0.02})
        self.parameters += more
        self.set_mode("eval")
        self.set_mode("train")

    def resume(self):
        saved = copy.deepcopy(self.optimizer.state_dict())
        self.optimizer = self.make(self.parameters)
        self.optimizer.load_state_dict(saved)

    def values(self):
        if self.store is None:
            return [p.detach() for p in self.parameters]
        return [self.optimizer.wide(p) for p in self.parameters]


def with_changing_gradients(training):
    for step in range(7):
        training.step(step, lambda step, i: (step + i) % 4 == 1 or step == 5)
        if step == 2:
            training.set_mode("eval")
            training.set_mode("train")
        if step == 3:
            training.parameters[0].requires_grad_(requires_grad=False)


def with_a_group_that_is_added(training):
    for step in range(6):
        training.step(step, lambda step, i: i == step)
        if step == 2:
            training.add()


def with_a_stop(training):
    for step in range(6):
        training.step(step, lambda step, i: (step + i) % 3 == 1)
        if step == 2:
            training.resume()


@pytest.mark.parametrize("kind", others.KINDS)
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(
    "train", [with_changing_gradients, with_a_group_that_is_added, with_a_stop]
)
def test_an_optimizer_of_others_steps_as_on_float32(kind, store, train):
    if train is with_a_stop and kind in others.FORGETFUL:
        pytest.skip("it forgets on float32 weights, too")
    native, ours = Training(kind), Training(kind, store)
    train(native)
    train(ours)
    for value, expected in zip(ours.values(), native.values(), strict=True):
        assert value.isfinite().all()
        assert torch.equal(value, expected)
    assert ours.parameters[0].dtype is torch.bfloat16


@pytest.mark.parametrize("kind", others.KINDS)
def test_a_random_store_steps_near_it(kind):
    native, ours = Training(kind), Training(kind, "stochastic")
    for training in (native, ours):
        for step in range(3):
            training.step(step, lambda step, i: i == step)
    for value, expected in zip(ours.values(), native.values(), strict=True):
        assert (value - expected).abs().max() < 0.1


@pytest.mark.parametrize("store", ["float32", "remainder16", "stochastic"])
def test_a_parameter_without_a_gradient_that_is_not_stepped_keeps_its_bits_and_its_numbers(store):
    training = Training(others.Lion, store)
    training.step(0, lambda step, i: False)
    parameter = training.parameters[2]
    kept = parameter.detach().clone(), copy.deepcopy(training.optimizer.state[parameter])
    training.step(1, lambda step, i: i == 2)
    assert torch.equal(parameter, kept[0])
    state = training.optimizer.state[parameter]
    assert all(torch.equal(state[key], value) for key, value in kept[1].items())


def test_a_frozen_parameter_takes_no_float32_memory_and_is_not_stepped():
    frozen, trained = nn.Parameter(torch.ones(64)), nn.Parameter(torch.ones(4))
    frozen.requires_grad_(requires_grad=False)
    optimizer = MasterWeights(others.Lion, [frozen, trained], lr=0.1)
    trained.grad = torch.ones_like(trained)
    optimizer.step()
    assert frozen not in optimizer.state
    assert torch.equal(frozen, torch.ones(64).half())
    optimizer = MasterWeights(others.SetsMemory, [frozen, trained], lr=0.1)
    with pytest.raises(ParameterError, match="SetsMemory has set a frozen parameter"):
        optimizer.step()
    assert torch.equal(frozen, torch.ones(64).half())


class Hooked(torch.optim.SGD):
    """Steps in the backward pass."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        for p in self.param_groups[0]["params"]:
            p.register_hook(lambda gradient: gradient)


class Copying(torch.optim.SGD):
    """Steps copies of its parameters."""

    def __init__(self, params, lr):
        super().__init__([p.detach().clone() for p in params], lr)


class Aliasing(torch.optim.SGD):
    """Keeps the memory of its parameters."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.own = [p.data for p in self.param_groups[0]["params"]]


class AliasingInState(torch.optim.SGD):
    """Keeps the memory of its parameters, too."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        for p in self.param_groups[0]["params"]:
            self.state[p]["own"] = p.data


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Hooked, "Hooked registers hooks on its parameters"),
        (Aliasing, "Aliasing keeps parameters in its attribute 'own'"),
        (AliasingInState, "AliasingInState keeps parameters in its attribute 'state'"),
        (Copying, "Copying steps other tensors than those that it is given"),
    ],
)
def test_an_optimizer_that_does_not_step_what_it_is_given_is_refused(kind, message):
    parameter = nn.Parameter(torch.ones(2))
    with pytest.raises(ParameterError, match=message):
        MasterWeights(kind, [parameter], lr=0.1)
    assert parameter.dtype is torch.float32


class Empty(torch.optim.SGD):
    """Keeps a tensor without memory, as a parameter of no elements is."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.own = torch.empty(0)


def test_what_has_no_memory_is_no_memory_of_a_parameter():
    optimizer = MasterWeights(
        Empty, [nn.Parameter(torch.ones(2)), nn.Parameter(torch.empty(0))], lr=1
    )
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2).half()
    optimizer.step()
    assert optimizer.param_groups[0]["params"][0].tolist() == [0.0, 0.0]


def test_chunks_are_refused_where_an_optimizer_must_see_all_parameters():
    with pytest.raises(ParameterError, match="Lion, which is not PyTorch's, must get all"):
        MasterWeights(others.Lion, [nn.Parameter(torch.ones(2))], chunk_elements=16)


def test_what_an_optimizer_s_constructor_sets_in_its_groups_is_in_the_groups():
    training = Training(others.Muon, "float32")
    assert [group["is_muon"] for group in training.optimizer.param_groups] == [True, False]
    assert [len(group["params"]) for group in training.optimizer.param_groups] == [2, 3]


def test_train_and_eval_move_the_float32_values_and_do_nothing_in_other_optimizers():
    training = Training(others.ScheduleFree, "remainder16")
    for step in range(3):
        training.step(step, lambda step, i: False)
    before = training.values()
    training.set_mode("eval")
    moved = training.values()
    assert not torch.equal(moved[0], before[0])
    torch.testing.assert_close(training.parameters[0].float(), moved[0], rtol=2**-8, atol=0)
    training.set_mode("train")
    torch.testing.assert_close(training.values()[0], before[0])
    MasterWeights(torch.optim.SGD, [nn.Parameter(torch.ones(2))], lr=0.1).eval()
