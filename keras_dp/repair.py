"""Makes a copy of a model that can be trained privately."""

import functools
import math

import keras

from keras_dp._keras import all_layers
from keras_dp.errors import IncompatibleModelError
from keras_dp.validation import (
    coupling_problems,
    describe,
    layer_problem,
    layer_problems,
    listed,
    require_built,
)

# Wu and He take 32 groups. With very few channels in a group it comes close to instance
# normalization, which does worse there.
_MAX_GROUPS = 32
_MIN_CHANNELS_PER_GROUP = 4

_BEHAVIOUR = ("call", "train_step", "test_step", "predict_step", "compute_loss", "compute_metrics")


def fix(model):
    """Returns a copy of a model with the layers repaired that rule out private training.

    In the copy

    - each BatchNormalization that is not frozen is a GroupNormalization (Wu and He 2018,
      arXiv 1803.08494), which normalises within one example: over positions and over a
      group of channels. The number of groups is the largest divisor of the number of
      channels that is at most 32 and leaves at least 4 channels in a group, else 1. Name,
      axis, gamma, beta, epsilon, regularizers, constraints and dtype are kept; the moving
      statistics are dropped, and a mask is not looked at. Frozen BatchNormalization stays.
    - each recurrent layer has ``stateful=False``, and takes batches of any size.

    All other layers are copied with their weights, seeds, names and ``trainable`` flags;
    a layer or model that is used several times stays one layer. The copy computes
    something else than the model did: expect a drop in accuracy, and train for a while
    (on public data if there is any) before relying on it.

    The model itself is left as it is. The copy is not compiled, whether the model was or
    not. A model class with a constructor of its own comes back as a plain functional
    model.

    Args:
      model: a built functional or sequential ``keras.Model``, with any nesting of such
        models inside.

    Returns:
      The copy, a new ``keras.Model`` without the problems that ``keras_dp.validate``
      finds in layers.

    Raises:
      IncompatibleModelError: if the model is subclassed, has a problem for which there
        is no repair, or holds something that cannot be copied.
      TypeError: if ``model`` is no ``keras.Model``.
      ValueError: if the model is not built yet.
    """
    require_built(model)
    _require_graph(model)
    classes = {type(layer) for layer in all_layers(model)}
    custom = {c.__name__: c for c in classes if not c.__module__.startswith("keras.")}
    with keras.saving.custom_object_scope(custom):
        copier = _Copier()
        copy = copier.copy(model)
    copier.move_state()
    if len(copy.trainable_variables) != len(model.trainable_variables):
        raise IncompatibleModelError(
            f"Model '{model.name}' cannot be copied: two of its layers share one variable, or a "
            "layer was attached to it outside its graph, and the copy would lose that. Repair "
            "these layers where the model is built:\n" + listed(layer_problems(model))
        )
    problems = layer_problems(copy) or coupling_problems(copy)
    if problems:
        raise IncompatibleModelError(
            f"keras_dp.fix cannot repair all of model '{model.name}'. Left over:\n"
            + listed(problems)
        )
    return copy


def _require_graph(model):
    if isinstance(model, keras.Function) or _is_connected(model):
        return
    problems = layer_problems(model)
    if isinstance(model, keras.Sequential):
        cause = (
            "Keras has no graph of it (it makes one when the model begins with a keras.Input and "
            "every custom layer has a compute_output_shape)"
        )
    else:
        cause = "it is subclassed, so its layers are put together in Python code"
    raise IncompatibleModelError(
        f"keras_dp.fix cannot rewrite model '{model.name}' ({type(model).__name__}): {cause}. "
        + (
            "Change these layers where the model is built, or freeze them:\n" + listed(problems)
            if problems
            else "Its layers need no repair: use the model as it is."
        )
    )


def _is_connected(model):
    return isinstance(model, keras.Sequential) and bool(getattr(model, "inputs", None))


