"""A stand-in for ``TPUStrategy``, which cannot be made where there is no TPU.

TPUStrategy traces one program and runs it on every replica. Inside that program a sum over the
replicas is one operation, a merge call runs its function at once, and the update of a variable is
an update of the replica's own copy. The stand-in does the same, so what is compiled is what
keras_dp and Keras do under a strategy, and no copy of it.

The variables are plain ones, with the one habit of a TPUStrategy's that sends something: when a
replica assigns a variable outside of an update, all replicas agree on the value first, in the way
that the variable's ``aggregation`` names.
"""

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops


class ReplicatedStrategy(tf.distribute.TPUStrategy):
    """One program for all replicas.

    A TPUStrategy, so that whoever asks whether there is one is told so.

    Args:
      replicas: int, how many replicas run what ``run`` traces.
    """

    def __init__(self, replicas):
        # Not TPUStrategy's own, which connects to the TPUs.
        tf.distribute.Strategy.__init__(self, _Extended(self, replicas))

    def run(self, fn, args=(), kwargs=None, options=None):
        """Traces ``fn(*args, **kwargs)`` once, for every replica."""
        return self.extended.call_for_each_replica(fn, args, kwargs)


class _Extended(tf.compat.v1.distribute.StrategyExtended):
    """What a strategy does; called by TensorFlow under these names."""

    def __init__(self, strategy, replicas):
        super().__init__(strategy)
        self._replicas = replicas

    @property
    def _num_replicas_in_sync(self):
        return self._replicas

    def _call_for_each_replica(self, fn, args, kwargs):
        # One trace for all: the replica's number is a tensor.
        number = gen_xla_ops.xla_replica_id()
        with tf.distribute.ReplicaContext(self._container_strategy(), number):
            return fn(*args, **kwargs)

    def _reduce_to(self, reduce_op, value, destinations, options):
        if reduce_op == tf.distribute.ReduceOp.MEAN:
            value /= self._replicas
        return gen_xla_ops.xla_all_reduce(
            input=value,
            group_assignment=[list(range(self._replicas))],
            reduce_op="Add",
            mode="CrossReplica",
        )

    def _update(self, var, fn, args, kwargs, group):
        result = fn(var, *args, **kwargs)
        return result if group else (result,)

    def _create_variable(self, next_creator, **kwargs):
        variable = next_creator(**kwargs)
        on_read = variable.synchronization == tf.VariableSynchronization.ON_READ
        if not on_read and variable.aggregation != tf.VariableAggregation.NONE:
            for method in ("assign", "assign_add", "assign_sub"):
                setattr(variable, method, self._agreed(getattr(variable, method), variable))
        return variable

    def _agreed(self, assign, variable):
        """``assign`` with a value that all replicas agree on, when one of them calls it."""

        def agreed(value, *args, **kwargs):
            if tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context():
                value = self._aggregated(tf.convert_to_tensor(value), variable.aggregation)
            return assign(value, *args, **kwargs)

        return agreed

    def _aggregated(self, value, aggregation):
        how, dtype = tf.distribute.ReduceOp.SUM, value.dtype
        if aggregation == tf.VariableAggregation.MEAN:
            how = tf.distribute.ReduceOp.MEAN
        if aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA:
            first = tf.equal(gen_xla_ops.xla_replica_id(), 0)
            value = tf.where(first, value, tf.zeros_like(value))
        if dtype == tf.int64:  # which XLA's sum does not take
            value = tf.cast(value, tf.int32)
        return tf.cast(self._reduce_to(how, value, None, None), dtype)

    def _local_results(self, value):
        return (value,)

    def value_container(self, value):
        """The variable that ``value`` is a copy of: here, itself."""
        return value

    def _get_local_replica_id(self, replica_id_in_sync_group):
        return replica_id_in_sync_group

    def _in_multi_worker_mode(self):
        return False
