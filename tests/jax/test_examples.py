import importlib.util
import re
import sys
from pathlib import Path

import pytest

from gradscaler import DynamicScale
from gradscaler.jax import GradScaler, loss_scaled

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["jax_linen", "jax_nnx", "jax_equinox"])
def test_the_small_examples_learn_and_skip_what_overflows(name, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where a dataclass looks for itself
    spec.loader.exec_module(module)
    policy = DynamicScale(init_scale=2.0**30)
    if name == "jax_equinox":
        monkeypatch.setattr(module, "OPTIMIZER", loss_scaled(module.optax.adam(0.01), policy))
    else:
        monkeypatch.setattr(module, "GradScaler", lambda: GradScaler(policy))
    assert module.main(steps=60) < 0.3  # chance is 2.3
    printed = capsys.readouterr().out
    taken_or_skipped = int(re.search(r"(\d+) of 60 steps", printed)[1])
    assert 0 < taken_or_skipped < 60
    assert float(printed.split()[-1]) < 2.0**30
