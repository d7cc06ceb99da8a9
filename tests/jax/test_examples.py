import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from gradscaler import DynamicScale
from gradscaler.jax import GradScaler, loss_scaled

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["jax_linen", "jax_nnx", "jax_equinox"])
@pytest.mark.some(1, "test_models.py has the models of these libraries")
def test_the_small_examples_learn_and_skip_what_overflows(name, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where a dataclass looks for itself
    spec.loader.exec_module(module)
    policy, made = DynamicScale(init_scale=2.0**30), Mock(wraps=GradScaler)
    if name == "jax_equinox":
        monkeypatch.setattr(module, "OPTIMIZER", loss_scaled(module.optax.adam(0.01), policy))
    else:
        monkeypatch.setattr(module, "GradScaler", lambda: made(policy))
    assert module.main(steps=60) < 0.3  # chance is 2.3
    assert made.call_count == (name != "jax_equinox")
    printed = capsys.readouterr().out
    taken_or_skipped = int(re.search(r"(\d+) of 60 steps", printed)[1])
    assert 0 < taken_or_skipped < 60
    assert float(printed.split()[-1]) < 2.0**30


SHARDED = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import jax_sharded
jax_sharded.POLICY = jax_sharded.DynamicScale(init_scale=2.0**30)
jax_sharded.main(steps=60)
"""


@pytest.mark.rare("test_sharded.py compares such devices with one")
def test_both_ways_to_shard_over_four_devices_learn_and_skip_alike():
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-W", "error", "-c", SHARDED]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert result.stderr == ""
    pattern = r"(by_\w+) on 4 devices: loss (.*), (\d+) of 60 steps skipped, scale (.*)"
    names, losses, skipped, scales = zip(*re.findall(pattern, result.stdout), strict=True)
    assert names == ("by_jit", "by_shard_map")
    assert max(map(float, losses)) < 0.3  # chance is 2.3
    assert 0 < int(skipped[0]) == int(skipped[1]) < 60
    assert float(scales[0]) == float(scales[1]) == 2.0 ** (30 - int(skipped[0]))
