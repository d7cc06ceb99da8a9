"""Files of Keras' own wrapper and of ours, each loaded by the other, with every inner optimizer."""

import itertools
import json
import os
import subprocess
import sys
import zipfile

import keras
import numpy as np
import pytest

import gradscaler.keras
from gradscaler import AmaxScale, DynamicScale, FixedScale
from gradscaler.keras import LossScaleOptimizer
from tests.support.keras_like import FINITE, NATIVE, Variable, numpy, stepper
from tests.support.own_policy import Proven

INPUTS = np.random.default_rng(0).random((8, 4)).astype("float32")
LABELS = INPUTS @ np.ones((4, 2), "float32")
OPTIMIZERS = [
    "SGD",
    "RMSprop",
    "Adam",
    "AdamW",
    "Adadelta",
    "Adagrad",
    "Adamax",
    "Adafactor",
    "Nadam",
    "Ftrl",
    "Lion",
    "Lamb",
    "Muon",
    "ScheduleFreeAdamW",
]
UNTRACKED = {"Adafactor": 2, "Nadam": 1}  # variables that Keras' own wrapper does not keep


def trained(wrapper, inner, epochs, **arguments):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="dense")])
    arguments = arguments or {"initial_scale": 64.0, "dynamic_growth_steps": 3}
    model.compile(wrapper(getattr(keras.optimizers, inner)(), **arguments), "mse")
    if epochs:
        model.fit(INPUTS, LABELS, batch_size=4, epochs=epochs, shuffle=False, verbose=0)
    return model


def kept(optimizer):
    """The state that both wrappers keep, to the bit; ours also tracks further variables."""
    untracked = getattr(optimizer, "_untracked_by_keras", ())
    kept = [v for v in optimizer.variables if not any(v is each for each in untracked)]
    return [(v.dtype, numpy(v).tobytes()) for v in kept]


def filled(wrapper, inner, seed, **arguments):
    """A model whose optimizer's variables have any values, as if after a training."""
    model = trained(wrapper, inner, 0, **arguments)
    model.optimizer.build(model.trainable_variables)
    random = np.random.default_rng(seed)
    for variable in model.optimizer.variables[2:]:
        variable.assign(random.integers(1, 100, variable.shape))
    return model


@pytest.mark.parametrize("inner", OPTIMIZERS)
@pytest.mark.parametrize("wrapper", [LossScaleOptimizer, NATIVE])
def test_saved_weights_go_from_one_wrapper_to_the_other(wrapper, inner, tmp_path, recwarn):
    other = NATIVE if wrapper is LossScaleOptimizer else LossScaleOptimizer
    saved, loaded = filled(wrapper, inner, 0), filled(other, inner, 1)
    ours = (saved if wrapper is LossScaleOptimizer else loaded).optimizer
    assert len(ours.variables) - len(kept(ours)) == UNTRACKED.get(inner, 0)
    assert kept(loaded.optimizer) != kept(saved.optimizer)
    saved.save_weights(tmp_path / "all.weights.h5")
    loaded.load_weights(tmp_path / "all.weights.h5")
    assert kept(loaded.optimizer) == kept(saved.optimizer)
    warned = [str(each.message) for each in recwarn.list if each.category is UserWarning]
    assert len(warned) == (inner in UNTRACKED)  # of the inner optimizer itself
    assert all(message.startswith("Skipping variable loading") for message in warned)


@pytest.mark.parametrize("inner", ["Adam", *UNTRACKED])
def test_a_file_of_ours_keeps_what_keras_does_not_track(inner, tmp_path):
    model = trained(LossScaleOptimizer, inner, 1)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for each in (model, loaded):
        each.fit(INPUTS, LABELS, batch_size=4, shuffle=False, verbose=0)
    found, expected = (
        [numpy(v).tolist() for v in (*each.variables, *each.optimizer.variables)]
        for each in (loaded, model)
    )
    assert found == expected


def test_nadam_trains_as_it_does_alone():
    """Within Keras' own wrapper on JAX it does not."""
    wrapped = trained(LossScaleOptimizer, "Nadam", 4)
    alone = trained(lambda inner, **_: inner, "Nadam", 4)
    assert np.allclose(wrapped.get_weights()[0], alone.get_weights()[0], rtol=1e-5)


