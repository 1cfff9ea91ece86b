"""What makes a Keras model impossible to train privately."""

import dataclasses
import math

import keras

from keras_dp._keras import all_layers
from keras_dp.errors import IncompatibleModelError
from keras_dp.independence import couples_examples, first_coupling_operation

_FREEZE_OR_FIX = (
    "call keras_dp.fix(model), which puts GroupNormalization in its place, or freeze it with "
    "layer.trainable = False before compile"
)
_ONE_IMAGE_AT_A_TIME = (
    "remove it from the model and apply it to one image at a time in the input pipeline"
)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Why a model cannot be trained privately, and the way out.

    Attributes:
      layer: path of the layer in the model (its name if it has no path), "" for the
        model as a whole.
      reason: what is wrong, naming the layer and its class.
      repair: what to call or to change.
    """

    layer: str
    reason: str
    repair: str

    def __str__(self):
        return f"{self.reason}; to repair it, {self.repair}."


def validate(model, probe=True, *, input_spec=None):
    """Lists what keeps a model from being trained privately.

    Looked for in the model and in every layer nested in it:

    - layers in which the examples of one batch influence each other: BatchNormalization
      unless it is frozen, layers that mix images, layers told to work along the batch
      axis, and the other layers of Keras that do so. Clipping one example's gradient
      then does not bound what that example does to the update (DP-SGD, Abadi et al.
      2016, arXiv 1607.00133, algorithm 1, assumes one gradient for each example).
    - recurrent layers that carry state over from one batch to the next, and
      SpectralNormalization, which rewrites its kernel in the forward pass;
    - trainable variables that cannot be clipped and noised, and a model without any.

    A BatchNormalization layer is frozen when its own ``trainable`` is False; Keras then
    runs it with its moving statistics. Setting ``trainable`` of a parent sets it for the
    layers that the parent holds at that moment. ``training=False`` given to a call does
    not count: inside a functional model, Keras overrides it.

    A model that passes the list is then run on a few random rows to see whether
    examples influence each other in code that the list does not know (see
    ``keras_dp.independence.couples_examples``).

    Losses are not looked at, nor layers that call ``add_loss``: they are seen when the
    model is trained.

    Args:
      model: a built ``keras.Model``.
      probe: bool, whether to run the model when the list has found nothing.
      input_spec: nest of objects with ``shape`` (batch first) and ``dtype``: what a
        subclassed model is called on, so that it can be run.

    Returns:
      List of ``Problem``; empty when nothing was found.

    Raises:
      TypeError: if ``model`` is no ``keras.Model``.
      ValueError: if the model is not built yet.
    """
    require_built(model)
    problems = layer_problems(model) + _variable_problems(model)
    if probe and not problems:
        problems = coupling_problems(model, input_spec=input_spec)
    return problems


def require_valid(model, probe=True, *, input_spec=None):
    """Raises IncompatibleModelError with every problem that ``validate`` finds.

    Args:
      model: a built ``keras.Model``.
      probe: as for ``validate``.
      input_spec: as for ``validate``.

    Raises:
      IncompatibleModelError: if there is a problem; the text has each and its repair.
      TypeError: if ``model`` is no ``keras.Model``.
      ValueError: if the model is not built yet.
    """
    problems = validate(model, probe, input_spec=input_spec)
    if problems:
        raise IncompatibleModelError(
            f"Model '{model.name}' cannot be trained privately as it stands:\n{listed(problems)}\n"
            "keras_dp.validate(model) returns this list."
        )


def listed(problems):
    """The problems as the lines of a message; those of one kind are told together."""
    kinds = {}
    for problem in problems:
        kind = (problem.reason.replace(problem.layer, "", 1), problem.repair)
        kinds.setdefault(kind, []).append(problem)
    lines = []
    for first, *others in kinds.values():
        lines.append(f"- {first}")
        if others:
            lines.append("  The same holds for: " + ", ".join(p.layer for p in others) + ".")
    return "\n".join(lines)


def require_built(model):
    """Raises if ``model`` is no model, or has no variables to look at yet."""
    if not isinstance(model, keras.Model):
        raise TypeError(f"Expected a keras.Model, received {model!r} of type {type(model)}.")
    if not model.built:
        raise ValueError(
            f"Model '{model.name}' is not built: its layers have no variables to look at yet. "
            "Call it once on a batch, call model.build(input_shape), or give it a keras.Input."
        )


def layer_problems(model):
    """The problems that single layers of ``model`` have by their class and arguments."""
    problems, inside = [], set()
    for layer in all_layers(model):
        if id(layer) in inside:
            continue
        found = layer_problem(layer)
        if found is not None:
            reason, repair = found
            problems.append(Problem(_location(layer), f"{describe(layer)} {reason}", repair))
            inside |= {id(nested) for nested in all_layers(layer)}
    return problems


def layer_problem(layer):
    """Reason and repair if the class and arguments of ``layer`` rule it out, else None."""
    for layer_class, check in _CHECKS.items():
        if isinstance(layer, layer_class):
            found = check(layer)
            if found is not None:
                return found
    return None


def coupling_problems(model, *, input_spec=None):
    """The problem, as a list of at most one, that running ``model`` brings to light."""
    if not couples_examples(model, input_spec=input_spec):
        return []
    culprit = first_coupling_operation(model, input_spec=input_spec)
    if culprit is None or culprit is model:
        location, culprit = "", model
    else:
        location = _location(culprit)
    return [
        Problem(
            location,
            f"{describe(culprit)} lets the examples of a batch influence each other: in a trial "
            "run, the output for one example moved when other examples were replaced",
            "let it compute on each example by itself: no mean, maximum, sort or shuffle along "
            "axis 0",
        )
    ]


def describe(operation):
    """``layer 'block1/bn' (BatchNormalization)``, to begin a sentence with."""
    if isinstance(operation, keras.Model):
        kind = "model"
    elif isinstance(operation, keras.Layer):
        kind = "layer"
    else:
        kind = "operation"
    return f"{kind} '{_location(operation)}' ({type(operation).__name__})"


def _location(operation):
    return getattr(operation, "path", None) or operation.name


def _variable_problems(model):
    if not model.trainable_variables:
        return [
            Problem(
                "",
                f"{describe(model)} has no trainable variable, so there is nothing to train",
                "set trainable = True on the layers to be trained, or add a layer",
            )
        ]
    # A layer comes before what it holds, so the innermost owner is the one that stays.
    owners = {id(v): layer for layer in all_layers(model) for v in layer.variables}
    problems = []
    for variable in model.trainable_variables:
        if not keras.backend.is_float_dtype(variable.dtype):
            reason = (
                f"has the trainable variable '{variable.name}' of dtype {variable.dtype}, and "
                "gradients are clipped and noised as real numbers"
            )
            repair = "store it as float32 (a complex one as two), or set its trainable = False"
        elif variable.overwrite_with_gradient:
            reason = (
                f"sets its variable '{variable.name}' to a statistic of the batch, which Keras "
                "hands to the optimizer in place of a gradient (float8 training)"
            )
            repair = "train in another dtype: build the model without float8 quantization"
        else:
            continue
        layer = owners[id(variable)]
        problems.append(Problem(_location(layer), f"{describe(layer)} {reason}", repair))
    return problems


def _batch_normalization(layer):
    # The condition of BatchNormalization.call, with training=True.
    if layer.trainable:
        return (
            "normalises each example with the mean and variance of the whole batch, so that "
            "examples influence each other's gradients",
            _FREEZE_OR_FIX,
        )
    return None


def _stateful(layer):
    if layer.stateful:
        return (
            "is stateful: it carries what it saw in one batch over to the next one",
            "call keras_dp.fix(model), or build it with stateful=False",
        )
    return None


def _spectral_normalization(layer):
    return (
        "rewrites the kernel of the layer it wraps in every forward pass, outside the clipped "
        "and noised update",
        f"use the {type(layer.layer).__name__} without SpectralNormalization; a "
        "kernel_constraint can bound its weights",
    )


def _mixes_images(layer):
    return (
        "blends each image with another image of the batch",
        "remove it: also in the input pipeline it lets one example into two rows",
    )


def _equalization(layer):
    return (
        "takes the histogram over all images of the batch and not over each",
        _ONE_IMAGE_AT_A_TIME,
    )


def _contains_equalization(layer):
    return (
        "applies Equalization, which takes the histogram over all images of the batch",
        _ONE_IMAGE_AT_A_TIME,
    )


def _mel_spectrogram(layer):
    if math.isinf(layer.top_db):
        return None
    return (
        f"cuts each spectrogram off {layer.top_db:g} dB below the loudest example of the batch",
        'build it with top_db=float("inf"), or apply it to one example at a time in the input '
        "pipeline",
    )


def _text_vectorization(layer):
    config = layer.get_config()
    if config["output_mode"] == "int" and config["output_sequence_length"] is None:
        return (
            "makes its rows as long as the longest text of the batch",
            "build it with output_sequence_length",
        )
    return None


def _counts_rows(layer):
    if _input_rank(layer) == 1 and layer.output_mode in ("multi_hot", "count", "tf_idf"):
        return (
            f"with output_mode='{layer.output_mode}' makes one row of the whole batch when each "
            "example is a single value",
            "give it inputs of shape [batch, 1]",
        )
    return None


def _works_along(get_axes, verb):
    def check(layer):
        axes = get_axes(layer)
        rank = _input_rank(layer)
        # A negative axis of a layer of unknown rank is left to the trial run.
        if any(axis == 0 or (rank and axis == -rank) for axis in axes):
            return (
                f"{verb} along the batch axis (axis 0)",
                "choose an axis of the single example, 1 or higher",
            )
        return None

    return check


def _axis(layer):
    return layer.axis if isinstance(layer.axis, (list, tuple)) else [layer.axis]


def _einsum_dense(layer):
    operands, result = layer.equation.split("->")
    if operands[0] != result[:1]:
        return (
            f"with equation '{layer.equation}' does not keep the batch axis in front",
            "write an equation whose input and output begin with the same letter",
        )
    return None


def _input_rank(layer):
    """Number of axes of the layer's first input, batch included, or None if not known."""
    try:
        shape = keras.tree.flatten(layer.input)[0].shape
    except AttributeError:
        # Not called in a functional model. Then only a layer with `build` knows.
        shape = (layer.get_build_config() or {}).get("input_shape") or ()
        if shape and isinstance(shape[0], (list, tuple)):
            shape = shape[0]
    return len(shape) or None


