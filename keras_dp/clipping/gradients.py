"""``clipped_gradients``: the clipped sum of a batch, in one pass or in microbatches."""

import warnings
import weakref

import keras
import tensorflow as tf

from keras_dp import _keras, padding, validation
from keras_dp.clipping import alignment, hidden_state, layerwise, passes, rows, units, vectorized
from keras_dp.clipping.clipped import ClippedGradients
from keras_dp.clipping.rules.rule import NotLayerwise
from keras_dp.clipping.settings import PrivacySettings
from keras_dp.errors import IncompatibleModelError
from keras_dp.pieces import Piece

# Keeps small float16 gradients of a single example's loss from rounding to zero.
_FLOAT16_LOSS_SCALE = 256.0


@tf.autograph.experimental.do_not_convert
def clipped_gradients(model, x, y=None, sample_weight=None, *, optimizer, loss=None):
    """The clipped gradient sum of one batch, for a custom training loop.

    Computes sum_i f_i g_i, where g_i is the gradient of example i's loss over all trainable
    weights and f_i the clip factor that brings its norm to at most ``l2_norm_clip``. The
    loss of an example is the model's loss on a batch of one. With ``augmentations`` of the
    optimizer it is the mean over so many copies of the example, with ``examples_per_user`` i
    is a user and the loss the mean over the rows of that user.

        clipped = keras_dp.clipped_gradients(model, x, y, optimizer=optimizer)
        optimizer.apply_gradients(clipped)   # adds the noise, divides, updates

    Args:
      model: a built or callable Keras model, compiled with a loss unless ``loss`` is given.
      x, y, sample_weight: the batch: tensors or arrays with the examples along the first
        axis, nested as the model takes them. A row of weight 0 has clip factor 0. With
        ``examples_per_user=k`` the rows of a user are k consecutive ones. x may be a
        :class:`keras_dp.pieces.Piece`; the optimizer then updates at the last piece of a draw.
      optimizer: the DP optimizer that will apply the result.
      loss: None, or a function ``loss(y, y_pred)`` (and ``sample_weight=`` when weights are
        given) in place of the compiled loss.

    Returns:
      :class:`ClippedGradients`. Private only after ``optimizer.apply_gradients``.

    Raises:
      IncompatibleModelError: when the model cannot be trained privately; names the layer.
      ValueError: when ``optimizer`` is no DP optimizer, or the rows are no whole users.
    """
    if not isinstance(getattr(optimizer, "privacy", None), PrivacySettings):
        raise ValueError(
            "optimizer must be a DP optimizer such as keras_dp.DPSGD. "
            f"Received: {type(optimizer).__name__}"
        )
    given = rows.flatten((x, y, sample_weight))[0][0]
    x, y, sample_weight = rows.to_tensors((x, y, sample_weight))
    return accumulate(model, x, y, sample_weight, optimizer=optimizer, loss=loss, given=given)


