"""Users: draws of people, each with at most so many of their examples."""

import numpy as np

from keras_dp.errors import PrivacyError


def require_same_users(batches, optimizer):
    """Raises PrivacyError if the optimizer clips other groups of rows than the batches have.

    Args:
      batches: a sampler, or None where groups of rows are not known.
      optimizer: DP optimizer.
    """
    have, clips = getattr(batches, "examples_per_user", None), optimizer.examples_per_user
    if have != clips:
        raise PrivacyError(
            f"The batches have examples_per_user={have}, the optimizer {clips}: it would clip "
            "other groups of rows than those that are protected. Give both the same "
            "examples_per_user."
        )


def _is_missing(one):
    """NaN, NaT and NA do not equal themselves."""
    same = one == one
    return one is None or not isinstance(same, bool | np.bool_) or not same


class Users:
    """Which examples belong to whom.

    Attributes:
      number: int, of users.
      examples: int, of examples.
    """

    def __init__(self, ids):
        ids = np.asarray(ids.numpy() if hasattr(ids, "numpy") else ids)
        if ids.ndim != 1 or len(ids) == 0:
            raise ValueError(
                "users must be an array [N] with the user of each example. "
                f"Received: shape {ids.shape}."
            )
        missing = [_is_missing(one) for one in ids] if ids.dtype == object else ids != ids
        if np.any(missing):
            raise ValueError(
                f"users has no user for {int(np.sum(missing))} examples (NaN or None). Leave these "
                "examples out, or give each a user of its own: what one user has is protected as "
                "a whole."
            )
        self._rows = np.argsort(ids, kind="stable")
        ordered = ids[self._rows]
        begins = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
        self._starts = np.append(begins, len(ids))
        self.number, self.examples = len(begins), len(ids)

    def choose(self, users, limit, generator):
        """At most `limit` examples of each user, any of them with the same probability.

        Args:
          users: int array `[n]`, of numbers below `number`.
          limit: int >= 1.
          generator: `numpy.random.Generator`.

        Returns:
          int64 array `[n, limit]`: in each line the indices of the user's examples, rising, then
          -1 where there are fewer.
        """
        starts, counts = self._starts[users], np.diff(self._starts)[users]
        within = np.broadcast_to(np.arange(limit), (len(users), limit))
        within = np.where(within < counts[:, None], within, -1)
        many = counts > limit
        within[many] = _subsets(counts[many], limit, generator)
        chosen = self._rows[starts[:, None] + within]
        return np.where(within < 0, -1, chosen)


def _subsets(sizes, number, generator):
    """Subsets of {0, ..., sizes[i] - 1} with `number` elements, all equally likely, sorted.

    Floyd's algorithm, for all sizes at once: it draws as many random numbers as it returns.
    (Bentley and Floyd 1987, "A sample of brilliance", Communications of the ACM 30(9).)
    """
    chosen = np.full((len(sizes), number), -1, np.int64)
    for k in range(number):
        top = sizes - number + k
        pick = generator.integers(0, top, endpoint=True)
        taken = (chosen[:, :k] == pick[:, None]).any(axis=1)
        chosen[:, k] = np.where(taken, top, pick)
    return np.sort(chosen, axis=1)
