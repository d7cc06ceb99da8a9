from keras_like import family, variables
from processes import ranks

__all__ = ["family", "ranks", "variables"]

collect_ignore = ["keras_like.py"]  # it is imported from the path, once
