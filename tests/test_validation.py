"""What is refused and what is not: every layer class of Keras has been decided."""

import inspect
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
from keras import layers, ops

from keras_dp.errors import IncompatibleModelError
from keras_dp.independence import couples_examples
from keras_dp.validation import Problem, require_valid, validate

VECTOR, SEQUENCE, IMAGE, VOLUME = (6,), (6, 4), (16, 16, 3), (6, 6, 6, 2)


class Case(NamedTuple):
    """A layer and what to put into it."""

    make: Any
    shape: tuple = VECTOR
    num_inputs: int = 1
    dtype: str = "float32"
    batch: int | None = None
    behind: tuple = ()

    def layer(self, name):
        return self.make(getattr(layers, name))

    def model(self, layer):
        inputs = [
            keras.Input(batch_shape=(self.batch, *self.shape), dtype=self.dtype)
            for _ in range(self.num_inputs)
        ]
        x = layer(*inputs) if isinstance(layer, ATTENTION) else layer(_single(inputs))
        for last in self.behind:
            x = last(x)
        if len(x.shape) < 2:
            x = ops.reshape(x, (-1, x.shape[0] or 1))
        return keras.Model(_single(inputs), layers.Dense(1)(ops.cast(x, "float32")))


ATTENTION = (layers.MultiHeadAttention, layers.GroupQueryAttention)


def _single(inputs):
    return inputs[0] if len(inputs) == 1 else inputs


class Applies(keras.Model):
    """For layers that a functional model cannot hold."""

    def __init__(self, layer, shape):
        super().__init__()
        self.layer = layer
        self.end = layers.Dense(1)
        self(np.zeros((2, *shape), "float32"))

    def call(self, x):
        return self.end(self.layer(x))


# --- every layer class of keras.layers, decided -------------------------------------------