@pytest.mark.parametrize("inner", ["SGD", "Nadam"])
def test_one_call_makes_a_model_of_keras_wrapper_ours(inner, tmp_path):
    saved = trained(NATIVE, inner, 2)
    saved.save(tmp_path / "model.keras")
    model = gradscaler.keras.load_model(tmp_path / "model.keras")
    assert type(model.optimizer) is LossScaleOptimizer
    assert kept(model.optimizer) == kept(saved.optimizer)
    assert model.optimizer.dynamic_growth_steps == 3
    assert all(map(np.array_equal, model.get_weights(), saved.get_weights()))
    model.fit(INPUTS, LABELS, batch_size=4, verbose=0)
    assert float(model.optimizer.loss_scale) == 256.0
    model.save(tmp_path / "again.keras")
    assert type(keras.models.load_model(tmp_path / "again.keras").optimizer) is LossScaleOptimizer


def test_one_function_may_take_the_place_of_keras_own(monkeypatch, tmp_path):
    trained(NATIVE, "SGD", 1).save(tmp_path / "model.keras")
    monkeypatch.setattr(keras.models, "load_model", gradscaler.keras.load_model)
    model = keras.models.load_model(tmp_path / "model.keras")
    assert type(model.optimizer) is LossScaleOptimizer


def test_other_models_are_loaded_as_keras_loads_them(tmp_path):
    for model in (
        trained(LossScaleOptimizer, "SGD", 1),
        trained(lambda inner, **_: inner, "SGD", 1),
    ):
        model.save(tmp_path / "model.keras")
        loaded = gradscaler.keras.load_model(tmp_path / "model.keras")
        assert type(loaded.optimizer) is type(model.optimizer)
        loaded = gradscaler.keras.load_model(tmp_path / "model.keras", compile=False)
        assert not loaded.compiled


def custom_loss(labels, outputs):
    return keras.ops.mean((labels - outputs) ** 2)


def test_custom_objects_are_passed_on(tmp_path):
    model = trained(NATIVE, "SGD", 1)
    model.compile(model.optimizer, custom_loss)
    model.save(tmp_path / "model.keras")
    objects = {"custom_loss": custom_loss}
    loaded = gradscaler.keras.load_model(tmp_path / "model.keras", objects)
    assert type(loaded.optimizer) is LossScaleOptimizer
    assert loaded.loss is custom_loss


LOAD = """
import sys, keras
try:
    print(keras.models.load_model(sys.argv[1]).optimizer)
except TypeError as error:
    print(error)
names = {"gradscaler>LossScaleOptimizer": keras.optimizers.LossScaleOptimizer}
optimizer = keras.models.load_model(sys.argv[1], custom_objects=names).optimizer
print("scale", float(optimizer.dynamic_scale), "of", type(optimizer).__module__)
assert "gradscaler" not in sys.modules
"""


@pytest.mark.one_backend  # a file is the same on each
def test_a_file_of_ours_names_what_to_import_and_loads_without_it(tmp_path):
    trained(LossScaleOptimizer, "Nadam", 2).save(tmp_path / "model.keras")
    command = [sys.executable, "-W", "ignore", "-c", LOAD, str(tmp_path / "model.keras")]
    found = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert "make sure they are all imported" in found.stdout, found.stderr
    assert "'module': 'gradscaler.keras.optimizer'" in found.stdout
    assert "scale 128.0 of keras.src" in found.stdout, found.stderr
    with zipfile.ZipFile(tmp_path / "model.keras") as file:
        config = json.loads(file.read("config.json"))["compile_config"]["optimizer"]
    assert config["module"] == "gradscaler.keras.optimizer"


@pytest.mark.parametrize("saved", [LossScaleOptimizer, NATIVE])
def test_the_scale_and_the_counter_survive_another_inner_optimizer(saved, tmp_path):
    trained(saved, "Adam", 2).save_weights(tmp_path / "all.weights.h5")
    model = trained(LossScaleOptimizer, "SGD", 1)
    with (
        pytest.warns(UserWarning, match="loaded the loss scale and its counter, and skipped"),
        pytest.warns(UserWarning, match="Skipping variable loading for optimizer 'sgd"),
    ):
        model.load_weights(tmp_path / "all.weights.h5")
    optimizer = model.optimizer
    assert (float(optimizer.loss_scale), int(optimizer.dynamic_counter)) == (128.0, 1)
    assert int(optimizer.iterations) == 2


def test_an_optimizer_without_a_scale_has_none_to_load():
    variables = [Variable(1.0), Variable(2.0)]
    adam, optimizer = keras.optimizers.Adam(), LossScaleOptimizer(keras.optimizers.SGD())
    for each in (adam, optimizer):
        each.build(variables)
    stored = {}
    adam.save_own_variables(stored)  # scalars, as a scale is one
    with pytest.warns(UserWarning, match="skipped all of them"):
        optimizer.load_own_variables({**stored, "6": np.ones(3)})
    assert float(optimizer.loss_scale) == 2.0**15


