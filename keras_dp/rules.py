"""What rules for layers of one's own are made of; see :func:`keras_dp.register_rule`."""

from keras_dp.clipping.forms import Form, Layout, PerExample, Product, Rows
from keras_dp.clipping.rules.rule import Use, before_activation

__all__ = ["Form", "Layout", "PerExample", "Product", "Rows", "Use", "before_activation"]
