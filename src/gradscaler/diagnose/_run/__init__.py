"""The file that a monitor writes of a run: its lines, how it is written, and how it is read."""
