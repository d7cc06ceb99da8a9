"""What happened to a loss scale, and why: forensics, exponents, a monitor, and its run file."""

from gradscaler.diagnose.runs import read_run
from gradscaler.diagnose.verdict import Verdict

__all__ = ["Verdict", "read_run"]
