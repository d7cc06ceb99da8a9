"""``gradscaler run``: a user's script under a monitor, without a change.

Until the script imports a framework, this package imports nothing but the standard library, so
that environment variables that the script sets still count.
"""

from __future__ import annotations

import argparse

from gradscaler._notebook import shell
from gradscaler._run_script.program import program_of, show_from
from gradscaler._run_script.watch import begin, is_watched, note_end


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Run the script or the module of a command line; it ends as under ``python``."""
    if options.command[:1] == ["--"]:
        options.command.pop(0)
    if not options.command:
        parser.error("give a script, or -m and a module")
    if shell() is not None and is_watched():
        parser.error("this process is watched already: run the script without gradscaler run")
    options.folder = options.output.absolute()  # the script may change the working directory
    options.again, options.elsewhere = "the same command with --watch {}", "-o"
    target, *arguments = options.command
    started = begin(options)
    try:
        program = program_of(target, options.is_module)
    except OSError as error:
        parser.error(f"can't open {target!r}: {error.strerror or error}")
    except ImportError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    except SyntaxError:
        show_from(None)
        raise
    started._explain_at_end()
    try:
        program.run(arguments)
    except BaseException as error:
        note_end(options, error)
        raise
    finally:
        if shell() is not None:  # this is %run, after which the notebook goes on
            started.stop()
    return 0
