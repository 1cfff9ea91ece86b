"""The layerwise backend: one forward pass, one backward pass, no per-example gradients.

Steps 1 to 5 of a private step. The backward pass goes to the recorded layer outputs only;
from (input, output gradient) of every layer come each example's norm and, once the clip
factors are known, the clipped sum ("book-keeping", Bu et al. 2022, arXiv 2210.00038).
"""

import functools

import keras
import tensorflow as tf

from keras_dp import _keras
from keras_dp.clipping import clip, example_loss, fallback, forms, hidden_state, rows
from keras_dp.clipping.passes import Pass
from keras_dp.clipping.recording import Recorder
from keras_dp.clipping.rules.rule import NotLayerwise
from keras_dp.errors import IncompatibleModelError


def clipped_sums(model, loss, variables, batch, privacy, loss_scale, constants=None):
    """One pass over a batch.

    Args:
      model: the model.
      loss: None or the loss function to use instead of the compiled one.
      variables: the trainable variables, in the order of the result.
      batch: a :class:`~keras_dp.clipping.units.Batch`.
      privacy: the optimizer's :class:`~keras_dp.clipping.settings.PrivacySettings`.
      loss_scale: factor by which gradients are scaled up during the backward pass.
      constants: None or the :class:`~keras_dp.clipping.recording.Constants` of a trial run.

    Returns:
      A :class:`~keras_dp.clipping.passes.Pass`.

    Raises:
      NotLayerwise: when a part of the gradient cannot be seen layer by layer.
    """
    data = (batch.x, batch.y, batch.sample_weight)
    found, seen = weight_forms(
        model, loss, variables, data, loss_scale, constants, batch.shares, batch.rows_per_unit
    )
    size = tf.shape(seen["losses"])[0] // batch.rows_per_unit
    return Pass(clip_and_sum(found, variables, batch.counted, privacy, size), **seen)


def weight_forms(
    model, loss, variables, data, loss_scale=1, constants=None, shares=None, rows_per_unit=1
):
    """The forms of every unit's gradient: a pass up to the norms.

    Args:
      data: ``(x, y, sample_weight)``.
      shares, rows_per_unit: as of a :class:`~keras_dp.clipping.units.Batch`.
      Others as in :func:`clipped_sums`.

    Returns:
      For each variable that the loss depends on, by identity, one form for all its uses; and a
      dict with the fields of a :class:`~keras_dp.clipping.passes.Pass` but the sums.

    Raises:
      NotLayerwise: as :func:`clipped_sums`.
    """
    x, y, sample_weight = data
    size = rows.count((x, y, sample_weight))
    scale = loss_scale if shares is None else loss_scale * shares
    recorder = Recorder(model, variables, batch=size, constants=constants)
    # A persistent tape makes loops in the model several times as slow; only eager code needs it.
    tape = tf.GradientTape(persistent=tf.executing_eagerly(), watch_accessed_variables=False)
    with tape, recorder.recording(tape):
        with hidden_state.refused(model), keras.StatelessScope(collect_losses=True) as scope:
            y_pred = _keras.call_model(model, x)
        _refuse_added_losses(model, loss, scope, recorder)
        losses, starts, given = example_loss.example_losses(
            model, loss, variables, x, y, y_pred, sample_weight, scale
        )
        activity, more = example_loss.activity_losses(recorder.activity, scale)
    if given is not None:
        _refuse_other_reads(tape, losses, given, recorder)
    recorder.check_strays()
    recorder.check_rows(losses.shape[0])
    _refuse_written_weights(variables, scope)
    found = _forms_of_uses(recorder.uses, tape, starts + more, loss_scale, scope, rows_per_unit)
    return found, {"losses": losses, "activity": activity, "y_pred": y_pred, "scope": scope}


