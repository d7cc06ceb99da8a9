"""The numbers and the tables of the documents are those of the code."""

import importlib.util
import math
import re
from pathlib import Path

import pytest

from gradscaler import DynamicScale

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
POWER = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
PRESETS = re.findall(r"^\| `(\w+)` \| (.+) \|$", (DOCS / "rule.md").read_text(), re.MULTILINE)


def number(text):
    """A number, which may be written as a power of two."""
    base, power = re.fullmatch(r"([\d.]+?)([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]*)", text).groups()
    return float(base) ** int(power.translate(POWER) or 1)


@pytest.mark.parametrize(("preset", "row"), PRESETS)
def test_the_table_of_presets_is_that_of_the_code(preset, row):
    policy = getattr(DynamicScale, preset)()
    init, growth, backoff, interval, hysteresis, floor = row.split(" | ")
    count, _, reset = hysteresis.partition(" ")
    assert policy == DynamicScale(
        number(init),
        number(growth),
        number(backoff),
        int(interval),
        int(count),
        reset.strip("()") or "finite_step",
        number(floor),
    )


def test_every_preset_is_in_the_table():
    from gradscaler.policies._presets import Presets

    made = {name for name in vars(Presets) if isinstance(vars(Presets)[name], classmethod)}
    assert {name for name, _ in PRESETS} | {"tensorplay"} == made


@pytest.fixture
def pictures():
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("pictures", DOCS / "pictures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_numbers_beside_the_pictures_are_those_of_the_pictures(pictures):
    page = " ".join((DOCS / "loss_scaling.md").read_text().split())
    values = pictures.gradients()
    flushed, subnormal = pictures.shares(values, 1.0)
    assert f"flushes {flushed:.0%} of them to zero and holds {subnormal:.0%} with" in page
    flushed, subnormal = pictures.shares(values, pictures.SCALE)
    assert math.log2(pictures.SCALE) == 16
    assert f"flushes {flushed:.0%}, and {subnormal:.0%} lose bits" in page
    scales, _, skipped = pictures.training()
    assert f"{len(skipped)} of {len(scales)} steps are skipped" in page


def test_the_lowest_versions_are_those_that_the_extras_ask_for():
    page = (DOCS / "versions.md").read_text()
    extras = (ROOT / "pyproject.toml").read_text()
    for name, package in (
        ("NumPy", "numpy"),
        ("PyTorch", "torch"),
        ("TensorPlay", "tensorplay"),
        ("Paddle", "paddlepaddle"),
        ("JAX", "jax"),
        ("optax", "optax"),
        ("Keras 3", "keras"),
        ("Keras 2 (tf-keras)", "tf-keras"),
        ("MindSpore", "mindspore"),
    ):
        (lowest,) = re.findall(rf'"{package}>=([\d.]+)"', extras)
        assert f"| {name} | {lowest} |" in page, name
