"""Thousands of backward passes before one step: a monitor's hooks and memory stay bounded."""

import gc
import math

import pytest

pytest.importorskip("torch")

import torch

from gradscaler.diagnose import Monitor
from gradscaler.torch import GradScaler

PASSES = 2_000
MOST = 100  # losses of one step that are looked at
# No step follows, and a step of so many passes is a finding of its own.
pytestmark = pytest.mark.filterwarnings("ignore::gradscaler.diagnose.FindingWarning")


def bytes_of_tensors():
    """The memory of all tensors that Python knows, each memory once."""
    kept = {}
    for each in gc.get_objects():
        if type(each) in (torch.Tensor, torch.nn.Parameter) and each.layout is torch.strided:
            storage = each.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
    return sum(kept.values())


def hooks_of(node):
    """The hooks of a node, those before it and those after it."""
    handles = [
        register(lambda *_: None) for register in (node.register_prehook, node.register_hook)
    ]
    found = sum(len(handle.hooks_dict_ref()) - 1 for handle in handles)
    for handle in handles:
        handle.remove()
    return found


@pytest.fixture(params=["loop", "scaler"])
def watched(request):
    """A layer, its optimizer, what scales a loss, and an open monitor."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 4)
    scaler = GradScaler() if request.param == "scaler" else None
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-6)
    with Monitor(scaler, layer) as monitor:
        yield layer, optimizer, scaler.scale if scaler else (lambda loss: loss), monitor


def test_passes_through_one_graph_add_no_hooks(watched):
    layer, _, scale, _ = watched
    loss = layer(torch.ones(2, 4)).sigmoid().sum()
    for _ in range(2 * MOST):
        scale(loss).backward(retain_graph=True)
    assert hooks_of(loss.grad_fn) == 0


def test_losses_without_a_pass_get_few_hooks(watched):
    layer, _, scale, _ = watched
    loss = layer(torch.ones(2, 4)).sigmoid().sum()
    for _ in range(2 * MOST):
        scale(loss)
    assert hooks_of(loss.grad_fn) <= MOST + 1


def test_losses_that_are_elements_of_large_tensors_keep_none_of_them(watched):
    layer, _, scale, _ = watched
    before = bytes_of_tensors()
    for _ in range(PASSES):
        outputs = layer(torch.ones(256, 4))
        scale(outputs[0, 0]).backward()
    del outputs
    assert bytes_of_tensors() - before < PASSES * 16


def test_the_loss_of_a_step_is_the_latest_or_the_first_that_is_not_finite():
    layer = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    scaler = GradScaler()
    with Monitor(scaler, layer) as monitor:
        for bad in ({}, {150: math.inf, 200: math.nan}):
            for number in range(300):
                scaler.scale(layer.weight.sum() * 0 + bad.get(number, number)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert [step.loss for step in monitor.history] == [299, math.inf]
