"""jax-privacy on JAX, in an environment of its own; prints a line of JSON.

keras_plain    Keras on JAX, model.fit
keras_private  the same model through jax_privacy.keras_api.make_private
flax_plain     Flax and Optax, one compiled step
flax_private   the same with jax_privacy.clipped_grad and gaussian_privatizer

JAX compiles every step, so --jit_compile changes nothing.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import jax_privacy
import keras
import optax
from absl import app
from jax_privacy import keras_api, noise_addition

from benchmarks import clock, fit
from benchmarks.peers import flax_models

FLAGS = clock.FLAGS
MODES = ("keras_plain", "keras_private", "flax_plain", "flax_private")


def _measure(entry, batch_size, step_clock):
    measure = _measure_keras if FLAGS.mode.startswith("keras") else _measure_flax
    parameters = measure(entry, batch_size, step_clock)
    return parameters, f"jax-privacy {jax_privacy.__version__} on JAX {jax.__version__}"


def _measure_keras(entry, batch_size, step_clock):
    model = entry.build()
    parameters = model.count_params()
    if FLAGS.mode == "keras_private":
        # It refuses an epsilon that the noise does not keep to, so that is a loose one.
        config = keras_api.DPKerasConfig(
            epsilon=1000.0,
            delta=1e-5,
            clipping_norm=clock.L2_NORM_CLIP,
            noise_multiplier=clock.NOISE_MULTIPLIER,
            batch_size=batch_size,
            microbatch_size=FLAGS.microbatch_size,
            gradient_accumulation_steps=1,
            train_steps=step_clock.steps,
            train_size=step_clock.steps * batch_size,
        )
        model = keras_api.make_private(model, config)
    fit.compile_classifier(model, keras.optimizers.SGD(clock.LEARNING_RATE))
    x, y = entry.data(batch_size * step_clock.steps)
    fit.timed_fit(model, step_clock, x, y, batch_size=batch_size, shuffle=False)
    return parameters


def _measure_flax(entry, batch_size, step_clock):
    model = flax_models.build(FLAGS.model)
    x, y = (jax.device_put(values) for values in entry.data(batch_size))
    weights = jax.jit(model.init)(jax.random.key(0), x[:1])
    optimizer = optax.sgd(clock.LEARNING_RATE)

    def loss(weights, x, y):
        logits = model.apply(weights, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    gradients, noise = _private(loss, batch_size)

    @jax.jit
    def train_step(weights, optimizer_state, noise_state, x, y):
        value, found = gradients(weights, x, y)
        found, noise_state = noise.update(found, noise_state)
        updates, optimizer_state = optimizer.update(found, optimizer_state)
        return optax.apply_updates(weights, updates), optimizer_state, noise_state, value

    state = [weights, optimizer.init(weights), noise.init(weights)]

    def step():
        *state[:], value = train_step(*state, x, y)
        jax.block_until_ready((state, value))

    step_clock.run(step)
    return sum(weight.size for weight in jax.tree.leaves(weights))


def _private(loss, batch_size):
    """The gradient of the loss, and what adds noise to it; neither is private in a plain mode."""
    if FLAGS.mode == "flax_plain":
        return jax.value_and_grad(loss), optax.identity()
    clipped = jax_privacy.clipped_grad(
        loss,
        l2_clip_norm=clock.L2_NORM_CLIP,
        batch_argnums=(1, 2),
        normalize_by=batch_size,
        return_values=True,
        microbatch_size=FLAGS.microbatch_size,
    )
    noise = noise_addition.gaussian_privatizer(
        stddev=clock.NOISE_MULTIPLIER * clipped.sensitivity(), prng_key=1
    )

    def gradients(weights, x, y):
        found, auxiliary = clipped(weights, x, y)
        return auxiliary.values.mean(), found

    return gradients, noise


def main(argv):
    """Measures what the flags say."""
    del argv
    clock.report(_measure)


if __name__ == "__main__":
    clock.define_flags(MODES)
    app.run(main)