def _forms_of_uses(uses, tape, starts, loss_scale, scope, rows_per_unit):
    """For each variable, by identity: the variable and one form for all its uses."""
    outputs = [o for use in uses for o in use.outputs]
    targets, beginnings = zip(*starts)
    gradients = iter(tape.gradient(targets, outputs, output_gradients=beginnings))
    found = {}
    for use in uses:
        own = [next(gradients) for _ in use.outputs]
        if all(g is None for g in own):
            continue  # a branch that the loss does not depend on
        own = [
            tf.zeros_like(o) if g is None else tf.convert_to_tensor(g)
            for g, o in zip(own, use.outputs)
        ]
        if loss_scale != 1:
            own = [tf.cast(g, tf.float32) / loss_scale for g in own]
        count = use.rows_per_example * rows_per_unit
        forms_of_use = functools.partial(_forms_of_use, use, own, scope, count)
        for variable, form in _after(own, forms_of_use):
            found.setdefault(id(variable), (variable, []))[1].append(form)
    return {key: forms.merge(uses_of) for key, (_, uses_of) in found.items()}


def _forms_of_use(use, gradients, scope, count):
    """Pairs of a variable and a form in which ``count`` consecutive rows are one unit."""
    if use.rule is None:
        return list(fallback.per_example_gradients(use, gradients, scope, count))
    found = use.rule.forms(use, *gradients)
    if isinstance(count, int) and count == 1:
        return list(found)
    return [(variable, form.grouped(count)) for variable, form in found]


def _after(gradients, compute):
    """What ``compute`` returns, computed once the gradients are there.

    What depends on the input of a layer alone (patches, say) would else be made for all layers
    before the backward pass, and kept.
    """
    with tf.control_dependencies(gradients):
        return compute()


def clip_and_sum(found, variables, counted, privacy, batch):
    """Norms over all weights, a factor per unit, each weight's clipped sum / batch_size."""
    used = [v for v in variables if id(v) in found]
    by_weight, apart = forms.side_by_side([found[id(v)] for v in used])
    # The shape is a check: a layer that was called on other rows than the examples fails.
    squared = tf.add_n([tf.zeros([batch]), *_squared_norms(by_weight)])
    factors, finite = clip.clip_factors(privacy, squared, counted)
    sums = {}
    if by_weight:
        cleaned = forms.zero_rows(by_weight, finite)
        summed = apart([f.weighted_sum(factors, t) for f, t in zip(by_weight, cleaned)])
        sums = {id(v): total for v, total in zip(used, summed)}
    return [sums[id(v)] if id(v) in sums else tf.zeros(v.shape) for v in variables]


def _squared_norms(forms_of_weights):
    """Each form's squared norms, one after the other where much is made on the way to them.

    The last layers come first, as they do in the backward pass.
    """
    squares, before = [], []
    for form in reversed(forms_of_weights):
        squares.append(_after([*form.tensors(), *before], form.squared_norms))
        if form.makes_much:
            before = squares[-1:]
    return squares


def _refuse_written_weights(variables, scope):
    written = [v.path for v in variables if scope.get_current_value(v) is not None]
    if written:
        raise IncompatibleModelError(
            f"The forward pass writes the trained weights {written}, which only the clipped and "
            "noised update may do. Take the assignment out of the layer's call."
        )


def _refuse_other_reads(tape, losses, given, recorder):
    """Raises NotLayerwise when the loss of an example reads more of the model than its outputs.

    What a layer has left somewhere holds the values of the whole batch.
    """
    outputs = [o for use in recorder.uses for o in use.outputs]
    if tf.executing_eagerly():
        reads = any(g is not None for g in tape.gradient(losses, outputs))
    else:
        reads = _depends(losses, outputs, given)
    if reads:
        raise NotLayerwise("the loss reads more of the model than its outputs")


def _depends(tensor, on, given):
    """Whether a graph computes ``tensor`` from one of ``on`` otherwise than by ``given``."""
    wanted, seen, todo = {t.ref() for t in on}, {t.ref() for t in given}, [tensor]
    while todo:
        tensor = todo.pop()
        if tensor.ref() in seen:
            continue
        seen.add(tensor.ref())
        if tensor.ref() in wanted:
            return True
        todo += tensor.op.inputs
    return False


def _refuse_added_losses(model, loss, scope, recorder):
    if scope.losses:
        raise NotLayerwise(
            "a layer calls add_loss, whose value for the batch cannot be split into examples"
        )
    if recorder.activity and loss is None and _keras.overrides_compute_loss(model):
        raise NotLayerwise(
            "the model has activity regularizers and a compute_loss of its own, "
            "which decides whether they count"
        )
