"""What turns a Keras optimizer into a private one: clipped sums in, noise, update."""

import contextlib
import dataclasses
import numbers

import tensorflow as tf

from keras_dp import _keras, precision
from keras_dp.clipping.clipped import ClippedGradients
from keras_dp.clipping.settings import PrivacySettings, require
from keras_dp.errors import PrivacyError, UnclippedGradientsError
from keras_dp.noise import GaussianNoise
from keras_dp.optimizers import replicas
from keras_dp.optimizers.accumulation import Accumulator
from keras_dp.optimizers.lineage import Lineage
from keras_dp.secure_noise import SecureNoise


class DPOptimizer(Lineage):
    """The private part of every DP optimizer; mixed into a Keras optimizer class.

    An update takes the sum over a logical batch of the per-example gradients, each clipped to
    an L2 norm of at most ``l2_norm_clip`` over all weights, adds Gaussian noise of
    standard deviation ``noise_multiplier * l2_norm_clip`` once, divides by the constant
    ``batch_size`` and hands the result to the Keras optimizer, whose work is
    post-processing (Abadi et al. 2016, arXiv 1607.00133, Algorithm 1). Gradients of
    weight regularizers depend on no data and are added after the noise.

    A logical batch is one batch; or ``gradient_accumulation_steps`` batches in a row; or all
    pieces of one draw (:class:`keras_dp.pieces.Piece`). Until it is complete, its clipped sums
    add up without noise, no weight moves, and ``iterations`` stands still.

    With ``examples_per_user`` what is clipped, and protected, is a user; see
    :class:`~keras_dp.clipping.settings.PrivacySettings`.

    Only :class:`~keras_dp.clipping.clipped.ClippedGradients` are accepted; every other
    call raises :class:`~keras_dp.errors.UnclippedGradientsError`, every time.
    """

    def __init__(
        self,
        *args,
        l2_norm_clip,
        noise_multiplier,
        batch_size,
        clipping="flat",
        microbatch_size=None,
        backend="auto",
        gradient_accumulation_steps=None,
        augmentations=None,
        examples_per_user=None,
        noise_source="fast",
        seed=None,
        **kwargs,
    ):
        settings = PrivacySettings(
            l2_norm_clip=l2_norm_clip,
            noise_multiplier=noise_multiplier,
            batch_size=batch_size,
            clipping=clipping,
            microbatch_size=microbatch_size,
            backend=backend,
            gradient_accumulation_steps=gradient_accumulation_steps,
            augmentations=augmentations,
            examples_per_user=examples_per_user,
            noise_source=noise_source,
        )
        require(
            seed is None or (isinstance(seed, numbers.Integral) and not isinstance(seed, bool)),
            "seed",
            seed,
            "None (operating-system entropy) or, for tests, a whole number",
        )
        for name, reason in _REFUSED.items():
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"{type(self).__name__} received {name}={kwargs[name]!r}. {reason}"
                )
        if tf.distribute.has_strategy():
            replicas.require_supported(tf.distribute.get_strategy())
        precision.ensure_float32_products_of_gpus()
        super().__init__(*args, **kwargs)
        self._privacy = settings
        self._calls_into_keras = 0
        self._noise = _NOISE_SOURCES[settings.noise_source](seed)
        self._begin_run()
        self._accumulator = Accumulator()
        _keras.make_shared_seed_generator()  # here, so that no train step has to make it

    @property
    def privacy(self):
        """The :class:`PrivacySettings` of this optimizer."""
        return self._privacy

    @property
    def l2_norm_clip(self):
        """C, the bound on each example's gradient norm over all weights."""
        return self._privacy.l2_norm_clip

    @property
    def noise_multiplier(self):
        """Standard deviation of the noise over the sensitivity of the clipped sum."""
        return self._privacy.noise_multiplier

    @property
    def batch_size(self):
        """Expected number of examples, or users, in one update, over all replicas; the divisor."""
        return self._privacy.batch_size

    @property
    def clipping(self):
        """How an example's gradient is brought to norm C: "flat" or "automatic"."""
        return self._privacy.clipping

    @property
    def microbatch_size(self):
        """Examples, or users, per pass inside one step, or None for all at once."""
        return self._privacy.microbatch_size

    @property
    def backend(self):
        """How per-example gradients are found."""
        return self._privacy.backend

    @property
    def gradient_accumulation_steps(self):
        """Batches of one update, or None.

        Keras has an attribute of the same name, by which it would add up noisy gradients. While
        its own methods run they find None here.
        """
        return None if self._calls_into_keras else self._privacy.gradient_accumulation_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value):
        if value is not None:
            raise AttributeError(
                "The settings of a DP optimizer never change. Pass gradient_accumulation_steps= "
                f"by keyword when it is made. Received: {value!r}"
            )

    @property
    def augmentations(self):
        """Copies of each example whose gradients are averaged before the clip, or None."""
        return self._privacy.augmentations

    @property
    def examples_per_user(self):
        """Rows of each user, whose mean gradient is clipped once; None: a row is a unit."""
        return self._privacy.examples_per_user

    @property
    def noise_source(self):
        """Where the noise's random bits come from: "fast" or "secure"."""
        return self._privacy.noise_source

    @property
    def iterations(self):
        """The number of updates: noisy releases, not parts of a logical batch."""
        return self._iterations

    @property
    def sensitivity(self):
        """L2 sensitivity of the clipped sum when one example, or user, is added or removed."""
        return self._privacy.l2_norm_clip

    @property
    def noise_stddev(self):
        """Standard deviation of the noise in the gradient that the update uses."""
        return self.noise_multiplier * self.sensitivity / self.batch_size

    @property
    def noise_fingerprint(self):
        """str that tells whether two optimizers will draw the same noise, and nothing else."""
        return self._noise.fingerprint

    def build(self, variables):
        """Makes the optimizer's variables, and the sums in which parts of a batch add up."""
        with self._in_keras():
            super().build(variables)
        if self._waits() and not self._accumulator.built:
            self._accumulator.build(variables)

    def state_variables(self):
        """Every ``tf.Variable`` of this optimizer, those that no checkpoint sees included."""
        own = [self._run, self._released.value, *self._noise.variables]
        return [v.value for v in self.variables] + own + self._accumulator.variables

    def begin_logical_batch(self):
        """Drops the parts of a logical batch that was never finished; each ``fit`` begins so.

        Their sums were never released and cost nothing. What they held would else get into an
        update of a later training, beside the same examples once more.
        """
        self._accumulator.begin()

    @property
    def parts_waiting(self):
        """int, parts of ``gradient_accumulation_steps`` that wait for the rest of an update."""
        return self._accumulator.waiting

    @tf.autograph.experimental.do_not_convert
    def apply_gradients(self, grads_and_vars):
        """One private update, or one part of it.

        Args:
          grads_and_vars: what :func:`keras_dp.clipped_gradients` returned for this
            optimizer, not used before.

        Returns:
          The update counter, as Keras does.

        Raises:
          UnclippedGradientsError: for anything else.
        """
        self.apply(grads_and_vars)
        return self._iterations

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads, trainable_variables=None):
        """The same as :meth:`apply_gradients`; the variables are those of the gradients."""
        if not isinstance(grads, ClippedGradients) or trainable_variables is not None:
            raise UnclippedGradientsError(
                f"{type(self).__name__} received plain gradients ({type(grads).__name__}), which "
                "nobody clipped per example: applying them would not be private. Train with "
                "model.fit or model.train_on_batch, or call optimizer.apply_gradients("
                "keras_dp.clipped_gradients(model, x, y, optimizer=optimizer)). A model whose own "
                "train_step computes gradients has to do the same."
            )
        grads.spend(self)
        replicas.require_made_in_scope(self, grads.variables)
        if not self.built:
            self.build(grads.variables)
        variables = grads.variables
        if grads.piece is None and not self._waits():
            replicas.sum_then_update(
                grads.batch,
                grads.scaled_sums,
                lambda sums: self._update(sums, variables),
                variables,
            )
        else:
            self._require_one_way_to_wait(grads.piece)
            replicas.sum_then_update(
                grads.batch,
                grads.scaled_sums,
                lambda sums, piece: self._update_when_complete(sums, variables, piece),
                variables,
                None if grads.piece is None else grads.piece._replace(x=None),
            )

    def _waits(self):
        """Whether an update is made of several batches."""
        return (self._privacy.gradient_accumulation_steps or 1) > 1

    def _require_one_way_to_wait(self, piece):
        if piece is not None and self._waits():
            raise PrivacyError(
                "The sampler delivers each draw in pieces (physical_batch_size=), of which the "
                f"last one makes the update, but {self!r} waits for "
                f"{self.gradient_accumulation_steps} batches. Leave "
                "gradient_accumulation_steps out."
            )

    def _update_when_complete(self, scaled_sums, variables, piece):
        """Adds a part to its logical batch; the last part makes the update."""
        accumulator = self._accumulator
        if not accumulator.built:
            accumulator.build(variables)
        if piece is None:
            first, last = accumulator.next_part(self._privacy.gradient_accumulation_steps)
        else:
            first, last = accumulator.next_piece(piece)
        totals = accumulator.totals(scaled_sums, variables, first)
        tf.cond(
            last,
            lambda: self._update(accumulator.of(totals, variables), variables),
            lambda: accumulator.keep(totals),
        )

    def _update(self, scaled_sums, variables):
        """Noise, once, and the update of the Keras optimizer, which counts it."""
        private = self._privatized(scaled_sums, variables)
        self._count_release()
        with self._in_keras():
            super().apply(private, variables)

    def _privatized(self, scaled_sums, variables):
        """The private gradient: sum / batch_size, noise, regularizers; float32 tensors."""
        private = scaled_sums
        if self.noise_multiplier > 0:
            private = self._noise.add(private, self.noise_stddev)
        regularizers = regularizer_gradients(variables)
        return [p if r is None else p + r for p, r in zip(private, regularizers)]

    @contextlib.contextmanager
    def _in_keras(self):
        self._calls_into_keras += 1
        try:
            yield
        finally:
            self._calls_into_keras -= 1

    def get_config(self):
        """The Keras optimizer's config and the privacy arguments.

        The seed is left out: it would tell whoever reads the file how to subtract the
        noise. An optimizer made from a config draws a new secret.
        """
        with self._in_keras():
            config = super().get_config()
        for name in _REFUSED:
            config.pop(name, None)
        return config | dataclasses.asdict(self._privacy)

    def __repr__(self):
        settings = ", ".join(f"{k}={v!r}" for k, v in dataclasses.asdict(self._privacy).items())
        return f"<{type(self).__name__} {settings}>"


