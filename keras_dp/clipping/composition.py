"""Models put together from parts, each of which can be judged by itself.

Where every part of a graph keeps its examples apart, row by row, so does the graph. The layers
of Keras do (``keras_dp.validation`` names the exceptions), so a functional or sequential model
made of them needs no trial run, and one with a few layers of the user's needs a trial run of
these alone.
"""

import keras

from keras_dp import _keras

# Operations on tensors that work on each entry, as long as they broadcast along no batch.
_ENTRY_BY_ENTRY = ("Add", "Subtract", "Multiply", "Divide", "TrueDivide")


def parts_to_try(model):
    """The parts of ``model`` that nothing is known of.

    Args:
      model: a built model that ``validation.layer_problems`` has no objection to.

    Returns:
      List of pairs ``(layer, inputs)``, ``inputs`` being the nest of ``keras.KerasTensor`` that
      the layer is called on; or None when the model cannot be taken apart: its own ``call``, an
      operation between layers that could move examples, a layer that is called in several ways.
    """
    if not _keras.is_graph_of_layers(model):
        return None
    found = []
    for operation in _keras.operations(model):
        if isinstance(operation, keras.Model):
            nested = parts_to_try(operation)
            if nested is None:
                return None
            found += nested
        elif isinstance(operation, keras.Layer) and _is_known(operation):
            if not isinstance(model, keras.Sequential) and _meets_arrays(operation):
                return None
        elif isinstance(operation, keras.Layer):
            inputs = _only_input(operation)
            if inputs is None:
                return None
            found.append((operation, inputs))
        elif not _is_entry_by_entry(operation):
            return None
    return found


def _is_known(layer):
    """Whether ``layer`` is Keras's through and through, with no function of the user's in it."""
    return all(
        _is_of_keras(type(nested))
        and not any(_is_foreign_code(value) for value in vars(nested).values())
        for nested in _keras.all_layers(layer)
    )


def _is_foreign_code(value):
    if isinstance(value, (list, tuple)):
        return any(map(_is_foreign_code, value))
    if isinstance(value, dict):
        return any(map(_is_foreign_code, value.values()))
    return callable(value) and not (_is_of_keras(value) or _is_of_keras(type(value)))


def _is_of_keras(value):
    return (getattr(value, "__module__", None) or "").split(".")[0] in ("keras", "tensorflow")


def _meets_arrays(layer):
    """Whether it is called, beside the examples, on arrays that have no row for each."""
    return any(
        not isinstance(value, keras.KerasTensor)
        for node in _keras.symbolic_calls(layer)
        for value in keras.tree.flatten(node)
        if hasattr(value, "shape")
    )


def _only_input(layer):
    """The one input of a layer that is called once and on nothing else, or None."""
    calls = _keras.symbolic_calls(layer)
    if len(calls) != 1:
        return None
    (first, *others), kwargs = calls[0] if calls[0][0] else ((None,), {})
    if any(value is not None for value in keras.tree.flatten((others, kwargs))):
        return None
    leaves = keras.tree.flatten(first)
    return first if all(isinstance(leaf, keras.KerasTensor) for leaf in leaves) else None


def _is_entry_by_entry(operation):
    if not _is_of_keras(type(operation)) or type(operation).__name__ not in _ENTRY_BY_ENTRY:
        return False
    for call in _keras.symbolic_calls(operation):
        values = [value for value in keras.tree.flatten(call) if hasattr(value, "shape")]
        ranks = {len(v.shape) for v in values if isinstance(v, keras.KerasTensor)}
        if len(ranks) != 1 or any(len(v.shape) > max(ranks) for v in values):
            return False  # an axis of one would meet the batch of another
    return True
