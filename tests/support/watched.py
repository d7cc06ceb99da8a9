"""Whether a monitor watches the calls of PyTorch's functions."""


def is_watched() -> bool:
    """Whether a mode sees the calls of this thread; only a watch adds one in the tests."""
    from torch.overrides import _get_current_function_mode

    return _get_current_function_mode() is not None
