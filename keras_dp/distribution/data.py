"""What the replicas of a strategy get of the data that a private ``fit`` was given.

Keras splits a batch between the replicas of one machine, in the order of its rows. With several
machines it splits as well, but each machine reads, and shuffles, for itself: a draw would be
spread over several updates, and an example could be in two machines' parts of one epoch. So with
several workers the sampler itself gives each its share.
"""

import contextlib

import tensorflow as tf

from keras_dp import _keras
from keras_dp.clipping import rows
from keras_dp.distribution.cluster import worker_number, workers_of
from keras_dp.errors import PrivacyError
from keras_dp.optimizers import replicas
from keras_dp.sampling import PoissonSampler
from keras_dp.sampling.shares import Share


@contextlib.contextmanager
def delivered(model, x):
    """While open, what ``fit`` should train on in the place of ``x`` goes to the replicas.

    Args:
      model: ``keras.Model`` with a DP optimizer.
      x: what the user gave to ``fit``.

    Raises:
      PrivacyError: for data of which several workers cannot each take a share.
    """
    strategy = _keras.own_strategy(model)
    if strategy is None:
        yield x
        return
    replicas.require_supported(strategy)
    several = workers_of(strategy) > 1
    if not isinstance(x, PoissonSampler):
        if several and not _is_made_for_each_worker(x, strategy):
            raise PrivacyError(
                f"fit received a {type(x).__name__} on {workers_of(strategy)} workers, each of "
                "which would shuffle, or draw, for itself: an example could be in an update, and "
                "an epoch, once for each of them. Train on keras_dp.PoissonSampler(x, y, "
                "batch_size=...), of which each worker takes its share; or say yourself what each "
                "gets, strategy.distribute_datasets_from_function(lambda context: ...), in parts "
                "that have no example in common."
            )
        yield x
        return
    with x.delivered_to(_share(strategy)):
        if several:
            yield strategy.distribute_datasets_from_function(lambda _: x.as_worker_dataset())
        elif isinstance(strategy, tf.distribute.TPUStrategy):
            yield x.as_tf_dataset()  # every shape known: one program
        else:
            yield x


def refuse_train_on_batch(model):
    """Refuses batches of which nobody can tell whether the workers have the same examples."""
    workers = workers_of(_keras.own_strategy(model))
    if workers > 1:
        raise PrivacyError(
            f"train_on_batch was called on one of {workers} workers. If they are given the same "
            "batch, each of its examples counts once for each worker, and the noise would be too "
            "small. Train with fit on keras_dp.PoissonSampler."
        )


def _is_made_for_each_worker(x, strategy):
    """Whether ``x`` is from distribute_datasets_from_function; auto-sharded data are not."""
    empty = strategy.distribute_datasets_from_function(lambda _: tf.data.Dataset.range(0))
    return isinstance(x, type(empty))


def shared_out(batch, strategy, rows_per_unit=1):
    """A batch that was given as a whole, with a share of its rows for each replica.

    Args:
      batch: nest of arrays ``[rows, ...]`` and None.
      strategy: a strategy of one process.
      rows_per_unit: int; so many consecutive rows go to one replica.

    Returns:
      The nest, of ``tf.distribute.DistributedValues``. Shares differ by one unit at most.
    """
    tensors, rebuild = rows.flatten(rows.to_tensors(batch))
    units = len(tensors[0]) // rows_per_unit

    def share(context):
        replica, replicas = context.replica_id_in_sync_group, context.num_replicas_in_sync
        begin = rows_per_unit * (units * replica // replicas)
        end = rows_per_unit * (units * (replica + 1) // replicas)
        if replica + 1 == replicas:
            end = len(tensors[0])  # with what is left of a unit, which the step then refuses
        return [tensor[begin:end] for tensor in tensors]

    return rebuild(strategy.experimental_distribute_values_from_function(share))


def _share(strategy):
    workers = workers_of(strategy)
    if workers == 1:
        return Share(replicas=strategy.num_replicas_in_sync)
    return Share(worker_number(strategy), workers, strategy.num_replicas_in_sync // workers)