# Treats examples independently whatever its arguments.
INDEPENDENT = {
    "ActivityRegularization": Case(lambda c: c(l2=0.1)),
    "AdaptiveAveragePooling1D": Case(lambda c: c(2), SEQUENCE),
    "AdaptiveAveragePooling2D": Case(lambda c: c(2), IMAGE),
    "AdaptiveAveragePooling3D": Case(lambda c: c(2), VOLUME),
    "AdaptiveMaxPooling1D": Case(lambda c: c(2), SEQUENCE),
    "AdaptiveMaxPooling2D": Case(lambda c: c(2), IMAGE),
    "AdaptiveMaxPooling3D": Case(lambda c: c(2), VOLUME),
    "Add": Case(lambda c: c(), num_inputs=2),
    "AdditiveAttention": Case(lambda c: c(), SEQUENCE, num_inputs=2),
    "AlphaDropout": Case(lambda c: c(0.5)),
    "Attention": Case(lambda c: c(use_scale=True), SEQUENCE, num_inputs=2),
    "AutoContrast": Case(lambda c: c(), IMAGE),
    "Average": Case(lambda c: c(), num_inputs=2),
    "AveragePooling1D": Case(lambda c: c(2), SEQUENCE),
    "AveragePooling2D": Case(lambda c: c(2), IMAGE),
    "AveragePooling3D": Case(lambda c: c(2), VOLUME),
    "CenterCrop": Case(lambda c: c(8, 8), IMAGE),
    "ContrastLimitedAdaptiveHistogramEqualization": Case(lambda c: c(), IMAGE),
    "Conv1D": Case(lambda c: c(2, 3), SEQUENCE),
    "Conv1DTranspose": Case(lambda c: c(2, 3), SEQUENCE),
    "Conv2D": Case(lambda c: c(2, 3), IMAGE),
    "Conv2DTranspose": Case(lambda c: c(2, 3), IMAGE),
    "Conv3D": Case(lambda c: c(2, 3), VOLUME),
    "Conv3DTranspose": Case(lambda c: c(2, 3), VOLUME),
    "Cropping1D": Case(lambda c: c(1), SEQUENCE),
    "Cropping2D": Case(lambda c: c(1), IMAGE),
    "Cropping3D": Case(lambda c: c(1), VOLUME),
    "Dense": Case(lambda c: c(2)),
    "DepthwiseConv1D": Case(lambda c: c(3), SEQUENCE),
    "DepthwiseConv2D": Case(lambda c: c(3), IMAGE),
    "Dot": Case(lambda c: c(axes=1), SEQUENCE, num_inputs=2),  # refuses axis 0 itself
    "Dropout": Case(lambda c: c(0.5, noise_shape=(1, 6))),
    "ELU": Case(lambda c: c()),
    "Embedding": Case(lambda c: c(2, 3)),
    "Flatten": Case(lambda c: c(), IMAGE),
    "GRUCell": Case(lambda c: layers.RNN(c(2)), SEQUENCE),
    "GaussianDropout": Case(lambda c: c(0.5)),
    "GaussianNoise": Case(lambda c: c(0.5)),
    "GlobalAveragePooling1D": Case(lambda c: c(), SEQUENCE),
    "GlobalAveragePooling2D": Case(lambda c: c(), IMAGE),
    "GlobalAveragePooling3D": Case(lambda c: c(), VOLUME),
    "GlobalMaxPooling1D": Case(lambda c: c(), SEQUENCE),
    "GlobalMaxPooling2D": Case(lambda c: c(), IMAGE),
    "GlobalMaxPooling3D": Case(lambda c: c(), VOLUME),
    "GroupQueryAttention": Case(lambda c: c(2, 2, 1), SEQUENCE, num_inputs=2),
    "Identity": Case(lambda c: c()),
    "LSTMCell": Case(lambda c: layers.RNN(c(2)), SEQUENCE),
    "LeakyReLU": Case(lambda c: c()),
    "Masking": Case(lambda c: c(), SEQUENCE),
    "MaxPooling1D": Case(lambda c: c(), SEQUENCE),
    "MaxPooling2D": Case(lambda c: c(), IMAGE),
    "MaxPooling3D": Case(lambda c: c(), VOLUME),
    "Maximum": Case(lambda c: c(), num_inputs=2),
    "Minimum": Case(lambda c: c(), num_inputs=2),
    "Multiply": Case(lambda c: c(), num_inputs=2),
    "Normalization": Case(lambda c: c(mean=1.0, variance=2.0)),
    "PReLU": Case(lambda c: c()),
    "Permute": Case(lambda c: c((2, 1)), SEQUENCE),
    "RandomBrightness": Case(lambda c: c(0.5, value_range=(-9, 9)), IMAGE),
    "RandomColorDegeneration": Case(lambda c: c(1.0), IMAGE),
    "RandomColorJitter": Case(lambda c: c((-9, 9), 0.5, 0.5, 0.5, 0.5), IMAGE),
    "RandomContrast": Case(lambda c: c(0.9, value_range=(-9, 9)), IMAGE),
    "RandomCrop": Case(lambda c: c(8, 8), IMAGE),
    "RandomElasticTransform": Case(lambda c: c(), IMAGE),
    "RandomErasing": Case(lambda c: c(), IMAGE),
    "RandomFlip": Case(lambda c: c(), IMAGE),
    "RandomGaussianBlur": Case(lambda c: c(), IMAGE),
    "RandomGrayscale": Case(lambda c: c(), IMAGE),
    "RandomHue": Case(lambda c: c(0.5), IMAGE),
    "RandomInvert": Case(lambda c: c(), IMAGE),
    "RandomPerspective": Case(lambda c: c(), IMAGE),
    "RandomPosterization": Case(lambda c: c(4), IMAGE),
    "RandomRotation": Case(lambda c: c(0.3), IMAGE),
    "RandomSaturation": Case(lambda c: c(0.5), IMAGE),
    "RandomSharpness": Case(lambda c: c(1.0), IMAGE),
    "RandomShear": Case(lambda c: c(0.3, 0.3), IMAGE),
    "RandomTranslation": Case(lambda c: c(0.3, 0.3), IMAGE),
    "RandomZoom": Case(lambda c: c(0.3), IMAGE),
    "ReLU": Case(lambda c: c()),
    "RepeatVector": Case(lambda c: c(3)),
    "Rescaling": Case(lambda c: c(2.0), IMAGE),
    "Reshape": Case(lambda c: c((2, 3))),
    "Resizing": Case(lambda c: c(8, 8), IMAGE),
    "ReversibleEmbedding": Case(lambda c: c(2, 3)),
    "STFTSpectrogram": Case(lambda c: c(frame_length=8, frame_step=4, fft_length=8), (64, 1)),
    "SeparableConv1D": Case(lambda c: c(2, 3), SEQUENCE),
    "SeparableConv2D": Case(lambda c: c(2, 3), IMAGE),
    "SimpleRNNCell": Case(lambda c: layers.RNN(c(2)), SEQUENCE),
    "Solarization": Case(lambda c: c(value_range=(-9, 9)), IMAGE),
    "SpatialDropout1D": Case(lambda c: c(0.5), SEQUENCE),
    "SpatialDropout2D": Case(lambda c: c(0.5), IMAGE),
    "SpatialDropout3D": Case(lambda c: c(0.5), VOLUME),
    "StackedRNNCells": Case(
        lambda c: layers.RNN(c([layers.LSTMCell(2), layers.GRUCell(2)])), SEQUENCE
    ),
    "Subtract": Case(lambda c: c(), num_inputs=2),
    "UpSampling1D": Case(lambda c: c(2), SEQUENCE),
    "UpSampling2D": Case(lambda c: c(2), IMAGE),
    "UpSampling3D": Case(lambda c: c(2), VOLUME),
    "ZeroPadding1D": Case(lambda c: c(1), SEQUENCE),
    "ZeroPadding2D": Case(lambda c: c(1), IMAGE),
    "ZeroPadding3D": Case(lambda c: c(1), VOLUME),
}

