"""The options of ``gradscaler run``."""

from __future__ import annotations

import argparse
import os
from functools import partial
from pathlib import Path

from gradscaler._run_script.voice import voice

FOLDER = "gradscaler-runs"
STOPPED = 3
"""The exit status of a run that ``--stop`` ended; Python's own are 1 and 2."""

MOST_RUNS = 20  # a search over settings; an inner optimizer for each batch would make thousands

_TEXT = (
    "Run a training script as it is, with its own arguments, and say why it fails: which "
    "operation made the first Inf or NaN, on which line, and what to do. Findings go to stderr; "
    "the steps of each process that trains go to a file. The training stays the same to the bit."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options, the script's own command line, and the texts of the help."""
    parser.description, parser.epilog = _TEXT, f"example: {parser.prog} train.py --lr 0.1"
    parser.usage = f"{parser.prog} [-h] [OPTION ...] (SCRIPT | -m MODULE) ..."
    output = "the folder of the run files (%(default)s)"
    parser.add_argument(
        "-o", "--output", type=_folder, default=Path(FOLDER), metavar="FOLDER", help=output
    )
    every = "sample the gradients of one step in N, on average (%(default)s)"
    parser.add_argument("--every", type=_positive, default=100, metavar="N", help=every)
    watch = "watch each operation of this step, which takes as long as some steps"
    parser.add_argument("--watch", type=_positive, metavar="STEP", help=watch)
    stop = f"end at the first step whose loss or gradients are not finite, with status {STOPPED}"
    parser.add_argument("--stop", action="store_true", help=stop)
    voice.add_options(parser)
    module = "the first word is the name of a module, as for python -m"
    parser.add_argument("-m", dest="is_module", action="store_true", help=module)
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT ...",
        help="the script or the module, and its arguments",
    )


def _folder(text: str) -> Path:
    """A folder that exists or can be made; the default, which nobody asked for, need not."""
    path = Path(text).absolute()
    there = next(each for each in (path, *path.parents) if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write to {there}")
    return Path(text)


def _number(text: str, least: int) -> int:
    number = int(text) if text.isdecimal() else -1
    if number < least:
        message = f"must be a whole number of at least {least}, got {text!r}"
        raise argparse.ArgumentTypeError(message)
    return number


_positive = partial(_number, least=1)
