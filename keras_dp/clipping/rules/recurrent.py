"""LSTM, GRU and SimpleRNN: what needs no state is computed for all time steps before the loop.

z_t = x_t W + b is watched, and Keras's own loop runs on z. One backward pass through it gives
g_t, the gradient of z_t, at every time step at once, and with the state h_{t-1} that entered the
step the gradients of an example are

    W: sum_t x_t g_t^T        b: sum_t g_t        R: sum_t h_{t-1} g_t^T

for the recurrent weights R of an LSTM or SimpleRNN. In a GRU the reset gate r_t multiplies the
state before or after its product with the candidate's part of R; it is computed again from z_t
and h_{t-1}. At a masked step g_t is 0.
"""

import dataclasses

import keras
import tensorflow as tf

from keras_dp import _keras
from keras_dp.clipping.forms import PerExample, Product, blocks_between
from keras_dp.clipping.rules.rule import replaced


@dataclasses.dataclass
class _Run:
    """What ``record`` leaves for the forms.

    Attributes:
      inputs: the input ``[batch, time, features]`` after its dropout, or one for each gate.
      drops: the recurrent dropout mask ``[batch, units]`` or None, or one for each gate.
      initial: the state ``[batch, units]`` before the first step.
      outputs: the states after the steps ``[batch, time, units]``, in the order of the loop.
      mask: bool ``[batch, time]``, the steps that count, or None.
    """

    inputs: list
    drops: list
    initial: tf.Tensor
    outputs: tf.Tensor
    mask: tf.Tensor | None


def holds(layer):
    """Whether ``layer`` computes what its class says, with no weights but those of its cell."""
    cell = layer.cell
    if layer.unroll and layer.go_backwards and layer.zero_output_for_mask:
        return False  # Keras zeroes the outputs by the mask in the order of the input there
    own = {id(v) for v in _keras.own_trainable_variables(cell)}
    return (
        type(cell) is _CELLS[type(layer)]
        and "call" not in cell.__dict__
        and own == {id(v) for v in layer.trainable_variables}
    )


def record(use, call, watch):
    """Runs the layer with z watched; masks, order, states and outputs stay Keras's business."""
    layer = use.layer

    def inner_loop(sequences, initial_state, mask, training=False):
        cell = layer.cell
        inputs = _dropped(sequences, _input_masks(cell, sequences, training))
        drops = _recurrent_masks(cell, initial_state[0], training)
        bias = _input_bias(cell)
        z = _product(inputs, _value(cell, cell.kernel))
        z = watch(z if bias is None else z + bias)
        mask = _as_booleans(mask)
        step = _STEPS[type(cell)](cell, drops)
        # All states are wanted, and at a masked step the one before.
        with replaced(layer, cell=step, return_sequences=True, zero_output_for_mask=False):
            _, outputs, states = keras.layers.RNN.inner_loop(layer, z, initial_state, mask)
        outputs.set_shape([*z.shape[:2], cell.units])
        use.saved = _Run(inputs, drops, initial_state[0], outputs, mask)
        return *_as_returned(layer, outputs, states[0], mask), states

    with replaced(layer, inner_loop=inner_loop):
        return call(*use.args, **use.kwargs)


def plain(use, g):
    """LSTM and SimpleRNN: every gate reads x W + b + h R."""
    cell, run = use.layer.cell, use.saved
    yield from _input_forms(cell, run, g)
    if cell.recurrent_kernel.trainable:
        states = _dropped(_states_before(use.layer, run), run.drops)
        yield cell.recurrent_kernel, _kernel_form(cell.recurrent_kernel, states, g)
    if cell.use_bias and cell.bias.trainable:
        yield cell.bias, PerExample(_over_time(g), cell.bias.shape)


