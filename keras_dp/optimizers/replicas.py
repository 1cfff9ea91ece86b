"""How the clipped sums of several replicas become one update.

Each replica clips the examples of its share of the batch and sums them up. The sums are added
up over the replicas, once; then every device does the same update with its own copies of the
variables: the same noise, since secret and counter are the same everywhere, drawn once, for the
sum. So the update does not depend on how many replicas there are, and nothing but that one sum
travels between devices.
"""

import tensorflow as tf

from keras_dp.errors import PrivacyError


def sum_then_update(sums, update, variables, *extra):
    """Adds up ``sums`` over all replicas, and runs ``update`` once on every device.

    Args:
      sums: tensors of this replica.
      update: function of the total sums and of ``extra``. While it runs on a device, a variable
        is that device's copy. It does the same on all replicas.
      variables: Keras variables whose copies show which devices there are.
      *extra: nests of tensors, or None, that are the same on all replicas.
    """
    update = _after_sums(update)
    if not tf.distribute.has_strategy():
        update(sums, *extra)
        return
    context = tf.distribute.get_replica_context()
    totals = context.all_reduce(tf.distribute.ReduceOp.SUM, sums)
    where = variables[0].value

    def on_every_device(strategy, totals, *extra):
        strategy.extended.update(
            where,
            lambda _, totals, *extra: update(totals, *extra),
            args=(totals, *extra),
            group=False,
        )

    context.merge_call(on_every_device, args=(totals, *extra))


def _after_sums(update):
    """``update``, no part of which happens before the sums are there.

    At the end of the data a step may be asked for of which nothing arrives. What does not depend
    on data, such as the counters of updates and of noise, would go on without it.
    """

    def after(sums, *extra):
        with tf.control_dependencies(sums):
            update(sums, *extra)

    return after


def require_made_in_scope(optimizer, variables):
    """Refuses variables that the strategy of this step has no copies of."""
    if not tf.distribute.has_strategy():
        return
    strategy = tf.distribute.get_strategy()
    if tf.distribute.get_replica_context() is None:
        raise PrivacyError(
            "apply_gradients was called outside a replica. Call keras_dp.clipped_gradients and "
            "optimizer.apply_gradients in the function that strategy.run(...) gets."
        )
    made = strategy.extended.variable_created_in_scope
    for what, variable in (
        ("The optimizer", optimizer.iterations.value),
        *((f"Weight '{v.path}'", v.value) for v in variables),
    ):
        if not made(variable):
            raise PrivacyError(
                f"{what} was made outside the scope of the {type(strategy).__name__} that trains. "
                "Make model and optimizer within `with strategy.scope():`."
            )
