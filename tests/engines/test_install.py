"""install() by the name of an engine: whose scalers its classes make."""

import copy
import inspect
import pickle

import pytest
import torch

from gradscaler.torch import deepspeed as ours_for_deepspeed
from gradscaler.torch import install, uninstall

RULE = {
    "init_scale": 8.0,
    "scale_window": 2,
    "min_scale": 1.0,
    "delayed_shift": 1,
    "consecutive_hysteresis": False,
}


def is_ours(scaler):
    return isinstance(scaler, ours_for_deepspeed.LossScalerBase)


def test_a_class_that_was_imported_before_makes_ours_until_uninstall(ranks):
    ranks(1).run(import_before)


def import_before():
    from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler, DynamicLossScaler

    install("deepspeed")
    try:
        for made in (DynamicLossScaler(**RULE), CreateLossScaler(torch.half, 0, True, RULE)):
            assert is_ours(made)
            assert isinstance(made, DynamicLossScaler)
            assert made.loss_scale == 8.0
        assert is_ours(CreateLossScaler(torch.half, 128.0, False, None))
        with install("deepspeed"):
            pass
        assert is_ours(DynamicLossScaler(**RULE))
    finally:
        uninstall("deepspeed")
    assert type(DynamicLossScaler(**RULE)) is DynamicLossScaler
    uninstall("deepspeed")
    assert type(DynamicLossScaler(**RULE)) is DynamicLossScaler


def test_an_engine_s_name_leaves_torch_s_class_and_torch_s_the_engine_s(ranks):
    ranks(1).run(one_at_a_time)


def one_at_a_time():
    from deepspeed.runtime.fp16.loss_scaler import LossScaler

    with install("deepspeed"):
        assert type(torch.amp.GradScaler("cpu")) is torch.amp.GradScaler
    with install():
        assert type(LossScaler(1.0)) is LossScaler


def test_subclasses_and_scalers_made_before_stay_deepspeed_s(ranks):
    ranks(1).run(stay_theirs)


def stay_theirs():
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    class Own(DynamicLossScaler):
        pass

    before = DynamicLossScaler(**RULE)
    with install("deepspeed"):
        assert type(Own(**RULE)) is Own
        assert not is_ours(before)
        for _ in range(3):
            before.update_scale(False)
    assert before.loss_scale == 16.0


def test_signatures_stay_the_engines(ranks):
    ranks(1).run(compare_signatures)


def compare_signatures():
    from deepspeed.runtime.fp16 import loss_scaler
    from megatron.core.optimizer import grad_scaler

    classes = (
        loss_scaler.LossScaler,
        loss_scaler.DynamicLossScaler,
        grad_scaler.ConstantGradScaler,
        grad_scaler.DynamicGradScaler,
    )
    before = [inspect.signature(each) for each in classes]
    with install("deepspeed"), install("megatron"):
        assert [inspect.signature(each) for each in classes] == before


def test_a_pickle_of_ours_is_read_without_gradscaler_and_as_ours_with_it(ranks):
    ranks(1).run(pickles)


def pickles():
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    with install("deepspeed"):
        made = DynamicLossScaler(**RULE)
        made.update_scale(True)
        pickled = pickle.dumps(made)
        again = [pickle.loads(pickled), copy.deepcopy(made)]
    theirs = pickle.loads(pickled)
    assert b"gradscaler" not in pickled
    assert type(theirs) is DynamicLossScaler
    for each in again:
        assert type(each) is type(made)
        assert vars(each) == vars(made) == vars(theirs)


def test_a_version_whose_class_has_a_new_of_its_own_is_left_as_it_is(ranks):
    ranks(1).run(with_a_new)


def with_a_new():
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    def theirs(cls, *args, **kwargs):
        return object.__new__(cls)

    with pytest.MonkeyPatch.context() as patch:
        with install("deepspeed"):  # leaves a __new__, which monkeypatch can put back
            pass
        patch.setattr(DynamicLossScaler, "__new__", theirs)
        with pytest.raises(RuntimeError, match=r"DynamicLossScaler of .* already has one"):
            install("deepspeed")
        assert DynamicLossScaler.__new__ is theirs
