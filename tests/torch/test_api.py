"""The surface of torch.amp.GradScaler where it is PyTorch's alone: defaults, and devices."""

import inspect
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from gradscaler.torch import GradScaler
from tests.support import programs


def test_parameters_have_torch_s_order_and_defaults_but_for_the_device():
    theirs = inspect.signature(torch.amp.GradScaler).parameters
    ours = list(inspect.signature(GradScaler).parameters.values())[: len(theirs)]
    defaults = {parameter.name: parameter.default for parameter in ours}
    assert list(defaults) == list(theirs)
    assert defaults == {**{p.name: p.default for p in theirs.values()}, "device": None}


def test_without_a_device_it_works_where_the_first_loss_is():
    scaler = GradScaler()
    scaler.scale(torch.ones((), device="meta"))
    assert scaler._scale.device.type == scaler._growth_tracker.device.type == "meta"


def test_tensors_of_several_devices_are_scaled_where_they_are():
    here, there = GradScaler(init_scale=8.0).scale([torch.ones(()), torch.ones((), device="meta")])
    assert here == 8.0
    assert there.device.type == "meta"


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_a_device_may_be_a_name_or_a_torch_device(device):
    scaler = GradScaler(device)
    scaled = scaler.scale(torch.ones(()))
    scaler.update(torch.tensor(8.0))
    assert scaled == 65536.0
    assert scaler.get_scale() == 8.0


def test_a_stand_in_for_a_device_is_taken_as_by_torch():
    assert GradScaler(device=Mock()).is_enabled()


@pytest.mark.parametrize("scale", [1024.0, 8, True, np.float32(8.0), torch.tensor(8.0)])
def test_a_scale_in_place_of_the_device_is_refused(scale):
    with pytest.raises(TypeError, match=r"device must be.*write init_scale="):
        GradScaler(scale)


def test_torch_s_class_replaced_by_hand_before_fsdp_is_an_error_that_names_install(tmp_path):
    code = (
        "import torch.amp.grad_scaler, gradscaler.torch as ours\n"
        "torch.amp.GradScaler = torch.amp.grad_scaler.GradScaler = ours.GradScaler\n"
        "ours.ShardedGradScaler"
    )
    result = programs.run("-c", code, cwd=tmp_path)
    assert "ImportError: torch.amp.GradScaler was replaced" in result.stderr
    assert "gradscaler.torch.install()" in result.stderr


def test_a_new_scale_on_another_device_is_refused(scaler):
    scaler.scale(torch.ones(()))
    with pytest.raises(ValueError, match="new_scale"):
        scaler.update(torch.tensor(8.0, device="meta"))
    assert scaler.get_scale() == 1024.0
