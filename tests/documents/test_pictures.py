"""The pictures of docs/ are those that the code draws today; ``make pictures`` draws them."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

if os.environ.get("GRADSCALER_FRAMEWORK", "torch") != "torch":
    pytest.skip("PyTorch's tests draw the pictures", allow_module_level=True)
pytest.importorskip("matplotlib", reason="the pictures are drawn with it")

from PIL import Image

from gradscaler.__main__ import main
from tests.support.pictures import words_of

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

pytestmark = pytest.mark.usefixtures("own_random_numbers_and_one_thread")


def script(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # for its dataclasses
    spec.loader.exec_module(module)
    return module


def test_no_other_picture_is_shown():
    shown = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.png")}
    drawn = {"stuck.png", "demo.png", "pictures/range.png", "pictures/scale.png"}
    assert {name for name in shown if not name.startswith("benchmarks/")} == drawn


def test_the_pictures_of_loss_scaling_are_of_today(tmp_path):
    script(DOCS / "pictures.py").main(tmp_path)
    for name in ("range.png", "scale.png"):
        assert words_of(DOCS / "pictures" / name) == words_of(tmp_path / name)


def test_the_picture_of_a_report_is_of_today(tmp_path):
    script(ROOT / "examples" / "torch_stuck.py").main(["parameter", "--runs", str(tmp_path)])
    drawn = tmp_path / "stuck.png"
    assert main(["report", str(tmp_path / "parameter.jsonl"), "-o", str(drawn)]) == 0
    assert words_of(DOCS / "stuck.png") == words_of(drawn)


def test_the_picture_of_the_demo_is_of_today(tmp_path):
    drawn = tmp_path / "demo.png"
    assert main(["demo", "--steps", "3", "--output", str(drawn)]) == 0
    assert words_of(DOCS / "demo.png") == words_of(drawn)


def test_the_picture_and_the_tables_of_policies_are_of_one_run():
    policies = script(ROOT / "benchmarks" / "policies.py")
    results = json.loads((ROOT / "benchmarks" / "policies.json").read_text())
    tables = policies.described(results)
    with Image.open(ROOT / "benchmarks" / "policies.png") as image:
        assert image.text["Description"] == tables
    page = (DOCS / "policies.md").read_text()
    random = policies.table(policies.HEADINGS_OF_RANDOM, results["random"])
    assert [table for table in [*tables.split("\n\n"), random] if table not in page] == []
