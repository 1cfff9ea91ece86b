"""What a step must compute and move, counted from the shapes of a model's layers.

Counted are multiplications with an addition as two operations, and the bytes of every tensor that
a layer reads or writes, once, in float32; activations are taken to be computed where the layer
before them writes. So it is less than any program does: what stays in a cache is counted, what is
copied, padded or kept for later is not.
"""

import dataclasses
import math

import keras

_FLOAT = 4


@dataclasses.dataclass
class Work:
    """Operations and bytes of a part of a step.

    Attributes:
      flops: floating-point operations.
      bytes: bytes read or written.
    """

    flops: float
    bytes: float

    def seconds(self, machine):
        """The least time on a machine with these peaks: no part can be hidden behind another."""
        return max(self.flops / machine.flops, self.bytes / machine.bandwidth)


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A weight that multiplies D inputs into P outputs at T positions of an example."""

    positions: int
    depth: int
    width: int

    @property
    def products(self):
        """Multiplications an example."""
        return self.positions * self.depth * self.width


@dataclasses.dataclass
class LayerWork:
    """One layer of a model, for one example.

    Attributes:
      layer: the layer.
      matrices: {variable path: :class:`Matrix`}.
      other_products: multiplications of a product without weights (attention).
      activations: numbers it reads and writes in a forward pass, the weights left out.
      first: whether it is called on the data, which need no gradient.
    """

    layer: object
    matrices: dict
    other_products: int
    activations: int
    first: bool

    @property
    def weights(self):
        """Number of trained weights."""
        return sum(math.prod(v.shape) for v in self.layer.trainable_variables)


def layers_of(model):
    """The work of every layer of a functional model.

    Args:
      model: a built ``keras.Model`` of layers that the zoo has.

    Returns:
      list of :class:`LayerWork`.

    Raises:
      ValueError: for a layer with a weight whose product is not known; names it.
    """
    found = []
    data = {id(tensor) for tensor in model.inputs}
    for layer in model.layers:
        if isinstance(layer, keras.layers.InputLayer):
            continue
        matrices, other, inner = _products(layer)
        inputs = {id(tensor): tensor for tensor in keras.tree.flatten(layer.input)}
        if isinstance(layer, keras.layers.Flatten | keras.layers.Reshape):
            activations = 0  # the same numbers, seen otherwise
        elif isinstance(layer, keras.layers.Embedding):
            activations = 2 * _size(layer.output)
        else:
            activations = sum(map(_size, inputs.values())) + _size(layer.output) + inner
        first = not data.isdisjoint(inputs)
        found.append(LayerWork(layer, matrices, other, activations, first))
    return found


def _products(layer):
    """Matrices by variable path, other products, and numbers passed on inside the layer."""
    name = type(layer).__name__
    if isinstance(layer, keras.layers.Dense):
        return {layer.kernel.path: Matrix(_positions(layer.output), *layer.kernel.shape)}, 0, 0
    if isinstance(layer, keras.layers.Conv2D):
        *window, width = layer.kernel.shape
        matrix = Matrix(_positions(layer.output), math.prod(window), width)
        return {layer.kernel.path: matrix}, 0, 0
    if isinstance(layer, keras.layers.MultiHeadAttention):
        return _attention(layer)
    if isinstance(layer, keras.layers.LSTM):
        steps = layer.input.shape[1]
        kernels = (layer.cell.kernel, layer.cell.recurrent_kernel)
        # Gates and state of every time step are written and read.
        inner = 2 * steps * 6 * layer.units
        return {kernel.path: Matrix(steps, *kernel.shape) for kernel in kernels}, 0, inner
    if isinstance(layer, keras.layers.Embedding) or name == "LearnedPosition":
        return {}, 0, 0
    unknown = [v.path for v in layer.trainable_variables if len(v.shape) > 1]
    if unknown:
        raise ValueError(
            f"benchmarks/work.py does not know what {name} '{layer.name}' multiplies by {unknown}: "
            "add the class to _products."
        )
    return {}, 0, 0


def _attention(layer):
    source = keras.tree.flatten(layer.input)[0]
    positions, dim = source.shape[1:]
    heads, size = layer.num_heads, layer.key_dim
    matrices = {
        dense.kernel.path: Matrix(positions, dim, heads * size)
        for dense in (layer._query_dense, layer._key_dense, layer._value_dense)
    }
    matrices[layer._output_dense.kernel.path] = Matrix(positions, heads * size, dim)
    # Queries by keys and probabilities by values.
    other = 2 * positions**2 * heads * size
    # Queries, keys, values and what the heads found; scores and probabilities.
    inner = 2 * (4 * positions * heads * size + 2 * heads * positions**2)
    return matrices, other, inner


def _positions(tensor):
    return math.prod(tensor.shape[1:-1])


def _size(tensor):
    return math.prod(tensor.shape[1:])


def plain(layers, batch):
    """The parts of a step without privacy: forward, two of backward, update; for every layer.

    Args:
      layers: list of :class:`LayerWork`.
      batch: examples of a step.

    Returns:
      list of :class:`Work`.
    """
    parts = []
    for layer in layers:
        products = layer.other_products + sum(m.products for m in layer.matrices.values())
        moved, weights = _FLOAT * batch * layer.activations, _FLOAT * layer.weights
        parts.append(Work(2 * batch * products, moved + weights))
        if not layer.first:
            # To the inputs: reads both sides' values and writes gradients. A product without
            # weights has two factors to find the gradients of.
            parts.append(Work(2 * batch * (products + layer.other_products), 2 * moved + weights))
        parts += [_weight_gradient(matrix, batch) for matrix in layer.matrices.values()]
        # Read the weight and its gradient, write the weight.
        parts.append(Work(2 * layer.weights, 3 * weights))
    return parts


def _weight_gradient(matrix, batch):
    moved = batch * matrix.positions * (matrix.depth + matrix.width) + matrix.depth * matrix.width
    return Work(2 * batch * matrix.products, _FLOAT * moved)


def private(layers, batch, kept):
    """The parts that a private step adds to a plain one, drawing the noise left out.

    Args:
      layers: list of :class:`LayerWork`.
      batch: examples of a step.
      kept: paths of the variables whose gradient is made and kept for every example; of the
        other matrices the norm is found without it.

    Returns:
      list of :class:`Work`; one that is saved has negative numbers.
    """
    parts = []
    for layer in layers:
        for path, matrix in layer.matrices.items():
            size = matrix.depth * matrix.width
            sides = matrix.positions * (matrix.depth + matrix.width)
            if path in kept:
                # Written once, read for the norm and for the sum, which saves the weight gradient.
                parts.append(Work(4 * batch * size, 3 * _FLOAT * batch * size))
            elif matrix.positions == 1:
                parts.append(Work(2 * batch * sides, _FLOAT * batch * sides))
            else:
                gram = 2 * batch * matrix.positions * (sides + matrix.positions)
                parts.append(Work(gram, _FLOAT * batch * sides))
        others = layer.weights - sum(m.depth * m.width for m in layer.matrices.values())
        if others:
            # Biases, scales, tables: the gradient of the output is read once more.
            moved = batch * _size(layer.layer.output)
            parts.append(Work(2 * moved, _FLOAT * moved))
        # The noise is read and added.
        parts.append(Work(layer.weights, 2 * _FLOAT * layer.weights))
    return parts
