"""Refuses a forward pass that writes TensorFlow variables which Keras does not know.

Such state could carry one example past the clip into the gradients of others. What Keras knows
stays as it is, since the forward pass runs in a ``StatelessScope``.
"""

import contextlib

import keras
import tensorflow as tf

from keras_dp import _keras
from keras_dp.errors import IncompatibleModelError

# Operations that write a tf.Variable, a table or a queue.
_WRITES = (
    "Assign",
    "LookupTableImport",
    "LookupTableInsert",
    "LookupTableRemove",
    "QueueEnqueue",
    "ResourceScatter",
    "ResourceStridedSliceAssign",
)


@contextlib.contextmanager
def refused(model):
    """While open, a forward pass is traced; raises at the end when it has written a variable.

    Sees nothing of eager code: there, :func:`refuse` has to look before.
    """
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    before = len(graph.get_operations()) if graph else 0
    yield
    if graph:
        new = graph.get_operations()[before:]
        _require_none(model, _written([op.node_def for op in new], graph))


def refuse(model, specs):
    """Traces a forward pass of its own and raises when it writes a variable.

    Args:
      model: the model.
      specs: nest of ``tf.TensorSpec``, what it is called on.
    """

    @tf.function(autograph=False)
    def forward(x):
        with keras.StatelessScope():
            return _keras.call_model(model, x)

    graph = forward.get_concrete_function(specs).graph
    _require_none(model, _written(graph.as_graph_def().node, graph))


def _written(nodes, graph):
    """Names of the writing operations among the nodes and in the functions that they call."""
    found, seen, todo, library = set(), set(), list(nodes), None
    while todo:
        node = todo.pop()
        if node.op.startswith(_WRITES):
            found.add(node.op)
        called = {name for value in node.attr.values() for name in _functions(value)} - seen
        if called and library is None:
            library = {f.signature.name: f.node_def for f in graph.as_graph_def().library.function}
        for name in called:
            seen.add(name)
            todo += library.get(name, ())
    return sorted(found)


def _functions(value):
    """The functions that an attribute of a node names."""
    return [value.func.name] if value.HasField("func") else [f.name for f in value.list.func]


def _require_none(model, written):
    if written:
        raise IncompatibleModelError(
            f"The forward pass of model '{model.name}' writes a tf.Variable ({written}), which "
            "could carry examples past the clip. Keep state in self.add_weight(trainable=False), "
            "which private training leaves as it is, or take the assignment out of the call."
        )
