"""A policy that is nobody's moves the scale, and goes into state dicts, run files and replays."""

from dataclasses import dataclass

import numpy as np
import pytest

from gradscaler import DynamicScale
from gradscaler._formats import layouts
from gradscaler.diagnose import Monitor, read_run
from gradscaler.policies import OwnPolicy
from tests.support.eager import library
from tests.support.own_policy import PROVEN, SCALES, TRACE, Proven, ProvenState


@pytest.mark.usefixtures("place")
def test_it_moves_the_scale():
    assert library.train(library.scaler(policy=Proven()), TRACE) == SCALES


@pytest.mark.parametrize("stop", range(len(TRACE)))
def test_a_training_that_goes_on_from_a_state_dict_goes_on_as_if_it_had_not_stopped(stop):
    saved, loaded = library.scaler(policy=Proven()), library.scaler(policy=Proven())
    library.train(saved, TRACE[:stop])
    loaded.load_state_dict(saved.state_dict())
    assert library.train(loaded, TRACE[stop:]) == SCALES[stop:]
    state = loaded.observed.state
    assert (type(state), float(state.proven)) == (ProvenState, PROVEN[-1])
    assert int(state.nonfinite_steps) == TRACE.count("x")


@dataclass(frozen=True)
class ByTheRecipe(Proven):
    """One of the package by docs/contributing.md, with a field of the formats and one attribute."""

    hysteresis = 1
    growth_interval: int = 7


@pytest.mark.parametrize("kind", [Proven, ByTheRecipe])
def test_one_that_is_added_to_the_package_loads_its_own_state(kind, monkeypatch):
    monkeypatch.setattr(layouts, "OwnPolicy", OwnPolicy | kind)
    saved, loaded = library.scaler(policy=kind(limit=50.0)), library.scaler(policy=kind())
    library.train(saved, TRACE[:4])
    loaded.load_state_dict(saved.state_dict())
    assert library.train(loaded, TRACE[4:]) == library.train(saved, TRACE[4:])
    assert loaded.observed.policy == kind()
    assert float(loaded.observed.state.proven) == PROVEN[-1]


def test_one_that_is_added_to_the_package_loads_the_parameters_that_are_its_fields(monkeypatch):
    monkeypatch.setattr(layouts, "OwnPolicy", OwnPolicy | ByTheRecipe)
    loaded = library.scaler(policy=ByTheRecipe())
    loaded.load_state_dict(library.scaler(policy=ByTheRecipe(growth_interval=9)).state_dict())
    assert loaded.observed.policy == ByTheRecipe(growth_interval=9)


def test_a_default_scaler_goes_on_from_its_state_dict_by_the_framework_s_rule():
    saved, loaded = library.scaler(policy=Proven()), library.scaler()
    library.train(saved, "o")
    loaded.load_state_dict(saved.state_dict())
    assert library.scale_of(loaded) == SCALES[0]
    backs_off_at = loaded.observed.policy.hysteresis
    assert library.train(loaded, "x" * backs_off_at)[-1] == SCALES[0] / 2


def test_it_keeps_its_own_parameters_when_a_state_dict_of_the_framework_s_rule_is_loaded():
    scaler = library.scaler(policy=Proven())
    scaler.load_state_dict(library.scaler(init_scale=8.0).state_dict())
    assert scaler.observed.policy == Proven()
    assert library.train(scaler, TRACE) == SCALES


def test_a_run_file_names_it_and_its_parameters(tmp_path):
    scaler, path = library.scaler(policy=Proven()), tmp_path / "run.jsonl"
    # The trace's gradients are zero in float16, which the monitor says unless told not to.
    with Monitor(scaler, every=1, path=path, on_stuck="continue"):
        library.train(scaler, TRACE[:2])
    run = read_run(path)
    assert run.starts[0].policy == {"name": "Proven", "start": 8.0, "limit": 60.0}
    assert [sample.scale for sample in run.samples] == [8.0, SCALES[0]]


def test_one_that_is_fixed_keeps_the_scale():
    class Still(Proven):
        fixed = True

        def update(self, state, found_inf, where=None):
            return state

    scaler, loaded = library.scaler(policy=Still()), library.scaler(policy=DynamicScale())
    assert library.train(scaler, TRACE) == [8.0] * len(TRACE)
    loaded.load_state_dict(scaler.state_dict())
    assert library.train(loaded, TRACE) == [8.0] * len(TRACE)


def test_a_parameter_that_it_lacks_cannot_be_set():
    scaler = library.scaler(policy=Proven())
    with pytest.raises(TypeError, match=r"Proven\(.*\) has no growth_factor to set"):
        scaler.set_growth_factor(4.0)
    assert np.float32(library.scale_of(scaler)) == 8.0