def regularizer_gradients(variables):
    """The gradient of each variable's own weight regularizer, or None."""
    found = []
    for variable in variables:
        if variable.regularizer is None:
            found.append(None)
            continue
        value = tf.convert_to_tensor(variable.value)
        with tf.GradientTape() as tape:
            tape.watch(value)
            penalty = variable.regularizer(value)
        found.append(tf.cast(tape.gradient(penalty, value), tf.float32))
    return found


_NOISE_SOURCES = {"fast": GaussianNoise, "secure": SecureNoise}

_KERAS_CLIP = (
    "Keras's own clipping works on the mean gradient, not per example, and gives no privacy. "
    "Use l2_norm_clip, which bounds each example's gradient, and leave it out."
)
_REFUSED = {
    "clipnorm": _KERAS_CLIP,
    "clipvalue": _KERAS_CLIP,
    "global_clipnorm": _KERAS_CLIP,
    "loss_scale_factor": (
        "A DP optimizer scales and unscales float16 gradients itself, before they are clipped. "
        "Leave it out."
    ),
}


def private_optimizer(model):
    """The DP optimizer that ``model`` was compiled with, or None.

    Looks through the wrapper that Keras puts around the optimizer of a mixed_float16 model.
    """
    optimizer = _keras.compiled_optimizer(model)
    return optimizer if isinstance(optimizer, DPOptimizer) else None
