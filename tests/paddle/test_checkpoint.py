"""State dicts of other frameworks, in Paddle."""

import paddle
import pytest

from gradscaler import DynamicScale, checkpoint
from gradscaler.checkpoint import _files
from gradscaler.paddle import GradScaler

TORCH = {
    "scale": 1024.0,
    "growth_factor": 4.0,
    "backoff_factor": 0.25,
    "growth_interval": 3,
    "_growth_tracker": 2,
}


def test_another_framework_s_state_dict_is_taken_as_it_is():
    scaler = GradScaler()
    scaler.load_state_dict(TORCH)
    assert checkpoint.read(scaler.state_dict()) == checkpoint.read(TORCH)
    assert scaler.is_use_dynamic_loss_scaling()


def test_a_fixed_scale_of_another_framework_s_does_not_move():
    scaler = GradScaler(policy=DynamicScale(init_scale=1024.0, min_scale=16.0))
    scaler.load_state_dict({"loss_scale": 8.0})
    scaler.load_state_dict(scaler.state_dict())
    assert not scaler.is_use_dynamic_loss_scaling()
    assert scaler._scale.item() == 8.0


def test_paddle_s_own_scaler_loads_what_was_converted(native):
    scaler = native()
    scaler.load_state_dict(checkpoint.convert(TORCH, "paddle"))
    assert checkpoint.read(scaler.state_dict()) == checkpoint.read(TORCH)


def test_files_go_both_ways(native, tmp_path):
    path = tmp_path / "scaler.pdparams"
    _files.save(path, checkpoint.convert(TORCH, "paddle"))
    scaler = native()
    scaler.load_state_dict(paddle.load(str(path)))
    assert checkpoint.read(scaler.state_dict()) == checkpoint.read(TORCH)
    paddle.save(scaler.state_dict(), str(path))
    assert checkpoint.read(_files.load(path).values) == checkpoint.read(TORCH)


def test_files_with_tensors_of_paddle_s_are_read(tmp_path):
    path = tmp_path / "scaler.pdparams"
    saved = checkpoint.convert(TORCH, "paddle")
    paddle.save({**saved, "scale": paddle.to_tensor(saved["scale"])}, str(path))
    assert checkpoint.read(_files.load(path).values) == checkpoint.read(TORCH)


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_the_scaler_is_found_in_paddle_s_checkpoint(native, protocol, tmp_path):
    model = paddle.nn.Linear(200, 200)
    optimizer = paddle.optimizer.Adam(parameters=model.parameters())
    model(paddle.ones([1, 200])).sum().backward()
    optimizer.step()
    scaler = native()
    scaler.load_state_dict(checkpoint.convert(TORCH, "paddle"))
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
    states = {name: part.state_dict() for name, part in parts.items()}
    half = paddle.ones([2], "bfloat16")
    path = tmp_path / "run.pdparams"
    paddle.save({**states, "epoch": 3, "half": half}, str(path), protocol=protocol)
    key, values, is_all = _files.load(path)
    assert (key, is_all) == ("scaler", False)
    assert checkpoint.read(values) == checkpoint.read(TORCH)