@pytest.mark.parametrize("hysteresis", [1, 2])
def test_a_count_of_the_hysteresis_is_saved_but_may_be_missing(variables, hysteresis):
    policies = [DynamicScale(1024.0, hysteresis=each) for each in (hysteresis, 2)]
    saved, loaded = (
        LossScaleOptimizer(keras.optimizers.Nadam(), policy=policy) for policy in policies
    )
    stepper(saved, variables)([keras.ops.convert_to_tensor(grad * np.inf) for grad in FINITE])
    stored = {}
    saved.save_own_variables(stored)
    loaded.build(variables)
    loaded.load_own_variables(stored)
    assert float(loaded.loss_scale) == (512.0 if hysteresis == 1 else 1024.0)
    assert int(loaded.nonfinite_counter) == (0 if hysteresis == 1 else 1)


POLICIES = {
    "dynamic": DynamicScale(64.0),
    "hysteresis": DynamicScale(64.0, hysteresis=2),
    "amax": AmaxScale(init_scale=64.0),
    "fixed": FixedScale(64.0),
    "nobody's": Proven(64.0),
}
COUNTERS = {"dynamic": 0, "hysteresis": 1, "amax": 3, "fixed": 0, "nobody's": 2}
HOW = {
    "store": lambda saved, loaded, path: stored_and_loaded(saved.optimizer, loaded.optimizer),
    ".weights.h5": lambda saved, loaded, path: (
        saved.save_weights(path),
        loaded.load_weights(path),
    ),
    ".keras": lambda saved, loaded, path: (saved.save(path), loaded.load_weights(path)),
}


def stored_and_loaded(saved, loaded):
    store = {}
    saved.save_own_variables(store)
    loaded.load_own_variables(store)


@pytest.mark.parametrize("inner", ["Adam", "Nadam"])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("names", list(itertools.permutations(POLICIES, 2)), ids="-".join)
def test_a_file_of_one_policy_is_loaded_under_another(names, how, inner, tmp_path):
    """All that both have is kept, to the bit, and what only the loaded one has becomes 0."""
    saved, loaded = (
        filled(LossScaleOptimizer, inner, seed, policy=POLICIES[name])
        for seed, name in enumerate(names)
    )
    HOW[how](saved, loaded, tmp_path / f"all{how}")
    kept_of = [each.optimizer._saved_variables() for each in (saved, loaded)]
    before, after = ([numpy(v).tolist() for v in variables] for variables in kept_of)
    num_saved, num_loaded = (COUNTERS[name] for name in names)
    assert after[:4] == before[:4]
    assert after[4 + num_loaded :] == before[4 + num_saved :]
    both = before[4 : 4 + min(num_saved, 1)]  # the count of non-finite steps
    assert after[4 : 4 + num_loaded] == [*both, 0, 0, 0][:num_loaded]


@pytest.mark.parametrize("saved", POLICIES)
@pytest.mark.parametrize("loaded", POLICIES)
def test_a_file_of_all_of_nadam_s_variables_is_not_that_of_another_policy(saved, loaded):
    """It has one scalar more, as has the file of a hysteresis."""
    optimizers = [
        filled(LossScaleOptimizer, "Nadam", seed, policy=POLICIES[name]).optimizer
        for seed, name in enumerate((saved, loaded))
    ]
    first, second = optimizers
    everything = {str(index): numpy(v) for index, v in enumerate(first.variables)}
    second.load_own_variables(everything)
    found, expected = (
        [numpy(v).tolist() for v in each.inner_optimizer.variables] for each in optimizers
    )
    assert found == expected


@pytest.mark.parametrize("policy", [None, AmaxScale(init_scale=64.0)])
def test_an_optimizer_that_compile_makes_keeps_its_scale(policy, tmp_path):
    """`compile` tracks no attributes meanwhile, so each variable has to be tracked by hand."""
    arguments = {"policy": policy} if policy else {"initial_scale": 64.0, "dynamic_growth_steps": 3}
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(), **arguments)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="dense")])
    model.compile(keras.optimizers.serialize(optimizer), "mse")
    model.fit(INPUTS, LABELS, batch_size=2, verbose=0)
    made = model.optimizer
    assert type(made) is LossScaleOptimizer
    optimizer.build(model.trainable_variables)
    assert [v.name for v in made.variables] == [v.name for v in optimizer.variables]
    assert int(made.iterations) == 4
    before = kept(made)
    if not policy:
        assert float(made.loss_scale) == 128.0
    model.save(tmp_path / "model.keras")
    assert kept(keras.saving.load_model(tmp_path / "model.keras").optimizer) == before
    model.save_weights(tmp_path / "model.weights.h5")
    model.optimizer.dynamic_scale.assign(1.0)
    model.load_weights(tmp_path / "model.weights.h5")
    assert kept(model.optimizer) == before
