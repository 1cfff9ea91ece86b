"""Models put together from parts, each of which can be judged by itself.

Where every part of a graph keeps its examples apart, row by row, so does the graph. Below is a
list of layers of Keras, and of ways to call them, that do. A functional or sequential model made
of these alone needs no trial run, and one with a single other layer needs a trial run of that
layer alone. Whatever is not on the list is tried.
"""

import keras

from keras_dp import _keras

_L = keras.layers


def parts_to_try(model):
    """The parts of ``model`` that nothing is known of.

    Args:
      model: a built model that ``validation.layer_problems`` has no objection to.

    Returns:
      List of at most one pair ``(layer, inputs)``, ``inputs`` being the nest of
      ``keras.KerasTensor`` that the layer is called on; or None when the model has to be tried as
      a whole: a ``call`` of its own, an operation between layers that could move examples,
      several unknown layers (which may share state), one that is called in several ways.
    """
    found = _parts(model)
    return found if found is not None and len(found) <= 1 else None


def _parts(model):
    if not _keras.is_graph_of_layers(model):
        return None
    found = []
    for operation in _keras.operations(model):
        if isinstance(operation, keras.Model):
            nested = _parts(operation)
            if nested is None:
                return None
            found += nested
        elif _is_known(operation):
            continue
        elif isinstance(operation, keras.Layer):
            inputs = _only_input(operation)
            if inputs is None:
                return None
            found.append((operation, inputs))
        else:
            return None
    return found


def _is_known(operation):
    """Whether ``operation`` is on the list, with nothing of the user's in it, in all its calls."""
    if type(operation) is _L.InputLayer or _is_arithmetic(operation):
        return True
    calls = [_ranks(call) for call in _keras.symbolic_calls(operation)]
    return bool(calls) and all(ranks is not None and _holds(operation, ranks) for ranks in calls)


def _is_arithmetic(operation):
    if type(operation) not in _ARITHMETIC:
        return False
    for call in _keras.symbolic_calls(operation):
        values = [value for value in keras.tree.flatten(call) if hasattr(value, "shape")]
        ranks = {len(v.shape) for v in values if isinstance(v, keras.KerasTensor)}
        if len(ranks) != 1 or any(len(v.shape) > max(ranks) for v in values):
            return False  # an axis of one would meet the batch of another
    return True


def _ranks(call):
    """The ranks of the tensors of a call, or None when it has arguments of another kind."""
    args, kwargs = call
    given = [*args, *(value for name, value in kwargs.items() if name != "training")]
    first, *others = [value for value in given if value is not None] or [None]
    leaves = [*keras.tree.flatten(first), *others]
    if not all(isinstance(leaf, keras.KerasTensor) for leaf in leaves):
        return None
    return [len(leaf.shape) for leaf in leaves]


def _holds(layer, ranks):
    """Whether ``layer``, called on tensors of these ranks, is known to keep examples apart."""
    condition = _KNOWN.get(type(layer))
    return (
        condition is not None and _is_plain(layer) and min(ranks) >= 2 and condition(layer, ranks)
    )


def _is_plain(layer):
    """Whether the layer computes what its class says, with functions of Keras alone."""
    cls = type(layer)
    return (
        cls.call.__module__.startswith("keras.src.")
        and cls.__call__ is keras.Layer.__call__
        and all(_is_harmless(name, value, cls) for name, value in vars(layer).items())
    )


def _is_harmless(name, value, cls):
    if not callable(value) or isinstance(value, type):
        return True
    if isinstance(value, keras.Layer):
        return cls in _CONTAINERS  # whose conditions look at what is inside
    if isinstance(value, (keras.Initializer, keras.Regularizer, keras.DTypePolicy)):
        return True
    if isinstance(value, keras.constraints.Constraint):
        return True
    if name in ("build", "quantize"):  # Keras wraps these two
        wrapped = getattr(value, "__wrapped__", None)
        return getattr(wrapped, "__func__", None) is getattr(cls, name)
    return getattr(keras.activations, getattr(value, "__name__", ""), None) is value


def _always(layer, ranks):
    return len(set(ranks)) == 1


def _one_input(layer, ranks):
    return len(ranks) == 1


def _has_axes(layer, ranks):
    axes = layer.axis if isinstance(layer.axis, (list, tuple)) else [layer.axis]
    return len(set(ranks)) == 1 and all(axis % ranks[0] != 0 for axis in axes)


def _einsum_dense(layer, ranks):
    return _one_input(layer, ranks) and "." not in layer.equation


