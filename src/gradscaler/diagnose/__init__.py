"""What goes wrong in a training run with loss scaling, in words and numbers.

Nothing else in gradscaler imports this package, and it imports no framework: it reads the arrays
of whichever framework is loaded.
"""

from gradscaler.diagnose.gradients.exponents import exponents
from gradscaler.diagnose.gradients.locate import locate
from gradscaler.diagnose.gradients.nonfinite import inspect
from gradscaler.diagnose.monitor import Monitor
from gradscaler.diagnose.monitor.steps import StuckError, StuckWarning
from gradscaler.diagnose.run.reader import read_run
from gradscaler.diagnose.verdict import Verdict

__all__ = [
    "Monitor",
    "StuckError",
    "StuckWarning",
    "Verdict",
    "exponents",
    "inspect",
    "locate",
    "read_run",
]