# Couples examples, or carries state, whatever its arguments.
REFUSED = {
    "AugMix": Case(lambda c: c(), IMAGE),
    "CutMix": Case(lambda c: c(), IMAGE),
    "Equalization": Case(lambda c: c(), IMAGE),
    "MixUp": Case(lambda c: c(), IMAGE),
    "RandAugment": Case(lambda c: c(), IMAGE),
    "SpectralNormalization": Case(lambda c: c(layers.Dense(2))),
}


def _normalization(fine_axis, *refused_axes):
    """Accepted and refused for a layer that normalises along `axis`."""
    fine = [Case(lambda c: c(), SEQUENCE), Case(lambda c: c(axis=fine_axis), SEQUENCE)]
    refused = [Case(lambda c, axis=axis: c(axis=axis), SEQUENCE, batch=4) for axis in refused_axes]
    return fine, refused


def _recurrent(shape, *args):
    fine = [Case(lambda c: c(*[a() if callable(a) else a for a in args]), shape)]
    refused = [
        Case(lambda c: c(*[a() if callable(a) else a for a in args], stateful=True), shape, batch=4)
    ]
    return fine, refused


def _encoding(shape=(), dtype="float32", **arguments):
    fine = [
        Case(lambda c: c(output_mode="one_hot", **arguments), shape, dtype=dtype),
        Case(lambda c: c(output_mode="multi_hot", **arguments), (2,), dtype=dtype),
    ]
    refused = [
        Case(lambda c: c(output_mode="multi_hot", **arguments), shape, dtype=dtype),
        Case(lambda c: c(output_mode="count", **arguments), shape, dtype=dtype),
    ]
    return fine, refused


MEL = dict(fft_length=16, sequence_stride=8, sequence_length=16, sampling_rate=1000, num_mel_bins=4)

