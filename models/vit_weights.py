"""Published ViT weights in the .npz files of the JAX implementation, by name."""

import numpy as np
from scipy import ndimage


def load_vit_weights(model, path, *, head=None):
    """Sets the weights of a ViT from a file of Dosovitskiy et al. or Steiner et al.

    The files (Dosovitskiy et al. 2021, arXiv 2010.11929; Steiner et al. 2021, arXiv 2106.10270)
    name their arrays ``embedding/kernel``, ``cls``, ``Transformer/posembed_input/pos_embedding``,
    ``Transformer/encoderblock_0/MlpBlock_3/Dense_0/kernel``, ``head/kernel`` and so on; the shapes
    are those of the Keras layers. For images of another size the position table is
    interpolated, bilinearly, as a picture (section 3.2 there). Nothing is guessed: every weight of
    the model comes from the file, and every array of the file that belongs to the encoder is used.

    Args:
      model: a model of ``models.vit`` or ``models.vit_variant``.
      path: the .npz file, or a dict of arrays.
      head: True reads the logits' weights, False leaves those of the model as they are. None reads
        them if the file has logits for as many classes.

    Returns:
      List of the names of the arrays that were not used, such as those of another head.

    Raises:
      ValueError: arrays that are missing, of another shape, or left over.
    """
    arrays = dict(path) if isinstance(path, dict) else _read(path)
    names = {layer.name for layer in model.layers}
    head = _has_same_head(model, arrays) if head is None and "logits" in names else bool(head)
    used = set()
    for layer in model.layers:
        if not layer.weights or (layer.name == "logits" and not head):
            continue
        values = []
        for weight, name in zip(layer.weights, _names(layer)):
            if name not in arrays:
                raise ValueError(f"{_described(path)} has no array {name} for {weight.path}.")
            value = arrays[name]
            if layer.name == "position":
                value = _positions(value, weight.shape, "token" in names)
            if tuple(value.shape) != tuple(weight.shape):
                raise ValueError(
                    f"{name} in {_described(path)} has the shape {tuple(value.shape)}, but "
                    f"{weight.path} has {tuple(weight.shape)}: the file is of another variant."
                )
            values.append(value)
            used.add(name)
        layer.set_weights(values)
    left = sorted(set(arrays) - used)
    unknown = [n for n in left if n.split("/")[0] not in ("head", "pre_logits", "cls")]
    if unknown:
        raise ValueError(
            f"{_described(path)} has arrays that {model.name} has no place for, such as "
            f"{unknown[0]}: the file is of another variant."
        )
    return left


def _read(path):
    with np.load(path) as file:
        return {name: np.asarray(file[name], np.float32) for name in file.files}


def _described(path):
    return "The dict of arrays" if isinstance(path, dict) else str(path)


def _has_same_head(model, arrays):
    kernel = arrays.get("head/kernel")
    return kernel is not None and kernel.shape == tuple(model.get_layer("logits").kernel.shape)


def _names(layer):
    """The names in the file of the layer's weights, in the layer's order."""
    both = ("kernel", "bias")
    whole = {
        "patches": [f"embedding/{w}" for w in both],
        "token": ["cls"],
        "position": ["Transformer/posembed_input/pos_embedding"],
        "norm": [f"Transformer/encoder_norm/{w}" for w in ("scale", "bias")],
        "logits": [f"head/{w}" for w in both],
    }
    if layer.name in whole:
        return whole[layer.name]
    block, _, part = layer.name.partition("_")
    prefix = f"Transformer/encoderblock_{int(block.removeprefix('block')) - 1}"
    if part == "attention":
        projections = ("query", "key", "value", "out")
        inner = [f"MultiHeadDotProductAttention_1/{p}/{w}" for p in projections for w in both]
    else:
        module, weights = {
            "attention_norm": ("LayerNorm_0", ("scale", "bias")),
            "mlp_norm": ("LayerNorm_2", ("scale", "bias")),
            "mlp1": ("MlpBlock_3/Dense_0", both),
            "mlp2": ("MlpBlock_3/Dense_1", both),
        }[part]
        inner = [f"{module}/{w}" for w in weights]
    return [f"{prefix}/{name}" for name in inner]


def _positions(table, shape, has_token):
    """The table ``[1, positions, dim]`` of the file for as many positions as the model has.

    The file's table begins with the class token's vector; a model without a token drops it.
    """
    table = table[0]
    side = int(np.sqrt(len(table) - 1))
    if side * side != len(table) - 1:
        raise ValueError(
            f"The position table of {len(table)} vectors is not that of a class token and a "
            "square of patches."
        )
    token, grid = table[:1], table[1:].reshape(side, side, -1)
    wanted = int(np.sqrt(shape[0] - has_token))
    if wanted != side:
        grid = ndimage.zoom(grid, (wanted / side, wanted / side, 1), order=1)
    grid = grid.reshape(-1, grid.shape[-1])
    return np.concatenate([token, grid]) if has_token else grid
