"""docs/run.md: its example prints what the page shows, and its table has each option."""

import argparse
import os
import re
from pathlib import Path

from gradscaler._run_script.options import add_options
from tests.support import programs
from tests.support.marked_lines import lines_marked_in

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "examples" / "torch_nan.py"
PAGE = (ROOT / "docs" / "run.md").read_text(encoding="utf-8")
SESSION = re.compile(r"^    \$ python (.*)\n((?:    .*\n)+)", re.MULTILINE)


def without_numbers(text):
    """Another processor may round another way, and each process has its number."""
    return re.sub(r"[\d.-]+", "0", " ".join(text.split()))


def test_each_option_has_its_row_and_each_row_is_of_an_option():
    parser = argparse.ArgumentParser(add_help=False)
    add_options(parser)
    options = [option for action in parser._actions for option in action.option_strings]
    rows = re.findall(r"^\| (`-.+?) \|", PAGE, re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(-[\w-]+)", row)]
    assert set(named) <= set(options)
    for action in parser._actions:
        assert not action.option_strings or {*named} & {*action.option_strings}, action


def test_the_readme_quotes_the_page():
    ((command, printed),) = SESSION.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert command in dict(SESSION.findall(PAGE))
    assert printed in dict(SESSION.findall(PAGE))[command]


def test_the_terminal_looks_as_the_page_shows_it(tmp_path):
    shown = dict(SESSION.findall(PAGE))
    (alone, watched) = (command for command in shown if "torch" in command)
    assert watched == f"-m gradscaler run {alone}"
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    own = {**os.environ, "PYTHONUNBUFFERED": "1"}
    done = programs.run(*watched.split(), cwd=tmp_path, env=own, is_one_stream=True)
    assert done.returncode == 0
    printed = done.stdout
    assert without_numbers(printed) == without_numbers(shown[watched])
    line = lines_marked_in(str(SCRIPT))("0 if both are the same point")
    assert printed.count(line) == shown[watched].count(line) == 2
    lines = [line for line in printed.splitlines() if line.startswith("step")]
    assert without_numbers(" ".join(lines)) == without_numbers(shown[alone])