# Depends on its arguments: those that are fine, and those that are refused.
DEPENDS = {
    "BatchNormalization": ([Case(lambda c: c(trainable=False))], [Case(lambda c: c())]),
    "CategoryEncoding": _encoding(num_tokens=2),
    "Concatenate": (
        [Case(lambda c: c(), num_inputs=2), Case(lambda c: c(axis=1), num_inputs=2)],
        [Case(lambda c: c(axis=0), num_inputs=2), Case(lambda c: c(axis=-2), num_inputs=2)],
    ),
    "ConvLSTM1D": _recurrent((3, 4, 2), 2, 2),
    "ConvLSTM2D": _recurrent((3, 4, 4, 2), 2, 2),
    "ConvLSTM3D": _recurrent((3, 4, 4, 4, 2), 2, 2),
    "Discretization": _encoding(bin_boundaries=[0.0, 1.0]),
    "EinsumDense": (
        [
            Case(lambda c: c("abc,cd->abd", output_shape=(None, 2)), SEQUENCE),
            Case(lambda c: c("...x,xy->...y", output_shape=2), SEQUENCE),
        ],
        [
            Case(lambda c: c("abc,cd->bad", output_shape=(None, 2)), SEQUENCE),
            Case(lambda c: c("abc,cd->bd", output_shape=2), SEQUENCE),
        ],
    ),
    "GRU": _recurrent(SEQUENCE, 2),
    "GroupNormalization": (
        [Case(lambda c: c(2), SEQUENCE), Case(lambda c: c(2, axis=1), SEQUENCE)],
        [Case(lambda c: c(2, axis=0), SEQUENCE, batch=4)],
    ),
    "Hashing": _encoding(num_bins=2, dtype="int32"),
    "IntegerLookup": _encoding(vocabulary=[0, 1], dtype="int64"),
    "LSTM": _recurrent(SEQUENCE, 2),
    "LayerNormalization": _normalization(1, 0, -3, [0, 2]),
    "MelSpectrogram": (
        [Case(lambda c: c(top_db=float("inf"), **MEL), (400,))],
        [Case(lambda c: c(top_db=1.0, **MEL), (400,))],
    ),
    "MultiHeadAttention": (
        [
            Case(lambda c: c(2, 2), IMAGE, num_inputs=2),
            Case(lambda c: c(2, 2, attention_axes=(1,)), IMAGE, num_inputs=2),
        ],
        [Case(lambda c: c(2, 2, attention_axes=0), IMAGE, num_inputs=2)],
    ),
    "RMSNormalization": _normalization(2, 0, -3),
    "RNN": _recurrent(SEQUENCE, lambda: layers.LSTMCell(2)),
    "SimpleRNN": _recurrent(SEQUENCE, 2),
    "Softmax": _normalization(1, 0, -3, [0, 2]),
    "StringLookup": _encoding(vocabulary=["a"], dtype="string"),
    "TextVectorization": (
        [
            Case(lambda c: c(vocabulary=["a"], output_sequence_length=4), (1,), dtype="string"),
            Case(lambda c: c(vocabulary=["a"], output_mode="multi_hot"), (1,), dtype="string"),
        ],
        [
            Case(
                lambda c: c(vocabulary=["a"]),
                (1,),
                dtype="string",
                behind=(layers.Embedding(3, 2), layers.GlobalAveragePooling1D()),
            )
        ],
    ),
    "UnitNormalization": _normalization(1, 0, -3, [0, 2]),
}

# Runs other layers or code given to it: they are looked at, or run on trial.
RUNS_WHAT_IT_IS_GIVEN = {
    "Activation",
    "Bidirectional",
    "FlaxLayer",
    "JaxLayer",
    "Lambda",
    "Layer",
    "Pipeline",
    "TFSMLayer",
    "TimeDistributed",
    "TorchModuleWrapper",
    "Wrapper",
}

# Independent by their source, but taking nothing that could be drawn for a trial run.
READ_ONLY = {
    "HashedCrossing",  # its modes, "int" and "one_hot", keep the rows
    "InputLayer",
    "MaxNumBoundingBoxes",  # pads or cuts the boxes of each image to a fixed number
}


def _present(table):
    """The entries for classes that the installed Keras has."""
    return {name: entry for name, entry in table.items() if hasattr(layers, name)}


