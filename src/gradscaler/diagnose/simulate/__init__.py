"""Replays a policy on a recorded run: its skips, flushed gradients and recovery times.

This package needs only NumPy. ``python -m gradscaler simulate run.jsonl --policy paddle`` prints a
table.
"""

from gradscaler.diagnose.simulate._replay import Replay, Spike, replay
from gradscaler.diagnose.simulate._trace import Trace

__all__ = ["Replay", "Spike", "Trace", "replay"]
