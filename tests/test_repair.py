"""The repaired copy: valid, independent, and otherwise the same model."""

import keras
import numpy as np
import pytest
from keras import layers, ops

from keras_dp.errors import IncompatibleModelError
from keras_dp.independence import couples_examples
from keras_dp.repair import fix
from keras_dp.validation import validate


def _sequential(*made, shape=(6,), **kwargs):
    return keras.Sequential([keras.Input(shape), *made], **kwargs)


def _randomize(model):
    """Weights that no two variables share, so that a mix-up shows."""
    rng = np.random.default_rng(7)
    for variable in model.variables:
        if keras.backend.is_float_dtype(variable.dtype):
            variable.assign(rng.uniform(0.5, 1.5, variable.shape))
    return model


def _state(model):
    return [(id(v), v.numpy().copy()) for v in model.variables]


def _fixed(model):
    """`fix(model)`, with all checks that hold for every model."""
    before, flags = _state(model), [(id(x), x.trainable) for x in model._flatten_layers()]
    fixed = fix(model)
    for (id_before, value), (id_after, value_after) in zip(before, _state(model), strict=True):
        assert id_before == id_after
        np.testing.assert_array_equal(value, value_after)
    assert flags == [(id(x), x.trainable) for x in model._flatten_layers()]

    assert not fixed.compiled
    assert [p for p in validate(fixed) if p.layer] == []
    assert couples_examples(fixed) is False
    assert not {id(v) for v in model.variables} & {id(v) for v in fixed.variables}
    assert not {id(x) for x in model._flatten_layers()} & {id(x) for x in fixed._flatten_layers()}
    assert len(fixed.trainable_variables) == len(model.trainable_variables)
    return fixed


def _assert_same_weights(model, fixed):
    """All weights but the moving statistics of replaced layers, by layer name."""
    for layer in model.layers:
        twin = fixed.get_layer(layer.name)
        if isinstance(twin, layers.GroupNormalization) and type(layer) is not type(twin):
            expected = {"gamma": layer.gamma, "beta": layer.beta}
            for name, variable in expected.items():
                if variable is None:
                    assert getattr(twin, name) is None
                else:
                    np.testing.assert_array_equal(variable.numpy(), getattr(twin, name).numpy())
        elif isinstance(layer, keras.Model):
            _assert_same_weights(layer, twin)
        else:
            assert type(layer) is type(twin)
            for a, b in zip(layer.variables, twin.variables, strict=True):
                np.testing.assert_array_equal(a.numpy(), b.numpy())
        if not isinstance(layer, layers.InputLayer):
            assert layer.trainable == twin.trainable


# --- what comes in place of batch normalization -----------------------------------------------


def test_number_of_groups():
    """The largest divisor up to 32 with 4 channels or more in a group (by hand)."""
    expected = {3: 1, 4: 1, 6: 1, 8: 2, 10: 2, 24: 6, 62: 2, 64: 16, 96: 24, 128: 32, 1280: 32}
    inputs = [keras.Input((2, channels)) for channels in expected]
    outputs = [layers.BatchNormalization(name=f"norm{x.shape[-1]}")(x) for x in inputs]
    fixed = fix(keras.Model(inputs, outputs))
    assert {n: fixed.get_layer(f"norm{n}").groups for n in expected} == expected


def test_the_replacement_normalises_within_the_example():
    """Against the formula of Wu and He (2018), section 3, written out."""
    model = _randomize(_sequential(layers.BatchNormalization(epsilon=0.1), shape=(5, 5, 8)))
    fixed = _fixed(model)
    x = np.random.default_rng(0).normal(size=(3, 5, 5, 8)).astype("float32")
    grouped = x.reshape(3, 25, 2, 4)
    mean = grouped.mean(axis=(1, 3), keepdims=True)
    std = np.sqrt(grouped.var(axis=(1, 3), keepdims=True) + 0.1)
    norm = model.layers[0]
    expected = ((grouped - mean) / std).reshape(x.shape) * norm.gamma.numpy() + norm.beta.numpy()
    np.testing.assert_allclose(fixed(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "axis"), [((8,), -1), ((8,), 1), ((5, 8), -1), ((8, 5), 1), ((8, 4, 4), -3)]
)
def test_ranks_and_axes(shape, axis):
    model = _randomize(_sequential(layers.BatchNormalization(axis=axis), shape=shape))
    (norm,) = _fixed(model).layers
    assert norm.groups == 2
    x = np.random.default_rng(0).normal(size=(3, *shape)).astype("float32")
    channels_last = np.moveaxis(x, axis, -1).reshape(3, -1, 2, 4)
    mean = channels_last.mean(axis=(1, 3), keepdims=True)
    std = np.sqrt(channels_last.var(axis=(1, 3), keepdims=True) + norm.epsilon)
    expected = ((channels_last - mean) / std).reshape(3, -1, 8)
    expected = expected * model.layers[0].gamma.numpy() + model.layers[0].beta.numpy()
    result = np.moveaxis(norm(x).numpy(), axis, -1).reshape(3, -1, 8)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)


