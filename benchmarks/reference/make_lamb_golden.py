"""Writes golden values of TensorFlow Addons' LAMB for the tests of ``DPLamb``.

TensorFlow Addons' LAMB is the one with decoupled weight decay inside the trust ratio, as in the
paper (You et al. 2020, arXiv 1904.00962). It needs Keras 2, so it runs in an environment of its
own (Python 3.11):

    python3.11 -m venv .venvs/legacy
    .venvs/legacy/bin/pip install tensorflow-cpu==2.15.1 tensorflow-privacy==0.9.0 \
        tensorflow-addons==0.23.0
    .venvs/legacy/bin/python benchmarks/reference/make_lamb_golden.py

Ten steps are taken on small float32 variables with gradients from a formula, one run a case.
Initial values and gradients are multiples of 1/16384, hence exact in JSON and in float32.

Note two habits of this LAMB that the cases show: an empty ``exclude_from_layer_adaptation`` means
"the same as ``exclude_from_weight_decay``", and patterns are regular expressions searched in the
variable's name.
"""

import argparse
import json
import os
import pathlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

import numpy as np
import tensorflow as tf
import tensorflow_addons as tfa

ROOT = pathlib.Path(__file__).resolve().parents[2]
STEPS = 10

# name, shape, scale of the initial values
VARIABLES = (
    ("dense/kernel", (3, 4), 0.5),
    ("dense/bias", (4,), 0.0),
    ("norm/gamma", (4,), 1.0),
    ("head/kernel", (2, 2, 1, 2), 0.0625),
    ("head/bias", (2,), 0.25),
    ("scale", (1,), 2.0),
    ("temperature", (), -0.5),
)

CASES = (
    ("no_weight_decay", "regular", {"learning_rate": 0.01}),
    ("weight_decay", "regular", {"learning_rate": 0.01, "weight_decay": 0.01}),
    (
        "exclude_bias_from_weight_decay",
        "regular",
        {"learning_rate": 0.01, "weight_decay": 0.01, "exclude_from_weight_decay": ["bias"]},
    ),
    (
        "exclude_bias_from_weight_decay_and_gamma_from_layer_adaptation",
        "regular",
        {
            "learning_rate": 0.01,
            "weight_decay": 0.01,
            "exclude_from_weight_decay": ["bias"],
            "exclude_from_layer_adaptation": ["gamma"],
        },
    ),
    (
        "exclude_by_regular_expression",
        "regular",
        {
            "learning_rate": 0.01,
            "weight_decay": 0.1,
            "exclude_from_weight_decay": ["^dense/", "temp"],
            "exclude_from_layer_adaptation": ["head/(kernel|bias)"],
        },
    ),
    (
        "other_betas_and_epsilon",
        "regular",
        {
            "learning_rate": 0.02,
            "beta_1": 0.5,
            "beta_2": 0.75,
            "epsilon": 0.001,
            "weight_decay": 0.02,
        },
    ),
    ("zero_gradients", "zero", {"learning_rate": 0.01}),
    ("zero_gradients_weight_decay", "zero", {"learning_rate": 0.01, "weight_decay": 0.01}),
    ("gradients_that_stop", "stops", {"learning_rate": 0.01, "weight_decay": 0.01}),
)


def wave(shape, phase):
    """Numbers in [-1, 1] that look irregular, multiples of 1/1024."""
    index = np.arange(int(np.prod(shape)), dtype=np.float64)
    values = np.sin(1.7 * index + 0.9 * phase) * np.cos(0.31 * index * phase + 0.4)
    return (np.round(values * 1024) / 1024).reshape(shape).astype(np.float32)


def initial_value(number):
    _, shape, scale = VARIABLES[number]
    if shape == ():
        return np.float32(scale)
    return wave(shape, number + 1) * np.float32(scale) + np.float32(0)  # + 0: no negative zeros


def gradient(kind, step, number):
    _, shape, _ = VARIABLES[number]
    if kind == "zero" or (kind == "stops" and step >= 4):
        return np.zeros(shape, np.float32)
    return wave(shape, 2 * number + 3 * step + 5)


def run(kind, arguments):
    """The values of all variables after each step."""
    variables = [
        tf.Variable(initial_value(n), name=name) for n, (name, _, _) in enumerate(VARIABLES)
    ]
    assert [v.name for v in variables] == [f"{name}:0" for name, _, _ in VARIABLES]
    optimizer = tfa.optimizers.LAMB(**arguments)
    after = []
    for step in range(STEPS):
        pairs = [(tf.constant(gradient(kind, step, n)), v) for n, v in enumerate(variables)]
        optimizer.apply_gradients(pairs)
        after.append([[shortest(x) for x in np.ravel(v.numpy())] for v in variables])
    return after


def shortest(value):
    """The shortest decimal number that reads back to the same float32."""
    return float(np.format_float_scientific(np.float32(value), unique=True))


def document():
    return {
        "origin": {
            "script": "benchmarks/reference/make_lamb_golden.py",
            "optimizer": "tensorflow_addons.optimizers.LAMB",
            "packages": {
                "tensorflow-addons": tfa.__version__,
                "tensorflow": tf.__version__,
                "numpy": np.__version__,
            },
        },
        "format": (
            "Arrays are flattened in row-major order, float32. gradients[kind][step][variable] is "
            "applied at that step; cases[i].after[step][variable] is the value right after it."
        ),
        "variables": [
            {"name": name, "shape": list(shape), "initial": np.ravel(initial_value(n)).tolist()}
            for n, (name, shape, _) in enumerate(VARIABLES)
        ],
        "gradients": {
            kind: [
                [np.ravel(gradient(kind, step, n)).tolist() for n in range(len(VARIABLES))]
                for step in range(STEPS)
            ]
            for kind in ("regular", "zero", "stops")
        },
        "cases": [
            {"name": name, "gradients": kind, "arguments": arguments, "after": run(kind, arguments)}
            for name, kind, arguments in CASES
        ],
    }


def main():
    parser = argparse.ArgumentParser(description="Writes the golden values of LAMB.")
    parser.add_argument(
        "--output", type=pathlib.Path, default=ROOT / "tests/optimizers/lamb_golden.json"
    )
    output = parser.parse_args().output
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(document(), separators=(",", ":")) + "\n")
    print(f"{output}: {output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
