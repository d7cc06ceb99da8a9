"""Ctrl-C at any line of a call loses no float32 value, and a state dict has all of them then."""

import copy
import itertools
from functools import cache

import pytest
import torch
from torch import nn

from gradscaler.torch import MasterWeights
from tests.support.interrupts import interrupting, moments, watching

PLACES = ("/gradscaler/torch/weights.py", "/gradscaler/torch/_weights/")
LR = 2.0**-9
KEYS = {"float32": "master", "remainder16": "remainder", "stochastic": "rounding"}
STORES = tuple(KEYS)
# How a step takes the parameters of 16 bits, and the number of steps before.
KINDS = {"whole": 0, "in spans": 2, "joining": 0, "joined": 2}


class Training:
    """A parameter of 16 bits, or two that are joined, and one that stays float32."""

    def __init__(self, store, optimizer_class=torch.optim.SGD, kind="whole", **options):
        torch.default_generator.manual_seed(0)  # torch.manual_seed takes 2 ms
        self.store = store
        linears = [(4, 4), (4, 4)] if kind.startswith("join") else [(3, 4)]
        layers = [nn.Linear(*sizes, bias=False) for sizes in linears]
        self.model = nn.Sequential(nn.LayerNorm(4, bias=False), *layers)
        options = {"keep_fp32": ["0"], "lr": LR, **options}
        if optimizer_class.__module__.startswith("torch.optim"):  # others see all parameters
            options["chunk_elements"] = 10 if kind == "in spans" else 32
        self.optimizer = MasterWeights(optimizer_class, self.model, store=store, **options)
        self.more = [nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(2, 2))]
        for _ in range(KINDS[kind]):
            self.begin()
            self.step()

    def begin(self):
        """Each gradient is 1 where it is unscaled."""
        for parameter in self.parameters():
            parameter.grad = torch.full_like(parameter, 4.0)

    def parameters(self):
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def step(self):
        self.optimizer.grad_scale, self.optimizer.found_inf = torch.tensor(4.0), torch.zeros(())
        self.optimizer.step()

    def state_dict(self):
        self.optimizer.state_dict()

    def load_state_dict(self):
        self.optimizer.load_state_dict(self.saved)

    def add_param_group(self):
        self.optimizer.add_param_group({"params": self.more, "lr": 0.5 * LR})

    def wide(self):
        return [self.optimizer.wide(parameter) for parameter in self.parameters()]

    def must_have_every_entry(self):
        state = self.optimizer.state_dict()["state"]
        for i, parameter in enumerate(self.parameters()):
            if parameter.dtype is torch.float16:
                assert set(state[i]) & set(KEYS.values()) == {KEYS[self.store]}

    def must_go_on(self):
        """The next step is right, and the optimizer can be copied."""
        before = self.wide()
        tensors = (t for state in self.optimizer.state.values() for t in state.values())
        assert all(tensor.grad is None for tensor in tensors)
        copy.deepcopy(self.optimizer)
        self.begin()
        self.step()
        for old, new in zip(before, self.wide(), strict=True):
            assert ((old - new - LR).abs() <= 2.0**-20).all()


@cache
def is_traced(code):
    is_step = "/torch/optim/" in code.co_filename and code.co_name == "step"
    is_ours = any(place in code.co_filename for place in PLACES)
    return (is_step or is_ours) and code.co_name != "<genexpr>"


def interrupted(make, call):
    """Trainings, each interrupted at another moment of a call."""

    def begun():
        each = make()
        each.begin()
        return each

    seen = []
    each = begun()
    with watching(seen.append, is_traced):
        getattr(each, call)()
    assert len(seen) > 20
    for moment in moments(seen):
        each = begun()
        with pytest.raises(KeyboardInterrupt), interrupting(moment, is_traced):
            getattr(each, call)()
        torch.set_grad_enabled(True)  # a decorator may leave it off
        yield each


