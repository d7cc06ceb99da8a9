"""Small parameters are stepped as one flat tensor, with the bits of steps one by one."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from gradscaler.torch import MasterWeights
from gradscaler.torch._weights.wrapped import _ELEMENTWISE

STORES = ("float32", "remainder16", "stochastic")
FUSED = (torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
CASES = [
    (each, options)
    for each in sorted(_ELEMENTWISE, key=lambda each: each.__name__)
    for options in ({}, {"foreach": True}, {"fused": True})
    if "fused" not in options or each in FUSED
]
SHAPES = [(8, 6), (5, 32), (3,), (2, 4, 4, 3), (48,), (7, 5), (16,)]


class Training:
    """Parameters of many shapes in two groups, whose gradients do not depend on what they are."""

    def __init__(self, optimizer_class=torch.optim.AdamW, **options):
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(shape, generator=generator) for shape in SHAPES]
        values[3] = values[3].to(memory_format=torch.channels_last)
        self.parameters = [nn.Parameter(value) for value in values]
        groups = [
            {"params": self.parameters[:4]},
            {"params": self.parameters[4:], "lr": 0.004},
        ]
        options = {"lr": 0.01, "dtype": torch.bfloat16, **options}
        if optimizer_class is torch.optim.SGD:
            options["momentum"] = 0.9
        self.optimizer = MasterWeights(optimizer_class, groups, **options)

    def step(self, number, without=()):
        generator = torch.Generator().manual_seed(number)
        for i, parameter in enumerate(self.parameters):
            grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.grad = None if i in without else torch.empty_like(parameter).copy_(grad)
        self.optimizer.grad_scale, self.optimizer.found_inf = torch.tensor(3.0), torch.zeros(())
        self.optimizer.step()

    def all(self):
        return [self.optimizer.state_dict(), self.parameters]


@pytest.fixture
def alone(monkeypatch):
    """Call a function while no parameters are joined."""

    def call(function):
        with monkeypatch.context() as patch:
            patch.setattr(MasterWeights, "_may_join", lambda *_: False)
            return function()

    return call


@pytest.fixture
def stepped(monkeypatch):
    """The number of elements of each tensor in each of AdamW's steps."""
    seen = []
    step = torch.optim.AdamW.step

    def watching(inner, *args):
        seen.append([p.numel() for group in inner.param_groups for p in group["params"]])
        return step(inner, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", watching)
    return seen


def test_those_that_fill_registers_are_joined_in_each_group(stepped):
    training = Training()
    for number in range(2):
        training.step(number)
    assert sorted(stepped[:3]) == [[3, 35], [48 + 16], [48 + 160 + 96]]
    assert stepped[3:] == stepped[:3]


def load_its_own_state(training):
    training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))
    return training


@pytest.mark.parametrize("begin_again", [load_its_own_state, copy.deepcopy])
def test_they_are_joined_after_a_load_and_in_a_copy(begin_again, stepped):
    training = Training()
    training.step(0)
    before = stepped[:]
    training = begin_again(training)
    must_be_as_large_as_its_values(training.optimizer)
    training.step(1)
    assert stepped == before * 2


def test_they_are_joined_after_a_load_without_those_that_are_frozen(stepped):
    training = Training()
    training.step(0)
    training.parameters[1].requires_grad_(False)
    load_its_own_state(training)
    del stepped[:]
    training.step(1, without=[1])
    assert sorted(stepped) == [[3, 35], [48 + 16], [48 + 96]]


def test_tensors_in_shared_memory_stay_where_a_state_is_loaded():
    training = Training(torch.optim.Adagrad)
    saved = training.optimizer.state_dict()
    sums = [state["sum"].share_memory_() for state in saved["state"].values()]
    training.optimizer.load_state_dict(saved)
    for parameter, shared in zip(training.parameters, sums, strict=True):
        assert training.optimizer.state[parameter]["sum"].data_ptr() == shared.data_ptr()


def test_those_between_parameters_that_are_split_are_joined(stepped):
    parameters = [nn.Parameter(torch.ones(16 * (1 + i % 2 * 3))) for i in range(8)]
    optimizer = MasterWeights(torch.optim.AdamW, parameters, chunk_elements=48)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        del stepped[:]
        optimizer.step()
    assert sorted(stepped) == [[16]] * 5 + [[48]] * 5


def test_a_pickle_holds_each_value_once():
    training = Training()
    for number in range(2):
        training.step(number)
    sizes = [
        len(pickle.dumps(each)) for each in (training.optimizer, training.optimizer.state_dict())
    ]
    assert max(sizes) < 40_000  # of 21 tensors whose memory is 1 kB or less each


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD])
def test_states_take_no_more_memory_where_parameters_are_frozen_one_by_one(optimizer_class):
    weights = [nn.Parameter(torch.ones(16, 16)) for _ in range(12)]
    optimizer = MasterWeights(optimizer_class, weights)
    for number in (3, 7, 1, 10, 5):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        for _ in range(2):
            optimizer.step()
        weights[number].grad = None
        optimizer.step()
    must_be_as_large_as_its_values(optimizer)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(("optimizer_class", "options"), CASES)
def test_each_optimizer_gives_the_bits_of_steps_one_by_one(
    optimizer_class, options, store, dtype, alone, exact
):
    def trained():
        training = Training(optimizer_class, store=store, dtype=dtype, **options)
        for number in range(4):
            training.step(number)
        return exact(training.all())

    assert trained() == alone(trained)