def gru(use, g):
    """GRU: the candidate reads r * (h R + b') where ``reset_after``, else (r * h) R."""
    cell, run = use.layer.cell, use.saved
    yield from _input_forms(cell, run, g)
    states = _dropped(_states_before(use.layer, run), run.drops)
    reset = _reset_gate(cell, use.outputs[0], states)
    recurrent = g
    if cell.reset_after:
        gates, candidate = g[..., : 2 * cell.units], g[..., 2 * cell.units :]
        recurrent = tf.concat([gates, tf.cast(reset, g.dtype) * candidate], -1)
    else:
        to_update, to_reset, to_candidate = (states * 3)[:3]
        states = [to_update, to_reset, reset * to_candidate]
    if cell.recurrent_kernel.trainable:
        yield cell.recurrent_kernel, _kernel_form(cell.recurrent_kernel, states, recurrent)
    if cell.use_bias and cell.bias.trainable:
        bias = _over_time(g)
        if cell.reset_after:
            bias = tf.stack([bias, _over_time(recurrent)], 1)
        yield cell.bias, PerExample(bias, cell.bias.shape)


# One step of each cell -----------------------------------------------------------------------


def _lstm_step(cell, drops):
    kernel = _value(cell, cell.recurrent_kernel)

    def step(z, states):
        h, c = states
        z += _product(_dropped(h, drops), kernel)
        enter, forget, candidate, leave = tf.split(z, 4, -1)
        enter, forget = cell.recurrent_activation(enter), cell.recurrent_activation(forget)
        c = forget * c + enter * cell.activation(candidate)
        h = cell.recurrent_activation(leave) * cell.activation(c)
        return h, [h, c]

    return step


def _gru_step(cell, drops):
    kernel, units = _value(cell, cell.recurrent_kernel), cell.units
    bias = _recurrent_bias(cell)
    gates, candidate = kernel[:, : 2 * units], kernel[:, 2 * units :]

    def step(z, states):
        h = states[0]
        inputs = _dropped(h, drops)
        if cell.reset_after:
            inner = _product(inputs, kernel)
            if bias is not None:
                inner += bias
            inner, of_candidate = inner[:, : 2 * units], inner[:, 2 * units :]
        else:
            inner = _product(inputs[:2], gates)
        update, reset = map(cell.recurrent_activation, tf.split(z[:, : 2 * units] + inner, 2, -1))
        if cell.reset_after:
            of_candidate *= reset
        else:
            of_candidate = tf.matmul(reset * inputs[-1], candidate)
        h = update * h + (1 - update) * cell.activation(z[:, 2 * units :] + of_candidate)
        return h, [h]

    return step


def _simple_step(cell, drops):
    kernel = _value(cell, cell.recurrent_kernel)

    def step(z, states):
        h = z + _product(_dropped(states[0], drops), kernel)
        if cell.activation is not None:
            h = cell.activation(h)
        return h, [h]

    return step


_CELLS = {
    keras.layers.LSTM: keras.layers.LSTMCell,
    keras.layers.GRU: keras.layers.GRUCell,
    keras.layers.SimpleRNN: keras.layers.SimpleRNNCell,
}
_STEPS = {
    keras.layers.LSTMCell: _lstm_step,
    keras.layers.GRUCell: _gru_step,
    keras.layers.SimpleRNNCell: _simple_step,
}


# Products and their gradients ----------------------------------------------------------------


def _value(cell, variable):
    # The loop would otherwise add up its gradient at every step.
    return tf.stop_gradient(keras.ops.convert_to_tensor(variable, dtype=cell.compute_dtype))


def _product(inputs, kernel):
    """One input times the kernel, or each gate's input times its part of the kernel."""
    parts = tf.split(kernel, len(inputs), -1)
    products = [_times(a, k) for a, k in zip(inputs, parts)]
    return products[0] if len(products) == 1 else tf.concat(products, -1)


def _times(a, matrix):
    if a.shape.rank == 2:
        return tf.matmul(a, matrix)
    product = tf.matmul(tf.reshape(a, [-1, matrix.shape[0]]), matrix)
    product = tf.reshape(product, tf.concat([tf.shape(a)[:2], matrix.shape[1:]], 0))
    product.set_shape([*a.shape[:2], matrix.shape[1]])
    return product