def accumulate(
    model,
    x,
    y,
    sample_weight,
    *,
    optimizer,
    loss=None,
    given=None,
    observe=None,
    jit_compile=False,
):
    """Clipped sums over all microbatches of a batch.

    Args:
      x, y, sample_weight: the batch; x may be a :class:`~keras_dp.pieces.Piece`.
      given: one tensor or array of the batch as the replica got it.
      observe: None or a function ``observe(result, batch)`` called after every pass, with a
        :class:`~keras_dp.clipping.units.Batch`.
      jit_compile: whether XLA compiles this part of the step by itself.
      Others as in :func:`clipped_gradients`.
    """
    privacy = optimizer.privacy
    piece = None
    if isinstance(x, Piece):
        piece, x = x, x.x
    _keras.build(model, x, y, sample_weight)
    rows_are = _require_valid(model, loss, x, privacy.backend)
    variables = list(model.trainable_variables)
    scale = _loss_scale(model, privacy)

    def run(data, real, counted):
        batch = units.grouped(data, real, counted, privacy)
        result = _one_pass(model, loss, variables, batch, privacy, scale, rows_are)
        if observe is not None:
            observe(result, batch)
        losses = result.losses if result.activity is None else result.losses + result.activity
        if batch.real is not None:
            losses = tf.boolean_mask(losses, batch.real)
        return result.sums, tf.reduce_sum(losses), tf.size(losses, tf.int64)

    data = (x, y, sample_weight)
    size = rows.count(data)
    per_user = privacy.examples_per_user or 1
    if per_user > 1:
        units.require_whole_users(size, per_user)
        size //= per_user
    per_pass = 1 if privacy.backend == "loop" else privacy.microbatch_size

    def all_passes():
        real = padding.real_rows(sample_weight)
        counted = _counted_rows(sample_weight)
        with _keras.losses_of_examples():
            if per_pass is None or (
                real is None and isinstance(size, int) and 0 < size <= per_pass
            ):
                return run(data, real, counted)
            return _microbatches(run, data, real, counted, size, per_user, per_pass, variables)

    if jit_compile:
        all_passes = tf.function(all_passes, autograph=False, jit_compile=True)
    sums, total, number = all_passes()
    mean = tf.math.divide_no_nan(total, tf.cast(number, tf.float32))
    number //= privacy.augmentations or 1
    return ClippedGradients(sums, variables, mean, number, optimizer, piece, given)