def test_settings_are_kept():
    norm = layers.BatchNormalization(
        epsilon=0.02,
        center=False,
        gamma_regularizer="l2",
        gamma_constraint="non_neg",
        dtype="mixed_float16",
        name="norm",
    )
    (twin,) = _fixed(_sequential(norm, shape=(5, 8))).layers
    assert type(twin) is layers.GroupNormalization
    assert (twin.name, twin.epsilon, twin.center, twin.scale) == ("norm", 0.02, False, True)
    assert twin.beta is None and twin.dtype_policy.name == "mixed_float16"
    assert isinstance(twin.gamma_regularizer, keras.regularizers.L2)
    assert isinstance(twin.gamma_constraint, keras.constraints.NonNeg)


def test_frozen_batch_normalization_stays():
    model = _randomize(
        _sequential(
            layers.BatchNormalization(name="frozen", trainable=False),
            layers.BatchNormalization(name="training"),
        )
    )
    fixed = _fixed(model)
    assert [type(x) for x in fixed.layers] == [
        layers.BatchNormalization,
        layers.GroupNormalization,
    ]
    _assert_same_weights(model, fixed)


def test_one_value_in_an_example_cannot_be_normalised():
    with pytest.raises(IncompatibleModelError, match="only' .BatchNorm.*single value"):
        fix(_sequential(layers.BatchNormalization(name="only"), shape=(1,)))
    with pytest.raises(IncompatibleModelError, match="single value"):
        fix(_sequential(layers.BatchNormalization(), shape=(1, 1, 1)))
    _fixed(_sequential(layers.BatchNormalization(), shape=(4, 4, 1)))
    _fixed(_sequential(layers.BatchNormalization(), shape=(None, 1)))


# --- how models are put together ---------------------------------------------------------------


def test_functional_with_branches_operations_and_dictionaries():
    inputs = {"a": keras.Input((8, 8, 4), name="a"), "b": keras.Input((3,), name="b")}
    x = layers.Conv2D(8, 3, name="conv")(inputs["a"])
    x = layers.ReLU()(layers.BatchNormalization(name="bn")(x)) * 2.0 + 1.0
    x = ops.mean(x, axis=(1, 2))
    x = layers.Concatenate()([x, layers.Dense(4, name="dense")(inputs["b"])])
    model = keras.Model(inputs, {"y": layers.Dense(1, name="y")(x), "x": x}, name="branched")
    fixed = _fixed(_randomize(model))
    _assert_same_weights(model, fixed)
    assert fixed.name == "branched"
    batch = {"a": np.ones((2, 8, 8, 4), "float32"), "b": np.ones((2, 3), "float32")}
    outputs = fixed(batch)
    assert outputs["y"].shape == (2, 1) and outputs["x"].shape == (2, 12)


def test_shared_layer_stays_one_layer():
    norm, dense = layers.BatchNormalization(name="norm"), layers.Dense(8, name="dense")
    inputs = keras.Input((8,))
    x = norm(dense(norm(dense(inputs))))
    fixed = _fixed(_randomize(keras.Model(inputs, layers.Dense(1, name="end")(x))))
    assert len(fixed.layers) == 4
    assert len(fixed.trainable_variables) == 6


def test_layer_shared_between_nested_models_stays_one_layer():
    norm = layers.BatchNormalization(name="norm")
    first = _sequential(layers.Dense(8, name="one"), norm, name="first")
    inner = keras.Input((8,))
    second = keras.Model(inner, layers.Dense(8, name="two")(norm(inner)), name="second")
    inputs = keras.Input((6,))
    outputs = norm(second(second(first(inputs))))
    model = _randomize(keras.Model(inputs, outputs))
    fixed = _fixed(model)
    _assert_same_weights(model, fixed)
    twins = [m.get_layer("norm") for m in (fixed, fixed.get_layer("first"))]
    assert twins[0] is twins[1] is fixed.get_layer("second").get_layer("norm")


