"""The run file that a monitor writes: its lines, its writer and its reader."""