def _kernel_form(kernel, inputs, g):
    """The form of ``_product``; each gate is a block of its own where it has its own input."""
    count = len(inputs)
    a, b = tf.stack(inputs, 1), tf.stack(tf.split(g, count, -1), 1)
    layout = blocks_between(count, a.shape[-1], b.shape[-1])
    return Product(a, b, kernel.shape, layout)


def _input_forms(cell, run, g):
    if cell.kernel.trainable:
        yield cell.kernel, _kernel_form(cell.kernel, run.inputs, g)


def _over_time(g):
    return tf.reduce_sum(tf.cast(g, tf.float32), 1)


def _input_bias(cell):
    if not cell.use_bias:
        return None
    bias = _value(cell, cell.bias)
    return bias[0] if len(bias.shape) == 2 else bias


def _recurrent_bias(cell):
    return _value(cell, cell.bias)[1] if cell.use_bias and cell.reset_after else None


def _reset_gate(cell, z, states):
    """The reset gates of all steps ``[batch, time, units]``, from z and the states before them."""
    gate = slice(cell.units, 2 * cell.units)
    inner = _times((states * 2)[1], _value(cell, cell.recurrent_kernel)[:, gate])
    bias = _recurrent_bias(cell)
    return cell.recurrent_activation(z[..., gate] + (inner if bias is None else inner + bias[gate]))


# Dropout -------------------------------------------------------------------------------------


def _input_masks(cell, sequences, training):
    return _masks(cell, cell.dropout, cell.get_dropout_mask, sequences[:, 0], training)


def _recurrent_masks(cell, state, training):
    if getattr(cell, "implementation", 1) != 1:
        return [None]
    draw = cell.get_recurrent_dropout_mask
    return _masks(cell, cell.recurrent_dropout, draw, state, training)


def _masks(cell, rate, draw, like, training):
    """Keras's masks of this call, one or one for each gate; None where nothing is dropped."""
    count = getattr(cell, "dropout_mask_count", 1) if rate else 1
    if not training or not 0 < rate < 1:
        return [None] * count
    masks = draw(like)  # the cell keeps them until the loop has ended
    return masks if isinstance(masks, list) else [masks]


def _dropped(tensor, masks):
    """``tensor``, ``[batch, units]`` or ``[batch, time, units]``, under each mask."""
    if tensor.shape.rank == 3:
        masks = [m if m is None else m[:, None] for m in masks]
    return [tensor if m is None else tensor * m for m in masks]


# The loop's states and outputs ---------------------------------------------------------------


def _as_booleans(mask):
    """``[batch, time]``, or None."""
    if keras.tree.is_nested(mask):
        mask = mask[0]
    if mask is None:
        return None
    mask = tf.cast(mask, tf.bool)
    return mask if mask.shape.rank == 2 else tf.squeeze(mask, -1)


def _in_other_order(layer, tensor):
    """From the order of the inputs to that of the loop, or back."""
    return tf.reverse(tensor, [1]) if layer.go_backwards else tensor


def _states_before(layer, run):
    """The states that entered the steps ``[batch, time, units]``, in the order of the inputs."""
    first = run.initial[:, None]
    before = tf.concat([first, run.outputs[:, :-1]], 1)
    if run.mask is not None:
        # Until a step counts, the outputs are 0 and the state is the initial one.
        counted = tf.cumsum(
            tf.cast(_in_other_order(layer, run.mask), tf.int32), axis=1, exclusive=True
        )
        before = tf.where(counted[:, :, None] > 0, before, first)
    return _in_other_order(layer, before)


def _as_returned(layer, outputs, state, mask):
    """Keras's last output and outputs, from those of a loop that ran as in ``record``."""
    if mask is None:
        return state, outputs
    mask = _in_other_order(layer, mask)
    if layer.zero_output_for_mask:
        last = mask[:, -1:]
        outputs = tf.where(mask[:, :, None], outputs, tf.zeros_like(outputs))
    else:
        last = tf.reduce_any(mask, 1, keepdims=True)
    return tf.where(last, state, tf.zeros_like(state)), outputs
