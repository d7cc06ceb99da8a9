"""``gradscaler run``: a user's script under a monitor, without a change.

Until the script imports a framework, this package imports nothing but the standard library, so
that environment variables that the script sets still count.
"""

from __future__ import annotations

import argparse
import atexit
import os
import sys
from functools import partial

from gradscaler._run_script.after_import import after_import
from gradscaler._run_script.program import program_of
from gradscaler._run_script.tracebacks import show_from
from gradscaler._run_script.voice import say


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Run the script or the module of a command line; it ends as under ``python``."""
    if options.command[:1] == ["--"]:
        options.command.pop(0)
    if not options.command:
        parser.error("give a script, or -m and a module")
    options.has_raised = options.has_failed = options.is_watched = False
    options.trace = None  # of what the script raises
    options.folder = options.output.absolute()  # the script may change the working directory
    target, *arguments = options.command
    after_import("torch", partial(_watch, options))
    after_import("keras", partial(_watch_fits, options))
    for name in ("paddle", "tensorplay"):
        after_import(name, partial(_watch_loops, name, options))
    after_import("jax", partial(_watch_jax, options))
    after_import("mindspore", partial(_watch_mindspore, options))
    try:
        program = program_of(target, options.is_module)
    except OSError as error:
        parser.error(f"can't open {target!r}: {error.strerror or error}")
    except ImportError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    except SyntaxError:
        show_from(None)
        raise
    atexit.register(_say_if_unwatched, options, os.getpid())
    try:
        program.run(arguments)
    except BaseException as error:
        is_exit = isinstance(error, (SystemExit, KeyboardInterrupt))
        options.has_raised, options.trace = True, error.__traceback__
        options.has_failed = bool(error.code) if isinstance(error, SystemExit) else not is_exit
        raise
    return 0


def _say_if_unwatched(options: argparse.Namespace, process: int) -> None:
    """Say why there is no verdict, in the process that was started and not in its forks."""
    is_quiet = options.has_raised or options.is_watched or "torch" in sys.modules
    if not is_quiet and os.getpid() == process:
        say("no step of a training was seen in this process, so there is no verdict.")


def _watch(options: argparse.Namespace) -> None:
    """Watch this process, now that PyTorch is imported."""
    from gradscaler._run_script.session import Session

    Session(options).start()


def _watch_fits(options: argparse.Namespace) -> None:
    """Watch each ``fit`` of this process, now that Keras is imported."""
    from gradscaler._run_script.fits import Fits

    Fits(options).start()


def _watch_loops(name: str, options: argparse.Namespace) -> None:
    """Watch the loops of Paddle or TensorPlay of this process, now that it is imported."""
    from gradscaler._run_script.backward_loops import BackwardLoops

    BackwardLoops(name, options).start()


def _watch_jax(options: argparse.Namespace) -> None:
    """Watch the loops of JAX of this process, now that it is imported."""
    from gradscaler._run_script.function_loops import FunctionLoops

    FunctionLoops(options).start()


def _watch_mindspore(options: argparse.Namespace) -> None:
    """Watch the loops of MindSpore of this process, now that it is imported."""
    from gradscaler._run_script.gradient_loops import GradientLoops

    GradientLoops(options).start()
