"""The training scripts for trainers: each learns with our scaler, over overflows."""

import importlib.util
import re
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

# The packages warn of each other, of their own code, and of the CPU.
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("own_random_numbers_and_one_thread"),
]


@pytest.fixture
def script(accelerator):  # for what it resets
    def load(name):
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def skipped_and_scale(printed):
    skipped, scale = re.search(r"(\d+) steps skipped, scale (\d+)", printed).groups()
    return int(skipped), int(scale)


@pytest.mark.parametrize("name", ["lightning_digits", "accelerate_digits"])
def test_digits_are_learned_with_scaling_alone(name, script, made, monkeypatch, capsys):
    module = script(name)
    scaler = module.GradScaler
    monkeypatch.setattr(module, "GradScaler", lambda **given: scaler(init_scale=2.0**60, **given))
    assert module.main() > 0.8
    skipped, scale = skipped_and_scale(capsys.readouterr().out)
    assert skipped > 20
    assert scale < 2**60
    assert module.main(epochs=30, scaling=False) < 0.2  # chance is 0.1
    assert skipped_and_scale(capsys.readouterr().out) == (0, 1)
    assert [made_one.is_enabled() for made_one in made] == [True, False]


def test_a_language_model_learns_to_count(script, made, capsys):
    assert script("transformers_tiny").main(epochs=6, init_scale=2.0**40) < 2.5  # chance is 3.4
    skipped, scale = skipped_and_scale(capsys.readouterr().out)
    assert skipped > 10
    assert scale == 2.0 ** (40 - skipped)
    assert len(made) == 1
    assert len(made[0].history) == 6 * 25
