"""The example makes the table of docs/weights.md."""

import importlib.util
import math
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "examples" / "torch_half_weights.py"
spec = importlib.util.spec_from_file_location("torch_half_weights", SCRIPT)
torch_half_weights = importlib.util.module_from_spec(spec)
spec.loader.exec_module(torch_half_weights)

pytestmark = pytest.mark.usefixtures("own_random_numbers_and_one_thread")


def rows(text):
    """The numbers of each row of the table, by its name."""
    found = re.findall(r"^\| (.+?) \| (\S+) \| (\S+) \| (\d+) \|$", text, re.MULTILINE)
    return {
        name: tuple(math.nan if each == "-" else float(each) for each in numbers)
        for name, *numbers in found
    }


@pytest.mark.rare("test_equal_bits.py compares the stores with float32, where they are exact")
def test_the_example_makes_the_table_of_the_page(capsys):
    torch_half_weights.main([])
    made = rows(capsys.readouterr().out)
    shown = rows((ROOT / "docs" / "weights.md").read_text())
    assert list(made) == list(shown) == list(torch_half_weights.WAYS)
    for way, numbers in made.items():
        assert numbers == pytest.approx(shown[way], abs=5e-4, nan_ok=True)
    exact = made["float32, autocast"][:2]
    assert made['MasterWeights, "float32"'][:2] == made['MasterWeights, "remainder16"'][:2] == exact
