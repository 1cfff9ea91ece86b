"""Clip functions: per-example norms -> the factor that each gradient is scaled by.

Both give a scaled gradient whose norm is at most C, so C is the sensitivity of the sum.
"""

import tensorflow as tf

# gamma of Bu et al. 2022 (arXiv 2206.07136, section 4); their experiments use 0.01.
AUTOMATIC_GAMMA = 0.01


def flat(norms, l2_norm_clip):
    """min(1, C / |g|) (Abadi et al. 2016, arXiv 1607.00133, Algorithm 1)."""
    return l2_norm_clip / tf.maximum(norms, l2_norm_clip)


def automatic(norms, l2_norm_clip):
    """C / (|g| + gamma) (Bu et al. 2022, arXiv 2206.07136, AUTO-S)."""
    return l2_norm_clip / (norms + AUTOMATIC_GAMMA)


CLIPPINGS = {"flat": flat, "automatic": automatic}


def clip_factors(privacy, squared_norms, counted=None):
    """The factor of each example.

    Args:
      privacy: the optimizer's :class:`~keras_dp.clipping.settings.PrivacySettings`.
      squared_norms: float32 ``[batch]``, over all weights.
      counted: bool ``[batch]`` or None; the examples that take part.

    Returns:
      ``(factors, finite)``, both ``[batch]``. A factor brings the norm to at most C, and is
      divided by the constant ``batch_size``, so that no weight has to be. It is 0 for an
      example that does not take part and for one whose gradient is not finite; ``finite``
      tells the latter, since 0 times NaN would still be NaN.
    """
    finite = tf.math.is_finite(squared_norms)
    norms = tf.sqrt(tf.where(finite, squared_norms, 0.0))
    factors = CLIPPINGS[privacy.clipping](norms, privacy.l2_norm_clip) / privacy.batch_size
    factors = tf.where(finite, factors, 0.0)
    if counted is not None:
        factors = tf.where(counted, factors, 0.0)
    return factors, finite
