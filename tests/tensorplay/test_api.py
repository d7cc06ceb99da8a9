"""The methods of tensorplay.amp.GradScaler, as its reference documentation has them."""

import inspect

import pytest
import tensorplay as tp

from gradscaler.tensorplay import GradScaler

DOCUMENTED = {  # as the reference documentation has them
    "__init__": {
        "device": "cpu",
        "init_scale": 65536.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "enabled": True,
    },
    "get_backoff_factor": {},
    "get_growth_factor": {},
    "get_growth_interval": {},
    "get_scale": {},
    "is_enabled": {},
    "load_state_dict": {"state_dict": inspect.Parameter.empty},
    "scale": {"outputs": inspect.Parameter.empty},
    "set_backoff_factor": {"new_factor": inspect.Parameter.empty},
    "set_growth_factor": {"new_factor": inspect.Parameter.empty},
    "set_growth_interval": {"new_interval": inspect.Parameter.empty},
    "state_dict": {},
    "step": {"optimizer": inspect.Parameter.empty},  # and *args, **kwargs
    "unscale_": {"optimizer": inspect.Parameter.empty},
    "update": {"new_scale": None},
}


@pytest.mark.parametrize("method", DOCUMENTED)
def test_each_method_has_its_documented_arguments(method):
    parameters = inspect.signature(getattr(GradScaler, method)).parameters.values()
    positional = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    assert positional.pop("self") is inspect.Parameter.empty
    assert positional == DOCUMENTED[method]
    assert list(positional) == list(DOCUMENTED[method])


def test_what_is_not_documented_is_optional_and_keyword_only():
    for method, documented in DOCUMENTED.items():
        parameters = inspect.signature(getattr(GradScaler, method)).parameters.values()
        added = [p for p in parameters if p.name not in (*documented, "self", "args", "kwargs")]
        assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in added), method


def test_step_takes_any_further_arguments():
    parameters = inspect.signature(GradScaler.step).parameters
    assert parameters["args"].kind is inspect.Parameter.VAR_POSITIONAL
    assert parameters["kwargs"].kind is inspect.Parameter.VAR_KEYWORD


def test_every_method_of_tensorplay_s_own_class_is_documented_or_private():
    """So that no public method goes untested here."""
    public = [name for name in vars(tp.amp.GradScaler) if not name.startswith("_")]
    assert sorted(public) == sorted(name for name in DOCUMENTED if name != "__init__")
