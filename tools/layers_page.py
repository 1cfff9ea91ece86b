"""Writes docs/layers.md: how every layer of Keras is trained privately.

    python -m tools.layers_page            rewrite the page
    python -m tools.layers_page --check    fail if the page is out of date

One layer of each class in ``keras.layers`` is made and built, and keras_dp is asked what it does
with it: its rules, its checks. Written down here is only what the classes do not tell: arguments
without which a layer cannot be made, and when a check refuses.
"""

import argparse
import functools
import inspect
import pathlib
import sys
import textwrap

import keras
from keras import layers as L

from keras_dp import _keras, validation
from keras_dp.clipping import rules

PAGE = pathlib.Path(__file__).resolve().parents[1] / "docs" / "layers.md"

# The page is written with this version; older ones have fewer layers.
KERAS = "3.15"

# Layers that need arguments, or an input of a certain kind, with trained weights or layers inside.
_MADE = {
    "AdditiveAttention": lambda: (L.AdditiveAttention(), [(3, 4), (3, 4)]),
    "Attention": lambda: (L.Attention(use_scale=True), [(3, 4), (3, 4)]),
    "Bidirectional": lambda: (L.Bidirectional(L.LSTM(2)), (3, 4)),
    "Conv1D": lambda: (L.Conv1D(2, 2), (6, 3)),
    "Conv1DTranspose": lambda: (L.Conv1DTranspose(2, 2), (6, 3)),
    "Conv2D": lambda: (L.Conv2D(2, 2), (6, 6, 3)),
    "Conv2DTranspose": lambda: (L.Conv2DTranspose(2, 2), (6, 6, 3)),
    "Conv3D": lambda: (L.Conv3D(2, 2), (4, 4, 4, 2)),
    "Conv3DTranspose": lambda: (L.Conv3DTranspose(2, 2), (4, 4, 4, 2)),
    "ConvLSTM1D": lambda: (L.ConvLSTM1D(2, 2), (2, 4, 2)),
    "ConvLSTM2D": lambda: (L.ConvLSTM2D(2, 2), (2, 4, 4, 2)),
    "ConvLSTM3D": lambda: (L.ConvLSTM3D(2, 2), (2, 4, 4, 4, 2)),
    "Dense": lambda: (L.Dense(2), (4,)),
    "DepthwiseConv1D": lambda: (L.DepthwiseConv1D(2), (6, 3)),
    "DepthwiseConv2D": lambda: (L.DepthwiseConv2D(2), (6, 6, 3)),
    "EinsumDense": lambda: (L.EinsumDense("abc,cd->abd", output_shape=(3, 2)), (3, 4)),
    "Embedding": lambda: (L.Embedding(5, 2), (3,)),
    "GRU": lambda: (L.GRU(2), (3, 4)),
    "GRUCell": lambda: (L.GRUCell(2), None),
    "GroupNormalization": lambda: (L.GroupNormalization(2), (4,)),
    "GroupQueryAttention": lambda: (L.GroupQueryAttention(2, 2, 1), [(3, 4), (3, 4)]),
    "LSTM": lambda: (L.LSTM(2), (3, 4)),
    "LSTMCell": lambda: (L.LSTMCell(2), None),
    "MultiHeadAttention": lambda: (L.MultiHeadAttention(2, 2), [(3, 4), (3, 4)]),
    "Pipeline": lambda: (L.Pipeline([L.Rescaling(2.0)]), (4,)),
    "RNN": lambda: (L.RNN(L.LSTMCell(2)), (3, 4)),
    "ReversibleEmbedding": lambda: (L.ReversibleEmbedding(5, 2), (3,)),
    "STFTSpectrogram": lambda: (L.STFTSpectrogram(frame_length=8), (32, 1)),
    "SeparableConv1D": lambda: (L.SeparableConv1D(2, 2), (6, 3)),
    "SeparableConv2D": lambda: (L.SeparableConv2D(2, 2), (6, 6, 3)),
    "SimpleRNN": lambda: (L.SimpleRNN(2), (3, 4)),
    "SimpleRNNCell": lambda: (L.SimpleRNNCell(2), None),
    "SpectralNormalization": lambda: (L.SpectralNormalization(L.Dense(2)), (4,)),
    "StackedRNNCells": lambda: (L.StackedRNNCells([L.LSTMCell(2), L.LSTMCell(2)]), None),
    "TimeDistributed": lambda: (L.TimeDistributed(L.Dense(2)), (3, 4)),
}

