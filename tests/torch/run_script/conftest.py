"""What pytest must not import."""

collect_ignore = ["failing.py"]  # a script that ends the process
