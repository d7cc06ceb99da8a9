from keras_like import family, variables

__all__ = ["family", "variables"]

collect_ignore = ["keras_like.py"]  # it is imported from the path, once
