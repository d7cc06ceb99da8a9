"""Only the module of the framework that is installed can be imported."""

collect_ignore_glob = ["on_*.py"]
