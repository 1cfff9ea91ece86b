"""Whether an update may hold batches of two passes over the data.

With ``gradient_accumulation_steps=n`` an update takes n batches of ``fit``. As long as every epoch
has a multiple of n batches and runs to its end, an update stays within one pass over the data, and
an example is in it at most once. A pass that is cut short leaves batches for an update of the
next. Nobody can look into the optimizer for them: what is not known to be aligned is taken for
not aligned.
"""

import weakref

_seen = weakref.WeakSet()
_cut = weakref.WeakSet()


def accumulation(optimizer):
    """int, batches of ``fit`` that one update takes."""
    return getattr(optimizer, "gradient_accumulation_steps", None) or 1


def first_seen(optimizer):
    """An optimizer that has made updates before anybody watched may have batches left."""
    if optimizer not in _seen:
        _seen.add(optimizer)
        if int(optimizer.iterations) > 0:
            _cut.add(optimizer)


def cut(optimizer):
    """An epoch ended early, or a batch came outside of one."""
    _cut.add(optimizer)


def may_span(optimizer, batches, parts):
    """Whether an update may hold batches of two passes.

    Args:
      optimizer: DP optimizer.
      batches: int, batches in an epoch, or None if not known.
      parts: int, batches in an update.

    Returns:
      bool.
    """
    return optimizer in _cut or not batches or batches % parts != 0
