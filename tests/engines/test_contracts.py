"""The calls that the engines' code makes of a scaler, in the versions of requirements/engines.txt.

If a test fails with a newer version, compare the engine's change with gradscaler's class and with
docs/engines.md before you change the list.
"""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from gradscaler.torch import install
from tests.support.engines import MEGATRON_S_FP16, batches, megatron, megatron_parts, zero


def uses(package, name):
    """For each function that uses an attribute of ``name``: the attributes, in source order."""
    found = {}
    (folder,) = find_spec(package).submodule_search_locations
    for path in sorted(Path(folder).rglob("*.py")):
        text = path.read_text()
        if name not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                asked = [
                    each
                    for each in ast.walk(node)
                    if isinstance(each, ast.Attribute)
                    and name in (getattr(each.value, "attr", ""), getattr(each.value, "id", ""))
                ]
                asked.sort(key=lambda each: (each.lineno, each.col_offset))
                if asked:
                    where = f"{path.relative_to(folder).as_posix()}: {node.name}"
                    found[where] = [spelled(each) for each in asked]
    return found


def spelled(attribute):
    return attribute.attr + " =" * isinstance(attribute.ctx, ast.Store)


class Recorded:
    """A scaler, and the attributes that were read from it."""

    def __init__(self, scaler):
        vars(self).update(scaler=scaler, asked=[])

    def __getattr__(self, name):
        self.asked.append(name)
        return getattr(self.scaler, name)

    def __setattr__(self, name, value):
        self.asked.append(f"{name} =")
        setattr(self.scaler, name, value)


def test_deepspeed_asks_this_of_a_scaler():
    assert uses("deepspeed", "loss_scaler") == {
        "runtime/base_optimizer.py: scale_if_loss": ["scale_loss"],
        "runtime/zero/stage3.py: __init__": ["dynamic"],
        "runtime/zero/stage3.py: _get_loss_scale": ["cur_scale"],
        "runtime/zero/stage3.py: _set_loss_scale": ["cur_scale ="],
        "runtime/zero/stage3.py: _update_scale": ["update_scale"],
        "runtime/zero/stage_1_and_2.py: __init__": ["dynamic", "cur_scale"],
        "runtime/zero/stage_1_and_2.py: _get_loss_scale": ["cur_scale"],
        "runtime/zero/stage_1_and_2.py: _set_loss_scale": ["cur_scale ="],
        "runtime/zero/stage_1_and_2.py: _update_scale": ["update_scale"],
    }


def test_megatron_asks_this_of_a_scaler():
    assert uses("megatron.core", "grad_scaler") == {
        "optimizer/distrib_optimizer.py: load_state_dict": ["load_state_dict"],
        "optimizer/distrib_optimizer.py: state_dict": ["state_dict"],
        "optimizer/optimizer.py: _unscale_main_grads_and_check_for_nan": ["inv_scale"],
        "optimizer/optimizer.py: get_loss_scale": ["scale"],
        "optimizer/optimizer.py: load_state_dict": ["load_state_dict"],
        "optimizer/optimizer.py: prepare_grads": ["update"],
        "optimizer/optimizer.py: state_dict": ["state_dict"],
    }


def test_accelerate_asks_this_of_a_scaler():
    lazy = ["load_state_dict", "_lazy_init_scale_growth_tracker", "_device"]
    assert uses("accelerate", "scaler") == {
        "accelerator.py: backward": ["scale"],
        "accelerator.py: load_state": lazy,
        "accelerator.py: unscale_gradients": ["unscale_"],
        "checkpointing.py: load_accelerator_state": ["load_state_dict"],
        "checkpointing.py: save_accelerator_state": ["state_dict"],
        "optimizer.py: step": ["step", "update"],
    }


def deepspeed_step(stage):
    with install("deepspeed"):
        engine = zero(stage)
    recorded = engine.optimizer.loss_scaler = Recorded(engine.optimizer.loss_scaler)
    asked = []
    for batch in batches([False, True], 0):
        engine.backward(engine(batch.half()).float().pow(2).mean())
        engine.step()
        asked.append(recorded.asked.copy())
        recorded.asked.clear()
    return asked


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_of_deepspeed_asks_in_this_order(ranks, stage):
    ((finite, overflow),) = ranks(1).run(deepspeed_step, stage)
    assert overflow == ["scale_loss", "cur_scale", "update_scale"]
    assert finite[:4] == ["scale_loss", "cur_scale", "cur_scale", "update_scale"]
    assert set(finite[4:]) == {"cur_scale"}  # it unscales after the update


def megatron_step(sharded):
    with megatron(), install("megatron"):
        model, optimizer = megatron_parts(sharded, **MEGATRON_S_FP16)
        (inner,) = optimizer.chained_optimizers
        recorded = inner.grad_scaler = Recorded(inner.grad_scaler)
        asked = []
        for batch in batches([False, True], 0):
            optimizer.scale_loss(model(batch.half()).float().pow(2).mean()).backward()
            model.finish_grad_sync()
            optimizer.step()
            asked.append(recorded.asked.copy())
            recorded.asked.clear()
    return asked


@pytest.mark.parametrize("sharded", [False, True])
def test_a_step_of_megatron_asks_in_this_order(ranks, sharded):
    ((finite, overflow),) = ranks(1).run(megatron_step, sharded)
    assert finite == overflow == ["scale", "inv_scale", "update"]
