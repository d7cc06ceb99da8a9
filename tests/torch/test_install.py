"""install(): what torch.amp.GradScaler(...) makes, wherever and whenever it was imported."""

import contextlib
import copy
import importlib
import inspect
import itertools
import pickle
import sys

import pytest
import torch
from torch.amp import GradScaler as ImportedBefore

from gradscaler import CallOrderError
from gradscaler.torch import GradScaler, _install, install, scaler, uninstall
from tests.support import programs

DEPRECATED = {"cuda": torch.cuda.amp.GradScaler, "cpu": torch.cpu.amp.GradScaler}


@pytest.fixture(autouse=True)
def _nothing_stays_installed():
    yield
    assert is_torch_s(torch.amp.GradScaler("cpu"))


def is_torch_s(scaler):
    return type(scaler) is torch.amp.GradScaler


def train(scaler, gradients=(1.0, float("inf"), 1.0)):
    """The weights, scales and outcomes of a few steps of a package's loop."""
    parameter = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    rows = []
    for gradient in gradients:
        optimizer.zero_grad()
        scaler.scale(parameter * gradient).backward()
        scaler.step(optimizer)
        scaler.update()
        rows.append((parameter.item(), scaler.get_scale()))
    return rows


def test_a_class_that_was_imported_before_makes_ours():
    with install():
        assert type(ImportedBefore("cpu")) is GradScaler