def _microbatches(run, data, real, counted, size, per_user, per_pass, variables):
    """Adds up passes over ``per_pass`` units; stops after the last row that is an example.

    Every pass has the same number of rows, so that nothing is compiled twice: the last one
    moves back into rows that were seen already, which then do not count.

    Args:
      size: the units, users or examples; int or scalar tensor.
      per_user: int, the rows of each.
    """
    zeros = [tf.zeros(v.shape) for v in variables]
    none = (zeros, tf.constant(0.0), tf.constant(0, tf.int64))
    if isinstance(size, int) and size == 0:  # a replica's share may have no rows
        return none
    width = min(size, per_pass) if isinstance(size, int) else tf.minimum(size, per_pass)
    even = isinstance(size, int) and size % width == 0
    last = size
    if real is not None:
        end = tf.reduce_max(tf.where(real, tf.range(size * per_user) + 1, 0))
        last = -(-end // per_user)
    steps = -(-last // tf.maximum(width, 1))

    def body(k, sums, total, number):
        start = tf.minimum(k * width, size - width)
        fresh = None if even else tf.repeat(start + tf.range(width) >= k * width, per_user)
        part = (start * per_user, width * per_user)
        more, loss, examples = run(
            rows.take(data, *part),
            _both(fresh, rows.take(real, *part)),
            _both(fresh, rows.take(counted, *part)),
        )
        sums = [s + m for s, m in zip(sums, more)]
        return k + 1, sums, total + loss, number + examples

    start = (tf.constant(0), *none)
    _, sums, total, number = tf.while_loop(
        lambda k, *_: k < steps, body, start, parallel_iterations=1
    )
    return sums, total, number


def _both(first, second):
    """Logical and, where None is always true."""
    if first is None or second is None:
        return second if first is None else first
    return first & second


def _one_pass(model, loss, variables, batch, privacy, scale, rows_are):
    """One pass by the backend that was asked for, or by the fastest that can."""
    if privacy.backend in ("auto", "layerwise"):
        try:
            if rows_are.aligned is False:
                raise NotLayerwise("a layer is called on rows that are not the examples, in order")
            result = layerwise.clipped_sums(
                model, loss, variables, batch, privacy, scale, rows_are.constants
            )
            if rows_are.aligned is None and privacy.backend == "auto":
                raise NotLayerwise(_unknown(model))
        except NotLayerwise as reason:
            if privacy.backend == "layerwise":
                raise IncompatibleModelError(
                    f"backend='layerwise' cannot train model '{model.name}': {reason}. "
                    "Use backend='auto' or backend='vectorized'."
                ) from reason
            _warn_once(
                model,
                f"keras_dp: model '{model.name}' trains with backend='vectorized', which is "
                f"slower, because {reason}.",
            )
            with tf.init_scope():
                hidden_state.refuse(model, _specs(batch.x))
        else:
            passes.keep_state(model, result.scope)
            unchanged = passes.changed_state(model, result.scope)
            if unchanged:
                _warn_once(
                    model,
                    f"keras_dp: {unchanged} stay as they are during private training: what a "
                    "forward pass writes there could depend on the data.",
                )
            return result
    loop = privacy.backend == "loop"
    layer = vectorized.unsupported_layer(model)
    if layer is not None and not loop:
        raise IncompatibleModelError(
            f"backend='vectorized' cannot train layer '{layer.path}': TensorFlow's vectorizer "
            "gives wrong results for grouped convolutions. Use backend='loop'."
        )
    return vectorized.clipped_sums(model, loss, variables, batch, privacy, scale, loop=loop)


def _unknown(model):
    """Why nothing shows that examples stay apart. Who names the backend vouches for it."""
    own = _keras.overrides_compute_loss(model)
    cause = "its compute_loss is its own" if own else "a trial run on random inputs failed"
    return (
        f"{cause}, so that nothing shows that its examples stay apart (if you know that they do, "
        "backend='layerwise' is faster)"
    )


def _require_valid(model, loss, x, backend):
    """Validates the model, whenever something that could change the answer is new.

    Returns:
      :class:`~keras_dp.clipping.alignment.Alignment`: whether the rows that the layerwise
      backend would record are the examples as far as a trial run can tell. Batches of one,
      which the other backends use, need no trial.
    """
    specs = _specs(x)
    trial = backend in ("auto", "layerwise")
    layers = tuple(
        (id(layer), layer.trainable, id(getattr(layer, "activation", None)))
        for layer in _keras.all_layers(model)
    )
    state = (trial, loss is None, str(specs))
    # A trace is rare and may follow any change; an eager step is neither, nor is what other
    # replicas trace into the same graph.
    eager = tf.executing_eagerly()
    graph = None if eager else tf.compat.v1.get_default_graph()
    if _validated.get(model, (None,))[0] != layers:
        _validated[model] = (layers, {})
    known = _validated[model][1]
    traced, rows_are = known.get(state, (None, None))
    if rows_are is not None and (eager or (traced is not None and traced() is graph)):
        return rows_are
    rows_are = alignment.Alignment(True)
    with tf.init_scope():
        validation.require_valid(model, probe=False)
        if eager or not trial:  # else the pass itself is looked at while it is traced
            hidden_state.refuse(model, specs)
        if trial:
            rows_are = alignment.rows_are_examples(model, list(model.trainable_variables), specs)
            if rows_are.aligned is not True:
                # Is it the model, or only the way in which it calls its layers?
                validation.require_valid(model, probe=True, input_spec=specs)
    if rows_are.aligned and loss is None and _keras.overrides_compute_loss(model):
        # It may look at what the whole batch left in an attribute.
        rows_are = alignment.Alignment(None, rows_are.constants)
    known[state] = (None if eager else weakref.ref(graph), rows_are)
    return rows_are


def _specs(x):
    return keras.tree.map_structure(
        lambda t: None if t is None else tf.TensorSpec(t.shape, t.dtype), x
    )


def _counted_rows(sample_weight):
    """Bool ``[batch]`` or None: the rows with a weight other than 0 for some output."""
    counted = None
    for weight in tf.nest.flatten(sample_weight):
        if weight is None:
            continue
        nonzero = tf.reshape(weight != 0, [tf.shape(weight)[0], -1])
        any_nonzero = tf.reduce_any(nonzero, 1)
        counted = any_nonzero if counted is None else counted | any_nonzero
    return counted


def _loss_scale(model, privacy):
    half = any(layer.compute_dtype == "float16" for layer in _keras.all_layers(model))
    return _FLOAT16_LOSS_SCALE * (privacy.augmentations or 1) if half else 1.0


_validated = weakref.WeakKeyDictionary()  # of models: their layers, and what else: the answer
_warned = weakref.WeakKeyDictionary()


def _warn_once(model, message):
    said = _warned.setdefault(model, set())
    if message not in said:
        said.add(message)
        warnings.warn(message, stacklevel=2)
