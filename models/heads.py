"""Last layers: new ones for a new task, and what is frozen beneath them."""

import itertools
import re

import keras


def logits_layer(num_classes, init_scale=None, name="logits"):
    """A linear last layer whose first weights may be near zero.

    Mehta et al. 2022 (arXiv 2205.02973) find that initial weights at or near zero do best when the
    last layer is trained privately in few steps. At zero every class has the same probability at
    first, and no update is spent on undoing a random start.

    Args:
      num_classes: number of logits.
      init_scale: factor on Keras's usual LeCun-normal initial kernel, of standard deviation
        ``init_scale / sqrt(inputs)``; 0 for zeros. None for Keras's default (Glorot).
      name: the layer's name.

    Returns:
      ``keras.layers.Dense``; its bias starts at zero.

    Raises:
      ValueError: for a negative ``init_scale``.
    """
    if init_scale is None:
        kernel = "glorot_uniform"
    elif init_scale == 0:
        kernel = "zeros"
    elif init_scale > 0:
        kernel = keras.initializers.VarianceScaling(init_scale**2, "fan_in", "untruncated_normal")
    else:
        raise ValueError(f"init_scale must be at least 0 or None, received {init_scale!r}.")
    return keras.layers.Dense(num_classes, kernel_initializer=kernel, name=name)


def linear_head(input_shape, num_classes=10, init_scale=0.0, dropout=0.0, name="linear_head"):
    """A linear classifier of features that were computed before.

    Args:
      input_shape: shape of one example's features; more than one axis is flattened.
      num_classes: number of logits.
      init_scale: as in :func:`logits_layer`.
      dropout: share of the features that is dropped in training.
      name: the model's name.

    Returns:
      A ``keras.Model`` from features to logits ``[batch, num_classes]``.
    """
    inputs = x = keras.Input(input_shape)
    if len(input_shape) > 1:
        x = keras.layers.Flatten()(x)
    if dropout:
        x = keras.layers.Dropout(dropout)(x)
    return keras.Model(inputs, logits_layer(num_classes, init_scale)(x), name=name)


def replace_head(model, num_classes, init_scale=0.0):
    """The model with a new last layer; all other layers are the same objects.

    Args:
      model: a functional or sequential ``keras.Model`` whose last layer makes the logits.
      num_classes: number of new logits.
      init_scale: of the new layer, as in :func:`logits_layer`.

    Returns:
      A ``keras.Model`` that shares the layers of ``model`` up to the last.

    Raises:
      ValueError: when the last layer has several inputs, or is no layer of weights.
    """
    last = model.layers[-1]
    features = last.input
    if isinstance(features, (list, tuple, dict)) or not last.weights:
        raise ValueError(
            f"The last layer of {model.name}, {last.name}, is a {type(last).__name__}; one that "
            "makes logits of one input is needed, such as Dense. Cut the model by hand."
        )
    head = logits_layer(num_classes, init_scale)
    return keras.Model(model.input, head(features), name=model.name)


def parts(model):
    """The layers of a model in the groups in which they are frozen, from the input on.

    The layers of one stage of a ResNet, or of one block of a transformer, are one part, and every
    other layer is a part of its own, with or without weights; inputs do not count. A ResNet of
    version 2 with the large stem has the eleven parts that Kurakin et al. count: convolution,
    padding, pooling, four stages, norm, activation, mean and logits.

    Args:
      model: ``keras.Model``.

    Returns:
      List of ``(name, layers)``.
    """
    layers = [x for x in model.layers if not isinstance(x, keras.layers.InputLayer)]
    grouped = itertools.groupby(layers, key=_part_name)
    return [(name, list(members)) for name, members in grouped]


def freeze_parts(model, count):
    """Makes the weights of the first parts of a model constant; compile it afterwards.

    Args:
      model: ``keras.Model``.
      count: how many of :func:`parts`. Kurakin et al. 2022 (arXiv 2201.12328) freeze 6 of a
        ResNet-18, up to its third stage.

    Returns:
      List of the names of the frozen parts.

    Raises:
      ValueError: when there are not more parts than ``count``, or nothing is left to train.
    """
    found = parts(model)
    if not 0 <= count < len(found):
        raise ValueError(
            f"{model.name} has {len(found)} parts, {', '.join(name for name, _ in found)}; how "
            f"many to freeze must be at least 0 and below that. Received {count}."
        )
    for _, layers in found[:count]:
        for layer in layers:
            layer.trainable = False
    if not model.trainable_weights:
        raise ValueError(f"With {count} parts of {model.name} frozen nothing is left to train.")
    return [name for name, _ in found[:count]]


def _part_name(layer):
    match = re.match(r"(stage|block)\d+(?=_)", layer.name)
    return match.group() if match else layer.name
