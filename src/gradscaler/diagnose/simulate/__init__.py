"""What a policy would do on a recorded run: its skips, what it flushes, how soon it recovers.

Needs NumPy alone. ``python -m gradscaler simulate run.jsonl --policy paddle`` prints the table.
"""

from gradscaler.diagnose.simulate._replay import Replay, Spike, replay
from gradscaler.diagnose.simulate._trace import Trace

__all__ = ["Replay", "Spike", "Trace", "replay"]
