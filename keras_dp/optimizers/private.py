"""``make_private``: the DP class of any Keras optimizer class."""

import inspect

import keras

from keras_dp import _keras
from keras_dp.optimizers.base import DPOptimizer

_made = {}


def make_private(optimizer_class, name=None):
    """The differentially private version of a Keras optimizer class.

    Its instances clip per example, add noise once per update, divide by the constant
    ``batch_size`` and then do what ``optimizer_class`` does; see
    :class:`~keras_dp.optimizers.base.DPOptimizer`. Epsilon does not depend on the
    optimizer class: what it does with a noisy gradient is post-processing.

    Args:
      optimizer_class: a subclass of ``keras.optimizers.Optimizer``.
      name: the new class's name. Default: "DP" and the name of ``optimizer_class``.

    Returns:
      A class that takes every argument of ``optimizer_class`` and, by keyword,
      ``l2_norm_clip``, ``noise_multiplier``, ``batch_size``, ``clipping``,
      ``microbatch_size``, ``backend``, ``gradient_accumulation_steps``, ``augmentations``,
      ``examples_per_user``, ``noise_source`` and ``seed``. The same class for the same arguments.

    Raises:
      ValueError: when ``optimizer_class`` is no Keras optimizer class, or wraps another
        optimizer, or is private already.
    """
    name = name or f"DP{getattr(optimizer_class, '__name__', '')}"
    if (optimizer_class, name) in _made:
        return _made[optimizer_class, name]
    if not (
        inspect.isclass(optimizer_class) and issubclass(optimizer_class, keras.optimizers.Optimizer)
    ):
        raise ValueError(
            "make_private takes a subclass of keras.optimizers.Optimizer, such as "
            f"keras.optimizers.Nadam. Received: {optimizer_class!r}"
        )
    if issubclass(optimizer_class, (DPOptimizer, keras.optimizers.LossScaleOptimizer)):
        raise ValueError(
            f"make_private received {optimizer_class.__name__}, which is private already or wraps "
            "another optimizer. Pass the plain optimizer class."
        )
    private = type(
        name,
        (DPOptimizer, optimizer_class, _keras.UpdatesOneDevice),
        {
            "__doc__": _DOC.format(base=optimizer_class.__name__),
            "__module__": "keras_dp.optimizers",
            "__signature__": _signature(optimizer_class),
        },
    )
    private = keras.saving.register_keras_serializable("keras_dp", name)(private)
    _made[optimizer_class, name] = private
    return private


def _signature(optimizer_class):
    """The arguments of ``optimizer_class`` and its bases, then the private ones by keyword."""
    found = {}
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for cls in (*optimizer_class.__mro__[:-1], DPOptimizer):
        if "__init__" in vars(cls):
            for parameter in list(inspect.signature(cls.__init__).parameters.values())[1:]:
                if parameter.kind not in variadic:
                    found.setdefault(parameter.name, parameter)
    return inspect.Signature(sorted(found.values(), key=lambda p: p.kind))


_DOC = """{base} with differential privacy.

Each update clips every example's gradient to an L2 norm of at most ``l2_norm_clip`` over
all trained weights, sums, adds Gaussian noise of standard deviation ``noise_multiplier *
l2_norm_clip`` once, and divides by ``batch_size`` (Abadi et al. 2016, arXiv 1607.00133,
Algorithm 1); {base} then treats the result as its gradient. What that is worth in
(epsilon, delta) depends on the sampling and the number of updates:
:func:`keras_dp.compute_epsilon`.

Args:
  l2_norm_clip: float above 0. C, the bound on each example's gradient norm.
  noise_multiplier: float of at least 0. Standard deviation of the noise in units of C.
    0 trains without privacy, for debugging.
  batch_size: int. Expected number of examples (users, with ``examples_per_user``) in one
    update. A public constant: it is the divisor whatever a batch really holds.
  clipping: "flat" scales a gradient g by min(1, C/|g|); "automatic" by C/(|g| + 0.01)
    (Bu et al. 2022, arXiv 2206.07136). The sensitivity is C in both.
  microbatch_size: examples (or users) per pass inside one step. Bounds memory; changes no
    result.
  backend: "auto", "layerwise", "vectorized" or "loop": how per-example gradients are
    found. The numbers are the same; see docs/engine.md.
  gradient_accumulation_steps: None, or the number of batches whose clipped sums add up to
    one update: noise once, one counted step. ``batch_size`` stays what one update expects.
    What is left at the end of an epoch waits for the next one of the same fit; each fit, and
    a run that is resumed, begins its update anew.
  augmentations: None, or the number of copies of each example that the model's random layers
    see; the mean of their gradients is clipped (De et al. 2022, arXiv 2204.13650, section
    3.2). Costs as much time as that many examples and no privacy.
  examples_per_user: None, or k: each k consecutive rows of a batch are one user, missing rows
    being padding, and the mean of their gradients is clipped. What is protected is then a
    user. Take batches of ``keras_dp.PoissonSampler(users=..., examples_per_user=k)``.
  noise_source: "fast" takes random bits from Philox, in the graph. "secure" takes them from AES,
    on the CPU, and guards against known attacks on floating-point noise; slower, not under
    XLA; see :mod:`keras_dp.secure_noise`.
  seed: None takes the noise's secret from the operating system. An int repeats the noise,
    for tests only, and warns.
  Every other argument is that of ``keras.optimizers.{base}``, except its clipping
  arguments and ``loss_scale_factor``, which are refused.

Raises:
  ValueError: for an argument outside what is named above.
"""