class _Copier:
    """Copies layers, each once, and repairs them on the way."""

    def __init__(self):
        # By id of the original: (original, copy). What is used twice is copied once, also
        # when the two uses are in different models.
        self._pairs = {}

    def copy(self, operation):
        """The one copy of a layer, model or `keras.Operation`."""
        if id(operation) not in self._pairs:
            self._pairs[id(operation)] = (operation, self._new_copy(operation))
        return self._pairs[id(operation)][1]

    def _new_copy(self, operation):
        if isinstance(operation, keras.Function):
            return self._functional(operation)
        if _is_connected(operation):
            return self._sequential(operation)
        if isinstance(operation, keras.layers.BatchNormalization) and layer_problem(operation):
            return _group_normalization(operation)
        if type(operation) is keras.layers.Lambda:
            return _copy_of_lambda(operation)
        try:
            config = operation.get_config()
            if _is_plain_wrapper(operation):
                del config["layer"]
                return type(operation)(self.copy(operation.layer), **config)
            copy = type(operation).from_config(_without_state(operation, config))
            if hasattr(operation, "set_vocabulary"):
                _move_vocabulary(operation, copy)
            return copy
        except IncompatibleModelError:
            raise
        except Exception as error:
            cause = f"it cannot be built from its get_config ({error})"
            raise _cannot_copy(operation, cause) from error

    def _functional(self, model):
        # A view of the same graph: cloning it does not compile, as cloning the model may.
        graph = keras.Model(model.input, model.output)
        inputs = keras.tree.map_structure(functools.partial(self._input, model), model.input)
        clone = keras.models.clone_model(
            graph, input_tensors=inputs, clone_function=self.copy, call_function=_call
        )
        model_class = _class_of_copy(model, type(graph))
        return model_class(clone.input, clone.output, name=model.name)

    def _sequential(self, model):
        (tensor,) = model.inputs
        layers = [self._input(model, tensor), *(self.copy(layer) for layer in model.layers)]
        return _class_of_copy(model, keras.Sequential)(layers, name=model.name)

    def _input(self, model, tensor):
        (layer,) = (
            layer
            for layer in all_layers(model)
            if isinstance(layer, keras.layers.InputLayer) and layer.output is tensor
        )
        return keras.Input(
            batch_shape=tensor.shape,
            dtype=tensor.dtype,
            sparse=tensor.sparse,
            name=layer.name,
            optional=layer.optional,
        )

    def move_state(self):
        """Gives the copies the weights, seeds, vocabularies and flags of the originals."""
        pairs = dict(self._pairs)
        for original, copy in self._pairs.values():
            if isinstance(original, keras.Layer) and not isinstance(original, keras.Model):
                _pair_nested(original, copy, pairs)
        pairs = [pair for pair in pairs.values() if isinstance(pair[0], keras.Layer)]
        # `trainable` spreads to nested layers, so a layer comes before what it holds.
        pairs.sort(key=lambda pair: -len(all_layers(pair[0])))
        for original, copy in pairs:
            copy.trainable = original.trainable
        for original, copy in pairs:
            _move_own_state(original, copy)


def _call(operation, *args, **kwargs):
    if isinstance(operation, keras.layers.GroupNormalization):
        kwargs.pop("mask", None)  # an argument of BatchNormalization only
    return operation(*args, **kwargs)


def _pair_nested(original, copy, pairs):
    """Adds the layers that a composite layer made for itself to `pairs`."""
    theirs, ours = all_layers(original)[1:], all_layers(copy)[1:]
    known = [pairs[id(layer)][1] if id(layer) in pairs else None for layer in theirs]
    if len(theirs) != len(ours) or any(
        known_copy is not twin if known_copy is not None else type(layer) is not type(twin)
        for layer, twin, known_copy in zip(theirs, ours, known)
    ):
        raise _cannot_copy(original, "built from its get_config, it holds other layers")
    for layer, twin in zip(theirs, ours):
        pairs.setdefault(id(layer), (layer, twin))


def _move_own_state(original, copy):
    """Moves what the layer holds itself, apart from the layers nested in it."""
    if _is_repaired_normalization(original, copy):
        variables = [v for v in (original.gamma, original.beta) if v is not None]
        twins = [v for v in (copy.gamma, copy.beta) if v is not None]
    else:
        variables, twins = _own_variables(original), _own_variables(copy)
        if [v.shape for v in variables] != [v.shape for v in twins]:
            raise _cannot_copy(original, "built from its get_config, it has other variables")
        if not isinstance(original, keras.Model):
            # Layers such as Normalization and StringLookup hold more than variables.
            store = {}
            original.save_own_variables(store)
            copy.load_own_variables(store)
    # Saving leaves out the seeds, and merges LoRA weights into the kernel.
    for variable, twin in zip(variables, twins):
        twin.assign(variable)
        twin.trainable = variable.trainable


