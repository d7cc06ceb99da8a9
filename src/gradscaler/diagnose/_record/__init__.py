"""What was seen of a run and said on it: the lines of its file, their writer and their reader."""