_normalizes = _works_along(_axis, "normalises")

# Every layer class of Keras 3.12 to 3.15 that can fail, and when it does. What is not
# here treats examples independently whatever its arguments, or runs code given to it
# (Lambda, Activation, RNN cells, ...), which only the trial run can judge.
_CHECKS = {
    keras.layers.AugMix: _contains_equalization,
    keras.layers.BatchNormalization: _batch_normalization,
    keras.layers.CategoryEncoding: _counts_rows,
    keras.layers.Concatenate: _works_along(_axis, "puts the rows of its inputs one after another"),
    keras.layers.CutMix: _mixes_images,
    keras.layers.Discretization: _counts_rows,
    keras.layers.EinsumDense: _einsum_dense,
    keras.layers.Equalization: _equalization,
    keras.layers.GroupNormalization: _normalizes,
    keras.layers.Hashing: _counts_rows,
    keras.layers.IntegerLookup: _counts_rows,
    keras.layers.LayerNormalization: _normalizes,
    keras.layers.MelSpectrogram: _mel_spectrogram,
    keras.layers.MixUp: _mixes_images,
    keras.layers.MultiHeadAttention: _works_along(
        lambda layer: layer.attention_axes or (), "attends"
    ),
    keras.layers.RMSNormalization: _normalizes,
    keras.layers.RNN: _stateful,
    keras.layers.RandAugment: _contains_equalization,
    keras.layers.Softmax: _works_along(_axis, "normalises"),
    keras.layers.SpectralNormalization: _spectral_normalization,
    keras.layers.StringLookup: _counts_rows,
    keras.layers.TextVectorization: _text_vectorization,
    keras.layers.UnitNormalization: _normalizes,
}
