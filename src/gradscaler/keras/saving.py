"""Loads models that were saved with Keras' own ``LossScaleOptimizer``."""

from __future__ import annotations

from typing import Any

import keras

from gradscaler.keras.optimizer import LossScaleOptimizer

_load_model = keras.models.load_model  # kept, because a user may replace it by the one below


def load_model(
    filepath: Any, custom_objects: dict[str, object] | None = None, **options: Any
) -> Any:
    """``keras.models.load_model``, with gradscaler's optimizer in place of Keras' own wrapper.

    The scale, the counter, the inner optimizer and its state come from the file. A model with any
    other optimizer, or without one, is loaded as by Keras.

    Args:
        filepath: a ``.keras`` file.
        custom_objects: classes and functions, by their names in the file.
        options: further arguments of ``keras.models.load_model``.

    Raises:
        ValueError, TypeError: the errors of ``keras.models.load_model``.
    """
    model = _load_model(filepath, custom_objects, **options)
    theirs: Any = getattr(model, "optimizer", None)
    if type(theirs) is not keras.optimizers.LossScaleOptimizer:
        return model
    stored: dict[str, object] = {}
    theirs.save_own_variables(stored)
    with keras.saving.CustomObjectScope(custom_objects or {}):
        ours = LossScaleOptimizer.from_config(theirs.get_config())
        config = model.get_compile_config()
        config["optimizer"] = keras.saving.serialize_keras_object(ours)
        model.compile_from_config(config)
    if theirs.built:
        model.optimizer.load_own_variables(stored)
    return model