# Arguments of layers without trained weights.
_ARGUMENTS = {
    "Activation": ["relu"],
    "CategoryEncoding": [4],
    "CenterCrop": [2, 2],
    "Discretization": [[0.0, 1.0]],
    "Dot": [1],
    "HashedCrossing": [4],
    "Hashing": [4],
    "Permute": [(1,)],
    "RandomCrop": [2, 2],
    "RandomPosterization": [4],
    "RandomTranslation": [0.1, 0.1],
    "RepeatVector": [2],
    "Reshape": [(-1,)],
    "Resizing": [2, 2],
}

# What cannot be made here, or says nothing as it stands, and what holds for it.
_BY_HAND = {
    "FlaxLayer": "not tested; its weights are those of a Flax module",
    "JaxLayer": "not tested; its weights are those of a JAX function",
    "Lambda": "runs a function given to it; weights that it reads turn the model to `vectorized`",
    "TFSMLayer": "not tested; its weights are those of a SavedModel",
    "TorchModuleWrapper": "needs the PyTorch backend",
}

# The classes that others are derived from, and the input of a model.
_NO_LAYERS = ("InputLayer", "Layer", "Wrapper")

_SINGLE_VALUES = (
    '`output_mode` is `"multi_hot"`, `"count"` or `"tf_idf"` and each example is a single value'
)

# When the checks of keras_dp/validation.py refuse, where they do not always.
WHEN = {
    L.BatchNormalization: "it is trained (`keras_dp.fix` repairs); frozen, it is fine",
    L.CategoryEncoding: _SINGLE_VALUES,
    L.Concatenate: "`axis` is 0",
    L.Discretization: _SINGLE_VALUES,
    L.EinsumDense: "its equation does not keep the batch axis in front",
    L.GroupNormalization: "`axis` is 0",
    L.Hashing: _SINGLE_VALUES,
    L.IntegerLookup: _SINGLE_VALUES,
    L.LayerNormalization: "`axis` holds 0",
    L.MelSpectrogram: "`top_db` is finite: the limit is that of the loudest example",
    L.MultiHeadAttention: "`attention_axes` holds 0",
    L.RMSNormalization: "`axis` holds 0",
    L.RNN: "`stateful=True`",
    L.Softmax: "`axis` holds 0",
    L.StringLookup: _SINGLE_VALUES,
    L.TextVectorization: '`output_mode="int"` without `output_sequence_length`',
    L.UnitNormalization: "`axis` holds 0",
}

_SHAPES = ((8, 8, 3), (6, 3), (4,), (4, 4, 4, 2), (400,))

_TOP = f"""# Layers

How the layerwise backend finds the gradient of each example, for every layer of Keras that has
trained weights, runs other layers, or can let examples influence each other. This page is written
by `python -m tools.layers_page`, which asks the code, with Keras {KERAS}.

- **rule**: a file that knows the layer; fast, and no gradient of an example is built unless it is
  small. Layers with LoRA have rules of their own, which train the two factors alone.
- **its layers**: the layer has no weights itself; the layers in it have their own line here.
- **fallback**: the layer is run again for each example and differentiated; always right, and
  slower. So it is with subclasses of these layers and layers of your own, unless
  `keras_dp.register_rule` says otherwise. A layer that draws random numbers while it is called
  cannot be run again: such a model trains with `backend="vectorized"`.
- **refused**: training stops before the first step, and the message says what to do.

| layer | gradients | refused when |
|---|---|---|
"""

_REST = """
The other layers have no trained weights and treat every example on its own:
"""


def classes():
    """Every layer class of ``keras.layers`` by its name; aliases are left out."""
    found = {}
    for name, value in sorted(vars(L).items()):
        if inspect.isclass(value) and issubclass(value, L.Layer):
            found.setdefault(value, []).append(name)
    return {_name(c, names): c for c, names in found.items()}


def example(name, layer_class):
    """A built layer of the class, or None where _BY_HAND or _NO_LAYERS speak for it.

    Raises:
      LookupError: when it cannot be made or built: somebody has to decide how.
    """
    if name in _BY_HAND or name in _NO_LAYERS:
        return None
    if name in _MADE:
        layer, shape = _MADE[name]()
        if shape is None:
            layer.build((None, 4))
        elif isinstance(shape, list):
            inputs = [keras.Input(s) for s in shape]
            layer(inputs) if isinstance(layer, L.Attention) else layer(*inputs)
        else:
            layer(keras.Input(shape, dtype="int32" if isinstance(layer, L.Embedding) else None))
        return layer
    layer = _made(name, layer_class)
    if layer is not None and _is_built(layer):
        return layer
    what = "made without arguments" if layer is None else "built by any of the inputs tried"
    raise LookupError(
        f"keras.layers.{name} cannot be {what}. Say in tools/layers_page.py how, and find out "
        "whether it needs a rule or a check."
    )


