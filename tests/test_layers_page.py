"""docs/layers.md: every layer of Keras is decided on, and the page says what the code does."""

import keras
import pytest

from keras_dp import testing, validation
from keras_dp.clipping import rules
from tools import layers_page as page

CLASSES = page.classes()
IS_NEWEST = keras.__version__.startswith(page.KERAS + ".")


@pytest.mark.parametrize("name", CLASSES)
def test_every_layer_is_decided_on(name):
    """A layer that nobody knows has no trained weights, no layers inside, and no check."""
    layer = page.example(name, CLASSES[name])  # raises where nobody said how to make it
    if layer is None or name in page.rows():
        return
    assert not layer.trainable_variables, f"{name} has weights and no line"
    assert validation.layer_problem(layer) is None
    assert not any(isinstance(layer, c) for c in validation._CHECKS)


def test_the_page_is_up_to_date():
    text = page.PAGE.read_text()
    if IS_NEWEST:
        assert text == page.page(), "run: python -m tools.layers_page"
    for name, (how, when) in page.rows().items():
        assert f"| {name} | {how} | {when} |\n" in text, "run: python -m tools.layers_page"
    for name in page.rest():
        assert f"`{name}`" in text, "run: python -m tools.layers_page"


def test_every_check_has_its_words():
    """Where the example is not refused, the page has to say when the layer is."""
    for name, layer_class in CLASSES.items():
        if layer_class in validation._CHECKS and layer_class not in page.WHEN:
            assert validation.layer_problem(page.example(name, layer_class)) is not None, name
    assert page.WHEN.keys() <= validation._CHECKS.keys()


def test_every_rule_has_its_line():
    lines = page.rows()
    for name, layer_class in CLASSES.items():
        if layer_class in rules._RULES:
            assert lines[name][0].startswith("rule: "), name


def test_what_is_written_by_hand_is_needed():
    """Nothing here is the name of no layer; nothing made by hand lacks weights or layers."""
    if IS_NEWEST:
        by_hand = [*page._MADE, *page._ARGUMENTS, *page._BY_HAND, *page._NO_LAYERS]
        assert set(by_hand) <= CLASSES.keys()
        assert len(by_hand) == len(set(by_hand))
    for name in page._MADE.keys() & CLASSES.keys():
        layer = page.example(name, CLASSES[name])
        assert layer.trainable_variables or isinstance(layer, keras.layers.Pipeline), name


def test_a_new_layer_that_needs_arguments_is_noticed():
    class Unknown(keras.layers.Layer):
        def __init__(self, first, second):
            super().__init__()

    with pytest.raises(LookupError, match="Unknown cannot be made without arguments"):
        page.example("Unknown", Unknown)


def test_a_new_layer_that_cannot_be_called_is_noticed():
    class Unknown(keras.layers.Layer):
        def call(self, x):
            raise ValueError("wants something else")

    with pytest.raises(LookupError, match="Unknown cannot be built by any"):
        page.example("Unknown", Unknown)


def _with_one_input_and_weights():
    for name in page._MADE.keys() & CLASSES.keys():
        layer, shape = page._MADE[name]()
        one_input = not isinstance(shape, list) or isinstance(layer, keras.layers.Attention)
        refused = validation.layer_problem(layer) is not None
        if shape is not None and one_input and not refused and name != "Pipeline":
            yield name


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(_with_one_input_and_weights()))
def test_the_lines_are_true(name):
    """Each of these layers has the gradients of a loop over single examples."""
    layer, shape = page._MADE[name]()
    dtype = "int32" if isinstance(layer, keras.layers.Embedding) else None
    testing.check_rule(layer, shape, dtype=dtype)