def test_wrapped_batch_normalization():
    model = keras.Sequential(
        [
            keras.Input((5, 6)),
            layers.TimeDistributed(layers.BatchNormalization(), name="plain"),
            layers.TimeDistributed(
                _sequential(layers.Dense(8), layers.BatchNormalization(), name="inner"), name="deep"
            ),
        ]
    )
    fixed = _fixed(_randomize(model))
    assert type(fixed.get_layer("plain").layer) is layers.GroupNormalization
    inner, twin = model.get_layer("deep").layer, fixed.get_layer("deep").layer
    _assert_same_weights(inner, twin)


def test_stateful_layers_start_anew_and_take_any_batch_size():
    inputs = keras.Input(batch_shape=(2, 5, 3))
    x = layers.LSTM(4, return_sequences=True, stateful=True, name="lstm")(inputs)
    both = layers.Bidirectional(layers.GRU(4, stateful=True), name="both")
    model = _randomize(keras.Model(inputs, layers.Dense(1)(both(x))))
    fixed = _fixed(model)
    x = np.random.default_rng(0).normal(size=(2, 5, 3)).astype("float32")
    np.testing.assert_allclose(model(x), fixed(x), rtol=1e-6)  # the first batch, without state
    assert fixed(np.zeros((7, 5, 3))).shape == (7, 1)
    np.testing.assert_allclose(fixed(x), fixed(x))


def test_masked_sequences():
    inputs = keras.Input((5,), dtype="int32")
    x = layers.Embedding(9, 8, mask_zero=True)(inputs)
    x = layers.LSTM(3)(layers.BatchNormalization()(x))
    fixed = _fixed(keras.Model(inputs, x))
    padded = np.array([[1, 2, 3, 0, 0]])
    assert fixed(padded).shape == (1, 3)
    _, mask = fixed.layers[-1].input
    assert mask.dtype == "bool"


def test_applications():
    made = {
        52: keras.applications.MobileNetV2(weights=None, input_shape=(32, 32, 3), alpha=0.35),
        53: keras.applications.ResNet50(weights=None, input_shape=(32, 32, 3), classes=10),
    }
    for num_norms, model in made.items():
        fixed = fix(_randomize(model))  # which runs it on trial
        assert validate(fixed, probe=False) == []
        _assert_same_weights(model, fixed)
        kinds = [type(x).__name__ for x in fixed.layers]
        assert kinds.count("GroupNormalization") == num_norms
    assert couples_examples(made[52]) is True


def test_backbone_under_a_new_head_with_frozen_part():
    backbone = keras.applications.MobileNetV2(
        weights=None, include_top=False, input_shape=(32, 32, 3), alpha=0.35
    )
    for layer in backbone.layers[:-20]:
        layer.trainable = False
    inputs = keras.Input((32, 32, 3))
    x = layers.GlobalAveragePooling2D()(backbone(inputs))
    model = keras.Model(inputs, layers.Dense(10, name="head")(x))
    fixed = fix(model)
    assert validate(fixed, probe=False) == []
    _assert_same_weights(model, fixed)
    norms = [x for x in backbone.layers if isinstance(x, layers.BatchNormalization)]
    assert {x.trainable for x in norms} == {True, False}
    for norm in norms:
        twin = fixed.layers[1].get_layer(norm.name)
        assert isinstance(twin, layers.GroupNormalization if norm.trainable else type(norm))


# --- what is kept ------------------------------------------------------------------------------


def test_model_without_problems_is_copied_exactly():
    def centred(x):
        return x - ops.mean(x, axis=1, keepdims=True)

    scale = 3.0
    frozen = layers.Dense(6, name="frozen", trainable=False)
    half = layers.Dense(6, name="half")
    lora = layers.Dense(6, name="lora")
    quantized = layers.Dense(6, name="quantized")
    model = _sequential(
        layers.Normalization(mean=1.0, variance=2.0, name="normalization"),
        layers.Lambda(lambda x: np.float32(scale) * centred(x), name="lambda"),
        layers.Dropout(0.5, seed=3, name="dropout"),
        frozen,
        half,
        lora,
        quantized,
        layers.UnitNormalization(name="unit"),
        layers.Dense(1, dtype="mixed_bfloat16", kernel_regularizer="l2", name="end"),
    )
    half.bias.trainable = False
    lora.enable_lora(2)
    _randomize(model)
    quantized.quantize("int8")
    fixed = _fixed(model)
    x = np.random.default_rng(0).normal(size=(4, 6)).astype("float32")
    np.testing.assert_array_equal(model(x), fixed(x))
    np.testing.assert_array_equal(model(x, training=True), fixed(x, training=True))
    names = [[v.path.split("/", 1)[1] for v in m.trainable_variables] for m in (model, fixed)]
    assert names[0] == names[1]
    assert len(fixed.losses) == len(model.losses) == 1
    assert fixed.layers[-1].dtype_policy.name == "mixed_bfloat16"


