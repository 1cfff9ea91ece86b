"""How the clipped sums of several replicas become one update.

Each replica clips the examples of its share of the batch and sums them up. The sums are added
up over the replicas, once; then every device does the same update with its own copies of the
variables: the same noise, since secret and counter are the same everywhere, drawn once, for the
sum. So the update does not depend on how many replicas there are, and nothing but that one sum
travels between devices.
"""

import tensorflow as tf

from keras_dp.errors import PrivacyError

_SUPPORTED = (
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
    tf.distribute.TPUStrategy,
    tf.distribute.OneDeviceStrategy,
)


def require_supported(strategy):
    """Refuses a strategy whose variables or updates are other than what is proved here."""
    if not isinstance(strategy, _SUPPORTED):
        raise PrivacyError(
            f"DP optimizers do not train under {type(strategy).__name__}. Use one that "
            "keras_dp.distribution.get_strategy gives: 'mirrored' for the devices of one machine, "
            "'multi_worker' for several machines, or 'tpu'."
        )


def sum_then_update(batch, sums, update, variables, *extra):
    """Adds up ``sums`` over all replicas, and runs ``update`` once on every device.

    Args:
      batch: what this replica was given, any one tensor or array of it.
      sums: tensors of this replica.
      update: function of the total sums and of ``extra``. While it runs on a device, a variable
        is that device's copy. It does the same on all replicas.
      variables: Keras variables whose copies show which devices there are.
      *extra: nests of tensors, or None, that are the same on all replicas.
    """

    def update_once_there(sums, *extra):
        # A step that Keras begins at the end of the data, to find that there is no more, has no
        # sums: it must count no update and no part of one. Nor is noise drawn before it is needed.
        with tf.control_dependencies(sums):
            update(sums, *extra)

    if not tf.distribute.has_strategy():
        update_once_there(sums, *extra)
        return
    require_supported(tf.distribute.get_strategy())
    context = tf.distribute.get_replica_context()
    totals = context.all_reduce(tf.distribute.ReduceOp.SUM, sums)
    where = variables[0].value

    def on_every_device(strategy, batch, totals, *extra):
        _require_shares(strategy, batch, totals)
        strategy.extended.update(
            where,
            lambda _, totals, *extra: update_once_there(totals, *extra),
            args=(totals, *extra),
            group=False,
        )

    context.merge_call(on_every_device, args=(batch, totals, *extra))


def _require_shares(strategy, batch, totals):
    """Refuses one object in the place of several shares: TensorFlow keeps it as it is."""
    replicas = len(strategy.experimental_local_results(totals[0]))
    if len(strategy.experimental_local_results(batch)) < replicas:
        raise PrivacyError(
            f"All {replicas} replicas were given the same batch, so that each of its examples "
            f"would be in the update {replicas} times, with noise for one. Give each replica its "
            "share: iterate over strategy.experimental_distribute_dataset(...), or train with "
            "model.fit."
        )


def require_made_in_scope(optimizer, variables):
    """Refuses variables that the strategy of this step has no copies of."""
    if not tf.distribute.has_strategy():
        for what, variable in _named(optimizer, variables):
            if isinstance(variable, tf.distribute.DistributedValues):
                raise PrivacyError(
                    f"{what} was made in the scope of a strategy, but this step runs under none. "
                    "Make model and optimizer within the same `with strategy.scope():`, and call "
                    "custom steps by strategy.run(...)."
                )
        return
    strategy = tf.distribute.get_strategy()
    if tf.distribute.get_replica_context() is None:
        raise PrivacyError(
            "apply_gradients was called outside a replica. Call keras_dp.clipped_gradients and "
            "optimizer.apply_gradients in the function that strategy.run(...) gets."
        )
    made = strategy.extended.variable_created_in_scope
    for what, variable in _named(optimizer, variables):
        if not made(variable):
            raise PrivacyError(
                f"{what} was made outside the scope of the {type(strategy).__name__} that trains. "
                "Make model and optimizer within `with strategy.scope():`."
            )


def _named(optimizer, variables):
    """What an update reads and writes: (name for an error, variable)."""
    weights = [(f"Weight '{v.path}'", v.value) for v in variables]
    state = [("The optimizer", v) for v in optimizer.state_variables()]
    return state + weights
