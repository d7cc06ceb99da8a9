"""Hooks of the steps of all optimizers, and threads that step meanwhile."""

import threading

import pytest

pytest.importorskip("torch")

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradscaler.diagnose._graph.hooks import StepHooks


class Owner:
    """What the hooks go with."""


def test_no_hook_is_added_or_removed_while_another_thread_steps():
    is_stepping, may_end, errors, seen = threading.Event(), threading.Event(), [], []
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)

    def hold(*_):
        is_stepping.set()
        may_end.wait(20)

    def step():
        try:
            optimizer.step()
        except RuntimeError as error:  # "OrderedDict mutated during iteration"
            errors.append(error)

    owner, other = Owner(), Owner()
    hooks, added = StepHooks(owner), StepHooks(other)
    added.add(None, lambda *_: None)
    held = register_optimizer_step_post_hook(hold)
    thread = threading.Thread(target=step)
    thread.start()
    try:
        assert is_stepping.wait(20)
        hooks.add(None, lambda *_: seen.append(1))
        added.remove()
    finally:
        may_end.set()
        thread.join()
        held.remove()
        added.remove()
    assert errors == []
    optimizer.step()
    assert seen == []
    hooks.add(None, lambda *_: seen.append(1))
    optimizer.step()
    hooks.remove()
    assert seen == [1]


def test_hooks_of_an_owner_that_goes_within_a_step_are_removed_after_it():
    """Python's collector may free one there, as a monitor of an earlier training."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    owners, seen = [Owner()], []
    dropped, other = StepHooks(owners[0]), StepHooks(Owner())
    held = register_optimizer_step_post_hook(lambda *_: owners.clear())
    dropped.add(None, lambda *_: seen.append(1))
    optimizer.step()  # PyTorch would raise an error here
    held.remove()
    assert seen == [1]
    other.remove()  # as any that ends later
    optimizer.step()
    assert seen == [1]