def test_adapted_layers_keep_what_they_have_learned():
    numbers = layers.Normalization(name="numbers")
    numbers.adapt(np.array([[1.0, 2.0], [5.0, 3.0]], "float32"))
    words = layers.StringLookup(output_mode="one_hot", name="words")
    words.adapt(["cat", "dog", "cat"])
    ids = layers.IntegerLookup(output_mode="one_hot", name="ids")
    ids.adapt([70, 80, 80])
    text = layers.TextVectorization(output_mode="tf_idf", name="text")
    text.adapt(["cat dog", "dog bird", "dog"])
    inputs = [
        keras.Input((2,), name="a"),
        keras.Input((1,), dtype="string", name="b"),
        keras.Input((), dtype="string", name="c"),
        keras.Input((1,), dtype="int64", name="d"),
    ]
    encoded = [layer(x) for layer, x in zip((numbers, words, text, ids), inputs)]
    x = layers.Concatenate()(encoded)
    model = keras.Model(inputs, layers.Dense(2)(layers.BatchNormalization(name="bn")(x)))
    fixed = fix(model)
    batch = [
        ops.convert_to_tensor(np.array([[1.0, 9.0]], "float32")),
        ops.convert_to_tensor([["dog"]]),
        ops.convert_to_tensor(["bird dog"]),
        ops.convert_to_tensor([[80]]),
    ]
    before = [keras.Model(m.inputs, m.get_layer("bn").input)(batch) for m in (model, fixed)]
    np.testing.assert_array_equal(*before)
    assert np.count_nonzero(before[0]) == 2 + 1 + 2 + 1


def test_flags_of_parents_and_children_are_kept():
    inner = _sequential(
        layers.Dense(8, name="one"), layers.BatchNormalization(name="norm"), name="inner"
    )
    inner.trainable = False
    inner.get_layer("norm").trainable = True
    model = _sequential(inner, layers.Dense(1, name="end"))
    assert len(model.trainable_variables) == 4  # of the norm, and of the end
    fixed = _fixed(model)
    _assert_same_weights(model, fixed)
    assert fixed.get_layer("inner").trainable is False
    assert fixed.get_layer("inner").get_layer("norm").trainable is True


def test_compiled_and_trained_model():
    model = _sequential(layers.Dense(8), layers.BatchNormalization(), layers.Dense(1))
    model.compile("adam", "mse", metrics=["mae"])
    model.fit(np.ones((8, 6)), np.ones((8, 1)), verbose=0)
    fixed = _fixed(model)
    _assert_same_weights(model, fixed)
    assert model.compiled
    fixed.compile("sgd", "mse")
    fixed.fit(np.ones((8, 6)), np.ones((8, 1)), verbose=0)


class Scale(layers.Layer):
    """A custom layer, not registered with Keras."""

    def __init__(self, factor, **kwargs):
        super().__init__(**kwargs)
        self.factor = factor
        self.inner = layers.Dense(6)
        self.drop = layers.Dropout(0.1)

    def build(self, shape):
        self.inner.build(shape)
        self.w = self.add_weight(shape=(), initializer="ones")  # a name of its own each time

    def call(self, x):
        return self.drop(self.inner(x)) * self.w * self.factor

    def compute_output_shape(self, shape):
        return shape

    def get_config(self):
        return {**super().get_config(), "factor": self.factor}


def test_custom_layers_are_copied_with_their_parts():
    model = _sequential(
        layers.TimeDistributed(Scale(3.0), name="td"),
        layers.BatchNormalization(name="norm"),
        Scale(2.0, name="scale"),
        shape=(5, 6),
    )
    fixed = _fixed(_randomize(model))
    _assert_same_weights(model, fixed)
    assert fixed.get_layer("scale").factor == 2.0


