"""Writes clipped mean gradients of TensorFlow Privacy's optimizers for the tests of clipping.

TensorFlow Privacy needs TensorFlow 2.15, so it runs in an environment of its own (Python 3.11):

    python3.11 -m venv .venvs/legacy
    .venvs/legacy/bin/pip install tensorflow-cpu==2.15.1 tensorflow-privacy==0.9.0 \
        tensorflow-addons==0.23.0
    .venvs/legacy/bin/python benchmarks/reference/make_tfp_golden.py

Both of its Keras optimizers run without noise and with one example per microbatch, so that what
they hand to the update rule is (1 / batch) * sum of the clipped per-example gradients:
DPKerasSGDOptimizer loops over examples, VectorizedDPKerasSGDOptimizer maps over them.

linear: Dense(1) without bias, loss y_true * y_pred, so that example i's gradient is y_i * x_i.
mlp: 5-7-3 with tanh and mean squared error over the three outputs.
Weights and data are multiples of 1/16384 from a formula, hence exact in JSON and in float32.
"""

import argparse
import json
import os
import pathlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

import numpy as np
import tensorflow as tf
import tensorflow_privacy

ROOT = pathlib.Path(__file__).resolve().parents[2]
CLIPS = (0.1, 1.0, 10.0)
OPTIMIZERS = ("DPKerasSGDOptimizer", "VectorizedDPKerasSGDOptimizer")


def wave(shape, phase, scale=1.0):
    """Numbers in [-scale, scale] that look irregular; scale is a power of two."""
    index = np.arange(int(np.prod(shape)), dtype=np.float64)
    values = np.sin(1.7 * index + 0.9 * phase) * np.cos(0.31 * index * phase + 0.4)
    return (np.round(values * 1024) / 1024 * scale).reshape(shape).astype(np.float32)


def dense(units, activation=None, use_bias=True):
    return tf.keras.layers.Dense(units, activation=activation, use_bias=use_bias)


def linear_case():
    """Gradient norms 5, 0.5, 0 and 50: below, above and far above the clips."""
    x = np.array([[3, 4], [0, 0.5], [0, 0], [40, -30]], np.float32)
    y = np.ones((4, 1), np.float32)
    model = tf.keras.Sequential([tf.keras.Input((2,)), dense(1, use_bias=False)])
    return model, [np.zeros((2, 1), np.float32)], x, y, lambda y, p: y[:, 0] * p[:, 0]


def mlp_case():
    """Examples of growing size, so that each clip leaves some gradients whole and cuts others."""
    x = wave((8, 5), 3) * np.float32([[1 / 16], [1 / 4], [1], [1], [2], [4], [8], [16]])
    y = wave((8, 3), 7, 8.0)
    y[0] = 0
    weights = [wave((5, 7), 1), wave((7,), 2, 0.25), wave((7, 3), 5), wave((3,), 11, 0.25)]
    model = tf.keras.Sequential([tf.keras.Input((5,)), dense(7, "tanh"), dense(3)])
    return model, weights, x, y, lambda y, p: tf.reduce_mean((y - p) ** 2, axis=-1)


def example_norms(model, x, y, loss):
    """Each example's gradient norm, one example at a time."""
    norms = []
    for i in range(len(x)):
        with tf.GradientTape() as tape:
            value = loss(y[i : i + 1], model(x[i : i + 1]))
        norms.append(tf.linalg.global_norm(tape.gradient(value, model.trainable_variables)))
    return np.array(norms)


def clipped_mean(name, model, x, y, loss, clip):
    """What the named optimizer would hand to its update rule, one array a variable."""
    optimizer = getattr(tensorflow_privacy, name)(
        l2_norm_clip=clip, noise_multiplier=0.0, num_microbatches=len(x), learning_rate=1.0
    )
    pairs = optimizer._compute_gradients(
        lambda: loss(y, model(x)), model.trainable_variables, tape=tf.GradientTape()
    )
    return [gradient.numpy() for gradient, _ in pairs]


def flat(array):
    """Row-major values, each the shortest decimal that reads back to the same float32."""
    array = np.ravel(array).astype(np.float32)
    return [float(np.format_float_scientific(v, unique=True)) for v in array]


def run(case):
    model, weights, x, y, loss = case()
    model.set_weights(weights)
    return {
        "weights": [flat(w) for w in weights],
        "shapes": [list(w.shape) for w in weights],
        "x": x.tolist(),
        "y": y.tolist(),
        "example_norms": flat(example_norms(model, x, y, loss)),
        "results": [
            {
                "optimizer": name,
                "l2_norm_clip": clip,
                "gradients": [flat(g) for g in clipped_mean(name, model, x, y, loss, clip)],
            }
            for name in OPTIMIZERS
            for clip in CLIPS
        ],
    }


def document():
    return {
        "origin": {
            "script": "benchmarks/reference/make_tfp_golden.py",
            "optimizers": [f"tensorflow_privacy.{name}" for name in OPTIMIZERS],
            "packages": {
                "tensorflow-privacy": tensorflow_privacy.__version__,
                "tensorflow": tf.__version__,
                "numpy": np.__version__,
            },
        },
        "format": (
            "cases[name].weights and results[i].gradients hold one flattened row-major float32 "
            "array a variable (kernel before bias, first layer first), with the given shapes. "
            "gradients = sum over examples of the clipped gradients / number of examples."
        ),
        "cases": {
            "linear": {
                "model": "Dense(1, use_bias=False); loss of an example = y_true * y_pred",
                **run(linear_case),
            },
            "mlp": {
                "model": "Dense(7, tanh), Dense(3); loss of an example = mean over the 3 outputs "
                "of (y_true - y_pred)^2",
                **run(mlp_case),
            },
        },
    }


def main():
    parser = argparse.ArgumentParser(description="Writes golden values of clipping.")
    parser.add_argument(
        "--output", type=pathlib.Path, default=ROOT / "tests/optimizers/tfp_golden.json"
    )
    output = parser.parse_args().output
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(document(), separators=(",", ":")) + "\n")
    print(f"{output}: {output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