def test_a_module_that_is_imported_afterwards_makes_ours(tmp_path, monkeypatch):
    code = "from torch.amp import GradScaler\ndef make(cls=GradScaler): return cls('cpu')\n"
    (tmp_path / "package_of_theirs.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with install():
        package = importlib.import_module("package_of_theirs")
        monkeypatch.delitem(sys.modules, "package_of_theirs")
        assert type(package.make()) is GradScaler
    assert is_torch_s(package.make())


def test_what_it_makes_trains_as_torch_s_does_and_reports_its_steps():
    with install():
        ours = torch.amp.GradScaler("cpu", 1024.0, growth_interval=2)
    theirs = torch.amp.GradScaler("cpu", 1024.0, growth_interval=2)
    assert train(ours) == train(theirs) == [(-1.0, 1024.0), (-1.0, 512.0), (-2.0, 512.0)]
    assert [outcome.applied for outcome in ours.history] == [True, False, True]


@pytest.mark.parametrize("device", DEPRECATED)
def test_the_old_classes_make_ours_and_take_the_scale_first(device, monkeypatch):
    monkeypatch.setattr(scaler, "_cuda_may_be_available", lambda: True)
    old = DEPRECATED[device]
    with install(), pytest.warns(FutureWarning, match=f"{device}.amp.GradScaler.*deprecated"):
        made = old(1024.0)
    assert isinstance(made, GradScaler)
    assert isinstance(made, old)
    assert made._device == device
    assert made.get_scale() == 1024.0
    assert train(made)[-1] == (-2.0, 512.0)
    assert pickle.loads(pickle.dumps(made)).get_scale() == 512.0


@pytest.mark.parametrize("old", DEPRECATED.values(), ids=DEPRECATED)
def test_the_old_classes_warn_as_torch_s_do(old):
    def warning_of_one():
        with pytest.warns(FutureWarning) as caught:
            old(enabled=False)
        (one,) = caught
        return str(one.message), one.category, one.filename, one.lineno

    theirs = warning_of_one()
    with install():
        assert warning_of_one() == theirs


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without CUDA")
def test_a_scaler_for_cuda_is_disabled_without_it_as_torch_s_is():
    with install(), pytest.warns(UserWarning, match="CUDA is not available"):
        assert not torch.amp.GradScaler("cuda").is_enabled()


def test_its_signature_stays_torch_s():
    before = inspect.signature(torch.amp.GradScaler)
    with install():
        assert inspect.signature(torch.amp.GradScaler) == before


def test_torch_s_own_comes_back_also_after_an_error():
    with pytest.raises(KeyError), install():
        raise KeyError
    assert is_torch_s(torch.amp.GradScaler("cpu"))


def test_without_a_with_statement_it_holds_until_uninstall():
    install()
    try:
        assert type(torch.amp.GradScaler("cpu")) is GradScaler
        with install():
            pass
        assert type(torch.amp.GradScaler("cpu")) is GradScaler
    finally:
        uninstall()
    assert is_torch_s(torch.amp.GradScaler("cpu"))
    uninstall()
    assert is_torch_s(torch.amp.GradScaler("cpu"))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_it_holds_until_the_last_context_is_closed_in_any_order(order):
    contexts = [install() for _ in order]
    for closed, i in enumerate(order, start=1):
        contexts[i].__exit__(None, None, None)
        assert is_torch_s(torch.amp.GradScaler("cpu")) is (closed == 3)


def test_after_uninstall_an_open_context_neither_installs_nor_ends_a_later_one():
    earlier = install()
    uninstall()
    assert is_torch_s(torch.amp.GradScaler("cpu"))
    with install():
        earlier.__exit__(None, None, None)
        assert type(torch.amp.GradScaler("cpu")) is GradScaler


def test_ours_is_not_made_twice():
    with install():
        direct = GradScaler(init_scale=8.0)
    assert type(direct) is GradScaler
    assert direct.get_scale() == 8.0


def test_subclasses_stay_torch_s():
    class Own(torch.amp.GradScaler):
        def _unscale_grads_(self, *args):
            self.was_called = True
            return super()._unscale_grads_(*args)

    with install():
        own = Own("cpu", init_scale=1024.0)
        assert train(own)[-1] == (-2.0, 512.0)
    assert type(own) is Own
    assert own.was_called
    assert "_growth_factor" in vars(own)  # torch's constructor alone sets it


def test_scalers_that_torch_made_before_stay_torch_s():
    theirs = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with install():
        assert is_torch_s(theirs)
        assert isinstance(theirs, torch.amp.GradScaler)
        assert train(theirs)[-1] == (-2.0, 512.0)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("again", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_copy_of_torch_s_scaler_is_ours_and_goes_on_where_it_is(again, enabled):
    theirs = torch.amp.GradScaler("cpu", 1024.0, 4.0, 0.25, growth_interval=3, enabled=enabled)
    train(theirs, [1.0, 1.0])
    with install():
        ours = again(theirs)
    assert type(ours) is GradScaler
    assert ours.state_dict() == theirs.state_dict()
    assert train(ours, [1.0, float("inf")]) == train(theirs, [1.0, float("inf")])


def test_copies_of_ours_are_ours_wherever_they_are_made():
    ours = GradScaler("cpu", init_scale=1024.0)
    with install():
        copied = copy.deepcopy(ours)
    assert copied.state_dict() == ours.state_dict()
    assert train(copy.deepcopy(copied))[-1] == (-2.0, 512.0)


def test_a_parameter_that_is_out_of_range_raises_ours_by_name():
    with install(), pytest.raises(ValueError, match=r"growth_factor must be > 1\.0"):
        torch.amp.GradScaler("cpu", growth_factor=0.5)


@pytest.mark.parametrize("cls", [torch.amp.GradScaler, *DEPRECATED.values()])
def test_a_class_with_a_new_of_its_own_is_left_as_it_is(cls, monkeypatch):
    with install():  # leaves a __new__, which monkeypatch can put back
        pass

    def theirs(cls, *args, **kwargs):
        return object.__new__(cls)

    monkeypatch.setattr(cls, "__new__", theirs)
    with pytest.raises(RuntimeError, match=r"amp\.grad_scaler\.GradScaler of .* already has one"):
        install()
    assert cls.__new__ is theirs
    uninstall()
    assert cls.__new__ is theirs
    assert is_torch_s(torch.amp.GradScaler("cpu"))


def test_a_release_without_the_old_classes_will_do(tmp_path):
    code = """
import torch
del torch.cuda.amp.GradScaler, torch.cpu.amp.GradScaler
from gradscaler.torch import GradScaler, install
with install():
    assert type(torch.amp.GradScaler("cpu")) is GradScaler
assert type(torch.amp.GradScaler("cpu")) is torch.amp.GradScaler
"""
    result = programs.run("-c", code, cwd=tmp_path)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("engine", ["apex", None, ["deepspeed", "megatron"]])
@pytest.mark.parametrize("call", [install, uninstall])
def test_another_name_raises_and_names_the_three(call, engine):
    with pytest.raises(ValueError, match="'torch', 'deepspeed' or 'megatron', got ") as caught:
        call(engine)
    assert str(caught.value).endswith(f"got {engine!r}")


@pytest.mark.parametrize(
    ("engine", "package"), [("deepspeed", "deepspeed"), ("megatron", "megatron.core")]
)
@pytest.mark.parametrize("call", [install, uninstall])
def test_a_missing_engine_raises_and_names_its_package(call, engine, package, monkeypatch):
    monkeypatch.setitem(sys.modules, engine, None)
    message = rf"install\('{engine}'\) needs {package}, and {engine}[\w.]* is not installed"
    with pytest.raises(ModuleNotFoundError, match=message):
        call(engine)


@pytest.mark.parametrize("is_watched", [False, True], ids=["installed", "under gradscaler run"])
def test_under_gradscaler_run_a_scaled_loss_after_unscale_is_applied_as_by_torch_s(
    is_watched, monkeypatch
):
    """A watched script must end as it does without."""
    monkeypatch.setattr(_install._OF_TORCH, "raises_as_theirs", is_watched)
    weights = []
    for context in (contextlib.nullcontext, install):
        with context():
            scaler = torch.amp.GradScaler("cpu")
        parameter = torch.nn.Parameter(torch.zeros(()))
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        scaler.scale(parameter * 1.0).backward()
        scaler.unscale_(optimizer)
        scaler.scale(parameter * 1.0).backward()
        refused = isinstance(scaler, GradScaler) and not is_watched
        with pytest.raises(CallOrderError) if refused else contextlib.nullcontext():
            scaler.step(optimizer)
        weights.append(parameter.item())
    assert weights == [-(1 + 2.0**16), -(1 + 2.0**16) if is_watched else 0]