def test_every_layer_class_is_decided():
    tables = [INDEPENDENT, REFUSED, DEPENDS, RUNS_WHAT_IT_IS_GIVEN, READ_ONLY]
    names = [name for table in tables for name in table]
    decided = {getattr(layers, name) for name in names if hasattr(layers, name)}
    exported = {c for c in vars(layers).values() if inspect.isclass(c)}
    classes = {c for c in exported if issubclass(c, layers.Layer)}
    undecided = sorted(c.__name__ for c in classes - decided)
    assert not undecided, f"decide whether these couple examples: {undecided}"
    assert len(names) == len(set(names))


def test_independent_layers_are_accepted_and_are_independent():
    seen = {}
    for name, case in _present(INDEPENDENT).items():
        model = case.model(case.layer(name))
        seen[name] = (validate(model, probe=False), couples_examples(model))
    assert seen == dict.fromkeys(seen, ([], False))


def test_layers_that_couple_are_refused():
    for name, case in REFUSED.items():
        layer = case.layer(name)
        model = Applies(layer, case.shape)
        (problem,) = validate(model, probe=False)
        assert problem.layer == (layer.path or layer.name)
        assert f"'{problem.layer}' ({name})" in problem.reason
    assert couples_examples(Applies(layers.Equalization(), IMAGE)) is True
    # Which image is blended with which is chance: at times each with itself.
    assert any(couples_examples(Applies(layers.MixUp(seed=s), IMAGE)) for s in range(5))


def test_layers_with_harmless_arguments_are_accepted():
    for name, (fine, _) in DEPENDS.items():
        for case in fine:
            model = case.model(case.layer(name))
            assert validate(model, probe=False) == [], name
            # Nothing is drawn for strings, and rows of two or three values look alike.
            decided = case.shape in (VECTOR, SEQUENCE, IMAGE)
            assert couples_examples(model) in ([False] if decided else [False, None]), name


def test_layers_with_harmful_arguments_are_refused():
    for name, (_, refused) in DEPENDS.items():
        for case in refused:
            layer = case.layer(name)
            model = case.model(layer)
            (problem,) = validate(model, probe=False)
            assert problem.layer == (layer.path or layer.name)
            assert f"'{problem.layer}' ({type(layer).__name__})" in problem.reason
            # State shows from batch to batch only, and one row of 0 and 1 looks like another.
            if case.dtype == "float32" and case.shape and not getattr(layer, "stateful", False):
                assert couples_examples(model) is True, name


# --- where the layer is --------------------------------------------------------------------


def _batch_norm_in_a_model_of(wrap, shape=(5, 6)):
    inputs = keras.Input(shape)
    return keras.Model(inputs, layers.Dense(1)(wrap(inputs)))


def _sequential(*made, shape=(6,)):
    return keras.Sequential([keras.Input(shape), *made])