def _cannot_copy(operation, cause):
    return IncompatibleModelError(
        f"keras_dp.fix cannot copy {describe(operation)}: {cause}. Give its class a get_config "
        "that returns the arguments of its constructor, or repair the model where it is built "
        "(keras_dp.validate says what there is to repair)."
    )


def _is_repaired_normalization(original, copy):
    return isinstance(original, keras.layers.BatchNormalization) and isinstance(
        copy, keras.layers.GroupNormalization
    )


def _own_variables(layer):
    nested = {id(v) for inner in all_layers(layer)[1:] for v in inner.variables}
    return [v for v in layer.variables if id(v) not in nested]


def _group_normalization(layer):
    channels = layer.moving_mean.shape[0]
    rank = layer.input_spec.ndim
    axis = layer.axis % rank
    positions = _num_positions(layer, rank, axis)
    groups = max(
        (
            g
            for g in range(1, _MAX_GROUPS + 1)
            if channels % g == 0 and channels // g >= _MIN_CHANNELS_PER_GROUP
        ),
        default=1,
    )
    if channels // groups * positions == 1:
        raise IncompatibleModelError(
            f"keras_dp.fix cannot repair {describe(layer)}: each example has a single value "
            "there, so normalising within the example would erase it. Remove the layer, or freeze "
            "it with layer.trainable = False."
        )
    return keras.layers.GroupNormalization(
        groups=groups,
        axis=-1 if axis == rank - 1 else axis,
        epsilon=layer.epsilon,
        center=layer.center,
        scale=layer.scale,
        beta_initializer=layer.beta_initializer,
        gamma_initializer=layer.gamma_initializer,
        beta_regularizer=layer.beta_regularizer,
        gamma_regularizer=layer.gamma_regularizer,
        beta_constraint=layer.beta_constraint,
        gamma_constraint=layer.gamma_constraint,
        activity_regularizer=layer.activity_regularizer,
        name=layer.name,
        dtype=layer.dtype_policy,
    )


def _num_positions(layer, rank, axis):
    """Values of one channel in one example; an open dimension counts as more than one."""
    if rank == 2:
        return 1
    shape = (layer.get_build_config() or {}).get("input_shape") or (None,) * rank
    return math.prod(2 if n is None else n for i, n in enumerate(shape) if i not in (0, axis))


def _copy_of_lambda(layer):
    # From the function itself: its config holds bytecode, which loses the globals.
    return keras.layers.Lambda(
        layer.function,
        output_shape=layer._output_shape,
        mask=layer.mask,
        arguments=layer.arguments,
        activity_regularizer=layer.activity_regularizer,
        name=layer.name,
        dtype=layer.dtype_policy,
    )


def _is_plain_wrapper(operation):
    return (
        isinstance(operation, keras.layers.Wrapper)
        and type(operation).from_config.__func__ is keras.layers.Wrapper.from_config.__func__
    )


def _without_state(operation, config):
    """The config of a recurrent layer that starts every batch anew."""
    if isinstance(operation, keras.layers.RNN):
        config["stateful"] = False
    elif isinstance(operation, keras.layers.Bidirectional):
        for part in ("layer", "backward_layer"):
            config[part]["config"]["stateful"] = False
    return config


def _move_vocabulary(original, copy):
    """What a lookup layer has adapted to, without which it cannot be called."""
    vocabulary = original.get_vocabulary()
    if copy.get_vocabulary() != vocabulary:
        store = {}
        original.save_own_variables(store)
        copy.set_vocabulary(vocabulary, **store)  # the store has idf_weights, if there are any


def _class_of_copy(model, plain_class):
    """The class of `model` if it can be built from layers alone, else the plain one."""
    model_class = type(model)
    if model_class.__init__ in (plain_class.__init__, keras.Model.__init__):
        return model_class
    lost = [
        name for name in _BEHAVIOUR if getattr(model_class, name) is not getattr(plain_class, name)
    ]
    if lost:
        raise IncompatibleModelError(
            f"keras_dp.fix cannot copy {describe(model)}: its class has a constructor of its own, "
            f"and a plain model would lose its {', '.join(lost)}. Repair the plain model and build "
            "the class on it: plain = keras_dp.fix(keras.Model(model.input, model.output))."
        )
    return plain_class