def _attention(layer, ranks):
    return len(set(ranks)) == 1 and len(ranks) <= 3 and ranks[0] == 3


def _attends_over_time(layer, ranks):
    inner = [nested for nested in _keras.all_layers(layer) if nested is not layer]
    return (
        _attention(layer, ranks)
        and layer.attention_axes in (None, (1,), [1])
        and all(type(nested) in _INSIDE_ATTENTION and _is_plain(nested) for nested in inner)
    )


def _recurrent(layer, ranks):
    cell = layer.cell
    return ranks == [3] and type(cell) in _CELLS and _is_plain(cell)


def _bidirectional(layer, ranks):
    directions = (layer.forward_layer, layer.backward_layer)
    return all(type(d) in _RECURRENT and _holds(d, ranks) for d in directions)


def _time_distributed(layer, ranks):
    inner = layer.layer
    return len(ranks) == 1 and type(inner) in _IN_TIME and _holds(inner, [ranks[0] - 1])


_ARITHMETIC = _keras.arithmetic_operations()
_CELLS = (_L.LSTMCell, _L.GRUCell, _L.SimpleRNNCell)
_RECURRENT = (_L.LSTM, _L.GRU, _L.SimpleRNN)
_INSIDE_ATTENTION = (_L.EinsumDense, _L.Softmax, _L.Dropout)
_CONTAINERS = (*_RECURRENT, _L.Bidirectional, _L.TimeDistributed, _L.MultiHeadAttention)
_IN_TIME = (_L.Dense, _L.Conv1D, _L.Conv2D, _L.Flatten, _L.Dropout, _L.Embedding)

# Layer class: condition(layer, ranks of the tensors of one call).
_KNOWN = {
    **dict.fromkeys(
        (
            _L.Dense,
            _L.Embedding,
            _L.Activation,
            _L.ReLU,
            _L.LeakyReLU,
            _L.ELU,
            _L.PReLU,
            _L.Dropout,
            _L.SpatialDropout1D,
            _L.SpatialDropout2D,
            _L.SpatialDropout3D,
            _L.GaussianDropout,
            _L.GaussianNoise,
            _L.Flatten,
            _L.Reshape,
            _L.Permute,
            _L.RepeatVector,
            _L.ZeroPadding1D,
            _L.ZeroPadding2D,
            _L.Cropping1D,
            _L.Cropping2D,
            _L.UpSampling1D,
            _L.UpSampling2D,
            _L.Conv1D,
            _L.Conv2D,
            _L.Conv3D,
            _L.Conv1DTranspose,
            _L.Conv2DTranspose,
            _L.Conv3DTranspose,
            _L.DepthwiseConv1D,
            _L.DepthwiseConv2D,
            _L.SeparableConv1D,
            _L.SeparableConv2D,
            _L.MaxPooling1D,
            _L.MaxPooling2D,
            _L.MaxPooling3D,
            _L.AveragePooling1D,
            _L.AveragePooling2D,
            _L.AveragePooling3D,
            _L.GlobalMaxPooling1D,
            _L.GlobalMaxPooling2D,
            _L.GlobalAveragePooling1D,
            _L.GlobalAveragePooling2D,
        ),
        _one_input,
    ),
    **dict.fromkeys(
        (_L.Add, _L.Subtract, _L.Multiply, _L.Average, _L.Maximum, _L.Minimum), _always
    ),
    **dict.fromkeys(
        (
            _L.BatchNormalization,  # frozen, or it was refused
            _L.Concatenate,
            _L.GroupNormalization,
            _L.LayerNormalization,
            _L.RMSNormalization,
            _L.Softmax,
        ),
        _has_axes,
    ),
    _L.EinsumDense: _einsum_dense,
    _L.MultiHeadAttention: _attends_over_time,
    **dict.fromkeys(_RECURRENT, _recurrent),
    _L.Bidirectional: _bidirectional,
    _L.TimeDistributed: _time_distributed,
}


def _only_input(layer):
    """The one input of a layer that is called once and on nothing else, or None."""
    calls = _keras.symbolic_calls(layer)
    if len(calls) != 1 or not calls[0][0]:
        return None
    (first, *others), kwargs = calls[0]
    kwargs = {name: value for name, value in kwargs.items() if name != "training"}
    if any(value is not None for value in keras.tree.flatten((others, kwargs))):
        return None
    leaves = keras.tree.flatten(first)
    return first if all(isinstance(leaf, keras.KerasTensor) for leaf in leaves) else None