def without_one_by_turns(training):
    for number in range(6):
        training.step(number, without=[number % 2])


def frozen_until_later(training):
    for number in range(5):
        training.step(number, without=[1] if number < 2 else [])


def loaded(training):
    training.step(0)
    saved = copy.deepcopy(training.optimizer.state_dict())
    for number in range(1, 3):
        training.step(number)
    training.optimizer.load_state_dict(saved)
    for number in range(3, 6):
        training.step(number)


def of_another_store(training):
    other = Training(store="float32" if training.store == "stochastic" else "stochastic")
    other.step(0)
    training.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))
    for number in range(1, 4):
        training.step(number)


def loaded_without_a_tensor(training):
    training.step(0)
    saved = copy.deepcopy(training.optimizer.state_dict())
    for key in ("exp_avg", "exp_avg_sq", "step"):
        del saved["state"][1][key]
    training.optimizer.load_state_dict(saved)
    for number in range(1, 4):
        training.step(number)


def moved(training):
    """As functions do that move an optimizer's state to another device and back."""
    for number in range(4):
        training.step(number)
        for state in training.optimizer.state.values():
            for value in state.values():
                value.data = value.data.clone()


def counted_otherwise(training):
    for number in range(4):
        training.step(number)
        training.optimizer.state[training.parameters[number % 4]]["step"] += 5


def one_set_back(training):
    training.step(0)
    first = training.parameters[0]
    kept = copy.deepcopy(training.optimizer.state[first]), first.detach().clone()
    training.step(1)
    training.optimizer.state[first] = kept[0]
    first.data.copy_(kept[1])
    for number in range(2, 5):
        training.step(number)


def in_inference_mode(training):
    for number in range(2):
        training.step(number)
    for state in training.optimizer.state.values():
        state.update((key, value.clone()) for key, value in state.items())
    with torch.inference_mode():
        training.optimizer.step()
    for number in range(2, 5):
        training.step(number)


def with_keys_of_other_code(training):
    training.step(0)
    for value in (5, None, [torch.ones(2)], np.arange(3.0), torch.eye(3).to_sparse()):
        for parameter in training.parameters:
            training.optimizer.state[parameter]["mine"] = value
        training.step(1)
    for parameter in training.parameters:
        del training.optimizer.state[parameter]["mine"]


def copied(training):
    for number in range(4):
        training.step(number)
        pickled = pickle.dumps((training.optimizer, training.parameters))
        training.optimizer, training.parameters = pickle.loads(pickled)


def of_another_rate(training):
    for number in range(4):
        training.step(number)
        training.optimizer.param_groups[1]["lr"] *= 0.5


def with_another_group(training):
    training.step(0)
    training.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4, 4))]})
    training.parameters = [p for g in training.optimizer.param_groups for p in g["params"]]
    for number in range(1, 4):
        training.step(number)


EVENTS = [
    without_one_by_turns,
    frozen_until_later,
    loaded,
    of_another_store,
    loaded_without_a_tensor,
    moved,
    counted_otherwise,
    one_set_back,
    in_inference_mode,
    with_keys_of_other_code,
    copied,
    of_another_rate,
    with_another_group,
]


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("event", EVENTS)
def test_so_it_does_whatever_happens_between_steps(event, store, alone, exact):
    def trained():
        training = Training(store=store)
        training.store = store
        event(training)
        return exact(training.all())

    assert trained() == alone(trained)


def test_parameters_whose_counts_of_steps_differ_are_stepped_one_by_one(stepped):
    training = Training()
    training.step(0, without=[1])
    del stepped[:]
    for number in range(1, 3):
        training.step(number)
    assert sorted(stepped[:3]) == [[3, 35], [48, 160, 96], [64]]


def test_a_sparse_gradient_is_added_as_it_is(exact, alone):
    def trained():
        weights = [nn.Parameter(torch.ones(16, 16)) for _ in range(3)]
        optimizer = MasterWeights(torch.optim.SGD, weights, lr=0.5)
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        weights[1].grad = weights[1].grad.to_sparse()
        optimizer.step()
        return exact([optimizer.state_dict(), weights])

    assert trained() == alone(trained)


@pytest.mark.parametrize("store", STORES)
def test_a_state_dict_that_other_code_reads_gets_no_keys_in_a_step(store):
    training, other = Training(store=store), Training(store=store)
    training.optimizer.load_state_dict(other.optimizer.state_dict())  # before its first step
    taken = training.optimizer.state_dict()["state"]
    keys = {number: list(state) for number, state in taken.items()}
    training.step(0)
    assert {number: list(state) for number, state in taken.items()} == keys


def test_entries_of_another_store_take_no_more_memory_than_their_values():
    training, other = Training(store="stochastic"), Training(store="float32")
    other.step(0)
    training.optimizer.load_state_dict(other.optimizer.state_dict())
    training.step(1, without=[1])
    must_be_as_large_as_its_values(training.optimizer)


def test_states_take_no_more_memory_than_their_values():
    training = Training(store="float32")
    for number in range(3):
        training.step(number)
    must_be_as_large_as_its_values(training.optimizer)


def must_be_as_large_as_its_values(optimizer):
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
    bytes_of_values = sum(each.numel() * each.element_size() for each in tensors)
    assert sum(map(torch.UntypedStorage.nbytes, storages.values())) == bytes_of_values
