"""A script under ``gradscaler run`` and by itself, side by side."""

import os
import subprocess
import sys


def run_both(script, *arguments, folder, **variables):
    """What a script prints under ``gradscaler run`` and by itself, and what is said of it."""
    started = [
        subprocess.Popen(
            [sys.executable, *under, str(script), *arguments],
            cwd=folder,
            env=os.environ | variables,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for under in (("-m", "gradscaler", "run"), ())
    ]
    (ours, said), (theirs, _) = (process.communicate(timeout=300) for process in started)
    assert [process.returncode for process in started] == [0, 0], said
    return ours, theirs, said