def test_model_classes():
    class WithStep(keras.Model):
        def train_step(self, data):
            return super().train_step(data)

    class Fancy(keras.Sequential):
        def train_step(self, data):
            return super().train_step(data)

    inputs = keras.Input((6,))
    outputs = layers.Dense(1)(layers.BatchNormalization()(inputs))
    assert type(_fixed(WithStep(inputs, outputs))) is WithStep
    fancy = Fancy([keras.Input((6,)), layers.BatchNormalization()])
    assert type(_fixed(fancy)) is Fancy

    class OwnConstructor(keras.Model):
        def __init__(self, width):
            inputs = keras.Input((width,))
            super().__init__(inputs, layers.Dense(1)(layers.BatchNormalization()(inputs)))

    assert isinstance(_fixed(OwnConstructor(6)), keras.Function)

    class OwnConstructorAndStep(OwnConstructor):
        def train_step(self, data):
            return super().train_step(data)

    with pytest.raises(IncompatibleModelError, match="constructor of its own.*train_step"):
        fix(OwnConstructorAndStep(6))


# --- what cannot be repaired ---------------------------------------------------------------------


class Subclassed(keras.Model):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm
        self.end = layers.Dense(1)

    def call(self, x):
        return self.end(self.norm(x))


def test_subclassed_models_are_refused():
    model = Subclassed(layers.BatchNormalization(name="norm"))
    with pytest.raises(ValueError, match="is not built"):
        fix(model)
    model(np.ones((2, 3)))
    with pytest.raises(IncompatibleModelError, match="it is subclassed") as error:
        fix(model)
    assert "norm' (BatchNormalization)" in str(error.value) and "freeze" in str(error.value)
    fine = Subclassed(layers.LayerNormalization())
    fine(np.ones((2, 3)))
    with pytest.raises(IncompatibleModelError, match="need no repair"):
        fix(fine)


def test_what_is_left_over_is_named():
    model = _sequential(layers.BatchNormalization(), layers.Softmax(axis=0, name="across"))
    with pytest.raises(IncompatibleModelError, match="cannot repair all.*\n.*across' .Softmax"):
        fix(model)

    def centre(x):
        return x - ops.mean(x, axis=0)

    model = _sequential(layers.BatchNormalization(), layers.Lambda(centre, name="centre"))
    with pytest.raises(IncompatibleModelError, match="cannot repair all.*\n.*centre' .Lambda"):
        fix(model)


def test_batch_normalization_made_by_a_custom_layer_is_named():
    class Block(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.norm = layers.BatchNormalization(name="hidden")

        def build(self, shape):
            self.norm.build(shape)

        def call(self, x):
            return self.norm(x)

    with pytest.raises(IncompatibleModelError, match="hidden' .BatchNormalization"):
        fix(_sequential(Block()))


def test_layers_that_cannot_be_copied_are_named():
    class Silent(layers.Layer):
        def __init__(self, function):
            super().__init__(name="silent")
            self.function = function

        def call(self, x):
            return self.function(x)

    with pytest.raises(IncompatibleModelError, match="cannot copy layer .*silent' .Silent"):
        fix(_sequential(layers.BatchNormalization(), Silent(ops.relu)))


def test_variable_shared_by_two_layers_is_refused():
    first = layers.Dense(6, use_bias=False)

    class Tied(layers.Layer):
        tied = True

        def build(self, shape):
            self.kernel = first.kernel if self.tied else self.add_weight(shape=(6, 6))

        def call(self, x):
            return x @ self.kernel

    model = _sequential(first, layers.BatchNormalization(), Tied())
    assert len(model.trainable_variables) == 3
    Tied.tied = False  # as in a copy that cannot know of the other layer
    with pytest.raises(IncompatibleModelError, match="share one variable"):
        fix(model)


def test_sequential_without_a_graph_is_refused():
    class NoShape(layers.Layer):
        def call(self, x):
            return {"x": x}["x"]

        def compute_output_spec(self, *args, **kwargs):
            raise NotImplementedError

    model = keras.Sequential([NoShape(), layers.BatchNormalization(name="norm")])
    model(np.ones((2, 3), "float32"))
    with pytest.raises(IncompatibleModelError, match="no graph(.|\n)*norm' .BatchNorm"):
        fix(model)


def test_model_must_be_a_model():
    with pytest.raises(TypeError, match="Expected a keras.Model, received"):
        fix(layers.Dense(2))