@functools.cache
def rows():
    """``{name: (gradients, refused when)}`` of the layers that need a line."""
    table = {}
    for name, layer_class in classes().items():
        if name in _BY_HAND:
            table[name] = (_BY_HAND[name], "")
            continue
        layer = example(name, layer_class)
        if layer is None:
            continue
        line = (_gradients(layer), _refused(layer))
        if any(line):
            table[name] = line
    return table


def rest():
    """The names of the layers that need no line."""
    return sorted(classes().keys() - rows().keys() - set(_NO_LAYERS))


def page():
    """The page as it has to be."""
    table = [f"| {name} | {how} | {when} |\n" for name, (how, when) in rows().items()]
    names = ", ".join(f"`{name}`" for name in rest()) + "."
    return _TOP + "".join(table) + _REST + textwrap.fill(names, 100) + "\n"


def _name(layer_class, names):
    return layer_class.__name__ if layer_class.__name__ in names else names[0]


def _made(name, layer_class):
    """The layer with the arguments written down, with none, or with a number; else None."""
    for arguments in [_ARGUMENTS[name]] if name in _ARGUMENTS else ([], [0.1], [2]):
        try:
            return layer_class(*arguments)
        except (TypeError, ValueError):
            continue
    return None


def _is_built(layer):
    """Calls the layer on inputs of several kinds until one fits; whether one did."""
    kinds = [(keras.Input(shape),) for shape in _SHAPES]
    kinds += [([keras.Input((4,)), keras.Input((4,))],)]
    kinds += [(keras.Input((1,), dtype=dtype),) for dtype in ("int32", "string")]
    kinds += [((keras.Input((1,), dtype="int32"), keras.Input((1,), dtype="int32")),)]
    for arguments in kinds:
        try:
            layer(*arguments)
        except Exception:
            continue  # the next one may be what the layer wants
        return True
    return False


def _gradients(layer):
    """How the weights' gradients are found, or "" where there are none to be found."""
    if validation.layer_problem(layer) is not None:
        return ""
    if hasattr(layer, "state_size") and not isinstance(layer, L.RNN):
        return "as part of the RNN that runs it"
    rule = rules.rule_for(layer)
    if rule is not None:
        return f"rule: {_link(rule)}" + _lora(layer, rule)
    inside = [one for one in _keras.all_layers(layer) if one is not layer]
    if rules.is_whole(layer):
        return "fallback, for it and all that is in it"
    if _keras.own_trainable_variables(layer):
        return "fallback"
    another = rules.call_while_recording(layer)
    if another is not None:
        return f"its layers, called in another way while they are recorded: {_link(another)}"
    if isinstance(layer, L.Wrapper | L.Pipeline) or layer.trainable_variables:
        kinds = {type(one).__name__ for one in inside if one.trainable_variables}
        return "its layers" + (f": {', '.join(sorted(kinds))}" if _is_fixed(layer) else "")
    return ""


def _is_fixed(layer):
    """Whether the class itself, and not its user, decides which layers are inside."""
    return isinstance(layer, L.MultiHeadAttention | L.GroupQueryAttention)


def _lora(layer, rule):
    if not hasattr(layer, "enable_lora"):
        return ""
    layer.enable_lora(2)
    return "; with LoRA too" if rules.rule_for(layer) is rule else "; fallback with LoRA"


def _link(rule):
    """A link to the file that a rule, or what replaces a call, is written in."""
    function = rule.forms if isinstance(rule, rules.Rule) else rule
    path = pathlib.PurePosixPath(*function.__module__.split(".")).with_suffix(".py")
    return f"[{path.name}](../{path})"


def _refused(layer):
    """When the checks refuse the layer, or ""."""
    checks = [c for c in validation._CHECKS if isinstance(layer, c)]
    if not checks:
        return ""
    if checks[0] in WHEN:
        return WHEN[checks[0]]
    reason, _ = validation.layer_problem(layer)
    return f"always: it {reason}"


def main():
    """Writes the page, or says whether it is up to date."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if it differs")
    arguments = parser.parse_args()
    if not keras.__version__.startswith(KERAS + "."):
        sys.exit(f"The page is written with Keras {KERAS}; this is Keras {keras.__version__}.")
    if not arguments.check:
        PAGE.write_text(page())
    elif PAGE.read_text() != page():
        sys.exit("docs/layers.md is out of date. Run: python -m tools.layers_page")


if __name__ == "__main__":
    main()
