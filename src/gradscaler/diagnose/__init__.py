"""Diagnoses training runs with loss scaling, in words and numbers.

Nothing else in gradscaler imports this package. It imports no framework; it reads the arrays of any
framework that is already loaded.
"""

from gradscaler.diagnose._findings.ranks import read_run
from gradscaler.diagnose._gradients.exponents import exponents
from gradscaler.diagnose._gradients.reading import inspect
from gradscaler.diagnose._locate.jaxpr import locate_jax
from gradscaler.diagnose._locate.locate import locate
from gradscaler.diagnose._monitor import Monitor
from gradscaler.diagnose._monitor.teller import FindingWarning, StuckError, StuckWarning
from gradscaler.diagnose._record.finding import Finding, Verdict
from gradscaler.diagnose._record.located import Located

__all__ = [
    "Finding",
    "FindingWarning",
    "Located",
    "Monitor",
    "StuckError",
    "StuckWarning",
    "Verdict",
    "exponents",
    "inspect",
    "locate",
    "locate_jax",
    "read_run",
]