def are_equal(ours, others):
    return all(itertools.starmap(torch.equal, zip(ours, others, strict=True)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("store", STORES[:2])
def test_an_interrupted_step_leaves_each_value_as_it_was_or_stepped(store, kind):
    def make():
        return Training(store, kind=kind)

    before = make().wide()
    seen = set()
    for each in interrupted(make, "step"):
        each.must_have_every_entry()
        for old, new in zip(before, each.wide(), strict=True):
            assert torch.equal(new, old) or torch.equal(new, old - LR)
            seen.add(torch.equal(new, old))
        each.must_go_on()
    assert seen == {True, False}


class Assigning(torch.optim.Optimizer):
    """Gives parameters other memory."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data - group["lr"] * p.grad


@pytest.mark.parametrize("store", STORES[:2])
def test_an_interrupted_step_of_an_optimizer_of_others_leaves_old_or_stepped_values(store):
    def make():
        return Training(store, Assigning)

    before = make().wide()
    for each in interrupted(make, "step"):
        each.must_have_every_entry()
        for old, new in zip(before, each.wide(), strict=True):
            assert torch.equal(new, old) or torch.equal(new, old - LR)
        each.must_go_on()


@pytest.mark.parametrize(
    ("kind", "fused"), [("whole", True), ("in spans", False), ("joining", True), ("joined", False)]
)
@pytest.mark.parametrize("store", STORES)
def test_an_interrupted_step_loses_neither_entries_nor_moments(store, kind, fused):
    def make():
        return Training(store, torch.optim.Adam, kind, fused=fused)

    before, error = make().wide(), 2.0**-10 if store == "stochastic" else 0
    for each in interrupted(make, "step"):
        each.must_have_every_entry()
        wide = each.wide()
        for parameter, old, new in zip(each.parameters(), before, wide, strict=True):
            assert "exp_avg" in each.optimizer.state.get(parameter, {}) or torch.equal(old, new)
        each.begin()
        each.step()
        for old, new in zip(before, each.wide(), strict=True):
            assert (new < old + error).all()


@pytest.mark.parametrize(("saved_by", "store"), [STORES[:2], STORES[1::-1]])
def test_a_step_interrupted_while_it_converts_another_store_s_entries_loses_none(saved_by, store):
    saved = Training(saved_by, kind="in spans")

    def make():
        each = Training(store)
        each.model.load_state_dict(saved.model.state_dict())
        each.optimizer.load_state_dict(saved.optimizer.state_dict())
        return each

    before = saved.wide()
    for each in interrupted(make, "step"):
        for old, new in zip(before, each.wide(), strict=True):
            assert torch.equal(new, old) or torch.equal(new, old - LR)
        each.must_go_on()
        each.must_have_every_entry()


@pytest.mark.parametrize("store", STORES[:2])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_optimizer_that_raises_after_its_step_leaves_values_and_gradients_apart(store, error):
    class Raising(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            if raises:
                raise error

    raises = False
    each = Training(store, Raising)
    raises = True
    before = each.wide()
    each.begin()
    with pytest.raises(error):
        each.step()
    raises = False
    each.must_have_every_entry()
    for old, new in zip(before, each.wide(), strict=True):
        assert torch.equal(new, old) or torch.equal(new, old - LR)
    each.must_go_on()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("store", STORES[:2])
def test_a_state_dict_taken_at_any_line_of_a_step_has_every_entry(store, kind):
    each = Training(store, torch.optim.Adam, kind)
    each.begin()
    loaded = Training(store, torch.optim.Adam, kind)
    counts = itertools.count()

    def look(_):
        next(counts)
        each.must_have_every_entry()
        taken = each.optimizer.state_dict()
        loaded.model.load_state_dict(each.model.state_dict())
        loaded.optimizer.load_state_dict(taken)
        for value, own, first in zip(loaded.wide(), each.wide(), before, strict=True):
            assert torch.equal(value, own)
            assert (value - first).abs().max() <= 2 * LR

    before = each.wide()
    with watching(look, is_traced):
        each.step()
    assert next(counts) > 100


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("store", STORES)
def test_a_handler_in_the_wrapped_optimizer_s_step_gets_every_entry(store, steps):
    class Asking(torch.optim.AdamW):
        def step(self, closure=None):
            each.must_have_every_entry()
            super().step(closure)
            each.must_have_every_entry()
            asked.append(True)

    asked = []
    each = Training(store, Asking)
    for _ in range(steps + 1):
        each.begin()
        each.step()
    assert len(asked) == steps + 1


def loading(store, kind):
    each, other = (Training(store, torch.optim.Adam, kind) for _ in range(2))
    for _ in range(3):
        other.begin()
        other.step()
    each.saved = copy.deepcopy(other.optimizer.state_dict())
    each.saved["param_groups"][0]["lr"] = 0.125
    return each


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("store", STORES)
def test_an_interrupted_load_state_dict_changes_all_or_nothing(store, kind, exact):
    def all_of(each):
        each.must_have_every_entry()
        return exact([each.optimizer.state_dict(), each.wide()])

    old, new = loading(store, kind), loading(store, kind)
    new.load_state_dict()
    allowed = {"old": all_of(old), "new": all_of(new)}
    seen = set()
    for each in interrupted(lambda: loading(store, kind), "load_state_dict"):
        found = all_of(each)
        seen |= {name for name, state in allowed.items() if state == found}
        assert found in allowed.values()
        each.load_state_dict()
        assert all_of(each) == allowed["new"]
    assert seen == {"old", "new"}


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("store", STORES[:2])
def test_an_interrupted_add_param_group_adds_a_cast_group_or_nothing(store, optimizer_class):
    start = Training(store).more
    seen = set()

    def make():
        return Training(store, optimizer_class)

    for each in interrupted(make, "add_param_group"):
        count = len(each.optimizer.param_groups)
        seen.add(count)
        expected = torch.float32 if count == 1 else torch.float16
        assert [parameter.dtype for parameter in each.more] == [expected] * 2
        each.must_have_every_entry()
        if count == 1:
            assert are_equal(each.more, start)
            assert not set(each.more) & each.optimizer.state.keys()
            each.add_param_group()
        assert are_equal(map(each.optimizer.wide, each.more), start)
        each.must_have_every_entry()
        for parameter in each.more:
            assert KEYS[store] not in each.optimizer.state.get(parameter, {})
        each.begin()
        each.step()
        rate = 0.5 * LR
        for parameter, first in zip(each.more, start, strict=True):
            assert ((first - each.optimizer.wide(parameter) - rate).abs() < 2.0**-20).all()
    assert seen == {1, 2}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("store", STORES)
def test_an_interrupted_state_dict_changes_nothing(store, kind, exact):
    def make():
        return Training(store, torch.optim.Adam, kind)

    before = exact([make().optimizer.state_dict(), make().wide()])
    for each in interrupted(make, "state_dict"):
        assert exact([each.optimizer.state_dict(), each.wide()]) == before
        assert type(each.optimizer.state).__name__ == "defaultdict"


def test_a_state_dict_lacks_what_is_just_being_added_and_nothing_else():
    each = Training("remainder16", torch.optim.Adagrad)

    def look(_):
        state = each.optimizer.state_dict()
        numbers = [i for group in state["param_groups"] for i in group["params"]]
        assert sorted(state["state"]) == numbers
        each.must_have_every_entry()

    with watching(look, is_traced):
        each.add_param_group()


def test_a_group_that_is_refused_leaves_the_parameters_and_the_state_as_they_were(exact):
    each = Training("float32", torch.optim.Adagrad)
    before = exact([each.optimizer.state_dict(), each.wide()])
    for params in (
        [*each.more, each.model[0].weight],
        [each.more[0], torch.ones(2, requires_grad=True) * 2],
        [("name", each.more[0])],
    ):
        with pytest.raises(ValueError, match=r"param|leaf"):
            each.optimizer.add_param_group({"params": params})
        assert {parameter.dtype for parameter in each.more} == {torch.float32}
        assert exact([each.optimizer.state_dict(), each.wide()]) == before
