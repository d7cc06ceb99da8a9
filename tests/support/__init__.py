"""Code that several test files use. It holds no tests; docs/contributing.md lists its modules."""
