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
        if several and not isinstance(x, tf.data.Dataset | tf.distribute.DistributedDataset):
            raise PrivacyError(
                f"fit received a {type(x).__name__} on {workers_of(strategy)} workers, each of "
                "which would shuffle it for itself: an example could be in an epoch twice. Train "
                "on keras_dp.PoissonSampler(x, y, batch_size=...), of which each worker takes "
                "its share."
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


def workers_of(strategy):
    """int, the processes that train together under ``strategy``."""
    resolver = strategy.cluster_resolver
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy) or resolver is None:
        return 1
    cluster = resolver.cluster_spec()
    return sum(len(cluster.job_tasks(job)) for job in ("chief", "worker") if job in cluster.jobs)


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


def require_one_worker(model):
    """Refuses ``train_on_batch`` on several workers, which may all be given the same examples."""
    strategy = _keras.own_strategy(model)
    if strategy is not None and workers_of(strategy) > 1:
        raise PrivacyError(
            f"train_on_batch was called on {workers_of(strategy)} workers, and nothing tells "
            "whether they were given different examples: one given to all would be in the update "
            "once for each. Call fit on keras_dp.PoissonSampler(x, y, batch_size=...), of which "
            "each worker takes its share."
        )


def is_chief(strategy):
    """Whether this process is the one of several that speaks and writes for all."""
    return strategy is None or workers_of(strategy) == 1 or _number(strategy) == 0


def _number(strategy):
    resolver = strategy.cluster_resolver
    if "chief" not in resolver.cluster_spec().jobs:
        return resolver.task_id
    return 0 if resolver.task_type == "chief" else 1 + resolver.task_id


def _share(strategy):
    workers = workers_of(strategy)
    if workers == 1:
        return Share(replicas=strategy.num_replicas_in_sync)
    return Share(_number(strategy), workers, strategy.num_replicas_in_sync // workers)
