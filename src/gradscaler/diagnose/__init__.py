"""What goes wrong in a training run with loss scaling, in words and numbers.

Nothing else of gradscaler imports this package, and it imports no framework: it reads the arrays
of any that is there.
"""

from gradscaler.diagnose.exponents import exponents
from gradscaler.diagnose.forensics import inspect
from gradscaler.diagnose.journal import StuckError, StuckWarning
from gradscaler.diagnose.locate import locate
from gradscaler.diagnose.monitor import Monitor
from gradscaler.diagnose.runs import read_run
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