class Block(layers.Layer):
    """A composite layer that makes its own parts, two of them in a list."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(6)
        self.norms = [layers.BatchNormalization(), layers.LayerNormalization()]

    def build(self, shape):
        for part in (self.dense, *self.norms):
            part.build(shape)

    def call(self, x):
        x = self.dense(x)
        for norm in self.norms:
            x = norm(x)
        return x


class MyBatchNormalization(layers.BatchNormalization):
    pass


HIDDEN = {
    "directly": lambda: layers.BatchNormalization(),
    "subclass": lambda: MyBatchNormalization(),
    "synchronized": lambda: layers.BatchNormalization(synchronized=True),
    "without gamma and beta": lambda: layers.BatchNormalization(center=False, scale=False),
    "time distributed": lambda: layers.TimeDistributed(layers.BatchNormalization()),
    "sequential": lambda: _sequential(layers.BatchNormalization(), shape=(5, 6)),
    "model in wrapper": lambda: layers.TimeDistributed(_sequential(layers.BatchNormalization())),
    "model in model": lambda: _sequential(
        _sequential(layers.Dense(3), layers.BatchNormalization(), shape=(5, 6)), shape=(5, 6)
    ),
    "pipeline": lambda: layers.Pipeline([layers.Rescaling(2.0), layers.BatchNormalization()]),
    "composite layer": lambda: Block(),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_batch_normalization_is_found_and_freezing_it_is_enough(name):
    made = HIDDEN[name]()
    model = _batch_norm_in_a_model_of(made)
    (problem,) = validate(model, probe=False)
    assert "BatchNormalization)" in problem.reason
    assert "batch_normalization" in problem.layer
    assert "keras_dp.fix(model)" in problem.repair and "trainable = False" in problem.repair
    made.trainable = False
    assert validate(model) == []


def test_the_flag_that_keras_reads_is_the_one_that_counts():
    """Same condition as in Keras: the statistics move exactly when there is a problem."""

    def moves(model, norm):
        before = norm.moving_mean.numpy()
        model(np.ones((2, 6), "float32"), training=True)
        return not np.array_equal(before, norm.moving_mean)

    def parent_frozen_then_child_thawed():
        norm = layers.BatchNormalization()
        parent = _sequential(norm)
        parent.trainable = False
        norm.trainable = True
        return parent, norm

    def added_to_a_frozen_parent():
        norm = layers.BatchNormalization()
        parent = keras.Sequential([keras.Input((6,))])
        parent.trainable = False
        parent.add(norm)
        return parent, norm

    def added_to_a_frozen_parent_that_is_frozen_again():
        parent, norm = added_to_a_frozen_parent()
        parent.trainable = False  # no news to Keras, so it does not spread
        return parent, norm

    def parent_frozen():
        norm = layers.BatchNormalization()
        parent = _sequential(norm)
        parent.trainable = False
        return parent, norm

    def only_the_weights_frozen():
        norm = layers.BatchNormalization()
        parent = _sequential(norm)
        norm.gamma.trainable = norm.beta.trainable = False
        return parent, norm

    def told_not_to_train_when_called():
        norm = layers.BatchNormalization()
        inputs = keras.Input((6,))
        return keras.Model(inputs, norm(inputs, training=False)), norm

    expected = {
        parent_frozen_then_child_thawed: True,
        added_to_a_frozen_parent: True,
        added_to_a_frozen_parent_that_is_frozen_again: True,
        parent_frozen: False,
        only_the_weights_frozen: True,
        told_not_to_train_when_called: True,
    }
    for make, trains in expected.items():
        part, norm = make()
        model = _sequential(layers.Dense(6), part, layers.Dense(1))
        assert moves(model, norm) is trains, make.__name__
        assert bool(validate(model, probe=False)) is trains, make.__name__


def test_a_layer_that_is_reported_hides_its_parts_and_is_reported_once():
    augment = layers.RandAugment(name="augment")
    model = Applies(augment, IMAGE)
    model.again = augment
    (problem,) = validate(model)
    assert problem.layer.endswith("augment")
    assert "input pipeline" in problem.repair


def test_bidirectional_stateful_names_both_directions():
    inputs = keras.Input(batch_shape=(2, 5, 3))
    both = layers.Bidirectional(layers.LSTM(2, stateful=True, name="rnn"))
    problems = validate(keras.Model(inputs, layers.Dense(1)(both(inputs))))
    assert {p.layer.rsplit("/")[-1] for p in problems} == {"forward_rnn", "backward_rnn"}


# --- variables ------------------------------------------------------------------------------


class Typed(layers.Layer):
    def __init__(self, dtype_of_weight):
        super().__init__(name="typed")
        self.dtype_of_weight = dtype_of_weight

    def build(self, shape):
        self.w = self.add_weight(
            shape=(1,), dtype=self.dtype_of_weight, initializer="ones", name="w", autocast=False
        )

    def call(self, x):
        return x * ops.cast(ops.real(self.w), "float32")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_float_weights_are_fine(dtype):
    assert validate(_sequential(Typed(dtype))) == []


@pytest.mark.parametrize("dtype", ["complex64", "int32"])
def test_other_trainable_weights_are_refused(dtype):
    model = _sequential(Typed(dtype), layers.Dense(1))
    (problem,) = validate(model)
    assert problem.layer.endswith("typed")
    assert f"'w' of dtype {dtype}" in problem.reason and "(Typed)" in problem.reason
    model.layers[0].w.trainable = False
    assert validate(model) == []


def test_float8_statistics_are_refused():
    model = _sequential(layers.Dense(8, name="dense"))
    model.layers[0].quantize("float8")
    problems = validate(model, probe=False)
    assert len(problems) == 6
    assert all("float8" in p.reason and "(Dense)" in p.reason for p in problems)


def test_quantized_kernels_with_lora_are_fine():
    model = _sequential(layers.Dense(8))
    model.layers[0].quantize("int8")
    model.layers[0].enable_lora(2)
    assert validate(model) == []


def test_nothing_to_train():
    model = _sequential(layers.Dense(2))
    model.trainable = False
    (problem,) = validate(model)
    assert problem.layer == ""
    assert "no trainable variable" in problem.reason and f"'{model.name}'" in problem.reason
    (problem,) = validate(_sequential(layers.ReLU()))
    assert problem.layer == ""


# --- the trial run --------------------------------------------------------------------------


def centred(x):
    return x - ops.mean(x, axis=0, keepdims=True)


def test_trial_run_finds_and_names_what_no_list_knows():
    model = _sequential(layers.Dense(3), layers.Lambda(centred, name="centre"), layers.Dense(1))
    assert validate(model, probe=False) == []
    (problem,) = validate(model)
    assert problem.layer.endswith("/centre")
    assert "centre' (Lambda)" in problem.reason


def test_trial_run_names_the_model_when_its_own_call_couples():
    class Centres(Applies):
        def call(self, x):
            return centred(super().call(x))

    model = Centres(layers.Dense(2), (6,))
    (problem,) = validate(model)
    assert problem.layer == "" and f"'{model.name}' (Centres)" in problem.reason


def test_trial_run_reads_the_given_spec():
    class TwoNumbers(Applies):
        def __init__(self):
            super().__init__(layers.Embedding(3, 2), (2,))

        def call(self, x):
            return centred(super().call(x))

    spec = keras.KerasTensor((None, 2), "int32")
    with pytest.raises(IncompatibleModelError):
        require_valid(TwoNumbers(), input_spec=spec)


def test_good_models_pass():
    assert validate(_sequential(layers.Dense(3, activation="relu"), layers.Dense(1))) == []
    norm = _sequential(layers.GroupNormalization(2), layers.Dropout(0.5), layers.Dense(1))
    assert validate(norm) == []
    assert require_valid(norm) is None


# --- messages -------------------------------------------------------------------------------


def test_problem_reads_as_a_sentence():
    problem = Problem("bn", "layer 'bn' (BatchNormalization) looks around", "freeze it")
    assert str(problem) == (
        "layer 'bn' (BatchNormalization) looks around; to repair it, freeze it."
    )
    with pytest.raises(AttributeError):
        problem.layer = "other"


def test_require_valid_lists_every_problem_with_its_repair():
    model = _sequential(
        layers.BatchNormalization(name="one"),
        layers.Softmax(axis=0, name="two"),
        layers.BatchNormalization(name="three"),
        layers.BatchNormalization(name="four"),
        layers.Dense(1),
    )
    one, two, three, four = validate(model)
    with pytest.raises(IncompatibleModelError) as error:
        require_valid(model)
    lines = str(error.value).splitlines()
    assert model.name in lines[0]
    assert lines[1:4] == [
        f"- {one}",
        f"  The same holds for: {three.layer}, {four.layer}.",
        f"- {two}",
    ]
    assert "keras_dp.fix(model)" in lines[1] and "axis" in lines[3]


def test_model_must_be_built():
    unbuilt = keras.Sequential([layers.Dense(2)], name="late")
    for check in (validate, require_valid):
        with pytest.raises(ValueError, match="'late' is not built.*keras.Input"):
            check(unbuilt)
    unbuilt(np.ones((2, 3), "float32"))
    assert validate(unbuilt) == []


def test_model_must_be_a_model():
    with pytest.raises(TypeError, match="Expected a keras.Model, received"):
        validate(layers.Dense(2))
